//! The VM before it has processors: made by a thread of its own while others find out what guest it
//! is for ([`EarlyVm`]), then given its memory, and only then its interrupt controllers
//! ([`Blank::furnish`]).
//!
//! That order is worth milliseconds. Whoever gives a VM memory waits for a grace period of its
//! readers (SRCU), which KVM asks for in a hurry and has at once, unless one is under way that
//! nobody was in a hurry for: that one waits for the next tick of the kernel's clock, and what
//! registers the controllers begins some.

use std::sync::Arc;
use std::thread::{Builder, JoinHandle};

use kvm_bindings::*;
use kvm_ioctls::{Kvm, VmFd};

use super::MachineError;
use super::error::step;
use crate::kvm::{self, Capabilities, KvmVm};
use crate::memory::{HOLE_START, Memory};

/// Where KVM keeps a page and three pages of its own on some processors: in the hole, below the
/// place of a firmware.
const IDENTITY_MAP: u64 = 0xfffb_c000;
const TSS: u64 = IDENTITY_MAP + 0x1000;
const _: () = assert!(IDENTITY_MAP > HOLE_START && TSS + 0x3000 <= 1 << 32);

/// KVM, what it can do, and a VM that has nothing.
pub(super) struct Blank {
    pub(super) kvm: Kvm,
    pub(super) capabilities: Capabilities,
    pub(super) supported: CpuId,
    fd: VmFd,
}

impl Blank {
    pub(super) fn new() -> Result<Self, MachineError> {
        let (kvm, capabilities) = kvm::open()?;
        let supported = kvm.get_supported_cpuid(KVM_MAX_CPUID_ENTRIES);
        let supported = supported.map_err(MachineError::system("KVM_GET_SUPPORTED_CPUID"))?;
        let fd = loop {
            match kvm.create_vm() {
                // A thread that was stopped for a moment, by a terminal or a debugger.
                Err(e) if e.errno() == libc::EINTR => {}
                made => break made.map_err(MachineError::system("KVM_CREATE_VM"))?,
            }
        };
        Ok(Self { kvm, capabilities, supported, fd })
    }

    /// The VM with its memory, interrupt controllers and timer, in the order that takes least, and
    /// what is left.
    pub(super) fn furnish(
        self,
        memory: &Arc<Memory>,
    ) -> Result<(KvmVm, Kvm, Capabilities, CpuId), MachineError> {
        let Self { kvm, capabilities, supported, fd } = self;
        step("memory slots")?;
        let vm = KvmVm::new(fd, memory.clone());
        let vm = vm.map_err(MachineError::system("giving the guest its memory"))?;
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
        Ok((vm, kvm, capabilities, supported))
    }
}

/// A VM that another thread makes, while this one finds out what guest it is for. That thread has
/// what main may do, ends before the guest runs, and touches nothing of its.
///
/// ```
/// # use driftline_machine::machine::EarlyVm;
/// let early = EarlyVm::begin();
/// // .. read a store ..
/// drop(early); // no guest came of it: waits for the thread, a few milliseconds
/// ```
#[derive(Debug)]
pub struct EarlyVm(Option<JoinHandle<Result<Blank, MachineError>>>);

impl EarlyVm {
    /// Begins to make one. Fails never: what stands against it is said to whoever builds a machine
    /// around it.
    pub fn begin() -> Self {
        let thread = Builder::new().name("early-vm".into());
        let making = move || {
            crate::signals::block();
            Blank::new()
        };
        Self(thread.spawn(making).ok())
    }

    pub(super) fn wait(mut self) -> Result<Blank, MachineError> {
        match self.0.take().map(JoinHandle::join) {
            Some(Ok(made)) => made,
            // There was no thread for it, or none is left.
            Some(Err(_)) | None => Blank::new(),
        }
    }
}

impl Drop for EarlyVm {
    fn drop(&mut self) {
        // A failed build leaves no thread behind, nor the VM that it makes.
        let _ = self.0.take().map(JoinHandle::join);
    }
}
