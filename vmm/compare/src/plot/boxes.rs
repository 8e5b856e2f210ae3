//! Box plots: distributions side by side, one row each, over one axis.

use std::fmt::Write;

use super::{Axis, RIGHT, STYLES, TOP, escape, open};
use crate::stats::{quantile, sorted};

/// Width of the names on the left.
const NAMES: f64 = 190.0;
/// Distance between two rows.
const STEP: f64 = 30.0;
/// Half of a box's height.
const HALF: f64 = 8.0;
/// Right end of a row, beyond the axes of other drawings.
const END: f64 = RIGHT + 220.0;

/// One row.
#[derive(Clone, Debug)]
pub(crate) struct BoxRow {
    pub(crate) name: String,
    /// As in [`Series`](super::Series).
    pub(crate) style: usize,
    pub(crate) values: Vec<f64>,
}

/// Draws each row from its smallest to its largest value, with the middle half as a box and the
/// median as a line across it. Returns `None` if there is nothing to draw.
pub(crate) fn boxes(title: &str, x: &Axis, rows: &[BoxRow]) -> Option<String> {
    let rows: Vec<(&BoxRow, Vec<f64>)> = rows
        .iter()
        .map(|row| (row, sorted(row.values.iter().copied().filter(|v| x.takes(*v)))))
        .filter(|(_, values)| !values.is_empty())
        .collect();
    let scale = x.scale(rows.iter().flat_map(|(_, v)| v.iter().copied()), (NAMES, END))?;
    let bottom = TOP + STEP * rows.len() as f64;
    let mut out = open(title, bottom + 56.0);
    for (at, label) in scale.ticks() {
        let _ = write!(
            out,
            r#"<line class="grid" x1="{at:.1}" x2="{at:.1}" y1="{TOP}" y2="{bottom}"/><text class="tick" text-anchor="middle" x="{at:.1}" y="{:.1}">{}</text>"#,
            bottom + 18.0,
            escape(&label)
        );
    }
    let _ = write!(
        out,
        r#"<path class="frame" d="M{NAMES} {TOP}V{bottom}H{END}"/><text class="label" text-anchor="middle" x="{:.1}" y="{:.1}">{}</text>"#,
        (NAMES + END) / 2.0,
        bottom + 44.0,
        escape(&x.label)
    );
    for (n, (row, values)) in rows.iter().enumerate() {
        let y = TOP + STEP * (n as f64 + 0.5);
        let at = |part: f64| scale.place(quantile(values, part).unwrap_or_default());
        let (least, first, middle, third, most) = (at(0.0), at(0.25), at(0.5), at(0.75), at(1.0));
        let _ = write!(
            out,
            r#"<text class="legend" text-anchor="end" x="{:.1}" y="{:.1}">{}</text><g class="s{}"><path class="whisker" d="M{least:.1} {y:.1}H{most:.1}"/><rect class="box" x="{first:.1}" y="{:.1}" width="{:.1}" height="{:.1}"/><path class="median" d="M{middle:.1} {:.1}v{:.1}"/></g>"#,
            NAMES - 10.0,
            y + 4.0,
            escape(&row.name),
            row.style % STYLES,
            y - HALF,
            (third - first).max(1.0),
            HALF * 2.0,
            y - HALF - 2.0,
            HALF * 2.0 + 4.0
        );
    }
    out.push_str("</svg>");
    Some(out)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plot::Ticks;

    #[test]
    fn a_box_holds_the_middle_half_and_rows_without_values_are_left_out() {
        let axis = Axis { label: "us".to_owned(), ticks: Ticks::Linear(|v| format!("{v}")) };
        let row = |name: &str, values: &[f64]| BoxRow {
            name: name.to_owned(),
            style: 1,
            values: values.to_vec(),
        };
        let values: Vec<f64> = (0..=100).map(f64::from).collect();
        let svg = boxes("pauses", &axis, &[row("a & b", &values), row("none", &[])]).unwrap();
        let document = roxmltree::Document::parse(&svg).unwrap();
        let found: Vec<_> =
            document.descendants().filter(|n| n.attribute("class") == Some("box")).collect();
        assert_eq!(found.len(), 1);
        let at = |name| found[0].attribute(name).unwrap().parse::<f64>().unwrap();
        let place = |v: f64| NAMES + (END - NAMES) * v / 100.0;
        assert!(
            (at("x") - place(25.0)).abs() < 0.1
                && (at("width") - (place(75.0) - place(25.0))).abs() < 0.2
        );
        assert_eq!(boxes("none", &axis, &[row("none", &[])]), None);
    }
}
