//! A CPU template: changes of the bits of CPUID and of model-specific registers, which a client
//! chooses for a guest.

use std::ops::{BitAnd, BitOr, Not};

use serde::{Deserialize, Serialize};

use super::error::{ConfigError, in_range};
use crate::codec::at_most;

/// Limit of required capabilities. KVM has fewer than this.
const MAX_CAPABILITIES: usize = 256;
/// Limit of changed leaves: KVM's CPUID tables have no more entries.
const MAX_LEAVES: usize = 256;
/// Limit of changed registers. KVM has fewer than this.
const MAX_MSRS: usize = 1024;

/// A change of some bits of a register.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct ChangedBits<T> {
    /// Bits that change.
    pub mask: T,
    /// New values of these bits.
    pub value: T,
}

impl<T> ChangedBits<T>
where
    T: Copy + BitAnd<Output = T> + BitOr<Output = T> + Not<Output = T>,
{
    /// Returns the changed register.
    pub fn apply(self, old: T) -> T {
        old & !self.mask | self.value & self.mask
    }

    /// Returns the change that has the effect of this one and then of `next`.
    fn then(self, next: Self) -> Self {
        Self { mask: self.mask | next.mask, value: next.apply(self.value) }
    }
}

/// A change of one CPUID leaf.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct CpuidChange {
    /// Input EAX: the leaf.
    pub function: u32,
    /// Input ECX: the subleaf.
    pub index: u32,
    /// Flags of the entry (`KVM_CPUID_FLAG_*`), which replace those that KVM reports.
    pub flags: u32,
    /// Changes of EAX, EBX, ECX, EDX.
    pub registers: [ChangedBits<u32>; 4],
}

/// A change of one model-specific register.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct MsrChange {
    /// The register's number.
    pub index: u32,
    /// The changed bits.
    pub bits: ChangedBits<u64>,
}

/// A CPU template. The empty one changes nothing.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct CpuTemplate {
    /// Numbers of the KVM capabilities that the host must have, besides those that every machine
    /// needs.
    #[serde(deserialize_with = "at_most::<{ MAX_CAPABILITIES + 1 }, _, _>")]
    pub capabilities: Vec<u32>,
    /// Changes of CPUID leaves that KVM offers, in the order in which they are made.
    #[serde(deserialize_with = "at_most::<{ MAX_LEAVES + 1 }, _, _>")]
    pub leaves: Vec<CpuidChange>,
    /// Changes of the registers' first values, in the order in which they are made.
    #[serde(deserialize_with = "at_most::<{ MAX_MSRS + 1 }, _, _>")]
    pub msrs: Vec<MsrChange>,
}

impl CpuTemplate {
    /// Requires a capability.
    pub fn require(&mut self, capability: u32) {
        if !self.capabilities.contains(&capability) {
            push(&mut self.capabilities, capability, MAX_CAPABILITIES);
        }
    }

    /// Stops requiring a capability.
    pub fn stop_requiring(&mut self, capability: u32) {
        self.capabilities.retain(|c| *c != capability);
    }

    /// Adds a change of a leaf, which follows earlier changes of that leaf.
    pub fn change_leaf(&mut self, change: CpuidChange) {
        let place = (change.function, change.index);
        match self.leaves.iter_mut().find(|leaf| (leaf.function, leaf.index) == place) {
            Some(leaf) => {
                leaf.flags = change.flags;
                let registers = leaf.registers.iter_mut().zip(change.registers);
                registers.for_each(|(bits, next)| *bits = bits.then(next));
            }
            None => push(&mut self.leaves, change, MAX_LEAVES),
        }
    }

    /// Adds a change of a register, which follows earlier changes of that register.
    pub fn change_msr(&mut self, change: MsrChange) {
        match self.msrs.iter_mut().find(|msr| msr.index == change.index) {
            Some(msr) => msr.bits = msr.bits.then(change.bits),
            None => push(&mut self.msrs, change, MAX_MSRS),
        }
    }

    /// Checks that the lists are not too long.
    pub(super) fn check(&self) -> Result<(), ConfigError> {
        let counts = [
            ("KVM capabilities in the CPU template", self.capabilities.len(), MAX_CAPABILITIES),
            ("CPUID leaves in the CPU template", self.leaves.len(), MAX_LEAVES),
            ("model-specific registers in the CPU template", self.msrs.len(), MAX_MSRS),
        ];
        counts
            .into_iter()
            .try_for_each(|(what, count, most)| in_range(what, count as u64, 0, most as u64))
    }
}

/// Adds an item to a list that holds one more than `most` items at most, which the check of the
/// template refuses.
fn push<T>(list: &mut Vec<T>, item: T, most: usize) {
    if list.len() <= most {
        list.push(item);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn msr(index: u32, mask: u64, value: u64) -> MsrChange {
        MsrChange { index, bits: ChangedBits { mask, value } }
    }

    #[test]
    fn capability_is_required_until_it_is_not() {
        let mut template = CpuTemplate::default();
        [171, 172, 171].into_iter().for_each(|c| template.require(c));
        template.stop_requiring(172);
        template.stop_requiring(56);
        assert_eq!(template.capabilities, [171]);
    }

    #[test]
    fn last_flags_of_a_leaf_hold() {
        let mut template = CpuTemplate::default();
        let bits = |mask, value| ChangedBits { mask, value };
        let of = |function, flags, eax| CpuidChange {
            function,
            index: 0,
            flags,
            registers: [eax, Default::default(), Default::default(), Default::default()],
        };
        template.change_leaf(of(1, 1, bits(0b11, 0b01)));
        template.change_leaf(of(7, 0, bits(1, 1)));
        template.change_leaf(of(1, 2, bits(0b110, 0b100)));
        assert_eq!(template.leaves, [of(1, 2, bits(0b111, 0b101)), of(7, 0, bits(1, 1))]);
    }

    #[test]
    fn overlong_template_is_refused_by_its_count() {
        let mut template = CpuTemplate::default();
        (0..5000).for_each(|index| template.change_msr(msr(index, 1, 0)));
        assert_eq!(template.msrs.len(), MAX_MSRS + 1);
        assert_eq!(
            template.check().unwrap_err().to_string(),
            "1025 model-specific registers in the CPU template, not 0 to 1024"
        );
        template.msrs.pop();
        assert_eq!(template.check(), Ok(()));
        (0..5000).for_each(|index| template.change_msr(msr(index % 1024, 1, 1)));
        assert_eq!(template.check(), Ok(()), "registers are changed once");
    }

    proptest! {
        #[test]
        fn merged_changes_are_successive_changes(
            changes in proptest::collection::vec((0..3u32, any::<u64>(), any::<u64>()), 0..8),
            old in any::<u64>(),
        ) {
            let mut template = CpuTemplate::default();
            let mut expected = [old; 3];
            for (index, mask, value) in changes {
                template.change_msr(msr(index, mask, value));
                let register = &mut expected[index as usize];
                *register = *register & !mask | value & mask;
            }
            let mut registers = [old; 3];
            for MsrChange { index, bits } in template.msrs {
                registers[index as usize] = bits.apply(registers[index as usize]);
            }
            prop_assert_eq!(registers, expected);
        }
    }
}
