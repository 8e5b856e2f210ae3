//! Sources of a KVM machine's dirty frames: one [`DirtySource`] for each tracking mode.

mod bitmap;
#[cfg(all(feature = "broken-source", debug_assertions))]
mod broken;
mod diverted;
mod lap;
mod logging;
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
