//! The interface of a device under test, and the buffers that every such device gets.

use super::input::FuzzInput;
use super::memory::FuzzMemory;
use crate::devices::virtio::{Device, DriverBuffer};
use crate::memory::Memory;

/// Address of the buffers that the device reads.
const GIVEN: u64 = 0x1_0000;

/// A device under test. See the module documentation.
pub(super) trait FuzzedDevice {
    /// Returns a new device over the same backend as before.
    fn make(&mut self) -> Box<dyn Device>;

    /// Returns the queue under test.
    fn queue(&self) -> usize;

    /// Returns the buffers of a request for `queue`.
    fn request(
        &mut self,
        queue: usize,
        from: &mut FuzzInput<'_>,
        guest: &mut FuzzMemory,
    ) -> Vec<DriverBuffer>;

    /// Makes something happen in the backend.
    fn cause_backend_event(&mut self, _: &mut FuzzInput<'_>) {}

    /// Checks the rules that must hold whenever nothing is in flight.
    fn check(&mut self, _: &Memory) {}

    /// Returns whether the device also writes to guest memory between two calls.
    fn writes_asynchronously(&self) -> bool {
        false
    }
}

/// Puts bytes for the device to read into one or two buffers and returns these.
pub(super) fn given(
    bytes: &[u8],
    from: &mut FuzzInput<'_>,
    guest: &mut FuzzMemory,
) -> Vec<DriverBuffer> {
    let addr = GIVEN + 64 * u64::from(from.u8());
    guest.write(addr, bytes);
    let len = bytes.len() as u32;
    let cut = u32::from(from.u8());
    let piece = |addr, len| DriverBuffer { addr, len, writable: false };
    match cut < len {
        true => vec![piece(addr, cut), piece(addr + u64::from(cut), len - cut)],
        false => vec![piece(addr, len)],
    }
}
