//! A VM before it has vCPUs. A separate thread creates it ([`EarlyVm`]) while the caller finds out
//! which guest the VM is for. The VM then gets its memory, and only then its interrupt controllers
//! ([`EmptyVm::finish`]).
//!
//! That order saves 2 to 8 ms on a kernel clock of 250 Hz. Adding memory to a VM waits for an SRCU
//! grace period, and so does switching its dirty logging on. KVM requests an expedited one, which
//! ends immediately, unless a normal grace period has already begun: that one ends at the next tick
//! of the kernel's clock. Registering the interrupt controllers starts normal grace periods. The
//! rows "lazy" of `cargo bench -p tests --bench restore` and "Driftline" of `cargo bench -p
//! driftline-cli --bench boot` include the order's effect. The first row of `cargo bench -p tests
//! --bench firecracker` includes that of dirty logging: 9.8 ms, and 15.2 ms if it is switched on by
//! the first subscription.

use std::sync::Arc;
use std::thread::{Builder, JoinHandle};

use kvm_bindings::*;
use kvm_ioctls::{Kvm, VmFd};

use super::error::step;
use super::{MachineError, dirty_tracking};
use crate::config::MachineConfig;
use crate::kvm::{self, Capabilities, KvmVm};
use crate::memory::{HOLE_START, Memory};

/// Address at which KVM keeps a page, followed by the three of [`TSS`], on some processors. Both
/// are in the hole below 4 GiB, below the addresses of firmware.
const IDENTITY_MAP: u64 = 0xfffb_c000;
const TSS: u64 = IDENTITY_MAP + 0x1000;
const _: () = assert!(IDENTITY_MAP > HOLE_START && TSS + 0x3000 <= 1 << 32);

/// KVM, its capabilities, and a VM without memory and vCPUs.
pub(super) struct EmptyVm {
    pub(super) kvm: Kvm,
    pub(super) capabilities: Capabilities,
    pub(super) supported: CpuId,
    fd: VmFd,
}

/// A VM with memory and interrupt controllers, and what its vCPUs are created with.
pub(super) struct BuiltVm {
    pub(super) vm: KvmVm,
    pub(super) kvm: Kvm,
    pub(super) capabilities: Capabilities,
    /// The CPUID that KVM supports.
    pub(super) supported: CpuId,
}

impl EmptyVm {
    pub(super) fn new() -> Result<Self, MachineError> {
        let (kvm, capabilities) = kvm::open()?;
        let supported = kvm.get_supported_cpuid(KVM_MAX_CPUID_ENTRIES);
        let supported = supported.map_err(MachineError::system("KVM_GET_SUPPORTED_CPUID"))?;
        let fd = loop {
            match kvm.create_vm() {
                // A signal stopped the thread for a moment: a terminal or a debugger.
                Err(e) if e.errno() == libc::EINTR => {}
                made => break made.map_err(MachineError::system("KVM_CREATE_VM"))?,
            }
        };
        Ok(Self { kvm, capabilities, supported, fd })
    }

    /// Adds memory, its dirty tracking, interrupt controllers and timer to the VM, in the fastest
    /// order. If the guest is `tracked` from its start, dirty logging is on from now on.
    pub(super) fn finish(
        self,
        memory: &Arc<Memory>,
        config: &MachineConfig,
        tracked: bool,
    ) -> Result<BuiltVm, MachineError> {
        let Self { kvm, capabilities, supported, fd } = self;
        step("memory slots")?;
        let vm = KvmVm::new(fd, memory.clone());
        let vm = vm.map_err(MachineError::system("giving the guest its memory"))?;
        step("tracking mode")?;
        dirty_tracking::enable(&vm, &capabilities, config, tracked)?;
        let fd = vm.fd();
        step("interrupt controllers")?;
        if capabilities.has(KVM_CAP_SET_IDENTITY_MAP_ADDR) {
            let set = fd.set_identity_map_address(IDENTITY_MAP);
            set.map_err(MachineError::system("KVM_SET_IDENTITY_MAP_ADDR"))?;
        }
        fd.set_tss_address(TSS as usize).map_err(MachineError::system("KVM_SET_TSS_ADDR"))?;
        fd.create_irq_chip().map_err(MachineError::system("KVM_CREATE_IRQCHIP"))?;
        let pit = kvm_pit_config { flags: KVM_PIT_SPEAKER_DUMMY, ..Default::default() };
        fd.create_pit2(pit).map_err(MachineError::system("KVM_CREATE_PIT2"))?;
        Ok(BuiltVm { vm, kvm, capabilities, supported })
    }
}

/// A VM that another thread creates while the caller finds out which guest the VM is for. That
/// thread has the same permissions as main, ends before the guest runs, and touches no guest data.
///
/// ```
/// # use driftline_machine::machine::EarlyVm;
/// let early = EarlyVm::begin();
/// // .. read a store ..
/// drop(early); // not used: waits for the thread, a few milliseconds
/// ```
#[derive(Debug)]
pub struct EarlyVm(Option<JoinHandle<Result<EmptyVm, MachineError>>>);

impl EarlyVm {
    /// Starts the creation. Never fails: an error is returned to the caller that builds a machine
    /// in this VM.
    pub fn begin() -> Self {
        let thread = Builder::new().name("early-vm".into());
        let making = move || {
            crate::signals::block();
            EmptyVm::new()
        };
        Self(thread.spawn(making).ok())
    }

    pub(super) fn wait(mut self) -> Result<EmptyVm, MachineError> {
        match self.0.take().map(JoinHandle::join) {
            Some(Ok(made)) => made,
            // The thread could not be started, or it panicked: create the VM here.
            Some(Err(_)) | None => EmptyVm::new(),
        }
    }
}

impl Drop for EarlyVm {
    fn drop(&mut self) {
        // A failed build leaves neither the thread nor its VM behind.
        let _ = self.0.take().map(JoinHandle::join);
    }
}

#[cfg(test)]
mod tests {
    use driftline_dirty_tracker::{PAGE_SIZE, Slot, SlotId};

    use super::*;
    use crate::config::BackendKind;
    use crate::memory::MemoryOptions;
    use crate::sources::{BitmapSource, DirtySource};
    use crate::testing::{kvm_or_skip, payload_config};
    use crate::tracking::TrackingMode;

    /// Register by which a guest asks KVM for the wall clock (`MSR_KVM_WALL_CLOCK_NEW`).
    const WALL_CLOCK: u32 = 0x4b56_4d00;

    /// Returns a VM with sparse memory.
    fn vm(bytes: u64, tracking: TrackingMode, tracked: bool) -> KvmVm {
        let config = MachineConfig { tracking, ..payload_config(BackendKind::Kvm) };
        let memory = Arc::new(Memory::sparse(bytes, &MemoryOptions::default()).unwrap());
        EmptyVm::new().unwrap().finish(&memory, &config, tracked).unwrap().vm
    }

    #[test]
    fn tracked_vm_logs_before_it_has_vcpus() {
        if !kvm_or_skip("tracked_vm_logs_before_it_has_vcpus") {
            return;
        }
        for tracked in [false, true] {
            let vm = vm(16 << 20, TrackingMode::DirtyBitmap, tracked);
            let mut bitmap = [0; 64];
            // KVM has no log of a slot that it does not log.
            assert_eq!(vm.get_dirty_log(SlotId(0), &mut bitmap).is_ok(), tracked);
            assert_eq!(vm.take_early_logging(), tracked);
            assert!(!vm.take_early_logging(), "it is told once");
            vm.log_early().unwrap();
            vm.set_dirty_logging(false).unwrap();
            assert!(!vm.take_early_logging(), "it was off meanwhile");
        }
    }

    #[test]
    fn writes_are_logged_in_their_slot_and_part() {
        if !kvm_or_skip("writes_are_logged_in_their_slot_and_part") {
            return;
        }
        let vm = vm(6 << 30, TrackingMode::DirtyBitmapManual, true);
        let part_words = vm.parts().words();
        let slots: Vec<Slot> = vm.memory().layout().slots().copied().collect();
        let vcpu = vm.fd().create_vcpu(0).unwrap();
        let words = |frames: u64| usize::try_from(frames / 64).unwrap();
        for slot in &slots {
            let last_part = vm.parts().of(slot).last().unwrap();
            assert_ne!(last_part.base, slot.base, "the slot has several parts");
            for frame in [slot.base.0 + 1, last_part.base.0 + 70, slot.run().end().0 - 1] {
                for slot in &slots {
                    let all = vec![u64::MAX; words(slot.frames)];
                    for (nth, bits) in (0u64..).zip(all.chunks(words(64 * part_words))) {
                        vm.clear_dirty_log(slot.id, nth * part_words, bits).unwrap();
                    }
                }
                // KVM itself writes the wall clock to the address in this register, and logs it.
                let data = frame * PAGE_SIZE;
                let entry = kvm_msr_entry { index: WALL_CLOCK, data, ..Default::default() };
                assert_eq!(vcpu.set_msrs(&Msrs::from_entries(&[entry]).unwrap()).unwrap(), 1);
                let logged = slots.iter().flat_map(|slot| {
                    let mut bitmap = vec![u64::MAX; words(slot.frames)];
                    vm.get_dirty_log(slot.id, &mut bitmap).unwrap();
                    let is_set = move |at: &u64| bitmap[words(*at)] >> (at % 64) & 1 == 1;
                    (0..slot.frames).filter(is_set).map(|at| slot.base.0 + at)
                });
                assert_eq!(logged.collect::<Vec<_>>(), [frame], "{slot:?}");
            }
        }
        let across = vm.clear_dirty_log(slots[0].id, part_words - 1, &[1, 1]);
        assert_eq!(across.unwrap_err().kind(), std::io::ErrorKind::InvalidInput);
    }

    #[test]
    fn bitmap_that_cannot_be_read_marks_all_memory() {
        if !kvm_or_skip("bitmap_that_cannot_be_read_marks_all_memory") {
            return;
        }
        let vm = Arc::new(vm(64 << 20, TrackingMode::DirtyBitmap, true));
        let memory = vm.memory();
        let mut source = BitmapSource::new(vm.clone());
        let mut subscription = memory.tracker().subscribe("test").unwrap();
        source.start().unwrap();
        source.collect(memory.tracker()).unwrap();
        subscription.drain().commit();
        // KVM has no log to read.
        vm.set_dirty_logging(false).unwrap();
        source.collect(memory.tracker()).unwrap_err();
        assert_eq!(subscription.drain().frames(), memory.layout().frames());
    }
}
