//! Buffers that the drivers of tests and of fuzzing give to a device.

use virtio_bindings::virtio_ring::VRING_DESC_F_WRITE;

/// A range of guest memory in a descriptor, and whether the device writes to it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct DriverBuffer {
    pub(crate) addr: u64,
    pub(crate) len: u32,
    pub(crate) writable: bool,
}

impl DriverBuffer {
    /// Returns the descriptor of this buffer, with `flags` besides its own.
    pub(crate) fn descriptor(self, flags: u16, next: u16) -> [u8; 16] {
        let write = if self.writable { VRING_DESC_F_WRITE as u16 } else { 0 };
        let mut bytes = [0; 16];
        bytes[..8].copy_from_slice(&self.addr.to_le_bytes());
        bytes[8..12].copy_from_slice(&self.len.to_le_bytes());
        bytes[12..14].copy_from_slice(&(flags | write).to_le_bytes());
        bytes[14..].copy_from_slice(&next.to_le_bytes());
        bytes
    }
}
