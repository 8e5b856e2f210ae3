//! Lines over two axes, each with its name at its end.

use std::fmt::Write;

use super::axis::{Axis, AxisScale};
use super::svg::{STYLES, TOP, escape, mark, open, text_at};

const HEIGHT: f64 = 400.0;
/// Area of the axes. The names are right of it.
const LEFT: f64 = 76.0;
const RIGHT: f64 = 610.0;
const BOTTOM: f64 = 340.0;
/// Least distance between two names.
const NAME_STEP: f64 = 19.0;
/// Distance between lines that share an x value.
const DODGE: f64 = 3.5;

/// The points of one line, in ascending order of x.
#[derive(Clone, Debug)]
pub(crate) struct LineSeries {
    pub(crate) name: String,
    /// Index of its colour and shape; the same way has the same style in every drawing.
    pub(crate) style: usize,
    pub(crate) points: Vec<ChartPoint>,
}

/// A median and the runs around it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ChartPoint {
    pub(crate) x: f64,
    pub(crate) y: f64,
    pub(crate) low: f64,
    pub(crate) high: f64,
}

/// Lines over two axes. `title` is for readers who cannot see the drawing.
#[derive(Clone, Debug)]
pub(crate) struct LineChart {
    pub(crate) title: String,
    pub(crate) x: Axis,
    pub(crate) y: Axis,
    pub(crate) series: Vec<LineSeries>,
}

/// A line with the points that have a place.
struct DrawnLine<'s> {
    series: &'s LineSeries,
    points: Vec<&'s ChartPoint>,
    /// Horizontal shift, which keeps lines apart.
    aside: f64,
}

impl DrawnLine<'_> {
    fn style(&self) -> usize {
        self.series.style % STYLES
    }
}

impl LineChart {
    /// Returns the drawing, or `None` if there is nothing to draw.
    pub(crate) fn svg(&self) -> Option<String> {
        let placed = |p: &&ChartPoint| self.x.takes(p.x) && self.y.takes(p.y);
        let mut drawn: Vec<DrawnLine<'_>> = self
            .series
            .iter()
            .map(|s| DrawnLine {
                series: s,
                points: s.points.iter().filter(placed).collect(),
                aside: 0.0,
            })
            .filter(|drawn| !drawn.points.is_empty())
            .collect();
        let center = drawn.len().saturating_sub(1) as f64 / 2.0;
        for (n, drawn) in drawn.iter_mut().enumerate() {
            drawn.aside = (n as f64 - center) * DODGE;
        }
        let points = || drawn.iter().flat_map(|d| d.points.iter());
        let x = self.x.scale(points().map(|p| p.x), (LEFT, RIGHT))?;
        let y = self.y.scale(points().flat_map(|p| [p.y, p.low, p.high]), (BOTTOM, TOP))?;
        let mut out = open(&self.title, HEIGHT);
        self.axes(&mut out, &x, &y);
        for drawn in &drawn {
            line(&mut out, drawn, &x, &y);
        }
        names(&mut out, &drawn, &x, &y);
        out.push_str("</svg>");
        Some(out)
    }

    fn axes(&self, out: &mut String, x: &AxisScale<'_>, y: &AxisScale<'_>) {
        for (at, label) in y.ticks() {
            let _ = write!(
                out,
                r#"<line class="grid" x1="{LEFT}" x2="{RIGHT}" y1="{at:.1}" y2="{at:.1}"/>"#
            );
            text_at(out, "tick", "end", (LEFT - 8.0, at + 4.0), &label);
        }
        for (at, label) in x.ticks() {
            let _ = write!(
                out,
                r#"<line class="grid" x1="{at:.1}" x2="{at:.1}" y1="{TOP}" y2="{BOTTOM}"/>"#
            );
            text_at(out, "tick", "middle", (at, BOTTOM + 23.0), &label);
        }
        let _ = write!(out, r#"<path class="frame" d="M{LEFT} {TOP}V{BOTTOM}H{RIGHT}"/>"#);
        text_at(out, "label", "middle", ((LEFT + RIGHT) / 2.0, BOTTOM + 48.0), &self.x.label);
        let place = format!("translate(16 {:.1}) rotate(-90)", (TOP + BOTTOM) / 2.0);
        let label = escape(&self.y.label);
        let _ = write!(
            out,
            r#"<text class="label" text-anchor="middle" transform="{place}">{label}</text>"#
        );
    }
}

/// Draws a line, its points, and the spread of each.
fn line(out: &mut String, drawn: &DrawnLine<'_>, x: &AxisScale<'_>, y: &AxisScale<'_>) {
    let place = |p: &&ChartPoint| (x.place(p.x) + drawn.aside, y.place(p.y));
    let _ = write!(out, r#"<g class="s{}">"#, drawn.style());
    let path: Vec<String> =
        drawn.points.iter().map(place).map(|(x, y)| format!("{x:.1} {y:.1}")).collect();
    if path.len() > 1 {
        let _ = write!(out, r#"<path class="line" d="M{}"/>"#, path.join("L"));
    }
    for p in &drawn.points {
        let (at, height) = place(p);
        let (low, high) = (y.place(p.low), y.place(p.high));
        let _ = write!(
            out,
            r#"<path class="spread" d="M{at:.1} {low:.1}V{high:.1}"/>{}"#,
            mark(drawn.style(), at, height)
        );
    }
    out.push_str("</g>");
}

/// Draws the names, each as near the end of its line as the others allow.
fn names(out: &mut String, drawn: &[DrawnLine<'_>], x: &AxisScale<'_>, y: &AxisScale<'_>) {
    let mut ends: Vec<(&DrawnLine<'_>, f64, f64)> = drawn
        .iter()
        .filter_map(|d| d.points.last().map(|p| (d, x.place(p.x) + d.aside, y.place(p.y))))
        .collect();
    ends.sort_by(|a, b| a.2.total_cmp(&b.2));
    let heights = apart(&ends.iter().map(|(_, _, y)| *y).collect::<Vec<_>>());
    for ((drawn, from, end), at) in ends.iter().zip(heights) {
        let _ = write!(
            out,
            r#"<g class="s{}"><path class="lead" d="M{:.1} {end:.1}L{:.1} {at:.1}"/>{}</g>"#,
            drawn.style(),
            from + 6.0,
            RIGHT + 8.0,
            mark(drawn.style(), RIGHT + 16.0, at)
        );
        text_at(out, "name", "start", (RIGHT + 28.0, at + 4.0), &drawn.series.name);
    }
}

/// Moves ascending heights apart, as little as possible downwards, then upwards if the last one
/// would leave the axes.
fn apart(heights: &[f64]) -> Vec<f64> {
    let mut out: Vec<f64> = Vec::new();
    for height in heights {
        out.push(out.last().map_or(*height, |above| height.max(above + NAME_STEP)));
    }
    let mut below = BOTTOM + NAME_STEP;
    for height in out.iter_mut().rev() {
        *height = height.min(below - NAME_STEP);
        below = *height;
    }
    out
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::plot::AxisTicks;
    use crate::plot::svg::{WIDTH, standalone};

    const LINES: usize = STYLES + 2;

    fn plot(points: Vec<(f64, f64)>, log: bool) -> LineChart {
        let ticks = if log {
            AxisTicks::Log(|v| format!("{v}"))
        } else {
            AxisTicks::Linear(|v| format!("{v}"))
        };
        let axis = |label: &str| Axis { label: label.to_owned(), ticks: ticks.clone() };
        let point = |(x, y): (f64, f64)| ChartPoint { x, y, low: y * 0.9, high: y * 1.1 };
        let points: Vec<ChartPoint> = points.into_iter().map(point).collect();
        let series = |style| LineSeries {
            name: format!("way <{style}> & \"co\""),
            style,
            points: points.clone(),
        };
        LineChart {
            title: "a <title> & 'more'".to_owned(),
            x: axis("dirty pages"),
            y: axis("µs < ms"),
            series: (0..LINES).map(series).collect(),
        }
    }

    proptest! {
        #[test]
        fn drawings_are_xml_within_their_bounds(
            points in prop::collection::vec((1e-3f64..1e9, 1e-3f64..1e9), 1..8), log: bool
        ) {
            let svg = plot(points, log).svg().unwrap();
            let document = roxmltree::Document::parse(&svg).unwrap();
            let named = |name| {
                let space = ("http://www.w3.org/2000/svg", name);
                document.descendants().filter(move |n| n.has_tag_name(space))
            };
            for circle in named("circle") {
                let at = |name| circle.attribute(name).unwrap().parse::<f64>().unwrap();
                let room = DODGE * LINES as f64;
                prop_assert!((LEFT - room..=WIDTH).contains(&at("cx")), "{}", svg);
                prop_assert!((TOP - 1.0..=BOTTOM + 1.0).contains(&at("cy")), "{}", svg);
            }
            let mut heights: Vec<f64> = named("text")
                .filter(|n| n.attribute("class") == Some("name"))
                .map(|n| n.attribute("y").unwrap().parse().unwrap())
                .collect();
            heights.sort_by(f64::total_cmp);
            prop_assert_eq!(heights.len(), LINES);
            let are_apart = heights.windows(2).all(|w| w[1] - w[0] > NAME_STEP - 0.3);
            prop_assert!(are_apart, "{:?}", heights);
            prop_assert!(heights.iter().all(|y| (TOP..=BOTTOM + 5.0).contains(y)), "{:?}", heights);
            let file = standalone(&svg);
            prop_assert!(roxmltree::Document::parse(&file).is_ok());
        }
    }

    #[test]
    fn no_placed_value_means_no_drawing() {
        assert_eq!(plot(vec![], true).svg(), None);
        assert_eq!(plot(vec![(0.0, 1.0), (1.0, -1.0)], true).svg(), None);
        assert!(plot(vec![(0.0, 1.0)], false).svg().is_some());
        assert_eq!(plot(vec![(f64::NAN, 1.0)], false).svg(), None);
    }
}
