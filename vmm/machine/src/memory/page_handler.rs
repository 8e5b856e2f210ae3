//! Owns memory whose pages another process serves: a page handler, as Firecracker has it. The
//! handler gets the userfaultfd and answers all faults of this process and of KVM, each of which
//! waits in the kernel for it.
//!
//! - If the handler ends, no fault is answered any more. A thread notices that and ends the guest,
//!   unless all pages have arrived.
//! - An operation that needs all memory (a copy of it) fetches it first. Then the memory is
//!   unregistered, and is like any other: it does not need the handler any more. Until then it
//!   cannot be write-protected, because a mapping has one userfaultfd.
//! - A page that is discarded is missing again, and the kernel sends the handler a message about
//!   that. The handler answers faults on it with zeros from then on.
//!
//! This process trusts a handler as itself: with the userfaultfd it can change what any mapping
//! holds.

mod connection;
mod fetcher;
#[cfg(test)]
mod tests;

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, RecvTimeoutError, SyncSender, TrySendError};
use std::sync::{Arc, OnceLock};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use driftline_dirty_tracker::{FrameRun, FrameSet, Gfn, PAGE_SIZE};
use driftline_guest::GuestRam;
use driftline_store::{MemoryFileLayout, SlotPlace};
use parking_lot::Mutex;
use rustix::event::{EventfdFlags, PollFd, PollFlags, eventfd, poll};
use rustix::io::Errno;
use vm_memory::{GuestMemoryBackend, GuestMemoryRegion};

pub use self::connection::PageHandlerSocket;
use self::connection::{HandlerEnd, HandlerMapping};
use self::fetcher::FetchJob;
use super::backing::HUGE_PAGE;
use super::error::{FrameError, HandlerStep, PageHandlerError};
use super::lazy_restore::RestoreOwner;
use super::region::{all, is_pooled};
use super::resident::ResidentFrames;
use super::userfault::Userfault;
use crate::log;
use crate::thread_end::join_until;

/// Limit on waiting for a handler to serve a piece of at most 4 MiB. 0.4 MiB/s is slower than any
/// storage that works.
const FETCH_LIMIT: Duration = Duration::from_secs(if cfg!(test) { 3 } else { 10 });
/// Interval between two checks whether a handler that is waited for has ended.
const LOSS_CHECK_INTERVAL: Duration = Duration::from_millis(50);
/// Interval between two checks of the guest's state, before threads that wait are freed.
const STATE_CHECK_INTERVAL: Duration = Duration::from_millis(1);
/// Time from the guest's end until the threads that still wait are freed, which kills them, and the
/// process with them. A process with one guest has normally ended by then.
const POISON_DELAY: Duration = Duration::from_secs(1);
/// Limit on waiting for the threads when the memory is dropped.
const END_LIMIT: Duration = Duration::from_secs(1);

/// Guest memory that a page handler serves. Dropping it stops the threads; pages that have not
/// arrived never will.
#[derive(Debug)]
pub(crate) struct PageHandler {
    shared: Arc<HandlerShared>,
    threads: OnceLock<HandlerThreads>,
    /// Held by the thread that fetches all memory.
    fetching_all: Mutex<()>,
}

#[derive(Debug)]
struct HandlerThreads {
    watch: JoinHandle<()>,
    fetch: JoinHandle<()>,
    jobs: SyncSender<FetchJob>,
}

/// What the memory and its threads share.
#[derive(Debug)]
struct HandlerShared {
    /// Never closed before the memory is unmapped, unless all pages have arrived: threads that wait
    /// would otherwise continue with zeros.
    userfault: Userfault,
    /// Keeps the memory mapped.
    ram: GuestRam,
    connection: PageHandlerSocket,
    /// Readable once the watching thread is to end.
    stop: OwnedFd,
    /// Whether pages may be missing that the handler has.
    serves: AtomicBool,
    /// Held while the memory is unregistered, so that this happens only once: afterwards another
    /// descriptor may register it.
    finishing: Mutex<()>,
    /// Why no page arrives any more.
    lost: OnceLock<HandlerEnd>,
    /// Set when a restore has failed: the watching thread then poisons the missing pages.
    abandoned: AtomicBool,
    /// Set before `stop` when the memory is dropped.
    dropped: AtomicBool,
}

impl PageHandler {
    /// Hands `ram`, which nothing may have accessed yet, over to the handler at `connection`.
    pub(super) fn begin(
        ram: &GuestRam,
        layout: &MemoryFileLayout,
        connection: PageHandlerSocket,
    ) -> Result<Self, PageHandlerError> {
        let userfault = Userfault::open_for_handler();
        let userfault = userfault.map_err(PageHandlerError::new(HandlerStep::Open))?;
        let mut mappings = Vec::new();
        for (region, SlotPlace { offset, .. }) in ram.iter().zip(layout.slots()) {
            let (start, size) = (region.as_ptr() as u64, region.len());
            let registered = userfault.register_missing(start, size);
            registered.map_err(PageHandlerError::new(HandlerStep::Register))?;
            let page_size = if is_pooled(region) { HUGE_PAGE } else { PAGE_SIZE };
            mappings.push(HandlerMapping {
                base_host_virt_addr: start,
                size,
                offset: *offset,
                page_size,
                page_size_kib: page_size,
            });
        }
        let stop = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK);
        let stop = stop.map_err(|e| PageHandlerError::new(HandlerStep::Open)(e.into()))?;
        connection.send(userfault.as_fd(), &mappings)?;
        let shared = Arc::new(HandlerShared {
            userfault,
            ram: ram.clone(),
            connection,
            stop,
            serves: AtomicBool::new(true),
            finishing: Mutex::default(),
            lost: OnceLock::new(),
            abandoned: AtomicBool::new(false),
            dropped: AtomicBool::new(false),
        });
        Ok(Self { shared, threads: OnceLock::new(), fetching_all: Mutex::default() })
    }

    /// Starts to watch the handler. Its end ends the guest of `owner` if pages are missing.
    pub(super) fn watch(&self, owner: Box<dyn RestoreOwner>) -> io::Result<()> {
        let (jobs, inbox) = mpsc::sync_channel(1);
        let ram = self.shared.ram.clone();
        // It ends with the sender of its jobs.
        let fetch = log::spawn("page-fetch", move || fetcher::run(&ram, &inbox))?;
        let shared = self.shared.clone();
        let watch = log::spawn("page-handler", move || shared.watch(&*owner))?;
        let _ = self.threads.set(HandlerThreads { watch, fetch, jobs });
        Ok(())
    }

    /// Returns whether pages may be missing that the handler has.
    pub(super) fn serves(&self) -> bool {
        self.shared.serves.load(Ordering::Acquire)
    }

    /// Waits until `frames` have arrived, so that a thread of this process may touch them. It may
    /// not touch those that are discarded later.
    ///
    /// # Errors
    ///
    /// The handler has ended, has not served a piece of at most 4 MiB within [`FETCH_LIMIT`], or is
    /// slower than that.
    pub(super) fn fetch(&self, frames: &[FrameRun]) -> Result<(), FrameError> {
        if !self.serves() || frames.is_empty() {
            return Ok(());
        }
        self.wait_for(fetcher::pieces(&self.shared.missing(frames)), FETCH_LIMIT)
    }

    /// Behaves like [`fetch`](Self::fetch) with one frame, whose wait ends after `limit`. This is
    /// for threads that may open no files.
    pub(super) fn require(&self, frame: Gfn, limit: Duration) -> Result<(), FrameError> {
        match self.serves() {
            true => self.wait_for(vec![FrameRun { start: frame, count: 1 }], limit),
            false => Ok(()),
        }
    }

    /// Waits until `pieces` have arrived, `limit` for each.
    fn wait_for(&self, pieces: Vec<FrameRun>, limit: Duration) -> Result<(), FrameError> {
        // Also if no piece is missing: a poisoned page counts as present.
        self.check_lost()?;
        let (fetched, results) = mpsc::channel();
        let mut job = Some(FetchJob { pieces: pieces.clone(), fetched });
        // The limit also applies to the sum, so that slow answers cannot extend it.
        let mut latest = Instant::now() + limit;
        for piece in pieces {
            latest += limit.mul_f64(piece.count as f64 / fetcher::FETCH_PIECE_FRAMES as f64);
            let until = latest.min(Instant::now() + limit);
            loop {
                self.check_lost()?;
                // The job waits behind those of other threads. One whose caller has given up may
                // still wait for its pages.
                job = job.take().and_then(|job| self.begin_job(job));
                let left = until.saturating_duration_since(Instant::now());
                match results.recv_timeout(left.min(LOSS_CHECK_INTERVAL)) {
                    Ok(result) => {
                        result.map_err(FrameError::system("fetching frames"))?;
                        break;
                    }
                    Err(RecvTimeoutError::Timeout) if !left.is_zero() => {}
                    Err(_) => {
                        let handler = self.shared.connection.path().to_owned();
                        return Err(FrameError::HandlerSilent { handler, piece, limit });
                    }
                }
            }
        }
        Ok(())
    }

    /// Fails if the handler has ended with pages missing.
    fn check_lost(&self) -> Result<(), FrameError> {
        match self.shared.lost.get() {
            Some(end) => Err(FrameError::HandlerLost(self.shared.describe(*end))),
            None => Ok(()),
        }
    }

    /// Gives the fetching thread a job. Returns the job if that thread has no room for it.
    fn begin_job(&self, job: FetchJob) -> Option<FetchJob> {
        let threads = self.threads.get();
        match threads.map(|threads| threads.jobs.try_send(job)) {
            Some(Err(TrySendError::Full(job))) => Some(job),
            // A thread that has ended, or was never started, sends no result.
            _ => None,
        }
    }

    /// Frees the threads that wait for the handler, soon: their accesses fail. The guest must never
    /// run, and no thread of this process may touch its memory any more.
    pub(super) fn abandon(&self) {
        self.shared.abandoned.store(true, Ordering::Release);
        self.shared.stop();
    }

    /// Waits until all memory has arrived, which then does not need the handler any more.
    ///
    /// # Errors
    ///
    /// As [`fetch`](Self::fetch).
    pub(super) fn fetch_all(&self) -> Result<(), FrameError> {
        let _one = self.fetching_all.lock();
        if !self.serves() {
            return Ok(());
        }
        let began = Instant::now();
        tracing::info!("all memory of the guest is fetched from its page handler");
        let frames: Vec<FrameRun> = self.shared.ram.iter().map(all).collect();
        self.fetch(&frames)?;
        self.shared.finish(|| true).map_err(FrameError::system("unregistering memory"))?;
        let ms = began.elapsed().as_millis();
        tracing::info!(ms, "the guest does not need its page handler any more");
        self.shared.stop();
        Ok(())
    }
}

impl Drop for PageHandler {
    fn drop(&mut self) {
        self.shared.dropped.store(true, Ordering::Release);
        self.shared.stop();
        let Some(HandlerThreads { watch, fetch, jobs }) = self.threads.take() else { return };
        drop(jobs);
        let deadline = Instant::now() + END_LIMIT;
        for thread in [watch, fetch] {
            match join_until(thread, deadline) {
                Some(Ok(())) => {}
                Some(Err(_)) => tracing::error!("a thread of the page handler has panicked"),
                // It keeps the memory mapped.
                None => tracing::warn!(
                    "the page handler has not answered a fault; the thread that waits is left \
                     behind"
                ),
            }
        }
    }
}

impl HandlerShared {
    fn stop(&self) {
        // Fails only if the count overflows: then it is readable.
        let _ = rustix::io::write(&self.stop, &1u64.to_ne_bytes());
    }

    fn describe(&self, end: HandlerEnd) -> String {
        format!("the page handler at {} {end}", self.connection.path().display())
    }

    /// Unregisters the memory if `is_complete` finds that all of it has arrived, and returns
    /// whether it is not registered any more. A page that is missing nevertheless was discarded
    /// since, and reads as zeros.
    fn finish(&self, is_complete: impl FnOnce() -> bool) -> io::Result<bool> {
        let _once = self.finishing.lock();
        if !self.serves.load(Ordering::Acquire) {
            return Ok(true);
        }
        if !is_complete() {
            return Ok(false);
        }
        for region in self.ram.iter() {
            let (start, len) = (region.as_ptr() as u64, region.len());
            self.userfault.unregister(start, len)?;
        }
        self.serves.store(false, Ordering::Release);
        Ok(true)
    }

    /// Ends the guest of `owner` once the handler has ended, unless that is not needed any more.
    /// Returns when the memory is dropped.
    fn watch(&self, owner: &dyn RestoreOwner) {
        let why = match self.connection.wait_end(self.stop.as_fd()) {
            Ok(None) if self.abandoned.load(Ordering::Acquire) => return self.poison(),
            Ok(None) => return self.read_messages(),
            Ok(Some(end)) => {
                match self.finish(|| self.is_complete()) {
                    Ok(true) => {
                        tracing::info!("{}; all pages have arrived", self.describe(end));
                        return self.read_messages();
                    }
                    Ok(false) => {}
                    Err(e) => tracing::warn!("memory cannot be unregistered from userfaultfd: {e}"),
                }
                let _ = self.lost.set(end);
                self.describe(end)
            }
            Err(e) => {
                let _ = self.lost.set(HandlerEnd::Unwatched);
                format!("{}: {e}", self.describe(HandlerEnd::Unwatched))
            }
        };
        // A guest that has ended for another reason needs no page.
        if !owner.has_ended() {
            tracing::error!("{why}");
            owner.lost(why);
        }
        self.free_waiting(owner);
    }

    /// Returns those of `frames` that are missing, or all of them if the host does not report it.
    fn missing(&self, frames: &[FrameRun]) -> Vec<FrameRun> {
        let (mut resident, mut there) = (ResidentFrames::default(), Vec::new());
        for region in self.ram.iter() {
            let of_region = FrameSet::from_iter([all(region)]);
            for run in frames.iter().flat_map(|run| of_region.within(*run)) {
                if let Err(e) = resident.find(region, run, &mut there) {
                    tracing::debug!("all frames count as missing: {e}");
                    return frames.to_vec();
                }
            }
        }
        let there: FrameSet = there.into_iter().collect();
        frames.iter().flat_map(|run| there.gaps(*run)).collect()
    }

    /// Returns whether all frames have arrived, and none was discarded since.
    fn is_complete(&self) -> bool {
        let mut resident = ResidentFrames::default();
        let mut runs = Vec::new();
        self.ram.iter().all(|region| {
            all(region).chunks(fetcher::FETCH_PIECE_FRAMES).all(|piece| {
                runs.clear();
                resident.find(region, piece, &mut runs).is_ok() && runs == [piece]
            })
        })
    }

    /// Poisons the pages that have not arrived, so that no thread waits for one for ever. KVM's
    /// calls then fail. If a thread of this process waits for one, SIGBUS ends the process. So this
    /// waits until only vCPUs that restore their state can wait for one, or until some time after
    /// the guest's end.
    fn free_waiting(&self, owner: &dyn RestoreOwner) {
        let mut ended: Option<Instant> = None;
        while !self.is_stopped() {
            let mut is_over = || ended.get_or_insert_with(Instant::now).elapsed() >= POISON_DELAY;
            if owner.restores_vcpus() || owner.has_ended() && is_over() {
                return self.poison();
            }
            std::thread::sleep(STATE_CHECK_INTERVAL);
        }
        // The guest may have been abandoned since the handler's end.
        if self.abandoned.load(Ordering::Acquire) {
            self.poison();
        }
    }

    fn poison(&self) {
        for region in self.ram.iter() {
            let (start, len) = (region.as_ptr() as u64, region.len());
            let page = if is_pooled(region) { HUGE_PAGE } else { PAGE_SIZE };
            if let Err(e) = self.userfault.poison(start, len, page) {
                tracing::error!("pages that are lost cannot be poisoned: {e}");
            }
        }
        self.read_messages();
    }

    /// Reads messages until the memory is dropped, in place of the handler: a discard waits until
    /// its message is read. A discard that began before the memory was unregistered may send its
    /// message after that.
    fn read_messages(&self) {
        while !self.dropped.load(Ordering::Acquire) {
            let waited = [self.stop.as_fd(), self.userfault.as_fd()];
            let mut waited = waited.each_ref().map(|fd| PollFd::new(fd, PollFlags::IN));
            let read = match poll(&mut waited, None) {
                Err(Errno::INTR) => continue,
                // The memory is dropped, or was abandoned before.
                Ok(_) if self.is_stopped() => continue,
                Ok(_) => self.userfault.drop_messages(),
                Err(e) => Err(e.into()),
            };
            if let Err(e) = read {
                return tracing::error!("a discard may wait for ever: {e}");
            }
        }
    }

    fn is_stopped(&self) -> bool {
        let mut count = [0; 8];
        rustix::io::read(&self.stop, &mut count).is_ok()
    }
}
