//! The VM file descriptor together with the memory that it maps, and the dirty logging ioctls.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use driftline_dirty_tracker::ring::SlotParts;
use driftline_dirty_tracker::{PAGE_SIZE, Slot, SlotId};
use kvm_bindings::*;
use kvm_ioctls::VmFd;
use vm_memory::{GuestAddress, GuestMemoryBackend};
use vmm_sys_util::ioctl::{ioctl, ioctl_with_mut_ref, ioctl_with_ref};
use vmm_sys_util::{ioctl_io_nr, ioctl_iow_nr, ioctl_iowr_nr};

use crate::memory::Memory;

ioctl_iow_nr!(KVM_GET_DIRTY_LOG, KVMIO, 0x42, kvm_dirty_log);
ioctl_iowr_nr!(KVM_CLEAR_DIRTY_LOG, KVMIO, 0xc0, kvm_clear_dirty_log);
ioctl_io_nr!(KVM_RESET_DIRTY_RINGS, KVMIO, 0xc7);

/// Size of the parts in which slots of up to 128 GiB are registered; larger slots have 64 parts. A
/// call for such a part takes 1 ms without hardware virtualization, and one for 13 GiB takes 6 to
/// 7 ms. The row "16 GiB, sparse, `upgrade`" of `cargo bench -p tests --bench local` has a longest
/// gap of 2.1 to 2.6 ms with parts and 2.3 to 3.4 ms without (four runs, 30 November 2026, 2 cores
/// of a Xeon). The guests of tests have a few parts.
const PART_BYTES: u64 = if IS_TEST { 16 << 20 } else { 2 << 30 };
const IS_TEST: bool = cfg!(all(debug_assertions, any(test, feature = "testing")));

/// A VM and its memory. Every object that can run a vCPU holds a reference to it, so that the
/// memory outlives them.
#[derive(Debug)]
pub struct KvmVm {
    fd: VmFd,
    /// Declared after `fd`, so that the memory is unmapped only after the VM is closed.
    memory: Arc<Memory>,
    /// The parts in which the memory's slots are registered.
    parts: SlotParts,
    /// Whether logging is on since before there were vCPUs, and no source has started yet.
    logs_early: AtomicBool,
}

impl KvmVm {
    /// Registers `memory` with the VM, with dirty logging off.
    pub fn new(fd: VmFd, memory: Arc<Memory>) -> io::Result<Self> {
        let parts = SlotParts::new(memory.layout(), PART_BYTES / PAGE_SIZE);
        let vm = Self { fd, memory, parts, logs_early: AtomicBool::new(false) };
        vm.set_dirty_logging(false)?;
        Ok(vm)
    }

    /// Returns the file descriptor, for operations that kvm-ioctls wraps.
    pub fn fd(&self) -> &VmFd {
        &self.fd
    }

    /// Returns the VM's memory.
    pub fn memory(&self) -> &Arc<Memory> {
        &self.memory
    }

    /// Returns the parts in which the memory's slots are registered with KVM.
    pub(crate) fn parts(&self) -> SlotParts {
        self.parts
    }

    /// Raises and lowers the interrupt line `irq`, immediately.
    ///
    /// # Errors
    ///
    /// The VM has no interrupt controllers.
    pub(crate) fn pulse_irq(&self, irq: u32) -> Result<(), kvm_ioctls::Error> {
        self.fd.set_irq_line(irq, true)?;
        self.fd.set_irq_line(irq, false)
    }

    /// Switches dirty logging of all slots on or off. Switching it on write-protects all memory,
    /// even if it was off only for a moment.
    pub fn set_dirty_logging(&self, on: bool) -> io::Result<()> {
        self.logs_early.store(false, Ordering::Relaxed);
        let mut parts = self.memory.layout().slots().flat_map(|slot| self.parts.of(slot));
        parts.try_for_each(|part| self.set_part(&part, on))
    }

    /// Switches dirty logging of all slots on before there are vCPUs.
    pub(crate) fn log_early(&self) -> io::Result<()> {
        self.set_dirty_logging(true)?;
        self.logs_early.store(true, Ordering::Relaxed);
        Ok(())
    }

    /// Returns, once, whether logging is on since before there were vCPUs. Then KVM has missed no
    /// write, and the log may also have what the set-up of vCPUs has written.
    pub(crate) fn take_early_logging(&self) -> bool {
        self.logs_early.swap(false, Ordering::Relaxed)
    }

    fn set_part(&self, part: &Slot, log: bool) -> io::Result<()> {
        let gpa = part.base.gpa();
        let host = self.memory.ram().get_host_address(GuestAddress(gpa));
        let region = kvm_userspace_memory_region {
            slot: part.id.0,
            flags: if log { KVM_MEM_LOG_DIRTY_PAGES } else { 0 },
            guest_phys_addr: gpa,
            memory_size: part.run().bytes(),
            userspace_addr: host.map_err(io::Error::other)? as u64,
        };
        // SAFETY: parts are regions of the mapping that `memory` owns, which lives as long as the
        // VM. The layout guarantees that they do not overlap.
        unsafe { self.fd.set_user_memory_region(region) }.map_err(io::Error::from)
    }

    /// Write-protects the frames of all entries marked RESET in all rings and returns the number of
    /// these entries. A signal may make it stop early.
    pub fn reset_dirty_rings(&self) -> io::Result<u32> {
        // SAFETY: the ioctl takes no argument and touches only the kernel's side of the rings.
        let ret = unsafe { ioctl(&self.fd, KVM_RESET_DIRTY_RINGS()) };
        u32::try_from(ret).map_err(|_| io::Error::last_os_error())
    }

    /// Reads the dirty bitmap of `slot` into `bitmap`. Also write-protects its frames, unless
    /// [`enable_manual_dirty_log`](Self::enable_manual_dirty_log) has made that a separate call.
    ///
    /// # Errors
    ///
    /// Fails if `bitmap` is too small for the slot, or if the slot does not exist. After another
    /// error KVM may have forgotten what it could not write: count all memory as dirty.
    pub fn get_dirty_log(&self, slot: SlotId, bitmap: &mut [u64]) -> io::Result<()> {
        let found = self.memory.layout().slots().find(|s| s.id == slot);
        let Some(slot) = found.filter(|s| s.frames.div_ceil(64) <= bitmap.len() as u64) else {
            return Err(io::ErrorKind::InvalidInput.into());
        };
        // Parts begin at whole words, so the bitmap has a chunk for each.
        let words = usize::try_from(self.parts.words()).map_err(io::Error::other)?;
        let mut parts = self.parts.of(slot).zip(bitmap.chunks_mut(words));
        parts.try_for_each(|(part, bitmap)| self.get_part_log(&part, bitmap))
    }

    /// As [`get_dirty_log`](Self::get_dirty_log), of a part.
    fn get_part_log(&self, part: &Slot, bitmap: &mut [u64]) -> io::Result<()> {
        if part.frames.div_ceil(64) > bitmap.len() as u64 {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        let dirty_bitmap = bitmap.as_mut_ptr().cast();
        let log = kvm_dirty_log {
            slot: part.id.0,
            padding1: 0,
            __bindgen_anon_1: kvm_dirty_log__bindgen_ty_1 { dirty_bitmap },
        };
        // SAFETY: the kernel writes one bit per frame, rounded up to words, into `bitmap`, which
        // was checked to be large enough and is borrowed exclusively.
        let ret = unsafe { ioctl_with_ref(&self.fd, KVM_GET_DIRTY_LOG(), &log) };
        if ret == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
    }

    /// Clears the bits that are set in `bitmap` from KVM's own bitmap of `slot` and write-protects
    /// their frames. The first bit of `bitmap` is frame `64 * word` of the slot. Bits beyond the
    /// slot's end are ignored.
    ///
    /// # Errors
    ///
    /// Fails if the slot does not exist, or if the words do not all lie in one of its
    /// [parts](Self::parts).
    pub fn clear_dirty_log(&self, slot: SlotId, word: u64, bitmap: &[u64]) -> io::Result<()> {
        let found = self.memory.layout().slots().find(|s| s.id == slot);
        let part_words = self.parts.words();
        let number = usize::try_from(word / part_words).unwrap_or(usize::MAX);
        let part = found.and_then(|s| self.parts.of(s).nth(number));
        let word = word % part_words;
        let end = word.checked_add(bitmap.len() as u64);
        let Some((part, end)) =
            part.zip(end).filter(|(p, end)| *end <= p.frames.div_ceil(64) && !bitmap.is_empty())
        else {
            return Err(io::ErrorKind::InvalidInput.into());
        };
        let first_page = word * 64;
        // Whole words, or fewer pages at the part's end.
        let pages = (end * 64).min(part.frames) - first_page;
        let dirty_bitmap = bitmap.as_ptr().cast_mut().cast();
        let mut log = kvm_clear_dirty_log {
            slot: part.id.0,
            num_pages: pages.try_into().map_err(io::Error::other)?,
            first_page,
            __bindgen_anon_1: kvm_clear_dirty_log__bindgen_ty_1 { dirty_bitmap },
        };
        // SAFETY: the kernel reads one bit per page, rounded up to words, from `bitmap`, which is
        // that long.
        let ret = unsafe { ioctl_with_mut_ref(&self.fd, KVM_CLEAR_DIRTY_LOG(), &mut log) };
        if ret == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
    }

    /// Separates write-protecting from reading bitmaps: from now on reading a bitmap write-protects
    /// nothing. With the flag for it, a slot whose logging is switched on begins with all bits set
    /// and nothing write-protected. `flags` are those of `KVM_CAP_MANUAL_DIRTY_LOG_PROTECT2` that
    /// this KVM has.
    pub fn enable_manual_dirty_log(&self, flags: u32) -> io::Result<()> {
        let cap = KVM_CAP_MANUAL_DIRTY_LOG_PROTECT2;
        let mut enable = kvm_enable_cap { cap, ..Default::default() };
        enable.args[0] = flags.into();
        self.fd.enable_cap(&enable).map_err(io::Error::from)
    }

    /// Gives each vCPU created from now on a dirty ring of `entries` entries, through capability
    /// `cap`.
    pub fn enable_dirty_ring(&self, cap: u32, entries: u32) -> io::Result<()> {
        let mut enable = kvm_enable_cap { cap, ..Default::default() };
        enable.args[0] = u64::from(entries) * size_of::<kvm_dirty_gfn>() as u64;
        self.fd.enable_cap(&enable).map_err(io::Error::from)
    }
}
