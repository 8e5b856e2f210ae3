//! What another process of this host continues a guest with: the files of its memory, and those of
//! its devices.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

use driftline_dirty_tracker::{Layout, PAGE_SIZE, Slot};
use vm_memory::FileOffset;

use crate::error::GuestError;
use crate::memory_claim::{MemoryRight, OfferedClaim, SIZE_SEALS, seals};

/// Upper bound on the bytes of the name in a [`DeviceFile`].
pub const MAX_FILE_NAME: usize = 80;
/// Upper bound on the device files of a guest: those of one message of descriptors (`SCM_MAX_FD`).
pub const MAX_DEVICE_FILES: usize = 253;

/// The files that hold a guest's memory, the file that says which process runs the guest, and the
/// open files of its devices.
///
/// They may come from another process, and are hostile then: [`of`](Self::of) and
/// [`right`](Self::right) check those of memory, and the guest's factory those of devices.
#[derive(Clone, Debug)]
pub struct SharedGuest {
    slots: Vec<FileOffset>,
    claim: OfferedClaim,
    device_files: Vec<DeviceFile>,
}

/// An open file of a guest's device: a disk, a queue of a tap, a socket that claims the tap.
#[derive(Clone, Debug)]
pub struct DeviceFile {
    name: String,
    descriptor: Arc<OwnedFd>,
}

impl DeviceFile {
    /// Names a descriptor, by at most [`MAX_FILE_NAME`] bytes. Several files of a device have one
    /// name, and keep their order.
    pub fn new(name: impl Into<String>, descriptor: OwnedFd) -> Self {
        Self { name: name.into(), descriptor: Arc::new(descriptor) }
    }

    /// Returns the name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns the descriptor.
    pub fn descriptor(&self) -> &OwnedFd {
        &self.descriptor
    }
}

/// Why memory in files cannot be that of a guest.
#[derive(Debug, thiserror::Error)]
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
    /// The file may become shorter, and then an access to it ends this process; or its owner may
    /// forbid this process to write to it.
    #[error(
        "the memory file of slot {slot} may still change its size or its seals: it needs \
         F_SEAL_SHRINK, F_SEAL_GROW and F_SEAL_SEAL"
    )]
    Unsealed {
        /// Number of the slot.
        slot: u32,
    },
    /// The file that says which process runs the guest is not a sealed memory file of a page.
    #[error(
        "the descriptor of the claim is not a sealed memory file of {PAGE_SIZE} bytes: {cause}"
    )]
    Claim {
        /// The system's error, or what the file lacks.
        #[source]
        cause: io::Error,
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

impl SharedGuest {
    /// Takes one place for each memory slot, ascending by guest address, and the claim
    /// ([`MemoryRight::offer`]). Several slots may share a file. Nothing is checked. There are no
    /// files of devices at first.
    pub fn new(slots: Vec<FileOffset>, claim: OfferedClaim) -> Self {
        Self { slots, claim, device_files: Vec::new() }
    }

    /// Adds the open files of the guest's devices.
    pub fn with_device_files(self, device_files: Vec<DeviceFile>) -> Self {
        Self { device_files, ..self }
    }

    /// Returns the open files of the guest's devices, unchecked. A device that has none here opens
    /// its files by their paths.
    pub fn device_files(&self) -> &[DeviceFile] {
        &self.device_files
    }

    /// Returns the places of the slots, unchecked.
    pub fn slots(&self) -> &[FileOffset] {
        &self.slots
    }

    /// Returns the claim, unchecked.
    pub fn claim(&self) -> &OfferedClaim {
        &self.claim
    }

    /// Returns the right to run the guest in this memory, for the process that received it.
    ///
    /// # Errors
    ///
    /// The file of the claim is not a sealed memory file of a page, or cannot be mapped.
    pub fn right(&self) -> Result<MemoryRight, SharedMemoryError> {
        let refused = |cause| SharedMemoryError::Claim { cause };
        let file = &self.claim.file;
        let is_sealed = seals(file.as_fd()).map_err(refused)?.contains(SIZE_SEALS);
        let is_page = file.metadata().map_err(refused)?.len() == PAGE_SIZE;
        match is_sealed && is_page {
            true => MemoryRight::received(self.claim.clone()).map_err(refused),
            false => Err(refused(io::Error::other("its size may change, or differs"))),
        }
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
        let (found, expected) = (self.slots.len(), layout.slots().len());
        if found != expected {
            return Err(SharedMemoryError::Slots { found, expected });
        }
        layout.slots().zip(&self.slots).try_for_each(|(slot, place)| check(slot, place))?;
        Ok(layout.slots().zip(&self.slots))
    }
}

fn check(slot: &Slot, place: &FileOffset) -> Result<(), SharedMemoryError> {
    let (number, bytes, offset) = (slot.id.0, slot.run().bytes(), place.start());
    let foreign = |cause| SharedMemoryError::NotAMemoryFile { slot: number, cause };
    // The seals come first: without them the size may change.
    if !seals(place.file().as_fd()).map_err(foreign)?.contains(SIZE_SEALS) {
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
    use rustix::fs::{MemfdFlags, SealFlags};

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
        let memory = SharedGuest::new(places, MemoryRight::default().offer().unwrap());
        memory.of(&layout()).map(drop).unwrap_err().to_string()
    }

    #[test]
    fn sealed_file_of_enough_bytes_is_accepted() {
        let place = FileOffset::new(memory_file(6 * PAGE_SIZE, SIZE_SEALS), 2 * PAGE_SIZE);
        let offers = MemoryRight::default();
        let memory = SharedGuest::new(vec![place], offers.offer().unwrap());
        assert_eq!(memory.of(&layout()).unwrap().count(), 1);
        assert_eq!(memory.right().unwrap().take(), Ok(()));
        assert!(offers.check().is_err());
    }

    #[test]
    fn file_that_is_no_claim_is_refused() {
        let plain = tempfile::tempfile().unwrap();
        plain.set_len(PAGE_SIZE).unwrap();
        let whole = MemoryRight::default().offer().unwrap();
        let (short, open) = (memory_file(100, SIZE_SEALS), SealFlags::SHRINK);
        for claim in [plain, short, memory_file(PAGE_SIZE, open)] {
            let refused = SharedGuest::new(
                Vec::new(),
                OfferedClaim { file: Arc::new(claim), ..whole.clone() },
            );
            let refused = refused.right().unwrap_err();
            let refused = refused.to_string();
            assert!(refused.contains("claim is not a sealed memory file of 4096"), "{refused}");
        }
    }

    #[test]
    fn file_whose_pages_may_vanish_is_refused() {
        let place = |bytes, seals, offset| vec![FileOffset::new(memory_file(bytes, seals), offset)];
        let short = refusal(place(4 * PAGE_SIZE - 1, SIZE_SEALS, 0));
        assert!(short.contains("slot 3 has 16383 bytes, and the slot needs 16384"), "{short}");
        for offset in [PAGE_SIZE, u64::MAX - PAGE_SIZE + 1] {
            let late = refusal(place(4 * PAGE_SIZE, SIZE_SEALS, offset));
            assert!(late.contains("from byte"), "{late}");
        }
        for seal in [SealFlags::SHRINK, SealFlags::GROW, SealFlags::SEAL] {
            let unsealed = refusal(place(4 * PAGE_SIZE, SIZE_SEALS.difference(seal), 0));
            assert!(unsealed.contains("slot 3 may still change its size"), "{unsealed}");
        }
        let within = refusal(place(8 * PAGE_SIZE, SIZE_SEALS, 512));
        assert!(within.contains("begins at byte 512"), "{within}");
        let plain = tempfile::tempfile().unwrap();
        plain.set_len(4 * PAGE_SIZE).unwrap();
        let plain = refusal(vec![FileOffset::new(plain, 0)]);
        assert!(plain.contains("not a memory file"), "{plain}");
        assert!(refusal(Vec::new()).contains("has 0 memory slots, and the guest has 1"));
    }
}
