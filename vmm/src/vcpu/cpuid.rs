//! The processor that a guest sees: the host's, as far as KVM can show it, or a named part of that,
//! with the guest's own topology; and whether a guest from another host can go on on this one.

use kvm_bindings::{CpuId, KVM_CPUID_FLAG_SIGNIFCANT_INDEX, kvm_cpuid_entry2};

use super::features::{self, Place};
use crate::config::{CpuConfig, CpuModel, CpuidWord};

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

/// Leaf 0 EBX of AMD and Hygon: "Auth", "Hygo".
const AMD_VENDORS: [u32; 2] = [u32::from_le_bytes(*b"Auth"), u32::from_le_bytes(*b"Hygo")];

/// Leaf 1 ECX.
const VMX: u32 = 1 << 5;
const TSC_DEADLINE: u32 = 1 << 24;
const OSXSAVE: u32 = 1 << 27;
const HYPERVISOR: u32 = 1 << 31;
/// Leaf 1 EDX.
const HTT: u32 = 1 << 28;
/// Leaf 0x8000_0001 EDX repeats these bits of leaf 1 EDX on AMD.
const AMD_REPEATS: u32 = 0x0183_f3ff;
/// Leaf 7 ECX: mirrors CR4.PKE.
const OSPKE: u32 = 1 << 4;
/// Leaf 0x8000_0001 ECX.
const AMD_LEGACY_CMP: u32 = 1 << 1;
const SVM: u32 = 1 << 2;

/// Of what KVM supports, what the guest is to have; or what the baseline asks for in vain, by name.
pub fn narrow(supported: &CpuId, cpu: &CpuConfig) -> Result<CpuId, String> {
    let mut cpuid = supported.clone();
    if cpu.model == CpuModel::Baseline {
        let wanted = features::BASELINE.iter().filter_map(|name| features::find(name));
        let mut kept = [[0; 4]; FEATURE_LEAVES.len()];
        for place in wanted {
            let registers = find(supported.as_slice(), place.function, place.index);
            if registers[place.register] & 1 << place.bit == 0 {
                return Err(features::describe(place));
            }
            for (leaf, kept) in FEATURE_LEAVES.iter().zip(&mut kept) {
                if (leaf.function, leaf.index) == (place.function, place.index) {
                    kept[place.register] |= 1 << place.bit;
                }
            }
        }
        for (leaf, mut kept) in FEATURE_LEAVES.iter().zip(kept) {
            if leaf.function == LEAF_AMD_FEATURES {
                kept[3] |= AMD_REPEATS;
            }
            change(&mut cpuid, leaf.function, leaf.index, |i, r| r & (kept[i] | !leaf.masks[i]));
        }
    }
    for place in cpu.without.iter().filter_map(|name| features::find(name)) {
        clear(&mut cpuid, place);
    }
    Ok(cpuid)
}

fn clear(cpuid: &mut CpuId, place: Place) {
    let Place { function, index, register, bit } = place;
    change(cpuid, function, index, |i, r| if i == register { r & !(1 << bit) } else { r });
    if function == LEAF_FEATURES && register == 3 && AMD_REPEATS & 1 << bit != 0 {
        clear(cpuid, Place { function: LEAF_AMD_FEATURES, ..place });
    }
}

fn change(cpuid: &mut CpuId, function: u32, index: u32, f: impl Fn(usize, u32) -> u32) {
    for e in cpuid.as_mut_slice().iter_mut().filter(|e| (e.function, e.index) == (function, index))
    {
        [e.eax, e.ebx, e.ecx, e.edx] = [f(0, e.eax), f(1, e.ebx), f(2, e.ecx), f(3, e.edx)];
    }
}

/// Whether the guest may be told of the TSC deadline timer, which KVM does not list.
pub fn may_have_tsc_deadline(cpu: &CpuConfig) -> bool {
    !cpu.without.iter().any(|name| name == "tsc_deadline_timer")
}

/// What a processor shows of itself that other hosts must have too.
pub fn shown(entries: &[kvm_cpuid_entry2]) -> Vec<CpuidWord> {
    let word = |function, index, registers| CpuidWord { function, index, registers };
    let [_, vendor @ ..] = find(entries, LEAF_BASE, 0);
    let [b, c, d] = vendor;
    let mut words = vec![word(LEAF_BASE, 0, [0, b, c, d])];
    for l in FEATURE_LEAVES {
        let mut registers = find(entries, l.function, l.index);
        registers.iter_mut().zip(l.masks).for_each(|(r, mask)| *r &= mask);
        if registers != [0; 4] {
            words.push(word(l.function, l.index, registers));
        }
    }
    words
}

/// What a guest that was shown `words` would miss on this host.
pub fn missing(words: &[CpuidWord], supported: &[kvm_cpuid_entry2]) -> Option<String> {
    let entries: Vec<kvm_cpuid_entry2> =
        words
            .iter()
            .map(|&CpuidWord { function, index, registers: [eax, ebx, ecx, edx] }| {
                kvm_cpuid_entry2 { function, index, eax, ebx, ecx, edx, ..Default::default() }
            })
            .collect();
    if !words.is_empty() && !same_vendor(&entries, supported) {
        return Some("a processor of its vendor".to_owned());
    }
    lacking(&entries, supported)
}

/// What CPUID answers on vCPU `id` of `vcpus`, made from what the guest is to have.
///
/// Each vCPU is a core of its own in one package. Nested virtualization is hidden: its state is not
/// part of a checkpoint.
pub fn for_vcpu(supported: &CpuId, id: u8, vcpus: u8, tsc_deadline: bool) -> CpuId {
    let mut cpuid = supported.clone();
    let (id, count) = (u32::from(id), u32::from(vcpus));
    // Bits of an APIC id that tell cores apart.
    let core_bits = count.next_power_of_two().trailing_zeros();
    let amd = AMD_VENDORS.contains(&find(supported.as_slice(), LEAF_BASE, 0)[1]);
    for e in cpuid.as_mut_slice() {
        match (e.function, e.index) {
            (LEAF_FEATURES, _) => {
                // A power of two: guests take this for the number of addressable ids.
                e.ebx = (e.ebx & 0xffff) | id << 24 | count.next_power_of_two() << 16;
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
            (LEAF_SIZES, _) if amd => e.ecx = core_bits << 12 | (count - 1),
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

/// KVM lists only the first level of a topology leaf on some hosts; guests need the second.
fn add_topology(cpuid: &mut CpuId, id: u32, count: u32, core_bits: u32) {
    for function in [LEAF_TOPOLOGY, LEAF_TOPOLOGY_V2] {
        let has =
            |index| cpuid.as_slice().iter().any(|e| e.function == function && e.index == index);
        if !has(0) || has(1) {
            continue;
        }
        let level = kvm_cpuid_entry2 {
            function,
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
    /// Bits of EAX, EBX, ECX, EDX that are features.
    masks: [u32; 4],
}

const fn leaf(function: u32, index: u32, masks: [u32; 4]) -> FeatureLeaf {
    FeatureLeaf { function, index, masks }
}

const ALL: u32 = u32::MAX;
const FEATURE_LEAVES: &[FeatureLeaf] = &[
    // Bits that follow the guest's own registers or the VMM are no features of the host.
    leaf(LEAF_FEATURES, 0, [0, 0, !(OSXSAVE | HYPERVISOR | TSC_DEADLINE), !HTT]),
    leaf(LEAF_EXTENDED_FEATURES, 0, [0, ALL, !OSPKE, ALL]),
    leaf(LEAF_EXTENDED_FEATURES, 1, [ALL, ALL, 0, ALL]),
    leaf(LEAF_XSAVE, 0, [ALL, 0, 0, ALL]),
    leaf(LEAF_XSAVE, 1, [ALL, 0, ALL, ALL]),
    leaf(LEAF_KVM_FEATURES, 0, [ALL, 0, 0, 0]),
    leaf(LEAF_AMD_FEATURES, 0, [0, 0, !AMD_LEGACY_CMP, ALL]),
    leaf(LEAF_SIZES, 0, [0, ALL, 0, 0]),
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
        for register in 0..4 {
            let lacks = has[register] & !offers[register] & l.masks[register];
            if lacks != 0 {
                let bit = lacks.trailing_zeros() as u8;
                let place = Place { function: l.function, index: l.index, register, bit };
                return Some(features::describe(place));
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
        assert_eq!(at(1, 0), [0, 0x0204_0800, HYPERVISOR | TSC_DEADLINE, HTT]);
        assert_eq!(at(0xb, 0), [0, 1, 0x100, 2]);
        assert_eq!(at(0xb, 1), [2, 3, 0x201, 2], "two bits tell three cores apart");
        assert_eq!(at(0x8000_0001, 0)[2], 0, "nested virtualization is hidden");
    }

    #[test]
    fn a_missing_feature_is_named() {
        let guest = [entry(7, 0, [0, 1 << 5 | 1 << 3, 0, 0])];
        let host = [entry(7, 0, [0, 1 << 3, 0, 0])];
        assert_eq!(lacking(&guest, &host).unwrap(), "avx2 (CPUID leaf 0x7 EBX bit 5)");
        assert_eq!(lacking(&host, &guest), None);
        assert_eq!(lacking(&guest, &[]).unwrap(), "bmi1 (CPUID leaf 0x7 EBX bit 3)");
        let running = [entry(1, 0, [0, 0x0100_0000, OSXSAVE | HYPERVISOR, HTT])];
        assert_eq!(lacking(&running, &[]), None, "these bits follow the guest");
    }

    #[test]
    fn topology_is_right_for_every_number_of_vcpus() {
        let vendor = u32::from_le_bytes(*b"Auth");
        let host = [
            entry(0, 0, [0x1f, vendor, 0, 0]),
            entry(1, 0, [0; 4]),
            entry(4, 3, [3 << 5 | 3, 0, 0, 0]),
            entry(0xb, 0, [0; 4]),
            entry(0x1f, 0, [0; 4]),
            entry(0x8000_0008, 0, [48, 0, 0, 0]),
            entry(0x8000_001e, 0, [1, 0x100, 0, 0]),
        ];
        let host = CpuId::from_entries(&host).unwrap();
        for count in 1..=32u8 {
            let mut seen = std::collections::HashSet::new();
            for id in 0..count {
                let guest = for_vcpu(&host, id, count, true);
                let at = |f, i| find(guest.as_slice(), f, i);
                let bits = at(0xb, 1)[0];
                assert!(1 << bits >= count && (count == 1 || 1 << (bits - 1) < count));
                for leaf in [0xb, 0x1f] {
                    assert_eq!(at(leaf, 0), [0, 1, 0x100, id.into()]);
                    assert_eq!(at(leaf, 1), [bits, count.into(), 0x201, id.into()]);
                }
                assert_eq!(at(1, 0)[1] >> 24, u32::from(id));
                assert_eq!(at(1, 0)[1] >> 16 & 0xff, 1 << bits);
                assert_eq!(at(4, 3)[0] >> 26, (1 << bits) - 1, "ids of cores");
                assert_eq!(at(4, 3)[0] >> 14 & 0xfff, u32::from(count) - 1, "sharers");
                assert_eq!(at(0x8000_0008, 0)[2], bits << 12 | (u32::from(count) - 1));
                assert_eq!(at(0x8000_001e, 0)[..3], [id.into(), id.into(), 0]);
                assert!(seen.insert(at(0xb, 0)[3]));
            }
        }
    }

    fn all_of(leaves: &[u32]) -> CpuId {
        let entries: Vec<_> = leaves.iter().map(|f| entry(*f, 0, [u32::MAX; 4])).collect();
        CpuId::from_entries(&entries).unwrap()
    }

    #[test]
    fn the_baseline_is_the_same_whatever_more_the_host_has() {
        let baseline: CpuConfig = "baseline".parse().unwrap();
        let host = all_of(&[1, 7, 0xd, 0x4000_0001, 0x8000_0001, 0x8000_0008]);
        let guest = narrow(&host, &baseline).unwrap();
        let at = |f| find(guest.as_slice(), f, 0);
        assert_eq!(at(7), [u32::MAX, 0, OSPKE, 0], "nothing of leaf 7");
        assert_eq!(at(0x4000_0001)[0], 1 << 24 | 0b1011);
        let ecx = at(1)[2] & !(OSXSAVE | HYPERVISOR | TSC_DEADLINE);
        assert_eq!(ecx, 1 | 1 << 9 | 1 << 13 | 1 << 19 | 1 << 20 | 1 << 21 | 1 << 23);
        // A host with no more than the baseline gives the same; one with less says what it lacks.
        let again = narrow(&guest, &baseline).unwrap();
        assert_eq!(again.as_slice(), guest.as_slice());
        assert_eq!(lacking(guest.as_slice(), again.as_slice()), None);
        let less = narrow(&host, &"host,-popcnt".parse().unwrap()).unwrap();
        let missing = narrow(&less, &baseline).unwrap_err();
        assert_eq!(missing, "popcnt (CPUID leaf 0x1 ECX bit 23)");
    }

    #[test]
    fn what_is_taken_away_is_gone_in_every_place() {
        let host = all_of(&[1, 0x8000_0001]);
        let guest = narrow(&host, &"host,-cx16,-pse36".parse().unwrap()).unwrap();
        assert_eq!(find(guest.as_slice(), 1, 0)[2], !(1 << 13));
        assert_eq!(find(guest.as_slice(), 1, 0)[3], !(1 << 17));
        assert_eq!(find(guest.as_slice(), 0x8000_0001, 0)[3], !(1 << 17), "AMD repeats it");
    }

    #[test]
    fn what_was_shown_is_asked_of_the_next_host() {
        let vendor = |name: &[u8; 4]| entry(0, 0, [9, u32::from_le_bytes(*name), 0, 0]);
        let guest = [vendor(b"Genu"), entry(7, 0, [2, 1 << 5 | 1 << 3, 0, 0])];
        let words = shown(&guest);
        assert_eq!(words.len(), 2);
        assert_eq!(missing(&words, &guest), None);
        assert_eq!(missing(&[], &[]), None, "of an older guest nothing is known");
        let other = [vendor(b"Auth"), guest[1]];
        assert_eq!(missing(&words, &other).unwrap(), "a processor of its vendor");
        let less = [vendor(b"Genu"), entry(7, 0, [0, 1 << 3, 0, 0])];
        assert_eq!(missing(&words, &less).unwrap(), "avx2 (CPUID leaf 0x7 EBX bit 5)");
    }
}
