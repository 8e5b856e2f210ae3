//! KVM functions that the rust-vmm crates do not wrap.

mod capabilities;
mod exit;
mod kick;
mod mapping;
mod open;
mod ring;
mod state;
mod timer;
mod vm;

pub use capabilities::{Capabilities, Capability, Need};
pub use exit::internal_error;
pub use kick::{ImmediateExit, register_kick_handler};
pub use open::{Unusable, open, open_device};
pub use ring::RingMap;
pub use state::{get_pdptrs, get_xsave, ioapic_listens, set_sregs_with_pdptrs, set_xsave};
pub use timer::ExitTimer;
pub use vm::KvmVm;
