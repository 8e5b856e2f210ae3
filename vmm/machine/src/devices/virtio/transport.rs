//! The machine's view of a device: registers for the vCPUs, a thread for the supervisor.
//!
//! vCPUs write registers one at a time. The effect of a write on the device's thread takes as long
//! as the device's backend needs. The vCPU enters the guest again once the effect is complete, and
//! runs other jobs until then. So nothing in this module waits for a driver's writes.

use std::io;
use std::os::fd::OwnedFd;
#[cfg(test)]
use std::sync::atomic::AtomicU64;
use std::sync::mpsc::{self, Receiver, RecvTimeoutError};
use std::sync::{Arc, OnceLock};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use driftline_guest::{GuestRam, NextHost};
use parking_lot::Mutex;

use super::messages::{DriverCommand, SavedWorkerState};
use super::mmio::{MmioInterface, RestoredInterrupt};
use super::rate_limit_control::RateLimitControl;
use super::request::RequestError;
use super::worker::DeviceWorker;
use super::{BackendCaller, Completion, Device, HandOverNeeds, VirtioState};
use crate::actor::{self, CallError, Handle, PendingCall};
use crate::devices::latched_event::LatchedEvent;
use crate::devices::stats::Counter;
use crate::sandbox;
#[cfg(test)]
use crate::testing::soon;

/// Time for which a machine that ends waits for a device whose backend is stuck.
const JOIN_TIMEOUT: Duration = Duration::from_secs(5);
/// Time that a caller adds to a request's deadline: a thread that gives up at the deadline can
/// still report why.
pub(crate) const REPLY_GRACE: Duration = Duration::from_secs(1);

/// A device with its registers and its thread; see the module.
#[derive(Debug)]
pub(crate) struct Transport {
    mmio: MmioInterface,
    thread: WorkerThread,
    /// The number of times that each rate limit of the device has made a queue wait.
    throttles: Arc<[Counter]>,
    hand_over: HandOverNeeds,
}

/// The handle of a device's thread. Dropping it ends the thread.
#[derive(Debug)]
struct WorkerThread {
    worker: Handle<DeviceWorker>,
    /// Disconnects when the thread ends. The mutex is needed only because the vCPUs share this
    /// struct; only the drop uses it.
    ended: Mutex<Receiver<()>>,
    /// Time at which the thread was told to end.
    quit_at: OnceLock<Instant>,
    thread: Option<JoinHandle<()>>,
}

impl WorkerThread {
    /// Tells the thread to end. Returns the time of the first such call.
    fn quit(&self) -> Instant {
        *self.quit_at.get_or_init(|| {
            self.worker.end();
            Instant::now()
        })
    }
}

impl Drop for WorkerThread {
    fn drop(&mut self) {
        let deadline = self.quit() + JOIN_TIMEOUT;
        let ended = self.ended.get_mut();
        let ended = ended.recv_timeout(deadline.saturating_duration_since(Instant::now()));
        match self.thread.take() {
            // The thread has finished, or it has panicked.
            Some(thread) if !matches!(ended, Err(RecvTimeoutError::Timeout)) => {
                let _ = thread.join();
            }
            _ => tracing::error!(
                "{} is abandoned: its backend is stuck, and the guest's last writes to it may not \
                 be durable",
                self.worker.name()
            ),
        }
    }
}

/// A request that was sent to a device's thread.
#[must_use = "the answer says whether it was done"]
pub(crate) struct PendingRequest<T>(PendingCall<Result<T, RequestError>>);

impl<T> PendingRequest<T> {
    /// Waits for the answer until [`REPLY_GRACE`] after the deadline; the error names the device.
    pub(crate) fn wait(self) -> Result<T, RequestError> {
        self.0.wait_for(REPLY_GRACE)?
    }
}

/// A save under way.
#[must_use]
pub(crate) struct PendingSave(PendingRequest<SavedWorkerState>);

/// A restore under way.
#[must_use]
pub(crate) struct PendingRestore {
    request: PendingRequest<()>,
    interrupt: RestoredInterrupt,
}

impl Transport {
    /// Starts the thread of `device`; `id` is its name in messages. The device is paused until
    /// [`resume`](Self::resume).
    pub(crate) fn spawn(id: &str, device: Box<dyn Device>, ram: GuestRam) -> io::Result<Self> {
        let (class, hand_over) = (device.kind().class(), device.hand_over());
        let mmio = MmioInterface::new(id, &*device)?;
        let wake = Arc::new(LatchedEvent::new()?);
        let (handle, inbox) = actor::inbox(mmio.label());
        let worker = DeviceWorker::new(&mmio, device, ram, inbox, wake.clone())?;
        let throttles = worker.throttles();
        let (end, ended) = mpsc::channel();
        // The kernel keeps 15 bytes of a thread's name.
        let thread = sandbox::spawn(class, format!("virtio-{id}"), move || {
            worker.run();
            let _ = end.send(());
        })?;
        let thread = WorkerThread {
            worker: handle.woken_by(move || wake.signal()),
            ended: Mutex::new(ended),
            quit_at: OnceLock::new(),
            thread: Some(thread),
        };
        Ok(Self { mmio, thread, throttles, hand_over })
    }

    /// Returns the device's kind and name, for messages.
    pub(crate) fn label(&self) -> &str {
        self.mmio.label()
    }

    /// Returns which of the requests of a hand-over do anything.
    pub(crate) fn hand_over(&self) -> HandOverNeeds {
        self.hand_over
    }

    /// Returns the handle for the rate limits of the device, whose name is `id` and which has
    /// `limiters` limiters.
    pub(crate) fn rate_limits(&self, id: &str, limiters: usize) -> RateLimitControl {
        let (worker, throttles) = (self.thread.worker.clone(), self.throttles.clone());
        RateLimitControl::new(id, limiters, worker, throttles)
    }

    /// Returns the handle by which other threads call the device.
    pub(crate) fn backend_caller(&self) -> BackendCaller {
        BackendCaller::new(self.thread.worker.clone())
    }

    /// Returns the interrupt line, for connection to an interrupt controller.
    pub(crate) fn line(&self) -> &LatchedEvent {
        self.mmio.shared.line()
    }

    /// Returns the queues' notifications. A write of a queue's number to `QueueNotify` triggers
    /// one.
    pub(crate) fn kicks(&self) -> impl Iterator<Item = &LatchedEvent> {
        self.mmio.kicks.iter().map(|k| &**k)
    }

    /// Sends the thread a request. The thread carries it out unless `deadline` has passed when it
    /// reaches the request: the guest may have resumed by then, and its disk must not be released
    /// (I7).
    fn ask<T: Send + 'static>(
        &self,
        what: &'static str,
        deadline: Instant,
        job: impl FnOnce(&mut DeviceWorker) -> Result<T, RequestError> + Send + 'static,
    ) -> PendingRequest<T> {
        PendingRequest(self.thread.worker.begin(what, deadline, job))
    }

    /// Tells the thread to end, without waiting for it. Dropping the transport waits.
    pub(crate) fn quit(&self) {
        self.thread.quit();
    }

    /// Handles a vCPU's read at `offset` of the device's registers.
    pub(crate) fn read(&self, offset: u64, data: &mut [u8]) {
        self.mmio.read(offset, data);
    }

    /// Handles a vCPU's write at `offset` of the device's registers. Returns whether the thread has
    /// work to do for it. If so, the value that `done` returns reports when the work is done.
    pub(crate) fn write(
        &self,
        offset: u64,
        data: &[u8],
        done: impl FnOnce() -> Completion,
    ) -> bool {
        let mut sent = false;
        self.mmio.write(offset, data, |command: DriverCommand| {
            sent = true;
            let done = done();
            // A thread that has ended drops the job: it does nothing more for its driver.
            self.thread.worker.tell(move |worker| {
                worker.carry_out(command);
                drop(done);
            });
        });
        sent
    }

    /// Like [`write`](Self::write), but waits until the work is done.
    #[cfg(test)]
    pub(crate) fn write_and_wait(&self, offset: u64, data: &[u8]) {
        let (done, wait) = mpsc::channel::<()>();
        if self.write(offset, data, || Completion::new(move || drop(done))) {
            // Disconnects when the sender is dropped.
            let _ = wait.recv();
        }
    }

    /// Begins to pause the device. The answer comes at `deadline` at the latest. A device that gets
    /// the request later pauses nevertheless, until it is resumed.
    pub(crate) fn begin_quiesce(&self, deadline: Instant) -> PendingRequest<()> {
        let quiesce = move |worker: &mut DeviceWorker| worker.quiesce(deadline);
        PendingRequest(self.thread.worker.begin_even_late("quiesce", deadline, quiesce))
    }

    /// Resumes the device.
    pub(crate) fn resume(&self) {
        // If the thread has ended, the next request reports it.
        self.thread.worker.tell(DeviceWorker::resume);
    }

    /// Begins to acquire what only one host may have, from `from`.
    pub(crate) fn begin_acquire(&self, deadline: Instant, from: NextHost) -> PendingRequest<()> {
        self.ask("acquire its files", deadline, move |worker| worker.acquire(from))
    }

    /// Acquires what only one host may have from another process of this host, where that cannot be
    /// refused. The device does this before it resumes. Fails only if the device's thread has
    /// ended. If it ends later without having acquired them, the next request to it fails.
    pub(crate) fn acquire_here(&self) -> Result<(), RequestError> {
        let acquire = |worker: &mut DeviceWorker| {
            if let Err(e) = worker.acquire(NextHost::This) {
                tracing::error!("{e}");
            }
        };
        match self.thread.worker.tell(acquire) {
            true => Ok(()),
            false => Err(CallError::Ended { thread: self.label().into() }.into()),
        }
    }

    /// Returns duplicates of the files through which the guest is connected to this host.
    pub(crate) fn share_by(&self, by: Instant) -> Result<Vec<OwnedFd>, RequestError> {
        self.ask("share its files", by, |worker| worker.share()).wait()
    }

    /// Begins to make the guest's writes durable, and to release what only one host may have, for
    /// `next`.
    pub(crate) fn begin_release(&self, deadline: Instant, next: NextHost) -> PendingRequest<()> {
        self.ask("release its files", deadline, move |worker| worker.release(deadline, next))
    }

    /// Begins to undo [`begin_acquire`](Self::begin_acquire) and [`attach_by`](Self::attach_by).
    /// The thread carries this out even after `deadline`: the guest does not run before the next
    /// acquire, which follows in the inbox.
    pub(crate) fn begin_undo(&self, deadline: Instant, next: NextHost) -> PendingRequest<()> {
        let limit = deadline.saturating_duration_since(Instant::now());
        let undo = move |worker: &mut DeviceWorker| worker.undo_acquire(limit, next);
        PendingRequest(self.thread.worker.begin_even_late("release its files", deadline, undo))
    }

    /// Disconnects the guest's peers, for `next`. Returns the packets that are queued for the
    /// guest, in at most `room` bytes.
    pub(crate) fn detach_by(
        &self,
        room: usize,
        next: NextHost,
        by: Instant,
    ) -> Result<Vec<u8>, RequestError> {
        self.ask("release its peers", by, move |worker| Ok(worker.detach(room, next))).wait()
    }

    /// Connects the guest's peers to this host, and takes the bytes that
    /// [`detach_by`](Self::detach_by) returned at its last host.
    pub(crate) fn attach_by(
        &self,
        queued_packets: Vec<u8>,
        by: Instant,
    ) -> Result<(), RequestError> {
        self.ask("attach its peers", by, move |worker| worker.attach(&queued_packets)).wait()
    }

    /// Begins to save the state of a paused device.
    pub(crate) fn begin_save(&self, by: Instant) -> PendingSave {
        PendingSave(self.ask("save its state", by, |worker| worker.save()))
    }

    /// Returns the state that [`begin_save`](Self::begin_save) saves.
    pub(crate) fn finish_save(&self, pending: PendingSave) -> Result<VirtioState, RequestError> {
        Ok(self.mmio.save(pending.0.wait()?))
    }

    /// Begins to restore a saved state, which is hostile, into a device that has never worked.
    pub(crate) fn begin_restore(
        &self,
        state: VirtioState,
        by: Instant,
    ) -> Result<PendingRestore, RequestError> {
        let (worker, interrupt) = self.mmio.begin_restore(state)?;
        let request = self.ask("take its state", by, move |device| device.restore(worker));
        Ok(PendingRestore { request, interrupt })
    }

    /// Waits until the state is restored.
    pub(crate) fn finish_restore(&self, pending: PendingRestore) -> Result<(), RequestError> {
        pending.request.wait()?;
        self.mmio.finish_restore(&pending.interrupt);
        Ok(())
    }

    /// Returns whether the driver has not acknowledged an interrupt: it may have been lost between
    /// the device and the interrupt controllers' saved state.
    pub(crate) fn interrupt_pending(&self) -> bool {
        self.mmio.shared.interrupt_status() != 0
    }
}

/// The same requests with a deadline long enough for a test.
#[cfg(test)]
impl Transport {
    /// Makes the device's rate limiters use a clock that shows `ns` nanoseconds.
    pub(crate) fn use_limiter_clock(&self, ns: Arc<AtomicU64>) {
        let take = move |worker: &mut DeviceWorker| worker.use_limiter_clock(ns);
        self.thread.worker.call("take a clock", soon(), take).unwrap();
    }

    pub(crate) fn acquire(&self) -> Result<(), RequestError> {
        self.begin_acquire(soon(), NextHost::Another).wait()
    }

    pub(crate) fn release(&self) -> Result<(), RequestError> {
        self.begin_release(soon(), NextHost::Another).wait()
    }

    pub(crate) fn detach(&self, room: usize) -> Vec<u8> {
        self.detach_by(room, NextHost::Another, soon()).unwrap()
    }

    pub(crate) fn attach(&self, queued_packets: Vec<u8>) -> Result<(), RequestError> {
        self.attach_by(queued_packets, soon())
    }

    pub(crate) fn save(&self) -> Result<VirtioState, RequestError> {
        self.finish_save(self.begin_save(soon()))
    }

    pub(crate) fn restore(&self, state: VirtioState) -> Result<(), RequestError> {
        self.finish_restore(self.begin_restore(state, soon())?)
    }
}
