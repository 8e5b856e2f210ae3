//! Putting a kernel into guest memory, by the PVH boot protocol: the ELF file, the initial RAM disk,
//! the command line, what the guest is told of its memory and processors, and its first registers.

mod elf;
mod mptable;
mod pvh;
mod registers;

use std::fs::File;
use std::io::Cursor;
use std::path::Path;

use dirty_tracker::Layout;
use images::PayloadSpec;

use crate::config::{Boot, MachineConfig};
use crate::memory::Memory;

pub use registers::set_registers;

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
    /// The kernel is no ELF file.
    #[error("{0} is no ELF file")]
    NotElf(String),
    /// The kernel is for another processor.
    #[error("{what} is an ELF file for another architecture (machine {machine}), not for x86")]
    WrongArchitecture {
        /// The file, as the user knows it.
        what: String,
        /// `e_machine`.
        machine: u16,
    },
    /// The kernel does not say where PVH boot enters it.
    #[error("{0} has no PVH note (XEN_ELFNOTE_PHYS32_ENTRY), so there is no way to enter it")]
    NoPvhNote(String),
    /// The kernel's headers contradict themselves or its length.
    #[error("{what} is a damaged ELF file: {why}")]
    Damaged {
        /// The file, as the user knows it.
        what: String,
        /// What is wrong.
        why: String,
    },
    /// Something has no room in guest memory.
    #[error("{what} does not fit in guest memory of {mem_bytes} bytes: {why}")]
    DoesNotFit {
        /// What has no room.
        what: String,
        /// Guest memory.
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
        let mem_bytes = layout.frames() * dirty_tracker::PAGE_SIZE;
        Self::DoesNotFit { what: what.into(), mem_bytes, why: why.into() }
    }
}

/// A range of guest physical addresses that is taken: start and end.
pub(crate) type Taken = (u64, u64);

/// Where a loaded kernel begins.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Entry {
    /// Its first instruction.
    pub rip: u64,
    /// Where the start info lies, for RBX.
    pub start_info: u64,
}

/// Loads what `config` boots into `memory`.
pub fn load(config: &MachineConfig, memory: &Memory) -> Result<Entry, BootError> {
    let vcpus = config.vcpus;
    match &config.boot {
        Boot::Payload(spec) => {
            let spec: PayloadSpec = spec.parse().map_err(|e| BootError::Config(format!("{e}")))?;
            let mut elf = Cursor::new(images::PAYLOAD_ELF);
            let loaded = elf::load("the payload", &mut elf, memory)?;
            pvh::write(memory, &loaded, None, &spec.cmdline(vcpus.into()), vcpus)
        }
        Boot::Kernel { kernel, initrd, cmdline } => {
            let what = format!("kernel \"{}\"", kernel.display());
            let loaded = elf::load(&what, &mut open(&what, kernel)?, memory)?;
            let initrd = match initrd {
                Some(path) => {
                    let what = format!("initrd \"{}\"", path.display());
                    Some(pvh::load_initrd(&what, open(&what, path)?, memory, &loaded)?)
                }
                None => None,
            };
            pvh::write(memory, &loaded, initrd, cmdline, vcpus)
        }
    }
}

/// Opens a regular file: a directory or a pipe would fail later with a worse sentence.
fn open(what: &str, path: &Path) -> Result<File, BootError> {
    let unreadable = |cause| BootError::Unreadable { what: what.to_owned(), cause };
    let file = File::open(path).map_err(unreadable)?;
    if !file.metadata().map_err(unreadable)?.is_file() {
        return Err(unreadable(std::io::Error::other("it is not a regular file")));
    }
    Ok(file)
}
