//! The result of a comparison: figures with their spreads, ready to be printed, drawn or written as
//! JSON.

use serde::Serialize;

use super::cell::{CellError, EpochTimes, RunSample};
use super::host::HostDescription;
use super::matrix::{GuestKind, MatrixCell};
use super::settings::CompareSettings;
use super::stats::{RunSpread, median, quantile, sorted};
use super::truth::Audit;
use super::way::{SinkKind, TrackingWay};

/// The whole report. In JSON every number's name contains its unit.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct ComparisonReport {
    /// Version of the program that measured, with its commit if that is known.
    pub version: String,
    /// Date and time of the measurement, in UTC.
    pub date: String,
    /// Description of the host.
    pub host: HostDescription,
    /// Settings of the measurement.
    pub settings: CompareSettings,
    /// The command that requested the comparison, if there was one.
    pub command: Option<String>,
    /// The answer, as sentences: which mode to use, what it costs, and whether a page was missed.
    pub answer: Vec<String>,
    /// The rows, in the order of the matrix.
    pub cells: Vec<CellReport>,
}

/// A row of the report.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct CellReport {
    /// How writes were tracked.
    pub way: TrackingWay,
    /// The source of dirty frames.
    pub source: String,
    /// The sink that stores them.
    pub sink: Option<SinkKind>,
    /// The guest.
    pub guest: GuestKind,
    /// Size of guest memory, in bytes.
    pub mem_bytes: u64,
    /// The figures; `None` if the cell could not be measured.
    pub figures: Option<RowFigures>,
    /// The reason why runs failed, with their number if only some did.
    pub why: Option<String>,
}

/// The figures of a row. A figure that does not apply, or is unknown for this guest, is missing.
#[derive(Clone, PartialEq, Debug, Default, Serialize)]
pub struct RowFigures {
    /// Rate of the guest's page writes.
    pub writes_per_s: Option<RunSpread>,
    /// Reduction of that rate relative to no tracking in the same round.
    pub slow_down_percent: Option<RunSpread>,
    /// Processor time of all vCPUs per page write, including faults and exits.
    pub vcpu_cpu_per_write_ns: Option<RunSpread>,
    /// Processor time of the collector and of draining.
    pub host_cpu_percent: Option<RunSpread>,
    /// Number of frames in an epoch.
    pub dirty_frames: Option<RunSpread>,
    /// Time to move ring entries into lists.
    pub harvest_us: Option<RunSpread>,
    /// Time to reprotect; for a bitmap, including the time to read it.
    pub reprotect_us: Option<RunSpread>,
    /// Time to insert frames into the sink.
    pub insert_us: Option<RunSpread>,
    /// Time to drain the sink as ascending runs.
    pub drain_us: Option<RunSpread>,
    /// Sum of these four times.
    pub epoch_us: Option<RunSpread>,
    /// The 99th percentile of that sum.
    pub epoch_p99_us: Option<RunSpread>,
    /// Time from the request to pause until the set is complete and the guest has resumed.
    pub pause_us: Option<RunSpread>,
    /// Every pause of every run, in ascending order.
    pub pauses_us: Vec<f64>,
    /// Rate of exits because a ring was full.
    pub ring_full_exits_per_s: Option<RunSpread>,
    /// Time that vCPUs lost in these exits.
    pub ring_full_ms_per_s: Option<RunSpread>,
    /// Memory that the kernel and this process use for tracking, computed from the sizes of its
    /// parts.
    pub tracking_bytes: Option<u64>,
    /// Number of epochs in which all memory counted as dirty because a ring was overrun.
    pub marked_all_epochs: u64,
    /// Number of pauses in which all memory counted as dirty: they are not strict checks.
    pub marked_all_checks: u64,
    /// Number of checks of the paused guest with exactly one epoch since the previous check. The
    /// counts below refer to these checks, summed over all runs. Each frame counts once per check.
    pub strict_checks: Option<u64>,
    /// Number of reported frames.
    pub reported_frames: Option<u64>,
    /// Number of pages of the working set that were really written.
    pub written_frames: Option<u64>,
    /// Number of pages that were written and not reported: must be 0. This includes pages that were
    /// written while the guest ran and that no epoch of that time reported.
    pub missed_frames: Option<u64>,
    /// Number of pages that were reported and not written.
    pub extra_frames: Option<u64>,
    /// Number of reported frames outside the working set, where the guest does not record its
    /// writes.
    pub beside_frames: Option<u64>,
}

impl RowFigures {
    /// Returns the number of epochs in which all memory counted as dirty, with those in pauses.
    pub(super) fn marked_all(&self) -> u64 {
        self.marked_all_epochs + self.marked_all_checks
    }
}

/// The result of one round for a cell.
pub(super) type RoundOutcome = Result<RunSample, CellError>;

/// Returns the rows of `cells`; `outcomes` has the results of the rounds, in order, for each cell.
pub(super) fn rows(cells: &[MatrixCell], outcomes: &[Vec<RoundOutcome>]) -> Vec<CellReport> {
    let of = |at: usize| outcomes.get(at).map_or(&[][..], Vec::as_slice);
    let row = |(at, cell): (usize, &MatrixCell)| {
        let is_base = |c: &MatrixCell| {
            c.way == TrackingWay::NONE && c.guest == cell.guest && c.mem_bytes == cell.mem_bytes
        };
        let base = cells.iter().position(is_base).map(of).unwrap_or_default();
        let own = of(at);
        let samples: Vec<&RunSample> = own.iter().filter_map(|o| o.as_ref().ok()).collect();
        let failed: Vec<&CellError> = own.iter().filter_map(|o| o.as_ref().err()).collect();
        let why = failed.first().map(|why| match samples.is_empty() {
            true => why.to_string(),
            false => format!("{} of {} runs failed: {why}", failed.len(), own.len()),
        });
        CellReport {
            way: cell.way,
            source: cell.way.source().to_string(),
            sink: cell.way.sink(),
            guest: cell.guest.clone(),
            mem_bytes: cell.mem_bytes,
            figures: (!samples.is_empty()).then(|| figures(cell.way, &samples, own, base)),
            why,
        }
    };
    cells.iter().enumerate().map(row).collect()
}

fn figures(
    way: TrackingWay,
    samples: &[&RunSample],
    own: &[RoundOutcome],
    base: &[RoundOutcome],
) -> RowFigures {
    let over =
        |f: &dyn Fn(&RunSample) -> Option<f64>| RunSpread::of(samples.iter().filter_map(|s| f(s)));
    let per_s = |s: &RunSample, n: f64| n / s.window.as_secs_f64();
    let step =
        |f: fn(&EpochTimes) -> u64| over(&|s| median(s.epochs.iter().map(|e| f(e) as f64 / 1e3)));
    // Only strict checks count. If all memory counted as dirty in every check, there is no strict
    // check and the count is unknown.
    let strict = |f: fn(&Audit) -> u64| -> Option<u64> {
        samples.iter().filter_map(|s| s.audit.as_ref()).map(f).reduce(|a, b| a + b)
    };
    let pauses = samples.iter().flat_map(|s| s.pauses_ns.iter().map(|ns| *ns as f64 / 1e3));
    let mut out = RowFigures {
        writes_per_s: over(&writes_per_s),
        slow_down_percent: RunSpread::of(slow_downs(own, base)).filter(|_| way.tracks()),
        vcpu_cpu_per_write_ns: over(&|s| {
            let writes = s.writes.filter(|w| *w > 0)?;
            Some(s.vcpu_cpu.as_nanos() as f64 / writes as f64)
        }),
        pause_us: over(&|s| median(s.pauses_ns.iter().map(|ns| *ns as f64 / 1e3))),
        pauses_us: sorted(pauses),
        written_frames: strict(|a| a.written),
        ..RowFigures::default()
    };
    if !way.tracks() {
        return out;
    }
    out.host_cpu_percent = over(&|s| Some(per_s(s, s.host_cpu.as_secs_f64() * 100.0)));
    out.dirty_frames = over(&|s| median(s.epochs.iter().map(|e| e.frames as f64)));
    out.harvest_us = step(|e| e.harvest_ns);
    out.reprotect_us = step(|e| e.reprotect_ns);
    out.insert_us = step(|e| e.insert_ns);
    out.drain_us = step(|e| e.drain_ns);
    out.epoch_us = step(EpochTimes::total_ns);
    out.epoch_p99_us =
        over(&|s| quantile(&sorted(s.epochs.iter().map(|e| e.total_ns() as f64 / 1e3)), 0.99));
    out.ring_full_exits_per_s = over(&|s| Some(per_s(s, s.ring_full_exits as f64)));
    out.ring_full_ms_per_s = over(&|s| Some(per_s(s, s.ring_full.as_secs_f64() * 1e3)));
    out.tracking_bytes = samples.iter().map(|s| s.tracking_bytes).max();
    out.marked_all_epochs = samples.iter().map(|s| s.marked_all).sum();
    out.marked_all_checks = samples.iter().map(|s| s.marked_all_checks).sum();
    out.strict_checks = strict(|a| a.checks);
    out.reported_frames = strict(|a| a.reported);
    // Pages missed in the windows count even if no check was strict.
    let in_windows: u64 = samples.iter().map(|s| s.missed_in_window).sum();
    let missed = strict(|a| a.missed);
    out.missed_frames = missed.or((in_windows > 0).then_some(0)).map(|n| n + in_windows);
    out.extra_frames = strict(|a| a.extra);
    out.beside_frames = strict(|a| a.beside);
    out
}

fn writes_per_s(sample: &RunSample) -> Option<f64> {
    Some(sample.writes? as f64 / sample.window.as_secs_f64())
}

/// Compares round by round, so that drift between rounds affects both sides.
fn slow_downs(own: &[RoundOutcome], base: &[RoundOutcome]) -> impl Iterator<Item = f64> {
    own.iter().zip(base).filter_map(|(own, base)| {
        let (own, base) = (writes_per_s(own.as_ref().ok()?)?, writes_per_s(base.as_ref().ok()?)?);
        (base > 0.0).then(|| (1.0 - own / base) * 100.0)
    })
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use driftline_machine::vm::EndReason;

    use super::*;
    use crate::matrix::{LIGHT, product};
    use crate::way::WayUnavailable;

    fn sample(writes: u64, epoch_ns: u64, missed: u64) -> RunSample {
        RunSample {
            epochs: vec![EpochTimes { frames: 7, drain_ns: epoch_ns, ..EpochTimes::default() }; 3],
            pauses_ns: vec![5000, 1000],
            window: Duration::from_secs(2),
            writes: Some(writes),
            vcpu_cpu: Duration::from_micros(writes),
            audit: Some(Audit { checks: 4, writes, missed, written: 20, ..Audit::default() }),
            ..RunSample::default()
        }
    }

    #[test]
    fn slow_downs_are_per_round_misses_add_up() {
        let ways = ["dirty-ring".parse().unwrap(), TrackingWay::NONE];
        let cells = product(&ways, &[GuestKind::Payload(LIGHT.to_owned())], &[1 << 30]);
        // The machine is twice as fast in the second round.
        let own = vec![Ok(sample(50, 1000, 1)), Ok(sample(150, 3000, 2))];
        let none = vec![Ok(sample(100, 0, 0)), Ok(sample(200, 0, 0))];
        let rows = rows(&cells, &[own, none]);
        let ring = rows[0].figures.as_ref().unwrap();
        let slow = ring.slow_down_percent.unwrap();
        assert_eq!((slow.min, slow.max), (25.0, 50.0));
        assert_eq!(ring.missed_frames, Some(3));
        assert_eq!((ring.strict_checks, ring.written_frames), (Some(8), Some(40)));
        assert_eq!(ring.epoch_us.unwrap().median, 2.0);
        assert_eq!(ring.writes_per_s.unwrap().max, 75.0);
        assert_eq!(ring.vcpu_cpu_per_write_ns.unwrap().median, 1000.0);
        assert_eq!(ring.pauses_us, [1.0, 1.0, 5.0, 5.0]);
        let none = rows[1].figures.as_ref().unwrap();
        assert_eq!((none.slow_down_percent, none.epoch_us, none.missed_frames), (None, None, None));
    }

    #[test]
    fn missed_pages_count_without_strict_checks() {
        let cells = product(
            &["dirty-ring".parse().unwrap()],
            &[GuestKind::Payload(LIGHT.to_owned())],
            &[1 << 30],
        );
        let missed = |audit, missed_in_window| {
            let run = RunSample { audit, missed_in_window, ..sample(1, 1, 0) };
            let rows = rows(&cells, &[vec![Ok(run)]]);
            let figures = rows[0].figures.as_ref().unwrap();
            (figures.missed_frames, figures.strict_checks)
        };
        assert_eq!(missed(None, 0), (None, None), "nothing was checked");
        assert_eq!(missed(None, 2), (Some(2), None));
        let check = Audit { checks: 1, missed: 1, ..Audit::default() };
        assert_eq!(missed(Some(check), 2), (Some(3), Some(1)));
    }

    #[test]
    fn failed_runs_are_counted_and_explained() {
        const NO_RINGS: &str = "this host's KVM has no dirty rings (KVM_CAP_DIRTY_LOG_RING)";
        let ways = ["dirty-ring".parse().unwrap(), "dirty-bitmap".parse().unwrap()];
        let cells = product(&ways, &[GuestKind::Payload(LIGHT.to_owned())], &[1 << 30]);
        let crash = |why: &str| Err(CellError::Ended(EndReason::Crashed(why.to_owned())));
        let broken = vec![Err(WayUnavailable::NoRings.into()), crash("never")];
        let once = vec![Ok(sample(1, 1, 0)), crash("a hiccup")];
        let rows = rows(&cells, &[broken, once]);
        assert_eq!((&*rows[0].why.clone().unwrap(), rows[0].figures.is_none()), (NO_RINGS, true));
        assert_eq!(
            rows[1].why.as_deref(),
            Some("1 of 2 runs failed: its guest ended while it was measured: a hiccup")
        );
        assert_eq!(rows[1].figures.as_ref().unwrap().epoch_us.unwrap().runs, 1);
    }
}
