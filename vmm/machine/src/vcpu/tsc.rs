//! Compares time stamp counter frequencies: whether a guest that measured one on another host can
//! continue here.

use kvm_bindings::kvm_cpuid_entry2;

use super::leaves::has_feature;

/// Frequencies that differ by at most this many parts in a million count as equal: two measurements
/// of one clock differ by that much, and time protocols correct it. KVM's own tolerance
/// (`tsc_tolerance_ppm`) is the same by default.
const TOLERANCE_PPM: u64 = 250;

/// A time stamp counter of a rate that this host cannot provide.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[error(
    "a time stamp counter of {guest_khz} kHz (it has {host_khz} kHz and no KVM_CAP_TSC_CONTROL)"
)]
pub struct TscLack {
    guest_khz: u32,
    host_khz: u32,
}

/// Returns whether a guest that ran at `guest_khz` notices no difference at `host_khz`.
pub fn is_near(guest_khz: u32, host_khz: u32) -> bool {
    let apart = u64::from(guest_khz.abs_diff(host_khz)) * 1_000_000;
    apart <= u64::from(host_khz) * TOLERANCE_PPM
}

/// Returns whether the processor promises a constant TSC frequency, so that its guest may keep time
/// by it.
pub fn is_promised(cpuid: &[kvm_cpuid_entry2]) -> bool {
    has_feature(cpuid, "constant_tsc")
}

/// Returns what this host lacks for a guest that was promised `guest_khz`. The host runs at
/// `host_khz`, and `scale` is whether it can scale the counter.
pub fn missing(guest_khz: u32, host_khz: u32, scale: bool) -> Option<TscLack> {
    let fits = scale || is_near(guest_khz, host_khz);
    (!fits).then_some(TscLack { guest_khz, host_khz })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frequencies_are_compared_by_parts_in_a_million() {
        assert_eq!(missing(2_000_000, 2_000_000, false), None);
        assert_eq!(missing(2_000_500, 2_000_000, false), None, "250 ppm");
        assert_eq!(missing(1_999_500, 2_000_000, false), None);
        assert_eq!(missing(3_000_000, 2_000_000, true), None);
        assert_eq!(
            missing(2_000_501, 2_000_000, false).unwrap().to_string(),
            "a time stamp counter of 2000501 kHz (it has 2000000 kHz and no KVM_CAP_TSC_CONTROL)"
        );
        assert!(!is_near(u32::MAX, 0) && is_near(0, 0));
    }
}
