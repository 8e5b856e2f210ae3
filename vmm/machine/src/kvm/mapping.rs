//! The memory that the kernel shares with this process for one vCPU.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::ptr::NonNull;

use kvm_ioctls::VcpuFd;
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};

/// A mapping of a vCPU's file, which keeps the vCPU alive in the kernel.
#[derive(Debug)]
pub(super) struct Mapping {
    start: NonNull<u8>,
    bytes: usize,
}

// SAFETY: the mapping belongs to the process and not to a thread. The users access it only
// atomically.
unsafe impl Send for Mapping {}
// SAFETY: as above.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Maps `bytes` bytes from `offset` on for reading and writing.
    pub(super) fn new(vcpu: &VcpuFd, bytes: usize, offset: u64) -> io::Result<Self> {
        let prot = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: the descriptor is open as long as `vcpu` is.
        let file = unsafe { BorrowedFd::borrow_raw(vcpu.as_raw_fd()) };
        let null = std::ptr::null_mut();
        // SAFETY: a fresh mapping at an address of the kernel's choice touches nothing of ours.
        let map = unsafe { mmap(null, bytes, prot, MapFlags::SHARED, file, offset) }?;
        let start = NonNull::new(map.cast()).ok_or(io::ErrorKind::AddrNotAvailable)?;
        Ok(Self { start, bytes })
    }

    /// Returns the address of the first byte, which is valid as long as self.
    pub(super) fn start(&self) -> NonNull<u8> {
        self.start
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: this struct owns the mapping, and no reference into it can exist any more.
        let _ = unsafe { munmap(self.start.as_ptr().cast(), self.bytes) };
    }
}
