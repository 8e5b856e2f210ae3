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
    use driftline_dirty_tracker::{PAGE_SIZE, SlotId};

    /// Register by which a guest asks KVM for the wall clock.
    const MSR_KVM_WALL_CLOCK_NEW: u32 = 0x4b56_4d00;

    use super::*;
    use crate::config::BackendKind;
    use crate::memory::MemoryOptions;
    use crate::testing::{kvm_or_skip, payload_config};
    use crate::tracking::TrackingMode;

    #[test]
    fn tracked_vm_logs_before_it_has_vcpus() {
        if !kvm_or_skip("tracked_vm_logs_before_it_has_vcpus") {
            return;
        }
        let tracking = TrackingMode::DirtyBitmap;
        let config = MachineConfig { tracking, ..payload_config(BackendKind::Kvm) };
        for tracked in [false, true] {
            let memory = Arc::new(Memory::new(16 << 20, &MemoryOptions::default()).unwrap());
            let built = EmptyVm::new().unwrap().finish(&memory, &config, tracked).unwrap();
            let mut bitmap = [0; 64];
            // KVM has no log of a slot that it does not log.
            assert_eq!(built.vm.get_dirty_log(SlotId(0), &mut bitmap).is_ok(), tracked);
            assert_eq!(built.vm.take_early_logging(), tracked);
            assert!(!built.vm.take_early_logging(), "it is told once");
            built.vm.log_early().unwrap();
            built.vm.set_dirty_logging(false).unwrap();
            assert!(!built.vm.take_early_logging(), "it was off meanwhile");
        }
    }

    #[test]
    fn writes_are_logged_in_their_slot_and_part() {
        if !kvm_or_skip("writes_are_logged_in_their_slot_and_part") {
            return;
        }
        let manual = TrackingMode::DirtyBitmapManual;
        let config = MachineConfig { tracking: manual, ..payload_config(BackendKind::Kvm) };
        let memory = Memory::sparse(4 << 30, &MemoryOptions::default()).unwrap();
        let built = EmptyVm::new().unwrap().finish(&Arc::new(memory), &config, true).unwrap();
        let vm = &built.vm;
        let (words, part) = (1 << 14, vm.parts().frames());
        let mut bitmap = vec![u64::MAX; words];
        // KVM writes the wall clock to the address in this register, as a vCPU's write.
        let vcpu = vm.fd().create_vcpu(0).unwrap();
        let clear_all = |slot, words: usize| {
            let chunk = usize::try_from(part / 64).unwrap();
            let all = vec![u64::MAX; words];
            for (nth, bits) in all.chunks(chunk).enumerate() {
                vm.clear_dirty_log(slot, (nth * chunk) as u64, bits).unwrap();
            }
        };
        for (slot, words, base, frame) in [
            (SlotId(0), 3 << 12, 0, 2 * part + 5),
            (SlotId(0), 3 << 12, 0, (3 << 18) - 1),
            (SlotId(1), 1 << 12, 1 << 20, 0),
            (SlotId(1), 1 << 12, 1 << 20, 3 * part + 70),
        ] {
            clear_all(SlotId(0), 3 << 12);
            clear_all(SlotId(1), 1 << 12);
            let entry = kvm_bindings::kvm_msr_entry {
                index: MSR_KVM_WALL_CLOCK_NEW,
                data: (base + frame) * PAGE_SIZE,
                ..Default::default()
            };
            let msrs = kvm_bindings::Msrs::from_entries(&[entry]).unwrap();
            assert_eq!(vcpu.set_msrs(&msrs).unwrap(), 1);
            vm.get_dirty_log(slot, &mut bitmap[..words]).unwrap();
            let set: Vec<u64> = (0..words as u64 * 64)
                .filter(|at| bitmap[(at / 64) as usize] >> (at % 64) & 1 == 1)
                .collect();
            assert_eq!(set, [frame], "slot {slot:?}");
            let other = SlotId(1 - slot.0);
            vm.get_dirty_log(other, &mut bitmap).unwrap();
            let other_words = if other == SlotId(0) { 3 << 12 } else { 1 << 12 };
            assert!(bitmap[..other_words].iter().all(|word| *word == 0));
        }
        let across = vm.clear_dirty_log(SlotId(0), part / 64 - 1, &[1, 1]);
        assert_eq!(across.unwrap_err().kind(), std::io::ErrorKind::InvalidInput);
    }
}
