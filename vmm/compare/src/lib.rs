//! The ways of tracking a guest's writes side by side, on this host.
//!
//! | module | owns |
//! | --- | --- |
//! | `way` | what can be compared: a source, and what its frames are kept in |
//! | `matrix` | which cells there are, and the order of their runs |
//! | `cell` | one run: launch, warm up, follow, pause, throw away |
//! | `truth` | what the guest has truly written, out of its own memory |
//! | `cpu`, `host`, `stats` | processor time, the machine's description, medians and spreads |
//! | `settings`, `run` | how cells are measured, and all of them in turn |
//! | `report` | runs into figures |
//! | `words`, `units` | figures into sentences |
//! | `looks` | sentences of frames that were missed |
//! | `table` | the report for a terminal |
//! | `plot`, `page` | drawings, and the page around them |
//!
//! An *epoch* here is: collect (harvest, reprotect, insert), then drain, every interval while the
//! guest runs. What it takes is the sum of those steps as the threads that do them measure it;
//! waking those threads is part of the pauses only. A run's figure is the median of its epochs, and
//! a row's the median of its runs, with their quartiles and extremes beside it: a run that the host
//! slowed down is in the spread and not in the figure, an epoch that it interrupted in the 99th
//! percentile alone. Epochs and pauses come at points of the guest's round that are spread evenly
//! (`cell::dither`), so that no run has all of them at the same. An epoch whose guest is at work
//! costs more than one whose guest sleeps: the median is the commoner of the two.

mod cell;
mod cpu;
mod host;
mod looks;
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
mod words;

pub use host::Host;
pub use matrix::{BRISK, BUSY, Cell, GuestKind, LIGHT, default_cells, product};
pub use report::{CellReport, Figures, Report};
pub use run::{Step, compare};
pub use settings::Settings;
pub use stats::Spread;
pub use way::{Sink, Way};
