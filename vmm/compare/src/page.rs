//! Formats the report as a self-contained page of sentences, drawings and tables.

use std::fmt::Write;

use super::matrix::GuestKind;
use super::plot::{Axis, BoxRow, Plot, Point, STYLE, Series, Ticks, boxes, escape, standalone};
use super::report::{CellReport, Figures, Report};
use super::stats::Spread;
use super::units::{size, us};
use super::way::Way;

const PAGE_STYLE: &str = include_str!("page.css");

/// A drawing with its heading and caption.
struct Picture {
    heading: &'static str,
    caption: String,
    svg: String,
}

impl Report {
    /// Returns the page as HTML that is also XML.
    pub fn html(&self) -> String {
        let mut out =
            String::from("<!DOCTYPE html>\n<html lang=\"en\"><head><meta charset=\"utf-8\"/>");
        let _ = write!(
            out,
            "<meta name=\"viewport\" content=\"width=device-width, initial-scale=1\"/><title>Driftline compare, {}</title><style>\n{STYLE}{PAGE_STYLE}</style></head><body><main>",
            escape(&self.date)
        );
        self.head(&mut out);
        out.push_str("<section><h2>What was found</h2><ul>");
        for finding in &self.findings {
            let _ = write!(out, "<li>{}</li>", escape(finding));
        }
        out.push_str("</ul><p class=\"note\">These sentences are computed from the medians below; a way is called clearly ahead where the middle halves of at least three runs do not overlap (and slow-downs differ by a percentage point).</p></section>");
        for picture in self.pictures() {
            let _ = write!(
                out,
                "<figure><h2>{}</h2>{}<figcaption>{}</figcaption></figure>",
                escape(picture.heading),
                picture.svg,
                escape(&picture.caption)
            );
        }
        out.push_str("<section><h2>All figures</h2>");
        for rows in self.groups() {
            table(&mut out, rows);
        }
        out.push_str(MEANINGS);
        out.push_str("</section></main></body></html>\n");
        out
    }

    /// Returns the drawing of an epoch's cost over memory size as a separate picture, or `None` if
    /// only one size was measured.
    pub fn memory_svg(&self) -> Option<String> {
        self.over_memory().map(|picture| standalone(&picture.svg))
    }

    fn head(&self, out: &mut String) {
        let (s, h) = (&self.settings, &self.host);
        let rows = [
            ("Measured", format!("{} UTC, driftline {}", self.date, self.version)),
            ("Processor", format!("{}, {} of them", h.processor, h.processors)),
            ("Memory", size(h.mem_bytes)),
            ("Kernel", h.kernel.clone()),
            ("Hardware virtualization", h.hardware_virtualization.clone()),
            ("Transparent huge pages", h.transparent_huge_pages.clone()),
            (
                "How",
                format!(
                    "{} runs of {:.0} ms for each way with each guest, taking turns, a machine each with {} vCPU{} and rings of {} entries; an epoch every {} ms",
                    s.repeat,
                    s.per_run().as_secs_f64() * 1e3,
                    s.vcpus,
                    if s.vcpus == 1 { "" } else { "s" },
                    s.ring_entries,
                    s.interval.as_secs_f64() * 1e3
                ),
            ),
        ];
        out.push_str("<h1>Ways to track a guest's writes, side by side</h1><dl>");
        let command = self.command.clone().map(|command| ("Command", command));
        for (name, value) in rows.into_iter().chain(command) {
            let _ = write!(out, "<dt>{name}</dt><dd>{}</dd>", escape(&value));
        }
        out.push_str("</dl>");
    }

    /// Returns the rows of each guest and size as a group, in the order of the matrix.
    fn groups(&self) -> impl Iterator<Item = &[CellReport]> {
        self.cells.chunk_by(|a, b| a.guest == b.guest && a.mem_bytes == b.mem_bytes)
    }

    /// Returns every way that tracks, in the order of the matrix. A way's index is its style, which
    /// is its colour and shape.
    fn ways(&self) -> Vec<Way> {
        let mut ways = Vec::new();
        for way in self.cells.iter().map(|row| row.way).filter(|way| way.tracks()) {
            if !ways.contains(&way) {
                ways.push(way);
            }
        }
        ways
    }

    /// Returns a series for each way, from the rows that `pick` selects, in ascending order.
    fn series(&self, pick: impl Fn(&CellReport, &Figures) -> Option<(f64, Spread)>) -> Vec<Series> {
        let series = |(style, way): (usize, &Way)| {
            let rows = self.cells.iter().filter(|row| row.way == *way);
            let mut points: Vec<Point> = rows
                .filter_map(|row| pick(row, row.figures.as_ref()?))
                .map(|(x, y)| Point { x, y: y.median, low: y.min, high: y.max })
                .collect();
            points.sort_by(|a, b| a.x.total_cmp(&b.x));
            Series { name: way.to_string(), style, points }
        };
        self.ways().iter().enumerate().map(series).collect()
    }

    /// Returns the memory size with the most guests; if several have as many, the smallest.
    fn base_mem(&self) -> u64 {
        let guests = |mem: u64| {
            let of_size = self.groups().filter(|g| g.first().is_some_and(|r| r.mem_bytes == mem));
            of_size.count()
        };
        let sizes = self.cells.iter().map(|row| row.mem_bytes);
        sizes.max_by_key(|mem| (guests(*mem), std::cmp::Reverse(*mem))).unwrap_or(0)
    }

    fn pictures(&self) -> Vec<Picture> {
        let base = self.base_mem();
        let mut all: Vec<Picture> = Vec::new();
        all.extend(self.over_memory());
        all.extend(self.over_frames(base));
        all.extend(self.over_rate(base));
        all.extend(self.pauses(base));
        all
    }

    fn over_memory(&self) -> Option<Picture> {
        // The guest that ran with the most sizes.
        let sizes = |guest: &GuestKind| {
            let mut sizes: Vec<u64> =
                self.cells.iter().filter(|r| r.guest == *guest).map(|r| r.mem_bytes).collect();
            sizes.sort_unstable();
            sizes.dedup();
            sizes
        };
        let mut guests: Vec<&GuestKind> = self.cells.iter().map(|r| &r.guest).collect();
        guests.dedup();
        // If several did, the first.
        let guest = guests.into_iter().rev().max_by_key(|guest| sizes(guest).len())?;
        let sizes = sizes(guest);
        if sizes.len() < 2 {
            return None;
        }
        let mut series = self.series(|row, f| {
            (row.guest == *guest).then_some(())?;
            Some((row.mem_bytes as f64, f.epoch_us?))
        });
        // A single point is no curve.
        series.retain(|s| s.points.len() > 1);
        let ticks = sizes.iter().map(|bytes| (*bytes as f64, size(*bytes))).collect();
        let plot = Plot {
            title: "Time of an epoch over the guest's memory".to_owned(),
            x: Axis { label: "guest memory".to_owned(), ticks: Ticks::At(ticks) },
            y: epoch_axis(),
            series,
        };
        Some(Picture {
            heading: "Cost over memory size",
            caption: format!(
                "Time of an epoch of {}, whose writes are the same whatever memory it has. Medians; bars from the least run to the greatest.",
                guest.name()
            ),
            svg: plot.svg()?,
        })
    }

    fn over_frames(&self, mem_bytes: u64) -> Option<Picture> {
        let series = self.series(|row, f| {
            (row.mem_bytes == mem_bytes).then_some(())?;
            Some((f.dirty_frames?.median, f.epoch_us?))
        });
        let plot = Plot {
            title: "Time of an epoch over its dirty frames".to_owned(),
            x: Axis { label: "dirty frames in an epoch".to_owned(), ticks: Ticks::Log(count) },
            y: epoch_axis(),
            series,
        };
        Some(Picture {
            heading: "Epoch time over dirty frames",
            caption: format!(
                "Every guest with {}: each point is one, from its median epoch. Bars from the least run to the greatest.",
                size(mem_bytes)
            ),
            svg: plot.svg()?,
        })
    }

    fn over_rate(&self, mem_bytes: u64) -> Option<Picture> {
        let per_s = 1.0 / self.settings.interval.as_secs_f64();
        let series = self.series(|row, f| {
            (row.mem_bytes == mem_bytes).then_some(())?;
            Some((f.dirty_frames?.median * per_s, f.slow_down_percent?))
        });
        let plot = Plot {
            title: "The guest's slow-down over its dirty rate".to_owned(),
            x: Axis { label: "dirty frames a second".to_owned(), ticks: Ticks::Log(count) },
            y: Axis {
                label: "slow-down of the guest, %".to_owned(),
                ticks: Ticks::Linear(|v| format!("{v:.0}")),
            },
            series,
        };
        Some(Picture {
            heading: "Guest slow-down over dirty rate",
            caption: format!(
                "How many fewer pages the guest visits than without tracking in the same round, with {}. A guest that keeps to a rate can make up for lost time and shows no slow-down until it cannot; one that writes as fast as it can shows all of it.",
                size(mem_bytes)
            ),
            svg: plot.svg()?,
        })
    }

    /// Returns one picture for each guest.
    fn pauses(&self, mem_bytes: u64) -> impl Iterator<Item = Picture> {
        let ways = self.ways();
        let groups =
            self.groups().filter(move |g| g.first().is_some_and(|r| r.mem_bytes == mem_bytes));
        groups.filter_map(move |rows| {
            let row = |row: &CellReport| {
                // `ways` omits no tracking, which has style 8.
                let style = ways.iter().position(|way| *way == row.way).unwrap_or(8);
                let values = row.figures.as_ref()?.pauses_us.clone();
                Some(BoxRow { name: row.way.to_string(), style, values })
            };
            let drawn: Vec<BoxRow> = rows.iter().filter_map(row).collect();
            let axis = Axis { label: "pause (log scale)".to_owned(), ticks: Ticks::Log(us_tick) };
            let name = rows.first()?.guest.name();
            Some(Picture {
                heading: "Pause distribution",
                caption: format!(
                    "{name} with {}: how long the guest stands until the set is complete and it goes on, over all pauses of all runs. The box is the middle half, the line across it the median, the ends are the least and the greatest.",
                    size(mem_bytes)
                ),
                svg: boxes(&format!("Pauses of {name}"), &axis, &drawn)?,
            })
        })
    }
}

fn epoch_axis() -> Axis {
    Axis { label: "time of an epoch (log scale)".to_owned(), ticks: Ticks::Log(us_tick) }
}

/// Formats a time at a tick; round numbers stay short.
fn us_tick(us: f64) -> String {
    match us {
        us if us >= 1e6 => format!("{} s", us / 1e6),
        us if us >= 999.0 => format!("{:.0} ms", us / 1e3),
        us if us >= 0.99 => format!("{us:.0} us"),
        us => format!("{:.0} ns", us * 1e3),
    }
}

/// Formats a count at a tick.
fn count(n: f64) -> String {
    match n {
        n if n >= 999_999.0 => format!("{:.0}M", n / 1e6),
        n if n >= 9_999.0 => format!("{:.0}k", n / 1e3),
        n if n >= 0.99 => format!("{n:.0}"),
        n => format!("{n}"),
    }
}

type Column = (&'static str, fn(&Figures) -> Option<String>);

/// The columns of a table.
const COLUMNS: [Column; 15] = [
    ("dirty frames", |f| f.dirty_frames.map(|s| ranged(s, |v| format!("{v:.0}")))),
    ("epoch", |f| f.epoch_us.map(time)),
    ("99 % of epochs", |f| f.epoch_p99_us.map(time)),
    ("harvest", |f| f.harvest_us.map(time)),
    ("reprotect", |f| f.reprotect_us.map(time)),
    ("insert", |f| f.insert_us.map(time)),
    ("drain", |f| f.drain_us.map(time)),
    ("pause", |f| f.pause_us.map(time)),
    ("page visits/s", |f| f.writes_per_s.map(|s| ranged(s, |v| format!("{v:.0}")))),
    ("slow-down, %", |f| f.slow_down_percent.map(|s| ranged(s, |v| format!("{v:.1}")))),
    ("vCPU time a visit, ns", |f| {
        f.vcpu_cpu_per_write_ns.map(|s| ranged(s, |v| format!("{v:.0}")))
    }),
    ("host CPU, %", |f| f.host_cpu_percent.map(|s| ranged(s, |v| format!("{v:.1}")))),
    ("ring full, exits/s", |f| f.ring_full_exits_per_s.map(|s| ranged(s, |v| format!("{v:.0}")))),
    ("ring full, ms/s", |f| f.ring_full_ms_per_s.map(|s| ranged(s, |v| format!("{v:.1}")))),
    ("memory", |f| f.tracking_bytes.map(size)),
];

type Count = (&'static str, fn(&Figures) -> Option<u64>);

/// The counts of the strict looks.
const COUNTS: [Count; 6] = [
    ("looks", |f| f.strict_looks),
    ("written", |f| f.written_frames),
    ("missed", |f| f.missed_frames),
    ("extra", |f| f.extra_frames),
    ("beside", |f| f.beside_frames),
    ("all dirty", |f| {
        f.strict_looks.or(f.epoch_us.map(|_| 0)).map(|_| f.marked_all_epochs + f.marked_all_looks)
    }),
];

const MEANINGS: &str = "<p class=\"note\">Every figure is the median of the runs' medians, with the least and the greatest run below it. \
An epoch is harvest (ring entries to lists), reprotect (of a bitmap: reading it, too), insert (into tree, list or flat bitmap) and drain (out of it, \
as ascending runs of frames), as the threads that do it measure it. Epochs and pauses come at points that are spread over the millisecond in which a guest that keeps to a rate works and sleeps (with \
intervals of 4 ms and more): where the guest is at work they cost more, because its processor has to be interrupted, and the median is the commoner case. A payload's working set has the host's memory before it is \
measured, a kernel's has not. A pause is what the guest stands, threads being woken included. vCPU time a visit \
is what the host's processors spend in vCPU threads for each page that the guest visits. Host CPU is collector and drain, of one processor. Memory for \
tracking is computed from the sizes of its parts, the kernel's among them. Written frames are read out of the guest's own memory: each of its pages counts \
its visits. Looks are strict ones: at a standing guest, with one epoch since the look before; what is written, extra and beside is of these. \
Missed is too, and whatever was written while the guest ran and that no epoch of that time reported. All dirty are epochs in which all memory counted as \
dirty because a ring was overrun, so that nothing can be found missing. Extra are pages of its working set that were reported and not written (where a vCPU is stopped between two stores one may be), beside are \
reported frames elsewhere: stacks, tables, clocks.</p>";

fn time(spread: Spread) -> String {
    ranged(spread, us)
}

fn ranged(s: Spread, show: impl Fn(f64) -> String) -> String {
    format!("{}\n{} to {}", show(s.median), show(s.min), show(s.max))
}

fn table(out: &mut String, rows: &[CellReport]) {
    let Some(first) = rows.first() else { return };
    let _ = write!(
        out,
        "<h3>{}, {}</h3><div class=\"wide\"><table><thead><tr><th>tracking</th>",
        escape(&first.guest.name()),
        size(first.mem_bytes)
    );
    for (name, _) in COLUMNS {
        let _ = write!(out, "<th>{name}</th>");
    }
    for (name, _) in COUNTS {
        let _ = write!(out, "<th>{name}</th>");
    }
    out.push_str("</tr></thead><tbody>");
    for row in rows {
        let _ = write!(out, "<tr><th>{}</th>", row.way);
        let why = row.why.as_deref().unwrap_or_default();
        let Some(f) = &row.figures else {
            let _ = write!(
                out,
                "<td class=\"why\" colspan=\"{}\">{}</td></tr>",
                COLUMNS.len() + COUNTS.len(),
                escape(why)
            );
            continue;
        };
        for (_, cell) in COLUMNS {
            let text = cell(f).unwrap_or_else(|| "\u{2013}".to_owned());
            let (median, range) = text.split_once('\n').unwrap_or((&text, ""));
            let _ = write!(out, "<td>{}<small>{}</small></td>", escape(median), escape(range));
        }
        for (_, count) in COUNTS {
            let _ = match count(f) {
                Some(n) => write!(out, "<td>{n}</td>"),
                None => write!(out, "<td>\u{2013}</td>"),
            };
        }
        out.push_str("</tr>");
        if !why.is_empty() {
            let span = COLUMNS.len() + COUNTS.len() + 1;
            let _ =
                write!(out, "<tr><td class=\"why\" colspan=\"{span}\">{}</td></tr>", escape(why));
        }
    }
    out.push_str("</tbody></table></div>");
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::report;

    #[test]
    fn the_page_is_whole_and_asks_nothing_of_anybody() {
        let report = report();
        let page = report.html();
        let options = roxmltree::ParsingOptions { allow_dtd: true, ..Default::default() };
        let document = roxmltree::Document::parse_with_options(&page, options).unwrap();
        let drawings = document.descendants().filter(|n| n.tag_name().name() == "svg").count();
        assert_eq!(drawings, 3 + 3, "three over axes, pauses of three guests");
        for outside in ["http-equiv", "<script", "<link", "src=", "href=", "url(", "@import"] {
            assert!(!page.contains(outside), "{outside}");
        }
        let elsewhere = page.replace("http://www.w3.org/2000/svg", "");
        assert!(!elsewhere.contains("http"), "no address but a name space's");
        assert!(
            page.contains("&lt;i&gt;a host&lt;/i&gt; &amp; its KVM"),
            "what is not ours is escaped"
        );
        for finding in &report.findings {
            assert!(page.contains(&escape(finding)));
        }
        assert!(page.contains("prefers-color-scheme:dark") && page.contains("@media print"));
    }

    #[test]
    fn the_picture_of_memory_sizes_stands_alone_and_needs_two_sizes() {
        let mut report = report();
        let picture = report.memory_svg().unwrap();
        let document = roxmltree::Document::parse(&picture).unwrap();
        assert_eq!(document.root_element().tag_name().name(), "svg");
        assert!(document.descendants().any(|n| n.tag_name().name() == "style"));
        assert!(picture.contains(">64 GiB<"));
        report.cells.retain(|row| row.mem_bytes == 1 << 30);
        assert_eq!(report.memory_svg(), None);
    }
}
