//! The processor that a guest sees: the host's, as far as KVM can show it, or a named subset, with
//! the guest's own topology. `cpu_compat` says which parts of it the guest may rely on.

use kvm_bindings::{CpuId, KVM_CPUID_FLAG_SIGNIFCANT_INDEX, kvm_cpuid_entry2};

use super::baseline::baseline;
use super::leaves::{
    AMD_LEGACY_CMP, AMD_REPEATS, AMD_VENDORS, HTT, HYPERVISOR, LEAF_AMD_CACHES, LEAF_AMD_FEATURES,
    LEAF_AMD_TOPOLOGY, LEAF_BASE, LEAF_CACHES, LEAF_EXTENDED_FEATURES, LEAF_FEATURES, LEAF_SIZES,
    LEAF_SVM, LEAF_TOPOLOGY, LEAF_TOPOLOGY_V2, SHSTK, SVM, TSC_DEADLINE, VMX, find,
};
use crate::config::{CpuConfig, CpuModel};
use crate::cpu_model::{self, FeatureBit, MissingFeature};

/// Returns what KVM supports, restricted to what the guest is configured to have.
///
/// # Errors
///
/// A baseline feature that KVM does not support.
pub fn restrict(supported: &CpuId, cpu: &CpuConfig) -> Result<CpuId, MissingFeature> {
    let mut cpuid = match cpu.model {
        CpuModel::Host => supported.clone(),
        CpuModel::Baseline => baseline(supported, &cpu.without)?,
    };
    for place in cpu.without.iter().filter_map(|name| cpu_model::find(name)) {
        clear(&mut cpuid, place);
    }
    Ok(cpuid)
}

fn clear(cpuid: &mut CpuId, place: FeatureBit) {
    let FeatureBit { function, index, register, bit } = place;
    change(cpuid, function, index, |i, r| if i == register { r & !(1 << bit) } else { r });
    if function == LEAF_FEATURES && register == 3 && AMD_REPEATS & 1 << bit != 0 {
        clear(cpuid, FeatureBit { function: LEAF_AMD_FEATURES, ..place });
    }
}

fn change(cpuid: &mut CpuId, function: u32, index: u32, f: impl Fn(usize, u32) -> u32) {
    for e in cpuid.as_mut_slice().iter_mut().filter(|e| (e.function, e.index) == (function, index))
    {
        [e.eax, e.ebx, e.ecx, e.edx] = [f(0, e.eax), f(1, e.ebx), f(2, e.ecx), f(3, e.edx)];
    }
}

/// Returns whether the guest may see the TSC deadline timer, which KVM does not list. The baseline
/// excludes it, because it depends on a frequency that the next host may not have.
pub fn may_have_tsc_deadline(cpu: &CpuConfig) -> bool {
    cpu.model == CpuModel::Host && !cpu.without.iter().any(|name| name == "tsc_deadline_timer")
}

/// The topology of a guest's vCPUs, which are all in one package.
#[derive(Clone, Copy, Debug)]
pub struct Topology {
    /// Number of vCPUs.
    pub vcpus: u8,
    /// Whether two vCPUs with successive ids are the threads of one core. Otherwise each vCPU is a
    /// core.
    pub smt: bool,
}

impl Topology {
    fn count(self) -> u32 {
        self.vcpus.into()
    }

    /// Returns the number of APIC id bits that distinguish the threads of a core.
    fn thread_bits(self) -> u32 {
        u32::from(self.smt && self.vcpus > 1)
    }

    fn threads_per_core(self) -> u32 {
        1 << self.thread_bits()
    }

    /// Returns the number of APIC id bits that distinguish the vCPUs.
    fn package_bits(self) -> u32 {
        self.count().next_power_of_two().trailing_zeros()
    }

    /// Returns the largest number of the ids that distinguish the cores.
    fn last_core_id(self) -> u32 {
        (1 << (self.package_bits() - self.thread_bits())) - 1
    }

    /// Returns the number of vCPUs beside one that share its cache of this level.
    fn sharers(self, level: u32) -> u32 {
        if level >= 3 { self.count() - 1 } else { self.threads_per_core() - 1 }
    }

    /// Returns the registers of a topology leaf for the vCPU `id`.
    fn level(self, level: u32, id: u32) -> [u32; 4] {
        match level {
            0 => [self.thread_bits(), self.threads_per_core(), 1 << 8, id],
            1 => [self.package_bits(), self.count(), 2 << 8 | 1, id],
            _ => [0, 0, level & 0xff, id],
        }
    }
}

/// Returns the CPUID table of vCPU `id`, made from the result of [`restrict`].
///
/// All vCPUs are in one package. Nested virtualization and shadow stacks are hidden: their state is
/// not part of a checkpoint.
pub fn for_vcpu(supported: &CpuId, id: u8, topology: Topology, tsc_deadline: bool) -> CpuId {
    let mut cpuid = supported.clone();
    let (id, count) = (u32::from(id), topology.count());
    let amd = AMD_VENDORS.contains(&find(supported.as_slice(), LEAF_BASE, 0)[1]);
    for e in cpuid.as_mut_slice() {
        match (e.function, e.index) {
            (LEAF_FEATURES, _) => {
                // A power of two: guests take this for the number of addressable ids.
                e.ebx = (e.ebx & 0xffff) | id << 24 | 1 << topology.package_bits() << 16;
                e.ecx = (e.ecx | HYPERVISOR) & !VMX;
                set_bit(&mut e.ecx, TSC_DEADLINE, tsc_deadline);
                set_bit(&mut e.edx, HTT, count > 1);
            }
            // EAX 4..=0 is the cache's type: 0 ends the list. Below level 3, only the threads of a
            // core share a cache.
            (LEAF_CACHES, _) if e.eax & 0x1f != 0 => {
                let sharers = topology.sharers(e.eax >> 5 & 7);
                let last_core = topology.last_core_id() & 0x3f;
                e.eax = e.eax & 0x3fff | (sharers & 0xfff) << 14 | last_core << 26;
            }
            (LEAF_TOPOLOGY | LEAF_TOPOLOGY_V2, level) => {
                [e.eax, e.ebx, e.ecx, e.edx] = topology.level(level, id);
            }
            (LEAF_EXTENDED_FEATURES, 0) => e.ecx &= !SHSTK,
            (LEAF_SVM, _) => (e.eax, e.ebx, e.ecx, e.edx) = (0, 0, 0, 0),
            (LEAF_AMD_FEATURES, _) => {
                e.ecx &= !SVM;
                if count == 1 {
                    e.ecx &= !AMD_LEGACY_CMP;
                }
            }
            // On AMD: vCPUs minus one, and the number of bits that distinguish them. Intel reserves
            // ECX.
            (LEAF_SIZES, _) if amd => e.ecx = topology.package_bits() << 12 | (count - 1),
            (LEAF_AMD_CACHES, _) if e.eax & 0x1f != 0 => {
                let sharers = topology.sharers(e.eax >> 5 & 7);
                e.eax = e.eax & 0x3fff | (sharers & 0xfff) << 14;
            }
            // Zeros mean no topology. Then only a guest with two threads a core needs one here.
            (LEAF_AMD_TOPOLOGY, _)
                if e.eax | e.ebx | e.ecx != 0 || topology.threads_per_core() > 1 =>
            {
                let core = id >> topology.thread_bits() & 0xff;
                (e.eax, e.ebx, e.ecx) = (id, (topology.threads_per_core() - 1) << 8 | core, 0);
            }
            _ => {}
        }
    }
    add_topology(&mut cpuid, id, topology);
    cpuid
}

/// Adds the second level of a topology leaf, which guests need and which KVM does not list on some
/// hosts.
fn add_topology(cpuid: &mut CpuId, id: u32, topology: Topology) {
    for function in [LEAF_TOPOLOGY, LEAF_TOPOLOGY_V2] {
        let has =
            |index| cpuid.as_slice().iter().any(|e| e.function == function && e.index == index);
        if !has(0) || has(1) {
            continue;
        }
        let [eax, ebx, ecx, edx] = topology.level(1, id);
        let level = kvm_cpuid_entry2 {
            function,
            index: 1,
            flags: KVM_CPUID_FLAG_SIGNIFCANT_INDEX,
            eax,
            ebx,
            ecx,
            edx,
            ..Default::default()
        };
        // A full table has no room for it; the guest then sees one level.
        let _ = cpuid.push(level);
    }
}

fn set_bit(register: &mut u32, bit: u32, on: bool) {
    *register = if on { *register | bit } else { *register & !bit };
}

/// Returns the number of bits of a guest physical address; 36 if CPUID does not report it.
pub fn address_bits(entries: &[kvm_cpuid_entry2]) -> u32 {
    match find(entries, LEAF_SIZES, 0)[0] & 0xff {
        0 => 36,
        bits => bits.min(52),
    }
}

#[cfg(test)]
mod tests {
    use super::super::cpu_compat::{self, ALL, exposed};
    use super::super::leaves::{OSXSAVE, entry};
    use super::*;
    use crate::config::CpuidWord;

    fn missing(words: &[CpuidWord], supported: &[kvm_cpuid_entry2]) -> Option<String> {
        cpu_compat::missing(words, supported).map(|lack| lack.to_string())
    }

    fn lacking(guest: &[kvm_cpuid_entry2], supported: &[kvm_cpuid_entry2]) -> Option<String> {
        cpu_compat::lacking(guest, supported).map(|lack| lack.to_string())
    }

    #[test]
    fn each_vcpu_is_a_core_of_its_own() {
        let host = [
            entry(1, 0, [0, 0x0f10_0800, VMX, 0]),
            entry(0xb, 0, [1, 2, 0x100, 9]),
            entry(0x8000_0001, 0, [0, 0, SVM, 0]),
        ];
        let host = CpuId::from_entries(&host).unwrap();
        let guest = for_vcpu(&host, 2, Topology { vcpus: 3, smt: false }, true);
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

    /// Returns an AMD host that also has Intel's leaves about the topology.
    fn host_of_every_topology() -> CpuId {
        let vendor = u32::from_le_bytes(*b"Auth");
        let host = [
            entry(0, 0, [0x1f, vendor, 0, 0]),
            entry(1, 0, [0; 4]),
            entry(4, 0, [1 << 5 | 1, 0, 0, 0]),
            entry(4, 3, [3 << 5 | 3, 0, 0, 0]),
            entry(0xb, 0, [0; 4]),
            entry(0x1f, 0, [0; 4]),
            entry(0x8000_0008, 0, [48, 0, 0, 0]),
            entry(0x8000_001d, 2, [2 << 5 | 3, 0, 0, 0]),
            entry(0x8000_001d, 3, [3 << 5 | 3, 0, 0, 0]),
            entry(0x8000_001e, 0, [1, 0x100, 0, 0]),
        ];
        CpuId::from_entries(&host).unwrap()
    }

    #[test]
    fn topology_is_right_for_every_number_of_vcpus() {
        let host = host_of_every_topology();
        for count in 1..=32u8 {
            let topology = Topology { vcpus: count, smt: false };
            let mut seen = std::collections::HashSet::new();
            for id in 0..count {
                let guest = for_vcpu(&host, id, topology, true);
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

    #[test]
    fn two_threads_share_a_core_with_smt() {
        let host = host_of_every_topology();
        for count in (2..=32u8).step_by(2) {
            for id in 0..count {
                let guest = for_vcpu(&host, id, Topology { vcpus: count, smt: true }, true);
                let at = |f, i| find(guest.as_slice(), f, i);
                let (bits, core) = (at(0xb, 1)[0], u32::from(id) >> 1);
                assert!(1 << bits >= count && 1 << (bits - 1) < count);
                for leaf in [0xb, 0x1f] {
                    assert_eq!(at(leaf, 0), [1, 2, 0x100, id.into()]);
                    assert_eq!(at(leaf, 1), [bits, count.into(), 0x201, id.into()]);
                }
                assert_eq!(at(1, 0)[1] >> 16, u32::from(id) << 8 | 1 << bits);
                assert_eq!(at(4, 3)[0] >> 26, (1 << (bits - 1)) - 1, "ids of cores");
                for leaf in [4, 0x8000_001d] {
                    assert_eq!(at(leaf, 3)[0] >> 14 & 0xfff, u32::from(count) - 1, "sharers");
                }
                assert_eq!((at(4, 0)[0] >> 14 & 0xfff, at(0x8000_001d, 2)[0] >> 14), (1, 1));
                assert_eq!(at(0x8000_0008, 0)[2], bits << 12 | (u32::from(count) - 1));
                assert_eq!(at(0x8000_001e, 0)[..3], [id.into(), 1 << 8 | core, 0]);
            }
        }
        let one = |smt| for_vcpu(&host, 0, Topology { vcpus: 1, smt }, true);
        assert_eq!(one(true).as_slice(), one(false).as_slice(), "a lone vCPU is a core");
    }

    fn all_of(leaves: &[u32]) -> CpuId {
        let entries: Vec<_> = leaves.iter().map(|f| entry(*f, 0, [u32::MAX; 4])).collect();
        CpuId::from_entries(&entries).unwrap()
    }

    #[test]
    fn baseline_does_not_depend_on_the_host() {
        let baseline: CpuConfig = "baseline".parse().unwrap();
        let host = all_of(&[1, 6, 7, 0xd, 0x4000_0001, 0x8000_0001, 0x8000_0008]);
        let guest = restrict(&host, &baseline).unwrap();
        let at = |f| find(guest.as_slice(), f, 0);
        assert_eq!(at(7), [0; 4], "nothing of leaf 7");
        assert_eq!(at(0x4000_0001)[0], 1 << 24 | 0b1011);
        let ecx = at(1)[2] & !(OSXSAVE | HYPERVISOR | TSC_DEADLINE);
        assert_eq!(ecx, 1 | 1 << 9 | 1 << 13 | 1 << 19 | 1 << 20 | 1 << 21 | 1 << 23);
        // A host with no more than the baseline gives the same; one with less names what it lacks.
        let again = restrict(&guest, &baseline).unwrap();
        assert_eq!(again.as_slice(), guest.as_slice());
        assert_eq!(lacking(guest.as_slice(), again.as_slice()), None);
        let less = restrict(&host, &"host,-popcnt".parse().unwrap()).unwrap();
        let missing = restrict(&less, &baseline).unwrap_err().to_string();
        assert_eq!(missing, "popcnt (CPUID leaf 0x1 ECX bit 23)");
    }

    #[test]
    fn removed_feature_is_cleared_everywhere() {
        let host = all_of(&[1, 0x8000_0001]);
        let guest = restrict(&host, &"host,-cx16,-pse36".parse().unwrap()).unwrap();
        assert_eq!(find(guest.as_slice(), 1, 0)[2], !(1 << 13));
        assert_eq!(find(guest.as_slice(), 1, 0)[3], !(1 << 17));
        assert_eq!(find(guest.as_slice(), 0x8000_0001, 0)[3], !(1 << 17), "AMD repeats it");
    }

    #[test]
    fn exposed_features_are_required_of_the_next_host() {
        let vendor = |name: &[u8; 4]| entry(0, 0, [9, u32::from_le_bytes(*name), 0, 0]);
        let guest = [vendor(b"Genu"), entry(7, 0, [2, 1 << 5 | 1 << 3, 0, 0])];
        let words = exposed(&guest, &guest);
        assert_eq!(words.len(), 2);
        assert_eq!(missing(&words, &guest), None);
        assert_eq!(missing(&[], &[]), None, "a guest that has not started has seen nothing");
        let other = [vendor(b"Auth"), guest[1]];
        assert_eq!(missing(&words, &other).unwrap(), "a processor of its vendor");
        let less = [vendor(b"Genu"), entry(7, 0, [0, 1 << 3, 0, 0])];
        assert_eq!(missing(&words, &less).unwrap(), "avx2 (CPUID leaf 0x7 EBX bit 5)");
    }

    /// A host that sets every bit of every leaf that KVM may answer.
    fn everything() -> CpuId {
        let leaves = (0..=0x24).chain([0x4000_0000, 0x4000_0001]).chain(0x8000_0000..=0x8000_0022);
        let mut entries = Vec::new();
        for function in leaves {
            let subleaves = match function {
                4 | 7 | 0x12 | 0x14 | 0x1d | 0x8000_001d => 3,
                0xb | 0x1f => 2,
                0xd => 20,
                _ => 1,
            };
            entries.extend((0..subleaves).map(|i| entry(function, i, [ALL; 4])));
        }
        CpuId::from_entries(&entries).unwrap()
    }

    #[test]
    fn baseline_of_the_fullest_host_has_listed_features() {
        let guest = restrict(&everything(), &"baseline".parse().unwrap()).unwrap();
        for e in guest.as_slice() {
            let expected: Option<[u32; 4]> = match e.function {
                0 => Some([0xb, ALL, ALL, ALL]),
                // Family and model are the host's; of EBX, the size of a cache line.
                1 => Some([ALL, 0xff00, 0x00b8_2201, 0x078b_fbff]),
                6 => Some([1 << 2, 0, 0, 0]),
                0x4000_0000 => Some([0x4000_0001, ALL, ALL, ALL]),
                0x4000_0001 => Some([1 << 24 | 0b1011, 0, 0, 0]),
                0x8000_0000 => Some([0x8000_0008, ALL, ALL, ALL]),
                0x8000_0001 => Some([ALL, 0, 1 | AMD_LEGACY_CMP, 0x2193_fbff]),
                0x8000_0008 => Some([48 << 8 | 40, 0, 0, 0]),
                // Caches, cores and a name, on which no guest relies.
                2 | 4 | 0xb | 0x8000_0002..=0x8000_0006 => None,
                other => panic!("leaf {other:#x} is not in the baseline"),
            };
            if let Some(expected) = expected {
                assert_eq!([e.eax, e.ebx, e.ecx, e.edx], expected, "leaf {:#x}", e.function);
            }
        }
    }

    #[test]
    fn every_leaf_is_compared_with_the_next_host() {
        let host = everything();
        let words = exposed(host.as_slice(), host.as_slice());
        assert_eq!(missing(&words, host.as_slice()), None);
        for (function, index, register, bit, name) in [
            (0x8000_0021, 0, 0, 8, "autoibrs (CPUID leaf 0x80000021 EAX bit 8)"),
            (7, 2, 3, 4, "bhi_ctrl (CPUID leaf 0x7.2 EDX bit 4)"),
            (7, 2, 3, 2, "rrsba_ctrl (CPUID leaf 0x7.2 EDX bit 2)"),
            (7, 1, 2, 5, "CPUID leaf 0x7.1 ECX bit 5"),
            (6, 0, 0, 2, "arat (CPUID leaf 0x6 EAX bit 2)"),
            (0x8000_0007, 0, 3, 8, "constant_tsc (CPUID leaf 0x80000007 EDX bit 8)"),
            (0x8000_001f, 0, 0, 10, "CPUID leaf 0x8000001f EAX bit 10"),
            (0x8000_0022, 0, 0, 0, "perfmon_v2 (CPUID leaf 0x80000022 EAX bit 0)"),
            (0x24, 0, 1, 18, "CPUID leaf 0x24 EBX bit 18"),
            (0x12, 0, 0, 1, "CPUID leaf 0x12 EAX bit 1"),
        ] {
            let mut less = host.clone();
            change(
                &mut less,
                function,
                index,
                |i, r| if i == register { r & !(1 << bit) } else { r },
            );
            assert_eq!(missing(&words, less.as_slice()).as_deref(), Some(name));
            assert_eq!(
                missing(&exposed(less.as_slice(), host.as_slice()), host.as_slice()),
                None,
                "more features are accepted"
            );
        }
    }

    #[test]
    fn numbers_may_grow_and_not_shrink() {
        let with = |function, registers| [entry(function, 0, registers)];
        let bits = |bits: u32| with(0x8000_0008, [bits, 0, 0, 0]);
        let at = |a: &[kvm_cpuid_entry2], b: &[kvm_cpuid_entry2]| missing(&exposed(a, a), b);
        assert_eq!(at(&bits(48 << 8 | 40), &bits(48 << 8 | 46)), None);
        assert_eq!(
            at(&bits(48 << 8 | 46), &bits(48 << 8 | 40)).unwrap(),
            "46 physical address bits (CPUID leaf 0x80000008 EAX bits 7:0, here 40)"
        );
        assert!(at(&bits(57 << 8 | 46), &bits(48 << 8 | 46)).unwrap().starts_with("57 linear"));
        let counters =
            |n: u32, events: u32| with(0xa, [7 << 24 | 48 << 16 | n << 8 | 2, events, 0, 3]);
        assert_eq!(at(&counters(4, 0), &counters(8, 0)), None);
        assert!(
            at(&counters(8, 0), &counters(4, 0)).unwrap().starts_with("8 performance counters")
        );
        // An event's bit is set if it cannot be counted.
        assert_eq!(at(&counters(4, 1), &counters(4, 0)), None);
        assert!(at(&counters(4, 0), &counters(4, 1)).is_some());
        assert_eq!(at(&with(0xa, [0; 4]), &counters(4, 1)), None, "it has seen no counters");
    }

    #[test]
    fn xsave_layout_must_be_the_same() {
        let area = |size, offset, most| {
            [entry(0xd, 0, [7, 0, most, 0]), entry(0xd, 2, [size, offset, 0, 0])]
        };
        let at = |a: &[kvm_cpuid_entry2], b: &[kvm_cpuid_entry2]| missing(&exposed(a, a), b);
        assert_eq!(at(&area(256, 576, 832), &area(256, 576, 2696)), None);
        assert!(at(&area(256, 576, 832), &area(256, 576, 576)).is_some());
        assert_eq!(
            at(&area(256, 576, 832), &area(256, 640, 896)).unwrap(),
            "the value 576 (CPUID leaf 0xd.2 EBX, here 640)"
        );
        assert!(at(&area(256, 576, 832), &area(256, 576, 832)[..1]).is_some());
    }
}
