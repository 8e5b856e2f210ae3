//! Entry points of the fuzz targets: hostile drivers and hostile files.

pub use crate::boot::fuzz::kernel;
pub use crate::devices::fuzz::*;
pub use crate::machine::fuzz::sections;
