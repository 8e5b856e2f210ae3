//! A vCPU's model-specific registers: which are part of a state, which values a new guest finds in
//! them, and which of them another host may refuse.

use kvm_bindings::*;
use kvm_ioctls::{Kvm, VcpuFd};

use super::error::VcpuError;
use super::lack::{ARCH_CAPABILITIES, MsrLack, PERF_CAPABILITIES, RefusedMsr};
use super::leaves::{LEAF_EXTENDED_FEATURES, LEAF_FEATURES, find};
use crate::config::MsrWord;

pub(super) const MSR_TSC: u32 = 0x10;
pub(super) const MSR_TSC_DEADLINE: u32 = 0x6e0;
pub(super) const MSR_KERNEL_GS_BASE: u32 = 0xc000_0102;
/// Writing them makes KVM write the host's wall clock into guest memory, at an address that the
/// guest may use for something else by now. Guests write them again before they read the clock.
const KVM_WALL_CLOCK: u32 = 0x11;
const KVM_WALL_CLOCK_NEW: u32 = 0x4b56_4d00;

const MISC_ENABLE: u32 = 0x1a0;
const MTRR_DEF_TYPE: u32 = 0x2ff;
const SMBASE: u32 = 0x9e;
const AMD_HWCR: u32 = 0xc001_0015;
const AMD_TSC_RATIO: u32 = 0xc000_0104;

/// Leaf 7 EDX, leaf 1 ECX, leaf 1 EDX.
const HAS_ARCH_CAPABILITIES: u32 = 1 << 29;
const HAS_PERF_CAPABILITIES: u32 = 1 << 15;
const HAS_MTRR: u32 = 1 << 12;

/// Values that firmware would set: string instructions may be fast; memory is write-back unless a
/// range register says otherwise, and range registers are enabled.
const FAST_STRING: u64 = 1 << 0;
const MTRR_WRITE_BACK: u64 = 1 << 11 | 6;

/// The memory type range registers, which KVM has but does not list: eight pairs, eleven of fixed
/// ranges, and the default type.
const MTRRS: &[u32] = &[
    0x200,
    0x201,
    0x202,
    0x203,
    0x204,
    0x205,
    0x206,
    0x207,
    0x208,
    0x209,
    0x20a,
    0x20b,
    0x20c,
    0x20d,
    0x20e,
    0x20f,
    0x250,
    0x258,
    0x259,
    0x268,
    0x269,
    0x26a,
    0x26b,
    0x26c,
    0x26d,
    0x26e,
    0x26f,
    MTRR_DEF_TYPE,
];

/// Returns whether a register is not part of a state. Guests are shown neither Hyper-V nor nested
/// virtualization, so these registers contain nothing from a guest; yet some of them read as
/// something else than 0.
fn is_skipped(index: u32) -> bool {
    match index {
        KVM_WALL_CLOCK | KVM_WALL_CLOCK_NEW => true,
        // Hyper-V's registers and those of its debugger.
        0x4000_0000..=0x4000_01ff => true,
        // VMX; SVM's save area and its ratio.
        0x480..=0x493 | 0xc001_0117 | AMD_TSC_RATIO => true,
        _ => false,
    }
}

/// Returns why a guest continues unharmed although this host refused `index`; `None` if it
/// cannot continue.
fn why_tolerated(index: u32) -> Option<&'static str> {
    match index {
        SMBASE => Some("no guest has code in system management mode"),
        AMD_HWCR => {
            Some("KVM's part of it only reports how the TSC counts, and injects test errors")
        }
        _ => None,
    }
}

/// Returns whether the guest cannot know of `index`, judging by the CPUID that is exposed to it.
/// The register then reads as 0.
fn is_hidden(index: u32, cpuid: &[kvm_cpuid_entry2]) -> bool {
    match index {
        ARCH_CAPABILITIES => find(cpuid, LEAF_EXTENDED_FEATURES, 0)[3] & HAS_ARCH_CAPABILITIES == 0,
        PERF_CAPABILITIES => find(cpuid, LEAF_FEATURES, 0)[2] & HAS_PERF_CAPABILITIES == 0,
        _ => false,
    }
}

/// Returns the registers that are part of a vCPU's state, from `listed` and from those that KVM
/// does not list. `listed` may contain duplicates.
pub(super) fn saved(vcpu: &VcpuFd, listed: &[u32]) -> Result<Vec<u32>, VcpuError> {
    let mut indices: Vec<u32> = Vec::with_capacity(listed.len() + MTRRS.len());
    for index in listed.iter().chain(MTRRS) {
        if !is_skipped(*index) && !indices.contains(index) {
            indices.push(*index);
        }
    }
    Ok(read(vcpu, &indices)?.iter().map(|m| m.index).collect())
}

/// Returns the value of a saved register to write into this vCPU; `None` if it is not part of a
/// state.
pub(super) fn to_restore(
    mut msr: kvm_msr_entry,
    cpuid: &[kvm_cpuid_entry2],
) -> Option<kvm_msr_entry> {
    if is_skipped(msr.index) {
        return None;
    }
    if is_hidden(msr.index, cpuid) {
        msr.data = 0;
    }
    Some(msr)
}

/// Checks the registers that this host `refused`. A register whose value is 0 is accepted: the host
/// has that value anyway.
pub(super) fn check_refused(refused: &[kvm_msr_entry]) -> Result<(), RefusedMsr> {
    for &kvm_msr_entry { index, data, .. } in refused.iter().filter(|m| m.data != 0) {
        let Some(reason) = why_tolerated(index) else {
            return Err(RefusedMsr { index, data });
        };
        tracing::info!("this host does not take MSR {index:#x} = {data:#x}; {reason}");
    }
    Ok(())
}

/// Gives a new vCPU, whose CPUID is set, the register values that firmware would have left, and
/// clears the registers that its CPUID hides. A KVM that lacks one of these registers behaves as if
/// it were 0.
pub fn set_first_values(vcpu: &VcpuFd, cpuid: &[kvm_cpuid_entry2]) -> Result<(), VcpuError> {
    let mut first: Vec<kvm_msr_entry> = [ARCH_CAPABILITIES, PERF_CAPABILITIES]
        .into_iter()
        .filter(|index| is_hidden(*index, cpuid))
        .map(|index| entry(index, 0))
        .collect();
    if let [misc] = read(vcpu, &[MISC_ENABLE])?[..] {
        first.push(entry(MISC_ENABLE, misc.data | FAST_STRING));
    }
    if find(cpuid, LEAF_FEATURES, 0)[3] & HAS_MTRR != 0 {
        first.push(entry(MTRR_DEF_TYPE, MTRR_WRITE_BACK));
    }
    let refused = write(vcpu, &first);
    for kvm_msr_entry { index, data, .. } in refused.map_err(VcpuError::kvm("KVM_SET_MSRS"))? {
        tracing::debug!("MSR {index:#x} cannot be set to {data:#x} here");
    }
    Ok(())
}

/// Returns the feature registers by which `vcpu` describes the processor to its guest, reduced to
/// `host`, what this host's KVM has.
pub fn exposed(
    vcpu: &VcpuFd,
    cpuid: &[kvm_cpuid_entry2],
    host: &[MsrWord],
) -> Result<Vec<MsrWord>, VcpuError> {
    let indices = [ARCH_CAPABILITIES, PERF_CAPABILITIES].into_iter();
    let indices: Vec<u32> = indices.filter(|i| !is_hidden(*i, cpuid)).collect();
    let read = read(vcpu, &indices)?;
    let words = read.iter().map(|msr| {
        let host = host.iter().find(|word| word.index == msr.index).map_or(0, |word| word.value);
        MsrWord { index: msr.index, value: had(msr.index, msr.data, host) }
    });
    Ok(words.filter(|w| w.value != 0).collect())
}

/// Returns the part of a feature register's value that is not only the template's.
fn had(index: u32, value: u64, host: u64) -> u64 {
    let format = if index == PERF_CAPABILITIES { LBR_FORMAT } else { 0 };
    let format = if (value ^ host) & format == 0 { format } else { 0 };
    value & (host & compared_bits(index) | format)
}

/// Returns the first thing that a guest that was shown `words` would miss in `offered`.
pub fn missing(words: &[MsrWord], offered: &[MsrWord]) -> Option<MsrLack> {
    words.iter().find_map(|&MsrWord { index, value }| {
        let host = offered.iter().find(|w| w.index == index).map_or(0, |w| w.value);
        let lacks = value & !host & compared_bits(index);
        if lacks != 0 {
            return Some(MsrLack::Bit { index, bit: lacks.trailing_zeros() });
        }
        let (wants, has) = (value & LBR_FORMAT, host & LBR_FORMAT);
        (index == PERF_CAPABILITIES && wants != 0 && wants != has)
            .then_some(MsrLack::BranchRecords { wants, has })
    })
}

/// PERF_CAPABILITIES: the format of branch records, a number.
const LBR_FORMAT: u64 = 0x3f;

/// Returns the bits of a feature register that report a feature, or a vulnerability that the
/// processor does not have.
fn compared_bits(index: u32) -> u64 {
    match index {
        // RSBA and RRSBA report a vulnerability.
        ARCH_CAPABILITIES => !(1 << 2 | 1 << 19),
        PERF_CAPABILITIES => !LBR_FORMAT,
        _ => 0,
    }
}

/// Returns the feature registers that this host's KVM has.
pub fn offered(kvm: &Kvm) -> Vec<MsrWord> {
    let one = |index| {
        let mut msrs = Msrs::from_entries(&[entry(index, 0)]).ok()?;
        // Fails for a KVM without the register, and for one that is too old for the query.
        let read = kvm.get_msrs(&mut msrs).ok().filter(|read| *read == 1)?;
        msrs.as_slice().get(read - 1).map(|m| MsrWord { index, value: m.data })
    };
    [ARCH_CAPABILITIES, PERF_CAPABILITIES].into_iter().filter_map(one).collect()
}

fn entry(index: u32, data: u64) -> kvm_msr_entry {
    kvm_msr_entry { index, data, ..Default::default() }
}

/// Returns the values of those of `indices` that can be read.
pub fn read(vcpu: &VcpuFd, indices: &[u32]) -> Result<Vec<kvm_msr_entry>, VcpuError> {
    const WHAT: &str = "KVM_GET_MSRS";
    let mut out = Vec::with_capacity(indices.len());
    let mut rest = indices;
    while !rest.is_empty() {
        let wanted: Vec<kvm_msr_entry> =
            rest.iter().take(KVM_MAX_MSR_ENTRIES).map(|&index| entry(index, 0)).collect();
        let mut msrs = Msrs::from_entries(&wanted)
            .map_err(|e| VcpuError::kvm(WHAT)(std::io::Error::other(e)))?;
        let read = vcpu.get_msrs(&mut msrs);
        let read = read.map_err(VcpuError::kvm(WHAT))?;
        // KVM stops at the first register that it cannot read.
        let read = read.min(wanted.len());
        out.extend_from_slice(&msrs.as_slice()[..read]);
        rest = &rest[(read + usize::from(read < wanted.len())).min(rest.len())..];
    }
    Ok(out)
}

/// Writes `msrs` in order; returns those that the host refused.
pub fn write(vcpu: &VcpuFd, msrs: &[kvm_msr_entry]) -> Result<Vec<kvm_msr_entry>, std::io::Error> {
    let mut refused = Vec::new();
    let mut rest = msrs;
    while !rest.is_empty() {
        let chunk = &rest[..rest.len().min(KVM_MAX_MSR_ENTRIES)];
        let put = Msrs::from_entries(chunk).map_err(std::io::Error::other)?;
        let written = vcpu.set_msrs(&put)?.min(chunk.len());
        refused.extend(chunk.get(written));
        rest = &rest[(written + usize::from(written < chunk.len())).min(rest.len())..];
    }
    Ok(refused)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::kvm_or_skip;
    use crate::vcpu::cpuid;

    /// A vCPU whose processor is this host's without `without`.
    fn vcpu(without: &str) -> (VcpuFd, CpuId) {
        let kvm = Kvm::new().unwrap();
        let supported = kvm.get_supported_cpuid(KVM_MAX_CPUID_ENTRIES).unwrap();
        let cpuid =
            cpuid::restrict(&supported, &format!("host{without}").parse().unwrap()).unwrap();
        let vm = kvm.create_vm().unwrap();
        vm.create_irq_chip().unwrap();
        let vcpu = vm.create_vcpu(0).unwrap();
        vcpu.set_cpuid2(&cpuid).unwrap();
        (vcpu, cpuid)
    }

    fn value(vcpu: &VcpuFd, index: u32) -> Option<u64> {
        read(vcpu, &[index]).unwrap().first().map(|m| m.data)
    }

    #[test]
    fn new_guest_has_the_msrs_of_a_firmware() {
        if !kvm_or_skip("new_guest_has_the_msrs_of_a_firmware") {
            return;
        }
        let (vcpu, cpuid) = vcpu("");
        set_first_values(&vcpu, cpuid.as_slice()).unwrap();
        assert_eq!(value(&vcpu, MTRR_DEF_TYPE), Some(MTRR_WRITE_BACK));
        assert_eq!(value(&vcpu, MISC_ENABLE).unwrap() & FAST_STRING, FAST_STRING);
        // A guest that continues on another host reads the same.
        let kvm = Kvm::new().unwrap();
        let listed = kvm.get_msr_index_list().unwrap();
        let saved = saved(&vcpu, listed.as_slice()).unwrap();
        assert!(saved.contains(&MTRR_DEF_TYPE) && saved.contains(&MISC_ENABLE));
        assert!(saved.contains(&0x200) && saved.contains(&0x26f));
    }

    #[test]
    fn a_feature_register_that_cpuid_hides_is_empty() {
        if !kvm_or_skip("a_feature_register_that_cpuid_hides_is_empty") {
            return;
        }
        let (vcpu, cpuid) = vcpu(",-arch_capabilities,-pdcm");
        set_first_values(&vcpu, cpuid.as_slice()).unwrap();
        assert_eq!(value(&vcpu, ARCH_CAPABILITIES).unwrap_or(0), 0);
        assert_eq!(exposed(&vcpu, cpuid.as_slice(), &[]).unwrap(), []);
        // A state with a value there does not fill it either.
        let msr = to_restore(entry(ARCH_CAPABILITIES, 0xeb), cpuid.as_slice()).unwrap();
        assert_eq!(msr.data, 0);
    }

    #[test]
    fn refused_msr_is_named_with_its_value() {
        assert_eq!(check_refused(&[entry(0x345, 0), entry(0x9e, 0x3_0000)]), Ok(()));
        let why =
            check_refused(&[entry(SMBASE, 0x3_0000), entry(0x345, 0x2c5)]).unwrap_err().to_string();
        assert_eq!(why, "this host does not take MSR 0x345 = 0x2c5");
        for index in [0x4000_0020, 0x480, KVM_WALL_CLOCK_NEW] {
            assert!(to_restore(entry(index, 1), &[]).is_none(), "{index:#x}");
        }
    }

    #[test]
    fn feature_msrs_are_required_of_the_next_host() {
        let word = |index, value| MsrWord { index, value };
        let here = [word(ARCH_CAPABILITIES, 0b1011), word(PERF_CAPABILITIES, 0x205)];
        assert_eq!(missing(&here, &here), None);
        assert_eq!(missing(&[], &here), None);
        assert_eq!(missing(&[word(ARCH_CAPABILITIES, 0b11 | 1 << 19)], &here), None, "a warning");
        assert_eq!(
            missing(&[word(ARCH_CAPABILITIES, 1 << 5)], &here).unwrap().to_string(),
            "bit 5 of IA32_ARCH_CAPABILITIES (MSR 0x10a)"
        );
        assert_eq!(
            missing(&[word(PERF_CAPABILITIES, 0x206)], &here).unwrap().to_string(),
            "branch records of format 6 (IA32_PERF_CAPABILITIES, MSR 0x345, here 5)"
        );
        assert!(missing(&here, &[]).is_some());
    }

    #[test]
    fn only_what_kvm_has_is_required() {
        assert_eq!(had(ARCH_CAPABILITIES, 0b1011 | 1 << 19, 0b1001 | 1 << 19), 0b1001);
        assert_eq!(had(PERF_CAPABILITIES, 0x1c5, 0x0c5), 0x0c5);
        assert_eq!(had(PERF_CAPABILITIES, 0x1c6, 0x0c5), 0x0c0, "a format that KVM does not have");
    }
}
