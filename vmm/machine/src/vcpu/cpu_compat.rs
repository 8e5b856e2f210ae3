//! Whether a guest that has seen one processor's CPUID can continue on another host: features must
//! be there, numbers must not shrink, and layouts must not change.
//!
//! Leaves without a rule here only describe the processor: names, caches, topology.

use kvm_bindings::kvm_cpuid_entry2;

use super::lack::ProcessorLack;
use super::leaves::{
    AMD_LEGACY_CMP, HTT, HYPERVISOR, LEAF_AMD_FEATURES, LEAF_BASE, LEAF_EXTENDED_FEATURES,
    LEAF_FEATURES, LEAF_KVM_FEATURES, LEAF_SIZES, LEAF_SVM, LEAF_XSAVE, OSPKE, OSXSAVE,
    TSC_DEADLINE, find,
};
use crate::config::CpuidWord;
use crate::cpu_model::{FeatureBit, FeatureNumber};

const LEAF_POWER: u32 = 0x6;
const LEAF_PERFMON: u32 = 0xa;
const LEAF_SGX: u32 = 0x12;
const LEAF_PROCESSOR_TRACE: u32 = 0x14;
const LEAF_TILES: u32 = 0x1d;
const LEAF_TMUL: u32 = 0x1e;
const LEAF_AVX10: u32 = 0x24;
const LEAF_AMD_POWER: u32 = 0x8000_0007;
const LEAF_AMD_ENCRYPTION: u32 = 0x8000_001f;
const LEAF_AMD_FEATURES_2: u32 = 0x8000_0021;
const LEAF_AMD_PERFMON: u32 = 0x8000_0022;

pub(super) const ALL: u32 = u32::MAX;

/// The comparison of one register of a leaf.
#[derive(Clone, Copy, Debug)]
enum Rule {
    /// These bits are features. The others are ignored.
    Bits(u32),
    /// Numbers at these bits (lowest bit, bit count) that the next host must reach. Other bits are
    /// ignored.
    AtLeast(&'static [(u32, u32)]),
    /// Both features and numbers.
    Mixed(u32, &'static [(u32, u32)]),
    /// The value must be the same.
    Same,
    /// Leaf 0xa: bits of events that cannot be counted, as many as EAX says there are.
    NoEvents,
}

const NOTHING: Rule = Rule::Bits(0);
const BITS: Rule = Rule::Bits(ALL);

/// Returns how EAX, EBX, ECX and EDX of a leaf are compared; `None` for a leaf that is not
/// compared.
fn rules(function: u32, index: u32) -> Option<[Rule; 4]> {
    use Rule::{AtLeast, Bits, Mixed, NoEvents, Same};
    Some(match (function, index) {
        // Bits that follow the guest's own registers or the VMM are not features of the host.
        (LEAF_FEATURES, 0) => {
            let ecx = Bits(!(OSXSAVE | HYPERVISOR | TSC_DEADLINE));
            [NOTHING, NOTHING, ecx, Bits(!HTT)]
        }
        // ECX: of these bits only the first and the fourth are features.
        (LEAF_POWER, 0) => [BITS, NOTHING, Bits(0b1001), NOTHING],
        (LEAF_EXTENDED_FEATURES, 0) => [NOTHING, BITS, Bits(!OSPKE), BITS],
        (LEAF_EXTENDED_FEATURES, _) => [BITS; 4],
        // Version, counters and their width, events; fixed counters and their width.
        (LEAF_PERFMON, 0) => {
            let eax = AtLeast(&[(0, 8), (8, 8), (16, 8), (24, 8)]);
            [eax, NoEvents, BITS, AtLeast(&[(0, 5), (5, 8)])]
        }
        // EBX is the size in use. The layout is in the subleaves of the components.
        (LEAF_XSAVE, 0) => [BITS, NOTHING, AtLeast(&[(0, 32)]), BITS],
        (LEAF_XSAVE, 1) => [BITS, NOTHING, BITS, BITS],
        (LEAF_XSAVE, _) => [Same, Same, BITS, NOTHING],
        (LEAF_SGX, 0) => [BITS, BITS, NOTHING, AtLeast(&[(0, 8), (8, 8)])],
        (LEAF_SGX, 1) => [BITS; 4],
        (LEAF_PROCESSOR_TRACE | LEAF_TILES | LEAF_TMUL, _) => [Same; 4],
        (LEAF_AVX10, 0) => [NOTHING, Mixed(0xffff_ff00, &[(0, 8)]), NOTHING, NOTHING],
        (LEAF_KVM_FEATURES, 0) => [BITS, NOTHING, NOTHING, NOTHING],
        (LEAF_AMD_FEATURES, 0) => [NOTHING, NOTHING, Bits(!AMD_LEGACY_CMP), BITS],
        (LEAF_AMD_POWER, 0) => [NOTHING, BITS, NOTHING, BITS],
        // The third number of EAX is a hint to firmware.
        (LEAF_SIZES, 0) => [AtLeast(&[(0, 8), (8, 8)]), BITS, NOTHING, NOTHING],
        (LEAF_SVM, 0) => [NOTHING, NOTHING, NOTHING, BITS],
        (LEAF_AMD_ENCRYPTION, 0) => [BITS, NOTHING, NOTHING, NOTHING],
        (LEAF_AMD_FEATURES_2, 0) => [BITS, NOTHING, BITS, NOTHING],
        (LEAF_AMD_PERFMON, 0) => [BITS, AtLeast(&[(0, 4)]), NOTHING, NOTHING],
        _ => return None,
    })
}

/// Returns the bits of a register that a rule compares.
fn mask(rule: Rule) -> u32 {
    match rule {
        Rule::Bits(bits) => bits,
        Rule::AtLeast(fields) => mask(Rule::Mixed(0, fields)),
        Rule::Mixed(bits, fields) => {
            fields.iter().fold(bits, |all, &(low, count)| all | ones(count) << low)
        }
        Rule::Same | Rule::NoEvents => ALL,
    }
}

fn ones(count: u32) -> u32 {
    1u32.checked_shl(count).map_or(ALL, |bit| bit - 1)
}

/// Returns the CPUID words of this processor that other hosts must match. `host` is what this host
/// supports. No other host needs to have what the guest's template adds to that.
pub fn exposed(entries: &[kvm_cpuid_entry2], host: &[kvm_cpuid_entry2]) -> Vec<CpuidWord> {
    let word = |function, index, registers| CpuidWord { function, index, registers };
    let [_, b, c, d] = find(entries, LEAF_BASE, 0);
    let mut words = vec![word(LEAF_BASE, 0, [0, b, c, d])];
    for e in entries {
        let Some(rules) = rules(e.function, e.index) else { continue };
        let mut registers = [e.eax, e.ebx, e.ecx, e.edx];
        registers.iter_mut().zip(rules).for_each(|(r, rule)| *r &= mask(rule));
        // A leaf of zeros is one that the guest does not have.
        if registers == [0; 4] {
            continue;
        }
        let host = find(host, e.function, e.index);
        let both = registers.iter_mut().zip(rules).zip(host);
        both.for_each(|((r, rule), host)| *r = had(rule, *r, host) & mask(rule));
        if registers != [0; 4] {
            words.push(word(e.function, e.index, registers));
        }
    }
    words
}

/// Returns the part of a register that this host has as well.
fn had(rule: Rule, exposed: u32, host: u32) -> u32 {
    match rule {
        Rule::Bits(_) => exposed & host,
        Rule::AtLeast(fields) | Rule::Mixed(_, fields) => {
            let numbers = mask(Rule::AtLeast(fields));
            fields.iter().fold(exposed & host & !numbers, |all, &(low, count)| {
                let field = |register: u32| register >> low & ones(count);
                all | field(exposed).min(field(host)) << low
            })
        }
        Rule::Same => host,
        Rule::NoEvents => exposed | host,
    }
}

/// Returns the first thing that a guest that was shown `words` would lack on this host.
pub fn missing(words: &[CpuidWord], supported: &[kvm_cpuid_entry2]) -> Option<ProcessorLack> {
    let entries: Vec<kvm_cpuid_entry2> =
        words
            .iter()
            .map(|&CpuidWord { function, index, registers: [eax, ebx, ecx, edx] }| {
                kvm_cpuid_entry2 { function, index, eax, ebx, ecx, edx, ..Default::default() }
            })
            .collect();
    if !words.is_empty() && !same_vendor(&entries, supported) {
        return Some(ProcessorLack::Vendor);
    }
    lacking(&entries, supported)
}

/// Returns the first thing that the guest's processor has and `supported` lacks. With such a lack
/// the guest cannot continue here.
pub fn lacking(
    guest: &[kvm_cpuid_entry2],
    supported: &[kvm_cpuid_entry2],
) -> Option<ProcessorLack> {
    guest.iter().find_map(|e| {
        let rules = rules(e.function, e.index)?;
        let has = [e.eax, e.ebx, e.ecx, e.edx];
        // A leaf of zeros is one that the guest does not have.
        if has == [0; 4] {
            return None;
        }
        let offers = find(supported, e.function, e.index);
        rules.into_iter().zip(0..).find_map(|(rule, register)| {
            let place = FeatureBit { function: e.function, index: e.index, register, bit: 0 };
            compare(place, rule, has, offers)
        })
    })
}

fn compare(
    place: FeatureBit,
    rule: Rule,
    has: [u32; 4],
    offers: [u32; 4],
) -> Option<ProcessorLack> {
    let (whole_guest, guest, host) = (has, has[place.register], offers[place.register]);
    let first_bit = |bits: u32| {
        let bit = bits.trailing_zeros() as u8;
        (bits != 0).then_some(FeatureBit { bit, ..place })
    };
    match rule {
        Rule::Bits(bits) => first_bit(guest & !host & bits).map(ProcessorLack::Feature),
        Rule::AtLeast(fields) => fields.iter().find_map(|&(low, count)| {
            let (wants, has) = (guest >> low & ones(count), host >> low & ones(count));
            let number = FeatureNumber { place, low, count, wants, has };
            (wants > has).then_some(ProcessorLack::Number(number))
        }),
        Rule::Mixed(bits, fields) => compare(place, Rule::Bits(bits), has, offers)
            .or_else(|| compare(place, Rule::AtLeast(fields), has, offers)),
        Rule::Same => {
            let number = FeatureNumber { place, low: 0, count: 32, wants: guest, has: host };
            (guest != host).then_some(ProcessorLack::Number(number))
        }
        Rule::NoEvents => {
            let events = ones(whole_guest[0] >> 24);
            first_bit(host & !guest & events).map(ProcessorLack::Event)
        }
    }
}

/// Returns whether both processors are of one vendor: the same bits have other meanings elsewhere.
pub fn same_vendor(a: &[kvm_cpuid_entry2], b: &[kvm_cpuid_entry2]) -> bool {
    find(a, LEAF_BASE, 0)[1..] == find(b, LEAF_BASE, 0)[1..]
}

#[cfg(test)]
mod tests {
    use super::super::leaves::entry;
    use super::*;

    #[test]
    fn only_what_the_host_has_is_required() {
        let host = [
            entry(7, 0, [2, 0b0110, 0, 0]),
            entry(0xa, 0, [7 << 24 | 4 << 8 | 2, 1, 0, 0]),
            entry(0xd, 2, [256, 576, 0, 0]),
            entry(0xd, 5, [64, 1088, 0, 0]),
            entry(0x8000_0008, 0, [48 << 8 | 46, 0, 0, 0]),
        ];
        let template = [
            entry(7, 0, [2, 0b1100, 0, 0]),
            entry(0xa, 0, [7 << 24 | 8 << 8 | 2, 0, 0, 0]),
            entry(0xd, 2, [256, 600, 0, 0]),
            entry(0xd, 5, [0; 4]),
            entry(0x8000_0008, 0, [57 << 8 | 40, 0, 0, 0]),
        ];
        let words: Vec<_> =
            exposed(&template, &host)[1..].iter().map(|w| (w.function, w.registers)).collect();
        assert_eq!(
            words,
            [
                (7, [0, 0b0100, 0, 0]),
                (0xa, [7 << 24 | 4 << 8 | 2, 1, 0, 0]),
                (0xd, [256, 576, 0, 0]),
                (0x8000_0008, [48 << 8 | 40, 0, 0, 0]),
            ]
        );
        let words = exposed(&template, &host);
        assert_eq!(missing(&words, &host), None, "the guest continues on the host that it is on");
        let [mut less, rest @ ..] = host;
        less.ebx = 0b0010;
        let less = [&[less][..], &rest].concat();
        assert_eq!(missing(&words, &less).unwrap().to_string(), "CPUID leaf 0x7 EBX bit 2");
    }
}
