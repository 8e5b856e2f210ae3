//! Sources of a KVM machine's dirty frames: one [`DirtySource`] for each tracking mode.

mod bitmap;
#[cfg(all(feature = "broken-source", debug_assertions))]
mod broken;
mod diverted;
mod manual;
mod ring;
mod slot_bitmaps;
mod source;
mod userfault_wp;

pub use bitmap::BitmapSource;
#[cfg(all(feature = "broken-source", debug_assertions))]
pub use broken::BrokenSource;
pub(crate) use diverted::Diverted;
pub use manual::ManualSource;
pub use ring::RingSource;
pub use source::{DirtySource, SourceError};
pub use userfault_wp::UserfaultWpSource;

use std::time::Instant;

use crate::kvm::KvmVm;

/// Returns the nanoseconds since `start` and sets `start` to now.
fn lap(start: &mut Instant) -> u64 {
    let now = Instant::now();
    let ns = now.duration_since(*start).as_nanos();
    *start = now;
    u64::try_from(ns).unwrap_or(u64::MAX)
}

/// Switches KVM's dirty logging on or off in all slots.
fn set_logging(vm: &KvmVm, on: bool) -> Result<(), SourceError> {
    let set = vm.set_dirty_logging(on);
    set.map_err(|cause| SourceError { what: "KVM_SET_USER_MEMORY_REGION", cause })
}
