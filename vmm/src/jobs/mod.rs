//! What is done to a guest over time, beside running it. One object owns each run of checkpoints and
//! each migration, with its thread; a run of checkpoints and a migration may be under way together.

mod checkpoints;
mod holds;
mod migration;

use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use checkpoint::RunState;
use migrate::{Records, Resolution, Responder};

use crate::api::model::{
    CheckpointPage, CheckpointRequest, GuestState, Info, MigrationPage, MigrationRequest,
};
use crate::vm::SharedVm;
use checkpoints::CheckpointJob;
use holds::Holds;
pub use holds::OperatorError;
use migration::MigrationJob;

/// How long a process whose guest has ended waits for the readers of its jobs' last reports.
const LAST_READ: Duration = Duration::from_secs(2);

/// A guest and the jobs on it.
pub struct Jobs {
    vm: SharedVm,
    holds: Arc<Holds>,
    /// Where this host's hand-over records are.
    records: PathBuf,
    /// Held while a job is begun, so that there is one of a kind; looking at one never waits for it.
    beginning: Mutex<()>,
    checkpoint: Mutex<Option<Arc<CheckpointJob>>>,
    migration: Mutex<Option<Arc<MigrationJob>>>,
    /// Answers the source that this guest came from.
    responder: Mutex<Option<Responder>>,
}

impl Jobs {
    /// No jobs yet. `records` is the directory of this host's hand-over records.
    pub fn new(vm: SharedVm, records: PathBuf) -> Arc<Self> {
        Arc::new(Self {
            holds: Holds::new(vm.clone()),
            vm,
            records,
            beginning: Mutex::default(),
            checkpoint: Mutex::default(),
            migration: Mutex::default(),
            responder: Mutex::default(),
        })
    }

    /// Keeps what answers the source that this guest came from, as long as the guest is here.
    pub fn keep_responder(&self, responder: Responder) {
        *lock(&self.responder) = Some(responder);
    }

    /// The guest.
    pub fn vm(&self) -> &SharedVm {
        &self.vm
    }

    /// The guest's figures, with what its jobs make of its state.
    pub fn info(&self) -> Info {
        let migration = self.migration_job().filter(|job| !job.is_over());
        let state = match (self.holds.operator_state(), migration) {
            (RunState::Stopped, _) => GuestState::Stopped,
            (_, Some(job)) if job.is_in_doubt() => GuestState::InDoubt,
            (_, Some(_)) => GuestState::Migrating,
            (state, None) => state.into(),
        };
        let checkpointing = self.checkpoint_job().is_some_and(|job| !job.is_over());
        Info::new(self.vm.info(), state, checkpointing)
    }

    /// The operator stops the vCPUs.
    pub fn pause(&self) -> Result<(), OperatorError> {
        self.holds.operator_pause()
    }

    /// The operator lets the vCPUs run.
    pub fn resume(&self) -> Result<(), OperatorError> {
        self.holds.operator_resume()
    }

    /// Begins a run of checkpoints; there is one at a time.
    pub fn start_checkpoints(&self, request: &CheckpointRequest) -> Result<(), String> {
        // Opening a store may take its time: only those who begin something wait for it.
        let _beginning = lock(&self.beginning);
        if self.checkpoint_job().is_some_and(|job| !job.is_over()) {
            return Err("checkpoints are being taken already; stop them first".to_owned());
        }
        let job = CheckpointJob::start(&self.holds, request)?;
        *lock(&self.checkpoint) = Some(job);
        Ok(())
    }

    /// Ends the run of checkpoints after the epoch under way.
    pub fn stop_checkpoints(&self) -> Result<(), String> {
        let job = self.checkpoint_job().filter(|job| !job.is_over());
        job.ok_or("no checkpoints are being taken")?.cancel();
        Ok(())
    }

    /// The latest run's reports from number `since` on: at once if there are any, else when there is
    /// one, the run is over, or `wait` has passed.
    pub async fn checkpoints(&self, since: u64, wait: Duration) -> Result<CheckpointPage, String> {
        let job = self.checkpoint_job().ok_or("no checkpoints have been taken")?;
        // Either way the page says what there is.
        let _ = tokio::time::timeout(wait, job.news_since(since)).await;
        Ok(job.page(since))
    }

    /// Begins to send the guest to another host; one migration at a time.
    pub fn start_migration(&self, request: &MigrationRequest) -> Result<(), String> {
        let _beginning = lock(&self.beginning);
        if let Some(job) = self.migration_job().filter(|job| !job.is_over()) {
            return Err(format!("the guest is being migrated already, to {}", job.page().to));
        }
        let job = MigrationJob::start(&self.holds, self.records.clone(), request)?;
        *lock(&self.migration) = Some(job);
        Ok(())
    }

    /// Ends the migration; the guest stays here.
    pub fn cancel_migration(&self) -> Result<(), String> {
        let job = self.migration_job().filter(|job| !job.is_over());
        job.ok_or("no migration is under way")?.cancel().map_err(|e| e.to_string())
    }

    /// Ends the guest, unless another host may have it: then only the operator's word on that does.
    pub fn stop(&self, why: &str) -> Result<(), String> {
        if let Some(job) = self.migration_job().filter(|job| job.is_handed_over()) {
            return Err(format!(
                "the guest has been handed over and may be running at {}; settle it with `driftline \
                 resolve --discard`",
                job.to()
            ));
        }
        self.vm.stop(why);
        Ok(())
    }

    /// The operator's word on a migration in doubt.
    pub fn resolve_migration(&self, how: Resolution) -> Result<(), String> {
        let job = self.migration_job().filter(|job| !job.is_over());
        let job = job.ok_or("no migration is under way")?;
        if !job.is_lost() {
            return job.resolve(how).map_err(|e| e.to_string());
        }
        self.settle_lost(how)?;
        job.end_lost(&self.holds);
        Ok(())
    }

    /// Does what the migration's thread would have done, had it not panicked.
    fn settle_lost(&self, how: Resolution) -> Result<(), String> {
        match how {
            Resolution::Run => self.holds.take_back().map_err(|e| e.to_string())?,
            Resolution::Discard => self.vm.stop("the operator resolved that it ends here"),
        }
        let records = Records::open(&self.records).map_err(|e| e.to_string())?;
        let pending = records.pending().map_err(|e| e.to_string())?;
        for e in &pending.unreadable {
            tracing::warn!("{e}");
        }
        for record in pending.records {
            if record.vm_id == self.vm.vm_id() {
                records.settle(record.token).map_err(|e| e.to_string())?;
            }
        }
        Ok(())
    }

    /// Where the latest migration stands: at once if it is over, else then, or after `wait`.
    pub async fn migration(&self, wait: Duration) -> Result<MigrationPage, String> {
        let job = self.migration_job().ok_or("no migration has been asked for")?;
        // Either way the page says what there is.
        let _ = tokio::time::timeout(wait, job.end()).await;
        Ok(job.page())
    }

    /// The guest has ended: waits a moment until the jobs are over and who asked for them knows it.
    pub fn settle(&self) {
        let end = Instant::now() + LAST_READ;
        let wait = |done: &dyn Fn() -> bool| {
            while !done() && Instant::now() < end {
                std::thread::sleep(Duration::from_millis(5));
            }
        };
        if let Some(job) = self.migration_job() {
            wait(&|| job.is_over() && job.end_was_read());
        }
        if let Some(job) = self.checkpoint_job() {
            job.guest_ended();
            wait(&|| job.is_over() && job.end_was_read());
        }
    }

    fn migration_job(&self) -> Option<Arc<MigrationJob>> {
        lock(&self.migration).clone()
    }

    fn checkpoint_job(&self) -> Option<Arc<CheckpointJob>> {
        lock(&self.checkpoint).clone()
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
