//! Exports stored guests for other programs.

mod elf_core;

use std::fs::File;
use std::path::Path;

use driftline_dirty_tracker::Layout;
use driftline_guest::{Section, SectionTag};
use driftline_store::{ExportReport, Store, StoreError};

use self::elf_core::CoreFile;
use crate::machine::registers;
use crate::vcpu::CoreRegisters;

/// Writes `epoch` of `store`, or its latest, to `file` as an ELF core, which gdb and crash open:
/// the registers of every vCPU as notes, and memory by guest physical address, with holes where it
/// is zero. `file` must be empty; `path` is for messages. All content that is read is checked. The
/// core is durable on return.
///
/// # Errors
///
/// The store is unreadable or damaged, or the file cannot be written; then its content is unusable.
/// A guest of the threads backend has no vCPUs and therefore no core.
pub fn elf_core(
    store: &Store,
    epoch: Option<u64>,
    file: &File,
    path: &Path,
) -> Result<ExportReport, StoreError> {
    store.export_with(epoch, file, path, |layout: &Layout, sections: &[Section]| {
        let vcpus = sections.iter().filter(|section| section.tag == SectionTag::KVM_VCPU).count();
        let vcpus = u8::try_from(vcpus).map_err(std::io::Error::other)?;
        if vcpus == 0 {
            return Err(std::io::Error::other(
                "its guest has no vCPUs: it is of the threads backend",
            ));
        }
        let registers: Vec<CoreRegisters> =
            registers(sections, vcpus).map_err(std::io::Error::other)?;
        let core = CoreFile::begin(file, layout, &registers)?;
        Ok(Box::new(move |gfn| core.place(gfn)))
    })
}
