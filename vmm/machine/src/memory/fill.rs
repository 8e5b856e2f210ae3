//! Owns filling: the first contents of untouched memory. The kernel (userfaultfd) allocates the
//! pages, copies the contents in and maps them. A write would instead fault and clear each page
//! before it overwrites it.
//!
//! Filling took half the time of writing on one machine. The row "eager: restored" of
//! `cargo bench -p tests --bench restore` shows it: run as root, it fills; run as a user that may
//! not use userfaultfd, it writes.

use std::io;

use driftline_dirty_tracker::{FrameRun, PAGE_SIZE};
use driftline_guest::{GuestError, GuestRam, MemoryLoader};
use vm_memory::{Bytes, GuestAddress, GuestMemoryBackend, GuestMemoryRegion, VolatileSlice};

use super::error::FrameError;
use super::userfault::Userfault;
use crate::HostMemory;

/// A guest's memory that is being filled. Dropping it unregisters the memory.
#[derive(Debug)]
pub(super) struct MemoryFill {
    userfault: Userfault,
    /// Keeps the memory mapped.
    ram: GuestRam,
}

impl MemoryFill {
    /// Registers the memory for filling.
    ///
    /// # Errors
    ///
    /// The host does not let this process do that, or another descriptor has the memory.
    pub(super) fn open(ram: &GuestRam) -> io::Result<Self> {
        let userfault = Userfault::open_for_filling()?;
        for region in ram.iter() {
            userfault.register_missing(region.as_ptr() as u64, region.len())?;
        }
        Ok(Self { userfault, ram: ram.clone() })
    }

    fn fill_at<B: vm_memory::bitmap::BitmapSlice>(
        &self,
        place: &VolatileSlice<'_, B>,
        contents: &[u8],
    ) -> io::Result<()> {
        let address = place.ptr_guard_mut().as_ptr() as u64;
        match self.userfault.copy(address, contents) {
            Err(e) if e.raw_os_error() == Some(libc::EEXIST) => {}
            done => return done,
        }
        // A page was present already, or this call has filled some of them. Go page by page: a
        // write to a missing page would wait for ever.
        let page_bytes = PAGE_SIZE as usize;
        let pages = contents.chunks_exact(page_bytes);
        for (offset, page) in (0..).step_by(page_bytes).zip(pages) {
            match self.userfault.copy(address + offset as u64, page) {
                Err(e) if e.raw_os_error() == Some(libc::EEXIST) => {
                    place.write_slice(page, offset).map_err(io::Error::other)?;
                }
                done => done?,
            }
        }
        Ok(())
    }
}

impl MemoryLoader for MemoryFill {
    fn fill(&self, run: FrameRun, contents: &[u8]) -> Result<(), GuestError> {
        let failed = FrameError::system("placing frames in memory");
        let mut rest = contents;
        for place in self.ram.get_slices(GuestAddress(run.start.gpa()), contents.len()) {
            let place = place.map_err(|e| failed(io::Error::other(e)))?;
            let (here, later) = rest.split_at(place.len().min(rest.len()));
            rest = later;
            self.fill_at(&place, here).map_err(&failed)?;
        }
        Ok(())
    }

    fn available(&self) -> u64 {
        HostMemory::read().map_or(0, |host| host.available)
    }
}

#[cfg(test)]
mod tests {
    use driftline_dirty_tracker::Gfn;

    use super::super::{Backing, HugePages, Memory, MemoryOptions};
    use super::*;
    use crate::testing::skip;

    fn frames(start: u64, count: u64) -> FrameRun {
        FrameRun { start: Gfn(start), count }
    }

    #[test]
    fn filled_contents_are_in_place_others_zero() {
        for backing in [Backing::Anon, Backing::Memfd] {
            let huge_pages = Some(HugePages::None);
            let memory =
                Memory::new(5 << 30, &MemoryOptions { backing, huge_pages, prefault: false });
            let memory = memory.unwrap();
            let page = |gfn: u64| vec![gfn as u8 | 1; PAGE_SIZE as usize];
            // No caller touches memory before filling it, but if one has, the content is
            // overwritten.
            let mut found = vec![0; PAGE_SIZE as usize];
            memory.ram().write_slice(&page(90), GuestAddress(Gfn(4).gpa())).unwrap();
            memory.ram().read_slice(&mut found, GuestAddress(Gfn(0x10_0001).gpa())).unwrap();
            let Some(fill) = memory.memory_loader() else {
                return skip("filling memory", "this host has no userfaultfd for it");
            };
            assert!(fill.available() > 16 << 20);
            // In both slots.
            let ascending = [frames(3, 4), frames(0xbffff, 1), frames(0x10_0000, 2)];
            for run in ascending {
                let contents: Vec<u8> = run.frames().flat_map(|gfn| page(gfn.0)).collect();
                fill.fill(run, &contents).unwrap();
            }
            // Frames that are present are overwritten, and those in between are filled.
            let again = frames(5, 4);
            let contents: Vec<u8> = again.frames().flat_map(|gfn| page(gfn.0 + 100)).collect();
            fill.fill(again, &contents).unwrap();
            drop(fill);
            let expected = |gfn: u64| match gfn {
                5..=8 => page(gfn + 100),
                3 | 4 | 0xbffff | 0x10_0000 | 0x10_0001 => page(gfn),
                _ => vec![0; PAGE_SIZE as usize],
            };
            for gfn in (0..12).chain(0xbfffe..=0xbffff).chain(0x10_0000..0x10_0004) {
                memory.ram().read_slice(&mut found, GuestAddress(Gfn(gfn).gpa())).unwrap();
                assert!(found == expected(gfn), "frame {gfn:#x}, {backing}");
            }
        }
    }

    #[test]
    fn frames_that_are_no_memory_are_an_error() {
        let memory = Memory::new(16 << 20, &MemoryOptions::default()).unwrap();
        let Ok(fill) = MemoryFill::open(memory.ram()) else {
            return skip("filling what is no memory", "this host has no userfaultfd for it");
        };
        let e = fill.fill(frames(4095, 2), &[1; 2 * PAGE_SIZE as usize]).unwrap_err().to_string();
        assert!(e.contains("placing frames in memory"), "{e}");
    }
}
