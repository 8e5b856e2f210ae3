//! One request of a driver: a descriptor chain, read once and checked as a whole.
//!
//! The driver may change the descriptors while the device looks at them. A [`Chain`] was read once,
//! lies in guest memory, and does not change any more. The bytes to which it points may change.

use std::ops::Deref;

use driftline_guest::GuestRam;
use virtio_queue::DescriptorChain;
use vm_memory::bitmap::Bitmap;
use vm_memory::{Bytes, GuestAddress, GuestMemoryBackend};

use super::violation::{ChainDefect, Violation};

/// A piece of guest memory that lies in one memory region.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Buffer {
    pub(crate) addr: GuestAddress,
    pub(crate) len: u32,
}

/// Pieces of guest memory, in order.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub(crate) struct Buffers {
    pieces: Vec<Buffer>,
    len: u32,
}

/// A chain that the driver gave to a device, until the device gives it back with
/// [`DeviceRing::push`].
///
/// [`DeviceRing::push`]: super::DeviceRing::push
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Chain {
    /// Index of the first descriptor, which identifies the chain in the ring.
    pub(crate) head: u16,
    /// Buffers that the device may read.
    pub(crate) readable: Buffers,
    /// Buffers that the device may write.
    pub(crate) writable: Buffers,
}

impl Chain {
    /// Reads a chain of queue `queue`. It may have at most `max_descriptors` descriptors.
    pub(super) fn read<M>(
        chain: DescriptorChain<M>,
        queue: u16,
        max_descriptors: u16,
    ) -> Result<Self, Violation>
    where
        M: Deref<Target = GuestRam> + Clone,
    {
        let ram = chain.memory().clone();
        let head = chain.head_index();
        let mut read = Self { head, readable: Buffers::default(), writable: Buffers::default() };
        let broken = |cause| Violation::Chain { queue, head, cause };
        // The iterator ends at any descriptor that it cannot follow. The last one it returned then
        // still names a next one.
        let mut has_next = true;
        let mut descriptors = 0;
        for descriptor in chain {
            let buffer = Buffer { addr: descriptor.addr(), len: descriptor.len() };
            has_next = descriptor.has_next();
            descriptors += 1;
            if descriptors > max_descriptors {
                return Err(broken(ChainDefect::TooManyDescriptors));
            }
            if buffer.len == 0 {
                continue;
            }
            if ram.get_slice(buffer.addr, buffer.len as usize).is_err() {
                return Err(Violation::Outside { queue, addr: buffer.addr.0, len: buffer.len });
            }
            let to = match descriptor.is_write_only() {
                true => &mut read.writable,
                false if read.writable.len > 0 => {
                    return Err(broken(ChainDefect::Order));
                }
                false => &mut read.readable,
            };
            if !to.add(buffer) {
                return Err(broken(ChainDefect::TooLong));
            }
        }
        match has_next {
            true => Err(broken(ChainDefect::NoEnd)),
            false => Ok(read),
        }
    }
}

impl Buffers {
    fn add(&mut self, buffer: Buffer) -> bool {
        let Some(len) = self.len.checked_add(buffer.len) else { return false };
        self.len = len;
        self.pieces.push(buffer);
        true
    }

    /// Returns buffers of a single piece.
    #[cfg(test)]
    pub(crate) fn one(addr: GuestAddress, len: u32) -> Self {
        Self { pieces: vec![Buffer { addr, len }], len }
    }

    /// Returns the total length in bytes.
    pub(crate) fn len(&self) -> u32 {
        self.len
    }

    /// Returns the pieces. None of them is empty.
    pub(crate) fn pieces(&self) -> &[Buffer] {
        &self.pieces
    }

    /// Returns the `len` bytes from `at` on, or as many of them as there are.
    pub(crate) fn part(&self, at: u32, len: u32) -> Self {
        let mut part = Self::default();
        let (mut skip, mut left) = (at, len);
        for piece in &self.pieces {
            let skipped = skip.min(piece.len);
            skip -= skipped;
            let taken = (piece.len - skipped).min(left);
            if taken > 0 {
                left -= taken;
                let addr = GuestAddress(piece.addr.0 + u64::from(skipped));
                part.add(Buffer { addr, len: taken });
            }
        }
        part
    }

    /// Copies the bytes from `at` on into `to`. Returns how many there were.
    pub(crate) fn read(&self, ram: &GuestRam, at: u32, to: &mut [u8]) -> Result<usize, Violation> {
        let most = u32::try_from(to.len()).unwrap_or(u32::MAX);
        let mut done = 0;
        for piece in self.part(at, most).pieces {
            let end = done + piece.len as usize;
            ram.read_slice(&mut to[done..end], piece.addr)?;
            done = end;
        }
        Ok(done)
    }

    /// Copies `from` to the bytes from `at` on and marks them dirty. Returns how many bytes fitted.
    pub(crate) fn write(&self, ram: &GuestRam, at: u32, from: &[u8]) -> Result<usize, Violation> {
        let most = u32::try_from(from.len()).unwrap_or(u32::MAX);
        let mut done = 0;
        for piece in self.part(at, most).pieces {
            let end = done + piece.len as usize;
            ram.write_slice(&from[done..end], piece.addr)?;
            done = end;
        }
        Ok(done)
    }

    /// Marks all pieces dirty after a write that bypassed the trees, such as the kernel's.
    pub(crate) fn mark_dirty(&self, ram: &GuestRam) {
        for piece in &self.pieces {
            // Cannot fail: the pieces were checked when the chain was read, and guest memory does
            // not shrink.
            if let Ok(slice) = ram.get_slice(piece.addr, piece.len as usize) {
                slice.bitmap().mark_dirty(0, slice.len());
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn buffers(pieces: &[(u64, u32)]) -> Buffers {
        let mut all = Buffers::default();
        for &(addr, len) in pieces {
            assert!(all.add(Buffer { addr: GuestAddress(addr), len }));
        }
        all
    }

    #[test]
    fn part_has_exactly_its_bytes() {
        let all = buffers(&[(0x1000, 10), (0x5000, 1), (0x3000, 100)]);
        assert_eq!(all.part(0, 111), all);
        assert_eq!(all.part(0, u32::MAX), all);
        assert_eq!(all.part(9, 3), buffers(&[(0x1009, 1), (0x5000, 1), (0x3000, 1)]));
        assert_eq!(all.part(11, 5), buffers(&[(0x3000, 5)]));
        assert_eq!(all.part(110, 9), buffers(&[(0x3063, 1)]));
        assert_eq!(all.part(111, 1), Buffers::default());
    }
}
