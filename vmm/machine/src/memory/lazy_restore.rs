//! Owns a lazy restore: the frames of a restored guest that have not arrived yet. A thread that
//! touches such a frame waits in the kernel (userfaultfd) until it has been fetched. The other
//! frames are fetched in the background while the guest runs.
//!
//! One thread does all the fetching. It never touches guest memory itself, but has the kernel place
//! the contents. When all frames have arrived it unregisters the memory. If a frame cannot be
//! fetched or the guest ends early, the memory stays registered: no thread ever reads zeros in
//! place of stored content, and a thread that waits does so until the process ends.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use driftline_dirty_tracker::{FrameRun, FrameSet, Gfn, PAGE_SIZE};
use driftline_guest::{GuestRam, LazyRestoreProgress, PageSource};
use parking_lot::{Condvar, Mutex, MutexGuard};
use vm_memory::{GuestMemoryBackend, GuestMemoryRegion};

use crate::histogram::{Distribution, Histogram};
use crate::log;
use crate::thread_end::join_until;

use super::error::MemoryError;
use super::region::{all, frame_at, is_pooled};
use super::userfault::Userfault;

/// Frames that one background fetch takes. A fault may have to wait while it lasts.
const BACKGROUND_BATCH: u64 = 64;
/// Frames that are fetched for one fault: the guest is likely to access its neighbours next.
const READAHEAD: u64 = 16;
/// Upper bound on delaying background fetches until the guest runs, so that they do not compete
/// with VM construction for CPU. Until then only faulted frames and the recorded working set are
/// fetched.
const BOOT_GRACE: Duration = Duration::from_millis(100);
/// Interval between two checks whether the guest runs.
const RUN_CHECK_INTERVAL: Duration = Duration::from_micros(500);
/// Time from the guest's end until lost pages are poisoned. That kills the threads that wait for
/// them, and the process with them. A process with one guest has normally ended by then.
const POISON_DELAY: Duration = Duration::from_secs(1);
/// Buckets of the time until a fault is answered, in µs: some 20 µs for content in the page cache,
/// milliseconds for a disk, seconds for storage that hangs.
const FAULT_US: &[u64] = &[
    10, 20, 50, 100, 200, 500, 1_000, 2_000, 5_000, 10_000, 20_000, 50_000, 100_000, 200_000,
    500_000, 1_000_000, 5_000_000,
];
/// Limit on waiting for the thread when the restore is dropped: a read from storage that hangs may
/// never end.
const END_LIMIT: Duration = Duration::from_secs(if cfg!(test) { 1 } else { 10 });
/// Maximum number of faults that are recorded.
const MAX_RECORDED_FAULTS: usize = 1 << 16;

/// The machine that owns the memory. Its guest must not continue without a frame that cannot be
/// fetched.
pub(crate) trait RestoreOwner: Send {
    /// Ends the guest for the reason `why`, without waiting for its end.
    fn lost(&self, why: String);

    /// Returns whether the guest has ended: its vCPUs are stopped, and its devices as far as
    /// possible.
    fn has_ended(&self) -> bool;

    /// Returns whether its vCPUs are restoring their state. Only KVM touches guest memory then; no
    /// thread of this process does, which a lost page would kill.
    fn restores_vcpus(&self) -> bool;

    /// Returns whether the guest runs.
    fn runs(&self) -> bool;
}

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

#[derive(Debug)]
struct LazyRestoreShared {
    userfault: Userfault,
    /// Keeps the memory mapped.
    ram: GuestRam,
    /// Whether the thread is to end.
    over: AtomicBool,
    state: Mutex<LazyRestoreState>,
    /// Times from reading a fault to answering it.
    faults: Histogram,
    /// Notified when a fetch has ended.
    idle: Condvar,
}

#[derive(Debug, Default)]
struct LazyRestoreState {
    /// Frames that are not in place yet.
    left: FrameSet,
    /// The part of `left` that is being fetched.
    under_way: Option<FrameRun>,
    /// The frame that a thread waits for without touching it.
    requested: Option<Gfn>,
    /// Whether this process has listed the frames that are left, in order to read them. Faults
    /// after that are not the guest's.
    is_read: bool,
    fetching: LazyRestoreProgress,
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
        let buffer = vec![0; (BACKGROUND_BATCH * PAGE_SIZE) as usize];
        let fetcher = Fetcher {
            shared: shared.clone(),
            source,
            buffer,
            owner,
            is_lost: false,
            lost: Vec::new(),
            ended: None,
        };
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
        let is_missing = |s: &mut LazyRestoreState| {
            s.under_way.is_some_and(|run| run.start < frames.end() && frames.start < run.end())
        };
        let mut state = self.shared.lock();
        self.shared.idle.wait_while(&mut state, is_missing);
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

impl LazyRestoreShared {
    fn lock(&self) -> MutexGuard<'_, LazyRestoreState> {
        self.state.lock()
    }

    /// Returns the address of the first of `frames`, and the part of `frames` that lies in that
    /// mapping.
    fn place(&self, frames: FrameRun) -> Option<(u64, FrameRun)> {
        self.ram.iter().find_map(|region| {
            let has = all(region);
            let count = frames.end().min(has.end()).0.checked_sub(frames.start.0)?;
            (frames.start >= has.start && count > 0).then(|| {
                let address = region.as_ptr() as u64 + (frames.start.gpa() - has.start.gpa());
                (address, FrameRun { count, ..frames })
            })
        })
    }
}

/// The state that the fetching thread owns.
struct Fetcher {
    shared: Arc<LazyRestoreShared>,
    source: Box<dyn PageSource>,
    buffer: Vec<u8>,
    owner: Box<dyn RestoreOwner>,
    is_lost: bool,
    /// Addresses of frames that cannot be fetched.
    lost: Vec<u64>,
    /// Time at which this thread first found that the guest had ended with frames lost.
    ended: Option<Instant>,
}

impl Drop for Fetcher {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.lose("the thread that fetches it has panicked".to_owned());
            std::mem::forget(self.shared.clone());
        }
    }
}

impl Fetcher {
    /// Fetches frames until all have arrived or the restore is stopped.
    fn run(mut self) {
        let began = Instant::now();
        let mut faults: Vec<u64> = Vec::new();
        let mut working_set = self.source.working_set().to_vec().into_iter();
        let mut in_grace = true;
        while !self.shared.over.load(Ordering::Acquire) {
            in_grace &= !self.owner.runs() && began.elapsed() < BOOT_GRACE;
            let only_faults = in_grace && working_set.len() == 0;
            let limit = if only_faults { RUN_CHECK_INTERVAL } else { Duration::ZERO };
            if let Err(e) = self.shared.userfault.faults(limit, &mut faults) {
                self.lose(format!("reading faults: {e}"));
                break;
            }
            if !faults.is_empty() {
                self.handle_faults(&mut faults);
                continue;
            }
            self.poison_lost();
            let requested = self.shared.lock().requested.take();
            if let Some(frame) = requested {
                self.fetch(FrameRun { start: frame, count: 1 });
                continue;
            }
            if only_faults {
                continue;
            }
            if in_grace {
                // The threads that start the guest run before this one.
                std::thread::yield_now();
            }
            if !self.fetch_in_background(&mut working_set) {
                if self.lost.is_empty() {
                    break;
                }
                std::thread::sleep(Duration::from_millis(1));
            }
        }
        self.finish(began);
    }

    fn handle_faults(&mut self, faults: &mut Vec<u64>) {
        let read = Instant::now();
        for address in faults.drain(..) {
            self.handle_fault(address);
            if !self.is_lost {
                self.shared.faults.observe(read.elapsed());
            }
        }
    }

    /// Fetches the next part of the working set, or the next frames after that. Returns false if no
    /// frame is left.
    fn fetch_in_background(&mut self, working_set: &mut impl Iterator<Item = FrameRun>) -> bool {
        let Some(next) = self.shared.lock().left.first() else { return false };
        match working_set.next() {
            // Includes its neighbours: the recorded fault fetched them as well.
            Some(run) => {
                let count = run.count.clamp(READAHEAD, BACKGROUND_BATCH);
                let fetched = self.fetch(FrameRun { count, ..run });
                self.shared.lock().fetching.prefetched += fetched;
            }
            None => {
                self.fetch(FrameRun { count: next.count.min(BACKGROUND_BATCH), ..next });
            }
        }
        true
    }

    /// Unregisters the memory if all frames have arrived, and reports the end of the restore.
    fn finish(mut self, began: Instant) {
        if !self.lost.is_empty() || !self.shared.lock().left.is_empty() {
            // Never closes the descriptor: threads that wait would then continue with zeros.
            std::mem::forget(self.shared.clone());
            return;
        }
        // Unregistering wakes the threads that wait; they read the contents that have arrived.
        for region in self.shared.ram.iter() {
            let (start, len) = (region.as_ptr() as u64, region.len());
            if let Err(e) = self.shared.userfault.unregister(start, len) {
                tracing::error!("restored memory cannot be unregistered from userfaultfd: {e}");
            }
        }
        let mut state = self.shared.lock();
        state.fetching.time = Some(began.elapsed());
        let LazyRestoreProgress { fetched: frames, prefetched, .. } = state.fetching;
        let faulted = state.fetching.faulted.clone();
        drop(state);
        let (waits, ms) = (faulted.len(), began.elapsed().as_millis());
        tracing::info!(frames, prefetched, waits, ms, "lazy restore complete");
        self.source.finish(&faulted);
    }

    /// Poisons lost pages, so that no thread waits for one for ever. KVM's calls then fail. If a
    /// thread of this process waits for one, SIGBUS ends the process. So this runs only while the
    /// vCPUs restore their state, or some time after the guest's end.
    fn poison_lost(&mut self) {
        if self.lost.is_empty() {
            return;
        }
        if !self.owner.restores_vcpus() {
            if !self.owner.has_ended() {
                return;
            }
            if self.ended.get_or_insert_with(Instant::now).elapsed() < POISON_DELAY {
                return;
            }
        }
        let userfault = &self.shared.userfault;
        self.lost.retain(|address| match userfault.poison(*address, PAGE_SIZE) {
            Ok(()) => false,
            Err(e) => {
                tracing::error!("a lost page at {address:#x} cannot be poisoned: {e}");
                true
            }
        });
        if !self.lost.is_empty() {
            // Delays the next attempt.
            self.ended = Some(Instant::now());
        }
    }

    /// Handles a fault at `address`.
    fn handle_fault(&mut self, address: u64) {
        let Some(gfn) = frame_at(&self.shared.ram, address) else { return };
        let mut state = self.shared.lock();
        if state.left.contains(gfn) {
            if state.fetching.faulted.len() < MAX_RECORDED_FAULTS && !state.is_read {
                state.fetching.faulted.push(FrameRun { start: gfn, count: 1 });
            }
            drop(state);
            self.fetch(FrameRun { start: gfn, count: READAHEAD });
            return;
        }
        drop(state);
        if self.lost.contains(&(address & !(PAGE_SIZE - 1))) {
            return;
        }
        // The frame has no stored content, or has arrived since.
        let start = address & !(PAGE_SIZE - 1);
        if let Err(e) = self.shared.userfault.zero(start, PAGE_SIZE) {
            self.lose(format!("page {:#x} cannot be filled with zeros: {e}", gfn.0));
        }
    }

    /// Fetches those of `frames`, at most [`BACKGROUND_BATCH`], that have not arrived, and returns
    /// their number.
    fn fetch(&mut self, frames: FrameRun) -> u64 {
        let shared = self.shared.clone();
        let (mut at, mut fetched) = (frames.start, 0);
        loop {
            let mut state = shared.lock();
            let rest = FrameRun { start: at, count: frames.end().0.saturating_sub(at.0) };
            let Some(part) = state.left.within(rest).next() else { return fetched };
            let Some((address, run)) = shared.place(part) else {
                // A frame outside all mappings was never part of the guest.
                state.left.remove(part);
                continue;
            };
            state.under_way = Some(run);
            drop(state);
            self.fetch_run(address, run);
            let mut state = shared.lock();
            state.left.remove(run);
            state.fetching.fetched += run.count;
            state.under_way = None;
            drop(state);
            shared.idle.notify_all();
            fetched += run.count;
            at = run.end();
        }
    }

    /// Fetches `run` into memory at `address`. Frames that cannot be fetched are recorded as lost.
    fn fetch_run(&mut self, address: u64, run: FrameRun) {
        match self.copy(address, run) {
            Ok(()) => {}
            Err(_) if run.count > 1 => {
                // Retries one by one, so that only the bad frames are lost.
                for (gfn, i) in run.frames().zip(0..) {
                    self.fetch_run(address + i * PAGE_SIZE, FrameRun { start: gfn, count: 1 });
                }
            }
            Err(why) => {
                self.lost.push(address);
                let epoch = self.source.epoch();
                self.lose(format!("page {:#x} of checkpoint {epoch} is lost: {why}", run.start.0));
            }
        }
    }

    fn copy(&mut self, address: u64, run: FrameRun) -> io::Result<()> {
        let contents = &mut self.buffer[..(run.count * PAGE_SIZE) as usize];
        self.source.read(run, contents).map_err(io::Error::other)?;
        let copied = self.shared.userfault.copy(address, contents);
        copied.map_err(|e| {
            io::Error::new(e.kind(), format!("placing page {:#x} in memory: {e}", run.start.0))
        })
    }

    /// Reports, once, that the guest cannot continue.
    fn lose(&mut self, why: String) {
        if !std::mem::replace(&mut self.is_lost, true) {
            // The owner also reports the reason.
            tracing::debug!("a page of the restored guest is lost: {why}");
            self.shared.lock().fetching.lost = Some(why.clone());
            self.shared.idle.notify_all();
            self.owner.lost(why);
        }
    }
}
