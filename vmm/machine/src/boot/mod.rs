//! Loads a kernel into guest memory and describes the machine to it.
//!
//! ```text
//! file --kernel--> ELF with PVH note    start info   32 bits, no paging
//!              --> ELF without, bzImage zero page    64 bits, identity tables
//! ```
//!
//! The MP table, the ACPI tables and the generation ID (`firmware`) lie beside either. The memory
//! map reserves them.

mod acpi;
mod bzimage;
mod cmdline;
mod elf;
mod firmware;
#[cfg(any(test, fuzzing))]
pub(crate) mod fuzz;
mod kernel;
mod loaded;
mod map;
mod mptable;
mod pvh;
mod registers;
mod zero_page;

use std::fs::File;
use std::io::Cursor;
use std::path::Path;

use driftline_dirty_tracker::Layout;
use driftline_images::PayloadSpec;
use driftline_images::workload::Placement;

use crate::config::{Boot, MachineConfig};
use crate::memory::Memory;
use loaded::{Loaded, Start};

pub(crate) use firmware::{generation_frame, renew_generation_id};
pub use registers::set_registers;

/// Addresses of KVM's interrupt controllers.
const LOCAL_APIC: u32 = 0xfee0_0000;
const IOAPIC: u32 = 0xfec0_0000;

/// Returns the first APIC id that no vCPU has.
const fn ioapic_id(vcpus: u8) -> u8 {
    vcpus
}

/// Why a guest cannot be booted.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum BootError {
    /// A file cannot be read.
    #[error("{what} cannot be read: {cause}")]
    Unreadable {
        /// The file, as the user knows it.
        what: String,
        /// The system's answer.
        cause: std::io::Error,
    },
    /// The file is not a kernel.
    #[error("{0} is neither an ELF file nor a bzImage")]
    NoKernel(String),
    /// The file is an ELF file for another purpose.
    #[error(
        "{what} is {is}, not a kernel: --kernel takes a vmlinux, another kernel as a static ELF file, or a bzImage"
    )]
    Program {
        /// The file, as the user knows it.
        what: String,
        /// What it is instead.
        is: &'static str,
    },
    /// The kernel is for another processor.
    #[error("{what} is an ELF file for another architecture (machine {machine}), not for x86")]
    WrongArchitecture {
        /// The file, as the user knows it.
        what: String,
        /// `e_machine`.
        machine: u16,
    },
    /// A 32-bit kernel does not name its PVH entry.
    #[error(
        "{0} is a 32-bit ELF file without a PVH note (XEN_ELFNOTE_PHYS32_ENTRY), so there is no way to enter it"
    )]
    NoPvhNote(String),
    /// A bzImage's setup header asks for something that this VMM cannot provide.
    #[error("{what} cannot be booted: {why}")]
    BadHeader {
        /// The file, as the user knows it.
        what: String,
        /// The field and its value.
        why: String,
    },
    /// The kernel's headers contradict themselves or its length.
    #[error("{what} is a damaged ELF file: {why}")]
    Damaged {
        /// The file, as the user knows it.
        what: String,
        /// What is wrong.
        why: String,
    },
    /// Something does not fit in guest memory.
    #[error("{what} does not fit in guest memory of {mem_bytes} bytes: {why}")]
    DoesNotFit {
        /// What does not fit.
        what: String,
        /// Size of guest memory, in bytes.
        mem_bytes: u64,
        /// Where it should have gone.
        why: String,
    },
    /// The configuration asks for something that does not exist.
    #[error("{0}")]
    Config(String),
}

impl BootError {
    fn does_not_fit(what: impl Into<String>, layout: &Layout, why: impl Into<String>) -> Self {
        let mem_bytes = layout.frames() * driftline_dirty_tracker::PAGE_SIZE;
        Self::DoesNotFit { what: what.into(), mem_bytes, why: why.into() }
    }
}

/// A range of guest physical addresses that is in use: start and end.
pub(crate) type Taken = (u64, u64);

/// Registers and interrupt of a virtio device.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct MmioSlot {
    /// Guest physical address of its page of registers.
    pub base: u64,
    /// Pin of the IOAPIC.
    pub gsi: u32,
}

/// Where a loaded kernel is entered, and where its boot information lies. All values are guest
/// physical addresses.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Entry {
    /// 32-bit protected mode without paging.
    Pvh {
        /// Its first instruction.
        rip: u64,
        /// The start info, for RBX.
        start_info: u64,
    },
    /// Long mode.
    Linux64 {
        /// Its first instruction.
        rip: u64,
        /// The zero page, for RSI.
        zero_page: u64,
        /// The identity tables, for CR3.
        page_tables: u64,
        /// The descriptor table.
        gdt: u64,
    },
}

/// Loads the kernel or payload of `config` into `memory`, for a machine with virtio devices at
/// `devices`.
///
/// # Errors
/// The files cannot be read or booted, or something does not fit in guest memory.
pub fn load(
    config: &MachineConfig,
    memory: &Memory,
    devices: &[MmioSlot],
) -> Result<Entry, BootError> {
    match &config.boot {
        Boot::Payload(spec) => {
            let what = format!("the guest \"{spec}\"");
            let spec: PayloadSpec = spec.parse().map_err(|e| BootError::Config(format!("{e}")))?;
            place_payload(&spec, config.vcpus, memory)
                .map_err(|why| BootError::Config(format!("{what} does not fit: {why}")))?;
            let mut elf = Cursor::new(driftline_images::PAYLOAD_ELF);
            let kernel = kernel::load("the payload", &mut elf, memory)?;
            enter(config, memory, &kernel, None, &spec.cmdline(config.vcpus.into()), devices)
        }
        Boot::Kernel { kernel, initrd, cmdline, bare } => {
            let what = format!("kernel \"{}\"", kernel.display());
            let loaded = kernel::load(&what, &mut open(&what, kernel)?, memory)?;
            let initrd = match initrd {
                Some(path) => {
                    let what = format!("initrd \"{}\"", path.display());
                    Some(kernel::load_initrd(&what, open(&what, path)?, memory, &loaded)?)
                }
                None => None,
            };
            let cmdline = cmdline::assemble(cmdline, *bare, devices)?;
            enter(config, memory, &loaded, initrd, &cmdline, devices)
        }
    }
}

/// Returns where the payload's working set lies in `memory`. The error is a sentence for the user.
pub(crate) fn place_payload(
    spec: &PayloadSpec,
    vcpus: u8,
    memory: &Memory,
) -> Result<Placement, String> {
    let slots = memory.layout().slots().map(|s| (s.base.gpa(), s.run().bytes()));
    let placement = Placement::new(spec, slots).map_err(|e| {
        let base = Placement::base(spec);
        format!(
            "its working set takes {} pages, and guest memory has {} at or above {base:#x}",
            e.wanted, e.available
        )
    })?;
    match spec.ws_pages() {
        pages if pages < u64::from(vcpus) => {
            Err(format!("its working set has {pages} pages, too few for {vcpus} vCPUs"))
        }
        _ => Ok(placement),
    }
}

/// Writes the boot information in the kernel's protocol, and returns its entry.
fn enter(
    config: &MachineConfig,
    memory: &Memory,
    kernel: &Loaded,
    initrd: Option<Taken>,
    cmdline: &str,
    devices: &[MmioSlot],
) -> Result<Entry, BootError> {
    let rsdp = firmware::write(memory, kernel, config.vcpus, devices)?;
    let segments = &kernel.segments;
    match &kernel.start {
        Start::Pvh { rip } => pvh::write(memory, *rip, segments, initrd, cmdline, rsdp),
        Start::Linux64 { rip, header } => {
            let given = zero_page::Given { header, segments, initrd, cmdline, rsdp };
            zero_page::write(memory, *rip, &given)
        }
    }
}

/// Opens a regular file. A directory or a pipe would fail later with a less clear message.
fn open(what: &str, path: &Path) -> Result<File, BootError> {
    let unreadable = |cause| BootError::Unreadable { what: what.to_owned(), cause };
    let file = File::open(path).map_err(unreadable)?;
    if !file.metadata().map_err(unreadable)?.is_file() {
        return Err(unreadable(std::io::Error::other("it is not a regular file")));
    }
    Ok(file)
}
