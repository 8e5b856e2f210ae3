//! Owns a machine's vCPU threads, from the first that is started to the end of all.

use std::sync::Arc;
use std::sync::mpsc::Sender;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crate::collector::Brake;
use crate::kvm::{ImmediateExit, kick};
use crate::vcpu::{Command, Counters};

/// Upper bound on pausing or ending vCPUs. They serve commands wherever they wait, so only a defect
/// takes this long.
pub(super) const HALT_LIMIT: Duration = Duration::from_secs(10);
/// Interval at which the end of a thread is looked for.
const LOOK: Duration = Duration::from_micros(100);

/// The thread of one vCPU, and the way to it.
#[derive(Debug)]
pub(super) struct VcpuHandle {
    commands: Sender<Command>,
    immediate_exit: Arc<ImmediateExit>,
    pub(super) counters: Arc<Counters>,
    thread: JoinHandle<()>,
}

impl VcpuHandle {
    pub(super) fn new(
        commands: Sender<Command>,
        immediate_exit: Arc<ImmediateExit>,
        counters: Arc<Counters>,
        thread: JoinHandle<()>,
    ) -> Self {
        Self { commands, immediate_exit, counters, thread }
    }

    /// How the collector throttles it.
    pub(super) fn brake(&self) -> Brake {
        let (commands, kick) = (self.commands.clone(), self.immediate_exit.clone());
        Brake { commands, kick, counters: self.counters.clone() }
    }

    /// The sending side of its channel.
    pub(super) fn commands(&self) -> Sender<Command> {
        self.commands.clone()
    }

    /// Sends to a vCPU that may be running.
    pub(super) fn interrupt(&self, command: Command) {
        // A thread that has ended needs no commands.
        let _ = self.commands.send(command);
        kick(&self.thread, &self.immediate_exit);
    }

    /// Sends to a vCPU that is paused.
    pub(super) fn tell(&self, command: Command) {
        let _ = self.commands.send(command);
    }

    /// Whether its thread has ended.
    pub(super) fn has_ended(&self) -> bool {
        self.thread.is_finished()
    }
}

/// All vCPUs, in their order. Dropping it ends their threads and joins them.
///
/// A vCPU thread holds a sender of its own channel, so it does not end because others drop theirs.
/// It holds the VM, and with it guest memory.
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
        // All are told before any is waited for.
        self.0.iter().for_each(|vcpu| vcpu.interrupt(Command::Quit));
        let deadline = Instant::now() + HALT_LIMIT;
        for vcpu in self.0.drain(..) {
            while !vcpu.has_ended() && Instant::now() < deadline {
                std::thread::sleep(LOOK);
            }
            match vcpu.has_ended().then(|| vcpu.thread.join()) {
                Some(Ok(())) => {}
                Some(Err(_)) => tracing::error!("a vCPU thread has panicked"),
                None => tracing::error!("a vCPU thread does not end, and is left behind"),
            }
        }
    }
}
