//! Maps the memory of test guests.

use std::fs::File;
use std::io;
use std::sync::Arc;

use driftline_dirty_tracker::{Layout, TrackedBitmap, Tracker};
use rustix::fs::{MemfdFlags, SealFlags};
use vm_memory::mmap::MmapRegionBuilder;
use vm_memory::{FileOffset, GuestAddress, GuestRegionMmap};

use crate::contents::GuestRam;
use crate::error::GuestError;
use crate::memory_claim::MemoryRight;
use crate::shared_guest::SharedGuest;

/// The memory that a test guest is built on.
pub(super) enum TestGuestMemory<'m> {
    /// New memory, private to this process.
    Private,
    /// New memory in files, which another guest can share.
    Files,
    /// The memory of another guest.
    Shared(&'m SharedGuest),
}

impl TestGuestMemory<'_> {
    /// Returns the right of a guest that is built on it.
    pub(super) fn right(&self) -> Result<MemoryRight, GuestError> {
        match self {
            Self::Private | Self::Files => Ok(MemoryRight::default()),
            Self::Shared(memory) => Ok(memory.right()?),
        }
    }

    /// Maps the slots as regions in which writes mark `tracker`.
    pub(super) fn map(
        &self,
        layout: &Layout,
        tracker: &Arc<Tracker>,
    ) -> Result<GuestRam, GuestError> {
        let files: Vec<Option<FileOffset>> = match self {
            Self::Private => layout.slots().map(|_| None).collect(),
            Self::Files => {
                let file = |bytes| memory_file(bytes).map_err(|e| system("making memory", e));
                let place = |bytes| Ok(Some(FileOffset::new(file(bytes)?, 0)));
                let slots = layout.slots().map(|slot| place(slot.run().bytes()));
                slots.collect::<Result<_, GuestError>>()?
            }
            Self::Shared(memory) => {
                memory.of(layout)?.map(|(_, place)| Some(place.clone())).collect()
            }
        };
        let mut regions = Vec::new();
        for (slot, file) in layout.slots().zip(files) {
            let bitmap = TrackedBitmap::new(tracker.clone(), slot.base);
            let builder = MmapRegionBuilder::new_with_bitmap(slot.run().bytes() as usize, bitmap)
                .with_mmap_prot(libc::PROT_READ | libc::PROT_WRITE);
            let kind = match &file {
                None => libc::MAP_ANONYMOUS | libc::MAP_PRIVATE,
                Some(_) => libc::MAP_SHARED,
            };
            let builder = builder.with_mmap_flags(kind | libc::MAP_NORESERVE);
            let builder = match file {
                None => builder,
                Some(file) => builder.with_file_offset(file),
            };
            let region = builder.build().map_err(|e| system("mapping memory", e))?;
            let region = GuestRegionMmap::new(region, GuestAddress(slot.base.gpa()))
                .ok_or_else(|| system("mapping memory", io::Error::other("a slot overflows")))?;
            regions.push(region);
        }
        GuestRam::from_regions(regions).map_err(|e| system("mapping memory", e))
    }
}

/// Creates a memory file whose size is sealed.
fn memory_file(bytes: u64) -> io::Result<File> {
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    let file: File = rustix::fs::memfd_create("test-guest", flags)?.into();
    file.set_len(bytes)?;
    rustix::fs::fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
    Ok(file)
}

/// Returns the error of the operation `what`.
pub(super) fn system(
    what: &'static str,
    e: impl std::error::Error + Send + Sync + 'static,
) -> GuestError {
    GuestError::System { what, cause: Box::new(e) }
}
