//! Compares the ways of tracking a guest's writes side by side, on this host.
//!
//! | module | owns |
//! | --- | --- |
//! | `way` | what can be compared: a source, and the sink that stores its frames |
//! | `matrix` | the list of cells, and the order of their runs |
//! | `cell` | one run: launch, warm up, track, pause, discard |
//! | `truth` | what the guest has really written, read from its memory |
//! | `cpu`, `host`, `stats` | processor time, the machine's description, medians and spreads |
//! | `settings`, `run` | how cells are measured; the loop over all of them |
//! | `report` | turns runs into figures |
//! | `groups` | the rows of one guest and size, ranked |
//! | `answer`, `checks` | sentences: which mode to use, and whether a page was missed |
//! | `units` | formats figures |
//! | `table` | the report for a terminal |
//! | `plot`, `page` | drawings, and the page around them |
//!
//! An *epoch* here means: collect (harvest, reprotect, insert), then drain, once per interval while
//! the guest runs. Its cost is the sum of these steps, as measured by the threads that perform
//! them. Only the pauses include the time to wake those threads.
//!
//! A run's figure is the median of its epochs. A row's figure is the median of its runs, reported
//! with their quartiles and extremes. A run that the host slowed down therefore affects the spread
//! but not the figure, and an epoch that the host interrupted affects only the 99th percentile.
//!
//! Epochs and pauses occur at evenly spread points of the guest's round (`cell::dither`), so that
//! they do not all meet the guest at the same point. An epoch that meets a busy guest costs more
//! than one that meets a sleeping guest: the median is the more frequent of the two.

mod answer;
mod cell;
mod checks;
mod cpu;
mod groups;
mod host;
mod matrix;
mod page;
mod plot;
mod report;
mod run;
mod settings;
mod stats;
mod table;
#[cfg(test)]
mod testing;
mod truth;
mod units;
mod way;

pub use host::HostDescription;
pub use matrix::{GuestKind, LIGHT, MatrixCell, default_cells, product};
pub use report::{CellReport, ComparisonReport, RowFigures};
pub use run::{CompareStep, compare};
pub use settings::CompareSettings;
pub use stats::RunSpread;
pub use way::{SinkKind, TrackingWay, UnknownWay, WayUnavailable};
