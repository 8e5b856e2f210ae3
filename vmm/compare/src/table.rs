//! Formats the report for a terminal: the answer, and a table for each guest and size.

use std::fmt::Write;

use super::groups::{EPOCH, PAUSE, RankedFigure, RowGroup, SLOW_DOWN, groups};
use super::report::{ComparisonReport, RowFigures};
use super::stats::RunSpread;
use super::units::{size, us};
use super::way::TrackingWay;

/// Width of the text, in characters.
const WIDTH: usize = 100;

const HEADER: [&str; 13] = [
    "tracking",
    "dirty",
    "epoch",
    "harvest",
    "reprotect",
    "insert",
    "drain",
    "pause",
    "slow-down",
    "CPU/write",
    "host CPU",
    "ring full",
    "memory",
];

/// The columns that fit a terminal of 100 characters.
const USUAL: [&str; 5] = ["tracking", "dirty", "epoch", "pause", "slow-down"];

impl ComparisonReport {
    /// Returns the report as text: the answer, then aligned medians, for the most important figures
    /// also the smallest and the largest run. Includes all columns if `wide` is set.
    pub fn table(&self, wide: bool) -> String {
        let mut out = String::new();
        let caveat = self.host.caveat();
        for sentence in self.answer.iter().map(String::as_str).chain(caveat) {
            out.push_str(&wrapped(sentence));
            out.push('\n');
        }
        for group in groups(&self.cells) {
            let _ = writeln!(out, "{}, {}", group.guest.full_name(), size(group.mem_bytes));
            out.push_str(&aligned(&group, wide));
            out.push('\n');
        }
        out.push_str(&wrapped(&self.legend(wide)));
        out.trim_end().to_owned()
    }

    fn legend(&self, wide: bool) -> String {
        let s = &self.settings;
        format!(
            "Medians of {} run{} (least..greatest); * the least figure, and those not clearly \
             behind it. Epochs every {} ms, at all points of a guest's round; working sets were \
             resident before; dirty: pages in an epoch; CPU/write: vCPU time per page visit; ring \
             full: time lost per second.{} {}, {} processors, {}, {}; driftline {}.",
            s.repeat,
            if s.repeat == 1 { "" } else { "s" },
            s.interval.as_secs_f64() * 1e3,
            if wide { "" } else { " More columns: --wide." },
            self.host.processor,
            self.host.processors,
            size(self.host.mem_bytes),
            self.host.kernel,
            self.version
        )
    }
}

/// Breaks text at spaces into lines of at most [`WIDTH`] characters, each with a line end.
fn wrapped(text: &str) -> String {
    let mut out = String::new();
    let mut column = 0;
    for word in text.split_whitespace() {
        let length = word.chars().count();
        match column {
            0 => {}
            column if column + 1 + length > WIDTH => out.push('\n'),
            _ => out.push(' '),
        }
        column = if out.is_empty() || out.ends_with('\n') { length } else { column + 1 + length };
        out.push_str(word);
    }
    out.push('\n');
    out
}

fn aligned(group: &RowGroup<'_>, wide: bool) -> String {
    let mut lines: Vec<Vec<String>> = vec![HEADER.map(str::to_owned).to_vec()];
    for row in &group.rows {
        let mut line = vec![row.way.to_string()];
        match &row.figures {
            Some(figures) => line.extend(cells(group, row.way, figures)),
            None => line.push(row.why.clone().unwrap_or_default()),
        }
        lines.push(line);
    }
    if !wide {
        for line in lines.iter_mut().filter(|line| line.len() == HEADER.len()) {
            let mut names = HEADER.iter();
            line.retain(|_| names.next().is_some_and(|name| USUAL.contains(name)));
        }
    }
    let mut out = columns(&lines, if wide { HEADER.len() } else { USUAL.len() });
    for row in &group.rows {
        let Some(figures) = &row.figures else { continue };
        if let Some(why) = &row.why {
            let _ = writeln!(out, "  {}: {why}", row.way);
        }
        let marked = figures.marked_all();
        if marked > 0 {
            let _ =
                writeln!(out, "  ! {}: in {marked} epochs all memory counted as dirty", row.way);
        }
    }
    out
}

/// Aligns lines of `full` columns. The reason that a row has instead of figures spans all of them.
fn columns(lines: &[Vec<String>], full: usize) -> String {
    let mut widths = [0; HEADER.len()];
    for line in lines.iter().filter(|line| line.len() == full) {
        for (width, cell) in widths.iter_mut().zip(line) {
            *width = (*width).max(cell.chars().count());
        }
    }
    let names = lines.iter().filter_map(|line| line.first()).map(|name| name.chars().count());
    widths[0] = names.max().unwrap_or(0);
    let mut out = String::new();
    for line in lines {
        let mut text = String::from(" ");
        for (at, (cell, width)) in line.iter().zip(widths).enumerate() {
            let _ = match (at, line.len() == full) {
                (0, _) => write!(text, " {cell:width$}"),
                (_, true) => write!(text, "  {cell:>width$}"),
                (_, false) => write!(text, "  {cell}"),
            };
        }
        let _ = writeln!(out, "{}", text.trim_end());
    }
    out
}

fn cells(group: &RowGroup<'_>, way: TrackingWay, f: &RowFigures) -> [String; HEADER.len() - 1] {
    let none = || "-".to_owned();
    // A space in place of the mark keeps figures aligned.
    let marked = |text: String, measure: RankedFigure| {
        let leads = group.leaders(measure).contains(&way);
        format!("{text}{}", if leads { "*" } else { " " })
    };
    let time = |s: Option<RunSpread>| s.map_or_else(none, |s| us(s.median));
    let ranged = |s: Option<RunSpread>| {
        s.map_or_else(none, |s| {
            format!("{} ({}..{})", us(s.median), bare(s.min, s.median), bare(s.max, s.median))
        })
    };
    let percent = |s: Option<RunSpread>| {
        s.map_or_else(none, |s| format!("{:.1} % ({:.1}..{:.1})", s.median, s.min, s.max))
    };
    [
        match (f.dirty_frames, f.marked_all()) {
            (None, _) => none(),
            (Some(s), 0) => format!("{:.0}", s.median),
            // Explained below the rows.
            (Some(s), _) => format!("{:.0} !", s.median),
        },
        marked(ranged(f.epoch_us), EPOCH),
        time(f.harvest_us),
        time(f.reprotect_us),
        time(f.insert_us),
        time(f.drain_us),
        marked(ranged(f.pause_us), PAUSE),
        marked(percent(f.slow_down_percent), SLOW_DOWN),
        f.vcpu_cpu_per_write_ns.map_or_else(none, |s| format!("{:.2} µs", s.median / 1e3)),
        f.host_cpu_percent.map_or_else(none, |s| format!("{:.1} %", s.median)),
        match f.ring_full_ms_per_s {
            Some(s) if way.source() == driftline_machine::tracking::TrackingMode::DirtyRing => {
                format!("{:.1} ms/s", s.median)
            }
            _ => none(),
        },
        f.tracking_bytes.map_or_else(none, size),
    ]
}

/// Formats a time without its unit, in the unit that [`us`] chooses for `median`.
fn bare(value: f64, median: f64) -> String {
    let value = if us(median).ends_with(" ms") { value / 1e3 } else { value };
    let digits = if value >= 99.95 { 0 } else { 1 };
    format!("{value:.digits$}")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::CellReport;
    use crate::testing::{report, row, way};

    /// Returns a row with these figures.
    fn with(name: &str, figures: Option<RowFigures>, why: Option<&str>) -> CellReport {
        CellReport { figures, why: why.map(str::to_owned), ..row(way(name), 1 << 30, [1.0; 3]) }
    }

    #[test]
    fn table_starts_with_answer_and_caveat() {
        let mut report = report();
        report.host.processor = "a processor".to_owned();
        report.host.hardware_virtualization = "missing".to_owned();
        let text = report.table(false);
        assert!(text.lines().all(|line| line.chars().count() <= WIDTH), "{text}");
        let flat = text.split_whitespace().collect::<Vec<_>>().join(" ");
        let place = |what: &str| flat.find(what).unwrap_or_else(|| panic!("{what} in {flat}"));
        let answers: Vec<usize> = report.answer.iter().map(|a| place(a)).collect();
        assert!(answers.is_sorted() && answers.first() == Some(&0), "{text}");
        let caveat = place(report.host.caveat().unwrap());
        assert!(answers.iter().all(|at| *at < caveat) && caveat < place("tracking dirty epoch"));
        report.host.hardware_virtualization = "yes".to_owned();
        assert!(!report.table(false).contains("hardware virtualization"));
    }

    #[test]
    fn the_usual_table_fits_a_terminal() {
        let many = |values: [f64; 3]| RunSpread::of(values);
        let figures = RowFigures {
            dirty_frames: many([262_144.0; 3]),
            epoch_us: many([1234.0, 5678.0, 98_765.0]),
            pause_us: many([1234.0, 5678.0, 98_765.0]),
            slow_down_percent: many([10.0, 55.5, 99.9]),
            host_cpu_percent: many([199.9; 3]),
            tracking_bytes: Some(1023 << 10),
            ..RowFigures::default()
        };
        let text =
            aligned(&groups(&[with("dirty-bitmap-manual+tree", Some(figures), None)])[0], false);
        assert!(text.lines().all(|line| line.chars().count() <= 100), "{text}");
        assert!(text.contains("slow-down") && !text.contains("harvest"), "{text}");
    }

    #[test]
    fn columns_align_and_missing_rows_give_reasons() {
        let figures = |us: f64| {
            Some(RowFigures {
                epoch_us: RunSpread::of([us, us * 2.0, us * 3.0]),
                ..RowFigures::default()
            })
        };
        let mut rows = [
            with("dirty-ring+tree", figures(4.0), None),
            with("dirty-bitmap+flat", figures(900.0), Some("1 of 3 runs failed: a hiccup")),
            with("dirty-ring+list", None, Some("this host has no rings")),
        ];
        let text = aligned(&groups(&rows)[0], true);
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(lines[0].chars().count(), lines[1].chars().count(), "{text}");
        assert_eq!(lines[1].chars().count(), lines[2].chars().count(), "{text}");
        assert!(lines[1].contains("8.0 µs (4.0..12.0)*"), "{text}");
        assert!(lines[2].contains("1.8 ms (0.9..2.7)"), "{text}");
        assert_eq!(lines[3], "  dirty-ring+list    this host has no rings");
        assert_eq!(lines[4], "  dirty-bitmap+flat: 1 of 3 runs failed: a hiccup");
        assert!(!text.contains('!'), "{text}");
        let marked = rows[0].figures.as_mut().unwrap();
        (marked.dirty_frames, marked.marked_all_epochs) = (RunSpread::of([70.0]), 2);
        let text = aligned(&groups(&rows)[0], true);
        assert!(text.contains(" 70 !  "), "{text}");
        let says = "  ! dirty-ring+tree: in 2 epochs all memory counted as dirty\n";
        assert!(text.contains(says), "{text}");
    }
}
