//! The frequency of the time stamp counter: whether a guest that has measured it elsewhere can go
//! on.

use kvm_bindings::kvm_cpuid_entry2;

use super::leaves::find;
use crate::cpu_model;

/// TSC frequencies nearer to each other than this many parts in a million count as equal: what two
/// measurements of one clock differ by, and what time protocols make good.
const TOLERANCE_PPM: u64 = 250;

/// Whether a guest that ran at `guest_khz` sees no other rate at `host_khz`.
pub fn is_near(guest_khz: u32, host_khz: u32) -> bool {
    let apart = u64::from(guest_khz.abs_diff(host_khz)) * 1_000_000;
    apart <= u64::from(host_khz) * TOLERANCE_PPM
}

/// Whether the processor promises a TSC of one rate for ever, so that its guest may keep time by
/// it.
pub fn is_promised(cpuid: &[kvm_cpuid_entry2]) -> bool {
    cpu_model::find("constant_tsc").is_some_and(|place| {
        find(cpuid, place.function, place.index)[place.register] & 1 << place.bit != 0
    })
}

/// What a guest lacks here that was promised `guest_khz` for ever, on a host with `host_khz` that
/// can `scale` the counter or not.
pub fn missing(guest_khz: u32, host_khz: u32, scale: bool) -> Option<String> {
    let fits = scale || is_near(guest_khz, host_khz);
    (!fits).then(|| {
        format!(
            "a time stamp counter of {guest_khz} kHz (it has {host_khz} kHz and no KVM_CAP_TSC_CONTROL)"
        )
    })
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
            missing(2_000_501, 2_000_000, false).unwrap(),
            "a time stamp counter of 2000501 kHz (it has 2000000 kHz and no KVM_CAP_TSC_CONTROL)"
        );
        assert!(!is_near(u32::MAX, 0) && is_near(0, 0));
    }
}
