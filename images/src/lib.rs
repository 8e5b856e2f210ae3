//! The guests that Driftline ships: the self-checking payload, built from source and embedded.
//!
//! The payload rewrites the pages of its working set in a loop. Before each write it checks that
//! the page still has the content of its last write. It also re-reads all pages in the background.
//! It detects and counts every error that a migration or a checkpoint makes in memory and reports
//! it on COM1. It also reports the longest time for which it did not run.
//!
//! | module | owns |
//! | --- | --- |
//! | [`PayloadSpec`], [`PayloadSpecError`] | the payload's settings: `payload,ws=64M,rate=320M,pattern=zipf` |
//! | [`workload`] | the payload's loop, in code that the guest and the host share |
//! | [`PayloadMessage`], [`PayloadReport`] | the lines it prints |
//! | `payload/`, `build.rs` | the guest around it, and how it is compiled |
//!
//! # The guest
//!
//! The payload boots by PVH. It needs kvmclock, a local APIC whose ids count from 0, and COM1.
//! Guest RAM must be zero where it has not been written. The loop runs in ring 3 unless configured
//! otherwise.
//!
//! ```text
//! 0x00_8000   trampoline for the other vCPUs
//! 0x10_0000   image, then stacks, clock pages, page directories
//! 0x80_0000   table of expected generations (patterns random and zipf): 4 bytes a page
//! 0x100_0000  working set, or higher if the table is large; continues above the hole below 4 GiB
//! ```
//!
//! QEMU runs it, too; `payload.elf` has the bytes of [`PAYLOAD_ELF`]:
//!
//! ```text
//! qemu-system-x86_64 -M microvm,x-option-roms=off -accel kvm -cpu host -nodefaults -no-reboot \
//!     -display none -serial stdio -m 256M -smp 2 -kernel payload.elf \
//!     -append "vcpus=2 rate=max seconds=5"
//! ```
//!
//! At its end the payload powers off by ACPI (0x2000 to port 0x604). Failing that, it resets by the
//! keyboard controller (0xfe to port 0x64), or else by a triple fault.

#[cfg(test)]
mod laws;
#[cfg(test)]
mod loop_laws;
mod report;
mod spec;
pub mod workload;

/// The payload guest: an ELF file for x86-64 with a PVH entry.
pub static PAYLOAD_ELF: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/payload.elf"));

pub use report::{PayloadIo, PayloadMessage, PayloadReport};
pub use spec::PayloadSpecError;
pub use workload::PayloadSpec;
