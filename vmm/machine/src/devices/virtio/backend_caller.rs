//! The handle by which another thread makes a device look at state that the two share.

use std::time::Instant;

use vmm_sys_util::epoll::EventSet;

use super::worker::DeviceWorker;
use crate::actor::{CallError, Handle};

/// Handle of a device's thread.
#[derive(Clone, Debug)]
pub(crate) struct BackendCaller(Handle<DeviceWorker>);

impl BackendCaller {
    pub(super) fn new(worker: Handle<DeviceWorker>) -> Self {
        Self(worker)
    }

    /// Calls the device's [`backend_ready`](super::Device::backend_ready) with `token` and without
    /// events, even if the device is paused, and waits for its return. `what` completes "the device
    /// did not .." in the error.
    ///
    /// # Errors
    ///
    /// The device has not answered by `deadline`, or has ended.
    pub(crate) fn call(
        &self,
        what: &'static str,
        token: u32,
        deadline: Instant,
    ) -> Result<(), CallError> {
        let job = move |worker: &mut DeviceWorker| {
            worker.call_device(|device, io| device.backend_ready(token, EventSet::empty(), io));
        };
        self.0.call(what, deadline, job)
    }
}
