//! The thread of a lazy restore, which fetches all frames.

use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use driftline_dirty_tracker::{FrameRun, PAGE_SIZE};
use driftline_guest::{LazyRestoreProgress, PageSource};
use vm_memory::{GuestMemoryBackend, GuestMemoryRegion};

use super::shared::LazyRestoreShared;
use crate::memory::region::frame_at;

/// How much is fetched, and when. The page on performance of restores
/// (`docs/src/performance/memory.md`) has the speeds that the arithmetic uses.
struct FetchPolicy {
    /// Frames that one background fetch takes. A fault may have to wait while it lasts: 256 KiB
    /// take 0.1 ms at 3.0 GB/s, the speed of a whole restore, and 1.3 ms from a disk of 200 MB/s.
    background_batch: u64,
    /// Frames that are fetched for one fault: the guest is likely to access its neighbours next.
    /// Linux, too, maps 64 KiB around a fault (`fault_around_bytes`).
    readahead: u64,
    /// Upper bound on delaying background fetches until the guest runs, so that they do not compete
    /// with VM construction for CPU. Until then only faulted frames and the recorded working set
    /// are fetched. A lazily restored guest runs 7 ms after the start of its process: a build that
    /// takes ten times as long does not gain from a further delay.
    boot_grace: Duration,
    /// Interval between two checks whether the guest runs: the background copy begins at most that
    /// much later. That is less than a tenth of the time to build the guest.
    run_check_interval: Duration,
    /// Interval between two checks for faults, and whether lost pages may be poisoned, once no
    /// frame is left to fetch: short against `poison_delay`.
    retry_interval: Duration,
    /// Time from the guest's end until lost pages are poisoned. That kills the threads that wait
    /// for them, and the process with them. A process with one guest has normally ended by then.
    poison_delay: Duration,
    /// Maximum number of faults that are recorded, of 16 bytes each: 1 MiB. With their neighbours
    /// they are 4 GiB of memory.
    max_recorded_faults: usize,
}

const POLICY: FetchPolicy = FetchPolicy {
    background_batch: 64,
    readahead: 16,
    boot_grace: Duration::from_millis(100),
    run_check_interval: Duration::from_micros(500),
    retry_interval: Duration::from_millis(1),
    poison_delay: Duration::from_secs(1),
    max_recorded_faults: 1 << 16,
};

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

/// The state that the fetching thread owns.
pub(super) struct Fetcher {
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
    /// Returns the state of a thread that fetches the frames of `source` for `owner`.
    pub(super) fn new(
        shared: Arc<LazyRestoreShared>,
        source: Box<dyn PageSource>,
        owner: Box<dyn RestoreOwner>,
    ) -> Self {
        let buffer = vec![0; (POLICY.background_batch * PAGE_SIZE) as usize];
        Self { shared, source, buffer, owner, is_lost: false, lost: Vec::new(), ended: None }
    }

    /// Fetches frames until all have arrived or the restore is stopped.
    pub(super) fn run(mut self) {
        let began = Instant::now();
        let mut faults: Vec<u64> = Vec::new();
        let mut working_set = self.source.working_set().to_vec().into_iter();
        let mut in_grace = true;
        while !self.shared.over.load(Ordering::Acquire) {
            in_grace &= !self.owner.runs() && began.elapsed() < POLICY.boot_grace;
            let only_faults = in_grace && working_set.len() == 0;
            let limit = if only_faults { POLICY.run_check_interval } else { Duration::ZERO };
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
                std::thread::sleep(POLICY.retry_interval);
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
                let count = run.count.clamp(POLICY.readahead, POLICY.background_batch);
                let fetched = self.fetch(FrameRun { count, ..run });
                self.shared.lock().fetching.prefetched += fetched;
            }
            None => {
                self.fetch(FrameRun { count: next.count.min(POLICY.background_batch), ..next });
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
            if self.ended.get_or_insert_with(Instant::now).elapsed() < POLICY.poison_delay {
                return;
            }
        }
        let userfault = &self.shared.userfault;
        self.lost.retain(|address| match userfault.poison(*address, PAGE_SIZE, PAGE_SIZE) {
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
            if state.fetching.faulted.len() < POLICY.max_recorded_faults && !state.is_read {
                state.fetching.faulted.push(FrameRun { start: gfn, count: 1 });
            }
            drop(state);
            self.fetch(FrameRun { start: gfn, count: POLICY.readahead });
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

    /// Fetches those of `frames`, at most `background_batch`, that have not arrived, and returns
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
