//! Owns one migration of the guest to another host: its thread, its progress and its outcome.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use driftline_machine::log;
use driftline_migrate::{
    Cause, ControlError, GuestPlace, Phase, Resolution, SendControl, SendError, SendOptions,
    SendReport,
};
use parking_lot::Mutex;
use tokio::sync::watch;

use super::error::JobError;
use super::pause_control::{JobRole, PauseControl};
use crate::model::{
    GuestLocation, MigrationFailure, MigrationPage, MigrationRequest, MigrationState,
};

/// A migration, under way or over.
pub(super) struct MigrationJob {
    number: u64,
    to: String,
    control: Arc<SendControl>,
    outcome: Mutex<Option<Result<SendReport, MigrationFailure>>>,
    over: watch::Sender<bool>,
    end_was_read: AtomicBool,
    /// Whether the migration's thread panicked after the hand-over record was written. The
    /// migration is then in doubt, and no thread asks the destination.
    lost: AtomicBool,
}

impl MigrationJob {
    /// Starts the migration. `records` is the directory of this host's hand-over records.
    pub(super) fn start(
        number: u64,
        pauses: &Arc<PauseControl>,
        records: PathBuf,
        request: &MigrationRequest,
    ) -> Result<Arc<Self>, JobError> {
        let job = Arc::new(Self {
            number,
            to: request.to.clone(),
            control: SendControl::new(),
            outcome: Mutex::default(),
            over: watch::Sender::new(false),
            end_was_read: AtomicBool::new(false),
            lost: AtomicBool::new(false),
        });
        let defaults = match request.local {
            true => SendOptions::on_this_host(records),
            false => SendOptions::new(records),
        };
        let options = SendOptions {
            downtime: Duration::from_millis(request.downtime_ms),
            timeout: Duration::from_secs(request.timeout_s),
            timeout_strategy: request.timeout_strategy,
            max_bandwidth: request.max_bandwidth_bytes_per_s,
            connections: request.connections,
            compression: request.compression,
            verify: request.verify,
            copy_drives: request.copy_disks.clone(),
            throttle: request.throttle,
            tls: request.tls.clone(),
            insecure: request.insecure,
            ..defaults
        };
        let (worker, counted) = (job.clone(), pauses.clone());
        pauses.begin_migration();
        let spawned = log::spawn("migration", move || {
            let _end = MigrationEndGuard { job: &worker, pauses: &counted };
            let guest = counted.guest_for(JobRole::Migration);
            let sent = driftline_migrate::send(&*guest, &worker.to, &options, &worker.control);
            worker.conclude(sent.map_err(|e| failure(&e)));
        });
        if let Err(cause) = spawned {
            pauses.end_migration();
            return Err(JobError::Thread { purpose: "for the migration", cause });
        }
        Ok(job)
    }

    fn conclude(&self, outcome: Result<SendReport, MigrationFailure>) {
        *self.outcome.lock() = Some(outcome);
    }

    pub(super) fn cancel(&self) -> Result<(), ControlError> {
        self.control.cancel()
    }

    pub(super) fn resolve(&self, how: Resolution) -> Result<(), ControlError> {
        self.control.resolve(how)
    }

    pub(super) fn is_lost(&self) -> bool {
        self.lost.load(Ordering::Relaxed)
    }

    /// Ends a lost migration, after the operator has resolved it.
    pub(super) fn end_lost(&self, pauses: &PauseControl) {
        self.lost.store(false, Ordering::Relaxed);
        pauses.end_migration();
        self.over.send_replace(true);
    }

    pub(super) fn is_over(&self) -> bool {
        *self.over.borrow()
    }

    pub(super) fn is_in_doubt(&self) -> bool {
        self.is_lost() || self.control.progress().phase == Phase::InDoubt
    }

    /// Returns whether COMMIT has been sent, or is being sent, and it is not decided yet which host
    /// has the guest.
    pub(super) fn is_handed_over(&self) -> bool {
        self.control.is_committed() && !self.is_over()
    }

    pub(super) fn to(&self) -> &str {
        &self.to
    }

    pub(super) fn end_was_read(&self) -> bool {
        self.end_was_read.load(Ordering::Relaxed)
    }

    /// Waits until the migration is over.
    pub(super) async fn end(&self) {
        // The sender lives as long as `self`.
        let _ = self.over.subscribe().wait_for(|over| *over).await;
    }

    /// Returns the outcome of a migration that is over.
    pub(super) fn outcome(&self) -> Result<SendReport, MigrationFailure> {
        self.outcome.lock().clone().unwrap_or_else(|| Err(panicked()))
    }

    /// Returns the migration's state, and notes that its end was read if it is over.
    pub(super) fn page(&self) -> MigrationPage {
        let over = self.is_over();
        let page = self.snapshot();
        self.end_was_read.fetch_or(over, Ordering::Relaxed);
        page
    }

    /// Returns the same for an observer; this does not count as reading the end.
    pub(super) fn snapshot(&self) -> MigrationPage {
        let over = self.is_over();
        let outcome = self.outcome.lock().clone();
        let (state, report, failure) = match outcome {
            _ if !over && self.is_in_doubt() => (MigrationState::InDoubt, None, None),
            _ if !over => (MigrationState::Sending, None, None),
            Some(Ok(report)) => (MigrationState::Completed, Some(report), None),
            Some(Err(failure)) => (MigrationState::Failed, None, Some(failure)),
            None => (MigrationState::Failed, None, Some(panicked())),
        };
        let mut progress = self.control.progress();
        if self.is_lost() {
            progress.phase = Phase::InDoubt;
            progress.doubt = Some("the migration's thread panicked after the hand-over".into());
        }
        let (job, to) = (self.number, self.to.clone());
        MigrationPage { job, state, to, progress, report, failure }
    }
}

fn failure(e: &SendError) -> MigrationFailure {
    let guest = match e.guest {
        GuestPlace::PausedHere { .. } => GuestLocation::PausedHere,
        GuestPlace::Ended => GuestLocation::Ended,
        GuestPlace::Here => GuestLocation::Here,
    };
    let cancelled = matches!(e.cause, Cause::Cancelled);
    MigrationFailure { message: e.to_string(), cancelled, phase: e.phase, guest }
}

fn panicked() -> MigrationFailure {
    MigrationFailure {
        message: "the migration's thread panicked; the guest is here, in an unknown state".into(),
        cancelled: false,
        phase: Phase::Finished,
        guest: GuestLocation::PausedHere,
    }
}

/// Marks the migration as over when its thread ends, for whatever reason, and returns control of
/// the guest to the operator.
struct MigrationEndGuard<'j> {
    job: &'j MigrationJob,
    pauses: &'j PauseControl,
}

impl Drop for MigrationEndGuard<'_> {
    fn drop(&mut self) {
        // A thread that panicked after the record was written may have handed the guest over. The
        // guest must not be resumed then.
        if thread::panicking() && self.job.control.is_committed() {
            self.job.lost.store(true, Ordering::Relaxed);
            return;
        }
        self.pauses.end_migration();
        self.job.over.send_replace(true);
    }
}
