//! Owns a machine's vCPU threads, from the start of the first to the end of the last.

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
/// Interval between two checks whether a thread has ended.
const LOOK: Duration = Duration::from_micros(100);

/// The thread of one vCPU, with its command channel.
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

    /// Returns the handle through which the collector throttles this vCPU.
    pub(super) fn brake(&self) -> Brake {
        let (commands, kick) = (self.commands.clone(), self.immediate_exit.clone());
        Brake { commands, kick, counters: self.counters.clone() }
    }

    /// Returns the sending side of the vCPU's channel.
    pub(super) fn commands(&self) -> Sender<Command> {
        self.commands.clone()
    }

    /// Sends a command to a vCPU that may be running.
    pub(super) fn interrupt(&self, command: Command) {
        // A thread that has ended needs no commands.
        let _ = self.commands.send(command);
        kick(&self.thread, &self.immediate_exit);
    }

    /// Sends a command to a paused vCPU.
    pub(super) fn tell(&self, command: Command) {
        let _ = self.commands.send(command);
    }

    /// Returns whether the vCPU's thread has ended.
    pub(super) fn has_ended(&self) -> bool {
        self.thread.is_finished()
    }
}

/// All vCPUs, in order. Dropping it ends and joins their threads.
///
/// A vCPU thread holds a sender of its own channel, so it does not end when all other senders are
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
        // Every thread gets the command before the first is joined.
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
