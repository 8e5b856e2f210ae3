//! Jobs on a guest: long-running work besides running it. One object with its own thread owns each
//! checkpoint run and each migration. A checkpoint run and a migration may be under way at the same
//! time.

mod bins;
mod checkpoints;
mod dirty_watch;
mod error;
mod exchange;
mod history;
mod migration;
mod moved_run;
mod pause_control;
mod report_log;
mod run_suspension;
mod sampling;
mod shadow;
mod snapshots;
mod suspended_run;
mod totals;
mod upgrade;
mod watches;

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use driftline_checkpoint::SnapshotReport;
use driftline_guest::{GuestError, RunState};
use driftline_machine::config::guest_span;
use driftline_machine::vm::SharedVm;
use driftline_migrate::{Records, Resolution, Responder};
use parking_lot::Mutex;
use tracing::Span;

use crate::model::{
    CheckpointPage, CheckpointRequest, GuestState, Info, MigrationPage, MigrationRequest,
};
use checkpoints::CheckpointJob;
pub use error::JobError;
pub(crate) use exchange::KeptFile;
use history::JobHistory;
use migration::MigrationJob;
pub(crate) use moved_run::RunPosition;
pub use moved_run::{FollowingFactory, JobNumbers, MovedRun, OfferedRun};
pub(crate) use pause_control::OperatorError;
use pause_control::{JobRole, PauseControl};
pub use sampling::{WindowSummary, WriteProfile};
use shadow::Shadow;
pub use shadow::{ShadowError, ShadowMode, ShadowReport};
pub use snapshots::SnapshotBase;
pub(crate) use snapshots::{SnapshotFailure, SnapshotOrder};
pub(crate) use suspended_run::SuspendedRun;
use totals::CheckpointTotals;
pub(crate) use totals::{CheckpointFigures, MigrationCounts, MigrationFigures};
use watches::DirtyWatches;

/// Limit for a process whose guest continues in another one to wait for the readers of its jobs'
/// last reports.
const UPGRADE_LIMIT: Duration = Duration::from_secs(15);
/// Limit for a process whose guest has ended to wait for the readers of its jobs' last reports.
const LAST_READ_LIMIT: Duration = Duration::from_secs(2);

/// A guest and the jobs on it.
pub struct Jobs {
    vm: SharedVm,
    /// The guest's logging span.
    span: Span,
    pauses: Arc<PauseControl>,
    /// Directory of this host's hand-over records.
    records: PathBuf,
    /// Held while a job is started, so that there is at most one of each kind. Reading a job never
    /// waits for it.
    starting: Mutex<()>,
    /// Held while the guest's writes are sampled for a plan. No thread waits for it.
    sampling: Mutex<()>,
    /// The watches of the guest's writes.
    watches: DirtyWatches,
    /// Number of the last job started, of either kind.
    last_number: AtomicU64,
    checkpoint: JobHistory<CheckpointJob>,
    checkpoint_totals: Arc<CheckpointTotals>,
    migration: JobHistory<MigrationJob>,
    /// Counts of all migrations before the latest one. Held while the latest one is replaced.
    earlier_migrations: Mutex<MigrationCounts>,
    /// Answers the source from which this guest migrated.
    responder: Mutex<Option<Responder>>,
    /// Checks whether tracking misses frames.
    shadow: Mutex<Option<Shadow>>,
    /// What snapshots build on. Held while one is taken.
    snapshots: Mutex<SnapshotBase>,
    /// Held during an upgrade. No thread waits for it.
    upgrading: Mutex<()>,
    /// Whether another process of this host continues, or is about to continue, with the guest
    /// after an upgrade.
    is_upgraded: AtomicBool,
}

impl Jobs {
    /// Creates the jobs of `vm`, none at first. `records` is the directory of this host's hand-over
    /// records.
    pub fn new(vm: SharedVm, records: PathBuf) -> Arc<Self> {
        Arc::new(Self {
            span: guest_span(vm.vm_id(), &vm.machine_config().identity),
            pauses: PauseControl::new(vm.clone()),
            vm,
            records,
            starting: Mutex::default(),
            sampling: Mutex::default(),
            watches: DirtyWatches::default(),
            last_number: AtomicU64::new(0),
            checkpoint: JobHistory::default(),
            checkpoint_totals: Arc::default(),
            migration: JobHistory::default(),
            earlier_migrations: Mutex::default(),
            responder: Mutex::default(),
            shadow: Mutex::default(),
            snapshots: Mutex::default(),
            upgrading: Mutex::default(),
            is_upgraded: AtomicBool::new(false),
        })
    }

    /// Keeps the responder, which answers the source from which this guest migrated, for as long as
    /// the guest is here.
    pub fn keep_responder(&self, responder: Responder) {
        *self.responder.lock() = Some(responder);
    }

    /// Returns the guest's logging span.
    pub fn span(&self) -> &Span {
        &self.span
    }

    /// Returns the guest.
    pub(crate) fn vm(&self) -> &SharedVm {
        &self.vm
    }

    /// Returns the guest's figures, with the state that results from its jobs.
    pub(crate) fn info(&self) -> Info {
        let migration = self.migration_job().filter(|job| !job.is_over());
        let state = self.state_with(migration.as_deref());
        let checkpoints = self.checkpoint_job();
        let checkpointing = checkpoints.as_ref().is_some_and(|job| !job.is_over());
        let every_ms = checkpoints.as_ref().and_then(|job| job.every_ms());
        let store = checkpoints.map(|job| job.store().to_owned());
        let migration = migration.map(|job| job.snapshot().progress);
        Info { migration, store, every_ms, ..Info::new(self.vm.info(), state, checkpointing) }
    }

    /// Returns the guest's state. Does not wait for a pause.
    pub(crate) fn state(&self) -> GuestState {
        let migration = self.migration_job().filter(|job| !job.is_over());
        self.state_with(migration.as_deref())
    }

    fn state_with(&self, migration: Option<&MigrationJob>) -> GuestState {
        match (self.pauses.operator_state(), migration) {
            (RunState::Stopped, _) => GuestState::Stopped,
            (_, Some(job)) if job.is_in_doubt() => GuestState::InDoubt,
            (_, Some(_)) => GuestState::Migrating,
            (state, None) => state.into(),
        }
    }

    /// Pauses the vCPUs for the operator.
    ///
    /// # Errors
    ///
    /// An [`OperatorError`] if a migration controls the guest, or the guest refuses.
    pub(crate) fn pause(&self) -> Result<(), OperatorError> {
        self.pauses.operator_pause()
    }

    /// Resumes the vCPUs for the operator.
    ///
    /// # Errors
    ///
    /// As for [`pause`](Self::pause).
    pub(crate) fn resume(&self) -> Result<(), OperatorError> {
        self.pauses.operator_resume()
    }

    /// Keeps what snapshots of the guest build on. The caller makes it before the guest runs.
    pub fn keep_snapshot_base(&self, base: SnapshotBase) {
        *self.snapshots.lock() = base;
    }

    /// Takes a snapshot of the guest, which its operator has paused unless the order is for a live
    /// one. The guest stays paused, or runs, and on return the snapshot is durable. Takes as long
    /// as it takes to write the memory.
    ///
    /// # Errors
    ///
    /// A [`SnapshotFailure`] if the guest is not paused, or a file cannot be written.
    pub(crate) fn take_snapshot(
        &self,
        order: SnapshotOrder<'_>,
    ) -> Result<SnapshotReport, SnapshotFailure> {
        snapshots::take(&*self.vm, &self.pauses, &mut self.snapshots.lock(), order)
    }

    /// Starts to verify the guest's tracking by a second method, until
    /// [`end_shadow`](Self::end_shadow). Reads all guest memory first.
    ///
    /// # Errors
    ///
    /// A [`ShadowError`] if the host lacks the method, or the guest cannot be read.
    pub fn start_shadow(&self, mode: ShadowMode) -> Result<(), ShadowError> {
        let shadow = Shadow::start(self.pauses.guest_for(JobRole::Checkpoint), mode)?;
        *self.shadow.lock() = Some(shadow);
        Ok(())
    }

    /// Performs the last check, on a guest that has ended. Returns `None` if no verification was
    /// started, and an error if its thread has panicked.
    pub fn end_shadow(&self) -> Option<Result<ShadowReport, ShadowError>> {
        let shadow = self.shadow.lock().take()?;
        Some(shadow.end())
    }

    /// Starts a checkpoint run and returns its number. At most one run is active at a time.
    ///
    /// # Errors
    ///
    /// A run is active, or the new one cannot be started.
    pub(crate) fn start_checkpoints(&self, request: &CheckpointRequest) -> Result<u64, JobError> {
        // Opening a store may take time. Only calls that start a job wait for it.
        let _starting = self.starting.lock();
        if let Some(job) = self.checkpoint_job().filter(|job| !job.is_over()) {
            return Err(job.under_way());
        }
        self.require_first_files()?;
        let number = self.next_number();
        let totals = self.checkpoint_totals.clone();
        let job = CheckpointJob::start(number, &self.pauses, totals, request)?;
        self.checkpoint.add(number, job);
        Ok(number)
    }

    /// Ends checkpoint run `number`, or the latest one, after the epoch in progress.
    ///
    /// # Errors
    ///
    /// That run does not exist, or is over.
    pub(crate) fn stop_checkpoints(&self, number: Option<u64>) -> Result<(), JobError> {
        let job = find_job(&self.checkpoint, number)?.filter(|job| !job.is_over());
        job.ok_or(JobError::NoCheckpointRun)?.cancel();
        Ok(())
    }

    /// Attaches a client to checkpoint run `number`, or to the latest one, until it is over.
    ///
    /// # Errors
    ///
    /// That run does not exist.
    pub(crate) async fn attach_to_checkpoints(&self, number: Option<u64>) -> Result<(), JobError> {
        find_job(&self.checkpoint, number)?.ok_or(JobError::NoCheckpoints)?.attach().await;
        Ok(())
    }

    /// Returns the number of the checkpoint run under way.
    pub(crate) fn checkpoint_run(&self) -> Option<u64> {
        self.checkpoint_job().filter(|job| !job.is_over()).map(|job| job.number())
    }

    /// Ends run `number` if its client does not attach in time.
    pub(crate) async fn expect_client(&self, number: u64) {
        if let Some(job) = self.checkpoint.find(number) {
            job.expect_client().await;
        }
    }

    /// Returns the reports of run `number`, or of the latest run, from number `since` on. Returns
    /// immediately if there are any. Otherwise it returns when there is one, the run is over, or
    /// `wait` has passed.
    ///
    /// # Errors
    ///
    /// That run does not exist.
    pub(crate) async fn checkpoints(
        &self,
        number: Option<u64>,
        since: u64,
        wait: Duration,
    ) -> Result<CheckpointPage, JobError> {
        let job = find_job(&self.checkpoint, number)?.ok_or(JobError::NoCheckpoints)?;
        // In either case the page contains the reports that exist.
        let _ = tokio::time::timeout(wait, job.news_since(since)).await;
        Ok(job.page(since))
    }

    /// Starts to send the guest to another host and returns the migration's number. At most one
    /// migration is under way at a time.
    ///
    /// # Errors
    ///
    /// A migration is under way, or the new one cannot be started.
    pub(crate) fn start_migration(&self, request: &MigrationRequest) -> Result<u64, JobError> {
        let _starting = self.starting.lock();
        self.begin_migration(request)
    }

    /// Does as [`start_migration`](Self::start_migration). The caller holds `starting`.
    fn begin_migration(&self, request: &MigrationRequest) -> Result<u64, JobError> {
        if let Some(job) = self.migration_job().filter(|job| !job.is_over()) {
            let to = job.to().to_owned();
            return Err(JobError::MigrationUnderWay { to });
        }
        self.require_first_files()?;
        let number = self.next_number();
        let job = MigrationJob::start(number, &self.pauses, self.records.clone(), request)?;
        let mut earlier = self.earlier_migrations.lock();
        if let Some(before) = self.migration.latest() {
            earlier.add(&before.snapshot());
        }
        self.migration.add(number, job);
        Ok(number)
    }

    /// Returns whether another process of this host continues, or is about to continue, with the
    /// guest after an upgrade.
    pub fn is_upgraded(&self) -> bool {
        self.is_upgraded.load(Ordering::Relaxed)
    }

    /// Cancels migration `number`, or the latest one. The guest stays on this host.
    ///
    /// # Errors
    ///
    /// No migration is under way, or it is too late to cancel it.
    pub(crate) fn cancel_migration(&self, number: Option<u64>) -> Result<(), JobError> {
        let job = find_job(&self.migration, number)?.filter(|job| !job.is_over());
        job.ok_or(JobError::NotMigrating)?.cancel()?;
        Ok(())
    }

    /// Ends the guest.
    ///
    /// # Errors
    ///
    /// Another host may have the guest. Only the operator's resolution ends it then.
    pub fn stop(&self, why: &str) -> Result<(), JobError> {
        if let Some(job) = self.migration_job().filter(|job| job.is_handed_over()) {
            return Err(JobError::HandedOver { to: job.to().to_owned() });
        }
        self.vm.stop(why);
        Ok(())
    }

    /// Resolves a migration in doubt as the operator decides.
    ///
    /// # Errors
    ///
    /// No migration is in doubt, or the resolution failed.
    pub(crate) fn resolve_migration(&self, how: Resolution) -> Result<(), JobError> {
        let job = self.migration_job().filter(|job| !job.is_over());
        let job = job.ok_or(JobError::NotInDoubt)?;
        if how == Resolution::Run {
            // The operator must not run a guest that another process has taken.
            self.vm.memory_right().check().map_err(GuestError::from)?;
        }
        if !job.is_lost() {
            return Ok(job.resolve(how)?);
        }
        self.resolve_lost(how)?;
        job.end_lost(&self.pauses);
        Ok(())
    }

    /// Performs the steps that the migration's thread would have performed had it not panicked.
    fn resolve_lost(&self, how: Resolution) -> Result<(), JobError> {
        match how {
            Resolution::Run => self.pauses.take_back()?,
            Resolution::Discard => self.vm.stop("the operator resolved that it ends here"),
        }
        let records = Records::open(&self.records)?;
        let pending = records.pending()?;
        for e in &pending.unreadable {
            tracing::warn!("{e}");
        }
        for record in pending.records {
            if record.vm_id == self.vm.vm_id() {
                records.remove_source(record.token)?;
            }
        }
        Ok(())
    }

    /// Returns the state of migration `number`, or of the latest one. Returns immediately if the
    /// migration is over. Otherwise it returns when the migration ends, or `wait` has passed.
    ///
    /// # Errors
    ///
    /// That migration does not exist.
    pub(crate) async fn migration(
        &self,
        number: Option<u64>,
        wait: Duration,
    ) -> Result<MigrationPage, JobError> {
        let job = find_job(&self.migration, number)?.ok_or(JobError::NeverMigrated)?;
        // In either case the page contains the current state.
        let _ = tokio::time::timeout(wait, job.end()).await;
        Ok(job.page())
    }

    /// Returns the totals of all checkpoint runs.
    pub(crate) fn checkpoint_figures(&self) -> CheckpointFigures {
        self.checkpoint_totals.read()
    }

    /// Returns the totals of all migrations, and the latest one.
    pub(crate) fn migration_figures(&self) -> MigrationFigures {
        let earlier = self.earlier_migrations.lock();
        let latest = self.migration_job().map(|job| job.snapshot());
        let mut counts = *earlier;
        drop(earlier);
        latest.iter().for_each(|latest| counts.add(latest));
        MigrationFigures { counts, latest }
    }

    /// Waits, after the guest has ended, until the jobs are over and their clients have read the
    /// end: at most 2 s, or 15 s after an upgrade.
    pub fn await_last_readers(&self) {
        // After an upgrade, the next process also tells its service manager and takes over the
        // API's connections.
        let limit = if self.is_upgraded() { UPGRADE_LIMIT } else { LAST_READ_LIMIT };
        let end = Instant::now() + limit;
        let wait = |done: &dyn Fn() -> bool| {
            while !done() && Instant::now() < end {
                std::thread::sleep(Duration::from_millis(5));
            }
        };
        if let Some(job) = self.migration_job() {
            wait(&|| job.is_over() && job.end_was_read());
        }
        // A client may have read the end of a hand-over before the checkpoint run has moved.
        wait(&|| !self.upgrading.is_locked());
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

    /// Refuses a guest with a drive whose file or size was exchanged since its start. The caller
    /// holds `starting`, which keeps drives from getting another one.
    fn require_first_files(&self) -> Result<(), JobError> {
        let exchanged = self.vm.disk_files().iter().find(|drive| drive.is_exchanged());
        exchanged.map_or(Ok(()), |drive| Err(JobError::DriveExchanged(drive.disk().to_owned())))
    }

    fn next_number(&self) -> u64 {
        self.last_number.fetch_add(1, Ordering::Relaxed) + 1
    }
}

/// Returns the job with this number, or without a number the latest job, if there is one.
fn find_job<J>(history: &JobHistory<J>, number: Option<u64>) -> Result<Option<Arc<J>>, JobError> {
    let Some(number) = number else { return Ok(history.latest()) };
    match history.find(number) {
        Some(job) => Ok(Some(job)),
        None => Err(JobError::NoJob(number)),
    }
}

/// Returns a paused guest of the thread backend, which writes once it is resumed, and its jobs.
#[cfg(test)]
fn paused_guest() -> (SharedVm, Arc<Jobs>) {
    use driftline_machine::config::{BackendKind, HostConfig, SerialSink};
    use driftline_machine::testing::payload_config;
    let config = payload_config(BackendKind::Threads);
    let host = HostConfig { serial: SerialSink::Null, ..Default::default() };
    let vm = driftline_backends::launch(config, &host).unwrap();
    (vm.clone(), Jobs::new(vm, std::env::temp_dir()))
}
