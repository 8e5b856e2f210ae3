//! Owns a machine's vCPU threads, from the start of the first to the end of the last.

use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rustix::thread::Pid;

use crate::actor::{Handle, PendingCall};
use crate::kvm::ImmediateExit;
use crate::thread_end::join_until;
use crate::vcpu::{Counters, PauseOutcome, ThrottleHandle, Vcpu};

/// Upper bound on pausing or ending vCPUs. They run jobs wherever they wait, so only a defect
/// takes this long.
pub(super) const HALT_LIMIT: Duration = Duration::from_secs(if cfg!(test) { 5 } else { 10 });

/// The thread of one vCPU.
#[derive(Debug)]
pub(super) struct VcpuHandle {
    paused: Handle<Vcpu>,
    running: Handle<Vcpu>,
    immediate_exit: Arc<ImmediateExit>,
    pub(super) counters: Arc<Counters>,
    thread: JoinHandle<()>,
}

impl VcpuHandle {
    /// Returns the handle of a vCPU's thread. `vcpu` is the handle of its inbox that does not kick.
    pub(super) fn new(
        vcpu: Handle<Vcpu>,
        immediate_exit: Arc<ImmediateExit>,
        counters: Arc<Counters>,
        thread: JoinHandle<()>,
    ) -> Self {
        let kicked = immediate_exit.clone();
        let running = vcpu.woken_by(move || kicked.kick());
        Self { paused: vcpu, running, immediate_exit, counters, thread }
    }

    /// Returns the handle through which the collector throttles this vCPU.
    pub(super) fn throttle(&self) -> ThrottleHandle {
        ThrottleHandle { vcpu: self.running.clone(), counters: self.counters.clone() }
    }

    /// Returns the handle for jobs of a paused vCPU, which needs no kick.
    pub(super) fn paused(&self) -> &Handle<Vcpu> {
        &self.paused
    }

    /// Returns the handle for jobs of a vCPU that may be running. It kicks the vCPU.
    pub(super) fn running(&self) -> &Handle<Vcpu> {
        &self.running
    }

    /// Returns the ID of the vCPU's thread, once it waits for jobs.
    pub(super) fn thread_id(&self) -> Option<Pid> {
        self.immediate_exit.thread()
    }

    /// Begins to pause the vCPU. It pauses even after `deadline`: it must not run a guest that has
    /// ended.
    pub(super) fn begin_pause(&self, deadline: Instant) -> PendingCall<PauseOutcome> {
        self.running.begin_even_late("pause", deadline, Vcpu::pause)
    }
}

/// All vCPUs, in order. Dropping it ends and joins their threads.
///
/// A vCPU thread has a handle of its own inbox, so it does not end when all other handles are
/// dropped. The thread also holds the VM, and with it guest memory.
#[derive(Debug, Default)]
pub(super) struct Vcpus(Vec<VcpuHandle>);

impl Vcpus {
    pub(super) fn push(&mut self, vcpu: VcpuHandle) {
        self.0.push(vcpu);
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = &VcpuHandle> {
        self.0.iter()
    }
}

impl Drop for Vcpus {
    fn drop(&mut self) {
        // Every thread is told to end before the first is joined.
        self.0.iter().for_each(|vcpu| vcpu.running.end());
        let deadline = Instant::now() + HALT_LIMIT;
        for vcpu in self.0.drain(..) {
            match join_until(vcpu.thread, deadline) {
                Some(Ok(())) => {}
                Some(Err(_)) => tracing::error!("a vCPU thread has panicked"),
                None => tracing::error!("a vCPU thread does not end and is not joined"),
            }
        }
    }
}
