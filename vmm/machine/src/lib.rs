//! The machine.
//!
//! The only crate that opens `/dev/kvm`. A [`vm::Vm`] is a [`driftline_guest::Guest`] with a beginning
//! and an end; there are two: the KVM machine, and the threads backend for hosts without KVM.

pub mod backend;
pub mod boot;
mod collector;
pub mod config;
mod cpu_model;
pub mod devices;
pub mod doctor;
mod end_reason;
pub mod exit;
pub mod export;
mod fail_point;
#[cfg(any(test, fuzzing))]
#[doc(hidden)]
pub mod fuzzing;
pub mod kvm;
pub mod latency;
pub mod limits;
mod local_time;
pub mod log;
pub mod log_thread;
pub mod machine;
pub mod memory;
pub mod sandbox;
pub mod schedule;
mod signals;
pub mod sinks;
pub mod size;
pub mod socket;
mod sources;
mod terminal;
#[cfg(any(test, feature = "testing"))]
pub mod testing;
pub mod threads;
mod vcpu;
pub mod vm;

pub use local_time::local_time;
