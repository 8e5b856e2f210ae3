//! Applies a guest's CPU template: to the CPUID that KVM offers, before each vCPU gets its own
//! values, and to the first values of model-specific registers.

use kvm_bindings::{CpuId, kvm_cpuid_entry2, kvm_msr_entry};
use kvm_ioctls::Kvm;

use super::leaves::LEAF_BASE;
use crate::config::{CpuTemplate, CpuidChange, MsrChange};

/// A part of a guest's CPU template that this host's KVM does not have.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum TemplateLack {
    /// KVM has no such capability.
    #[error("KVM capability {0}, which the guest's CPU template requires")]
    Capability(u32),
    /// KVM does not offer a leaf.
    #[error("CPUID leaf {function:#x}, subleaf {index:#x}, which the guest's CPU template changes")]
    Leaf {
        /// The leaf.
        function: u32,
        /// The subleaf.
        index: u32,
    },
    /// KVM has no such register.
    #[error("MSR {0:#x}, which the guest's CPU template changes")]
    Msr(u32),
    /// KVM refuses the value of a register.
    #[error("MSR {index:#x} with the value {value:#x} of the guest's CPU template")]
    Value {
        /// The register's number.
        index: u32,
        /// The value.
        value: u64,
    },
}

/// Checks that KVM has the capabilities that `template` requires.
pub fn check_capabilities(kvm: &Kvm, template: &CpuTemplate) -> Result<(), TemplateLack> {
    let is_missing = |capability: &&u32| kvm.check_extension_raw((**capability).into()) == 0;
    match template.capabilities.iter().find(is_missing) {
        Some(capability) => Err(TemplateLack::Capability(*capability)),
        None => Ok(()),
    }
}

/// Changes a CPUID table as `template` says. The vendor stays: the same bits have other meanings
/// elsewhere.
///
/// # Errors
///
/// The table lacks a leaf.
pub fn change_cpuid(cpuid: &mut CpuId, template: &CpuTemplate) -> Result<(), TemplateLack> {
    for &CpuidChange { function, index, flags, registers } in &template.leaves {
        let mut entries = cpuid.as_mut_slice().iter_mut();
        let entry = entries.find(|e| (e.function, e.index) == (function, index));
        let entry = entry.ok_or(TemplateLack::Leaf { function, index })?;
        let [eax, ebx, ecx, edx] = registers;
        let before = *entry;
        let kvm_cpuid_entry2 { eax: a, ebx: b, ecx: c, edx: d, .. } = before;
        *entry = kvm_cpuid_entry2 { flags, eax: eax.apply(a), ..before };
        if function != LEAF_BASE {
            (entry.ebx, entry.ecx, entry.edx) = (ebx.apply(b), ecx.apply(c), edx.apply(d));
        }
    }
    Ok(())
}

/// Returns the values of the registers that `template` changes. `before` are those that they have
/// in a vCPU whose CPUID is set, without those that KVM lacks.
///
/// # Errors
///
/// KVM lacks a register.
pub fn changed_msrs(
    template: &CpuTemplate,
    before: &[kvm_msr_entry],
) -> Result<Vec<kvm_msr_entry>, TemplateLack> {
    let change = |&MsrChange { index, bits }: &MsrChange| {
        let msr = before.iter().find(|msr| msr.index == index).ok_or(TemplateLack::Msr(index))?;
        Ok(kvm_msr_entry { data: bits.apply(msr.data), ..*msr })
    };
    template.msrs.iter().map(change).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::ChangedBits;

    const NONE: ChangedBits<u32> = ChangedBits { mask: 0, value: 0 };

    fn leaf(function: u32, index: u32, registers: [ChangedBits<u32>; 4]) -> CpuTemplate {
        let leaves = vec![CpuidChange { function, index, flags: 3, registers }];
        CpuTemplate { leaves, ..CpuTemplate::default() }
    }

    fn table() -> CpuId {
        let entry = |function, index| kvm_cpuid_entry2 {
            function,
            index,
            flags: 1,
            eax: 0b1010,
            ebx: 7,
            ecx: 8,
            edx: 9,
            ..Default::default()
        };
        CpuId::from_entries(&[entry(0, 0), entry(7, 0), entry(7, 1)]).unwrap()
    }

    #[test]
    fn leaf_has_its_changed_bits_and_flags() {
        let (mut cpuid, before) = (table(), table());
        let (eax, edx) =
            (ChangedBits { mask: 0b11, value: 0b01 }, ChangedBits { mask: !0, value: 0 });
        change_cpuid(&mut cpuid, &leaf(7, 1, [eax, NONE, NONE, edx])).unwrap();
        assert_eq!(cpuid.as_slice()[..2], before.as_slice()[..2]);
        let changed = kvm_cpuid_entry2 { flags: 3, eax: 0b1001, edx: 0, ..before.as_slice()[2] };
        assert_eq!(cpuid.as_slice()[2], changed);
    }

    #[test]
    fn vendor_is_the_hosts() {
        let mut cpuid = table();
        let all = ChangedBits { mask: !0, value: 5 };
        change_cpuid(&mut cpuid, &leaf(0, 0, [all; 4])).unwrap();
        let entry = cpuid.as_slice()[0];
        assert_eq!((entry.eax, entry.ebx, entry.ecx, entry.edx), (5, 7, 8, 9));
    }

    #[test]
    fn missing_leaf_and_register_are_named() {
        let mut cpuid = table();
        let lack = change_cpuid(&mut cpuid, &leaf(7, 2, [NONE; 4])).unwrap_err();
        assert_eq!(lack, TemplateLack::Leaf { function: 7, index: 2 });
        let bits = ChangedBits { mask: 1, value: 1 };
        let msrs = vec![MsrChange { index: 0x10a, bits }, MsrChange { index: 0x9999, bits }];
        let template = CpuTemplate { msrs, ..CpuTemplate::default() };
        let msr = |index, data| kvm_msr_entry { index, data, ..Default::default() };
        let lack = changed_msrs(&template, &[msr(0x10a, 0)]).unwrap_err();
        assert_eq!(lack, TemplateLack::Msr(0x9999));
        let both = [msr(0x10a, 2), msr(0x9999, 1)];
        assert_eq!(changed_msrs(&template, &both), Ok(vec![msr(0x10a, 3), msr(0x9999, 1)]));
    }
}
