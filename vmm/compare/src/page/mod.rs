//! Formats the report as a self-contained page: the answer first, then drawings and tables.

mod charts;
mod tables;

use std::fmt::Write;

use charts::PageFigure;
use tables::SCROLL;

use super::groups::{RowGroup, groups};
use super::plot::{STYLE, escape, standalone};
use super::report::ComparisonReport;
use super::units::size;

const PAGE_STYLE: &str = include_str!("page.css");
/// Address of the project, if the crate names one.
const PROJECT: &str = env!("CARGO_PKG_REPOSITORY");

impl ComparisonReport {
    /// Returns the page as HTML that is also XML.
    pub fn html(&self) -> String {
        let groups = groups(&self.cells);
        let mut out =
            String::from("<!DOCTYPE html>\n<html lang=\"en\"><head><meta charset=\"utf-8\"/>");
        let _ = write!(
            out,
            "<meta name=\"viewport\" content=\"width=device-width, \
                initial-scale=1\"/><title>Driftline compare, \
                {}</title><style>\n{STYLE}{PAGE_STYLE}</style></head><body><main>",
            escape(&self.date)
        );
        self.head(&mut out);
        self.answer_section(&mut out);
        out.push_str("<section>");
        heading(&mut out, 2, "guests", "The guests");
        tables::guests(&mut out, &groups);
        out.push_str("</section>");
        if let Some(picture) = charts::over_memory(&groups) {
            figure(&mut out, &picture, |out| tables::over_memory(out, &groups));
        }
        for picture in charts::by_guest(&groups) {
            figure(&mut out, &picture, |_| ());
        }
        all_figures(&mut out, &groups);
        self.method(&mut out);
        out.push_str("</main></body></html>\n");
        out
    }

    /// Returns the drawing of an epoch's cost over memory size as a separate picture, or `None` if
    /// only one size was measured.
    pub fn memory_svg(&self) -> Option<String> {
        charts::over_memory(&groups(&self.cells)).map(|picture| standalone(&picture.svg))
    }

    fn head(&self, out: &mut String) {
        let h = &self.host;
        out.push_str("<header><p class=\"note\">");
        out.push_str(&project(PROJECT));
        let _ = write!(
            out,
            " {}</p><h1>Ways to track a guest's writes, side by side</h1><p \
                class=\"note\">Measured {} UTC on {} processor{} of {}, {}, {}.</p></header>",
            escape(&self.version),
            escape(&self.date),
            h.processors,
            if h.processors == 1 { "" } else { "s" },
            escape(&h.processor),
            size(h.mem_bytes),
            escape(&h.kernel)
        );
    }

    fn answer_section(&self, out: &mut String) {
        out.push_str("<section>");
        heading(out, 2, "answer", "The answer");
        out.push_str("<ul class=\"answer\">");
        for sentence in &self.answer {
            let _ = write!(out, "<li>{}</li>", escape(sentence));
        }
        out.push_str("</ul>");
        if let Some(caveat) = self.host.caveat() {
            let _ = write!(out, "<p class=\"banner\" role=\"note\">{caveat}</p>");
        }
        out.push_str("</section>");
    }

    fn method(&self, out: &mut String) {
        let (s, h) = (&self.settings, &self.host);
        let runs = format!(
            "{} runs of {:.0} ms for each way with each guest, in turn; a machine for each run, \
                with {} vCPU{} and rings of {} entries; an epoch every {} ms",
            s.repeat,
            s.per_run().as_secs_f64() * 1e3,
            s.vcpus,
            if s.vcpus == 1 { "" } else { "s" },
            s.ring_entries,
            s.interval.as_secs_f64() * 1e3
        );
        let facts = [
            ("Command", self.command.clone()),
            ("Runs", Some(runs)),
            ("Hardware virtualization", Some(h.hardware_virtualization.clone())),
            ("Transparent huge pages", Some(h.transparent_huge_pages.clone())),
        ];
        let facts = facts.into_iter().filter_map(|(name, value)| Some((name, value?)));
        let terms = TERMS.iter().map(|(term, meaning)| (*term, (*meaning).to_owned()));
        out.push_str("<section>");
        heading(out, 2, "method", "How it was measured");
        out.push_str("<details><summary>Command, settings, and what the words mean</summary><dl>");
        for (term, meaning) in facts.chain(terms) {
            let _ = write!(out, "<dt>{term}</dt><dd>{}</dd>", escape(&meaning));
        }
        out.push_str("</dl></details></section>");
    }
}

/// Returns the project's name, with a link if it has an address.
fn project(address: &str) -> String {
    match address {
        "" => "Driftline".to_owned(),
        address => format!("<a href=\"{}\">Driftline</a>", escape(address)),
    }
}

/// Writes a heading with an anchor, and a link to it.
fn heading(out: &mut String, level: u8, id: &str, text: &str) {
    let text = escape(text);
    let _ = write!(
        out,
        "<h{level} id=\"{id}\">{text} <a class=\"anchor\" href=\"#{id}\" aria-label=\"Link to \
            this section\">#</a></h{level}>"
    );
}

/// Writes a drawing and the output of `below`.
fn figure(out: &mut String, picture: &PageFigure, below: impl FnOnce(&mut String)) {
    out.push_str("<figure>");
    heading(out, 2, picture.id, picture.heading);
    let _ = write!(
        out,
        "<div class=\"{SCROLL}\" tabindex=\"0\">{}</div><figcaption>{}</figcaption>",
        picture.svg,
        escape(&picture.caption)
    );
    below(out);
    out.push_str("</figure>");
}

fn all_figures(out: &mut String, groups: &[RowGroup<'_>]) {
    out.push_str("<section>");
    heading(out, 2, "figures", "All figures");
    out.push_str(
        "<p class=\"note\">Medians of the runs, with the least and the greatest run \
        below. Bold: the least figure, and every one that is not clearly behind it. A way is \
        clearly behind if the middle halves of at least three runs do not overlap (slow-downs \
        must differ by a percentage point, too). Where nothing is bold, no way is clearly \
        behind.</p>",
    );
    for (n, group) in groups.iter().enumerate() {
        heading(out, 3, &format!("figures-{}", n + 1), &group.name());
        let spec = escape(&group.guest.spec());
        let _ = write!(out, "<p class=\"note\"><code>{spec}</code></p>");
        tables::group(out, group);
    }
    out.push_str("</section>");
}

/// The terms of the page and their meanings.
const TERMS: [(&str, &str); 12] = [
    (
        "Tracking",
        "A source of dirty pages (dirty-ring, dirty-bitmap, dirty-bitmap-manual: a bitmap that \
            is cleared by a second call, userfault-wp), and what the pages are kept in: \
            Driftline's tree, a list, or a flat bitmap that is scanned.",
    ),
    (
        "Epoch",
        "Harvest (ring entries to lists), reprotect (for a bitmap, with the time to read it), \
            insert (into tree, list or flat bitmap) and drain (out of it, as ascending runs of \
            pages), as measured by the threads that do it.",
    ),
    (
        "When",
        "Epochs and pauses come at points that are spread over the millisecond in which a paced \
            guest works and sleeps (with intervals of 4 ms and more). An epoch that meets the \
            guest at work costs more, because its processor has to be interrupted; the median is \
            the more frequent case.",
    ),
    ("Pause", "From the request to pause until the set is complete and the guest has resumed."),
    ("Slow-down", "How many fewer pages the guest visits than without tracking in the same round."),
    (
        "vCPU time a visit",
        "Processor time of the vCPU threads for each page that the guest visits.",
    ),
    ("Host CPU", "Processor time of the collector and of draining, in percent of one processor."),
    ("Memory", "Of the kernel and this process, computed from the sizes of the parts."),
    (
        "Working set",
        "A payload's working set is resident before it is measured. A kernel's is not.",
    ),
    (
        "Checks",
        "The guest's own pages count their visits. A check compares them with the reports while \
            the guest is paused, with exactly one epoch since the check before. Missed pages are \
            those written and not reported, and those written while the guest ran that no epoch \
            of that time reported.",
    ),
    (
        "Unchanged, elsewhere",
        "Unchanged pages of the working set were reported without a write: harmless (a vCPU may \
            be stopped between two stores). Elsewhere are reported pages outside of the working \
            set: stacks, tables, clocks.",
    ),
    (
        "Epochs all dirty",
        "Epochs in which all memory counted as dirty because a ring was overrun. No page can be \
            found missing there.",
    ),
];

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use roxmltree::{Document, ParsingOptions};

    use super::*;
    use crate::testing::report;

    fn parsed(page: &str) -> Document<'_> {
        let options = ParsingOptions { allow_dtd: true, ..Default::default() };
        Document::parse_with_options(page, options).unwrap()
    }

    #[test]
    fn page_is_whole_and_loads_nothing() {
        let report = report();
        let page = report.html();
        let document = parsed(&page);
        let drawings = document.descendants().filter(|n| n.tag_name().name() == "svg").count();
        assert_eq!(drawings, 4, "memory, epoch, slow-down, pause");
        for outside in ["http-equiv", "<script", "<link", "src=", "url(", "@import"] {
            assert!(!page.contains(outside), "{outside}");
        }
        let elsewhere = page.replace("http://www.w3.org/2000/svg", "");
        assert!(!elsewhere.contains("http"), "no address but a name space's");
        assert!(page.contains("&lt;i&gt;a host&lt;/i&gt; &amp; its KVM"), "host text is escaped");
        assert!(page.contains("prefers-color-scheme:dark") && page.contains("@media print"));
    }

    #[test]
    fn answer_and_banner_come_before_any_figure() {
        let mut report = report();
        let place = |page: &str, text: &str| page.find(text).unwrap_or_else(|| panic!("{text}"));
        report.host.hardware_virtualization = "missing".to_owned();
        let page = report.html();
        let answers: Vec<usize> = report.answer.iter().map(|a| place(&page, &escape(a))).collect();
        assert!(answers.is_sorted() && !answers.is_empty());
        let banner = place(&page, "class=\"banner\"");
        assert!(answers.iter().all(|at| *at < banner));
        assert!(banner < place(&page, "<svg") && banner < place(&page, "<table"));
        report.host.hardware_virtualization = "yes".to_owned();
        assert!(!report.html().contains("class=\"banner\""));
    }

    #[test]
    fn headings_are_unique_and_links_resolve() {
        let page = report().html();
        let document = parsed(&page);
        let ids: Vec<&str> = document.descendants().filter_map(|n| n.attribute("id")).collect();
        let unique: HashSet<&str> = ids.iter().copied().collect();
        assert_eq!(unique.len(), ids.len(), "{ids:?}");
        let headings: Vec<String> = document
            .descendants()
            .filter(|n| matches!(n.tag_name().name(), "h1" | "h2" | "h3"))
            .map(|n| n.text().unwrap_or_default().to_owned())
            .collect();
        assert_eq!(headings.iter().collect::<HashSet<_>>().len(), headings.len(), "{headings:?}");
        let links: Vec<&str> = document.descendants().filter_map(|n| n.attribute("href")).collect();
        assert_eq!(links.len(), headings.len() - 1, "all but the title");
        for link in links {
            assert!(unique.contains(link.strip_prefix('#').unwrap()), "{link}");
        }
    }

    #[test]
    fn table_rows_match_heads_and_give_reasons() {
        let page = report().html();
        let document = parsed(&page);
        let mut reasons = 0;
        for table in document.descendants().filter(|n| n.has_tag_name("table")) {
            let cells = |row: roxmltree::Node<'_, '_>| -> usize {
                let cells = row.children().filter(roxmltree::Node::is_element);
                cells.map(|c| c.attribute("colspan").map_or(1, |n| n.parse().unwrap())).sum()
            };
            let rows: Vec<_> = table.descendants().filter(|n| n.has_tag_name("tr")).collect();
            assert!(rows.iter().all(|row| cells(*row) == cells(rows[0])), "{rows:?}");
            let why = |n: &roxmltree::Node<'_, '_>| n.attribute("class") == Some("why");
            reasons += table.descendants().filter(why).count();
        }
        assert_eq!(reasons, 3, "the light guest's row without figures, in three tables");
    }

    #[test]
    fn project_is_linked_where_it_has_an_address() {
        assert_eq!(project(""), "Driftline");
        assert_eq!(project("a?b&c"), "<a href=\"a?b&amp;c\">Driftline</a>");
    }

    #[test]
    fn memory_picture_stands_alone_and_needs_two_sizes() {
        let mut report = report();
        let picture = report.memory_svg().unwrap();
        let document = Document::parse(&picture).unwrap();
        assert_eq!(document.root_element().tag_name().name(), "svg");
        assert!(document.descendants().any(|n| n.tag_name().name() == "style"));
        assert!(picture.contains(">64 GiB<"));
        report.cells.retain(|row| row.mem_bytes == 1 << 30);
        assert_eq!(report.memory_svg(), None);
    }
}
