//! Plots as SVG: points with their spreads over one axis, joined by lines, and box plots.
//!
//! Every mark has its own colour (from Okabe and Ito's palette, which people with any colour vision
//! can distinguish) and its own shape. Colours come from the page's style, so that one drawing
//! serves light, dark and print.

mod axis;
mod boxes;

use std::fmt::Write;

pub(super) use axis::{Axis, Ticks};
pub(super) use boxes::{BoxRow, boxes};

/// Size of the whole drawing; the browser scales it.
const WIDTH: f64 = 820.0;
const HEIGHT: f64 = 400.0;
/// Area of the axes.
const LEFT: f64 = 76.0;
const RIGHT: f64 = 560.0;
const TOP: f64 = 16.0;
const BOTTOM: f64 = 340.0;
/// Distance between two lines of the legend.
const LEGEND_STEP: f64 = 22.0;
/// Distance between series that share an x value.
const DODGE: f64 = 3.5;
/// Number of styles: as many as there are colours and shapes.
pub(super) const STYLES: usize = 10;

/// Escapes text for HTML and XML, between tags and in attributes.
pub(super) fn escape(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '&' => out.push_str("&amp;"),
            '<' => out.push_str("&lt;"),
            '>' => out.push_str("&gt;"),
            '"' => out.push_str("&quot;"),
            '\'' => out.push_str("&#39;"),
            // XML forbids all other control characters, even as character references.
            c if c.is_control() && !matches!(c, '\n' | '\t') => out.push('\u{fffd}'),
            '\u{fffe}' | '\u{ffff}' => out.push('\u{fffd}'),
            c => out.push(c),
        }
    }
    out
}

/// The points of one way.
#[derive(Clone, Debug)]
pub(super) struct Series {
    pub(super) name: String,
    /// Index below [`STYLES`]; the same way has the same style in every drawing.
    pub(super) style: usize,
    pub(super) points: Vec<Point>,
}

/// A median and the runs around it.
#[derive(Clone, Copy, Debug)]
pub(super) struct Point {
    pub(super) x: f64,
    pub(super) y: f64,
    pub(super) low: f64,
    pub(super) high: f64,
}

/// Series over two axes. `title` is for readers who cannot see the drawing.
#[derive(Clone, Debug)]
pub(super) struct Plot {
    pub(super) title: String,
    pub(super) x: Axis,
    pub(super) y: Axis,
    pub(super) series: Vec<Series>,
}

impl Plot {
    /// Returns the drawing, or `None` if there is nothing to draw.
    pub(super) fn svg(&self) -> Option<String> {
        let drawn = |p: &&Point| self.x.takes(p.x) && self.y.takes(p.y);
        let series: Vec<(&Series, Vec<&Point>)> = self
            .series
            .iter()
            .map(|s| (s, s.points.iter().filter(drawn).collect::<Vec<_>>()))
            .filter(|(_, points)| !points.is_empty())
            .collect();
        let points = || series.iter().flat_map(|(_, points)| points.iter());
        let x = self.x.scale(points().map(|p| p.x), (LEFT, RIGHT))?;
        let y = self.y.scale(points().flat_map(|p| [p.y, p.low, p.high]), (BOTTOM, TOP))?;
        let mut out = open(&self.title, HEIGHT.max(TOP + LEGEND_STEP * (series.len() + 1) as f64));
        for (at, label) in y.ticks() {
            let _ = write!(
                out,
                r#"<line class="grid" x1="{LEFT}" x2="{RIGHT}" y1="{at:.1}" y2="{at:.1}"/><text class="tick" text-anchor="end" x="{:.1}" y="{:.1}">{}</text>"#,
                LEFT - 8.0,
                at + 4.0,
                escape(&label)
            );
        }
        for (at, label) in x.ticks() {
            let _ = write!(
                out,
                r#"<line class="grid" x1="{at:.1}" x2="{at:.1}" y1="{TOP}" y2="{BOTTOM}"/><text class="tick" text-anchor="middle" x="{at:.1}" y="{:.1}">{}</text>"#,
                BOTTOM + 23.0,
                escape(&label)
            );
        }
        let middle = (TOP + BOTTOM) / 2.0;
        let _ = write!(
            out,
            r#"<path class="frame" d="M{LEFT} {TOP}V{BOTTOM}H{RIGHT}"/><text class="label" text-anchor="middle" x="{:.1}" y="{:.1}">{}</text><text class="label" text-anchor="middle" transform="translate(16 {middle:.1}) rotate(-90)">{}</text>"#,
            (LEFT + RIGHT) / 2.0,
            BOTTOM + 48.0,
            escape(&self.x.label),
            escape(&self.y.label)
        );
        let center = (series.len().saturating_sub(1)) as f64 / 2.0;
        for (n, (s, points)) in series.iter().enumerate() {
            let aside = (n as f64 - center) * DODGE;
            let place = |p: &Point| (x.place(p.x) + aside, y.place(p.y));
            let style = s.style % STYLES;
            let _ = write!(out, r#"<g class="s{style}">"#);
            let path: Vec<String> =
                points.iter().map(|p| place(p)).map(|(x, y)| format!("{x:.1} {y:.1}")).collect();
            if path.len() > 1 {
                let _ = write!(out, r#"<path class="line" d="M{}"/>"#, path.join("L"));
            }
            for p in points {
                let (at, height) = place(p);
                let (low, high) = (y.place(p.low), y.place(p.high));
                let _ = write!(
                    out,
                    r#"<path class="spread" d="M{at:.1} {low:.1}V{high:.1}"/>{}"#,
                    mark(style, at, height)
                );
            }
            let line = TOP + 10.0 + LEGEND_STEP * n as f64;
            let from = RIGHT + 22.0;
            let _ = write!(
                out,
                r#"<path class="line" d="M{from:.1} {line:.1}h28"/>{}</g><text class="legend" x="{:.1}" y="{:.1}">{}</text>"#,
                mark(style, from + 14.0, line),
                from + 36.0,
                line + 4.0,
                escape(&s.name)
            );
        }
        out.push_str("</svg>");
        Some(out)
    }
}

/// Returns the opening tags of a drawing of this height.
fn open(title: &str, height: f64) -> String {
    let title = escape(title);
    format!(
        r#"<svg xmlns="http://www.w3.org/2000/svg" class="plot" role="img" viewBox="0 0 {WIDTH} {height}"><title>{title}</title>"#
    )
}

/// Returns a point's shape.
fn mark(style: usize, x: f64, y: f64) -> String {
    let path = |d: &str| format!(r#"<path class="mark" d="M{x:.1} {y:.1}{d}z"/>"#);
    let open = |d: &str| format!(r#"<path class="open" d="M{x:.1} {y:.1}{d}"/>"#);
    match style {
        0 => format!(r#"<circle class="mark" cx="{x:.1}" cy="{y:.1}" r="4.5"/>"#),
        1 => path("m-4 -4h8v8h-8"),
        2 => path("m0 -5.5l5 9h-10"),
        3 => path("m0 -6l5 6l-5 6l-5 -6"),
        4 => path("m0 5.5l5 -9h-10"),
        5 => open("m-4.5 -4.5l9 9m0 -9l-9 9"),
        6 => open("m-6 0h12m-6 -6v12"),
        7 => format!(r#"<circle class="open" cx="{x:.1}" cy="{y:.1}" r="4.5"/>"#),
        8 => open("m-4 -4h8v8h-8z"),
        _ => open("m0 -6l5 6l-5 6l-5 -6z"),
    }
}

/// Style sheet of the drawings, for the page around them or for a standalone file.
pub(super) const STYLE: &str = include_str!("plot.css");

/// Returns a drawing as a standalone file.
pub(super) fn standalone(svg: &str) -> String {
    // A standalone picture has no page behind it, so it needs a background.
    let styled = format!("<style>{STYLE}.plot{{background:var(--paper)}}</style><title>");
    format!("{}\n", svg.replacen("<title>", &styled, 1))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn plot(points: Vec<(f64, f64)>, log: bool) -> Plot {
        let ticks =
            if log { Ticks::Log(|v| format!("{v}")) } else { Ticks::Linear(|v| format!("{v}")) };
        let axis = |label: &str| Axis { label: label.to_owned(), ticks: ticks.clone() };
        let point = |(x, y): (f64, f64)| Point { x, y, low: y * 0.9, high: y * 1.1 };
        let points: Vec<Point> = points.into_iter().map(point).collect();
        let series = |style| Series {
            name: format!("way <{style}> & \"co\""),
            style,
            points: points.clone(),
        };
        Plot {
            title: "a <title> & 'more'".to_owned(),
            x: axis("dirty frames"),
            y: axis("us < ms"),
            series: (0..STYLES + 2).map(series).collect(),
        }
    }

    proptest! {
        #[test]
        fn drawings_are_xml_whose_marks_lie_within_the_axes(
            points in prop::collection::vec((1e-3f64..1e9, 1e-3f64..1e9), 1..8), log: bool
        ) {
            let svg = plot(points, log).svg().unwrap();
            let document = roxmltree::Document::parse(&svg).unwrap();
            for circle in document.descendants().filter(|n| n.has_tag_name(("http://www.w3.org/2000/svg", "circle"))) {
                let at = |name| circle.attribute(name).unwrap().parse::<f64>().unwrap();
                let room = DODGE * (STYLES + 2) as f64;
                prop_assert!((LEFT - room..=WIDTH).contains(&at("cx")), "{}", svg);
                prop_assert!((TOP - 1.0..=BOTTOM + 1.0).contains(&at("cy")), "{}", svg);
            }
            let file = standalone(&svg);
            prop_assert!(roxmltree::Document::parse(&file).is_ok());
        }

        #[test]
        fn whatever_is_escaped_is_the_text_of_an_element_and_of_an_attribute(text in any::<String>()) {
            let xml = format!("<a b=\"{0}\">{0}</a>", escape(&text));
            let document = roxmltree::Document::parse(&xml);
            prop_assert!(document.is_ok(), "{:?}", document);
        }
    }

    #[test]
    fn nothing_is_drawn_of_nothing_and_what_a_log_axis_does_not_take_is_left_out() {
        assert_eq!(plot(vec![], true).svg(), None);
        assert_eq!(plot(vec![(0.0, 1.0), (1.0, -1.0)], true).svg(), None);
        assert!(plot(vec![(0.0, 1.0)], false).svg().is_some());
        assert_eq!(plot(vec![(f64::NAN, 1.0)], false).svg(), None);
    }
}
