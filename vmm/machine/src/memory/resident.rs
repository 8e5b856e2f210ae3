//! Finds the frames that are resident: those that have memory on this host. All others read as
//! zeros.

use std::fs::File;
use std::io;
use std::os::fd::AsFd;
use std::os::unix::fs::FileExt;

use driftline_dirty_tracker::{FrameRun, FrameSet, Gfn, PAGE_SIZE};
use rustix::fs::SeekFrom;
use vm_memory::FileOffset;

use super::region::{Region, RegionSource, all, is_pooled, source};
use crate::fail_point;

/// Queries the kernel for resident frames. Keeps an open file and a buffer between queries.
#[derive(Debug, Default)]
pub(super) struct ResidentFrames {
    pagemap: Option<Pagemap>,
    /// Whether this process has no page map: in a jail without /proc.
    is_absent: bool,
}

impl ResidentFrames {
    /// Opens what later queries need now, because this process may not be allowed to later. Without
    /// /proc every query that needs the page map fails.
    pub(super) fn open() -> io::Result<Self> {
        match Pagemap::open() {
            Ok(pagemap) => Ok(Self { pagemap: Some(pagemap), is_absent: false }),
            Err(e) if e.kind() == io::ErrorKind::NotFound => {
                Ok(Self { pagemap: None, is_absent: true })
            }
            Err(e) => Err(e),
        }
    }

    /// Behaves like [`find`](Self::find), but without /proc all frames count as resident.
    pub(super) fn find_or_all(
        &mut self,
        region: &Region,
        frames: FrameRun,
        runs: &mut Vec<FrameRun>,
    ) -> io::Result<()> {
        let before = runs.len();
        match self.find(region, frames, runs) {
            Err(e) if e.kind() == io::ErrorKind::NotFound => {
                runs.truncate(before);
                runs.push(frames);
                Ok(())
            }
            found => found,
        }
    }

    /// Adds those of `frames` that have host memory or are swapped out to `runs`, as ascending
    /// runs. All `frames` must lie in `region`. Reads eight bytes a frame from the kernel, or, for
    /// a memory file, one pair of seeks a run. Does both for a region that is a private mapping of
    /// a file: a frame has what was written to it, or else the file's content.
    pub(super) fn find(
        &mut self,
        region: &Region,
        frames: FrameRun,
        runs: &mut Vec<FrameRun>,
    ) -> io::Result<()> {
        fail_point::pass("resident frames")?;
        match source(region) {
            // A hugetlbfs file cannot report its holes.
            RegionSource::Shared(file) if !is_pooled(region) => in_file(region, file, frames, runs),
            RegionSource::Private(file) => {
                let mut own = Vec::new();
                self.pagemap()?.find(region, frames, &mut own)?;
                let mut both: FrameSet = own.into_iter().collect();
                let mut of_file = Vec::new();
                in_file(region, file, frames, &mut of_file)?;
                both.insert_all(&of_file);
                runs.extend(both.iter());
                Ok(())
            }
            _ => self.pagemap()?.find(region, frames, runs),
        }
    }

    fn pagemap(&mut self) -> io::Result<&mut Pagemap> {
        let opened = match self.pagemap.take() {
            Some(pagemap) => pagemap,
            None if self.is_absent => return Err(io::ErrorKind::NotFound.into()),
            None => Pagemap::open()?,
        };
        Ok(self.pagemap.insert(opened))
    }
}

/// Adds the data of the file of a region, in memory or not. The page tables do not show it: a
/// page of a file that was swapped out, or never read, is not in them.
fn in_file(
    region: &Region,
    file: &FileOffset,
    frames: FrameRun,
    runs: &mut Vec<FrameRun>,
) -> io::Result<()> {
    let base = all(region).start.0;
    let end = file.start() + (frames.end().0 - base) * PAGE_SIZE;
    let mut at = file.start() + (frames.start.0 - base) * PAGE_SIZE;
    while at < end {
        let start = match rustix::fs::seek(file.file().as_fd(), SeekFrom::Data(at)) {
            Ok(start) if start < end => start,
            // No data follows, or none within the requested frames.
            Ok(_) | Err(rustix::io::Errno::NXIO) => return Ok(()),
            Err(e) => return Err(e.into()),
        };
        at = rustix::fs::seek(file.file().as_fd(), SeekFrom::Hole(start))?;
        runs.extend(run_of(base, start - file.start(), at.min(end) - file.start()));
    }
    Ok(())
}

/// Adds a frame to the last of the runs from `floor` on that it follows, or as a run of its own.
fn push(runs: &mut Vec<FrameRun>, floor: usize, gfn: Gfn) {
    match runs[floor..].last_mut() {
        Some(run) if run.end() == gfn => run.count += 1,
        _ => runs.push(FrameRun { start: gfn, count: 1 }),
    }
}

/// Returns the frames of the data from byte `start` to byte `end` of a region at `base`. `None` if
/// the data was discarded between the two seeks: then the hole begins where the data did.
fn run_of(base: u64, start: u64, end: u64) -> Option<FrameRun> {
    let (first, last) = (start / PAGE_SIZE, end.div_ceil(PAGE_SIZE));
    (end > start).then(|| FrameRun { start: Gfn(base + first), count: last - first })
}

/// The kernel's page map of this process.
#[derive(Debug)]
struct Pagemap {
    file: File,
    buffer: Vec<u8>,
}

const ENTRIES_PER_CHUNK: u64 = 64 << 10;

impl Pagemap {
    fn open() -> io::Result<Self> {
        Ok(Self { file: File::open("/proc/self/pagemap")?, buffer: Vec::new() })
    }

    fn find(
        &mut self,
        region: &Region,
        frames: FrameRun,
        runs: &mut Vec<FrameRun>,
    ) -> io::Result<()> {
        let page = region.as_ptr() as u64 / PAGE_SIZE;
        let base = all(region).start.0;
        let floor = runs.len();
        for chunk in frames.chunks(ENTRIES_PER_CHUNK) {
            self.buffer.resize(chunk.count as usize * 8, 0);
            self.file.read_exact_at(&mut self.buffer, (page + chunk.start.0 - base) * 8)?;
            for (gfn, entry) in chunk.frames().zip(self.buffer.chunks_exact(8)) {
                // The top byte has both bits that matter: 63 present, 62 swapped.
                if entry[7] & 0xc0 != 0 {
                    push(runs, floor, gfn);
                }
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use vm_memory::GuestMemoryBackend;

    use super::*;
    use crate::memory::{Memory, MemoryOptions};

    #[test]
    fn data_discarded_between_two_seeks_is_skipped() {
        let run = |start, count| Some(FrameRun { start: Gfn(start), count });
        assert_eq!(run_of(16, 0x3000, 0x5000), run(19, 2));
        assert_eq!(run_of(16, 0x3000, 0x3000), None);
    }

    #[test]
    fn without_proc_all_frames_count_as_resident() {
        let memory = Memory::new(64 << 20, &MemoryOptions::default()).unwrap();
        let region = memory.ram().iter().next().unwrap();
        let frames = FrameRun { start: Gfn(3), count: 5 };
        let mut resident = ResidentFrames { pagemap: None, is_absent: true };
        let mut runs = Vec::new();
        assert!(resident.find(region, frames, &mut runs).is_err());
        resident.find_or_all(region, frames, &mut runs).unwrap();
        assert_eq!(runs, [frames]);
    }
}
