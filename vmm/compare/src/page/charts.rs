//! The drawings of the page.

use crate::groups::{EPOCH, RankedFigure, RowGroup, SLOW_DOWN, series};
use crate::plot::{Axis, AxisTicks, BoxGroup, BoxRow, ChartPoint, LineChart, LineSeries, boxes};
use crate::report::CellReport;
use crate::stats::{RunSpread, quantile};
use crate::units::{size, us};
use crate::way::TrackingWay;

/// Style of a row without tracking.
const UNTRACKED_STYLE: usize = 8;

/// A drawing with its heading and caption.
pub(super) struct PageFigure {
    /// Anchor of the heading.
    pub(super) id: &'static str,
    pub(super) heading: &'static str,
    pub(super) caption: String,
    pub(super) svg: String,
}

/// The ways that track, in the order of the matrix. A way's index is its style, which is its colour
/// and shape in every drawing.
struct WayStyles(Vec<TrackingWay>);

impl WayStyles {
    fn of(groups: &[RowGroup<'_>]) -> Self {
        let mut ways = Vec::new();
        for way in groups.iter().flat_map(|g| g.rows.iter().map(|row| row.way)) {
            if way.tracks() && !ways.contains(&way) {
                ways.push(way);
            }
        }
        Self(ways)
    }

    fn style(&self, way: TrackingWay) -> usize {
        self.0.iter().position(|w| *w == way).unwrap_or(UNTRACKED_STYLE)
    }
}

/// Draws an epoch's cost over memory size. Returns `None` if no guest was measured with two sizes.
pub(super) fn over_memory(groups: &[RowGroup<'_>]) -> Option<PageFigure> {
    let series = series(groups.iter());
    let guest = series.first()?.guest;
    if series.len() < 2 {
        return None;
    }
    let styles = WayStyles::of(groups);
    let line = |way: &TrackingWay| {
        let point = |group: &&RowGroup<'_>| {
            let epoch = group.figure(EPOCH, *way)?;
            let x = group.mem_bytes as f64;
            Some(ChartPoint { x, y: epoch.median, low: epoch.min, high: epoch.max })
        };
        let points: Vec<ChartPoint> = series.iter().filter_map(point).collect();
        LineSeries { name: way.to_string(), style: styles.style(*way), points }
    };
    // A single point is not a curve.
    let lines = styles.0.iter().map(line).filter(|line| line.points.len() > 1).collect();
    let ticks = series.iter().map(|g| (g.mem_bytes as f64, size(g.mem_bytes))).collect();
    let plot = LineChart {
        title: "Time of an epoch over the guest's memory".to_owned(),
        x: Axis { label: "guest memory".to_owned(), ticks: AxisTicks::At(ticks) },
        y: epoch_axis(),
        series: lines,
    };
    Some(PageFigure {
        id: "memory",
        heading: "Cost of an epoch over memory size",
        caption: format!(
            "Time of an epoch of {}, whose writes are the same with any memory size. Medians; \
                bars from the least run to the greatest.",
            guest.phrase()
        ),
        svg: plot.svg()?,
    })
}

/// Draws the epochs, slow-downs and pauses of all guests of one memory size.
pub(super) fn by_guest(groups: &[RowGroup<'_>]) -> impl Iterator<Item = PageFigure> {
    let styles = WayStyles::of(groups);
    let mem_bytes = base_mem(groups);
    let of_size: Vec<&RowGroup<'_>> = groups.iter().filter(|g| g.mem_bytes == mem_bytes).collect();
    let mem = size(mem_bytes);
    let drawn = |title: &str, axis: &Axis, row: &dyn Fn(&CellReport) -> Option<BoxRow>| {
        let group = |group: &&RowGroup<'_>| BoxGroup {
            heading: group.guest.full_name(),
            rows: group.rows.iter().filter_map(|r| row(r)).collect(),
        };
        boxes(title, axis, &of_size.iter().map(group).collect::<Vec<_>>())
    };
    let runs = "The box is the middle half of the runs, the line across it the median; the ends \
        are the least and the greatest run.";
    let epochs =
        drawn("Time of an epoch by guest", &epoch_axis(), &|row| measured(row, &styles, EPOCH));
    let slow_downs = drawn("Slow-down of the guest by guest", &slow_down_axis(), &|row| {
        measured(row, &styles, SLOW_DOWN)
    });
    let pauses = drawn("Pauses by guest", &pause_axis(), &|row| pauses(row, &styles));
    let picture = |id, heading, caption, svg: Option<String>| {
        svg.map(|svg| PageFigure { id, heading, caption, svg })
    };
    [
        picture("epoch", "Epoch by guest", format!("Time of an epoch with {mem}. {runs}"), epochs),
        picture(
            "slow-down",
            "Slow-down by guest",
            format!(
                "How many fewer pages the guest visits than without tracking in the same round, \
                    with {mem}. A guest that keeps to a rate makes up for lost time and shows no \
                    slow-down until it cannot; one that writes as fast as it can shows all of \
                    it. {runs}"
            ),
            slow_downs,
        ),
        picture(
            "pause",
            "Pause by guest",
            format!(
                "How long a guest with {mem} is paused until the set is complete and it has \
                    resumed, over all pauses of all runs. The box is the middle half, the line \
                    across it the median; the ends are the least and the greatest pause."
            ),
            pauses,
        ),
    ]
    .into_iter()
    .flatten()
}

/// Returns the memory size with the most guests; if several have as many, the smallest.
fn base_mem(groups: &[RowGroup<'_>]) -> u64 {
    let guests = |mem: u64| groups.iter().filter(|g| g.mem_bytes == mem).count();
    let sizes = groups.iter().map(|group| group.mem_bytes);
    sizes.max_by_key(|mem| (guests(*mem), std::cmp::Reverse(*mem))).unwrap_or(0)
}

fn measured(row: &CellReport, styles: &WayStyles, measure: RankedFigure) -> Option<BoxRow> {
    let RunSpread { min, lower_quartile, median, upper_quartile, max, .. } =
        (measure.of)(row.figures.as_ref()?)?;
    Some(BoxRow {
        name: row.way.to_string(),
        style: styles.style(row.way),
        values: [min, lower_quartile, median, upper_quartile, max],
        median: (measure.shown)(median),
    })
}

fn pauses(row: &CellReport, styles: &WayStyles) -> Option<BoxRow> {
    let pauses = &row.figures.as_ref()?.pauses_us;
    let at = |part: f64| quantile(pauses, part);
    let values = [at(0.0)?, at(0.25)?, at(0.5)?, at(0.75)?, at(1.0)?];
    Some(BoxRow {
        name: row.way.to_string(),
        style: styles.style(row.way),
        values,
        median: us(at(0.5)?),
    })
}

fn epoch_axis() -> Axis {
    Axis { label: "time of an epoch (log scale)".to_owned(), ticks: AxisTicks::Log(us_tick) }
}

fn pause_axis() -> Axis {
    Axis { label: "pause (log scale)".to_owned(), ticks: AxisTicks::Log(us_tick) }
}

fn slow_down_axis() -> Axis {
    let ticks = AxisTicks::Linear(|percent| format!("{percent} %"));
    Axis { label: "slow-down of the guest".to_owned(), ticks }
}

/// Formats a time at a tick; round numbers stay short.
fn us_tick(us: f64) -> String {
    match us {
        us if us >= 999_999.0 => format!("{:.0} s", us / 1e6),
        us if us >= 999.0 => format!("{:.0} ms", us / 1e3),
        us if us >= 0.99 => format!("{us:.0} µs"),
        us => format!("{:.0} ns", us * 1e3),
    }
}
