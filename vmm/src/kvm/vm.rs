//! The VM file descriptor together with the memory that it maps, and the dirty logging ioctls.

use std::io;
use std::sync::Arc;

use dirty_tracker::{Slot, SlotId};
use kvm_bindings::*;
use kvm_ioctls::VmFd;
use vm_memory::{GuestAddress, GuestMemoryBackend};
use vmm_sys_util::ioctl::{ioctl, ioctl_with_ref};
use vmm_sys_util::{ioctl_io_nr, ioctl_iow_nr};

use crate::memory::Memory;

ioctl_iow_nr!(KVM_GET_DIRTY_LOG, KVMIO, 0x42, kvm_dirty_log);
ioctl_io_nr!(KVM_RESET_DIRTY_RINGS, KVMIO, 0xc7);

/// A VM and its memory. Everything that can run a vCPU holds it, so that the memory outlives them.
#[derive(Debug)]
pub struct KvmVm {
    fd: VmFd,
    /// After `fd`: unmapped only once the VM is gone.
    memory: Arc<Memory>,
}

impl KvmVm {
    /// Gives `memory` to the VM, without dirty logging.
    pub fn new(fd: VmFd, memory: Arc<Memory>) -> io::Result<Self> {
        let vm = Self { fd, memory };
        vm.set_dirty_logging(false)?;
        Ok(vm)
    }

    /// The file descriptor, for what kvm-ioctls wraps.
    pub fn fd(&self) -> &VmFd {
        &self.fd
    }

    /// The memory.
    pub fn memory(&self) -> &Arc<Memory> {
        &self.memory
    }

    /// Switches dirty logging of all slots. Switching it on write-protects all memory, also when
    /// it was on and has been off for a moment.
    pub fn set_dirty_logging(&self, on: bool) -> io::Result<()> {
        self.memory.layout().slots().try_for_each(|slot| self.set_slot(slot, on))
    }

    fn set_slot(&self, slot: &Slot, log: bool) -> io::Result<()> {
        let gpa = slot.base.gpa();
        let host = self.memory.ram().get_host_address(GuestAddress(gpa));
        let region = kvm_userspace_memory_region {
            slot: slot.id.0,
            flags: if log { KVM_MEM_LOG_DIRTY_PAGES } else { 0 },
            guest_phys_addr: gpa,
            memory_size: slot.run().bytes(),
            userspace_addr: host.map_err(io::Error::other)? as u64,
        };
        // SAFETY: slots are regions of the mapping that `memory` owns, which lives as long as the
        // VM, and they do not overlap: the layout says so.
        unsafe { self.fd.set_user_memory_region(region) }.map_err(from_errno)
    }

    /// Reprotects the frames of all entries marked RESET in all rings; how many entries they were.
    /// May stop early, at a signal.
    pub fn reset_dirty_rings(&self) -> io::Result<u32> {
        // SAFETY: the ioctl takes no argument and touches only the kernel's side of the rings.
        let ret = unsafe { ioctl(&self.fd, KVM_RESET_DIRTY_RINGS()) };
        u32::try_from(ret).map_err(|_| io::Error::last_os_error())
    }

    /// Takes the dirty bitmap of `slot` into `bitmap` and reprotects its frames. `bitmap` must have
    /// room for the slot.
    pub fn get_dirty_log(&self, slot: SlotId, bitmap: &mut [u64]) -> io::Result<()> {
        let found = self.memory.layout().slots().find(|s| s.id == slot);
        if found.is_none_or(|s| s.frames.div_ceil(64) > bitmap.len() as u64) {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        let dirty_bitmap = bitmap.as_mut_ptr().cast();
        let log = kvm_dirty_log {
            slot: slot.0,
            padding1: 0,
            __bindgen_anon_1: kvm_dirty_log__bindgen_ty_1 { dirty_bitmap },
        };
        // SAFETY: the kernel writes one bit a frame, rounded up to words, into `bitmap`, which was
        // found to be large enough and is ours alone.
        let ret = unsafe { ioctl_with_ref(&self.fd, KVM_GET_DIRTY_LOG(), &log) };
        if ret == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
    }

    /// Gives each vCPU made from now on a dirty ring of `entries`, through capability `cap`.
    pub fn enable_dirty_ring(&self, cap: u32, entries: u32) -> io::Result<()> {
        let mut enable = kvm_enable_cap { cap, ..Default::default() };
        enable.args[0] = u64::from(entries) * size_of::<kvm_dirty_gfn>() as u64;
        self.fd.enable_cap(&enable).map_err(from_errno)
    }
}

fn from_errno(e: kvm_ioctls::Error) -> io::Error {
    io::Error::from_raw_os_error(e.errno())
}
