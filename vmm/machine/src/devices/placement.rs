//! Addresses and interrupts of virtio devices.

use super::virtio::REGISTERS_LEN;

/// Address of the first device's registers: in the hole below 4 GiB, far from the interrupt
/// controllers.
const BASE: u64 = 0xd000_0000;
/// IOAPIC pins that have no other use: first the ISA interrupts that PCs leave to the user, then
/// those beyond ISA. All are edge-triggered.
const PINS: [u32; crate::config::MAX_DEVICES] =
    [5, 6, 7, 10, 11, 12, 14, 15, 16, 17, 18, 19, 20, 21, 22, 23];

/// Registers, of [`REGISTERS_LEN`] bytes, and interrupt of a device.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct DevicePlacement {
    /// Guest address of the registers.
    pub(crate) base: u64,
    /// Interrupt: the GSI, which in the guest is the number of the pin.
    pub(crate) irq: u32,
}

/// Returns the placement of device number `index`, or `None` if no interrupt is left for it.
pub(crate) fn placement(index: usize) -> Option<DevicePlacement> {
    let irq = *PINS.get(index)?;
    Some(DevicePlacement { base: BASE + index as u64 * REGISTERS_LEN, irq })
}

/// Returns the number of the device whose registers contain `addr`, and the offset in them.
pub(super) fn device_at(addr: u64) -> Option<(usize, u64)> {
    let offset = addr.checked_sub(BASE)?;
    let index = usize::try_from(offset / REGISTERS_LEN).ok()?;
    (index < PINS.len()).then_some((index, offset % REGISTERS_LEN))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::{HOLE_END, HOLE_START};

    #[test]
    fn placements_are_disjoint_and_in_the_hole() {
        for i in 0..PINS.len() {
            let DevicePlacement { base, irq } = placement(i).unwrap();
            let len = REGISTERS_LEN;
            assert!(base >= HOLE_START && base + len < HOLE_END - (64 << 20), "{base:#x}");
            assert!((5..24).contains(&irq) && ![8, 9, 13].contains(&irq));
            assert_eq!(device_at(base), Some((i, 0)));
            assert_eq!(device_at(base + len - 1), Some((i, len - 1)));
        }
        assert_eq!(placement(PINS.len()), None);
        assert_eq!(device_at(BASE - 1), None);
        assert_eq!(device_at(BASE + 16 * REGISTERS_LEN), None);
    }
}
