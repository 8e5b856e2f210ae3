//! The baseline processor: exactly the features of `cpu_model::BASELINE`, whatever the host has. It
//! is built from the few CPUID leaves that it needs. All others are omitted, and the highest leaves
//! are capped, so that a leaf which a later KVM adds cannot reach a guest by accident.

use kvm_bindings::{CpuId, kvm_cpuid_entry2};

use super::leaves::{
    AMD_LEGACY_CMP, AMD_REPEATS, LEAF_AMD_FEATURES, LEAF_BASE, LEAF_CACHES, LEAF_FEATURES,
    LEAF_SIZES, LEAF_TOPOLOGY, has_bit, has_feature,
};
use crate::cpu_model::{self, FeatureBit, MissingFeature};

const LEAF_CACHE_DESCRIPTORS: u32 = 0x2;
const LEAF_KVM: u32 = 0x4000_0000;
const LEAF_EXTENDED: u32 = 0x8000_0000;
/// From the first part of the name to the last leaf of caches.
const LEAF_NAME: u32 = 0x8000_0002;
const LEAF_LAST_CACHES: u32 = 0x8000_0006;

/// Leaf 1 EBX: the size of a cache line, for CLFLUSH.
const CACHE_LINE: u32 = 0xff00;
const LAST_LEAF: u32 = LEAF_TOPOLOGY;
const LAST_KVM_LEAF: u32 = 0x4000_0001;
const LAST_EXTENDED_LEAF: u32 = LEAF_SIZES;
/// The width that virtual machines of other vendors have: 1 TiB. This host may itself be one.
const PHYSICAL_BITS: u32 = 40;
/// Four levels of page tables.
const LINEAR_BITS: u32 = 48;

/// Returns the baseline without the features named in `without`, built from what KVM supports.
///
/// # Errors
///
/// A baseline feature that KVM does not support.
pub(super) fn baseline(supported: &CpuId, without: &[String]) -> Result<CpuId, MissingFeature> {
    let wanted = cpu_model::BASELINE.iter().filter(|name| !without.iter().any(|w| w == *name));
    let wanted: Vec<FeatureBit> = wanted.filter_map(|name| cpu_model::find(name)).collect();
    for place in &wanted {
        if !has_bit(supported.as_slice(), *place) {
            return Err(MissingFeature::Feature(*place));
        }
    }
    let entries: Vec<kvm_cpuid_entry2> =
        supported.as_slice().iter().filter_map(|e| entry(e, &wanted)).collect();
    CpuId::from_entries(&entries).map_err(MissingFeature::Table)
}

/// Returns the names of the baseline features that `supported` lacks.
pub fn lacks(supported: &CpuId) -> Vec<&'static str> {
    let names = cpu_model::BASELINE.iter().copied();
    names.filter(|name| !has_feature(supported.as_slice(), name)).collect()
}

/// Returns the names of all features that `supported` has.
pub fn features(supported: &CpuId) -> Vec<&'static str> {
    cpu_model::names().filter(|name| has_feature(supported.as_slice(), name)).collect()
}

/// Returns the baseline's version of one leaf; `None` if the baseline does not have it.
fn entry(host: &kvm_cpuid_entry2, wanted: &[FeatureBit]) -> Option<kvm_cpuid_entry2> {
    let mut e = *host;
    let listed = |register| {
        let here = wanted
            .iter()
            .filter(|p| (p.function, p.index, p.register) == (e.function, e.index, register));
        here.fold(0, |bits, place| bits | 1 << place.bit)
    };
    let features = [listed(0), listed(1), listed(2), listed(3)];
    match e.function {
        LEAF_BASE => e.eax = e.eax.min(LAST_LEAF),
        // EAX: family, model, stepping. They promise nothing, and kernels look up errata by them.
        LEAF_FEATURES => {
            (e.ebx, e.ecx, e.edx) = (e.ebx & CACHE_LINE, features[2], features[3]);
        }
        LEAF_CACHE_DESCRIPTORS | LEAF_CACHES | LEAF_TOPOLOGY => {}
        LEAF_KVM => e.eax = e.eax.min(LAST_KVM_LEAF),
        LEAF_EXTENDED => e.eax = e.eax.min(LAST_EXTENDED_LEAF),
        LEAF_AMD_FEATURES => {
            // The bit for several cores is topology.
            (e.ebx, e.ecx) = (0, features[2] | e.ecx & AMD_LEGACY_CMP);
            e.edx &= features[3] | AMD_REPEATS;
        }
        LEAF_NAME..=LEAF_LAST_CACHES => {}
        LEAF_SIZES => {
            let bits = match e.eax & 0xff {
                0 => 36,
                bits => bits.min(PHYSICAL_BITS),
            };
            (e.eax, e.ebx, e.ecx, e.edx) = (LINEAR_BITS << 8 | bits, 0, 0, 0);
        }
        // Any other leaf keeps only its listed features; most have none.
        _ if features != [0; 4] => [e.eax, e.ebx, e.ecx, e.edx] = features,
        _ => return None,
    }
    Some(e)
}
