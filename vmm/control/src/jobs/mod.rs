//! What is done to a guest over time, beside running it. One object owns each run of checkpoints
//! and each migration, with its thread; a run of checkpoints and a migration may be under way
//! together.

mod bins;
mod checkpoints;
mod dirty_watch;
mod holds;
mod kept;
mod migration;
mod shadow;
mod watch;

use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use driftline_guest::RunState;
use driftline_machine::config::guest_span;
use driftline_machine::vm::SharedVm;
use driftline_migrate::{Records, Resolution, Responder};
use tracing::Span;

use crate::model::{
    CheckpointPage, CheckpointRequest, GuestState, Info, MigrationPage, MigrationRequest,
};
use checkpoints::CheckpointJob;
use dirty_watch::Watches;
pub use holds::OperatorError;
use holds::{Holds, Role};
use kept::Kept;
use migration::MigrationJob;
use shadow::Shadow;
pub use shadow::{ShadowError, ShadowMode, ShadowReport};
pub use watch::{SeenWindows, Watched};

/// How long a process whose guest has ended waits for the readers of its jobs' last reports.
const LAST_READ: Duration = Duration::from_secs(2);

/// A guest and the jobs on it.
pub struct Jobs {
    vm: SharedVm,
    /// Whose jobs they are, for the log.
    span: Span,
    holds: Arc<Holds>,
    /// Where this host's hand-over records are.
    records: PathBuf,
    /// Held while a job is begun, so that there is one of a kind; looking at one never waits for
    /// it.
    beginning: Mutex<()>,
    /// Held while the guest is watched for a plan; nobody waits for it.
    watching: Mutex<()>,
    /// Who follows the guest's writes, to show them.
    watches: Watches,
    /// The number of the last job begun, of either kind.
    begun: AtomicU64,
    checkpoint: Kept<CheckpointJob>,
    migration: Kept<MigrationJob>,
    /// Answers the source that this guest came from.
    responder: Mutex<Option<Responder>>,
    /// Looks whether tracking misses frames.
    shadow: Mutex<Option<Shadow>>,
}

impl Jobs {
    /// No jobs yet. `records` is the directory of this host's hand-over records.
    pub fn new(vm: SharedVm, records: PathBuf) -> Arc<Self> {
        Arc::new(Self {
            span: guest_span(vm.vm_id(), &vm.machine_config().identity),
            holds: Holds::new(vm.clone()),
            vm,
            records,
            beginning: Mutex::default(),
            watching: Mutex::default(),
            watches: Watches::default(),
            begun: AtomicU64::new(0),
            checkpoint: Kept::default(),
            migration: Kept::default(),
            responder: Mutex::default(),
            shadow: Mutex::default(),
        })
    }

    /// Keeps what answers the source that this guest came from, as long as the guest is here.
    pub fn keep_responder(&self, responder: Responder) {
        *lock(&self.responder) = Some(responder);
    }

    /// The span of all that is logged for the guest.
    pub fn span(&self) -> &Span {
        &self.span
    }

    /// The guest.
    pub fn vm(&self) -> &SharedVm {
        &self.vm
    }

    /// The guest's figures, with what its jobs make of its state.
    pub fn info(&self) -> Info {
        let migration = self.migration_job().filter(|job| !job.is_over());
        let state = match (self.holds.operator_state(), &migration) {
            (RunState::Stopped, _) => GuestState::Stopped,
            (_, Some(job)) if job.is_in_doubt() => GuestState::InDoubt,
            (_, Some(_)) => GuestState::Migrating,
            (state, None) => state.into(),
        };
        let checkpoints = self.checkpoint_job();
        let checkpointing = checkpoints.as_ref().is_some_and(|job| !job.is_over());
        let every_ms = checkpoints.as_ref().and_then(|job| job.every_ms());
        let store = checkpoints.map(|job| job.store().to_owned());
        let migration = migration.map(|job| job.glance().progress);
        Info { migration, store, every_ms, ..Info::new(self.vm.info(), state, checkpointing) }
    }

    /// The operator stops the vCPUs.
    pub fn pause(&self) -> Result<(), OperatorError> {
        self.holds.operator_pause()
    }

    /// The operator lets the vCPUs run.
    pub fn resume(&self) -> Result<(), OperatorError> {
        self.holds.operator_resume()
    }

    /// Begins to compare what the guest's tracking reports with another way to know it, until
    /// [`end_shadow`](Self::end_shadow). Reads all of its memory first.
    pub fn start_shadow(&self, mode: ShadowMode) -> Result<(), ShadowError> {
        let shadow = Shadow::start(self.holds.view(Role::Checkpoint), mode)?;
        *lock(&self.shadow) = Some(shadow);
        Ok(())
    }

    /// Looks a last time, at a guest that has ended. `None` if nothing was compared; an error if
    /// the comparison has died.
    pub fn end_shadow(&self) -> Option<Result<ShadowReport, &'static str>> {
        let shadow = lock(&self.shadow).take()?;
        Some(shadow.end().ok_or("the thread of --shadow has died of a defect of the VMM"))
    }

    /// Begins a run of checkpoints and returns its number; there is one at a time.
    pub fn start_checkpoints(&self, request: &CheckpointRequest) -> Result<u64, String> {
        // Opening a store may take its time: only those who begin something wait for it.
        let _beginning = lock(&self.beginning);
        if let Some(job) = self.checkpoint_job().filter(|job| !job.is_over()) {
            return Err(job.describe());
        }
        let number = self.next_number();
        let job = CheckpointJob::start(number, &self.holds, request)?;
        self.checkpoint.add(number, job);
        Ok(number)
    }

    /// Ends the run of checkpoints after the epoch under way: run `number`, or whichever there is.
    pub fn stop_checkpoints(&self, number: Option<u64>) -> Result<(), String> {
        let job = asked(&self.checkpoint, number)?.filter(|job| !job.is_over());
        job.ok_or("no checkpoints are being taken")?.cancel();
        Ok(())
    }

    /// Has hold of run `number` until it is over.
    pub async fn hold_checkpoints(&self, number: Option<u64>) -> Result<(), String> {
        asked(&self.checkpoint, number)?.ok_or("no checkpoints have been taken")?.hold().await;
        Ok(())
    }

    /// Ends run `number` if its client does not come to hold it.
    pub async fn expect_client(&self, number: u64) {
        if let Some(job) = self.checkpoint.find(number) {
            job.expect_client().await;
        }
    }

    /// The reports of run `number`, or of the latest, from number `since` on: at once if there are
    /// any, else when there is one, the run is over, or `wait` has passed.
    pub async fn checkpoints(
        &self,
        number: Option<u64>,
        since: u64,
        wait: Duration,
    ) -> Result<CheckpointPage, String> {
        let job = asked(&self.checkpoint, number)?.ok_or("no checkpoints have been taken")?;
        // Either way the page says what there is.
        let _ = tokio::time::timeout(wait, job.news_since(since)).await;
        Ok(job.page(since))
    }

    /// Begins to send the guest to another host and returns the migration's number; there is one at
    /// a time.
    pub fn start_migration(&self, request: &MigrationRequest) -> Result<u64, String> {
        let _beginning = lock(&self.beginning);
        if let Some(job) = self.migration_job().filter(|job| !job.is_over()) {
            return Err(format!("the guest is being migrated already, to {}", job.page().to));
        }
        let number = self.next_number();
        let job = MigrationJob::start(number, &self.holds, self.records.clone(), request)?;
        self.migration.add(number, job);
        Ok(number)
    }

    /// Ends migration `number`, or whichever there is; the guest stays here.
    pub fn cancel_migration(&self, number: Option<u64>) -> Result<(), String> {
        let job = asked(&self.migration, number)?.filter(|job| !job.is_over());
        job.ok_or("no migration is under way")?.cancel().map_err(|e| e.to_string())
    }

    /// Ends the guest, unless another host may have it: then only the operator's word on that does.
    pub fn stop(&self, why: &str) -> Result<(), String> {
        if let Some(job) = self.migration_job().filter(|job| job.is_handed_over()) {
            return Err(format!(
                "the guest has been handed over and may be running at {}; resolve it with `driftline \
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
        let job = job.ok_or("no migration is in doubt")?;
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

    /// Where migration `number`, or the latest, stands: at once if it is over, else then, or after
    /// `wait`.
    pub async fn migration(
        &self,
        number: Option<u64>,
        wait: Duration,
    ) -> Result<MigrationPage, String> {
        let job = asked(&self.migration, number)?.ok_or("no migration has been asked for")?;
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
        wait(&|| self.watches.are_over());
    }

    fn migration_job(&self) -> Option<Arc<MigrationJob>> {
        self.migration.latest()
    }

    fn checkpoint_job(&self) -> Option<Arc<CheckpointJob>> {
        self.checkpoint.latest()
    }

    fn next_number(&self) -> u64 {
        self.begun.fetch_add(1, Ordering::Relaxed) + 1
    }
}

/// The job that was asked for by its number, or else the latest, if there is any.
fn asked<J>(kept: &Kept<J>, number: Option<u64>) -> Result<Option<Arc<J>>, String> {
    let Some(number) = number else { return Ok(kept.latest()) };
    match kept.find(number) {
        Some(job) => Ok(Some(job)),
        None => Err(format!("there is no job {number} of this kind here, or it is long over")),
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A guest of threads that writes when it is resumed, for tests.
#[cfg(test)]
fn paused_guest() -> (SharedVm, Arc<Jobs>) {
    use driftline_machine::config::{Backend, HostConfig, SerialSink};
    use driftline_machine::testing::payload_config;
    let config = payload_config(Backend::Threads);
    let host = HostConfig { serial: SerialSink::Null, ..Default::default() };
    let vm = driftline_machine::backend::launch(config, &host).unwrap();
    (vm.clone(), Jobs::new(vm, std::env::temp_dir()))
}
