//! The ways of tracking a guest's writes side by side, on this host.
//!
//! | module | owns |
//! | --- | --- |
//! | `way` | what can be compared: a source, and what its frames are kept in |
//! | `matrix` | which cells there are, and the order of their runs |
//! | `cell` | one run: launch, warm up, follow, pause, throw away |
//! | `truth` | what the guest has truly written, out of its own memory |
//! | `cpu`, `host`, `stats` | processor time, the machine's description, medians and spreads |
//! | `report` | runs into figures |
//! | `words` | figures into sentences |
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
mod stats;
mod table;
#[cfg(test)]
mod testing;
mod truth;
mod way;
mod words;

use std::time::Duration;

use serde::{Serialize, Serializer};

use driftline_machine::kvm::Capabilities;
pub use host::Host;
pub use matrix::{BRISK, BUSY, Cell, GuestKind, LIGHT, default_cells, product};
pub use report::{CellReport, Figures, Report};
pub use stats::Spread;
pub use way::{Sink, Way};

/// How cells are measured.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
pub struct Settings {
    /// Time between two epochs.
    #[serde(rename = "interval_ms", serialize_with = "as_ms")]
    pub interval: Duration,
    /// How long each cell is measured, all its runs together.
    #[serde(rename = "duration_ms", serialize_with = "as_ms")]
    pub duration: Duration,
    /// Runs of each cell.
    pub repeat: usize,
    /// Of each machine.
    pub vcpus: u8,
    /// Of each dirty ring.
    pub ring_entries: u32,
    /// How long a kernel boots before it is measured.
    #[serde(rename = "settle_ms", serialize_with = "as_ms")]
    pub settle: Duration,
}

impl Settings {
    /// Of the duration, each run's part.
    pub fn per_run(&self) -> Duration {
        self.duration / u32::try_from(self.repeat.max(1)).unwrap_or(u32::MAX)
    }
}

fn as_ms<S: Serializer>(time: &Duration, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_f64(time.as_secs_f64() * 1e3)
}

/// A comparison under way, for whoever watches.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Step<'c> {
    /// Runs that are over.
    pub done: usize,
    /// All that there are.
    pub of: usize,
    /// What is measured now.
    pub cell: &'c Cell,
}

/// Measures `cells` one at a time, `settings.repeat` times each; `watch` is told of every run
/// before it. A cell that cannot be measured is a row that says why, and no error.
pub fn compare(
    cells: &[Cell],
    settings: &Settings,
    capabilities: &Capabilities,
    host: Host,
    mut watch: impl FnMut(Step<'_>),
) -> Report {
    let mut outcomes: Vec<Vec<report::Outcome>> = vec![Vec::new(); cells.len()];
    let lacking = |cell: &Cell| cell.way.lacking(capabilities, settings.ring_entries);
    let possible: Vec<usize> = (0..cells.len())
        .filter(|at| match cells.get(*at).and_then(lacking) {
            None => true,
            Some(why) => {
                outcomes.iter_mut().skip(*at).take(1).for_each(|o| o.push(Err(why.clone())));
                false
            }
        })
        .collect();
    let of = possible.len() * settings.repeat;
    for (done, (_, at)) in matrix::interleaved(possible.len(), settings.repeat).enumerate() {
        let Some((at, cell)) = possible.get(at).and_then(|at| Some((*at, cells.get(*at)?))) else {
            continue;
        };
        watch(Step { done, of, cell });
        let outcome = cell::run(cell, settings).map_err(|e| e.to_string());
        outcomes.iter_mut().skip(at).take(1).for_each(|o| o.push(outcome.clone()));
    }
    let rows = report::rows(cells, &outcomes);
    Report {
        version: env!("CARGO_PKG_VERSION"),
        date: host::utc_date(),
        host,
        settings: settings.clone(),
        command: None,
        findings: words::findings(&rows),
        cells: rows,
    }
}
