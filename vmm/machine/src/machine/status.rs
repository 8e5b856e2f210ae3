//! Whether a machine runs, whether it may run, and why it has ended.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use driftline_guest::RunState;
use parking_lot::{Condvar, Mutex, MutexGuard};

use super::request_error::SupervisorError;
use crate::vm::EndReason;

/// Whether the machine runs, and whether it may. The supervisor writes it and any thread reads it.
/// For a guest without devices, the thread that releases or acquires the guest writes it too.
#[derive(Debug)]
pub(super) struct MachineStatus {
    fields: Mutex<StatusFields>,
    changed: Condvar,
    /// Whether the vCPUs are restoring a state.
    restores_vcpus: AtomicBool,
    /// The first report that the guest has ended.
    reported: OnceLock<EndReason>,
    /// Reason why a page of memory is lost. The guest ends, or never runs.
    lost: OnceLock<String>,
}

#[derive(Debug)]
struct StatusFields {
    state: RunState,
    end: Option<EndReason>,
    /// Whether the machine has acquired what only one host may have; without devices, that is the
    /// right to run. One lock covers this flag and the state that it permits, so that a released
    /// guest never runs (I7).
    acquired: bool,
}

impl MachineStatus {
    /// Returns the status of a paused guest.
    pub(super) fn new(acquired: bool) -> Self {
        let fields = StatusFields { state: RunState::Paused, end: None, acquired };
        Self {
            fields: Mutex::new(fields),
            changed: Condvar::new(),
            restores_vcpus: AtomicBool::new(false),
            reported: OnceLock::new(),
            lost: OnceLock::new(),
        }
    }

    pub(super) fn set_restores_vcpus(&self, restores: bool) {
        self.restores_vcpus.store(restores, Ordering::SeqCst);
    }

    pub(super) fn restores_vcpus(&self) -> bool {
        self.restores_vcpus.load(Ordering::SeqCst)
    }

    /// Records why a page of memory is lost. Only the first call takes effect.
    pub(super) fn set_lost(&self, why: &str) {
        let _ = self.lost.set(why.to_owned());
    }

    /// Returns why a page of memory is lost, if one is.
    pub(super) fn lost(&self) -> Option<&str> {
        self.lost.get().map(String::as_str)
    }

    /// Records a report that the guest has ended. Only the first report takes effect.
    pub(super) fn report_end(&self, why: EndReason) {
        let _ = self.reported.set(why);
    }

    /// Returns the first report that the guest has ended.
    pub(super) fn reported_end(&self) -> Option<EndReason> {
        self.reported.get().cloned()
    }

    fn lock(&self) -> MutexGuard<'_, StatusFields> {
        self.fields.lock()
    }

    pub(super) fn state(&self) -> RunState {
        self.lock().state
    }

    pub(super) fn set(&self, state: RunState) {
        self.lock().state = state;
    }

    /// Refuses `request` unless the machine is in state `needed`.
    pub(super) fn require(
        &self,
        request: &'static str,
        needed: RunState,
    ) -> Result<(), SupervisorError> {
        self.lock().require(request, needed)
    }

    /// Records whether the machine has acquired what only one host may have. Refuses `request`
    /// unless the guest is paused.
    pub(super) fn set_acquired(
        &self,
        request: &'static str,
        acquired: bool,
    ) -> Result<(), SupervisorError> {
        let mut fields = self.lock();
        fields.require(request, RunState::Paused)?;
        fields.acquired = acquired;
        Ok(())
    }

    /// Marks the guest as running if it is paused and acquired.
    pub(super) fn run(&self) -> Result<(), SupervisorError> {
        let mut fields = self.lock();
        fields.require("resume", RunState::Paused)?;
        if !fields.acquired {
            return Err(SupervisorError::NotAcquired);
        }
        fields.state = RunState::Running;
        Ok(())
    }

    /// Records the end of the guest, and wakes the threads that wait for it.
    pub(super) fn end(&self, why: EndReason) {
        let mut fields = self.lock();
        (fields.state, fields.end) = (RunState::Stopped, Some(why));
        drop(fields);
        self.changed.notify_all();
    }

    /// Blocks until the guest has ended, and returns why, or until `timeout` has passed (then
    /// `None`).
    pub(super) fn wait_end(&self, timeout: Option<Duration>) -> Option<EndReason> {
        let deadline = timeout.and_then(|t| Instant::now().checked_add(t));
        let mut fields = self.lock();
        while fields.end.is_none() {
            match deadline {
                None => self.changed.wait(&mut fields),
                Some(deadline) => {
                    let left = deadline.checked_duration_since(Instant::now())?;
                    self.changed.wait_for(&mut fields, left);
                }
            }
        }
        fields.end.clone()
    }
}

impl StatusFields {
    fn require(&self, request: &'static str, needed: RunState) -> Result<(), SupervisorError> {
        let state = self.state;
        if state == needed { Ok(()) } else { Err(SupervisorError::State { request, state }) }
    }
}
