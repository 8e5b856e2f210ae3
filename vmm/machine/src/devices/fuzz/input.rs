//! A fuzzer's bytes, consumed one decision at a time. Past their end every value is zero.

use crate::devices::virtio::DriverBuffer;

/// Input of one run. See the module documentation.
pub(super) struct FuzzInput<'b>(&'b [u8]);

impl<'b> FuzzInput<'b> {
    pub(super) fn new(bytes: &'b [u8]) -> Self {
        Self(bytes)
    }

    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Returns the next `len` bytes, or the remaining ones if there are fewer.
    pub(super) fn bytes(&mut self, len: usize) -> &'b [u8] {
        let (now, rest) = self.0.split_at(len.min(self.0.len()));
        self.0 = rest;
        now
    }

    pub(super) fn rest(&mut self) -> &'b [u8] {
        self.bytes(usize::MAX)
    }

    fn array<const N: usize>(&mut self) -> [u8; N] {
        let mut array = [0; N];
        let bytes = self.bytes(N);
        array[..bytes.len()].copy_from_slice(bytes);
        array
    }

    pub(super) fn u8(&mut self) -> u8 {
        let [byte] = self.array();
        byte
    }

    pub(super) fn u16(&mut self) -> u16 {
        u16::from_le_bytes(self.array())
    }

    pub(super) fn u32(&mut self) -> u32 {
        u32::from_le_bytes(self.array())
    }

    pub(super) fn u64(&mut self) -> u64 {
        u64::from_le_bytes(self.array())
    }

    pub(super) fn flip(&mut self) -> bool {
        self.u8() & 1 != 0
    }

    /// Returns one of `choices`.
    pub(super) fn one_of<T: Copy>(&mut self, choices: &[T]) -> T {
        choices[usize::from(self.u8()) % choices.len()]
    }

    /// Returns an address: mostly in the buffers, otherwise in the rings, at an edge of memory, or
    /// outside memory.
    pub(super) fn address(&mut self) -> u64 {
        match self.u8() % 16 {
            0..10 => 0x1_0000 + u64::from(self.u16()),
            10 => u64::from(self.u16()),
            11 => 0x3_f000 + 16 * u64::from(self.u8()),
            12 => 0x10_0000 + u64::from(self.u16()),
            13 => 0x10_ff00 + u64::from(self.u8()),
            14 => self
                .one_of(&[u64::MAX, 0xd000_0000, 1 << 32, 0x4_0000, 0x11_0000, 1 << 63])
                .wrapping_sub(self.u8().into()),
            _ => self.u64(),
        }
    }

    /// Returns a length, mostly a small one.
    pub(super) fn length(&mut self) -> u32 {
        match self.u8() % 8 {
            0..5 => self.u8().into(),
            5 => self.u16().into(),
            6 => 4096 * (1 + u32::from(self.u8()) % 8),
            _ => self.u32(),
        }
    }

    /// Returns a buffer.
    pub(super) fn piece(&mut self, writable: bool) -> DriverBuffer {
        DriverBuffer { addr: self.address(), len: self.length(), writable }
    }

    /// Returns up to five buffers.
    pub(super) fn pieces(&mut self, writable: bool) -> Vec<DriverBuffer> {
        (0..self.u8() % 6).map(|_| self.piece(writable)).collect()
    }
}
