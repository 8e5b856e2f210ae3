//! Measures cells one at a time, in turn.

use driftline_machine::kvm::Capabilities;

use super::host::{HostDescription, utc_date};
use super::matrix::{self, MatrixCell};
use super::report::{self, ComparisonReport, RoundOutcome};
use super::settings::CompareSettings;
use super::{answer, cell};

/// Progress of a comparison.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct CompareStep<'c> {
    /// Number of finished runs.
    pub done: usize,
    /// Total number of runs.
    pub of: usize,
    /// The cell that is measured next.
    pub cell: &'c MatrixCell,
}

/// Measures `cells` one at a time, `settings.repeat` times each, and calls `watch` before every
/// run. A cell that cannot be measured is not an error: its row has the reason.
pub fn compare(
    cells: &[MatrixCell],
    settings: &CompareSettings,
    capabilities: &Capabilities,
    host: HostDescription,
    mut watch: impl FnMut(CompareStep<'_>),
) -> ComparisonReport {
    let mut outcomes: Vec<Vec<RoundOutcome>> = cells.iter().map(|_| Vec::new()).collect();
    let mut possible = Vec::new();
    for (at, cell) in cells.iter().enumerate() {
        match cell.way.lacking(capabilities, settings.ring_entries) {
            None => possible.push(at),
            Some(why) => outcomes[at].push(Err(why.into())),
        }
    }
    let of = possible.len() * settings.repeat;
    for (done, (_, turn)) in matrix::interleaved(possible.len(), settings.repeat).enumerate() {
        let at = possible[turn];
        watch(CompareStep { done, of, cell: &cells[at] });
        outcomes[at].push(cell::run(&cells[at], settings));
    }
    let rows = report::rows(cells, &outcomes);
    ComparisonReport {
        version: env!("CARGO_PKG_VERSION").to_owned(),
        date: utc_date(),
        host,
        settings: settings.clone(),
        command: None,
        answer: answer::answer(&rows),
        cells: rows,
    }
}
