//! KVM functions that the rust-vmm crates do not wrap.

mod capabilities;
mod control_registers;
mod exit;
mod kick;
mod mapping;
mod open;
mod ring;
mod state;
mod timer;
mod vm;

pub use capabilities::{Capabilities, Capability, Need};
pub(crate) use control_registers::{CR0_PG, CR4_PAE, EFER_LMA};
pub(crate) use exit::internal_error;
pub(crate) use kick::{ImmediateExit, register_kick_handler};
pub use open::{DeviceUnusable, Unusable};
pub(crate) use open::{open, open_device};
pub(crate) use ring::RingMap;
pub(crate) use state::{get_pdptrs, get_xsave, ioapic_listens, set_sregs_with_pdptrs, set_xsave};
pub(crate) use timer::ExitTimer;
pub(crate) use vm::KvmVm;
