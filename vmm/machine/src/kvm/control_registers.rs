//! Bits of the control registers that decide a processor's mode.

pub(crate) const CR0_PG: u64 = 1 << 31;
pub(crate) const CR4_PAE: u64 = 1 << 5;
pub(crate) const EFER_LMA: u64 = 1 << 10;
