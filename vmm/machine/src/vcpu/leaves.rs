//! The CPUID leaves and bits that the VMM knows, and lookups of registers and features.

use kvm_bindings::kvm_cpuid_entry2;

use crate::cpu_model::{self, FeatureBit};

pub(super) const LEAF_BASE: u32 = 0x0;
pub(super) const LEAF_FEATURES: u32 = 0x1;
pub(super) const LEAF_CACHES: u32 = 0x4;
pub(super) const LEAF_EXTENDED_FEATURES: u32 = 0x7;
pub(super) const LEAF_TOPOLOGY: u32 = 0xb;
pub(super) const LEAF_XSAVE: u32 = 0xd;
pub(super) const LEAF_TOPOLOGY_V2: u32 = 0x1f;
pub(super) const LEAF_KVM_FEATURES: u32 = 0x4000_0001;
pub(super) const LEAF_AMD_FEATURES: u32 = 0x8000_0001;
pub(super) const LEAF_SIZES: u32 = 0x8000_0008;
pub(super) const LEAF_SVM: u32 = 0x8000_000a;
pub(super) const LEAF_AMD_CACHES: u32 = 0x8000_001d;
pub(super) const LEAF_AMD_TOPOLOGY: u32 = 0x8000_001e;

/// Leaf 0 EBX of AMD and Hygon: "Auth", "Hygo".
pub(super) const AMD_VENDORS: [u32; 2] =
    [u32::from_le_bytes(*b"Auth"), u32::from_le_bytes(*b"Hygo")];

/// Leaf 1 ECX.
pub(super) const VMX: u32 = 1 << 5;
pub(super) const TSC_DEADLINE: u32 = 1 << 24;
pub(super) const OSXSAVE: u32 = 1 << 27;
pub(super) const HYPERVISOR: u32 = 1 << 31;
/// Leaf 1 EDX.
pub(super) const HTT: u32 = 1 << 28;
/// Leaf 0x8000_0001 EDX repeats these bits of leaf 1 EDX on AMD.
pub(super) const AMD_REPEATS: u32 = 0x0183_f3ff;
/// Leaf 7 ECX.
pub(super) const SHSTK: u32 = 1 << 7;
/// Leaf 7 ECX: mirrors CR4.PKE.
pub(super) const OSPKE: u32 = 1 << 4;
/// Leaf 0x8000_0001 ECX.
pub(super) const AMD_LEGACY_CMP: u32 = 1 << 1;
pub(super) const SVM: u32 = 1 << 2;

/// Returns EAX, EBX, ECX and EDX of a leaf, zeros if it is missing.
pub(super) fn find(entries: &[kvm_cpuid_entry2], function: u32, index: u32) -> [u32; 4] {
    let found = entries.iter().find(|e| e.function == function && e.index == index);
    found.map_or([0; 4], |e| [e.eax, e.ebx, e.ecx, e.edx])
}

/// Returns whether the feature's bit is set.
pub(super) fn has_bit(entries: &[kvm_cpuid_entry2], place: FeatureBit) -> bool {
    find(entries, place.function, place.index)[place.register] & 1 << place.bit != 0
}

/// Returns whether the feature `name` is known and its bit is set.
pub(super) fn has_feature(entries: &[kvm_cpuid_entry2], name: &str) -> bool {
    cpu_model::find(name).is_some_and(|place| has_bit(entries, place))
}

/// Returns an entry with the values of EAX, EBX, ECX and EDX.
#[cfg(test)]
pub(super) fn entry(function: u32, index: u32, [eax, ebx, ecx, edx]: [u32; 4]) -> kvm_cpuid_entry2 {
    kvm_cpuid_entry2 { function, index, eax, ebx, ecx, edx, ..Default::default() }
}
