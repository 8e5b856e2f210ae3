//! The KVM machine of Driftline.
//!
//! This is the only crate that opens `/dev/kvm`. A [`vm::Vm`] is a [`driftline_guest::Guest`] that
//! also starts and ends; the machine is one. The modules of each row in the table may use those of
//! the rows above, and each other without cycles.
//!
//! | modules | own |
//! | --- | --- |
//! | `actor`, `limits`, `codec`, `host_memory`, `size`, `cpu_model`, `end_reason`, `local_time`, `stack_text`, `terminal`, `fail_point`, `schedule`, `histogram`, `inherited`, `start_memory`, `thread_end`, `tracking`, `wall_clock` | leaves, which use no other module of this crate |
//! | `fatal_signals`, `signals`, `log`, `exit`, `sandbox`, `log_thread`, `last_work`, `pm_qos`, `pool`, `socket` | the process: its log, its exit, what its threads may do |
//! | `memory`, `metadata`, `config` | guest memory; a guest's metadata; a machine's configuration |
//! | `kvm`, `measure`, `sources` | KVM's ioctls; hooks for measurements; the sources of dirty frames |
//! | `devices`, `boot`, `vm`, `vcpu`, `throttle` | devices; loading the kernel; the trait of a guest; vCPU threads; throttling them |
//! | `collector`, `machine`, `export` | harvesting; the machine as a whole; its state as an ELF core |
//! | `doctor` | what the host offers |

pub mod actor;
pub mod boot;
pub mod codec;
mod collector;
pub mod config;
mod cpu_model;
pub mod devices;
pub mod doctor;
mod end_reason;
pub mod exit;
pub mod export;
mod fail_point;
pub mod fatal_signals;
#[cfg(any(test, fuzzing))]
#[doc(hidden)]
pub mod fuzzing;
pub mod histogram;
mod host_memory;
pub mod inherited;
pub mod kvm;
pub mod last_work;
pub mod limits;
mod local_time;
pub mod log;
pub mod log_thread;
pub mod machine;
pub mod measure;
pub mod memory;
pub mod metadata;
pub mod pm_qos;
mod pool;
pub mod sandbox;
pub mod schedule;
pub mod signals;
pub mod size;
pub mod socket;
mod sources;
mod stack_text;
pub mod start_memory;
mod terminal;
#[cfg(any(test, feature = "testing"))]
pub mod testing;
mod thread_end;
mod throttle;
pub mod tracking;
mod vcpu;
pub mod vm;
pub mod wall_clock;

pub use host_memory::HostMemory;
pub use local_time::{local_time, local_time_ns};
