//! Memory that two processes of this host have: one hands its guest over to the other.
//!
//! Both map the same files, so no content is copied. Only one of the two guests runs at a time.

use driftline_guest::{GuestError, SharedGuest};
use vm_memory::{FileOffset, GuestMemoryBackend};

use super::backing::{self, MemoryContents};
use super::lazy_restore::LAZY_RESTORE_LIMIT;
use super::region::{Region, RegionSource, source};
use super::{Backing, FrameError, HugePages, Memory, MemoryError, MemoryOptions, layout};

impl Memory {
    /// Maps the memory of a guest of `bytes` bytes that another process of this host has. The kind
    /// of memory in `options` and prefaulting have no effect: nothing is written to the memory, and
    /// no page of it is allocated.
    ///
    /// # Errors
    ///
    /// `memory` is not that of such a guest ([`SharedGuest::of`]), or the kernel does not map it.
    pub fn shared(
        bytes: u64,
        options: &MemoryOptions,
        memory: &SharedGuest,
    ) -> Result<Self, MemoryError> {
        let layout = layout(bytes)?;
        let places: Vec<_> = memory.of(&layout)?.map(|(_, place)| place.clone()).collect();
        let is_pooled = |place: &FileOffset| backing::is_of_pool(place.file()).unwrap_or(false);
        let huge_pages = match places.iter().any(is_pooled) {
            true => Some(HugePages::Hugetlbfs),
            false => options.huge_pages.filter(|pages| *pages != HugePages::Hugetlbfs),
        };
        let options = MemoryOptions { backing: Backing::Memfd, huge_pages, prefault: false };
        let right = memory.right()?;
        Ok(Self { right, ..Self::map(layout, &options, None, MemoryContents::Shared(&places))? })
    }

    /// Returns the files that hold this memory, for another process that maps them, and offers it
    /// the guest.
    ///
    /// # Errors
    ///
    /// The memory is private to this process, or is still being restored; or another process has
    /// taken the guest.
    pub fn share(&self) -> Result<SharedGuest, GuestError> {
        let place = |region: &Region| match source(region) {
            RegionSource::Shared(place) => Some(place.clone()),
            RegionSource::Anonymous | RegionSource::Private(_) => None,
        };
        let places: Option<Vec<_>> = self.ram.iter().map(place).collect();
        let places = places.ok_or(FrameError::PrivateMemory)?;
        match self.protected.lazy_restore() {
            Some(restore) if !restore.wait(LAZY_RESTORE_LIMIT) => {
                let what = "handing over guest memory";
                Err(FrameError::RestoreUnfinished { what }.into())
            }
            _ => Ok(SharedGuest::new(places, self.right.offer()?)),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;

    use driftline_dirty_tracker::{FrameRun, Gfn};
    use vm_memory::{Bytes, GuestAddress};

    use super::*;

    const SIZE: u64 = 64 << 20;

    fn in_file() -> Memory {
        let options = MemoryOptions { backing: Backing::Memfd, ..MemoryOptions::default() };
        Memory::new(SIZE, &options).unwrap()
    }

    #[test]
    fn shared_memory_is_the_same_memory() {
        let (first, at) = (in_file(), GuestAddress(0x5000));
        first.ram().write_slice(&[7; 4096], at).unwrap();
        let second = Memory::shared(SIZE, &MemoryOptions::default(), &first.share().unwrap());
        let second = second.unwrap();
        assert_eq!(second.resident().unwrap(), [FrameRun { start: Gfn(5), count: 1 }]);
        assert_eq!(second.ram().read_obj::<u8>(at).unwrap(), 7);
        let mut writes = second.tracker().subscribe("test").unwrap();
        second.ram().write_slice(&[9], GuestAddress(0x8000)).unwrap();
        assert_eq!(writes.drain().frames(), 1);
        assert_eq!(first.ram().read_obj::<u8>(GuestAddress(0x8000)).unwrap(), 9);
        assert_eq!(first.resident().unwrap().len(), 2);
        // It can be shared again, and outlives the process that made it.
        drop(first);
        let third = second.share().unwrap();
        let third = Memory::shared(SIZE, &MemoryOptions::default(), &third).unwrap();
        assert!(third.memory_loader().is_none());
        assert_eq!(third.ram().read_obj::<u8>(at).unwrap(), 7);
    }

    #[test]
    fn private_memory_is_not_shared() {
        let memory = Memory::new(SIZE, &MemoryOptions::default()).unwrap();
        let refused = memory.share().unwrap_err().to_string();
        assert!(refused.contains("--memory-backing memfd"), "{refused}");
    }

    #[test]
    fn memory_of_another_size_is_refused() {
        let shared = in_file().share().unwrap();
        let larger = Memory::shared(2 * SIZE, &MemoryOptions::default(), &shared);
        let refused = larger.unwrap_err().to_string();
        assert!(refused.contains("has 67108864 bytes, and the slot needs 134217728"), "{refused}");
    }

    #[test]
    fn size_of_a_memory_file_is_sealed() {
        let shared = in_file().share().unwrap();
        let file = shared.slots()[0].file();
        for bytes in [SIZE - 4096, SIZE + 4096] {
            assert!(rustix::fs::ftruncate(file.as_fd(), bytes).is_err());
        }
    }
}
