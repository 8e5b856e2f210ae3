//! The processor that a guest sees: the host's, as far as KVM can show it, with the guest's own
//! topology; and whether a guest from another host can go on on this one.

use kvm_bindings::{CpuId, KVM_CPUID_FLAG_SIGNIFCANT_INDEX, kvm_cpuid_entry2};

const LEAF_BASE: u32 = 0x0;
const LEAF_FEATURES: u32 = 0x1;
const LEAF_CACHES: u32 = 0x4;
const LEAF_EXTENDED_FEATURES: u32 = 0x7;
const LEAF_TOPOLOGY: u32 = 0xb;
const LEAF_XSAVE: u32 = 0xd;
const LEAF_TOPOLOGY_V2: u32 = 0x1f;
const LEAF_KVM_FEATURES: u32 = 0x4000_0001;
const LEAF_AMD_FEATURES: u32 = 0x8000_0001;
const LEAF_SIZES: u32 = 0x8000_0008;
const LEAF_AMD_CACHES: u32 = 0x8000_001d;
const LEAF_AMD_TOPOLOGY: u32 = 0x8000_001e;

/// Leaf 1 ECX.
const VMX: u32 = 1 << 5;
const TSC_DEADLINE: u32 = 1 << 24;
const OSXSAVE: u32 = 1 << 27;
const HYPERVISOR: u32 = 1 << 31;
/// Leaf 1 EDX.
const HTT: u32 = 1 << 28;
/// Leaf 7 ECX: mirrors CR4.PKE.
const OSPKE: u32 = 1 << 4;
/// Leaf 0x8000_0001 ECX.
const AMD_LEGACY_CMP: u32 = 1 << 1;
const SVM: u32 = 1 << 2;

/// What CPUID answers on vCPU `id` of `vcpus`, made from what KVM supports.
///
/// Each vCPU is a core of its own in one package. Nested virtualization is hidden: its state is not
/// part of a checkpoint.
pub fn for_vcpu(supported: &CpuId, id: u8, vcpus: u8, tsc_deadline: bool) -> CpuId {
    let mut cpuid = supported.clone();
    let (id, count) = (u32::from(id), u32::from(vcpus));
    // Bits of an APIC id that tell cores apart.
    let core_bits = count.next_power_of_two().trailing_zeros();
    for e in cpuid.as_mut_slice() {
        match (e.function, e.index) {
            (LEAF_FEATURES, _) => {
                e.ebx = (e.ebx & 0xffff) | id << 24 | count << 16;
                e.ecx = (e.ecx | HYPERVISOR) & !VMX;
                set_bit(&mut e.ecx, TSC_DEADLINE, tsc_deadline);
                set_bit(&mut e.edx, HTT, count > 1);
            }
            // EAX 4..=0 is the cache's type: 0 ends the list. No cache is shared below level 3.
            (LEAF_CACHES, _) if e.eax & 0x1f != 0 => {
                let level = e.eax >> 5 & 7;
                let sharing = if level >= 3 { count - 1 } else { 0 };
                let cores = (1 << core_bits) - 1;
                e.eax = e.eax & 0x3fff | (sharing & 0xfff) << 14 | (cores & 0x3f) << 26;
            }
            (LEAF_TOPOLOGY | LEAF_TOPOLOGY_V2, 0) => {
                (e.eax, e.ebx, e.ecx, e.edx) = (0, 1, 1 << 8, id);
            }
            (LEAF_TOPOLOGY | LEAF_TOPOLOGY_V2, 1) => {
                (e.eax, e.ebx, e.ecx, e.edx) = (core_bits, count, 2 << 8 | 1, id);
            }
            (LEAF_TOPOLOGY | LEAF_TOPOLOGY_V2, level) => {
                (e.eax, e.ebx, e.ecx, e.edx) = (0, 0, level & 0xff, id);
            }
            (LEAF_AMD_FEATURES, _) => {
                e.ecx &= !SVM;
                if count == 1 {
                    e.ecx &= !AMD_LEGACY_CMP;
                }
            }
            // On AMD: cores less one, and the bits that tell them apart. Intel reserves ECX.
            (LEAF_SIZES, _) if e.ecx != 0 => e.ecx = core_bits << 12 | (count - 1),
            (LEAF_AMD_CACHES, _) if e.eax & 0x1f != 0 => {
                let sharing = if e.eax >> 5 & 7 >= 3 { count - 1 } else { 0 };
                e.eax = e.eax & 0x3fff | (sharing & 0xfff) << 14;
            }
            (LEAF_AMD_TOPOLOGY, _) if e.eax | e.ebx | e.ecx != 0 => {
                (e.eax, e.ebx, e.ecx) = (id, id & 0xff, 0);
            }
            _ => {}
        }
    }
    add_topology(&mut cpuid, id, count, core_bits);
    cpuid
}

/// KVM lists only the first level of the topology leaf on some hosts; guests need the second.
fn add_topology(cpuid: &mut CpuId, id: u32, count: u32, core_bits: u32) {
    let has = |c: &CpuId, index| {
        c.as_slice().iter().any(|e| e.function == LEAF_TOPOLOGY && e.index == index)
    };
    if !has(cpuid, 0) || has(cpuid, 1) {
        return;
    }
    let level = kvm_cpuid_entry2 {
        function: LEAF_TOPOLOGY,
        index: 1,
        flags: KVM_CPUID_FLAG_SIGNIFCANT_INDEX,
        eax: core_bits,
        ebx: count,
        ecx: 2 << 8 | 1,
        edx: id,
        ..Default::default()
    };
    // A full table has no room for it; the guest then sees one level.
    let _ = cpuid.push(level);
}

fn set_bit(register: &mut u32, bit: u32, on: bool) {
    *register = if on { *register | bit } else { *register & !bit };
}

/// Bits of a guest physical address; 36 where CPUID does not say.
pub fn address_bits(entries: &[kvm_cpuid_entry2]) -> u32 {
    match find(entries, LEAF_SIZES, 0)[0] & 0xff {
        0 => 36,
        bits => bits.min(52),
    }
}

/// A leaf whose registers are sets of features: a guest that has seen a bit may rely on it.
struct FeatureLeaf {
    function: u32,
    index: u32,
    name: &'static str,
    /// Bits of EAX, EBX, ECX, EDX that are features.
    masks: [u32; 4],
}

const fn leaf(function: u32, index: u32, name: &'static str, masks: [u32; 4]) -> FeatureLeaf {
    FeatureLeaf { function, index, name, masks }
}

const ALL: u32 = u32::MAX;
const FEATURE_LEAVES: &[FeatureLeaf] = &[
    // Bits that follow the guest's own registers or the VMM are no features of the host.
    leaf(LEAF_FEATURES, 0, "1", [0, 0, !(OSXSAVE | HYPERVISOR | TSC_DEADLINE), !HTT]),
    leaf(LEAF_EXTENDED_FEATURES, 0, "7", [0, ALL, !OSPKE, ALL]),
    leaf(LEAF_EXTENDED_FEATURES, 1, "7.1", [ALL, ALL, 0, ALL]),
    leaf(LEAF_XSAVE, 0, "0xd", [ALL, 0, 0, ALL]),
    leaf(LEAF_XSAVE, 1, "0xd.1", [ALL, 0, ALL, ALL]),
    leaf(LEAF_KVM_FEATURES, 0, "0x40000001", [ALL, 0, 0, 0]),
    leaf(LEAF_AMD_FEATURES, 0, "0x80000001", [0, 0, !AMD_LEGACY_CMP, ALL]),
    leaf(LEAF_SIZES, 0, "0x80000008", [0, ALL, 0, 0]),
];

fn find(entries: &[kvm_cpuid_entry2], function: u32, index: u32) -> [u32; 4] {
    let found = entries.iter().find(|e| e.function == function && e.index == index);
    found.map_or([0; 4], |e| [e.eax, e.ebx, e.ecx, e.edx])
}

/// What the guest's processor has that `supported` lacks, the first of it by name: it could not go
/// on here.
pub fn lacking(guest: &[kvm_cpuid_entry2], supported: &[kvm_cpuid_entry2]) -> Option<String> {
    for l in FEATURE_LEAVES {
        let has = find(guest, l.function, l.index);
        let offers = find(supported, l.function, l.index);
        for (i, register) in ["EAX", "EBX", "ECX", "EDX"].into_iter().enumerate() {
            let lacks = has[i] & !offers[i] & l.masks[i];
            if lacks != 0 {
                let bit = lacks.trailing_zeros();
                return Some(format!("CPUID leaf {} {register} bit {bit}", l.name));
            }
        }
    }
    None
}

/// Whether both processors are of one vendor: the same bits mean other things elsewhere.
pub fn same_vendor(a: &[kvm_cpuid_entry2], b: &[kvm_cpuid_entry2]) -> bool {
    find(a, LEAF_BASE, 0)[1..] == find(b, LEAF_BASE, 0)[1..]
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(function: u32, index: u32, r: [u32; 4]) -> kvm_cpuid_entry2 {
        let [eax, ebx, ecx, edx] = r;
        kvm_cpuid_entry2 { function, index, eax, ebx, ecx, edx, ..Default::default() }
    }

    #[test]
    fn each_vcpu_is_a_core_of_its_own() {
        let host = [
            entry(1, 0, [0, 0x0f10_0800, VMX, 0]),
            entry(0xb, 0, [1, 2, 0x100, 9]),
            entry(0x8000_0001, 0, [0, 0, SVM, 0]),
        ];
        let host = CpuId::from_entries(&host).unwrap();
        let guest = for_vcpu(&host, 2, 3, true);
        let at = |f, i| find(guest.as_slice(), f, i);
        assert_eq!(at(1, 0), [0, 0x0203_0800, HYPERVISOR | TSC_DEADLINE, HTT]);
        assert_eq!(at(0xb, 0), [0, 1, 0x100, 2]);
        assert_eq!(at(0xb, 1), [2, 3, 0x201, 2], "two bits tell three cores apart");
        assert_eq!(at(0x8000_0001, 0)[2], 0, "nested virtualization is hidden");
    }

    #[test]
    fn a_missing_feature_is_named() {
        let guest = [entry(7, 0, [0, 1 << 5 | 1 << 3, 0, 0])];
        let host = [entry(7, 0, [0, 1 << 3, 0, 0])];
        assert_eq!(lacking(&guest, &host).unwrap(), "CPUID leaf 7 EBX bit 5");
        assert_eq!(lacking(&host, &guest), None);
        assert_eq!(lacking(&guest, &[]).unwrap(), "CPUID leaf 7 EBX bit 3");
        let running = [entry(1, 0, [0, 0x0100_0000, OSXSAVE | HYPERVISOR, HTT])];
        assert_eq!(lacking(&running, &[]), None, "these bits follow the guest");
    }
}
