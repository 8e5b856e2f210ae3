//! Decides when the guest is paused. Checkpoints, a migration and the operator pause the guest
//! independently. The guest runs only while none of them wants it paused.
//!
//! Each job sees the guest through a [`JobGuest`], which delegates everything to the guest except
//! its lifecycle: pause and resume count the jobs. Without the count, the end of a checkpoint's
//! pause would resume a guest whose last frame a migration has already copied.

use std::ops::{Deref, DerefMut};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use driftline_guest::{
    DirtyLog, GuestContents, GuestError, GuestIdentity, HandOver, Lifecycle, Populate, RunState,
    SavedPause, Stateful, VcpuPauses, WriteThrottle,
};
use driftline_machine::vm::SharedVm;
use parking_lot::{Mutex, MutexGuard};

/// The guest, and what keeps it paused: jobs and the operator.
pub(super) struct PauseControl {
    vm: SharedVm,
    /// Held while the guest is paused or resumed, for as long as a stuck device delays that.
    state: Mutex<PauseState>,
    /// The state shown to the operator in place of the guest's own, while that state is being
    /// changed or a job has paused the guest. Never locked for long.
    displayed: Mutex<Option<RunState>>,
    /// Whether a migration's pause also collects what the guest has written, for the checkpoint run
    /// that continues in the next process.
    collects_in_pause: AtomicBool,
}

/// The locked state. Dropping it updates what the operator is shown.
struct PauseStateGuard<'p> {
    pauses: &'p PauseControl,
    state: MutexGuard<'p, PauseState>,
}

impl Deref for PauseStateGuard<'_> {
    type Target = PauseState;

    fn deref(&self) -> &PauseState {
        &self.state
    }
}

impl DerefMut for PauseStateGuard<'_> {
    fn deref_mut(&mut self) -> &mut PauseState {
        &mut self.state
    }
}

impl Drop for PauseStateGuard<'_> {
    fn drop(&mut self) {
        *self.pauses.displayed.lock() = (self.state.jobs > 0).then_some(self.state.wanted);
    }
}

struct PauseState {
    /// Number of jobs that have paused the guest.
    jobs: u32,
    /// Whether one of these jobs is the migration.
    migration_pauses: bool,
    /// The state that the operator wants once no job keeps the guest paused. Meaningful only while
    /// a job does.
    wanted: RunState,
    /// Whether a migration decides the guest's state, so that the operator must not change it.
    migrating: bool,
    /// Whether a snapshot is being written, during which the operator must not resume the guest.
    snapshotting: bool,
}

impl PauseState {
    /// Counts a job. Returns the state that the job receives: the guest ran, in which case the job
    /// must resume it, or the guest was paused, in which case the job is not counted.
    fn add_job(&mut self, role: JobRole) -> RunState {
        if role == JobRole::Migration && self.wanted == RunState::Paused {
            // The migration is told that the guest was paused, so it does not resume the guest.
            // The operator cannot resume the guest during the migration either.
            return RunState::Paused;
        }
        self.jobs += 1;
        self.migration_pauses |= role == JobRole::Migration;
        RunState::Running
    }

    /// Ends the migration's pause, if it has one, and leaves the guest paused. A checkpoint that is
    /// copying keeps its pause and leaves the guest paused when it ends.
    fn drop_migrations_pause(&mut self) {
        if std::mem::take(&mut self.migration_pauses) {
            self.jobs = self.jobs.saturating_sub(1);
            self.wanted = RunState::Paused;
        }
    }
}

/// The reason why the operator cannot pause or resume the guest.
#[derive(Debug, thiserror::Error)]
pub(crate) enum OperatorError {
    /// A migration controls the guest.
    #[error("cannot {0} a guest that is being migrated; cancel the migration first")]
    Migrating(&'static str),
    /// A snapshot of the guest is being written.
    #[error("cannot {0} a guest whose snapshot is being written; wait for its end")]
    Snapshotting(&'static str),
    /// The operator has not paused the guest.
    #[error("the guest is running: pause it before its snapshot")]
    Running,
    /// The guest refuses.
    #[error(transparent)]
    Guest(#[from] GuestError),
}

impl PauseControl {
    pub(super) fn new(vm: SharedVm) -> Arc<Self> {
        let state = PauseState {
            jobs: 0,
            migration_pauses: false,
            wanted: RunState::Paused,
            migrating: false,
            snapshotting: false,
        };
        let (state, displayed) = (Mutex::new(state), Mutex::default());
        Arc::new(Self { vm, state, displayed, collects_in_pause: AtomicBool::new(false) })
    }

    /// Returns the guest's state as the operator sees it. That excludes a job's short pause, and a
    /// pause that has not completed yet. Does not wait for a pause.
    pub(super) fn operator_state(&self) -> RunState {
        let displayed = self.displayed.lock();
        // While `displayed` is empty, no thread is changing the guest's state, and none does before
        // the lock is released.
        match self.vm.run_state() {
            RunState::Stopped => RunState::Stopped,
            real => displayed.unwrap_or(real),
        }
    }

    /// Pauses the guest for the operator.
    pub(super) fn operator_pause(&self) -> Result<(), OperatorError> {
        let mut state = self.lock();
        if state.migrating {
            return Err(OperatorError::Migrating("pause"));
        }
        if state.jobs == 0 {
            self.vm.pause()?;
        }
        state.wanted = RunState::Paused;
        Ok(())
    }

    /// Resumes the guest for the operator: now, or when the last job resumes it. Does nothing if
    /// the guest already runs.
    pub(super) fn operator_resume(&self) -> Result<(), OperatorError> {
        let mut state = self.lock();
        if state.migrating {
            return Err(OperatorError::Migrating("resume"));
        }
        if state.snapshotting {
            return Err(OperatorError::Snapshotting("resume"));
        }
        if state.jobs == 0 {
            match self.vm.run_state() {
                RunState::Running => return Ok(()),
                // A migration may have released the drives and failed to acquire them again.
                RunState::Paused => self.vm.acquire()?,
                RunState::Stopped => {}
            }
            self.vm.resume()?;
        }
        state.wanted = RunState::Running;
        Ok(())
    }

    /// Keeps the operator's pause until the result is dropped: the operator is not to resume the
    /// guest meanwhile.
    pub(super) fn keep_paused(&self) -> Result<KeptPause<'_>, OperatorError> {
        let mut state = self.lock();
        if state.snapshotting {
            return Err(OperatorError::Snapshotting("take a snapshot of"));
        }
        match self.wanted_for_snapshot(&state)? {
            RunState::Paused => {}
            RunState::Running => return Err(OperatorError::Running),
            state @ RunState::Stopped => {
                return Err(GuestError::State { request: "take a snapshot of", state }.into());
            }
        }
        state.snapshotting = true;
        Ok(KeptPause(self))
    }

    /// Returns whether the operator lets the guest run when a snapshot of it is to be taken.
    pub(super) fn runs_for_snapshot(&self) -> Result<bool, OperatorError> {
        Ok(self.wanted_for_snapshot(&self.lock())? == RunState::Running)
    }

    fn wanted_for_snapshot(&self, state: &PauseState) -> Result<RunState, OperatorError> {
        match state.migrating {
            true => Err(OperatorError::Migrating("take a snapshot of")),
            false if state.jobs > 0 => Ok(state.wanted),
            false => Ok(self.vm.run_state()),
        }
    }

    /// Marks the start of a migration.
    pub(super) fn begin_migration(&self) {
        self.lock().migrating = true;
    }

    /// Marks the end of a migration. If the guest is still paused for it, the migration has failed
    /// to resume the guest: it stays paused, and the operator may resume it.
    pub(super) fn end_migration(&self) {
        let mut state = self.lock();
        state.migrating = false;
        state.drop_migrations_pause();
    }

    /// Takes the guest of a migration whose thread has panicked back to this host. The guest is
    /// paused until the operator resumes it.
    pub(super) fn take_back(&self) -> Result<(), GuestError> {
        let mut state = self.lock();
        self.vm.acquire()?;
        state.drop_migrations_pause();
        state.wanted = RunState::Paused;
        Ok(())
    }

    /// Sets whether the pauses of migrations also bring every subscriber's dirty frames up to date.
    pub(super) fn collect_in_pause(&self, collect: bool) {
        self.collects_in_pause.store(collect, Ordering::Relaxed);
    }

    /// Returns the guest as a job sees it.
    pub(super) fn guest_for(self: &Arc<Self>, role: JobRole) -> Arc<JobGuest> {
        Arc::new(JobGuest { pauses: self.clone(), role })
    }

    fn lock(&self) -> PauseStateGuard<'_> {
        let state = self.state.lock();
        let mut displayed = self.displayed.lock();
        displayed.get_or_insert_with(|| self.vm.run_state());
        drop(displayed);
        PauseStateGuard { pauses: self, state }
    }

    fn pause_for(&self, role: JobRole) -> Result<RunState, GuestError> {
        let mut state = self.lock();
        if state.jobs == 0 {
            state.wanted = self.vm.pause()?;
        }
        Ok(state.add_job(role))
    }

    fn pause_and_save_for(&self, role: JobRole) -> Result<SavedPause, GuestError> {
        let mut state = self.lock();
        let mut since = Instant::now();
        let mut saved = match state.jobs {
            0 => {
                let pause = self.vm.pause_and_save()?;
                (state.wanted, since) = (pause.before, pause.since);
                pause.saved
            }
            _ => self.vm.save_state(),
        };
        if role == JobRole::Migration && self.collects_in_pause.load(Ordering::Relaxed) {
            // Afterwards, because saving may make the host write into guest memory.
            saved = saved.and_then(|sections| self.vm.collect().map(|_| sections));
        }
        Ok(SavedPause { before: state.add_job(role), since, saved })
    }

    fn resume_for(&self, role: JobRole) -> Result<(), GuestError> {
        let mut state = self.lock();
        state.migration_pauses &= role != JobRole::Migration;
        if state.jobs > 1 || state.wanted == RunState::Paused {
            state.jobs = state.jobs.saturating_sub(1);
            return Ok(());
        }
        // The job does not retry: if the guest refuses, it stays paused for the operator to
        // resume.
        state.jobs = 0;
        self.vm.resume().inspect_err(|_| state.wanted = RunState::Paused)
    }
}

/// The operator's pause, which lasts at least until this is dropped.
pub(super) struct KeptPause<'p>(&'p PauseControl);

impl Drop for KeptPause<'_> {
    fn drop(&mut self) {
        self.0.lock().snapshotting = false;
    }
}

/// The job that uses a [`JobGuest`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum JobRole {
    /// A checkpoint is always told that the guest ran, so that the checkpoint ends each pause that
    /// it begins.
    Checkpoint,
    /// A migration is told the guest's state, because the destination must continue in the same
    /// state.
    Migration,
}

/// The guest as one job sees it.
pub(super) struct JobGuest {
    pauses: Arc<PauseControl>,
    role: JobRole,
}

// A job's guest differs from the guest only in its lifecycle.
driftline_guest::delegate!(
    JobGuest as guest => *guest.pauses.vm;
    GuestIdentity, GuestContents, Populate, DirtyLog, WriteThrottle, Stateful, HandOver,
);

impl Lifecycle for JobGuest {
    fn run_state(&self) -> RunState {
        self.pauses.vm.run_state()
    }

    fn pause(&self) -> Result<RunState, GuestError> {
        self.pauses.pause_for(self.role)
    }

    fn pause_and_save(&self) -> Result<SavedPause, GuestError> {
        self.pauses.pause_and_save_for(self.role)
    }

    fn resume(&self) -> Result<(), GuestError> {
        self.pauses.resume_for(self.role)
    }

    fn stop(&self, why: &str) {
        self.pauses.vm.stop(why);
    }

    fn vcpu_pauses(&self) -> Vec<VcpuPauses> {
        self.pauses.vm.vcpu_pauses()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use RunState::{Paused, Running};
    use driftline_guest::SavedState;
    use driftline_machine::config::{
        BackendKind, DeviceConfig, HostConfig, MachineConfig, SerialSink,
    };
    use driftline_machine::testing::{kvm_or_skip, payload_config};

    fn running() -> (SharedVm, Arc<PauseControl>) {
        launch(BackendKind::Threads, Vec::new())
    }

    fn launch(backend: BackendKind, devices: Vec<DeviceConfig>) -> (SharedVm, Arc<PauseControl>) {
        let config = MachineConfig { devices, ..payload_config(backend) };
        let host = HostConfig { serial: SerialSink::Null, ..Default::default() };
        let vm = driftline_backends::launch(config, &host).unwrap();
        vm.resume().unwrap();
        (vm.clone(), PauseControl::new(vm))
    }

    #[test]
    fn end_of_one_pause_keeps_another() {
        let (vm, pauses) = running();
        let (checkpoint, migration) =
            (pauses.guest_for(JobRole::Checkpoint), pauses.guest_for(JobRole::Migration));
        checkpoint.pause().unwrap();
        assert_eq!(migration.pause().unwrap(), Running, "the guest ran before the first pause");
        checkpoint.resume().unwrap();
        assert_eq!(vm.run_state(), Paused, "the migration has not resumed it");
        checkpoint.pause().unwrap();
        migration.resume().unwrap();
        assert_eq!((vm.run_state(), pauses.operator_state()), (Paused, Running));
        checkpoint.resume().unwrap();
        assert_eq!(vm.run_state(), Running);
    }

    #[test]
    fn operators_pause_outlives_that_of_a_job() {
        let (vm, pauses) = running();
        let checkpoint = pauses.guest_for(JobRole::Checkpoint);
        checkpoint.pause().unwrap();
        pauses.operator_pause().unwrap();
        checkpoint.resume().unwrap();
        assert_eq!(vm.run_state(), Paused, "the operator has paused it");
        checkpoint.pause().unwrap();
        (0..2).for_each(|_| pauses.operator_resume().unwrap());
        assert_eq!(vm.run_state(), Paused, "the checkpoint still copies");
        checkpoint.resume().unwrap();
        assert_eq!(vm.run_state(), Running, "the operator has resumed it");
    }

    #[test]
    fn pause_and_resume_may_be_repeated() {
        let (vm, pauses) = running();
        (0..2).for_each(|_| pauses.operator_resume().unwrap());
        assert_eq!(vm.run_state(), Running);
        (0..2).for_each(|_| pauses.operator_pause().unwrap());
        assert_eq!(vm.run_state(), Paused);
        vm.stop("the test is over");
        pauses.operator_resume().unwrap_err();
        pauses.operator_pause().unwrap_err();
    }

    #[test]
    fn kept_pause_is_not_resumed() {
        let (vm, pauses) = running();
        let refused = |pauses: &PauseControl| pauses.keep_paused().err().unwrap().to_string();
        let running = "the guest is running: pause it before its snapshot";
        assert_eq!(refused(&pauses), running);
        let checkpoint = pauses.guest_for(JobRole::Checkpoint);
        checkpoint.pause().unwrap();
        assert_eq!(refused(&pauses), running, "only a job has paused it");
        pauses.operator_pause().unwrap();
        let kept = pauses.keep_paused().unwrap();
        assert!(refused(&pauses).contains("whose snapshot is being written"));
        checkpoint.resume().unwrap();
        let e = pauses.operator_resume().unwrap_err().to_string();
        assert!(e.starts_with("cannot resume a guest whose snapshot is being written"), "{e}");
        assert_eq!(vm.run_state(), Paused);
        drop(kept);
        pauses.operator_resume().unwrap();
        assert_eq!(vm.run_state(), Running);
        vm.stop("the test is over");
        assert_eq!(refused(&pauses), "cannot take a snapshot of a guest that is stopped");
    }

    #[test]
    fn dead_migration_leaves_the_guest_paused() {
        let (vm, pauses) = running();
        pauses.begin_migration();
        let (checkpoint, migration) =
            (pauses.guest_for(JobRole::Checkpoint), pauses.guest_for(JobRole::Migration));
        migration.pause().unwrap();
        checkpoint.pause().unwrap();
        pauses.take_back().unwrap();
        pauses.end_migration();
        pauses.operator_resume().unwrap();
        assert_eq!(vm.run_state(), Paused, "the checkpoint still copies");
        checkpoint.resume().unwrap();
        assert_eq!(vm.run_state(), Running);
    }

    #[test]
    fn operator_cannot_control_a_migrating_guest() {
        let (vm, pauses) = running();
        pauses.operator_pause().unwrap();
        pauses.begin_migration();
        let migration = pauses.guest_for(JobRole::Migration);
        assert_eq!(migration.pause().unwrap(), Paused, "the guest stays paused at the destination");
        let e = pauses.operator_resume().unwrap_err().to_string();
        assert!(e.starts_with("cannot resume a guest that is being migrated"), "{e}");
        let e = pauses.runs_for_snapshot().unwrap_err().to_string();
        assert!(e.starts_with("cannot take a snapshot of a guest that is being migrated"), "{e}");
        let checkpoint = pauses.guest_for(JobRole::Checkpoint);
        checkpoint.pause().unwrap();
        checkpoint.resume().unwrap();
        assert_eq!(vm.run_state(), Paused);
        pauses.end_migration();
        pauses.operator_resume().unwrap();
        assert_eq!(vm.run_state(), Running);
    }

    #[test]
    fn saving_in_a_pause_counts_the_job() {
        let (vm, pauses) = running();
        let (checkpoint, migration) =
            (pauses.guest_for(JobRole::Checkpoint), pauses.guest_for(JobRole::Migration));
        let SavedPause { before, saved, .. } = checkpoint.pause_and_save().unwrap();
        assert_eq!(before, Running);
        // The sections contain the time at which they were saved, so only their tags are compared.
        let tags = |saved: SavedState| saved.unwrap().iter().map(|s| s.tag).collect::<Vec<_>>();
        let alone = tags(saved);
        assert!(!alone.is_empty());
        let SavedPause { before, saved, .. } = migration.pause_and_save().unwrap();
        assert_eq!(before, Running, "the guest ran before the first pause");
        assert_eq!(tags(saved), alone, "the guest is paused already");
        checkpoint.resume().unwrap();
        assert_eq!(vm.run_state(), Paused, "the migration has not resumed it");
        migration.resume().unwrap();
        assert_eq!(vm.run_state(), Running);
        pauses.operator_pause().unwrap();
        let SavedPause { before, saved, .. } = migration.pause_and_save().unwrap();
        assert_eq!(before, Paused, "the guest stays paused at the destination");
        saved.unwrap();
        let pause = checkpoint.pause_and_save().unwrap();
        assert_eq!(pause.before, Running, "a checkpoint ends each pause that it begins");
        checkpoint.resume().unwrap();
        assert_eq!(vm.run_state(), Paused, "the operator paused it");
        pauses.operator_resume().unwrap();
        vm.stop("the test is over");
        assert!(matches!(checkpoint.pause_and_save(), Err(GuestError::State { .. })));
        assert_eq!(pauses.lock().jobs, 0, "a failed pause is not counted");
    }

    #[test]
    fn guest_resumes_once_its_disk_is_free() {
        use rustix::fs::{FlockOperation, fcntl_lock};
        if !kvm_or_skip("guest_resumes_once_its_disk_is_free") {
            return;
        }
        let file = tempfile::NamedTempFile::new().unwrap();
        file.as_file().set_len(1 << 20).unwrap();
        let disk = driftline_machine::testing::disk("disk0", file.path(), 1 << 20);
        let (vm, pauses) = launch(BackendKind::Kvm, vec![DeviceConfig::Disk(disk)]);
        pauses.begin_migration();
        let migration = pauses.guest_for(JobRole::Migration);
        assert_eq!(migration.pause().unwrap(), Running);
        migration.release(driftline_guest::NextHost::Another).unwrap();
        let other = file.reopen().unwrap();
        fcntl_lock(&other, FlockOperation::NonBlockingLockExclusive).unwrap();
        migration.acquire().unwrap_err();
        pauses.end_migration();
        assert_eq!((vm.run_state(), pauses.operator_state()), (Paused, Paused));
        let why = pauses.operator_resume().unwrap_err().to_string();
        assert!(why.contains("in use by another"), "{why}");
        fcntl_lock(&other, FlockOperation::NonBlockingUnlock).unwrap();
        pauses.operator_resume().unwrap();
        assert_eq!(vm.run_state(), Running);
        fcntl_lock(&other, FlockOperation::NonBlockingLockExclusive).unwrap_err();
    }
}
