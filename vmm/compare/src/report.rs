//! What a comparison found: figures with their spreads, ready to be printed, drawn or written as
//! JSON.

use serde::Serialize;

use super::cell::{EpochTimes, Sample};
use super::host::Host;
use super::matrix::{Cell, GuestKind};
use super::settings::Settings;
use super::stats::{Spread, median, quantile, sorted};
use super::truth::Audit;
use super::way::{Sink, Way};

/// All of it. In JSON every number has its unit in its name.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct Report {
    /// The version that measured.
    pub version: &'static str,
    /// When, in UTC.
    pub date: String,
    /// On what.
    pub host: Host,
    /// How.
    pub settings: Settings,
    /// The command that asked for it, if one did.
    pub command: Option<String>,
    /// In the order of the matrix.
    pub cells: Vec<CellReport>,
    /// In words.
    pub findings: Vec<String>,
}

/// A row.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct CellReport {
    /// How writes were tracked.
    pub way: Way,
    /// Where the frames came from.
    pub source: String,
    /// What they were kept in.
    pub sink: Option<Sink>,
    /// What ran.
    pub guest: GuestKind,
    /// Its memory.
    pub mem_bytes: u64,
    /// What was measured; nothing where it could not be.
    pub figures: Option<Figures>,
    /// Why not, or of how many runs not.
    pub why: Option<String>,
}

/// The figures of a row. What does not apply, or is not known of this guest, is missing.
#[derive(Clone, PartialEq, Debug, Default, Serialize)]
pub struct Figures {
    /// Page visits of the guest.
    pub writes_per_s: Option<Spread>,
    /// How many fewer than without tracking, in the same round.
    pub slow_down_percent: Option<Spread>,
    /// Processor time of all vCPUs for a page visit, faults and exits included.
    pub vcpu_cpu_per_write_ns: Option<Spread>,
    /// Processor time of collector and drain.
    pub host_cpu_percent: Option<Spread>,
    /// Frames in an epoch.
    pub dirty_frames: Option<Spread>,
    /// Ring entries to lists.
    pub harvest_us: Option<Spread>,
    /// Reprotecting; of a bitmap, reading it too.
    pub reprotect_us: Option<Spread>,
    /// Into the sink.
    pub insert_us: Option<Spread>,
    /// Out of the sink, as ascending runs.
    pub drain_us: Option<Spread>,
    /// All four.
    pub epoch_us: Option<Spread>,
    /// Of 100 epochs one is longer.
    pub epoch_p99_us: Option<Spread>,
    /// The guest stands from the order to pause until the set is complete and it goes on.
    pub pause_us: Option<Spread>,
    /// Every pause of every run, ascending.
    pub pauses_us: Vec<f64>,
    /// Exits because a ring was full.
    pub ring_full_exits_per_s: Option<Spread>,
    /// Time that vCPUs lost in them.
    pub ring_full_ms_per_s: Option<Spread>,
    /// Memory for tracking, the kernel's and ours, by the sizes of its parts.
    pub tracking_bytes: Option<u64>,
    /// Epochs in which all memory counted as dirty because a ring was overrun.
    pub marked_all_epochs: u64,
    /// Pauses of which the same is true: they are no strict looks.
    pub marked_all_looks: u64,
    /// Looks at the guest while it stood, with one epoch since the look before. What follows is of
    /// these, all runs together, and each frame counts once a look.
    pub strict_looks: Option<u64>,
    /// Frames reported.
    pub reported_frames: Option<u64>,
    /// Pages of the working set that were truly written.
    pub written_frames: Option<u64>,
    /// Written and not reported: must be none. Those are with them that were written while the
    /// guest ran and that no epoch of that time reported.
    pub missed_frames: Option<u64>,
    /// Reported and not written.
    pub extra_frames: Option<u64>,
    /// Reported outside of the working set, of which the guest does not tell.
    pub beside_frames: Option<u64>,
}

/// What a round says of a cell.
pub(super) type Outcome = Result<Sample, String>;

/// The rows of `cells`, with what each round (in order) said of each.
pub(super) fn rows(cells: &[Cell], outcomes: &[Vec<Outcome>]) -> Vec<CellReport> {
    let of = |at: usize| outcomes.get(at).map_or(&[][..], Vec::as_slice);
    let row = |(at, cell): (usize, &Cell)| {
        let is_base =
            |c: &Cell| c.way == Way::NONE && c.guest == cell.guest && c.mem_bytes == cell.mem_bytes;
        let base = cells.iter().position(is_base).map(of).unwrap_or_default();
        let own = of(at);
        let samples: Vec<&Sample> = own.iter().filter_map(|o| o.as_ref().ok()).collect();
        let failed: Vec<&String> = own.iter().filter_map(|o| o.as_ref().err()).collect();
        let why = failed.first().map(|why| match samples.is_empty() {
            true => (*why).clone(),
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

fn figures(way: Way, samples: &[&Sample], own: &[Outcome], base: &[Outcome]) -> Figures {
    let over = |f: &dyn Fn(&Sample) -> Option<f64>| Spread::of(samples.iter().filter_map(|s| f(s)));
    let per_s = |s: &Sample, n: f64| n / s.window.as_secs_f64();
    let step =
        |f: fn(&EpochTimes) -> u64| over(&|s| median(s.epochs.iter().map(|e| f(e) as f64 / 1e3)));
    // Only looks that are strict; where every one of them was marked there are none, and nothing is
    // known.
    let strict = |f: fn(&Audit) -> u64| -> Option<u64> {
        samples.iter().filter_map(|s| s.audit.as_ref()).map(f).reduce(|a, b| a + b)
    };
    let pauses = samples.iter().flat_map(|s| s.pauses_ns.iter().map(|ns| *ns as f64 / 1e3));
    let mut out = Figures {
        writes_per_s: over(&writes_per_s),
        slow_down_percent: Spread::of(slow_downs(own, base)).filter(|_| way.tracks()),
        vcpu_cpu_per_write_ns: over(&|s| {
            let writes = s.writes.filter(|w| *w > 0)?;
            Some(s.vcpu_cpu.as_nanos() as f64 / writes as f64)
        }),
        pause_us: over(&|s| median(s.pauses_ns.iter().map(|ns| *ns as f64 / 1e3))),
        pauses_us: sorted(pauses),
        written_frames: strict(|a| a.written),
        ..Figures::default()
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
    out.marked_all_looks = samples.iter().map(|s| s.marked_all_looks).sum();
    out.strict_looks = strict(|a| a.looks);
    out.reported_frames = strict(|a| a.reported);
    // What the window missed is missed also where no look was strict.
    let in_windows: u64 = samples.iter().map(|s| s.missed_in_window).sum();
    let missed = strict(|a| a.missed);
    out.missed_frames = missed.or((in_windows > 0).then_some(0)).map(|n| n + in_windows);
    out.extra_frames = strict(|a| a.extra);
    out.beside_frames = strict(|a| a.beside);
    out
}

fn writes_per_s(sample: &Sample) -> Option<f64> {
    Some(sample.writes? as f64 / sample.window.as_secs_f64())
}

/// Round by round: what drifts from one to the next is in both.
fn slow_downs(own: &[Outcome], base: &[Outcome]) -> impl Iterator<Item = f64> {
    own.iter().zip(base).filter_map(|(own, base)| {
        let (own, base) = (writes_per_s(own.as_ref().ok()?)?, writes_per_s(base.as_ref().ok()?)?);
        (base > 0.0).then(|| (1.0 - own / base) * 100.0)
    })
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::matrix::{LIGHT, product};

    fn sample(writes: u64, epoch_ns: u64, missed: u64) -> Sample {
        Sample {
            epochs: vec![EpochTimes { frames: 7, drain_ns: epoch_ns, ..EpochTimes::default() }; 3],
            pauses_ns: vec![5000, 1000],
            window: Duration::from_secs(2),
            writes: Some(writes),
            vcpu_cpu: Duration::from_micros(writes),
            audit: Some(Audit { looks: 4, writes, missed, written: 20, ..Audit::default() }),
            ..Sample::default()
        }
    }

    #[test]
    fn a_slow_down_is_told_round_by_round_and_what_was_missed_adds_up() {
        let ways = ["dirty-ring".parse().unwrap(), Way::NONE];
        let cells = product(&ways, &[GuestKind::Payload(LIGHT.to_owned())], &[1 << 30]);
        // The machine is twice as fast in the second round.
        let own = vec![Ok(sample(50, 1000, 1)), Ok(sample(150, 3000, 2))];
        let none = vec![Ok(sample(100, 0, 0)), Ok(sample(200, 0, 0))];
        let rows = rows(&cells, &[own, none]);
        let ring = rows[0].figures.as_ref().unwrap();
        let slow = ring.slow_down_percent.unwrap();
        assert_eq!((slow.min, slow.max), (25.0, 50.0));
        assert_eq!(ring.missed_frames, Some(3));
        assert_eq!((ring.strict_looks, ring.written_frames), (Some(8), Some(40)));
        assert_eq!(ring.epoch_us.unwrap().median, 2.0);
        assert_eq!(ring.writes_per_s.unwrap().max, 75.0);
        assert_eq!(ring.vcpu_cpu_per_write_ns.unwrap().median, 1000.0);
        assert_eq!(ring.pauses_us, [1.0, 1.0, 5.0, 5.0]);
        let none = rows[1].figures.as_ref().unwrap();
        assert_eq!((none.slow_down_percent, none.epoch_us, none.missed_frames), (None, None, None));
    }

    #[test]
    fn what_a_window_missed_counts_even_where_no_look_was_strict() {
        let cells = product(
            &["dirty-ring".parse().unwrap()],
            &[GuestKind::Payload(LIGHT.to_owned())],
            &[1 << 30],
        );
        let missed = |audit, missed_in_window| {
            let run = Sample { audit, missed_in_window, ..sample(1, 1, 0) };
            let rows = rows(&cells, &[vec![Ok(run)]]);
            let figures = rows[0].figures.as_ref().unwrap();
            (figures.missed_frames, figures.strict_looks)
        };
        assert_eq!(missed(None, 0), (None, None), "nothing was looked at");
        assert_eq!(missed(None, 2), (Some(2), None));
        let look = Audit { looks: 1, missed: 1, ..Audit::default() };
        assert_eq!(missed(Some(look), 2), (Some(3), Some(1)));
    }

    #[test]
    fn a_cell_that_failed_says_why_and_one_that_failed_once_says_how_often() {
        let ways = ["dirty-ring".parse().unwrap(), "dirty-bitmap".parse().unwrap()];
        let cells = product(&ways, &[GuestKind::Payload(LIGHT.to_owned())], &[1 << 30]);
        let broken = vec![Err("no".to_owned()), Err("never".to_owned())];
        let once = vec![Ok(sample(1, 1, 0)), Err("a hiccup".to_owned())];
        let rows = rows(&cells, &[broken, once]);
        assert_eq!((rows[0].why.as_deref(), rows[0].figures.is_none()), (Some("no"), true));
        assert_eq!(rows[1].why.as_deref(), Some("1 of 2 runs failed: a hiccup"));
        assert_eq!(rows[1].figures.as_ref().unwrap().epoch_us.unwrap().runs, 1);
    }
}
