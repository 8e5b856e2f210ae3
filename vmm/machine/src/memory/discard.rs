//! Owns discarding: giving frames back to the host.
//!
//! A discarded frame costs no memory and reads as zeros until it is written again. Discarding
//! changes the content as a write of zeros does, and is tracked like one: the tree is marked
//! *after* the content has changed, as for every write of the VMM. A thread that copies the frame
//! meanwhile copies the old content or zeros. Either way it finds the frame in the next epoch and
//! reads zeros then (I3, I4). Frames without memory read as zeros before and after, and are not
//! marked.
//!
//! If a frame is write-protected (`write_protect.rs`), the discard waits until it has been copied.
//! A frame that has not been restored yet (`lazy_restore.rs`) is dropped from the restore. The
//! kernel sends a page handler (`page_handler.rs`) a message about the discard, and the discard
//! waits until the handler has read it.
//!
//! Memory that is a private mapping of a file gets zeros mapped over it (`zero_mappings.rs`). Its
//! frames count as frames with memory wherever the file has data, discarded or not.
//!
//! The guest's next write is tracked too: KVM's mapping of the page is removed with the host's
//! page, so the write faults and is reported, whether or not the frame was reported before.

use std::io;
use std::os::fd::AsFd;
use std::sync::Arc;

use driftline_dirty_tracker::{FrameRun, FrameSet, Gfn, PAGE_SIZE};
use driftline_guest::GuestRam;
use rustix::fs::{FallocateFlags, fallocate};
use rustix::mm::{Advice, madvise};
use vm_memory::bitmap::Bitmap;
use vm_memory::{FileOffset, GuestAddress, GuestMemoryBackend};

use super::backing::HUGE_PAGE;
use super::region::{Region, RegionSource, all, is_pooled, source};
use super::resident::ResidentFrames;
use super::write_protect::ProtectedFrames;
use super::zero_mappings::ZeroMappings;

/// Gives frames back to the host. The state that it keeps between calls only saves time.
#[derive(Debug, Default)]
pub(crate) struct Discarder {
    resident: ResidentFrames,
    runs: Vec<FrameRun>,
    /// Frames of a private mapping that keep their content.
    kept: Vec<FrameRun>,
    zeros: ZeroMappings,
    protected: Arc<ProtectedFrames>,
}

impl Discarder {
    /// Opens all system resources that it needs. A frame in `protected` is discarded when it is no
    /// longer protected.
    pub(crate) fn open(protected: Arc<ProtectedFrames>) -> io::Result<Self> {
        let (resident, zeros) = (ResidentFrames::open()?, ZeroMappings::open());
        Ok(Self { resident, runs: Vec::new(), kept: Vec::new(), zeros, protected })
    }

    /// Discards the frames of `run`, which lie in one slot of `ram`. Returns how many of them had
    /// memory: those now read as zeros and are marked. Of huge pages from the pool only whole ones
    /// are discarded. Pages that return to the pool are not reserved for any guest, not even this
    /// one. Of a private mapping of a file, frames beyond a limit of ranges are not discarded.
    ///
    /// # Errors
    ///
    /// Frames outside guest memory, or a failed system call. After an error each frame has its old
    /// content, or is zero and marked.
    pub(crate) fn discard(&mut self, ram: &GuestRam, run: FrameRun) -> io::Result<u64> {
        let region = ram.find_region(GuestAddress(run.start.gpa()));
        let region = region.filter(|region| run.end() <= all(region).end());
        let Some(region) = region else {
            let message = format!("{} frames from {:#x} are not memory", run.count, run.start.0);
            return Err(io::Error::new(io::ErrorKind::InvalidInput, message));
        };
        let run = if is_pooled(region) { whole_huge_pages(region, run) } else { run };
        if run.count == 0 {
            return Ok(0);
        }
        self.runs.clear();
        self.kept.clear();
        // Comes first: after it no frame arrives that `find` would miss.
        if let Some(restore) = self.protected.lazy_restore() {
            restore.forget(run, &mut self.runs);
        }
        let found = match self.protected.page_handler() {
            // A page that is missing has what the handler would serve.
            Some(_) => {
                self.runs.push(run);
                Ok(())
            }
            None => self.resident.find_or_all(region, run, &mut self.runs),
        };
        if self.runs.is_empty() {
            return found.map(|()| 0);
        }
        let discarded = found.and_then(|()| {
            // Wait for the whole run, so that no part of it is discarded while another part is
            // waited for.
            self.protected.wait(run);
            match source(region) {
                RegionSource::Private(_) => self.zeros.discard(region, run, &mut self.kept),
                RegionSource::Shared(file) => punch_hole(region, file, run),
                RegionSource::Anonymous => drop_pages(region, run),
            }
        });
        // Mark after an error too: part of the run may have been discarded, and frames that were
        // dropped from the restore are zero now.
        for run in &self.runs {
            if let Ok(slice) = ram.get_slice(GuestAddress(run.start.gpa()), run.bytes() as usize) {
                slice.bitmap().mark_dirty(0, slice.len());
            }
        }
        discarded?;
        let kept: FrameSet = self.kept.iter().copied().collect();
        let count =
            |run: &FrameRun| run.count - kept.within(*run).map(|kept| kept.count).sum::<u64>();
        Ok(self.runs.iter().map(count).sum())
    }
}

/// Returns the part of `run` that consists of whole 2 MiB pages of the mapping.
fn whole_huge_pages(region: &Region, run: FrameRun) -> FrameRun {
    const FRAMES: u64 = HUGE_PAGE / PAGE_SIZE;
    let base = all(region).start.0;
    let first = (run.start.0 - base).next_multiple_of(FRAMES);
    let end = (run.end().0 - base) / FRAMES * FRAMES;
    FrameRun { start: Gfn(base + first), count: end.saturating_sub(first) }
}

/// Discards frames that lie in `region`, a mapping of a memory file: removes their pages from every
/// mapping of the file.
fn punch_hole(region: &Region, file: &FileOffset, run: FrameRun) -> io::Result<()> {
    let offset = run.start.gpa() - all(region).start.gpa();
    let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
    Ok(fallocate(file.file().as_fd(), flags, file.start() + offset, run.bytes())?)
}

/// Discards frames that lie in `region`, which is anonymous.
fn drop_pages(region: &Region, run: FrameRun) -> io::Result<()> {
    let offset = run.start.gpa() - all(region).start.gpa();
    let start = region.as_ptr().wrapping_add(offset as usize);
    // SAFETY: the frames lie in the region, which is a mapping that lives as long as it is borrowed
    // here. It is anonymous: its pages read as zeros afterwards. No reference into guest memory
    // exists whose content could change under it: all access goes through vm-memory's volatile
    // slices, because the guest changes it at any time too.
    Ok(unsafe { madvise(start.cast(), run.bytes() as usize, Advice::LinuxDontNeed) }?)
}

#[cfg(test)]
mod tests {
    use vm_memory::Bytes;

    use super::*;
    use crate::memory::{Backing, HugePages, Memory, MemoryOptions};

    const FIRST: u64 = 0x1000;

    fn run(start: u64, count: u64) -> FrameRun {
        FrameRun { start: Gfn(start), count }
    }

    fn fill(memory: &Memory, run: FrameRun) {
        let bytes = vec![0xa5; run.bytes() as usize];
        memory.ram().write_slice(&bytes, GuestAddress(run.start.gpa())).unwrap();
    }

    fn byte(memory: &Memory, gfn: u64) -> u8 {
        memory.ram().read_obj(GuestAddress(Gfn(gfn).gpa() + 77)).unwrap()
    }

    #[test]
    fn discarded_frame_is_zero_marked_and_absent() {
        for backing in [Backing::Anon, Backing::Memfd] {
            let huge_pages = Some(HugePages::None);
            let options = MemoryOptions { backing, huge_pages, prefault: false };
            let memory = Memory::new(64 << 20, &options).unwrap();
            let mut writes = memory.tracker().subscribe("test").unwrap();
            let (mut discarder, full) = (Discarder::default(), run(FIRST, 64));
            fill(&memory, full);
            writes.drain().commit();

            assert_eq!(discarder.discard(memory.ram(), run(FIRST + 10, 5)).unwrap(), 5);
            let resident = memory.resident().unwrap();
            assert_eq!(resident, [run(FIRST, 10), run(FIRST + 15, 49)], "{backing}");
            let epoch = writes.drain();
            assert_eq!(epoch.runs().collect::<Vec<_>>(), [run(FIRST + 10, 5)], "{backing}");
            epoch.commit();
            assert_eq!(byte(&memory, FIRST + 9), 0xa5);
            assert!((10..15).all(|i| byte(&memory, FIRST + i) == 0), "{backing}");
            assert_eq!(byte(&memory, FIRST + 15), 0xa5);

            // Frames without memory do not change.
            assert_eq!(discarder.discard(memory.ram(), run(FIRST + 100, 50)).unwrap(), 0);
            assert_eq!(writes.drain().frames(), 0, "{backing}");
            fill(&memory, run(FIRST + 12, 1));
            assert_eq!(byte(&memory, FIRST + 12), 0xa5, "it is memory again when it is written");
        }
    }

    #[test]
    fn discard_outside_memory_is_refused() {
        let memory = Memory::new(5 << 30, &MemoryOptions::default()).unwrap();
        let mut discarder = Discarder::default();
        for outside in [run(0xbffff, 2), run(0xc0000, 1), run(0x180000, 1), run(0, 0xc0001)] {
            let error = discarder.discard(memory.ram(), outside).unwrap_err().to_string();
            assert!(error.contains("are not memory"), "{error}");
        }
        assert_eq!(discarder.discard(memory.ram(), run(0x17ffff, 1)).unwrap(), 0);
    }

    #[test]
    fn the_pool_gets_whole_pages_back() {
        for backing in [Backing::Anon, Backing::Memfd] {
            let huge_pages = Some(HugePages::Hugetlbfs);
            let options = MemoryOptions { backing, huge_pages, prefault: false };
            let memory = match Memory::new(64 << 20, &options) {
                Ok(memory) => memory,
                Err(e) => {
                    return crate::testing::skip("the_pool_gets_whole_pages_back", &e.to_string());
                }
            };
            let mut discarder = Discarder::default();
            fill(&memory, run(0, 1536));
            // Parts of two pages, and one whole page.
            assert_eq!(discarder.discard(memory.ram(), run(1, 1534)).unwrap(), 512);
            assert_eq!(memory.resident().unwrap(), [run(0, 512), run(1024, 512)]);
            assert_eq!(discarder.discard(memory.ram(), run(1, 511)).unwrap(), 0);
            assert_eq!(byte(&memory, 511), 0xa5);
            assert_eq!(byte(&memory, 512), 0);
        }
    }
}
