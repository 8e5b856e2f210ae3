//! Owns one run of checkpoints: its thread, and the reports that its readers have not read yet.

use std::collections::VecDeque;
use std::io;
use std::num::NonZeroU64;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use driftline_checkpoint::{Cadence, Checkpointer, TakenEpoch, Tally};
use driftline_guest::RunState;
use driftline_machine::log;
use driftline_machine::sandbox::check_allowed;
use driftline_store::Store;
use parking_lot::{Mutex, MutexGuard};
use tokio::sync::watch;

use super::error::JobError;
use super::pause_control::{JobRole, PauseControl};
use super::totals::CheckpointTotals;
use crate::model::{
    CheckpointPage, CheckpointRequest, CheckpointSummary, DisksPolicy, EpochLine, EpochOutcome,
};

/// Maximum number of reports kept for a reader that connects later: those of ten minutes with a
/// checkpoint every 10 ms.
const MAX_REPORTS: usize = 65_536;
/// Number of waits for the client of a new attached run. Without a client the run then ends.
const CLIENT_WAITS: u32 = 100;
/// Length of such a wait.
const CLIENT_WAIT: Duration = Duration::from_millis(100);
/// Maximum number of reports in one answer.
const MAX_PAGE: usize = 4_096;

/// A run of checkpoints, under way or over.
pub(super) struct CheckpointJob {
    number: u64,
    store: PathBuf,
    every_ms: Option<NonZeroU64>,
    keep: Option<NonZeroU64>,
    /// Whether the run ends when its client disconnects.
    attached: bool,
    /// Whether the run has ever had a client.
    had_client: AtomicBool,
    /// Number of clients that are attached to the run now.
    clients: AtomicU64,
    cancel: AtomicBool,
    /// Totals of all runs.
    totals: Arc<CheckpointTotals>,
    log: Mutex<ReportLog>,
    /// The number of reports so far and whether the run is over, for tasks that wait for more.
    news: watch::Sender<(u64, bool)>,
}

#[derive(Default)]
struct ReportLog {
    /// Number of the first report kept.
    first: u64,
    reports: VecDeque<EpochOutcome>,
    tally: Tally,
    /// Whether the run ended because the guest did.
    guest_ended: bool,
    /// Whether a client has read the end of the run.
    end_was_read: bool,
}

impl CheckpointJob {
    /// Returns the store's directory.
    pub(super) fn store(&self) -> &Path {
        &self.store
    }

    /// Returns the interval, in ms; `None` for a single checkpoint.
    pub(super) fn every_ms(&self) -> Option<NonZeroU64> {
        self.every_ms
    }

    /// Opens the store and starts the run.
    pub(super) fn start(
        number: u64,
        pauses: &Arc<PauseControl>,
        totals: Arc<CheckpointTotals>,
        request: &CheckpointRequest,
    ) -> Result<Arc<Self>, JobError> {
        check_allowed(&request.store)?;
        if request.new_store {
            check_new(&request.store)?;
        }
        let open = match request.direct_io {
            true => Store::create_or_open_direct,
            false => Store::create_or_open,
        };
        let store = open(&request.store)?;
        let guest = pauses.guest_for(JobRole::Checkpoint);
        let mut checkpointer = Checkpointer::new(guest, store)?;
        checkpointer.keep(request.keep.map(NonZeroU64::get));
        if request.disks == Some(DisksPolicy::External) {
            checkpointer.leave_drives();
        }
        let job = Arc::new(Self {
            number,
            store: request.store.clone(),
            every_ms: request.every_ms,
            keep: request.keep,
            attached: request.attached,
            had_client: AtomicBool::new(false),
            clients: AtomicU64::new(0),
            cancel: AtomicBool::new(false),
            totals,
            log: Mutex::default(),
            news: watch::Sender::new((0, false)),
        });
        let cadence = Cadence {
            every: Duration::from_millis(request.every_ms.map_or(0, NonZeroU64::get)),
            count: request.count.or(request.every_ms.is_none().then_some(1)),
            max_pause: request.max_pause_ms.map(Duration::from_millis),
        };
        let worker = job.clone();
        let run = move || {
            let _end = CheckpointEndGuard(&worker);
            checkpointer.run(&cadence, &worker.cancel, |taken| worker.note(&taken));
            // Release the store's lock before any reader can see that the run is over.
            drop(checkpointer);
        };
        log::spawn("checkpoint", run)
            .map_err(|cause| JobError::Thread { purpose: "for checkpoints", cause })?;
        Ok(job)
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
        let mut log = self.log();
        log.tally.add(taken);
        if log.reports.len() == MAX_REPORTS {
            log.reports.pop_front();
            log.first += 1;
        }
        log.reports.push_back(outcome);
        let made = log.first + log.reports.len() as u64;
        self.news.send_modify(|news| news.0 = made);
        ControlFlow::Continue(())
    }

    /// Ends the run because the guest has ended.
    pub(super) fn guest_ended(&self) {
        self.log().guest_ended |= !self.is_over();
        self.cancel();
    }

    /// Ends the run after the epoch in progress.
    pub(super) fn cancel(&self) {
        self.cancel.store(true, Ordering::Relaxed);
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
            if !self.attached || self.had_client.load(Ordering::SeqCst) || self.is_over() {
                return;
            }
            tokio::time::sleep(CLIENT_WAIT).await;
        }
        self.client_has_left();
    }

    fn client_has_left(&self) {
        if self.attached && !self.is_over() {
            tracing::warn!(job = self.number, "the run ends because its client has disconnected");
            self.cancel();
        }
    }

    /// Returns the refusal of another run while this one is under way.
    pub(super) fn under_way(&self) -> JobError {
        let (job, every_ms, store) = (self.number, self.every_ms, self.store.clone());
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
        let next_report = log.first + log.reports.len() as u64;
        let running = !over || next < next_report;
        // A reader that requests a position after the last report has not read the end.
        log.end_was_read |= !running && since <= next_report;
        let guest_ended = log.guest_ended && !running;
        let (job, store) = (self.number, self.store.clone());
        let achieved = log.tally.achieved();
        let Self { every_ms, keep, attached, .. } = *self;
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
            store: self.store.clone(),
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
        if self.0.clients.fetch_sub(1, Ordering::SeqCst) == 1 {
            self.0.client_has_left();
        }
    }
}

/// Refuses a directory that is not empty.
fn check_new(store: &Path) -> Result<(), JobError> {
    let refused = |cause| JobError::NoNewStore { store: store.to_owned(), cause };
    match std::fs::read_dir(store).map(|mut entries| entries.next()) {
        Ok(None) => Ok(()),
        Ok(Some(_)) => {
            let why = "it is not empty; name a directory that is, or does not exist yet";
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
    }
}
