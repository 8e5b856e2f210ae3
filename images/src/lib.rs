//! The guests that Driftline brings along: the self-checking payload, built from source and embedded.

#[cfg(test)]
mod laws;
#[cfg(test)]
mod loop_laws;
mod report;
mod spec;
pub mod workload;

/// The payload guest: an ELF file for x86-64 with a PVH entry.
pub static PAYLOAD_ELF: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/payload.elf"));

pub use report::{Message, Report};
pub use spec::SpecError;
pub use workload::PayloadSpec;
