//! The vCPUs' view of a device: its registers, its configuration space and its notifications,
//! without the thread behind them.
//!
//! The caller passes a function that gets the effects of writes, in the order of the writes. No
//! read waits for these effects. A reset in progress shows in the status, which is not 0 until the
//! reset is done.

use std::io;
use std::sync::Arc;

use parking_lot::{Mutex, MutexGuard};
use virtio_bindings::virtio_config::{VIRTIO_CONFIG_S_ACKNOWLEDGE, VIRTIO_CONFIG_S_NEEDS_RESET};
use virtio_bindings::virtio_mmio::*;

use super::messages::{DriverCommand, ReadyRing, RestoredWorkerState, SavedWorkerState};
use super::registers::{RegisterEffect, RegisterState, Registers};
use super::request::RequestError;
use super::violation::RegisterDefect;
use super::{Device, DeviceKind, REGISTERS_LEN, SharedDeviceState, VirtioState};
use crate::devices::error::DeviceError;
use crate::devices::latched_event::LatchedEvent;

/// A device's registers, configuration space and notifications; see the module.
#[derive(Debug)]
pub(super) struct MmioInterface {
    kind: DeviceKind,
    label: String,
    registers: Mutex<Registers>,
    pub(super) shared: Arc<SharedDeviceState>,
    pub(super) kicks: Vec<Arc<LatchedEvent>>,
}

/// The part of a saved state that is restored last.
#[derive(Debug)]
pub(super) struct RestoredInterrupt {
    status: u32,
    needs_reset: bool,
    config_generation: u32,
}

impl MmioInterface {
    /// Creates the interface of `device`; `id` is its name in messages.
    pub(super) fn new(id: &str, device: &dyn Device) -> io::Result<Self> {
        let kind = device.kind();
        let sizes = device.queue_sizes();
        let event = || Ok::<_, io::Error>(Arc::new(LatchedEvent::new()?));
        Ok(Self {
            kind,
            label: format!("{kind} \"{id}\""),
            shared: Arc::new(SharedDeviceState::new(device.config_space())?),
            kicks: sizes.iter().map(|_| event()).collect::<io::Result<_>>()?,
            registers: Mutex::new(Registers::new(kind.id(), device.features(), sizes)),
        })
    }

    /// Returns the device's kind and name, for messages.
    pub(super) fn label(&self) -> &str {
        &self.label
    }

    fn registers(&self) -> MutexGuard<'_, Registers> {
        self.registers.lock()
    }

    /// Handles a vCPU's read at `offset` of the device's registers.
    pub(super) fn read(&self, offset: u64, data: &mut [u8]) {
        debug_assert!(offset < REGISTERS_LEN);
        if offset >= u64::from(VIRTIO_MMIO_CONFIG) {
            let at = (offset - u64::from(VIRTIO_MMIO_CONFIG)) as usize;
            return self.shared.read_config(at, data);
        }
        // Registers have 32 bits and are read as a whole.
        let value = match (offset as u32, data.len()) {
            (VIRTIO_MMIO_INTERRUPT_STATUS, 4) => self.shared.interrupt_status(),
            (VIRTIO_MMIO_CONFIG_GENERATION, 4) => self.shared.config_generation(),
            (VIRTIO_MMIO_STATUS, 4) => {
                let stopped = self.shared.needs_reset();
                let resetting = self.shared.is_resetting();
                let status = self.registers().read(VIRTIO_MMIO_STATUS);
                status
                    | if stopped { VIRTIO_CONFIG_S_NEEDS_RESET } else { 0 }
                    | if resetting { VIRTIO_CONFIG_S_ACKNOWLEDGE } else { 0 }
            }
            (register, 4) => self.registers().read(register),
            _ => 0,
        };
        let bytes = value.to_le_bytes();
        data.fill(0);
        let len = data.len().min(bytes.len());
        data[..len].copy_from_slice(&bytes[..len]);
    }

    /// Handles a vCPU's write at `offset` of the device's registers. Register writes are handled
    /// one at a time: `send` is called while the registers are locked, so it must not wait.
    pub(super) fn write(&self, offset: u64, data: &[u8], send: impl FnOnce(DriverCommand)) {
        debug_assert!(offset < REGISTERS_LEN);
        if offset >= u64::from(VIRTIO_MMIO_CONFIG) {
            let at = (offset - u64::from(VIRTIO_MMIO_CONFIG)) as usize;
            return send(DriverCommand::Config(at, data.to_vec()));
        }
        let Ok(bytes) = <[u8; 4]>::try_from(data) else {
            tracing::debug!("{}: {} bytes written at {offset:#x}", self.label, data.len());
            return;
        };
        let value = u32::from_le_bytes(bytes);
        match offset as u32 {
            VIRTIO_MMIO_QUEUE_NOTIFY => self.notify(value, send),
            VIRTIO_MMIO_INTERRUPT_ACK => self.shared.acknowledge(value),
            register => {
                let mut registers = self.registers();
                let effect = registers.write(register, value);
                self.apply(&mut registers, effect, send);
            }
        }
    }

    /// Handles a write to `QueueNotify` that no ioeventfd has taken.
    fn notify(&self, queue: u32, send: impl FnOnce(DriverCommand)) {
        match self.kicks.get(queue as usize) {
            Some(kick) => kick.signal(),
            None => {
                let cause = RegisterDefect::NotifiesNoQueue { queue };
                send(DriverCommand::Stop(cause.into()));
            }
        }
    }

    /// Returns the state of the whole device; `worker` is the thread's part of it.
    pub(super) fn save(&self, worker: SavedWorkerState) -> VirtioState {
        VirtioState {
            device_id: self.kind.id(),
            registers: self.registers().state().clone(),
            interrupt_status: self.shared.interrupt_status(),
            needs_reset: self.shared.needs_reset(),
            config_generation: self.shared.config_generation(),
            positions: worker.positions,
            device: worker.device,
            limiters: worker.limiters,
        }
    }

    /// Restores the registers of a saved state, which is hostile, into a device that has never
    /// worked. Returns the thread's part, and what [`finish_restore`](Self::finish_restore) takes
    /// once the thread has restored that.
    pub(super) fn begin_restore(
        &self,
        state: VirtioState,
    ) -> Result<(RestoredWorkerState, RestoredInterrupt), RequestError> {
        if state.device_id != self.kind.id() {
            let (id, device) = (state.device_id, self.label.clone());
            return Err(RequestError::OtherDevice { id, device });
        }
        if state.positions.len() != self.kicks.len() {
            return Err(RequestError::QueueCount(state.positions.len()));
        }
        let mut registers = self.registers();
        registers.restore(state.registers).map_err(DeviceError::from)?;
        let of = registers.state();
        let active = of.is_active() && !state.needs_reset;
        let worker = RestoredWorkerState {
            active: active.then(|| (of.driver_features, ready_rings(of))),
            positions: state.positions,
            device: state.device,
            limiters: state.limiters,
        };
        let interrupt = RestoredInterrupt {
            status: state.interrupt_status,
            needs_reset: state.needs_reset,
            config_generation: state.config_generation,
        };
        Ok((worker, interrupt))
    }

    /// Restores what the thread shares.
    pub(super) fn finish_restore(&self, interrupt: &RestoredInterrupt) {
        let RestoredInterrupt { status, needs_reset, config_generation } = *interrupt;
        self.shared.restore(status, needs_reset, config_generation);
    }

    fn apply(
        &self,
        registers: &mut Registers,
        effect: RegisterEffect,
        send: impl FnOnce(DriverCommand),
    ) {
        match effect {
            RegisterEffect::Nothing => {}
            RegisterEffect::Reset => {
                registers.reset();
                self.shared.begin_reset();
                send(DriverCommand::Reset);
            }
            RegisterEffect::Activate => {
                let state = registers.state();
                send(DriverCommand::Activate(state.driver_features, ready_rings(state)));
            }
            RegisterEffect::StartQueue(queue) => {
                if let Some(q) = registers.state().queues.get(queue) {
                    send(DriverCommand::StartQueue((queue, q.setup)));
                }
            }
            RegisterEffect::StopQueue(queue) => send(DriverCommand::StopQueue(queue)),
            RegisterEffect::Violation(defect) => send(DriverCommand::Stop(defect.into())),
        }
    }
}

fn ready_rings(state: &RegisterState) -> Vec<ReadyRing> {
    let queues = state.queues.iter().enumerate().filter(|(_, q)| q.ready);
    queues.map(|(i, q)| (i, q.setup)).collect()
}
