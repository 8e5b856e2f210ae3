//! The registers of one device, without the effects of writes: a write returns a
//! [`RegisterEffect`].
//!
//! Interrupt status, configuration space and notifications are elsewhere, so that they need no lock
//! of the registers.

use serde::{Deserialize, Serialize};
use virtio_bindings::virtio_config::{
    VIRTIO_CONFIG_S_DRIVER_OK, VIRTIO_CONFIG_S_FAILED, VIRTIO_CONFIG_S_FEATURES_OK,
    VIRTIO_CONFIG_S_NEEDS_RESET, VIRTIO_F_RING_RESET, VIRTIO_F_VERSION_1,
};
use virtio_bindings::virtio_mmio::*;
use virtio_bindings::virtio_ring::{VIRTIO_RING_F_EVENT_IDX, VIRTIO_RING_F_INDIRECT_DESC};

use super::ring::RingSetup;
use super::violation::RegisterDefect;
use crate::devices::error::StateError;
use crate::devices::misfit::DeviceMisfit;

/// The register `QueueReset`, which the bindings lack.
pub(crate) const VIRTIO_MMIO_QUEUE_RESET: u32 = 0xc0;
const MAGIC: u32 = u32::from_le_bytes(*b"virt");
const LAYOUT: u32 = 2;
/// The vendor ID: "DRFT".
const VENDOR: u32 = u32::from_le_bytes(*b"DRFT");

/// The features that every device offers.
pub(super) const COMMON_FEATURES: u64 = 1 << VIRTIO_F_VERSION_1
    | 1 << VIRTIO_F_RING_RESET
    | 1 << VIRTIO_RING_F_EVENT_IDX
    | 1 << VIRTIO_RING_F_INDIRECT_DESC;

/// The effect of a write.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) enum RegisterEffect {
    Nothing,
    /// The device must be reset, and then these registers.
    Reset,
    /// The driver is ready: the device may use its queues.
    Activate,
    /// The active device may use one more queue.
    StartQueue(usize),
    /// The active device may not use this queue any more.
    StopQueue(usize),
    /// The driver broke a rule.
    Violation(RegisterDefect),
}

/// The registers of one queue.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub(super) struct QueueRegisters {
    pub(super) ready: bool,
    pub(super) setup: RingSetup,
}

/// Everything that the driver has written.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub(super) struct RegisterState {
    pub(super) status: u32,
    device_features_select: u32,
    driver_features_select: u32,
    pub(super) driver_features: u64,
    queue_select: u32,
    pub(super) queues: Vec<QueueRegisters>,
}

#[cfg(test)]
impl RegisterState {
    pub(super) fn example() -> Self {
        let setup = RingSetup { size: 256, descriptors: 0x1000, available: 0x2000, used: 0x3000 };
        Self {
            status: 0xf,
            device_features_select: 1,
            driver_features_select: 2,
            driver_features: 1 << 32 | 5,
            queue_select: 3,
            queues: vec![QueueRegisters { ready: true, setup }],
        }
    }
}

impl RegisterState {
    /// Returns whether the driver is ready.
    pub(super) fn is_active(&self) -> bool {
        self.status & VIRTIO_CONFIG_S_DRIVER_OK != 0
    }
}

/// The registers of one device; see the module.
#[derive(Debug)]
pub(super) struct Registers {
    device_id: u32,
    offered: u64,
    queue_sizes: Vec<u16>,
    state: RegisterState,
}

impl Registers {
    pub(super) fn new(device_id: u32, features: u64, queue_sizes: Vec<u16>) -> Self {
        let offered = features | COMMON_FEATURES;
        let mut registers =
            Self { device_id, offered, queue_sizes, state: RegisterState::default() };
        registers.reset();
        registers
    }

    pub(super) fn state(&self) -> &RegisterState {
        &self.state
    }

    /// Sets the registers to their values after power-on.
    pub(super) fn reset(&mut self) {
        let queue = |&size: &u16| self.empty_queue(size);
        let queues = self.queue_sizes.iter().map(queue).collect();
        self.state = RegisterState { queues, ..Default::default() };
    }

    fn empty_queue(&self, size: u16) -> QueueRegisters {
        QueueRegisters { ready: false, setup: RingSetup { size, ..Default::default() } }
    }

    /// Restores saved registers, which are hostile.
    pub(super) fn restore(&mut self, state: RegisterState) -> Result<(), StateError> {
        let (queues, here) = (state.queues.len(), self.queue_sizes.len());
        if queues != here {
            return Err(DeviceMisfit::Queues { queues, here }.into());
        }
        let unknown = state.driver_features & !self.offered;
        // Until features are agreed, a driver may have written features that it cannot have.
        let negotiated = VIRTIO_CONFIG_S_FEATURES_OK | VIRTIO_CONFIG_S_DRIVER_OK;
        if unknown != 0 && state.status & negotiated != 0 {
            return Err(DeviceMisfit::Features { features: unknown }.into());
        }
        if state.status & VIRTIO_CONFIG_S_NEEDS_RESET != 0 {
            return Err(DeviceMisfit::Status { status: state.status }.into());
        }
        let sizes = state.queues.iter().zip(&self.queue_sizes);
        if let Some((queue, &most)) = sizes.clone().find(|(q, most)| q.setup.size > **most) {
            return Err(DeviceMisfit::QueueSize { size: queue.setup.size, most }.into());
        }
        self.state = state;
        Ok(())
    }

    fn queue(&self) -> Option<(usize, &QueueRegisters)> {
        let index = self.state.queue_select as usize;
        self.state.queues.get(index).map(|q| (index, q))
    }

    pub(super) fn read(&self, register: u32) -> u32 {
        let queue = self.queue().map(|(_, q)| q);
        match register {
            VIRTIO_MMIO_MAGIC_VALUE => MAGIC,
            VIRTIO_MMIO_VERSION => LAYOUT,
            VIRTIO_MMIO_DEVICE_ID => self.device_id,
            VIRTIO_MMIO_VENDOR_ID => VENDOR,
            VIRTIO_MMIO_DEVICE_FEATURES => half(self.offered, self.state.device_features_select),
            VIRTIO_MMIO_QUEUE_NUM_MAX => {
                let max = self.queue_sizes.get(self.state.queue_select as usize);
                max.copied().unwrap_or(0).into()
            }
            VIRTIO_MMIO_QUEUE_READY => queue.is_some_and(|q| q.ready).into(),
            VIRTIO_MMIO_STATUS => self.state.status,
            // There is no shared memory: its length is -1, and so is its address.
            VIRTIO_MMIO_SHM_LEN_LOW
            | VIRTIO_MMIO_SHM_LEN_HIGH
            | VIRTIO_MMIO_SHM_BASE_LOW
            | VIRTIO_MMIO_SHM_BASE_HIGH => u32::MAX,
            // Covers QueueReset: the reset is complete when the write has returned.
            _ => 0,
        }
    }

    pub(super) fn write(&mut self, register: u32, value: u32) -> RegisterEffect {
        match register {
            VIRTIO_MMIO_DEVICE_FEATURES_SEL => self.state.device_features_select = value,
            VIRTIO_MMIO_DRIVER_FEATURES_SEL => self.state.driver_features_select = value,
            VIRTIO_MMIO_DRIVER_FEATURES => self.write_features(value),
            VIRTIO_MMIO_QUEUE_SEL => self.state.queue_select = value,
            VIRTIO_MMIO_STATUS => return self.write_status(value),
            VIRTIO_MMIO_QUEUE_READY => return self.write_ready(value),
            VIRTIO_MMIO_QUEUE_RESET => return self.write_queue_reset(value),
            VIRTIO_MMIO_QUEUE_NUM
            | VIRTIO_MMIO_QUEUE_DESC_LOW
            | VIRTIO_MMIO_QUEUE_DESC_HIGH
            | VIRTIO_MMIO_QUEUE_AVAIL_LOW
            | VIRTIO_MMIO_QUEUE_AVAIL_HIGH
            | VIRTIO_MMIO_QUEUE_USED_LOW
            | VIRTIO_MMIO_QUEUE_USED_HIGH => return self.write_setup(register, value),
            _ => tracing::debug!("a driver wrote {value:#x} to virtio register {register:#x}"),
        }
        RegisterEffect::Nothing
    }

    fn write_features(&mut self, value: u32) {
        if self.state.status & VIRTIO_CONFIG_S_FEATURES_OK != 0 {
            tracing::debug!("a driver chose features {value:#x} after the negotiation");
            return;
        }
        let shift = match self.state.driver_features_select {
            0 => 0,
            1 => 32,
            _ => return,
        };
        let other_half = self.state.driver_features & !(u64::from(u32::MAX) << shift);
        self.state.driver_features = other_half | u64::from(value) << shift;
    }

    fn write_status(&mut self, value: u32) -> RegisterEffect {
        if value == 0 {
            return RegisterEffect::Reset;
        }
        // Only a reset clears bits, and only the device sets `NEEDS_RESET`.
        let mut new = value & !self.state.status & !VIRTIO_CONFIG_S_NEEDS_RESET;
        let features = self.state.driver_features;
        let agreed = features & !self.offered == 0 && features & 1 << VIRTIO_F_VERSION_1 != 0;
        if new & VIRTIO_CONFIG_S_FEATURES_OK != 0 && !agreed {
            tracing::debug!("features {features:#x} are refused; {:#x} are offered", self.offered);
            new &= !VIRTIO_CONFIG_S_FEATURES_OK;
        }
        let negotiated = (self.state.status | new) & VIRTIO_CONFIG_S_FEATURES_OK != 0;
        if new & VIRTIO_CONFIG_S_DRIVER_OK != 0 && !negotiated {
            return RegisterEffect::Violation(RegisterDefect::TooEarly);
        }
        if new & VIRTIO_CONFIG_S_FAILED != 0 {
            // Only at debug level: a driver can repeat this without end.
            tracing::debug!("a driver has given up its virtio device");
        }
        self.state.status |= new;
        if new & VIRTIO_CONFIG_S_DRIVER_OK != 0 {
            RegisterEffect::Activate
        } else {
            RegisterEffect::Nothing
        }
    }

    fn write_ready(&mut self, value: u32) -> RegisterEffect {
        let active = self.state.is_active();
        let index = self.state.queue_select as usize;
        let Some(queue) = self.state.queues.get_mut(index) else {
            return no_such_queue(index);
        };
        let was = std::mem::replace(&mut queue.ready, value == 1);
        match (was, value == 1) {
            (false, true) if active => RegisterEffect::StartQueue(index),
            (true, false) if active => RegisterEffect::StopQueue(index),
            _ => RegisterEffect::Nothing,
        }
    }

    fn write_queue_reset(&mut self, value: u32) -> RegisterEffect {
        let (active, index) = (self.state.is_active(), self.state.queue_select as usize);
        let Some(size) = self.queue_sizes.get(index).copied() else {
            return no_such_queue(index);
        };
        if value != 1 || self.state.driver_features & 1 << VIRTIO_F_RING_RESET == 0 {
            return RegisterEffect::Nothing;
        }
        let empty = self.empty_queue(size);
        let was = self.state.queues.get_mut(index).map(|q| std::mem::replace(q, empty));
        match was {
            Some(was) if active && was.ready => RegisterEffect::StopQueue(index),
            _ => RegisterEffect::Nothing,
        }
    }

    fn write_setup(&mut self, register: u32, value: u32) -> RegisterEffect {
        let index = self.state.queue_select as usize;
        let most = self.queue_sizes.get(index).copied().unwrap_or(0);
        let Some(queue) = self.state.queues.get_mut(index) else {
            return no_such_queue(index);
        };
        if queue.ready {
            return RegisterEffect::Violation(RegisterDefect::QueueInUse { index, register });
        }
        let setup = &mut queue.setup;
        match register {
            VIRTIO_MMIO_QUEUE_NUM => match u16::try_from(value) {
                Ok(size) if size <= most && size.is_power_of_two() => setup.size = size,
                _ => {
                    let defect = RegisterDefect::QueueSize { index, value, most };
                    return RegisterEffect::Violation(defect);
                }
            },
            VIRTIO_MMIO_QUEUE_DESC_LOW => set_low(&mut setup.descriptors, value),
            VIRTIO_MMIO_QUEUE_DESC_HIGH => set_high(&mut setup.descriptors, value),
            VIRTIO_MMIO_QUEUE_AVAIL_LOW => set_low(&mut setup.available, value),
            VIRTIO_MMIO_QUEUE_AVAIL_HIGH => set_high(&mut setup.available, value),
            VIRTIO_MMIO_QUEUE_USED_LOW => set_low(&mut setup.used, value),
            _ => set_high(&mut setup.used, value),
        }
        RegisterEffect::Nothing
    }
}

fn no_such_queue(index: usize) -> RegisterEffect {
    RegisterEffect::Violation(RegisterDefect::NoQueue { index })
}

fn half(value: u64, select: u32) -> u32 {
    match select {
        0 => value as u32,
        1 => (value >> 32) as u32,
        _ => 0,
    }
}

fn set_low(to: &mut u64, value: u32) {
    *to = *to & !u64::from(u32::MAX) | u64::from(value);
}

fn set_high(to: &mut u64, value: u32) {
    *to = *to & u64::from(u32::MAX) | u64::from(value) << 32;
}

#[cfg(test)]
mod tests {
    use super::*;

    const ACKNOWLEDGED: u32 = 3;

    fn registers() -> Registers {
        Registers::new(4, 1 << 5, vec![64, 8])
    }

    fn choose(r: &mut Registers, features: u64) {
        for (select, value) in [(0, features as u32), (1, (features >> 32) as u32)] {
            r.write(VIRTIO_MMIO_DRIVER_FEATURES_SEL, select);
            r.write(VIRTIO_MMIO_DRIVER_FEATURES, value);
        }
        r.write(VIRTIO_MMIO_STATUS, ACKNOWLEDGED | VIRTIO_CONFIG_S_FEATURES_OK);
    }

    fn features_ok(r: &Registers) -> bool {
        r.read(VIRTIO_MMIO_STATUS) & VIRTIO_CONFIG_S_FEATURES_OK != 0
    }

    #[test]
    fn features_need_version_1_and_an_offer() {
        for (features, agreed) in [
            (1 << 32, true),
            (1 << 32 | 1 << 5, true),
            (1 << 5, false),
            (1 << 32 | 1 << 6, false),
            (0, false),
        ] {
            let mut r = registers();
            choose(&mut r, features);
            assert_eq!(features_ok(&r), agreed, "{features:#x}");
        }
        let mut r = registers();
        choose(&mut r, 1 << 32);
        choose(&mut r, 1 << 32 | 1 << 5);
        assert_eq!(r.state().driver_features, 1 << 32, "negotiated features stay");
    }

    #[test]
    fn driver_starts_only_with_agreed_features() {
        let mut r = registers();
        let start = ACKNOWLEDGED | VIRTIO_CONFIG_S_DRIVER_OK;
        assert!(matches!(r.write(VIRTIO_MMIO_STATUS, start), RegisterEffect::Violation(_)));
        choose(&mut r, 1 << 32);
        assert_eq!(r.write(VIRTIO_MMIO_STATUS, start), RegisterEffect::Activate);
        assert_eq!(r.write(VIRTIO_MMIO_STATUS, start), RegisterEffect::Nothing, "once");
        assert_eq!(r.write(VIRTIO_MMIO_STATUS, 0), RegisterEffect::Reset);
    }

    #[test]
    fn queue_in_use_cannot_be_changed() {
        for register in
            [VIRTIO_MMIO_QUEUE_NUM, VIRTIO_MMIO_QUEUE_DESC_LOW, VIRTIO_MMIO_QUEUE_USED_HIGH]
        {
            let mut r = registers();
            assert_eq!(r.write(VIRTIO_MMIO_QUEUE_READY, 1), RegisterEffect::Nothing);
            assert!(matches!(r.write(register, 8), RegisterEffect::Violation(_)), "{register:#x}");
        }
        for size in [0, 3, 128, 1 << 16, u32::MAX] {
            let mut r = registers();
            assert!(
                matches!(r.write(VIRTIO_MMIO_QUEUE_NUM, size), RegisterEffect::Violation(_)),
                "{size}"
            );
        }
        let mut r = registers();
        r.write(VIRTIO_MMIO_QUEUE_SEL, 2);
        assert_eq!(r.read(VIRTIO_MMIO_QUEUE_NUM_MAX), 0, "there is no third queue");
        assert!(matches!(r.write(VIRTIO_MMIO_QUEUE_READY, 1), RegisterEffect::Violation(_)));
    }

    #[test]
    fn active_device_starts_and_stops_a_queue() {
        let mut r = registers();
        choose(&mut r, 1 << 32 | 1 << VIRTIO_F_RING_RESET);
        r.write(VIRTIO_MMIO_STATUS, ACKNOWLEDGED | VIRTIO_CONFIG_S_DRIVER_OK);
        r.write(VIRTIO_MMIO_QUEUE_SEL, 1);
        assert_eq!(r.write(VIRTIO_MMIO_QUEUE_READY, 1), RegisterEffect::StartQueue(1));
        assert_eq!(r.read(VIRTIO_MMIO_QUEUE_READY), 1);
        assert_eq!(r.write(VIRTIO_MMIO_QUEUE_RESET, 1), RegisterEffect::StopQueue(1));
        assert_eq!(r.read(VIRTIO_MMIO_QUEUE_READY), 0);
        assert_eq!(r.write(VIRTIO_MMIO_QUEUE_DESC_LOW, 0x1000), RegisterEffect::Nothing);
    }

    #[test]
    fn saved_registers_are_checked() {
        let fits = registers().state().clone();
        let refused = |state: RegisterState| registers().restore(state).unwrap_err().to_string();
        registers().restore(fits.clone()).unwrap();
        assert!(refused(RegisterState { queues: vec![], ..fits.clone() }).contains("0 queues"));
        let alien = RegisterState { driver_features: 1 << 60, ..fits.clone() };
        // Asked for, and not agreed to.
        registers().restore(alien.clone()).unwrap();
        for status in [VIRTIO_CONFIG_S_FEATURES_OK, VIRTIO_CONFIG_S_DRIVER_OK] {
            let negotiated = RegisterState { status, ..alien.clone() };
            assert!(refused(negotiated).contains("0x1000000000000000"));
        }
        let stopped = RegisterState { status: 0x4f, ..fits.clone() };
        assert!(refused(stopped).contains("status is 0x4f"));
        let mut large = fits;
        large.queues[1].setup.size = 16;
        assert!(refused(large).contains("16 entries"));
    }
}
