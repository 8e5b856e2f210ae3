//! A device as the machine sees it: its registers for the vCPUs, its thread for the supervisor.
//!
//! vCPUs write registers one at a time; what a write sets in motion on the device's thread takes as long as
//! the device's backend does. A vCPU goes on with its guest once that is done, and is open to other
//! commands until then; so nothing here waits for a driver's writes.

use std::io;
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use checkpoint::GuestRam;
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

use super::front::Front;
use super::worker::{Command, Worker, Written};
use super::{Device, Done, VirtioState};
use crate::sandbox;

/// How long a machine that ends waits for a device whose backend is stuck.
const FAREWELL: Duration = Duration::from_secs(10);

/// See the module.
#[derive(Debug)]
pub(crate) struct Transport {
    front: Front,
    thread: WorkerThread,
}

/// The way to a device's thread. Dropping it ends the thread.
#[derive(Debug)]
struct WorkerThread {
    label: String,
    commands: Sender<Command>,
    wake: Arc<EventFd>,
    /// Behind a mutex only because the vCPUs share this; the drop alone uses it.
    ended: Mutex<Receiver<()>>,
    thread: Option<JoinHandle<()>>,
}

impl WorkerThread {
    fn tell(&self, command: Command) {
        // A thread that has ended is noticed by whoever waits for its answer.
        let _ = self.commands.send(command);
        let _ = self.wake.write(1);
    }
}

impl Drop for WorkerThread {
    fn drop(&mut self) {
        self.tell(Command::Quit);
        let ended = self.ended.get_mut().unwrap_or_else(PoisonError::into_inner);
        let ended = ended.recv_timeout(FAREWELL);
        match self.thread.take() {
            // Its last words are said, or it has panicked.
            Some(thread) if !matches!(ended, Err(RecvTimeoutError::Timeout)) => {
                let _ = thread.join();
            }
            _ => tracing::error!("{} is left behind: its backend is stuck", self.label),
        }
    }
}

impl Transport {
    /// Starts the thread of `device`, which `id` names for people. It stands until
    /// [`resume`](Self::resume).
    pub(crate) fn spawn(id: &str, device: Box<dyn Device>, ram: GuestRam) -> io::Result<Self> {
        let class = device.kind().class();
        let front = Front::new(id, &*device)?;
        let wake = Arc::new(EventFd::new(EFD_NONBLOCK)?);
        let (commands, inbox) = mpsc::channel();
        let worker = Worker::new(&front, device, ram, inbox, wake.clone())?;
        let (end, ended) = mpsc::channel();
        // The kernel keeps 15 bytes of a name.
        let thread = sandbox::spawn(class, format!("virtio-{id}"), move || {
            worker.live();
            let _ = end.send(());
        })?;
        let thread = WorkerThread {
            label: front.label().to_owned(),
            commands,
            wake,
            ended: Mutex::new(ended),
            thread: Some(thread),
        };
        Ok(Self { front, thread })
    }

    /// Kind and name, for messages.
    pub(crate) fn label(&self) -> &str {
        self.front.label()
    }

    /// The interrupt: to be connected to an interrupt controller.
    pub(crate) fn line(&self) -> &EventFd {
        self.front.shared.line()
    }

    /// The queues' notifications, which writes of their numbers to `QueueNotify` are.
    pub(crate) fn kicks(&self) -> impl Iterator<Item = &EventFd> {
        self.front.kicks.iter().map(|k| &**k)
    }

    /// Asks the thread for something. `None` if it has ended, which is said once, by itself.
    fn ask<T>(&self, command: impl FnOnce(Sender<T>) -> Command) -> Option<T> {
        let (reply, answer) = mpsc::channel();
        self.thread.tell(command(reply));
        answer.recv().ok()
    }

    fn ask_result<T>(
        &self,
        command: impl FnOnce(Sender<Result<T, String>>) -> Command,
    ) -> Result<T, String> {
        self.ask(command).unwrap_or_else(|| Err(format!("{}'s thread has ended", self.label())))
    }

    /// A vCPU's read at `offset` of the device's registers.
    pub(crate) fn read(&self, offset: u64, data: &mut [u8]) {
        self.front.read(offset, data);
    }

    /// A vCPU's write at `offset` of the device's registers. Whether it has set something in motion: then
    /// what `done` gives says when that is done.
    pub(crate) fn write(&self, offset: u64, data: &[u8], done: impl FnOnce() -> Done) -> bool {
        let mut told = false;
        self.front.write(offset, data, |written: Written| {
            told = true;
            // A thread that has ended drops it: it does nothing more for its driver.
            self.thread.tell(Command::Driver(written, done()));
        });
        told
    }

    /// As [`write`](Self::write), done when it returns.
    #[cfg(test)]
    pub(crate) fn write_and_wait(&self, offset: u64, data: &[u8]) {
        let (done, wait) = mpsc::channel::<()>();
        if self.write(offset, data, || Done::new(move || drop(done))) {
            // It ends with the sender.
            let _ = wait.recv();
        }
    }

    /// Begins to bring the device to a stand; the receiver says when it has come to one, or at
    /// `deadline` at the latest why not.
    pub(crate) fn quiesce(&self, deadline: Instant) -> Receiver<Result<(), String>> {
        let (reply, answer) = mpsc::channel();
        self.thread.tell(Command::Quiesce(deadline, reply));
        answer
    }

    /// Lets the device work.
    pub(crate) fn resume(&self) {
        self.thread.tell(Command::Resume);
    }

    /// Takes what only one host may hold.
    pub(crate) fn acquire(&self) -> Result<(), String> {
        self.ask_result(Command::Acquire)
    }

    /// Makes durable what the guest wrote, and lets go of what only one host may hold.
    pub(crate) fn release(&self) -> Result<(), String> {
        self.ask_result(Command::Release)
    }

    /// Lets go of what peers reach the guest by; what came for it late, in at most `room` bytes.
    pub(crate) fn detach(&self, room: usize) -> Vec<u8> {
        self.ask(|reply| Command::Detach(room, reply)).unwrap_or_default()
    }

    /// Has peers reach the guest here, and takes what [`detach`](Self::detach) gave at its last host.
    pub(crate) fn attach(&self, late: Vec<u8>) -> Result<(), String> {
        self.ask_result(|reply| Command::Attach(late, reply))
    }

    /// The state of a device that stands.
    pub(crate) fn save(&self) -> Result<VirtioState, String> {
        Ok(self.front.save(self.ask_result(Command::Save)?))
    }

    /// Takes a saved state, which is hostile, into a device that has never worked.
    pub(crate) fn restore(&self, state: VirtioState) -> Result<(), String> {
        let restore = |worker| self.ask_result(|reply| Command::Restore(Box::new(worker), reply));
        self.front.restore(state, restore)
    }

    /// Whether the driver has been told of something that it has not acknowledged: an interrupt may
    /// have been lost between the device and the interrupt controllers' saved state.
    pub(crate) fn interrupt_pending(&self) -> bool {
        self.front.shared.interrupt_status() != 0
    }
}
