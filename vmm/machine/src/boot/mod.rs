//! Loads a kernel into guest memory and describes the machine to it.
//!
//! ```text
//! file --kernel--> ELF with PVH note    start info   32 bits, no paging
//!              --> ELF without, bzImage zero page    64 bits, identity tables
//! ```
//!
//! With either protocol, the guest finds the MP table, the ACPI tables and the generation ID
//! (`firmware`) in ranges that the memory map reserves.

mod acpi;
mod bzimage;
mod cmdline;
mod elf;
mod error;
mod firmware;
#[cfg(any(test, fuzzing))]
pub(crate) mod fuzz;
mod kernel;
mod loaded;
mod map;
mod mptable;
mod platform;
mod pvh;
mod registers;
mod zero_page;

use std::fs::{self, File};
use std::io::{self, Cursor};
use std::path::Path;

use crate::config::{Boot, Image, MachineConfig};
use crate::memory::Memory;
use loaded::{Loaded, Start};

pub use error::BootError;
pub(crate) use firmware::{generation_frame, renew_generation_id};
use platform::GuestRange;
pub(crate) use platform::{Entry, MmioSlot};
pub(crate) use registers::set_registers;

/// Loads the kernel of `config`, or the embedded `image` that it names, into `memory`. The machine
/// has virtio devices at `devices`.
///
/// # Errors
///
/// The files cannot be read or booted, or something does not fit in guest memory.
pub(crate) fn load(
    config: &MachineConfig,
    image: Option<&Image>,
    memory: &Memory,
    devices: &[MmioSlot],
) -> Result<Entry, BootError> {
    match &config.boot {
        Boot::Payload(spec) => {
            let image = image.ok_or_else(|| BootError::NoImage(spec.clone()))?;
            let mut elf = Cursor::new(image.elf);
            let kernel = kernel::load(&format!("guest \"{spec}\""), &mut elf, memory)?;
            enter(config, memory, &kernel, None, &image.cmdline, devices)
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

/// Writes the boot information in the kernel's protocol, and returns its entry.
fn enter(
    config: &MachineConfig,
    memory: &Memory,
    kernel: &Loaded,
    initrd: Option<GuestRange>,
    cmdline: &str,
    devices: &[MmioSlot],
) -> Result<Entry, BootError> {
    let rsdp = firmware::write(memory, kernel, config.vcpus, devices)?;
    let segments = &kernel.segments;
    match &kernel.start {
        Start::Pvh { rip } => pvh::write(memory, *rip, segments, initrd, cmdline, rsdp),
        Start::Linux64 { rip, header } => {
            let inputs = zero_page::BootInputs { header, segments, initrd, cmdline, rsdp };
            zero_page::write(memory, *rip, &inputs)
        }
    }
}

/// Opens a regular file. A directory would fail later with a less clear message.
fn open(what: &str, path: &Path) -> Result<File, BootError> {
    let unreadable = |cause| BootError::Unreadable { what: what.to_owned(), cause };
    // Checked before the file is opened: opening a FIFO would wait for its other end.
    if !fs::metadata(path).map_err(unreadable)?.is_file() {
        return Err(unreadable(io::Error::other("it is not a regular file")));
    }
    File::open(path).map_err(unreadable)
}

#[cfg(test)]
mod tests {
    use rustix::fs::{CWD, FileType, Mode, mknodat};

    use super::*;

    #[test]
    fn only_a_regular_file_is_opened() {
        let dir = tempfile::tempdir().unwrap();
        let (fifo, file) = (dir.path().join("fifo"), dir.path().join("file"));
        mknodat(CWD, &fifo, FileType::Fifo, Mode::RUSR | Mode::WUSR, 0).unwrap();
        std::fs::write(&file, "kernel").unwrap();
        let refused = |path: &Path| open("kernel \"k\"", path).unwrap_err().to_string();
        for path in [dir.path(), &fifo] {
            let message = "kernel \"k\" cannot be read: it is not a regular file";
            assert_eq!(refused(path), message, "{}", path.display());
        }
        assert!(refused(&dir.path().join("none")).contains("No such file"));
        assert!(open("kernel \"k\"", &file).is_ok());
    }
}
