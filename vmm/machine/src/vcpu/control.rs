//! Checks whether the control registers of a state fit the processor that the state describes. KVM
//! accepts bits of EFER that the host's processor lacks, and fails when the guest is entered. By
//! then the guest has left its old host. KVM itself refuses bad bits of CR4, but does not report
//! which. Some hosts' KVM sets CR4 bits that it does not list, so CR4 is examined only after a
//! refusal.

use kvm_bindings::{kvm_cpuid_entry2, kvm_sregs};

use super::leaves::has_feature;
use crate::kvm::{CR0_PG, CR4_PAE, EFER_LMA};

/// A bit of a control register, and the features of which at least one is required for it.
type Needs = (u32, &'static [&'static str]);

const EFER: &[Needs] = &[
    (0, &["syscall"]),
    (8, &["lm"]),
    (10, &["lm"]),
    (11, &["nx"]),
    (14, &["fxsr_opt"]),
    (15, &["tce"]),
    (20, &["uai"]),
    (21, &["autoibrs"]),
];

/// Every processor that KVM runs on has the bits below.
const CR4_FIRST: u32 = 11;
const CR4: &[Needs] = &[
    (11, &["umip"]),
    (12, &["la57"]),
    (14, &["smx"]),
    (16, &["fsgsbase"]),
    (17, &["pcid"]),
    (18, &["xsave"]),
    (20, &["smep"]),
    (21, &["smap"]),
    (22, &["pku"]),
    (23, &["shstk", "ibt"]),
    (24, &["pks"]),
    (25, &["uintr"]),
    (28, &["lam"]),
    (32, &["fred"]),
];

/// A bit of a control register that the processor does not have.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error("bit {bit} of its {register} {value:#x} {}", because(.needs))]
pub struct ForeignBit {
    register: &'static str,
    value: u64,
    bit: u32,
    /// The features of which at least one is required; none if the bit is unknown.
    needs: &'static [&'static str],
}

fn because(needs: &[&str]) -> String {
    match needs {
        [] => "belongs to no feature".to_owned(),
        needs => format!("needs {}", needs.join(" or ")),
    }
}

/// Refuses special registers with bits of EFER that a processor with this `cpuid` does not have.
pub(super) fn check_efer(sregs: &kvm_sregs, cpuid: &[kvm_cpuid_entry2]) -> Result<(), ForeignBit> {
    check_register("EFER", sregs.efer, EFER, cpuid)
}

/// Returns the bit of CR4 that a processor with this `cpuid` does not have, if there is one: the
/// likely reason why KVM has refused these special registers.
pub(super) fn foreign_cr4(sregs: &kvm_sregs, cpuid: &[kvm_cpuid_entry2]) -> Option<ForeignBit> {
    check_register("CR4", sregs.cr4 >> CR4_FIRST << CR4_FIRST, CR4, cpuid).err()
}

/// Returns whether page directory pointers belong to these special registers. Under PAE paging,
/// which 32-bit kernels use, the processor holds them, and guest memory need not have the same
/// values.
pub(super) fn has_pdptrs(sregs: &kvm_sregs) -> bool {
    sregs.cr0 & CR0_PG != 0 && sregs.cr4 & CR4_PAE != 0 && sregs.efer & EFER_LMA == 0
}

fn check_register(
    register: &'static str,
    value: u64,
    table: &'static [Needs],
    cpuid: &[kvm_cpuid_entry2],
) -> Result<(), ForeignBit> {
    for bit in (0..u64::BITS).filter(|bit| value >> bit & 1 != 0) {
        let needs = table.iter().find(|(b, _)| *b == bit).map_or(&[][..], |(_, any)| *any);
        if !needs.iter().any(|feature| has_feature(cpuid, feature)) {
            return Err(ForeignBit { register, value, bit, needs });
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::super::leaves::entry;
    use super::*;
    use crate::cpu_model;

    #[test]
    fn every_needed_feature_has_a_cpuid_bit() {
        for (_, any) in EFER.iter().chain(CR4) {
            assert!(any.iter().all(|f| cpu_model::find(f).is_some()), "{any:?}");
        }
    }

    #[test]
    fn only_pae_paging_has_pdptrs() {
        let of = |cr0, cr4, efer| has_pdptrs(&kvm_sregs { cr0, cr4, efer, ..Default::default() });
        // Without paging; 32-bit tables of two levels; of three; 64-bit.
        assert!(!of(0x11, 0x20, 0));
        assert!(!of(0x8000_0011, 0, 0));
        assert!(of(0x8000_0011, 0x20, 0));
        assert!(of(0x8000_0011, 0x20, 1 << 11));
        assert!(!of(0x8000_0011, 0x20, 0xd01));
    }

    #[test]
    fn bits_that_the_processor_lacks_are_named() {
        let cpuid = [
            entry(7, 0, [0, 1 << 20 | 1 << 7, 0, 0]),
            entry(0x8000_0001, 0, [0, 0, 0, 1 << 29 | 1 << 20 | 1 << 11]),
        ];
        let efer = |efer| check_efer(&kvm_sregs { efer, ..Default::default() }, &cpuid);
        assert_eq!(efer(0xd01), Ok(()));
        assert_eq!(efer(0), Ok(()));
        assert_eq!(
            efer(0x20_0d01).unwrap_err().to_string(),
            "bit 21 of its EFER 0x200d01 needs autoibrs"
        );
        assert_eq!(
            efer(1 << 12).unwrap_err().to_string(),
            "bit 12 of its EFER 0x1000 belongs to no feature"
        );
        let cr4 = |cr4| foreign_cr4(&kvm_sregs { cr4, ..Default::default() }, &cpuid);
        assert_eq!(cr4(0x30_07f0), None);
        assert_eq!(cr4(0), None);
        assert_eq!(cr4(1 << 17).unwrap().to_string(), "bit 17 of its CR4 0x20000 needs pcid");
        assert_eq!(
            cr4(1 << 23).unwrap().to_string(),
            "bit 23 of its CR4 0x800000 needs shstk or ibt"
        );
        assert_eq!(
            cr4(1 << 13).unwrap().to_string(),
            "bit 13 of its CR4 0x2000 belongs to no feature"
        );
    }
}
