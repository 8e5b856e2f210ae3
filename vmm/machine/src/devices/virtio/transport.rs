//! A device as the machine sees it: its registers for the vCPUs, its thread for the supervisor.
//!
//! vCPUs write registers one at a time; what a write sets in motion on the device's thread takes as
//! long as the device's backend does. A vCPU goes on with its guest once that is done, and is open
//! to other commands until then; so nothing here waits for a driver's writes.

use std::io;
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use driftline_guest::GuestRam;
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

use super::front::Front;
use super::worker::{Command, Reply, Worker};
use super::written::Written;
use super::{Device, Done, VirtioState};
use crate::sandbox;
#[cfg(test)]
use crate::testing::soon;

/// How long a machine that ends waits for a device whose backend is stuck.
const FAREWELL: Duration = Duration::from_secs(5);
/// Added to a request's deadline by the caller: a thread that gives up at the deadline still says
/// why.
pub(crate) const GRACE: Duration = Duration::from_secs(1);

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
    /// When the thread was told to end.
    quit_at: OnceLock<Instant>,
    thread: Option<JoinHandle<()>>,
}

impl WorkerThread {
    fn tell(&self, command: Command) {
        // A thread that has ended is noticed by whoever waits for its answer.
        let _ = self.commands.send(command);
        let _ = self.wake.write(1);
    }

    /// Tells the thread to end; returns when it was told first.
    fn quit(&self) -> Instant {
        *self.quit_at.get_or_init(|| {
            self.tell(Command::Quit);
            Instant::now()
        })
    }
}

impl Drop for WorkerThread {
    fn drop(&mut self) {
        let deadline = self.quit() + FAREWELL;
        let ended = self.ended.get_mut().unwrap_or_else(PoisonError::into_inner);
        let ended = ended.recv_timeout(deadline.saturating_duration_since(Instant::now()));
        match self.thread.take() {
            // Its last words are said, or it has panicked.
            Some(thread) if !matches!(ended, Err(RecvTimeoutError::Timeout)) => {
                let _ = thread.join();
            }
            _ => tracing::error!(
                "{} is left behind: its backend is stuck, and what the guest last wrote to it may not be durable",
                self.label
            ),
        }
    }
}

/// A request that a device's thread has been sent.
#[must_use = "the answer says whether it was done"]
pub(crate) struct Asked<T> {
    label: String,
    what: &'static str,
    limit: Duration,
    deadline: Instant,
    answer: Receiver<T>,
}

impl<T> Asked<T> {
    /// Waits for the answer until [`GRACE`] after the deadline; the error names the device.
    ///
    /// A thread that is stuck until the deadline does not carry the request out later. One that is
    /// already carrying it out at the deadline may finish it unheard; a later request is behind it
    /// in the channel.
    pub(crate) fn wait(self) -> Result<T, String> {
        let left = (self.deadline + GRACE).saturating_duration_since(Instant::now());
        let Self { label, what, limit, deadline, .. } = self;
        self.answer.recv_timeout(left).map_err(|e| match e {
            // A thread that came to the request too late has dropped it.
            RecvTimeoutError::Disconnected if Instant::now() < deadline => {
                format!("{label}'s thread has ended")
            }
            _ => format!(
                "{label} did not {what} within {limit:.1?}: its backend is stuck; look at the storage or \
                 network behind it"
            ),
        })
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
            quit_at: OnceLock::new(),
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

    /// Sends the thread a request, which it carries out unless `deadline` has passed when it comes
    /// to it.
    fn ask<T>(
        &self,
        what: &'static str,
        deadline: Instant,
        command: impl FnOnce(Reply<T>) -> Command,
    ) -> Asked<T> {
        let (to, answer) = mpsc::channel();
        let limit = deadline.saturating_duration_since(Instant::now());
        self.thread.tell(command(Reply::new(to, deadline)));
        let label = self.label().to_owned();
        Asked { label, what, limit, deadline, answer }
    }

    /// Tells the thread to end, without waiting for that; dropping this does.
    pub(crate) fn quit(&self) {
        self.thread.quit();
    }

    /// A vCPU's read at `offset` of the device's registers.
    pub(crate) fn read(&self, offset: u64, data: &mut [u8]) {
        self.front.read(offset, data);
    }

    /// A vCPU's write at `offset` of the device's registers. Whether it has set something in
    /// motion: then what `done` gives says when that is done.
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
    pub(crate) fn begin_acquire(&self, deadline: Instant) -> Asked<Result<(), String>> {
        self.ask("take hold of its files", deadline, Command::Acquire)
    }

    /// Begins to make durable what the guest wrote, and to let go of what only one host may hold.
    pub(crate) fn begin_release(&self, deadline: Instant) -> Asked<Result<(), String>> {
        self.ask("let go of its files", deadline, Command::Release)
    }

    /// Begins to undo [`begin_acquire`](Self::begin_acquire) and [`attach_by`](Self::attach_by). It
    /// is carried out after `deadline`, too: the guest does not run before the next acquire, which
    /// is behind this in the channel.
    pub(crate) fn begin_undo(&self, deadline: Instant) -> Asked<Result<(), String>> {
        let limit = deadline.saturating_duration_since(Instant::now());
        self.ask("let go of its files", deadline, |reply| Command::Undo(limit, reply))
    }

    /// Lets go of what peers reach the guest by; what came for it late, in at most `room` bytes.
    pub(crate) fn detach_by(&self, room: usize, deadline: Instant) -> Result<Vec<u8>, String> {
        self.ask("let go of its peers", deadline, |reply| Command::Detach(room, reply)).wait()
    }

    /// Has peers reach the guest here, and takes what [`detach_by`](Self::detach_by) gave at its
    /// last host.
    pub(crate) fn attach_by(&self, late: Vec<u8>, deadline: Instant) -> Result<(), String> {
        self.ask("attach its peers", deadline, |reply| Command::Attach(late, reply)).wait()?
    }

    /// The state of a device that stands.
    pub(crate) fn save_by(&self, deadline: Instant) -> Result<VirtioState, String> {
        Ok(self.front.save(self.ask("save its state", deadline, Command::Save).wait()??))
    }

    /// Takes a saved state, which is hostile, into a device that has never worked.
    pub(crate) fn restore_by(&self, state: VirtioState, deadline: Instant) -> Result<(), String> {
        self.front.restore(state, |worker| {
            let command = |reply| Command::Restore(Box::new(worker), reply);
            self.ask("take its state", deadline, command).wait()?
        })
    }

    /// Whether the driver has been told of something that it has not acknowledged: an interrupt may
    /// have been lost between the device and the interrupt controllers' saved state.
    pub(crate) fn interrupt_pending(&self) -> bool {
        self.front.shared.interrupt_status() != 0
    }
}

/// The same, with time enough for a test.
#[cfg(test)]
impl Transport {
    pub(crate) fn acquire(&self) -> Result<(), String> {
        self.begin_acquire(soon()).wait()?
    }

    pub(crate) fn release(&self) -> Result<(), String> {
        self.begin_release(soon()).wait()?
    }

    pub(crate) fn detach(&self, room: usize) -> Vec<u8> {
        self.detach_by(room, soon()).unwrap()
    }

    pub(crate) fn attach(&self, late: Vec<u8>) -> Result<(), String> {
        self.attach_by(late, soon())
    }

    pub(crate) fn save(&self) -> Result<VirtioState, String> {
        self.save_by(soon())
    }

    pub(crate) fn restore(&self, state: VirtioState) -> Result<(), String> {
        self.restore_by(state, soon())
    }
}
