//! Stored guests for other programs.

mod core;

use std::fs::File;
use std::path::Path;

use driftline_dirty_tracker::Layout;
use driftline_guest::{Section, section_tags as tags};
use driftline_store::{ExportReport, Store, StoreError};

use self::core::CoreFile;
use crate::machine::registers;
use crate::vcpu::Registers;

/// Writes `epoch` of `store`, or its latest, to `file`, an empty one, as an ELF core: the registers
/// of every vCPU as notes, and memory by guest physical address, with holes where it is zero. gdb
/// and crash open it. `path` is for messages. All that is read is checked; after an error the file
/// is of no use. Durable when it returns. A guest of the threads backend has no vCPUs, and so no
/// core.
pub fn elf_core(
    store: &Store,
    epoch: Option<u64>,
    file: &File,
    path: &Path,
) -> Result<ExportReport, StoreError> {
    store.export_with(epoch, file, path, |layout: &Layout, sections: &[Section]| {
        let vcpus = sections.iter().filter(|section| section.tag == tags::KVM_VCPU).count();
        let vcpus = u8::try_from(vcpus).map_err(std::io::Error::other)?;
        if vcpus == 0 {
            return Err(std::io::Error::other(
                "its guest has no vCPUs: it is of the threads backend",
            ));
        }
        let registers: Vec<Registers> =
            registers(sections, vcpus).map_err(std::io::Error::other)?;
        let core = CoreFile::begin(file, layout, &registers)?;
        Ok(Box::new(move |gfn| core.place(gfn)))
    })
}
