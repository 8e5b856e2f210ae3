//! What of a VM can be made before, or beside, the rest of its machine: the VM itself, which depends on no configuration, by a
//! thread of its own ([`EarlyVm`]); and its memory slots ([`Slots`]). Where the kernel shadows page tables it fills tables of
//! 8 bytes a frame and more for those: milliseconds for a GiB, on a host whose memory is slow to come.
//!
//! Both threads have what main may do, and end before the guest runs. They touch nothing of its.

use std::io;
use std::sync::Arc;
use std::thread::{Builder, JoinHandle};

use kvm_bindings::*;
use kvm_ioctls::{Kvm, VmFd};

use super::MachineError;
use crate::kvm::{self, Capabilities, KvmVm, block_signals};
use crate::memory::HOLE_START;

/// Where KVM keeps a page and three pages of its own on some processors: in the hole, below the
/// place of a firmware.
const IDENTITY_MAP: u64 = 0xfffb_c000;
const TSS: u64 = IDENTITY_MAP + 0x1000;
const _: () = assert!(IDENTITY_MAP > HOLE_START && TSS + 0x3000 <= 1 << 32);

/// KVM, what it can do, and a VM with interrupt controllers and timer, but without memory and processors.
pub(super) struct Blank {
    pub(super) kvm: Kvm,
    pub(super) capabilities: Capabilities,
    pub(super) supported: CpuId,
    pub(super) fd: VmFd,
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
        if capabilities.has(KVM_CAP_SET_IDENTITY_MAP_ADDR) {
            let set = fd.set_identity_map_address(IDENTITY_MAP);
            set.map_err(MachineError::system("KVM_SET_IDENTITY_MAP_ADDR"))?;
        }
        fd.set_tss_address(TSS as usize).map_err(MachineError::system("KVM_SET_TSS_ADDR"))?;
        fd.create_irq_chip().map_err(MachineError::system("KVM_CREATE_IRQCHIP"))?;
        let pit = kvm_pit_config { flags: KVM_PIT_SPEAKER_DUMMY, ..Default::default() };
        fd.create_pit2(pit).map_err(MachineError::system("KVM_CREATE_PIT2"))?;
        Ok(Self { kvm, capabilities, supported, fd })
    }
}

/// A VM that another thread makes, while this one finds out what guest it is for.
///
/// ```
/// # use vmm::machine::EarlyVm;
/// let early = EarlyVm::begin();
/// // .. read a store ..
/// drop(early); // no guest came of it
/// ```
#[derive(Debug)]
pub struct EarlyVm(Option<JoinHandle<Result<Blank, MachineError>>>);

impl EarlyVm {
    /// Begins to make one. Fails never: what stands against it is said to whoever builds a machine around it.
    pub fn begin() -> Self {
        let thread = Builder::new().name("early-vm".into());
        let making = move || {
            block_signals();
            Blank::new()
        };
        Self(thread.spawn(making).ok())
    }

    pub(super) fn wait(self) -> Result<Blank, MachineError> {
        match self.0.map(JoinHandle::join) {
            Some(Ok(made)) => made,
            // There was no thread for it, or none is left.
            Some(Err(_)) | None => Blank::new(),
        }
    }
}

/// Memory that is being given to a VM by another thread. Dropping it waits for that, too: what is built no further leaves nothing behind.
#[must_use = "nothing may use the VM's memory before this has ended"]
pub(super) struct Slots(Option<JoinHandle<io::Result<()>>>);

impl Slots {
    /// Begins to give `vm` its memory.
    pub(super) fn give(vm: &Arc<KvmVm>) -> io::Result<Self> {
        let to = vm.clone();
        let thread = Builder::new().name("memory-slots".into());
        let giving = move || {
            block_signals();
            to.give_memory()
        };
        match thread.spawn(giving) {
            Ok(giving) => Ok(Self(Some(giving))),
            Err(_) => vm.give_memory().map(|()| Self(None)),
        }
    }

    /// Returns once it has all.
    pub(super) fn wait(mut self) -> Result<(), MachineError> {
        self.join().map_err(MachineError::system("giving the guest its memory"))
    }

    fn join(&mut self) -> io::Result<()> {
        let Some(giving) = self.0.take() else { return Ok(()) };
        giving.join().unwrap_or_else(|_| Err(io::Error::other("its thread panicked")))
    }
}

impl Drop for Slots {
    fn drop(&mut self) {
        if let Err(e) = self.join() {
            tracing::debug!("a machine that is not built was not given its memory either: {e}");
        }
    }
}
