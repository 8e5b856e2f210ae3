//! Guest memory in files that another process of this host can map.

use std::io;
use std::os::fd::AsFd;

use driftline_dirty_tracker::{Layout, PAGE_SIZE, Slot};
use rustix::fs::SealFlags;
use vm_memory::FileOffset;

use crate::error::GuestError;

/// The files that hold a guest's memory: one place for each memory slot, ascending by guest
/// address. Several slots may share a file.
///
/// The places may come from another process, which is not believed: [`of`](Self::of) checks them.
#[derive(Clone, Debug)]
pub struct SharedMemory(Vec<FileOffset>);

/// Why memory in files cannot be that of a guest.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SharedMemoryError {
    /// The numbers of memory slots differ.
    #[error("it has {found} memory slots, and the guest has {expected}")]
    Slots {
        /// Number of places.
        found: usize,
        /// Number of the guest's slots.
        expected: usize,
    },
    /// The descriptor is not that of a memory file.
    #[error("the descriptor of memory slot {slot} is not a memory file (memfd): {cause}")]
    NotAMemoryFile {
        /// Number of the slot.
        slot: u32,
        /// The system's error.
        #[source]
        cause: io::Error,
    },
    /// The file may become shorter, and then an access to it ends this process.
    #[error("the memory file of slot {slot} is not sealed against shrinking (F_SEAL_SHRINK)")]
    Unsealed {
        /// Number of the slot.
        slot: u32,
    },
    /// The slot begins within a page of the file.
    #[error("memory slot {slot} begins at byte {offset} of its file, which is not a page's first")]
    Unaligned {
        /// Number of the slot.
        slot: u32,
        /// The offset.
        offset: u64,
    },
    /// The file ends before the slot does.
    #[error(
        "the memory file of slot {slot} has {found} bytes, and the slot needs {bytes} from byte \
         {offset} on"
    )]
    TooShort {
        /// Number of the slot.
        slot: u32,
        /// Size of the file.
        found: u64,
        /// Size of the slot.
        bytes: u64,
        /// Offset of the slot.
        offset: u64,
    },
}

impl From<SharedMemoryError> for GuestError {
    fn from(e: SharedMemoryError) -> Self {
        Self::unsupported("the memory that was handed over", e)
    }
}

impl SharedMemory {
    /// Takes one place for each slot, without checking them.
    pub fn new(slots: Vec<FileOffset>) -> Self {
        Self(slots)
    }

    /// Returns the places, unchecked.
    pub fn unchecked(&self) -> &[FileOffset] {
        &self.0
    }

    /// Returns the place of each slot of `layout`, once it is certain that no access to it can fail
    /// for lack of a page: each file is a memory file that contains its slot and cannot shrink.
    ///
    /// # Errors
    ///
    /// A file is not such a file, or the number of slots differs.
    pub fn of<'m>(
        &'m self,
        layout: &'m Layout,
    ) -> Result<impl Iterator<Item = (&'m Slot, &'m FileOffset)>, SharedMemoryError> {
        let (found, expected) = (self.0.len(), layout.slots().len());
        if found != expected {
            return Err(SharedMemoryError::Slots { found, expected });
        }
        layout.slots().zip(&self.0).try_for_each(|(slot, place)| check(slot, place))?;
        Ok(layout.slots().zip(&self.0))
    }
}

fn check(slot: &Slot, place: &FileOffset) -> Result<(), SharedMemoryError> {
    let (number, bytes, offset) = (slot.id.0, slot.run().bytes(), place.start());
    let foreign = |cause| SharedMemoryError::NotAMemoryFile { slot: number, cause };
    // Only memory files have seals. The seal comes first: without it the size may change.
    let seals = rustix::fs::fcntl_get_seals(place.file().as_fd()).map_err(|e| foreign(e.into()))?;
    if !seals.contains(SealFlags::SHRINK) {
        return Err(SharedMemoryError::Unsealed { slot: number });
    }
    if !offset.is_multiple_of(PAGE_SIZE) {
        return Err(SharedMemoryError::Unaligned { slot: number, offset });
    }
    let found = place.file().metadata().map_err(foreign)?.len();
    match offset.checked_add(bytes) {
        Some(end) if end <= found => Ok(()),
        _ => Err(SharedMemoryError::TooShort { slot: number, found, bytes, offset }),
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;

    use driftline_dirty_tracker::{Gfn, SlotId};
    use rustix::fs::MemfdFlags;

    use super::*;

    fn layout() -> Layout {
        Layout::new([Slot { id: SlotId(3), base: Gfn(16), frames: 4 }]).unwrap()
    }

    fn memory_file(bytes: u64, seals: SealFlags) -> File {
        let flags = MemfdFlags::ALLOW_SEALING | MemfdFlags::CLOEXEC;
        let file: File = rustix::fs::memfd_create("test", flags).unwrap().into();
        file.set_len(bytes).unwrap();
        rustix::fs::fcntl_add_seals(&file, seals).unwrap();
        file
    }

    fn refusal(places: Vec<FileOffset>) -> String {
        let memory = SharedMemory::new(places);
        memory.of(&layout()).map(drop).unwrap_err().to_string()
    }

    #[test]
    fn sealed_file_of_enough_bytes_is_accepted() {
        let file = memory_file(6 * PAGE_SIZE, SealFlags::SHRINK);
        let memory = SharedMemory::new(vec![FileOffset::new(file, 2 * PAGE_SIZE)]);
        assert_eq!(memory.of(&layout()).unwrap().count(), 1);
    }

    #[test]
    fn file_whose_pages_may_vanish_is_refused() {
        let place = |bytes, seals, offset| vec![FileOffset::new(memory_file(bytes, seals), offset)];
        let short = refusal(place(4 * PAGE_SIZE - 1, SealFlags::SHRINK, 0));
        assert!(short.contains("slot 3 has 16383 bytes, and the slot needs 16384"), "{short}");
        for offset in [PAGE_SIZE, u64::MAX - PAGE_SIZE + 1] {
            let late = refusal(place(4 * PAGE_SIZE, SealFlags::SHRINK, offset));
            assert!(late.contains("from byte"), "{late}");
        }
        let unsealed = refusal(place(4 * PAGE_SIZE, SealFlags::GROW, 0));
        assert!(unsealed.contains("not sealed against shrinking"), "{unsealed}");
        let within = refusal(place(8 * PAGE_SIZE, SealFlags::SHRINK, 512));
        assert!(within.contains("begins at byte 512"), "{within}");
        let plain = tempfile::tempfile().unwrap();
        plain.set_len(4 * PAGE_SIZE).unwrap();
        let plain = refusal(vec![FileOffset::new(plain, 0)]);
        assert!(plain.contains("not a memory file"), "{plain}");
        assert!(refusal(Vec::new()).contains("has 0 memory slots, and the guest has 1"));
    }
}
