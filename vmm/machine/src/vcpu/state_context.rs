//! The host's properties that saving and restoring a vCPU depend on.

use kvm_bindings::{CpuId, kvm_cpuid_entry2};
use kvm_ioctls::VcpuFd;

use super::error::VcpuError;
use super::msrs;
use crate::kvm::Capabilities;

/// The host's properties that saving and restoring depend on; the same for all vCPUs.
#[derive(Debug)]
pub struct StateContext {
    capabilities: Capabilities,
    /// What the host supports, changed by the guest's template.
    supported: CpuId,
    /// MSRs that are part of a state.
    msrs: Vec<u32>,
}

impl StateContext {
    /// Creates the context for vCPUs like `vcpu`, which may have the CPUID `supported`. A state has
    /// `msrs`, which KVM lists or the guest's template changes.
    pub(crate) fn new(
        capabilities: Capabilities,
        supported: CpuId,
        msrs: &[u32],
        vcpu: &VcpuFd,
    ) -> Result<Self, VcpuError> {
        Ok(Self { capabilities, supported, msrs: msrs::saved(vcpu, msrs)? })
    }

    pub(crate) fn has(&self, capability: u32) -> bool {
        self.capabilities.has(capability)
    }

    pub(crate) fn value(&self, capability: u32) -> u32 {
        self.capabilities.value(capability).unsigned_abs()
    }

    /// Returns the size of a vCPU's XSAVE area in bytes.
    pub(super) fn xsave_bytes(&self) -> usize {
        self.capabilities.xsave_bytes()
    }

    /// Returns the CPUID entries that a state may have.
    pub(super) fn supported(&self) -> &[kvm_cpuid_entry2] {
        self.supported.as_slice()
    }

    /// Returns the MSRs that are part of a state.
    pub(super) fn msrs(&self) -> &[u32] {
        &self.msrs
    }
}
