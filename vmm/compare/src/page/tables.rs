//! The tables of the page. A table's head has the units. Below each median is the range of the
//! runs.

use std::fmt::Write;

use crate::groups::{EPOCH, PAUSE, RankedFigure, RowGroup, SLOW_DOWN, series};
use crate::plot::escape;
use crate::report::RowFigures;
use crate::stats::RunSpread;
use crate::units::{factor, number, size};
use crate::way::TrackingWay;

/// Class of elements that may be wider than the page.
pub(super) const SCROLL: &str = "scroll";

/// The text of a cell without a figure.
const NONE: &str = "\u{2013}";

/// A cell's figure, and the range below it.
type TableCell = (String, String);

struct TableColumn {
    head: &'static str,
    cell: fn(&RowFigures) -> Option<TableCell>,
    /// The measure whose leaders are marked.
    marks: Option<RankedFigure>,
}

const fn column(head: &'static str, cell: fn(&RowFigures) -> Option<TableCell>) -> TableColumn {
    TableColumn { head, cell, marks: None }
}

/// The figures that matter most; they fit the page's width.
const MAIN: [TableColumn; 8] = [
    column("dirty pages", |f| f.dirty_frames.map(whole)),
    TableColumn { head: "epoch, µs", cell: |f| f.epoch_us.map(ranged), marks: Some(EPOCH) },
    column("p99 epoch, µs", |f| f.epoch_p99_us.map(ranged)),
    TableColumn { head: "pause, µs", cell: |f| f.pause_us.map(ranged), marks: Some(PAUSE) },
    TableColumn {
        head: "slow-down, %",
        cell: |f| f.slow_down_percent.map(ranged),
        marks: Some(SLOW_DOWN),
    },
    column("host CPU, %", |f| f.host_cpu_percent.map(ranged)),
    column("memory, KiB", |f| {
        f.tracking_bytes.map(|bytes| (number(bytes as f64 / 1024.0), String::new()))
    }),
    column("pages missed", |f| count(f.missed_frames)),
];

const STEPS: [TableColumn; 8] = [
    column("harvest, µs", |f| f.harvest_us.map(ranged)),
    column("reprotect, µs", |f| f.reprotect_us.map(ranged)),
    column("insert, µs", |f| f.insert_us.map(ranged)),
    column("drain, µs", |f| f.drain_us.map(ranged)),
    column("page visits/s", |f| f.writes_per_s.map(whole)),
    column("vCPU time a visit, µs", |f| {
        f.vcpu_cpu_per_write_ns.map(|s| scaled(s, 1e-3)).map(ranged)
    }),
    column("ring full, exits/s", |f| f.ring_full_exits_per_s.map(whole)),
    column("ring full, ms/s", |f| f.ring_full_ms_per_s.map(ranged)),
];

const CHECKS: [TableColumn; 6] = [
    column("checks", |f| count(f.strict_checks)),
    column("pages written", |f| count(f.written_frames)),
    column("missed", |f| count(f.missed_frames)),
    column("unchanged", |f| count(f.extra_frames)),
    column("elsewhere", |f| count(f.beside_frames)),
    column("epochs all dirty", |f| {
        let known = f.strict_checks.or(f.epoch_us.map(|_| 0));
        count(known.map(|_| f.marked_all()))
    }),
];

/// Writes the guests with their specs and what they write.
pub(super) fn guests(out: &mut String, groups: &[RowGroup<'_>]) {
    let _ = write!(
        out,
        "<div class=\"{SCROLL}\" tabindex=\"0\"><table class=\"text\"><thead><tr><th>guest</th>\
         <th>writes</th><th>spec</th></tr></thead><tbody>"
    );
    let mut listed = Vec::new();
    for guest in groups.iter().map(|group| group.guest) {
        if listed.contains(&guest) {
            continue;
        }
        listed.push(guest);
        let _ = write!(
            out,
            "<tr><th>{}</th><td>{}</td><td><code>{}</code></td></tr>",
            escape(&guest.name()),
            guest.description().unwrap_or(NONE),
            escape(&guest.spec())
        );
    }
    out.push_str("</tbody></table></div>");
}

/// Writes the epochs of the guest that was measured with the most memory sizes. Writes nothing if
/// there is no guest with two sizes.
pub(super) fn over_memory(out: &mut String, groups: &[RowGroup<'_>]) {
    let series = series(groups.iter());
    let (Some(first), Some(last)) = (series.first(), series.last()) else { return };
    if series.len() < 2 {
        return;
    }
    let _ =
        write!(out, "<div class=\"{SCROLL}\" tabindex=\"0\"><table><thead><tr><th>epoch, µs</th>");
    for group in &series {
        let _ = write!(out, "<th>{}</th>", size(group.mem_bytes));
    }
    out.push_str("<th>last : first</th></tr></thead><tbody>");
    for (way, most) in last.order(EPOCH) {
        let _ = write!(out, "<tr><th>{way}</th>");
        for group in &series {
            let epoch = group.figure(EPOCH, way);
            cell(out, epoch.map(ranged), group.leaders(EPOCH).contains(&way));
        }
        let times = first.figure(EPOCH, way).map(|least| most.median / least.median);
        let times = times.map(|times| (factor(times), String::new()));
        cell(out, times, false);
        out.push_str("</tr>");
    }
    out.push_str("</tbody></table></div>");
}

/// Writes the tables of one guest and size: the main figures, and the others folded.
pub(super) fn group(out: &mut String, group: &RowGroup<'_>) {
    table(out, group, &MAIN);
    out.push_str("<details><summary>Steps of an epoch, and the checks</summary>");
    table(out, group, &STEPS);
    table(out, group, &CHECKS);
    out.push_str("</details>");
}

fn table(out: &mut String, group: &RowGroup<'_>, columns: &[TableColumn]) {
    let _ =
        write!(out, "<div class=\"{SCROLL}\" tabindex=\"0\"><table><thead><tr><th>tracking</th>");
    for column in columns {
        let _ = write!(out, "<th>{}</th>", column.head);
    }
    out.push_str("</tr></thead><tbody>");
    let leaders = |column: &TableColumn| column.marks.map_or(Vec::new(), |m| group.leaders(m));
    let leaders: Vec<Vec<TrackingWay>> = columns.iter().map(leaders).collect();
    for row in &group.rows {
        let _ = write!(out, "<tr><th>{}</th>", row.way);
        if let Some(f) = &row.figures {
            for (column, leaders) in columns.iter().zip(&leaders) {
                cell(out, (column.cell)(f), leaders.contains(&row.way));
            }
            out.push_str("</tr>");
        }
        if let Some(why) = &row.why {
            // A row with figures has a row of its own for the reason.
            let begin = if row.figures.is_some() { "<tr><th></th>" } else { "" };
            let (span, why) = (columns.len(), escape(why));
            let _ = write!(out, "{begin}<td class=\"why\" colspan=\"{span}\">{why}</td></tr>");
        } else if row.figures.is_none() {
            out.push_str("</tr>");
        }
    }
    out.push_str("</tbody></table></div>");
}

fn cell(out: &mut String, cell: Option<TableCell>, leads: bool) {
    let (median, range) = cell.unwrap_or_else(|| (NONE.to_owned(), String::new()));
    let class = if leads { " class=\"best\"" } else { "" };
    let _ = write!(out, "<td{class}>{median}");
    if !range.is_empty() {
        let _ = write!(out, "<small>{range}</small>");
    }
    out.push_str("</td>");
}

fn ranged(s: RunSpread) -> TableCell {
    (number(s.median), format!("{} to {}", number(s.min), number(s.max)))
}

fn whole(s: RunSpread) -> TableCell {
    (format!("{:.0}", s.median), format!("{:.0} to {:.0}", s.min, s.max))
}

fn count(n: Option<u64>) -> Option<TableCell> {
    n.map(|n| (n.to_string(), String::new()))
}

fn scaled(s: RunSpread, by: f64) -> RunSpread {
    RunSpread { median: s.median * by, min: s.min * by, max: s.max * by, ..s }
}
