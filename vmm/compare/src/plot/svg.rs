//! The parts of a drawing that all plots share: its tags, texts, marks and style sheet.

use std::fmt::Write;

/// Width of a drawing; the browser scales it.
pub(super) const WIDTH: f64 = 820.0;
/// Upper edge of the axes.
pub(super) const TOP: f64 = 16.0;
/// Number of styles: as many as there are colours and shapes.
pub(super) const STYLES: usize = 10;

/// Escapes text for HTML and XML, between tags and in attributes.
pub(crate) fn escape(text: &str) -> String {
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

/// Returns the opening tags of a drawing of this height.
pub(super) fn open(title: &str, height: f64) -> String {
    let mut out =
        String::from(r#"<svg xmlns="http://www.w3.org/2000/svg" class="plot" role="img" "#);
    let title = escape(title);
    let _ = write!(out, r#"viewBox="0 0 {WIDTH} {height}"><title>{title}</title>"#);
    out
}

/// Writes a text at a place. `anchor` is the part of the text that lies there.
pub(super) fn text_at(out: &mut String, class: &str, anchor: &str, (x, y): (f64, f64), text: &str) {
    let text = escape(text);
    let _ = write!(
        out,
        r#"<text class="{class}" text-anchor="{anchor}" x="{x:.1}" y="{y:.1}">{text}</text>"#
    );
}

/// Returns a point's shape.
pub(super) fn mark(style: usize, x: f64, y: f64) -> String {
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
pub(crate) const STYLE: &str = include_str!("plot.css");

/// Returns a drawing as a standalone file.
pub(crate) fn standalone(svg: &str) -> String {
    // A standalone picture has no page behind it, so it needs a background.
    let styled = format!("<style>{STYLE}.plot{{background:var(--paper)}}</style><title>");
    format!("{}\n", svg.replacen("<title>", &styled, 1))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn escaped_text_fits_an_element_and_an_attribute(text in any::<String>()) {
            let xml = format!("<a b=\"{0}\">{0}</a>", escape(&text));
            let document = roxmltree::Document::parse(&xml);
            prop_assert!(document.is_ok(), "{:?}", document);
        }
    }
}
