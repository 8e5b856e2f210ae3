//! Owns a lazy restore: the frames of a restored guest that have not arrived yet. A thread that
//! touches such a frame waits in the kernel (userfaultfd) until it has been fetched. The other
//! frames are fetched in the background while the guest runs.
//!
//! One thread does all the fetching. It never touches guest memory itself, but has the kernel place
//! the contents. When all frames have arrived it unregisters the memory. If a frame cannot be
//! fetched or the guest ends early, the memory stays registered: no thread ever reads zeros in
//! place of stored content, and a thread that waits does so until the process ends.

mod fetcher;
mod shared;

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use driftline_dirty_tracker::{FrameRun, FrameSet, Gfn};
use driftline_guest::{GuestRam, LazyRestoreProgress, PageSource};
use parking_lot::{Condvar, Mutex};
use vm_memory::{GuestMemoryBackend, GuestMemoryRegion};

use self::fetcher::Fetcher;
use self::shared::{LazyRestoreShared, LazyRestoreState};
use super::error::MemoryError;
use super::region::is_pooled;
use super::userfault::Userfault;
use crate::histogram::{Distribution, Histogram};
use crate::log;
use crate::thread_end::join_until;

pub(crate) use self::fetcher::RestoreOwner;

/// Buckets of the time until a fault is answered, in µs: some 20 µs for content in the page cache,
/// milliseconds for a disk, seconds for storage that hangs.
const FAULT_US: &[u64] = &[
    10, 20, 50, 100, 200, 500, 1_000, 2_000, 5_000, 10_000, 20_000, 50_000, 100_000, 200_000,
    500_000, 1_000_000, 5_000_000,
];
/// Limit on waiting for a lazy restore to finish. After it, an epoch can use write protection and
/// copy after the guest has resumed.
pub(super) const LAZY_RESTORE_LIMIT: Duration = Duration::from_secs(1);
/// Limit on waiting for the thread when the restore is dropped: a read from storage that hangs may
/// never end.
const END_LIMIT: Duration = Duration::from_secs(if cfg!(test) { 1 } else { 10 });

/// The lazy restore of one guest's memory. Dropping it stops it: frames that have not arrived never
/// will.
#[derive(Debug)]
pub(crate) struct LazyRestore {
    shared: Arc<LazyRestoreShared>,
    thread: Option<JoinHandle<()>>,
}

/// Figures of a lazy restore.
#[derive(Clone, PartialEq, Debug)]
pub struct RestoreFigures {
    /// Frames still to be fetched.
    pub left: u64,
    /// Frames that have arrived.
    pub fetched: u64,
    /// Number of the arrived frames that a prefetch of the working set brought, before any fault.
    pub prefetched: u64,
    /// Times from reading a fault to answering it.
    pub faults: Distribution,
}

impl LazyRestore {
    /// Starts fetching the frames of `source` into `ram`, which nothing may have accessed yet.
    /// Returns the source if the memory's pages or the host do not support that.
    pub(super) fn begin(
        ram: &GuestRam,
        source: Box<dyn PageSource>,
        owner: Box<dyn RestoreOwner>,
    ) -> io::Result<Result<Self, Box<dyn PageSource>>> {
        if ram.iter().any(is_pooled) {
            tracing::info!(
                "no lazy restore with huge pages from the pool: all pages are read first"
            );
            return Ok(Err(source));
        }
        let userfault = match Userfault::open_for_missing() {
            Ok(userfault) => userfault,
            Err(e) => {
                tracing::info!("no userfaultfd: {e}; all pages are read first");
                return Ok(Err(source));
            }
        };
        for region in ram.iter() {
            userfault.register_missing(region.as_ptr() as u64, region.len())?;
        }
        let state =
            LazyRestoreState { left: source.frames().clone(), ..LazyRestoreState::default() };
        let shared = Arc::new(LazyRestoreShared {
            userfault,
            ram: ram.clone(),
            over: AtomicBool::new(false),
            state: Mutex::new(state),
            faults: Histogram::new(FAULT_US),
            idle: Condvar::new(),
        });
        let fetcher = Fetcher::new(shared.clone(), source, owner);
        let thread = Some(log::spawn("lazy-restore", move || fetcher.run())?);
        Ok(Ok(Self { shared, thread }))
    }

    /// Returns the progress of the restore.
    pub(crate) fn fetching(&self) -> LazyRestoreProgress {
        let state = self.shared.lock();
        LazyRestoreProgress { left: state.left.frames(), ..state.fetching.clone() }
    }

    /// Returns the figures of the restore. This is cheaper than [`fetching`](Self::fetching), which
    /// lists all faults.
    pub(super) fn figures(&self) -> RestoreFigures {
        let state = self.shared.lock();
        let LazyRestoreProgress { fetched, prefetched, .. } = state.fetching;
        let left = state.left.frames();
        drop(state);
        RestoreFigures { left, fetched, prefetched, faults: self.shared.faults.read() }
    }

    /// Returns the frames that have not arrived. Frames that arrive after this call are found in
    /// memory.
    pub(super) fn left(&self) -> FrameSet {
        let mut state = self.shared.lock();
        state.is_read = true;
        state.left.clone()
    }

    /// Returns whether the fetching thread still runs.
    pub(super) fn is_under_way(&self) -> bool {
        self.thread.as_ref().is_some_and(|thread| !thread.is_finished())
    }

    /// Makes those of `frames` that have not arrived read as zeros from now on, and adds them to
    /// `forgotten`. Waits for a fetch of any of them that is in progress.
    pub(super) fn forget(&self, frames: FrameRun, forgotten: &mut Vec<FrameRun>) {
        let is_fetched_now = |s: &mut LazyRestoreState| {
            s.under_way.is_some_and(|run| run.start < frames.end() && frames.start < run.end())
        };
        let mut state = self.shared.lock();
        self.shared.idle.wait_while(&mut state, is_fetched_now);
        forgotten.extend(state.left.within(frames));
        state.left.remove(frames);
    }

    /// Fetches `frame` next.
    pub(super) fn fetch_next(&self, frame: Gfn) {
        self.shared.lock().requested = Some(frame);
    }

    /// Waits until `frame` has arrived, so that a thread of this process may touch it. A thread
    /// that touches a lost frame waits until the process ends, or is killed.
    ///
    /// # Errors
    ///
    /// The reason why the frame has not arrived, after `limit` at the latest.
    pub(super) fn require(&self, frame: Gfn, limit: Duration) -> Result<(), MemoryError> {
        let mut state = self.shared.lock();
        state.requested = state.left.contains(frame).then_some(frame);
        let is_missing =
            |s: &mut LazyRestoreState| s.left.contains(frame) && s.fetching.lost.is_none();
        self.shared.idle.wait_while_for(&mut state, is_missing, limit);
        state.requested = None;
        match &state.fetching.lost {
            Some(why) => Err(MemoryError::Lost(why.clone())),
            None if state.left.contains(frame) => Err(MemoryError::NotFetched { frame, limit }),
            None => Ok(()),
        }
    }

    /// Waits until all frames have arrived, at most `limit`. Returns whether they have.
    pub(super) fn wait(&self, limit: Duration) -> bool {
        let until = Instant::now() + limit;
        while self.is_under_way() && Instant::now() < until {
            std::thread::sleep(Duration::from_millis(1));
        }
        !self.is_under_way()
    }
}

impl Drop for LazyRestore {
    fn drop(&mut self) {
        self.shared.over.store(true, Ordering::Release);
        let Some(thread) = self.thread.take() else { return };
        match join_until(thread, Instant::now() + END_LIMIT) {
            Some(Ok(())) => {}
            Some(Err(_)) => tracing::error!("the thread that fetches pages has panicked"),
            // It keeps the memory mapped until the read ends.
            None => tracing::error!(
                "a page of the restored guest was not read within {END_LIMIT:?}, because its \
                 storage hangs; the thread that reads it is left behind"
            ),
        }
    }
}
