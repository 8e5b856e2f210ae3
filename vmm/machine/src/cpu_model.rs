//! The names of processor features: where CPUID reports each, and which features make up the
//! baseline.
//!
//! Names are those of Linux's `/proc/cpuinfo`; KVM's own features have the prefix `kvm`.

use std::fmt;

use vmm_sys_util::fam;

/// Place of a feature: leaf, subleaf, register (EAX, EBX, ECX, EDX), bit.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct FeatureBit {
    pub(crate) function: u32,
    pub(crate) index: u32,
    pub(crate) register: usize,
    pub(crate) bit: u8,
}

/// Writes the feature's name and where CPUID reports it.
impl fmt::Display for FeatureBit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let &Self { function, index, register, bit } = self;
        let found = NAMES.iter().find(|n| (n.0, n.1, n.2) == (function, index, register));
        let name = found.and_then(|n| n.3.iter().find(|(b, _)| *b == bit)).map(|(_, name)| *name);
        let place = describe_register(*self);
        match name {
            Some(name) => write!(f, "{name} ({place} bit {bit})"),
            None => write!(f, "{place} bit {bit}"),
        }
    }
}

/// A number in a register of CPUID that is not the one that a guest needs.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct FeatureNumber {
    /// The register; its bit is not used.
    pub(crate) place: FeatureBit,
    /// The number's lowest bit.
    pub(crate) low: u32,
    /// Number of bits.
    pub(crate) count: u32,
    /// The number that the guest needs.
    pub(crate) wants: u32,
    /// The number that the host has.
    pub(crate) has: u32,
}

/// Writes the number that the guest needs, what it counts, its place, and this host's number.
impl fmt::Display for FeatureNumber {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let &Self { place, low, count, wants, has } = self;
        let named = |n: &&NumberName| n.0 == place.function && n.1 == place.register && n.2 == low;
        match NUMBER_NAMES.iter().find(named).filter(|_| count < 32) {
            Some((.., name)) => write!(f, "{wants} {name}")?,
            None => write!(f, "the value {wants}")?,
        }
        write!(f, " ({}", describe_register(place))?;
        if count < 32 {
            write!(f, " bits {}:{low}", low + count - 1)?;
        }
        write!(f, ", here {has})")
    }
}

/// What the host's processor lacks for a processor model.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum MissingFeature {
    /// The processor does not have a feature.
    #[error("{0}")]
    Feature(FeatureBit),
    /// KVM takes no CPUID table of the model's size.
    #[error("a CPUID table of its size ({0})")]
    Table(#[source] fam::Error),
}

const EAX: usize = 0;
const EBX: usize = 1;
const ECX: usize = 2;
const EDX: usize = 3;

/// The names of one register's bits.
type RegisterBitNames = (u32, u32, usize, &'static [(u8, &'static str)]);

const NAMES: &[RegisterBitNames] = &[
    (
        0x1,
        0,
        EDX,
        &[
            (0, "fpu"),
            (1, "vme"),
            (2, "de"),
            (3, "pse"),
            (4, "tsc"),
            (5, "msr"),
            (6, "pae"),
            (7, "mce"),
            (8, "cx8"),
            (9, "apic"),
            (11, "sep"),
            (12, "mtrr"),
            (13, "pge"),
            (14, "mca"),
            (15, "cmov"),
            (16, "pat"),
            (17, "pse36"),
            (19, "clflush"),
            (23, "mmx"),
            (24, "fxsr"),
            (25, "sse"),
            (26, "sse2"),
            (27, "ss"),
        ],
    ),
    (
        0x1,
        0,
        ECX,
        &[
            (0, "pni"),
            (1, "pclmulqdq"),
            (3, "monitor"),
            (6, "smx"),
            (9, "ssse3"),
            (12, "fma"),
            (13, "cx16"),
            (15, "pdcm"),
            (17, "pcid"),
            (19, "sse4_1"),
            (20, "sse4_2"),
            (21, "x2apic"),
            (22, "movbe"),
            (23, "popcnt"),
            (24, "tsc_deadline_timer"),
            (25, "aes"),
            (26, "xsave"),
            (28, "avx"),
            (29, "f16c"),
            (30, "rdrand"),
        ],
    ),
    (0x6, 0, EAX, &[(2, "arat")]),
    (
        0x7,
        0,
        EBX,
        &[
            (0, "fsgsbase"),
            (1, "tsc_adjust"),
            (3, "bmi1"),
            (4, "hle"),
            (5, "avx2"),
            (7, "smep"),
            (8, "bmi2"),
            (9, "erms"),
            (10, "invpcid"),
            (11, "rtm"),
            (14, "mpx"),
            (16, "avx512f"),
            (17, "avx512dq"),
            (18, "rdseed"),
            (19, "adx"),
            (20, "smap"),
            (21, "avx512ifma"),
            (23, "clflushopt"),
            (24, "clwb"),
            (28, "avx512cd"),
            (29, "sha_ni"),
            (30, "avx512bw"),
            (31, "avx512vl"),
        ],
    ),
    (
        0x7,
        0,
        ECX,
        &[
            (1, "avx512vbmi"),
            (2, "umip"),
            (3, "pku"),
            (5, "waitpkg"),
            (6, "avx512_vbmi2"),
            (7, "shstk"),
            (8, "gfni"),
            (9, "vaes"),
            (10, "vpclmulqdq"),
            (11, "avx512_vnni"),
            (12, "avx512_bitalg"),
            (14, "avx512_vpopcntdq"),
            (16, "la57"),
            (22, "rdpid"),
            (24, "bus_lock_detect"),
            (25, "cldemote"),
            (27, "movdiri"),
            (28, "movdir64b"),
            (31, "pks"),
        ],
    ),
    (
        0x7,
        0,
        EDX,
        &[
            (4, "fsrm"),
            (5, "uintr"),
            (8, "avx512_vp2intersect"),
            (10, "md_clear"),
            (14, "serialize"),
            (16, "tsxldtrk"),
            (20, "ibt"),
            (22, "amx_bf16"),
            (23, "avx512_fp16"),
            (24, "amx_tile"),
            (25, "amx_int8"),
            (26, "spec_ctrl"),
            (27, "intel_stibp"),
            (28, "flush_l1d"),
            (29, "arch_capabilities"),
            (31, "ssbd"),
        ],
    ),
    (
        0x7,
        1,
        EAX,
        &[
            (4, "avx_vnni"),
            (5, "avx512_bf16"),
            (10, "fzrm"),
            (11, "fsrs"),
            (12, "fsrc"),
            (17, "fred"),
            (21, "amx_fp16"),
            (23, "avx_ifma"),
            (26, "lam"),
        ],
    ),
    (
        0x7,
        2,
        EDX,
        &[
            (0, "intel_psfd"),
            (1, "ipred_ctrl"),
            (2, "rrsba_ctrl"),
            (3, "ddpd_u"),
            (4, "bhi_ctrl"),
            (5, "mcdt_no"),
        ],
    ),
    (0xd, 1, EAX, &[(0, "xsaveopt"), (1, "xsavec"), (2, "xgetbv1"), (3, "xsaves")]),
    (
        0x8000_0001,
        0,
        EDX,
        &[
            (11, "syscall"),
            (20, "nx"),
            (22, "mmxext"),
            (25, "fxsr_opt"),
            (26, "pdpe1gb"),
            (27, "rdtscp"),
            (29, "lm"),
        ],
    ),
    (
        0x8000_0001,
        0,
        ECX,
        &[
            (0, "lahf_lm"),
            (2, "svm"),
            (4, "cr8_legacy"),
            (5, "abm"),
            (6, "sse4a"),
            (7, "misalignsse"),
            (8, "3dnowprefetch"),
            (9, "osvw"),
            (11, "xop"),
            (16, "fma4"),
            (17, "tce"),
            (21, "tbm"),
            (22, "topoext"),
            (23, "perfctr_core"),
        ],
    ),
    (
        0x8000_0008,
        0,
        EBX,
        &[
            (0, "clzero"),
            (2, "xsaveerptr"),
            (9, "wbnoinvd"),
            (12, "ibpb"),
            (14, "ibrs"),
            (15, "stibp"),
            (24, "amd_ssbd"),
            (25, "virt_ssbd"),
        ],
    ),
    (0x8000_0007, 0, EDX, &[(8, "constant_tsc")]),
    (
        0x8000_0021,
        0,
        EAX,
        &[
            (0, "no_nested_data_bp"),
            (2, "lfence_rdtsc"),
            (5, "verw_clear"),
            (6, "null_sel_clr_base"),
            (7, "uai"),
            (8, "autoibrs"),
            (9, "no_smm_ctl_msr"),
            (27, "sbpb"),
            (28, "ibpb_brtype"),
            (29, "srso_no"),
            (30, "srso_user_kernel_no"),
        ],
    ),
    (0x8000_0022, 0, EAX, &[(0, "perfmon_v2")]),
    (
        0x4000_0001,
        0,
        EAX,
        &[
            (0, "kvmclock"),
            (1, "kvm_nopiodelay"),
            (3, "kvmclock2"),
            (4, "kvm_asyncpf"),
            (5, "kvm_steal_time"),
            (6, "kvm_pv_eoi"),
            (7, "kvm_pv_unhalt"),
            (9, "kvm_pv_tlb_flush"),
            (10, "kvm_asyncpf_vmexit"),
            (11, "kvm_pv_ipi"),
            (12, "kvm_poll_control"),
            (13, "kvm_pv_sched_yield"),
            (14, "kvm_asyncpf_int"),
            (15, "kvm_msi_ext_dest_id"),
            (24, "kvmclock_stable"),
        ],
    ),
];

/// The baseline: the psABI's x86-64-v2, the further features that an operating system needs, and
/// KVM's clock. Every x86 server since 2011 has it, under any kernel that this VMM runs on. A KVM
/// without hardware support may not.
pub(crate) const BASELINE: &[&str] = &[
    "fpu",
    "vme",
    "de",
    "pse",
    "tsc",
    "msr",
    "pae",
    "mce",
    "cx8",
    "apic",
    "sep",
    "mtrr",
    "pge",
    "mca",
    "cmov",
    "pat",
    "pse36",
    "clflush",
    "mmx",
    "fxsr",
    "sse",
    "sse2",
    "pni",
    "ssse3",
    "cx16",
    "sse4_1",
    "sse4_2",
    "x2apic",
    "popcnt",
    "arat",
    "syscall",
    "nx",
    "lm",
    "lahf_lm",
    "kvmclock",
    "kvm_nopiodelay",
    "kvmclock2",
    "kvmclock_stable",
];

/// Returns the names of all features.
pub(crate) fn names() -> impl Iterator<Item = &'static str> {
    NAMES.iter().flat_map(|(.., names)| names.iter().map(|(_, name)| *name))
}

/// Returns the name that `name` probably misspells: the one with the fewest edits, if they change
/// at most a third of it.
pub(crate) fn nearest(name: &str) -> Option<&'static str> {
    let edits = |known: &&str| strsim::damerau_levenshtein(name, known);
    of_similar_length(name).min_by_key(edits).filter(|known| edits(known) * 3 <= known.len())
}

/// Returns the names that `name` can become with edits of at most a third of them. For a long
/// `name` there are none, so the cost of [`nearest`] is bounded.
fn of_similar_length(name: &str) -> impl Iterator<Item = &'static str> {
    let length = name.chars().count();
    names().filter(move |known| length.abs_diff(known.len()) * 3 <= known.len())
}

/// Returns the place of the feature called `name`.
pub fn find(name: &str) -> Option<FeatureBit> {
    NAMES.iter().find_map(|&(function, index, register, names)| {
        let (bit, _) = names.iter().find(|(_, n)| *n == name)?;
        Some(FeatureBit { function, index, register, bit: *bit })
    })
}

fn describe_register(FeatureBit { function, index, register, .. }: FeatureBit) -> String {
    let leaf = if index == 0 { format!("{function:#x}") } else { format!("{function:#x}.{index}") };
    let register = ["EAX", "EBX", "ECX", "EDX"].get(register).copied().unwrap_or("?");
    format!("CPUID leaf {leaf} {register}")
}

/// The name of a number in a register: leaf, register, lowest bit, name.
type NumberName = (u32, usize, u32, &'static str);

const NUMBER_NAMES: &[NumberName] = &[
    (0xa, EAX, 8, "performance counters"),
    (0xa, EAX, 16, "bits in a performance counter"),
    (0xa, EAX, 24, "architectural events"),
    (0xa, EDX, 0, "fixed performance counters"),
    (0xa, EDX, 5, "bits in a fixed performance counter"),
    (0x8000_0008, EAX, 0, "physical address bits"),
    (0x8000_0008, EAX, 8, "linear address bits"),
];

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    #[test]
    fn names_and_bits_are_unique() {
        let all: Vec<&str> = names().collect();
        assert_eq!(all.iter().collect::<HashSet<_>>().len(), all.len());
        for (.., names) in NAMES {
            let bits: HashSet<u8> = names.iter().map(|(bit, _)| *bit).collect();
            assert_eq!(bits.len(), names.len());
            assert!(bits.iter().all(|b| *b < 32));
        }
        assert!(BASELINE.iter().all(|name| find(name).is_some()));
    }

    #[test]
    fn a_feature_is_described_by_name_and_place() {
        let place = find("avx2").unwrap();
        assert_eq!(place.to_string(), "avx2 (CPUID leaf 0x7 EBX bit 5)");
        assert_eq!(FeatureBit { bit: 2, ..place }.to_string(), "CPUID leaf 0x7 EBX bit 2");
        assert_eq!(find("avx_vnni").unwrap().to_string(), "avx_vnni (CPUID leaf 0x7.1 EAX bit 4)");
        assert_eq!(find("warp_drive"), None);
    }

    #[test]
    fn misspelled_feature_has_a_nearest_name() {
        for (given, meant) in [("avx5l2f", "avx512f"), ("sse4.2", "sse4_2"), ("popcount", "popcnt")]
        {
            assert_eq!(nearest(given), Some(meant));
        }
        for strange in ["", "warp", "a-long-name-that-means-nothing"] {
            assert_eq!(nearest(strange), None, "{strange}");
        }
    }

    #[test]
    fn long_name_is_compared_with_no_feature() {
        assert_eq!(of_similar_length(&"avx512".repeat(1 << 14)).next(), None);
        assert!(of_similar_length("avx5l2f").any(|known| known == "avx512f"));
    }
}
