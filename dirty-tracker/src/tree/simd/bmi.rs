//! The SIMD level of x86-64 with BMI. Code that needs it takes a `Bmi`, which exists only after CPU
//! detection.

use super::portable::{Portable, SimdJob};

/// A CPU with BMI, POPCNT and LZCNT, for which the portable code compiles to fewer instructions.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in super::super) struct Bmi(());

impl Bmi {
    pub(super) fn detect() -> Option<Self> {
        let has_features = is_x86_feature_detected!("bmi1")
            && is_x86_feature_detected!("bmi2")
            && is_x86_feature_detected!("lzcnt")
            && is_x86_feature_detected!("popcnt");
        has_features.then_some(Self(()))
    }
}

/// Runs the portable code, compiled for these instructions.
///
/// # Safety
///
/// The CPU has them, as a `Bmi` shows.
#[target_feature(enable = "bmi1,bmi2,lzcnt,popcnt")]
pub(super) unsafe fn with_bmi(job: impl SimdJob, _: Bmi) {
    job.run(Portable);
}
