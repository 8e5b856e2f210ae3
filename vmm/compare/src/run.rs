//! Measures cells one at a time, in turn.

use driftline_machine::kvm::Capabilities;

use super::host::{HostDescription, utc_date};
use super::matrix::{self, MatrixCell};
use super::report::{self, ComparisonReport};
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
    let mut outcomes: Vec<Vec<report::RoundOutcome>> = vec![Vec::new(); cells.len()];
    let lacking = |cell: &MatrixCell| cell.way.lacking(capabilities, settings.ring_entries);
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
        watch(CompareStep { done, of, cell });
        let outcome = cell::run(cell, settings).map_err(|e| e.to_string());
        outcomes.iter_mut().skip(at).take(1).for_each(|o| o.push(outcome.clone()));
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
