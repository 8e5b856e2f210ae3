//! Formats the report for a terminal: a table for each guest and size, and the findings.

use std::fmt::Write;

use super::report::{CellReport, Figures, Report};
use super::stats::Spread;
use super::units::{size, us};
use super::way::Way;

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

impl Report {
    /// Returns the report as aligned text: medians, and for the most important figures also the
    /// smallest and the largest run. Includes all columns if `wide` is set.
    pub fn table(&self, wide: bool) -> String {
        let mut out = String::new();
        let mut rows = self.cells.as_slice();
        while let Some(first) = rows.first() {
            let same = |r: &&CellReport| r.guest == first.guest && r.mem_bytes == first.mem_bytes;
            let group = rows.iter().take_while(same).count().max(1);
            let (these, rest) = rows.split_at(group);
            rows = rest;
            let _ = writeln!(out, "{}, {}", first.guest.name(), size(first.mem_bytes));
            out.push_str(&aligned(these, wide));
            out.push('\n');
        }
        for finding in &self.findings {
            let _ = writeln!(out, "{finding}");
        }
        let s = &self.settings;
        let _ = write!(
            out,
            "\nMedians of {} run{} (least..greatest); epochs every {} ms, at all points of a guest's round;\n\
             working sets had memory before; dirty: frames an epoch; CPU/write: of the vCPUs, for a page\n\
             visit; ring full: time lost in a second.{}\n{}, {} processors, {}, {}.",
            s.repeat,
            if s.repeat == 1 { "" } else { "s" },
            s.interval.as_secs_f64() * 1e3,
            if wide { "" } else { " More columns: --wide." },
            self.host.processor,
            self.host.processors,
            size(self.host.mem_bytes),
            self.host.kernel
        );
        out
    }
}

fn aligned(rows: &[CellReport], wide: bool) -> String {
    let mut lines: Vec<Vec<String>> = vec![HEADER.map(str::to_owned).to_vec()];
    for row in rows {
        let mut line = vec![row.way.to_string()];
        match &row.figures {
            Some(figures) => line.extend(cells(row.way, figures)),
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
    // The reason that a row has instead of figures spans all columns.
    let columns = if wide { HEADER.len() } else { USUAL.len() };
    let full = lines.iter().filter(|line| line.len() == columns);
    let mut widths = [0; HEADER.len()];
    for line in full {
        for (width, cell) in widths.iter_mut().zip(line) {
            *width = (*width).max(cell.chars().count());
        }
    }
    let names = lines.iter().filter_map(|line| line.first()).map(|name| name.chars().count());
    widths[0] = names.max().unwrap_or(0);
    let mut out = String::new();
    for line in &lines {
        let mut text = String::from(" ");
        for (at, (cell, width)) in line.iter().zip(widths).enumerate() {
            let _ = match (at, line.len() == columns) {
                (0, _) => write!(text, " {cell:width$}"),
                (_, true) => write!(text, "  {cell:>width$}"),
                (_, false) => write!(text, "  {cell}"),
            };
        }
        let _ = writeln!(out, "{}", text.trim_end());
    }
    for row in rows {
        let Some(figures) = &row.figures else { continue };
        if let Some(why) = &row.why {
            let _ = writeln!(out, "  {}: {why}", row.way);
        }
        let marked = all_dirty(figures);
        if marked > 0 {
            let _ =
                writeln!(out, "  ! {}: in {marked} epochs all memory counted as dirty", row.way);
        }
    }
    out
}

/// Returns the number of epochs in which all memory counted as dirty, including those in pauses.
fn all_dirty(f: &Figures) -> u64 {
    f.marked_all_epochs + f.marked_all_looks
}

fn cells(way: Way, f: &Figures) -> [String; HEADER.len() - 1] {
    let none = || "-".to_owned();
    let time = |s: Option<Spread>| s.map_or_else(none, |s| us(s.median));
    let ranged = |s: Option<Spread>| {
        s.map_or_else(none, |s| {
            format!("{} ({}..{})", us(s.median), bare(s.min, s.median), bare(s.max, s.median))
        })
    };
    let percent = |s: Option<Spread>| {
        s.map_or_else(none, |s| format!("{:.1} % ({:.1}..{:.1})", s.median, s.min, s.max))
    };
    [
        match (f.dirty_frames, all_dirty(f)) {
            (None, _) => none(),
            (Some(s), 0) => format!("{:.0}", s.median),
            // Explained below the rows.
            (Some(s), _) => format!("{:.0} !", s.median),
        },
        ranged(f.epoch_us),
        time(f.harvest_us),
        time(f.reprotect_us),
        time(f.insert_us),
        time(f.drain_us),
        ranged(f.pause_us),
        percent(f.slow_down_percent),
        f.vcpu_cpu_per_write_ns.map_or_else(none, |s| format!("{:.2} us", s.median / 1e3)),
        f.host_cpu_percent.map_or_else(none, |s| format!("{:.1} %", s.median)),
        match f.ring_full_ms_per_s {
            Some(s) if way.source() == driftline_dirty_tracker::TrackingMode::DirtyRing => {
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
    use crate::matrix::{GuestKind, LIGHT};

    fn row(way: &str, figures: Option<Figures>, why: Option<&str>) -> CellReport {
        let way: Way = way.parse().unwrap();
        CellReport {
            way,
            source: way.source().to_string(),
            sink: way.sink(),
            guest: GuestKind::Payload(LIGHT.to_owned()),
            mem_bytes: 1 << 30,
            figures,
            why: why.map(str::to_owned),
        }
    }

    #[test]
    fn the_usual_table_fits_a_terminal() {
        let many = |values: [f64; 3]| Spread::of(values);
        let figures = Figures {
            dirty_frames: many([262_144.0; 3]),
            epoch_us: many([1234.0, 5678.0, 98_765.0]),
            pause_us: many([1234.0, 5678.0, 98_765.0]),
            slow_down_percent: many([10.0, 55.5, 99.9]),
            host_cpu_percent: many([199.9; 3]),
            tracking_bytes: Some(1023 << 10),
            ..Figures::default()
        };
        let text = aligned(&[row("dirty-bitmap-manual+tree", Some(figures), None)], false);
        assert!(text.lines().all(|line| line.chars().count() <= 100), "{text}");
        assert!(text.contains("slow-down") && !text.contains("harvest"), "{text}");
    }

    #[test]
    fn columns_are_aligned_and_a_way_that_the_host_lacks_says_why() {
        let figures = |us: f64| {
            Some(Figures { epoch_us: Spread::of([us, us * 2.0, us * 3.0]), ..Figures::default() })
        };
        let mut rows = [
            row("dirty-ring+tree", figures(4.0), None),
            row("dirty-bitmap+flat", figures(900.0), Some("1 of 3 runs failed: a hiccup")),
            row("dirty-ring+list", None, Some("this host has no rings")),
        ];
        let text = aligned(&rows, true);
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(lines[0].chars().count(), lines[1].chars().count(), "{text}");
        assert_eq!(lines[1].chars().count(), lines[2].chars().count(), "{text}");
        assert!(lines[1].contains("8.0 us (4.0..12.0)"), "{text}");
        assert!(lines[2].contains("1.8 ms (0.9..2.7)"), "{text}");
        assert_eq!(lines[3], "  dirty-ring+list    this host has no rings");
        assert_eq!(lines[4], "  dirty-bitmap+flat: 1 of 3 runs failed: a hiccup");
        assert!(!text.contains('!'), "{text}");
        let marked = rows[0].figures.as_mut().unwrap();
        (marked.dirty_frames, marked.marked_all_epochs) = (Spread::of([70.0]), 2);
        let text = aligned(&rows, true);
        assert!(text.contains(" 70 !  "), "{text}");
        let says = "  ! dirty-ring+tree: in 2 epochs all memory counted as dirty\n";
        assert!(text.contains(says), "{text}");
    }
}
