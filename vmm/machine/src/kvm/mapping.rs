//! The memory that the kernel shares with this process for one vCPU.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::ptr::NonNull;
use std::sync::Arc;

use kvm_ioctls::VcpuFd;
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};

use super::vm::KvmVm;

/// A mapping of a vCPU's file, which keeps the vCPU and its VM alive in the kernel.
#[derive(Debug)]
pub(super) struct Mapping {
    start: NonNull<u8>,
    bytes: usize,
    /// Keeps guest memory mapped for as long as the kernel's VM lives. Otherwise KVM searches all
    /// frames of the guest when the memory is unmapped, and that processor runs no other thread
    /// meanwhile. The row "16 GiB, sparse" of `cargo bench -p tests --bench local` shows the effect
    /// as a longer gap.
    _vm: Arc<KvmVm>,
}

// SAFETY: the mapping belongs to the process and not to a thread. The users access it only
// atomically.
unsafe impl Send for Mapping {}
// SAFETY: as above.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Maps `bytes` bytes from `offset` on of a vCPU of `vm` for reading and writing.
    pub(super) fn new(
        vm: Arc<KvmVm>,
        vcpu: &VcpuFd,
        bytes: usize,
        offset: u64,
    ) -> io::Result<Self> {
        let prot = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: the descriptor is open as long as `vcpu` is.
        let file = unsafe { BorrowedFd::borrow_raw(vcpu.as_raw_fd()) };
        let null = std::ptr::null_mut();
        // SAFETY: a fresh mapping at an address of the kernel's choice touches nothing of ours.
        let map = unsafe { mmap(null, bytes, prot, MapFlags::SHARED, file, offset) }?;
        let start = NonNull::new(map.cast()).ok_or(io::ErrorKind::AddrNotAvailable)?;
        Ok(Self { start, bytes, _vm: vm })
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::{Memory, MemoryOptions};

    #[test]
    fn memory_stays_while_a_vcpu_is_mapped() {
        if !crate::testing::kvm_or_skip("memory_stays_while_a_vcpu_is_mapped") {
            return;
        }
        let memory = Arc::new(Memory::new(64 << 20, &MemoryOptions::default()).unwrap());
        let (kvm, _) = crate::kvm::open().unwrap();
        let vm = Arc::new(KvmVm::new(kvm.create_vm().unwrap(), memory.clone()).unwrap());
        let vcpu = vm.fd().create_vcpu(0).unwrap();
        let mapping = Mapping::new(vm, &vcpu, 4096, 0).unwrap();
        drop(vcpu);
        assert_eq!(Arc::strong_count(&memory), 2);
        drop(mapping);
        assert_eq!(Arc::strong_count(&memory), 1);
    }
}
