//! Discards frames of memory that is a private mapping of a file. Dropping their pages would show
//! the file's content again, so zeros are mapped over them.
//!
//! Each run of such frames splits the mapping of the file, and a process may have 65,530 mappings
//! (`vm.max_map_count`). A guest that discards every other frame could use them all, and the
//! process could not even allocate memory then. So the number of runs is limited. Frames that would
//! exceed it keep their memory and their content, which a guest may find in a page that it has
//! given away.

use std::io;

use driftline_dirty_tracker::{FrameRun, FrameSet};
use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap_anonymous};

use super::region::{Region, all};

/// Maximum number of runs if the kernel does not say how many mappings a process may have.
const DEFAULT_RUNS: usize = 65_530 / 8;

/// The frames over which zeros are mapped.
#[derive(Debug)]
pub(super) struct ZeroMappings {
    frames: FrameSet,
    /// Maximum number of runs. Each costs two mappings, its own and the rest of the one it splits.
    max_runs: usize,
    has_warned: bool,
}

impl Default for ZeroMappings {
    fn default() -> Self {
        Self::new(DEFAULT_RUNS)
    }
}

impl ZeroMappings {
    fn new(max_runs: usize) -> Self {
        Self { frames: FrameSet::new(), max_runs, has_warned: false }
    }

    /// Reads how many mappings a process may have, of which a quarter is used.
    pub(super) fn open() -> Self {
        let most = std::fs::read_to_string("/proc/sys/vm/max_map_count").ok();
        let most = most.and_then(|most| most.trim().parse::<usize>().ok());
        Self::new(most.map_or(DEFAULT_RUNS, |most| most / 8))
    }

    /// Discards `run`, which lies in `region`. Adds the frames that keep their content to `kept`.
    ///
    /// # Errors
    ///
    /// The system's error. Each frame then has its old content, or is zero.
    pub(super) fn discard(
        &mut self,
        region: &Region,
        run: FrameRun,
        kept: &mut Vec<FrameRun>,
    ) -> io::Result<()> {
        let (zeros, others): (Vec<_>, Vec<_>) =
            (self.frames.within(run).collect(), self.frames.gaps(run).collect());
        for run in zeros {
            let (start, bytes) = place(region, run);
            // SAFETY: the frames lie in the region, which is mapped as long as it is borrowed here.
            // Their mappings are anonymous: pages read as zeros afterwards. All access to guest
            // memory goes through volatile slices, so no reference sees the change.
            unsafe { madvise(start.cast(), bytes, Advice::LinuxDontNeed) }?;
        }
        for run in others {
            self.frames.insert(run);
            let mapped = match self.frames.len() <= self.max_runs {
                true => map_zeros(region, run),
                false => Err(io::ErrorKind::QuotaExceeded.into()),
            };
            match mapped {
                Ok(()) => {}
                Err(e) if is_limit(&e) => {
                    self.frames.remove(run);
                    self.warn();
                    kept.push(run);
                }
                Err(e) => {
                    self.frames.remove(run);
                    return Err(e);
                }
            }
        }
        Ok(())
    }

    fn warn(&mut self) {
        if !std::mem::replace(&mut self.has_warned, true) {
            tracing::warn!(
                "the guest has given back {} separate ranges of memory that is mapped from a \
                 snapshot's file: further ones keep their memory (sysctl vm.max_map_count)",
                self.frames.len()
            );
        }
    }
}

/// Returns whether no further mapping is possible.
fn is_limit(e: &io::Error) -> bool {
    e.kind() == io::ErrorKind::QuotaExceeded || e.raw_os_error() == Some(libc::ENOMEM)
}

/// Returns the address of frames of the region, and their length in bytes.
fn place(region: &Region, run: FrameRun) -> (*mut u8, usize) {
    let offset = run.start.gpa() - all(region).start.gpa();
    (region.as_ptr().wrapping_add(offset as usize), run.bytes() as usize)
}

/// Maps zeros over frames. Adjacent ones become one mapping in the kernel.
fn map_zeros(region: &Region, run: FrameRun) -> io::Result<()> {
    let (start, bytes) = place(region, run);
    let flags = MapFlags::PRIVATE | MapFlags::FIXED | MapFlags::NORESERVE;
    // SAFETY: the range lies in a region that is mapped as long as the caller borrows it, and stays
    // mapped with the same access: only its content changes, to zeros. All access to guest memory
    // goes through volatile slices, so no reference sees the change.
    unsafe { mmap_anonymous(start.cast(), bytes, ProtFlags::READ | ProtFlags::WRITE, flags) }?;
    for advice in [Advice::LinuxDontDump, Advice::LinuxDontFork] {
        // SAFETY: the advice changes no content in this process.
        let advised = unsafe { madvise(start.cast(), bytes, advice) };
        // The frames are zero whether or not it can be followed.
        if let Err(e) = advised {
            tracing::debug!("advice for zeros of guest memory is refused: {e}");
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use driftline_dirty_tracker::{Gfn, PAGE_SIZE};
    use vm_memory::{Bytes, GuestAddress, GuestMemoryBackend};

    use super::*;
    use crate::memory::{Memory, MemoryOptions, PrivateFile};

    fn run(start: u64, count: u64) -> FrameRun {
        FrameRun { start: Gfn(start), count }
    }

    #[test]
    fn frames_beyond_the_limit_keep_their_content() {
        const BYTES: u64 = 16 << 20;
        let file = tempfile::tempfile().unwrap();
        std::os::unix::fs::FileExt::write_all_at(&file, &vec![0xa5; BYTES as usize], 0).unwrap();
        let file = PrivateFile::from(file);
        let memory = Memory::of_file(BYTES, &MemoryOptions::default(), &file).unwrap();
        let ram = Arc::new(memory.ram().clone());
        let region = ram.iter().next().unwrap();
        let byte = |gfn: u64| ram.read_obj::<u8>(GuestAddress(gfn * PAGE_SIZE + 9)).unwrap();
        let mut zeros = ZeroMappings::new(3);
        let mut discard = |run| {
            let mut kept = Vec::new();
            zeros.discard(region, run, &mut kept).unwrap();
            kept
        };
        for gfn in [10, 20, 30] {
            assert_eq!(discard(run(gfn, 2)), []);
        }
        assert_eq!(discard(run(40, 2)), [run(40, 2)]);
        assert_eq!([byte(29), byte(30), byte(31), byte(40)], [0xa5, 0, 0, 0xa5]);
        // A range that touches a run, or joins two, adds none.
        assert_eq!(discard(run(32, 1)), []);
        ram.write_obj(7u8, GuestAddress(30 * PAGE_SIZE + 9)).unwrap();
        assert_eq!(discard(run(30, 3)), [], "written since");
        assert_eq!([byte(30), byte(32), byte(33)], [0, 0, 0xa5]);
        assert_eq!(discard(run(11, 10)), []);
        assert_eq!(discard(run(40, 2)), [], "the first two are one");
        assert_eq!([byte(21), byte(22), byte(41), byte(42)], [0, 0xa5, 0, 0xa5]);
    }
}
