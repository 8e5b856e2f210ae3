//! What is done to a guest over time, beside running it: each job is one object that owns its thread.

use crate::api::model::{GuestState, Info};
use crate::vm::SharedVm;
use checkpoint::GuestError;

/// A guest and the jobs on it.
pub struct Jobs {
    vm: SharedVm,
}

impl Jobs {
    /// No jobs yet.
    pub fn new(vm: SharedVm) -> Self {
        Self { vm }
    }

    /// The guest.
    pub fn vm(&self) -> &SharedVm {
        &self.vm
    }

    /// The guest's figures, with what its jobs make of its state.
    pub fn info(&self) -> Info {
        let vm = self.vm.info();
        let state = GuestState::from(vm.state);
        Info::new(vm, state, false)
    }

    /// Stops the vCPUs.
    pub fn pause(&self) -> Result<(), GuestError> {
        self.vm.pause().map(drop)
    }

    /// Lets the vCPUs run.
    pub fn resume(&self) -> Result<(), GuestError> {
        self.vm.resume()
    }

    /// Waits until the jobs are over, and until who asked for them knows how they went.
    pub fn settle(&self) {}
}
