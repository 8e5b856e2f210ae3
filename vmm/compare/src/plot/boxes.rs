//! Rows of boxes over one axis, in groups. Each row has its name on the left and its median on the
//! right.

use std::fmt::Write;

use super::axis::{Axis, AxisScale};
use super::svg::{STYLES, TOP, WIDTH, open, text_at};

/// Ends of the axis. The names are left of it, the medians right.
const LEFT: f64 = 190.0;
const RIGHT: f64 = 740.0;
/// Height of a group's heading.
const HEADING: f64 = 28.0;
/// Distance between two rows.
const STEP: f64 = 24.0;
/// Half of a box's height.
const HALF: f64 = 7.0;

/// One row.
#[derive(Clone, Debug)]
pub(crate) struct BoxRow {
    pub(crate) name: String,
    /// As in [`LineSeries`](super::LineSeries).
    pub(crate) style: usize,
    /// The least value, the lower quartile, the median, the upper quartile, and the greatest.
    pub(crate) values: [f64; 5],
    /// The median as text.
    pub(crate) median: String,
}

/// Rows under one heading.
#[derive(Clone, Debug)]
pub(crate) struct BoxGroup {
    pub(crate) heading: String,
    pub(crate) rows: Vec<BoxRow>,
}

/// Draws each row from its smallest to its largest value, with the middle half as a box and the
/// median as a line across it. Returns `None` if there is nothing to draw.
pub(crate) fn boxes(title: &str, x: &Axis, groups: &[BoxGroup]) -> Option<String> {
    let takes = |row: &&BoxRow| row.values.iter().all(|value| x.takes(*value));
    let rows = || groups.iter().flat_map(|group| group.rows.iter().filter(takes));
    let scale = x.scale(rows().flat_map(|row| row.values), (LEFT, RIGHT))?;
    let headings = groups.iter().filter(|group| group.rows.iter().any(|row| takes(&row))).count();
    let bottom = TOP + HEADING * headings as f64 + STEP * rows().count() as f64;
    let mut out = open(title, bottom + 56.0);
    axis(&mut out, &scale, bottom, &x.label);
    let mut y = TOP;
    for group in groups {
        let mut headed = false;
        for row in group.rows.iter().filter(takes) {
            if !std::mem::replace(&mut headed, true) {
                text_at(&mut out, "heading", "start", (4.0, y + HEADING - 9.0), &group.heading);
                y += HEADING;
            }
            draw(&mut out, row, &scale, y + STEP / 2.0);
            y += STEP;
        }
    }
    out.push_str("</svg>");
    Some(out)
}

fn axis(out: &mut String, scale: &AxisScale<'_>, bottom: f64, label: &str) {
    for (at, label) in scale.ticks() {
        let _ = write!(
            out,
            r#"<line class="grid" x1="{at:.1}" x2="{at:.1}" y1="{TOP}" y2="{bottom}"/>"#
        );
        text_at(out, "tick", "middle", (at, bottom + 18.0), &label);
    }
    let _ = write!(out, r#"<path class="frame" d="M{LEFT} {TOP}V{bottom}H{RIGHT}"/>"#);
    text_at(out, "label", "middle", ((LEFT + RIGHT) / 2.0, bottom + 44.0), label);
}

fn draw(out: &mut String, row: &BoxRow, scale: &AxisScale<'_>, y: f64) {
    let [least, first, middle, third, most] = row.values.map(|value| scale.place(value));
    text_at(out, "name", "end", (LEFT - 10.0, y + 4.0), &row.name);
    let _ = write!(
        out,
        r#"<g class="s{}"><path class="whisker" d="M{least:.1} {y:.1}H{most:.1}"/>"#,
        row.style % STYLES
    );
    let _ = write!(
        out,
        r#"<rect class="box" x="{first:.1}" y="{:.1}" width="{:.1}" height="{:.1}"/>"#,
        y - HALF,
        (third - first).max(1.0),
        HALF * 2.0
    );
    let _ = write!(
        out,
        r#"<path class="median" d="M{middle:.1} {:.1}v{:.1}"/></g>"#,
        y - HALF - 2.0,
        HALF * 2.0 + 4.0
    );
    text_at(out, "value", "end", (WIDTH - 4.0, y + 4.0), &row.median);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plot::AxisTicks;

    #[test]
    fn box_spans_quartiles_and_skips_unplaced_rows() {
        let axis = Axis { label: "µs".to_owned(), ticks: AxisTicks::Linear(|v| format!("{v}")) };
        let row = |name: &str, values| BoxRow {
            name: name.to_owned(),
            style: 1,
            values,
            median: "50 µs".to_owned(),
        };
        let group = |heading: &str, rows| BoxGroup { heading: heading.to_owned(), rows };
        let nan = [f64::NAN; 5];
        let groups = [
            group(
                "light <guest>",
                vec![row("a & b", [0.0, 25.0, 50.0, 75.0, 100.0]), row("none", nan)],
            ),
            group("empty", vec![row("none", nan)]),
        ];
        let svg = boxes("pauses", &axis, &groups).unwrap();
        let document = roxmltree::Document::parse(&svg).unwrap();
        let found = |class| {
            let of = document.descendants().filter(move |n| n.attribute("class") == Some(class));
            of.collect::<Vec<_>>()
        };
        let texts = |class| found(class).iter().map(|n| n.text().unwrap()).collect::<Vec<_>>();
        assert_eq!(texts("heading"), ["light <guest>"]);
        assert_eq!((texts("name"), texts("value")), (vec!["a & b"], vec!["50 µs"]));
        let boxes_found = found("box");
        assert_eq!(boxes_found.len(), 1);
        let at = |name| boxes_found[0].attribute(name).unwrap().parse::<f64>().unwrap();
        let place = |v: f64| LEFT + (RIGHT - LEFT) * v / 100.0;
        assert!((at("x") - place(25.0)).abs() < 0.1);
        assert!((at("width") - (place(75.0) - place(25.0))).abs() < 0.2);
        assert_eq!(boxes("none", &axis, &groups[1..]), None);
    }
}
