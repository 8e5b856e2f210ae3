//! Plots as SVG: lines over two axes, and rows of boxes over one.
//!
//! Every mark has its own colour (based on Okabe and Ito's palette for people with any colour
//! vision) and its own shape, and every line and row has its name beside it. Colours come from the
//! page's style, so that one drawing serves light, dark and print.

mod axis;
mod boxes;
mod lines;
mod svg;

pub(super) use axis::{Axis, AxisTicks};
pub(super) use boxes::{BoxGroup, BoxRow, boxes};
pub(super) use lines::{ChartPoint, LineChart, LineSeries};
pub(super) use svg::{STYLE, escape, standalone};
