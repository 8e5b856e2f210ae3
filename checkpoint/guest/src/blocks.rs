//! The blocks of a drive: which of them have data, and their content.

use std::fs::File;
use std::io;
use std::os::fd::AsFd;
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread::Builder;
use std::time::Duration;

use driftline_dirty_tracker::{FrameRun, Gfn, Layout, LayoutError, PAGE_SIZE, Slot, SlotId};
use rustix::fs::SeekFrom;
use rustix::io::Errno;

/// Maximum number of data runs listed for a drive: a second's work at most, and 1 MiB.
const MAX_DATA_RUNS: usize = 64 << 10;

/// Returns the blocks of a drive of `bytes` as the frames of slot 0.
///
/// # Errors
///
/// The drive has no bytes, or more than 4 PiB.
///
/// ```
/// assert_eq!(driftline_guest::block_layout(4096 * 3 + 512)?.frames(), 4);
/// # Ok::<(), driftline_dirty_tracker::LayoutError>(())
/// ```
pub fn block_layout(bytes: u64) -> Result<Layout, LayoutError> {
    let frames = bytes.div_ceil(PAGE_SIZE);
    Layout::new([Slot { id: SlotId(0), base: Gfn(0), frames }])
}

/// Reads whole blocks of a drive of `bytes` from `start` on. Bytes beyond the drive's end read as
/// zeros, whatever `file` has there.
///
/// # Errors
///
/// The file cannot be read, or is shorter than the drive.
pub fn read_blocks(file: &File, bytes: u64, start: Gfn, to: &mut [u8]) -> io::Result<()> {
    let offset = start.gpa();
    let has = bytes.saturating_sub(offset).min(to.len() as u64) as usize;
    let (content, rest) = to.split_at_mut(has);
    rest.fill(0);
    file.read_exact_at(content, offset)
}

/// Upper bound on finding out where a drive has data: a file on hung storage never answers. 20 s,
/// chosen: the first search of a large file on a busy disk may take seconds; a checkpoint or
/// migration waits for it, and the guest does not.
const SEEK_TIME_LIMIT: Duration = Duration::from_secs(20);

/// [`PAGE_SIZE`] as the length of a buffer.
pub const PAGE_BYTES: usize = PAGE_SIZE as usize;

/// Maximum number of threads that may wait for the storage of drives. A thread on hung storage
/// stays until the storage answers, and a checkpoint or migration that fails for that reason is
/// tried again. 64, chosen: a few attempts for each of several hung disks, and little memory.
const MAX_STORAGE_THREADS: usize = 64;

/// Number of permits that are taken.
static STORAGE_THREADS: AtomicUsize = AtomicUsize::new(0);

/// Permission for one of at most 64 threads of the process that may wait for the storage of drives,
/// which cannot be interrupted. The thread holds it until its last call has returned.
#[derive(Debug)]
pub struct StoragePermit(&'static AtomicUsize);

impl StoragePermit {
    /// Takes a permit.
    ///
    /// # Errors
    ///
    /// 64 threads have one.
    pub fn take() -> io::Result<Self> {
        Self::take_of(&STORAGE_THREADS)
    }

    fn take_of(count: &'static AtomicUsize) -> io::Result<Self> {
        let more = |n| (n < MAX_STORAGE_THREADS).then_some(n + 1);
        match count.fetch_update(Ordering::Relaxed, Ordering::Relaxed, more) {
            Ok(_) => Ok(Self(count)),
            Err(n) => Err(io::Error::other(format!("{n} earlier threads wait for hung storage"))),
        }
    }
}

impl Drop for StoragePermit {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Returns the blocks of the first `bytes` of `file` that are not in its holes, ascending. Includes
/// all blocks of a file or device that does not report holes, and everything after the first 65,536
/// runs, because a guest can make any number of holes. Costs two system calls per hole.
///
/// # Errors
///
/// The file cannot be read, its storage has not answered for 20 s, or 64 earlier threads still
/// wait for theirs.
pub fn data_runs(file: &File, bytes: u64) -> io::Result<Vec<FrameRun>> {
    let all = FrameRun { start: Gfn(0), count: bytes.div_ceil(PAGE_SIZE) };
    let (file, (sender, receiver)) = (file.try_clone()?, mpsc::channel());
    let permit = StoragePermit::take()?;
    // A thread of its own, because a hung call cannot be interrupted.
    Builder::new().name("drive-data".into()).spawn(move || {
        let _permit = permit;
        // The caller has returned if the limit has passed.
        let _ = sender.send(data_within(&file, all, bytes));
    })?;
    receiver.recv_timeout(SEEK_TIME_LIMIT).unwrap_or_else(|e| {
        Err(match e {
            RecvTimeoutError::Timeout => {
                let why = format!("its storage has not answered for {SEEK_TIME_LIMIT:?}");
                io::Error::new(io::ErrorKind::TimedOut, why)
            }
            RecvTimeoutError::Disconnected => io::Error::other("its thread has ended"),
        })
    })
}

/// Like [`data_runs`], for the blocks of `run` only.
///
/// # Errors
///
/// The file cannot be read. Does not return while its storage hangs.
pub fn data_within(file: &File, run: FrameRun, bytes: u64) -> io::Result<Vec<FrameRun>> {
    let (mut runs, mut at): (Vec<FrameRun>, u64) = (Vec::new(), run.start.gpa());
    let bytes = bytes.min(at.saturating_add(run.bytes()));
    while at < bytes {
        if runs.len() == MAX_DATA_RUNS {
            let end = runs.last().map_or(run.start.0, |run| run.end().0);
            let rest = bytes.div_ceil(PAGE_SIZE) - end;
            if let Some(last) = runs.last_mut() {
                last.count += rest;
            }
            break;
        }
        let start = match rustix::fs::seek(file.as_fd(), SeekFrom::Data(at)) {
            Ok(start) => start.min(bytes),
            // Only a hole follows.
            Err(Errno::NXIO) => break,
            Err(Errno::INVAL) => at,
            Err(e) => return Err(e.into()),
        };
        at = match rustix::fs::seek(file.as_fd(), SeekFrom::Hole(start)) {
            // A file that was truncated meanwhile has no end there; reading it fails later.
            Err(Errno::INVAL | Errno::NXIO) => bytes,
            other => other?.clamp(start, bytes),
        };
        let (first, end) = (start / PAGE_SIZE, at.div_ceil(PAGE_SIZE));
        // Data may end and begin again within a block.
        let first = runs.last().map_or(first, |run| first.max(run.end().0));
        if end > first {
            let run = FrameRun { start: Gfn(first), count: end - first };
            match runs.last_mut().filter(|last| last.end() == run.start) {
                Some(last) => last.count += run.count,
                None => runs.push(run),
            }
        }
    }
    Ok(runs)
}

#[cfg(test)]
mod tests {
    use super::*;

    const BLOCK: usize = PAGE_SIZE as usize;

    #[test]
    fn holes_are_not_read() {
        let file = tempfile::tempfile().unwrap();
        let bytes = (1 << 30) + 512;
        file.set_len(bytes + 10 * PAGE_SIZE).unwrap();
        assert_eq!(data_runs(&file, bytes).unwrap(), []);
        let data = [3, 4, 1000, bytes / PAGE_SIZE, bytes / PAGE_SIZE + 2];
        for block in data {
            file.write_all_at(&[1; BLOCK], block * PAGE_SIZE).unwrap();
        }
        let found = data_runs(&file, bytes).unwrap();
        let has = |block| found.iter().any(|r| r.start.0 <= block && block < r.end().0);
        assert!(data[..4].iter().all(|block| has(*block)), "{found:?}");
        assert!(!has(data[4]), "it is past the drive's end: {found:?}");
        // A file system may have larger blocks than ours.
        assert!(found.iter().map(|r| r.count).sum::<u64>() <= 4 * 16, "{found:?}");
        assert!(found.is_sorted_by(|a, b| a.end() < b.start), "{found:?}");
    }

    #[test]
    fn holes_are_found_within_a_part() {
        let file = tempfile::tempfile().unwrap();
        file.set_len(1 << 30).unwrap();
        for block in [100, 50_000, 200_000] {
            file.write_all_at(&[1; BLOCK], block * PAGE_SIZE).unwrap();
        }
        let bytes = 1 << 30;
        let within = |start, count| {
            let run = FrameRun { start: Gfn(start), count };
            let found = data_within(&file, run, bytes).unwrap();
            assert!(
                found.iter().all(|f| f.start >= run.start && f.end() <= run.end()),
                "{found:?}"
            );
            found.iter().flat_map(|run| run.frames()).map(|block| block.0).collect::<Vec<_>>()
        };
        assert!(within(0, 100_000).contains(&100) && within(0, 100_000).contains(&50_000));
        assert!(within(50_000, 1) == [50_000] && within(200_000, 62_144).contains(&200_000));
        assert_eq!(within(60_000, 100_000), [0; 0]);
    }

    #[test]
    fn threads_on_hung_storage_are_bounded() {
        static COUNT: AtomicUsize = AtomicUsize::new(0);
        let take = || StoragePermit::take_of(&COUNT);
        let mut hung: Vec<_> = (0..MAX_STORAGE_THREADS).map(|_| take().unwrap()).collect();
        assert!(take().is_err());
        hung.pop();
        assert!(take().is_ok());
        drop(hung);
        assert_eq!(COUNT.load(Ordering::Relaxed), 0);
    }

    #[test]
    fn listed_holes_are_bounded() {
        let file = tempfile::tempfile().unwrap();
        // Pieces larger than any file system's blocks here, with data in every other piece.
        let (piece, pieces) = (64 << 10, MAX_DATA_RUNS as u64 + 10);
        let bytes = 2 * piece * pieces;
        file.set_len(bytes).unwrap();
        for i in 0..pieces {
            file.write_all_at(&[1], 2 * piece * i).unwrap();
        }
        let found = data_runs(&file, bytes).unwrap();
        assert_eq!(found.len(), MAX_DATA_RUNS);
        assert_eq!(found.last().map(|run| run.end().0), Some(bytes / PAGE_SIZE), "all the rest");
        assert!(found.iter().rev().skip(1).all(|run| run.bytes() <= piece));
    }
}
