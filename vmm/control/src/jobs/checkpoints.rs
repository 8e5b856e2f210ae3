//! Owns one run of checkpoints: its thread, and the reports that its readers have not read yet.

use std::io;
use std::num::NonZeroU64;
use std::ops::ControlFlow;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use driftline_checkpoint::{Cadence, Checkpointer, FollowedWrites, MovedChain, TakenEpoch};
use driftline_guest::RunState;
use driftline_machine::log;
use driftline_machine::sandbox::check_allowed;
use driftline_store::{Store, StoreError};
use parking_lot::{Mutex, MutexGuard};
use tokio::sync::watch;

use super::error::JobError;
use super::moved_run::{MovedRun, OfferedRun, RunPosition};
use super::pause_control::{JobRole, PauseControl};
use super::report_log::{MAX_PAGE, ReportLog};
use super::run_suspension::{AfterSeries, RunSuspension, SuspendOutcome};
use super::totals::CheckpointTotals;
use crate::model::{CheckpointPage, CheckpointRequest, CheckpointSummary, EpochLine, EpochOutcome};

/// Number of waits for the client of a new attached run. Without a client the run then ends.
const CLIENT_WAITS: u32 = 100;
/// Length of such a wait.
const CLIENT_WAIT: Duration = Duration::from_millis(100);
/// Upper bound on waiting for another process to close the store of a run that has come from it.
const IN_USE_LIMIT: Duration = Duration::from_secs(20);
/// Interval between attempts to open that store within [`IN_USE_LIMIT`].
const IN_USE_INTERVAL: Duration = Duration::from_millis(20);
/// Shortest interval between attempts to open that store after [`IN_USE_LIMIT`].
const REOPEN_INTERVAL: Duration = Duration::from_secs(1);

/// A run of checkpoints, under way or over.
pub(super) struct CheckpointJob {
    number: u64,
    request: CheckpointRequest,
    /// Whether the run has ever had a client.
    had_client: AtomicBool,
    /// Number of clients that are attached to the run now.
    clients: AtomicU64,
    suspension: RunSuspension,
    /// Number of checkpoints that are left while the run is suspended.
    left: Mutex<Option<u64>>,
    /// Whether the run's thread has returned, which it does not if it panics.
    has_ended: AtomicBool,
    /// What the next process continues with, once the run has moved.
    moved: Mutex<Option<MovedRun>>,
    /// Totals of all runs.
    totals: Arc<CheckpointTotals>,
    log: Mutex<ReportLog>,
    /// The number of reports so far and whether the run is over, for tasks that wait for more.
    news: watch::Sender<(u64, bool)>,
}

impl CheckpointJob {
    /// Returns the store's directory.
    pub(super) fn store(&self) -> &Path {
        &self.request.store
    }

    /// Returns the interval, in ms; `None` for a single checkpoint.
    pub(super) fn every_ms(&self) -> Option<NonZeroU64> {
        self.request.every_ms
    }

    /// Returns the run's number.
    pub(super) fn number(&self) -> u64 {
        self.number
    }

    /// Returns the request that has begun the run.
    pub(super) fn request(&self) -> &CheckpointRequest {
        &self.request
    }

    /// Opens the store and starts the run.
    pub(super) fn start(
        number: u64,
        pauses: &Arc<PauseControl>,
        totals: Arc<CheckpointTotals>,
        request: &CheckpointRequest,
    ) -> Result<Arc<Self>, JobError> {
        if request.new_store {
            check_allowed(&request.store)?;
            check_new(&request.store)?;
        }
        let checkpointer = checkpointer(pauses, request)?;
        let count = request.count.or(request.every_ms.is_none().then_some(1));
        let job = Self::new(number, totals, request.clone(), ReportLog::default());
        let worker = job.clone();
        let run = move || {
            let _end = CheckpointEndGuard(&worker);
            worker.take(checkpointer, count);
            worker.has_ended.store(true, Ordering::SeqCst);
        };
        log::spawn("checkpoint", run)
            .map_err(|cause| JobError::Thread { purpose: "for checkpoints", cause })?;
        Ok(job)
    }

    /// Starts a thread that continues a run of the process that had the guest before. `writes` are
    /// those of the guest since it has run here. If the store cannot be opened, the run reports a
    /// failed checkpoint.
    pub(super) fn continue_moved(
        offered: &OfferedRun,
        pauses: &Arc<PauseControl>,
        totals: Arc<CheckpointTotals>,
        moved: MovedRun,
        writes: Option<FollowedWrites>,
    ) -> Result<Arc<Self>, JobError> {
        let MovedRun { mut left, log, chain, is_over } = moved;
        let job = Self::new(offered.number, totals, offered.request.clone(), log);
        if is_over {
            drop(CheckpointEndGuard(&job));
            return Ok(job);
        }
        let (worker, pauses) = (job.clone(), pauses.clone());
        // Without a chain, nothing is to be followed.
        let mut continued = chain.map(|chain| (writes, chain));
        let run = move || {
            let _end = CheckpointEndGuard(&worker);
            if let Some(mut checkpointer) = worker.reopen(&pauses, &mut left) {
                if let Some((writes, chain)) = continued.take() {
                    checkpointer.continue_moved(writes, chain);
                }
                worker.take(checkpointer, left);
            }
            worker.has_ended.store(true, Ordering::SeqCst);
        };
        log::spawn("checkpoint", run)
            .map_err(|cause| JobError::Thread { purpose: "for checkpoints", cause })?;
        Ok(job)
    }

    fn new(
        number: u64,
        totals: Arc<CheckpointTotals>,
        request: CheckpointRequest,
        log: ReportLog,
    ) -> Arc<Self> {
        Arc::new(Self {
            number,
            request,
            had_client: AtomicBool::new(false),
            clients: AtomicU64::new(0),
            suspension: RunSuspension::default(),
            left: Mutex::default(),
            has_ended: AtomicBool::new(false),
            moved: Mutex::default(),
            totals,
            news: watch::Sender::new((log.made(), false)),
            log: Mutex::new(log),
        })
    }

    /// Takes checkpoints, at most `count`, until the run is over. On return, the store's lock is
    /// released.
    fn take(&self, mut checkpointer: Checkpointer, mut count: Option<u64>) {
        let request = &self.request;
        loop {
            let cadence = Cadence {
                every: Duration::from_millis(request.every_ms.map_or(0, NonZeroU64::get)),
                count,
                max_pause: request.max_pause_ms.map(Duration::from_millis),
            };
            let taken =
                checkpointer.run(&cadence, self.suspension.interrupt(), |taken| self.note(&taken));
            count = count.map(|count| count.saturating_sub(taken));
            if count == Some(0) {
                return;
            }
            *self.left.lock() = count;
            match self.suspension.await_decision() {
                AfterSeries::End => return,
                AfterSeries::Continue => {}
                AfterSeries::Move => return self.note_moved(Some(checkpointer.into_moved())),
            }
        }
    }

    /// Opens the store of a run of the process that had the guest before, which may still be
    /// closing it. Each failure counts as a checkpoint that is not stored. Returns `None` if the
    /// run is over, or has moved again.
    fn reopen(&self, pauses: &Arc<PauseControl>, left: &mut Option<u64>) -> Option<Checkpointer> {
        let since = Instant::now();
        loop {
            let e = match checkpointer(pauses, &self.request) {
                Ok(checkpointer) => return Some(checkpointer),
                Err(e) => e,
            };
            let in_use = matches!(e, JobError::Store(StoreError::InUse { .. }));
            if in_use && since.elapsed() < IN_USE_LIMIT {
                self.sleep(IN_USE_INTERVAL);
            } else {
                tracing::warn!(job = self.number, "not stored: {e}");
                self.log().tally.add_failed();
                self.totals.add_failed();
                self.report(EpochOutcome::Failed(e.to_string()));
                *left = left.map(|left| left.saturating_sub(1));
                if *left == Some(0) {
                    return None;
                }
                let every = Duration::from_millis(self.every_ms().map_or(0, NonZeroU64::get));
                self.sleep(every.max(REOPEN_INTERVAL));
            }
            *self.left.lock() = *left;
            match self.suspension.await_decision() {
                AfterSeries::End => return None,
                AfterSeries::Continue => {}
                AfterSeries::Move => {
                    self.note_moved(None);
                    return None;
                }
            }
        }
    }

    /// Sleeps until the time has passed, or the run is to be suspended or to end.
    fn sleep(&self, time: Duration) {
        let end = Instant::now() + time;
        while Instant::now() < end && !self.suspension.interrupt().load(Ordering::Relaxed) {
            thread::sleep(IN_USE_INTERVAL.min(time));
        }
    }

    /// Keeps what the next process continues with.
    fn note_moved(&self, chain: Option<MovedChain>) {
        let log = self.moved_log();
        let left = *self.left.lock();
        *self.moved.lock() = Some(MovedRun { left, log, chain, is_over: false });
    }

    /// Returns the log for the next process, which answers for the run from now on.
    fn moved_log(&self) -> ReportLog {
        let mut log = self.log();
        log.end_was_read = true;
        log.moved()
    }

    fn report(&self, outcome: EpochOutcome) {
        let mut log = self.log();
        log.add(outcome);
        let made = log.made();
        self.news.send_modify(|news| news.0 = made);
    }

    fn note(&self, taken: &TakenEpoch) -> ControlFlow<()> {
        let outcome = match &taken.outcome {
            Ok(report) => EpochOutcome::Stored(EpochLine::new(report, taken)),
            Err(e) if e.guest == RunState::Stopped => {
                self.guest_ended();
                return ControlFlow::Break(());
            }
            Err(e) => EpochOutcome::Failed(e.to_string()),
        };
        self.totals.add(taken);
        self.log().tally.add(taken);
        self.report(outcome);
        ControlFlow::Continue(())
    }

    /// Ends the run because the guest has ended.
    pub(super) fn guest_ended(&self) {
        self.log().guest_ended |= !self.is_over();
        self.cancel();
    }

    /// Ends the run after the epoch in progress.
    pub(super) fn cancel(&self) {
        self.suspension.cancel();
    }

    /// Suspends the run between two checkpoints until [`resume`](Self::resume), so that another
    /// process can continue it. Waits for the checkpoint in progress, at most `limit`.
    pub(super) fn suspend(&self, limit: Duration) -> SuspendOutcome {
        self.suspension.suspend(limit)
    }

    /// Continues a suspended run here.
    pub(super) fn resume(&self) {
        self.suspension.resume();
        // A client that disconnected during the suspension did not end the run, so a client has to
        // attach now.
        if self.clients.load(Ordering::SeqCst) == 0 {
            self.had_client.store(false, Ordering::SeqCst);
        }
    }

    /// Returns the position of a suspended run.
    pub(super) fn position(&self) -> RunPosition {
        let (made, left) = (self.log().made(), *self.left.lock());
        RunPosition { made, left, is_over: self.is_over() }
    }

    /// Ends a suspended run, because another process continues it. Returns what that one continues
    /// with; `None` if the run does not end within `limit`, or has ended by a panic.
    pub(super) fn move_away(&self, limit: Duration) -> Option<MovedRun> {
        if !self.suspension.move_away(limit) {
            return None;
        }
        let moved = self.moved.lock().take();
        moved.or_else(|| {
            let has_ended = self.has_ended.load(Ordering::SeqCst);
            let over =
                || MovedRun { left: None, log: self.moved_log(), chain: None, is_over: true };
            has_ended.then(over)
        })
    }

    /// Attaches a client until the run is over. An attached run ends when the last of these futures
    /// is dropped, which happens with its client's connection, however that ends.
    pub(super) async fn attach(&self) {
        self.clients.fetch_add(1, Ordering::SeqCst);
        self.had_client.store(true, Ordering::SeqCst);
        let _attached = AttachedClient(self);
        self.news_since(u64::MAX).await;
    }

    /// Ends an attached run if no client ever attaches. Counts its own waits instead of time,
    /// because this process may have been stopped for a while.
    pub(super) async fn expect_client(&self) {
        for _ in 0..CLIENT_WAITS {
            if !self.request.attached || self.had_client.load(Ordering::SeqCst) || self.is_over() {
                return;
            }
            tokio::time::sleep(CLIENT_WAIT).await;
        }
        self.client_has_left();
    }

    fn client_has_left(&self) {
        // An upgrade moves the clients' connections to the next process.
        let has_client = self.clients.load(Ordering::SeqCst) > 0;
        let ends = self.request.attached && !has_client && !self.is_over();
        if ends && !self.suspension.is_requested() {
            tracing::warn!(job = self.number, "the run ends because its client has disconnected");
            self.cancel();
        }
    }

    /// Returns the refusal of another run while this one is under way.
    pub(super) fn under_way(&self) -> JobError {
        let (job, every_ms, store) = (self.number, self.every_ms(), self.store().to_owned());
        JobError::CheckpointsUnderWay { job, every_ms, store }
    }

    pub(super) fn is_over(&self) -> bool {
        self.news.borrow().1
    }

    pub(super) fn end_was_read(&self) -> bool {
        self.log().end_was_read
    }

    /// Waits until a report with the number `since` exists, or the run is over.
    pub(super) async fn news_since(&self, since: u64) {
        let mut news = self.news.subscribe();
        // The sender lives as long as `self`.
        let _ = news.wait_for(|&(made, over)| made > since || over).await;
    }

    /// Returns the reports from number `since` on.
    pub(super) fn page(&self, since: u64) -> CheckpointPage {
        let over = self.is_over();
        let mut log = self.log();
        let skip = usize::try_from(since.saturating_sub(log.first)).unwrap_or(usize::MAX);
        let epochs: Vec<EpochOutcome> =
            log.reports.iter().skip(skip).take(MAX_PAGE).cloned().collect();
        let next = since.max(log.first).saturating_add(epochs.len() as u64);
        let next_report = log.made();
        let running = !over || next < next_report;
        // A reader that requests a position after the last report has not read the end.
        log.end_was_read |= !running && since <= next_report;
        let guest_ended = log.guest_ended && !running;
        let (job, store) = (self.number, self.store().to_owned());
        let achieved = log.tally.achieved();
        let CheckpointRequest { every_ms, keep, attached, .. } = self.request;
        let last = log.reports.back().cloned();
        CheckpointPage {
            job,
            running,
            guest_ended,
            store,
            next,
            epochs,
            achieved,
            every_ms,
            keep,
            attached,
            last,
        }
    }

    /// Returns a summary of the run for an observer. It does not count as reading the end.
    pub(super) fn snapshot(&self) -> CheckpointSummary {
        let running = !self.is_over();
        let log = self.log();
        CheckpointSummary {
            job: self.number,
            running,
            store: self.store().to_owned(),
            achieved: log.tally.achieved(),
            last: log.reports.back().cloned(),
        }
    }

    fn log(&self) -> MutexGuard<'_, ReportLog> {
        self.log.lock()
    }
}

/// A client that is attached to a run.
struct AttachedClient<'j>(&'j CheckpointJob);

impl Drop for AttachedClient<'_> {
    fn drop(&mut self) {
        self.0.clients.fetch_sub(1, Ordering::SeqCst);
        self.0.client_has_left();
    }
}

/// Opens the store of `request`, for checkpoints of the guest of `pauses`.
fn checkpointer(
    pauses: &Arc<PauseControl>,
    request: &CheckpointRequest,
) -> Result<Checkpointer, JobError> {
    check_allowed(&request.store)?;
    let open = match request.direct_io {
        true => Store::create_or_open_direct,
        false => Store::create_or_open,
    };
    let store = open(&request.store)?;
    let guest = pauses.guest_for(JobRole::Checkpoint);
    let mut checkpointer = Checkpointer::new(guest, store)?;
    checkpointer.keep(request.keep.map(NonZeroU64::get));
    if !request.includes_drives() {
        checkpointer.leave_drives();
    }
    Ok(checkpointer)
}

/// Refuses a directory that is not empty.
fn check_new(store: &Path) -> Result<(), JobError> {
    let refused = |cause| JobError::NoNewStore { store: store.to_owned(), cause };
    match std::fs::read_dir(store).map(|mut entries| entries.next()) {
        Ok(None) => Ok(()),
        Ok(Some(_)) => {
            let why = "it is not empty; name an empty directory, or one that does not exist yet";
            Err(refused(io::Error::other(why)))
        }
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(()),
        Err(e) => Err(refused(e)),
    }
}

/// Marks the run as over when its thread ends, for whatever reason.
struct CheckpointEndGuard<'j>(&'j CheckpointJob);

impl Drop for CheckpointEndGuard<'_> {
    fn drop(&mut self) {
        self.0.news.send_modify(|news| news.1 = true);
        self.0.suspension.end();
    }
}
