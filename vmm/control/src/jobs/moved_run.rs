//! A checkpoint run that changes its process with its guest.
//!
//! ```text
//! the guest's process            the next process
//! OfferedRun ----------------->  FollowingFactory: follows the guest's writes before it runs
//! suspends the run
//! RunPosition ---------------->
//! hands the guest over
//! MovedRun ------------------->  Jobs::continue_run
//! ```
//!
//! A run whose [`MovedRun`] does not come, because the process has ended, continues with a full
//! checkpoint.

use std::sync::Arc;

use driftline_checkpoint::{FollowedWrites, MovedChain};
use driftline_guest::{
    DriveHead, GuestError, GuestFactory, GuestWithCopies, Origin, SharedGuest, VmId,
};
use driftline_machine::vm::Vm;
use parking_lot::Mutex;
use serde::{Deserialize, Serialize};

use super::pause_control::{JobRole, PauseControl};
use super::report_log::ReportLog;
use crate::model::CheckpointRequest;

/// The numbers of the last jobs, after which those of the next process are numbered.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct JobNumbers {
    pub(super) jobs: u64,
    pub(super) watches: u64,
}

/// What the next process has to know of a run before it has the guest.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct OfferedRun {
    pub(super) number: u64,
    pub(super) request: CheckpointRequest,
}

/// The position of a suspended run. The next process continues there if the [`MovedRun`] does not
/// come.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub(crate) struct RunPosition {
    /// Number of reports so far.
    pub(super) made: u64,
    /// Number of checkpoints that are left; `None` continues until the run is stopped.
    pub(super) left: Option<u64>,
    /// Whether the run has ended.
    pub(super) is_over: bool,
}

/// What the next process continues a run with.
#[derive(Serialize, Deserialize)]
pub struct MovedRun {
    /// As in [`RunPosition`].
    pub(super) left: Option<u64>,
    pub(super) log: ReportLog,
    /// `None` if the next checkpoint is a full one, because the chain was not received.
    pub(super) chain: Option<MovedChain>,
    /// Whether the run has ended, and only its reports are left.
    pub(super) is_over: bool,
}

impl OfferedRun {
    /// Returns the position at which the run begins if nothing of it has come.
    pub(crate) fn begin(&self) -> RunPosition {
        let left = self.request.count.or(self.request.every_ms.is_none().then_some(1));
        RunPosition { made: 0, left, is_over: false }
    }
}

impl RunPosition {
    /// Returns the run as it continues if its [`MovedRun`] has not come.
    pub(crate) fn without_chain(self) -> MovedRun {
        let log = ReportLog::after(self.made);
        MovedRun { left: self.left, log, chain: None, is_over: self.is_over }
    }
}

impl MovedRun {
    /// Returns whether another process can have sent this.
    pub(crate) fn is_sound(&self) -> bool {
        self.log.is_sound()
    }
}

/// Builds a guest that another process hands over, and follows its writes from before it runs, if
/// a checkpoint run continues.
pub struct FollowingFactory<F> {
    inner: F,
    run: Option<OfferedRun>,
    writes: Mutex<Option<FollowedWrites>>,
}

impl<F> FollowingFactory<F> {
    /// Makes `inner` follow the writes of its guest for `run`.
    pub fn new(inner: F, run: Option<OfferedRun>) -> Self {
        Self { inner, run, writes: Mutex::default() }
    }

    /// Returns the run.
    pub fn run(&self) -> Option<&OfferedRun> {
        self.run.as_ref()
    }

    /// Returns the writes of the guest that was built last; `None` if they cannot be followed.
    pub fn take_writes(&self) -> Option<FollowedWrites> {
        self.writes.lock().take()
    }
}

impl<F: GuestFactory<Guest = dyn Vm>> GuestFactory for FollowingFactory<F> {
    type Guest = dyn Vm;

    fn create_with_copies(
        &self,
        vm_id: VmId,
        config: &[u8],
        drives: &[DriveHead],
    ) -> Result<GuestWithCopies<dyn Vm>, GuestError> {
        self.inner.create_with_copies(vm_id, config, drives)
    }

    fn create_on(
        &self,
        vm_id: VmId,
        config: &[u8],
        shared: &SharedGuest,
    ) -> Result<Arc<dyn Vm>, GuestError> {
        let vm = self.inner.create_on(vm_id, config, shared)?;
        if let Some(run) = &self.run {
            let guest = PauseControl::new(vm.clone()).guest_for(JobRole::Checkpoint);
            let writes = FollowedWrites::begin(&*guest, run.request.includes_drives())
                .inspect_err(|e| tracing::warn!(vm = %vm_id, "writes are not followed: {e}"));
            *self.writes.lock() = writes.ok();
        }
        Ok(vm)
    }

    fn create_with_drives(
        &self,
        from: &Origin,
        config: &[u8],
        drives: &[DriveHead],
    ) -> Result<GuestWithCopies<dyn Vm>, GuestError> {
        self.inner.create_with_drives(from, config, drives)
    }
}
