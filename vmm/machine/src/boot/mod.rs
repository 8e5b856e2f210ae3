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
mod defect;
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

use std::fs::File;
use std::io::Cursor;
use std::path::Path;

use driftline_store::open_regular;

use crate::config::{Boot, HostConfig, MachineConfig, OpenedFile, OpenedFiles};
use crate::devices::DevicePlacement;
use crate::memory::Memory;
use loaded::{Loaded, Start};

pub use cmdline::LINUX_CMDLINE_BYTES;
pub(crate) use cmdline::with_parameters;
pub use error::BootError;
pub(crate) use firmware::{generation_frame, renew_generation_id};
pub(crate) use platform::Entry;
use platform::{DescribedMachine, GuestRange};
pub(crate) use registers::set_registers;

/// Loads the kernel of `config`, or the embedded image that it names, into `memory`. The machine
/// has virtio devices at `devices`.
///
/// # Errors
///
/// The files cannot be read or booted, or something does not fit in guest memory.
pub(crate) fn load(
    config: &MachineConfig,
    host: &HostConfig,
    memory: &Memory,
    devices: &[DevicePlacement],
) -> Result<Entry, BootError> {
    let machine = DescribedMachine { vcpus: config.vcpus, devices, has_keyboard: host.keyboard };
    let OpenedFiles { kernel: opened_kernel, initrd: opened_initrd, .. } = &host.opened;
    match &config.boot {
        Boot::Payload(spec) => {
            let no_image = || BootError::NoImage { name: spec.clone() };
            let image = host.image.as_ref().ok_or_else(no_image)?;
            let mut elf = Cursor::new(image.elf);
            let kernel = kernel::load(&format!("guest \"{spec}\""), &mut elf, memory)?;
            enter(machine, memory, &kernel, None, &image.cmdline)
        }
        Boot::Kernel { kernel, initrd, cmdline, bare } => {
            let what = format!("kernel \"{}\"", kernel.display());
            let loaded =
                kernel::load(&what, &mut open(&what, kernel, opened_kernel.as_ref())?, memory)?;
            let initrd = match initrd {
                Some(path) => {
                    let what = format!("initrd \"{}\"", path.display());
                    let file = open(&what, path, opened_initrd.as_ref())?;
                    Some(kernel::load_initrd(&what, file, memory, &loaded)?)
                }
                None => None,
            };
            let cmdline = cmdline::assemble(cmdline, *bare, devices)?;
            enter(machine, memory, &loaded, initrd, &cmdline)
        }
    }
}

/// Writes the boot information in the kernel's protocol, and returns its entry.
fn enter(
    machine: DescribedMachine<'_>,
    memory: &Memory,
    kernel: &Loaded,
    initrd: Option<GuestRange>,
    cmdline: &str,
) -> Result<Entry, BootError> {
    let rsdp = firmware::write(memory, kernel, machine)?;
    let segments = &kernel.segments;
    match &kernel.start {
        Start::Pvh { rip } => pvh::write(memory, *rip, segments, initrd, cmdline, rsdp),
        Start::Linux64 { rip, header } => {
            let inputs = zero_page::BootInputs { header, segments, initrd, cmdline, rsdp };
            zero_page::write(memory, *rip, &inputs)
        }
    }
}

/// Opens a regular file, unless it is open already. A directory would fail later with a less clear
/// message.
fn open(what: &str, path: &Path, opened: Option<&OpenedFile>) -> Result<File, BootError> {
    let unreadable = |cause| BootError::Unreadable { what: what.to_owned(), cause };
    if let Some(opened) = opened {
        return opened.rewound().map_err(unreadable);
    }
    open_regular(path).map_err(unreadable)
}

#[cfg(test)]
mod tests {
    use std::io::Read;

    use rustix::fs::{CWD, FileType, Mode, mknodat};

    use super::*;

    #[test]
    fn only_a_regular_file_is_opened() {
        let dir = tempfile::tempdir().unwrap();
        let (fifo, file) = (dir.path().join("fifo"), dir.path().join("file"));
        mknodat(CWD, &fifo, FileType::Fifo, Mode::RUSR | Mode::WUSR, 0).unwrap();
        std::fs::write(&file, "kernel").unwrap();
        let refused = |path: &Path| open("kernel \"k\"", path, None).unwrap_err().to_string();
        for path in [dir.path(), &fifo] {
            let message = "kernel \"k\" cannot be read: it is not a regular file";
            assert_eq!(refused(path), message, "{}", path.display());
        }
        assert!(refused(&dir.path().join("none")).contains("No such file"));
        assert!(open("kernel \"k\"", &file, None).is_ok());
    }

    #[test]
    fn open_file_is_read_from_its_start_again() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("kernel");
        std::fs::write(&path, "kernel").unwrap();
        let opened = OpenedFile::from(File::open(&path).unwrap());
        std::fs::remove_file(&path).unwrap();
        for _ in 0..2 {
            let mut content = String::new();
            let mut file = open("kernel \"k\"", &path, Some(&opened)).unwrap();
            file.read_to_string(&mut content).unwrap();
            assert_eq!(content, "kernel");
        }
    }
}
