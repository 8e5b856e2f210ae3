//! ACPI's PM1 register block, reduced to the minimum that an operating system needs if no table
//! says that the block is missing. No event ever occurs; the only function is powering off.
//!
//! ```text
//! +0  status    no event; writes have no effect
//! +2  enable    holds the last write
//! +4  control   holds the last write, and SCI_EN: ACPI is on
//! ```

use std::sync::atomic::{AtomicU16, Ordering};

use serde::{Deserialize, Serialize};

const ENABLE_AT: u16 = 2;
const CONTROL_AT: u16 = 4;
const BLOCK_BYTES: usize = 6;

/// Bit of the control register: ACPI events raise the SCI.
const SCI_ENABLED: u16 = 1 << 0;
/// Bit of the control register: sleep now, in the state that the sleep type bits select. Only
/// soft-off exists.
const SLEEP_ENABLE: u16 = 1 << 13;

/// The registers, shared by the vCPUs.
#[derive(Debug, Default)]
pub(crate) struct PowerManagement {
    enable: AtomicU16,
    control: AtomicU16,
}

impl PowerManagement {
    /// Handles a guest's write at `offset`. Returns whether the write powers the machine off.
    /// Registers must be written whole, as the ACPI tables say.
    pub(super) fn write(&self, offset: u16, bytes: &[u8]) -> bool {
        let (words, rest) = bytes.as_chunks::<2>();
        if !rest.is_empty() {
            return false;
        }
        let mut off = false;
        for (word, at) in words.iter().zip((offset..).step_by(2)) {
            let value = u16::from_le_bytes(*word);
            match at {
                ENABLE_AT => self.enable.store(value, Ordering::Relaxed),
                CONTROL_AT => {
                    off |= value & SLEEP_ENABLE != 0;
                    self.control.store(value & !SLEEP_ENABLE, Ordering::Relaxed);
                }
                _ => {}
            }
        }
        off
    }

    /// Handles a guest's read at `offset`, of any part of the block.
    pub(super) fn read(&self, offset: u16, data: &mut [u8]) {
        let mut block = [0; BLOCK_BYTES];
        let control = self.control.load(Ordering::Relaxed) | SCI_ENABLED;
        block[2..4].copy_from_slice(&self.enable.load(Ordering::Relaxed).to_le_bytes());
        block[4..].copy_from_slice(&control.to_le_bytes());
        let rest = block.get(usize::from(offset)..).unwrap_or_default();
        for (i, byte) in data.iter_mut().enumerate() {
            *byte = rest.get(i).copied().unwrap_or(0xff);
        }
    }

    /// Returns the registers.
    pub(crate) fn state(&self) -> PowerState {
        PowerState {
            enable: self.enable.load(Ordering::Relaxed),
            control: self.control.load(Ordering::Relaxed),
        }
    }

    /// Restores saved registers.
    pub(crate) fn restore(&self, state: PowerState) {
        self.enable.store(state.enable, Ordering::Relaxed);
        self.control.store(state.control & !SLEEP_ENABLE, Ordering::Relaxed);
    }
}

/// PM1 registers that a guest can change.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub(crate) struct PowerState {
    enable: u16,
    control: u16,
}

#[cfg(test)]
impl PowerState {
    /// Returns a state whose fields differ.
    pub(crate) fn example() -> Self {
        Self { enable: 0x120, control: 0x2001 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read<const N: usize>(power: &PowerManagement, offset: u16) -> [u8; N] {
        let mut data = [0x55; N];
        power.read(offset, &mut data);
        data
    }

    #[test]
    fn enable_reads_back_without_events() {
        let power = PowerManagement::default();
        assert!(!power.write(2, &0x0120u16.to_le_bytes()));
        assert_eq!(read(&power, 0), [0, 0, 0x20, 0x01], "status, enable");
        assert!(!power.write(0, &[0xff, 0xff, 0x21, 0x01]), "status and enable together");
        assert_eq!(read(&power, 0), [0, 0, 0x21, 0x01]);
        assert_eq!(read(&power, 4), [1, 0], "ACPI is on");
        assert_eq!(read(&power, 5), [0, 0xff], "nothing follows");
    }

    #[test]
    fn only_sleep_enable_powers_off() {
        let power = PowerManagement::default();
        assert!(!power.write(4, &0x1c00u16.to_le_bytes()));
        assert!(!power.write(4, &[0x20]), "half a register is nothing");
        assert!(power.write(4, &0x2000u16.to_le_bytes()));
        assert_eq!(power.state(), PowerState::default());
        assert!(power.write(2, &[0, 0, 0, 0x20]), "also as the second half of a wide write");
    }

    #[test]
    fn restored_registers_save_the_same() {
        let power = PowerManagement::default();
        power.write(2, &[0x20, 0]);
        power.write(4, &[0x01, 0x1c]);
        let other = PowerManagement::default();
        other.restore(power.state());
        assert_eq!((other.state(), read::<6>(&other, 0)), (power.state(), read(&power, 0)));
    }
}
