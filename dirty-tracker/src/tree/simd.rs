//! Turns set bits into numbers, the one step of a walk that is worth vector instructions. There are
//! three levels: CPUs with AVX-512 VBMI2, x86-64 with BMI, and any other. This module and those
//! below it contain all unsafe code of the crate. The tests below compare every level with the
//! portable one. `cargo bench -p driftline-dirty-tracker -- 2016 density` measures the best level
//! of the CPU.
#![allow(
    unsafe_code,
    reason = "vector instructions and the spare capacity of lists; each block says why it is sound"
)]

#[cfg(driftline_avx512)]
mod avx512;
#[cfg(target_arch = "x86_64")]
mod bmi;
mod portable;
mod room;
#[cfg(test)]
mod tests;

pub(super) use portable::{Simd, SimdJob};
pub(super) use room::SpareRoom;

use portable::Portable;

/// The SIMD levels, best last.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum SimdLevel {
    Portable,
    #[cfg(target_arch = "x86_64")]
    Bmi(bmi::Bmi),
    #[cfg(driftline_avx512)]
    Avx512(avx512::Avx512),
}

impl SimdLevel {
    /// Returns every level that this CPU supports.
    pub(super) fn all() -> impl Iterator<Item = Self> {
        let portable = std::iter::once(Self::Portable);
        #[cfg(target_arch = "x86_64")]
        let portable = portable.chain(bmi::Bmi::detect().map(Self::Bmi));
        #[cfg(driftline_avx512)]
        let portable = portable.chain(avx512::Avx512::detect().map(Self::Avx512));
        portable
    }

    /// Returns the best level for this CPU.
    pub(super) fn best() -> Self {
        Self::all().last().unwrap_or(Self::Portable)
    }

    pub(super) fn run(self, job: impl SimdJob) {
        match self {
            Self::Portable => job.run(Portable),
            #[cfg(target_arch = "x86_64")]
            // SAFETY: a `Bmi` exists only on CPUs with the instructions for which `with_bmi` is
            // compiled.
            Self::Bmi(bmi) => unsafe { bmi::with_bmi(job, bmi) },
            #[cfg(driftline_avx512)]
            // SAFETY: an `Avx512` exists only on CPUs with the instructions for which `with_avx512`
            // is compiled.
            Self::Avx512(avx) => unsafe { avx512::with_avx512(job, avx) },
        }
    }
}
