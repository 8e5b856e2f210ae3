//! The KVM machine of Driftline, and the threads backend for hosts without KVM.
//!
//! This is the only crate that opens `/dev/kvm`. A [`vm::Vm`] is a [`driftline_guest::Guest`] that
//! also starts and ends; both backends implement it. The modules of each row in the table may use
//! those of the rows above.
//!
//! | modules | own |
//! | --- | --- |
//! | `actor`, `limits`, `codec`, `host_memory`, `size`, `cpu_model`, `end_reason`, `local_time`, `signals`, `terminal`, `fail_point`, `schedule`, `histogram`, `tracking` | leaves, which use no other module of this crate |
//! | `log`, `exit`, `sandbox`, `log_thread`, `latency`, `socket` | the process: its log, its exit, what its threads may do |
//! | `memory`, `config` | guest memory; a machine's configuration |
//! | `kvm`, `sinks`, `sources` | KVM's ioctls; where dirty frames come from |
//! | `devices`, `boot`, `vm`, `vcpu` | devices; loading the kernel; the trait of a guest; vCPU threads |
//! | `collector`, `machine`, `export` | harvesting and throttling; the machine as a whole; its state as an ELF core |
//! | `threads`, `backend`, `doctor` | the threads backend; the choice of a backend; what the host offers |

mod actor;
pub mod backend;
pub mod boot;
mod codec;
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
pub mod histogram;
mod host_memory;
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
pub mod signals;
pub mod sinks;
pub mod size;
pub mod socket;
mod sources;
mod terminal;
#[cfg(any(test, feature = "testing"))]
pub mod testing;
pub mod threads;
pub mod tracking;
mod vcpu;
pub mod vm;

pub use host_memory::HostMemory;
pub use local_time::local_time;
