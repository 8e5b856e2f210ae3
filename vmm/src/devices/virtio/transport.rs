//! A device as the machine sees it: its registers for the vCPUs, its thread for the supervisor.
//!
//! vCPUs write registers one at a time; what a write sets in motion on the device's thread is done
//! when the write returns. The device's thread waits for no vCPU, so nothing here can deadlock.

use std::io;
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use checkpoint::GuestRam;
use virtio_bindings::virtio_config::VIRTIO_CONFIG_S_NEEDS_RESET;
use virtio_bindings::virtio_mmio::*;
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

use super::registers::{Effect, RegisterState, Registers};
use super::worker::{Command, ReadyRing, RestoredWorker, Worker, Written};
use super::{Device, Kind, REGISTERS_LEN, Ring, Shared, Violation, VirtioState, Watcher};
use crate::sandbox;

/// How long a machine that ends waits for a device whose backend is stuck.
const FAREWELL: Duration = Duration::from_secs(10);

/// See the module.
#[derive(Debug)]
pub(crate) struct Transport {
    kind: Kind,
    label: String,
    registers: Mutex<Registers>,
    shared: Arc<Shared>,
    kicks: Vec<Arc<EventFd>>,
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
        let kind = device.kind();
        let label = format!("{kind} \"{id}\"");
        let sizes = device.queue_sizes();
        let shared = Arc::new(Shared::new(device.config_space())?);
        let registers = Registers::new(kind.id(), device.features(), sizes.clone());
        let event = || Ok::<_, io::Error>(Arc::new(EventFd::new(EFD_NONBLOCK)?));
        let kicks = sizes.iter().map(|_| event()).collect::<io::Result<Vec<_>>>()?;
        let rings = sizes.iter().zip(0..).map(|(size, i)| Ring::idle(i, *size));
        let rings = rings.collect::<Result<Vec<_>, _>>().map_err(io::Error::other)?;
        let (wake, watcher) = (event()?, Watcher::new()?);
        watcher.watch_commands(&*wake)?;
        for (queue, kick) in kicks.iter().enumerate() {
            watcher.watch_queue(&**kick, queue)?;
        }
        let (commands, inbox) = mpsc::channel();
        let mut worker = Worker {
            label: label.clone(),
            device,
            ram,
            rings,
            kicks: kicks.clone(),
            shared: shared.clone(),
            watcher,
            commands: inbox,
            wake: wake.clone(),
            active: false,
            standing: true,
            moved: false,
            features: 0,
            stops: 0,
        };
        worker.device.start(&worker.watcher)?;
        let (end, ended) = mpsc::channel();
        // The kernel keeps 15 bytes of a name.
        let thread = sandbox::spawn(kind.class(), format!("virtio-{id}"), move || {
            worker.live();
            let _ = end.send(());
        })?;
        let thread = WorkerThread {
            label: label.clone(),
            commands,
            wake,
            ended: Mutex::new(ended),
            thread: Some(thread),
        };
        Ok(Self { kind, label, registers: Mutex::new(registers), shared, kicks, thread })
    }

    /// Kind and name, for messages.
    pub(crate) fn label(&self) -> &str {
        &self.label
    }

    /// The interrupt: to be connected to an interrupt controller.
    pub(crate) fn line(&self) -> &EventFd {
        self.shared.line()
    }

    /// The queues' notifications, which writes of their numbers to `QueueNotify` are.
    pub(crate) fn kicks(&self) -> impl Iterator<Item = &EventFd> {
        self.kicks.iter().map(|k| &**k)
    }

    fn registers(&self) -> MutexGuard<'_, Registers> {
        self.registers.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Asks the thread for something. `None` if it has ended, which is said once, by itself.
    fn ask<T>(&self, command: impl FnOnce(Sender<T>) -> Command) -> Option<T> {
        let (reply, answer) = mpsc::channel();
        self.thread.tell(command(reply));
        answer.recv().ok()
    }

    /// Tells the thread what the driver wrote, and waits until that is done. A thread that has
    /// ended does nothing more for its driver.
    fn tell(&self, written: Written) {
        self.ask(|reply| Command::Driver(written, reply));
    }

    fn ask_result<T>(
        &self,
        command: impl FnOnce(Sender<Result<T, String>>) -> Command,
    ) -> Result<T, String> {
        self.ask(command).unwrap_or_else(|| Err(self.gone()))
    }

    fn gone(&self) -> String {
        format!("{}'s thread has ended", self.label)
    }

    /// A vCPU's read at `offset` of the device's registers.
    pub(crate) fn read(&self, offset: u64, data: &mut [u8]) {
        debug_assert!(offset < REGISTERS_LEN);
        if offset >= u64::from(VIRTIO_MMIO_CONFIG) {
            return self
                .shared
                .read_config((offset - u64::from(VIRTIO_MMIO_CONFIG)) as usize, data);
        }
        // Registers have 32 bits, and are read whole.
        let value = match (offset as u32, data.len()) {
            (VIRTIO_MMIO_INTERRUPT_STATUS, 4) => self.shared.interrupt_status(),
            (VIRTIO_MMIO_CONFIG_GENERATION, 4) => self.shared.config_generation(),
            (VIRTIO_MMIO_STATUS, 4) => {
                let stopped = self.shared.needs_reset();
                let status = self.registers().read(VIRTIO_MMIO_STATUS);
                status | if stopped { VIRTIO_CONFIG_S_NEEDS_RESET } else { 0 }
            }
            (register, 4) => self.registers().read(register),
            _ => 0,
        };
        let bytes = value.to_le_bytes();
        data.fill(0);
        let len = data.len().min(bytes.len());
        data[..len].copy_from_slice(&bytes[..len]);
    }

    /// A vCPU's write at `offset` of the device's registers.
    pub(crate) fn write(&self, offset: u64, data: &[u8]) {
        debug_assert!(offset < REGISTERS_LEN);
        if offset >= u64::from(VIRTIO_MMIO_CONFIG) {
            let at = (offset - u64::from(VIRTIO_MMIO_CONFIG)) as usize;
            return self.tell(Written::Config(at, data.to_vec()));
        }
        let Ok(bytes) = <[u8; 4]>::try_from(data) else {
            tracing::debug!("{}: {} bytes written at {offset:#x}", self.label, data.len());
            return;
        };
        let value = u32::from_le_bytes(bytes);
        match offset as u32 {
            VIRTIO_MMIO_QUEUE_NOTIFY => self.notify(value),
            VIRTIO_MMIO_INTERRUPT_ACK => self.shared.acknowledge(value),
            register => {
                let mut registers = self.registers();
                let effect = registers.write(register, value);
                self.put_into_effect(&mut registers, effect);
            }
        }
    }

    /// Comes here only where no ioeventfd has taken it.
    fn notify(&self, queue: u32) {
        match self.kicks.get(queue as usize) {
            // It fails only at 2^64 - 1 notifications.
            Some(kick) => drop(kick.write(1)),
            None => self.stop(format!("its driver notifies queue {queue}, which does not exist")),
        }
    }

    fn stop(&self, why: String) {
        self.tell(Written::Stop(Violation::Registers(why)));
    }

    fn put_into_effect(&self, registers: &mut Registers, effect: Effect) {
        match effect {
            Effect::Nothing => {}
            Effect::Reset => {
                self.tell(Written::Reset);
                registers.reset();
            }
            Effect::Activate => {
                let state = registers.state();
                let (features, rings) = (state.driver_features, ready_rings(state));
                self.tell(Written::Activate(features, rings));
            }
            Effect::StartQueue(queue) => {
                if let Some(q) = registers.state().queues.get(queue) {
                    self.tell(Written::StartQueue((queue, q.setup)));
                }
            }
            Effect::StopQueue(queue) => self.tell(Written::StopQueue(queue)),
            Effect::Violation(why) => self.stop(why),
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

    /// The state of a device that stands.
    pub(crate) fn save(&self) -> Result<VirtioState, String> {
        let worker = self.ask_result(Command::Save)?;
        Ok(VirtioState {
            device_id: self.kind.id(),
            registers: self.registers().state().clone(),
            interrupt_status: self.shared.interrupt_status(),
            needs_reset: self.shared.needs_reset(),
            config_generation: self.shared.config_generation(),
            positions: worker.positions,
            device: worker.device,
        })
    }

    /// Takes a saved state, which is hostile, into a device that has never worked.
    pub(crate) fn restore(&self, state: VirtioState) -> Result<(), String> {
        if state.device_id != self.kind.id() {
            let id = state.device_id;
            return Err(format!("it is of a virtio device {id}, and {} is here", self.label));
        }
        if state.positions.len() != self.kicks.len() {
            return Err(format!("it has positions of {} queues", state.positions.len()));
        }
        let mut registers = self.registers();
        registers.restore(state.registers)?;
        let of = registers.state();
        let active = of.is_active() && !state.needs_reset;
        let worker = RestoredWorker {
            active: active.then(|| (of.driver_features, ready_rings(of))),
            positions: state.positions,
            device: state.device,
        };
        self.ask_result(|reply| Command::Restore(Box::new(worker), reply))?;
        self.shared.restore(state.interrupt_status, state.needs_reset, state.config_generation);
        Ok(())
    }

    /// Whether the driver has been told of something that it has not acknowledged: an interrupt may
    /// have been lost between the device and the interrupt controllers' saved state.
    pub(crate) fn interrupt_pending(&self) -> bool {
        self.shared.interrupt_status() != 0
    }
}

fn ready_rings(state: &RegisterState) -> Vec<ReadyRing> {
    let queues = state.queues.iter().enumerate().filter(|(_, q)| q.ready);
    queues.map(|(i, q)| (i, q.setup)).collect()
}
