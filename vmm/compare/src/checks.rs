//! Sentences about missed pages: which ways missed some, and where there was no strict check.

use super::report::{CellReport, RowFigures};
use super::units::size;
use super::way::TrackingWay;

/// Returns whether the row missed a page.
pub(super) fn lost(row: &CellReport) -> bool {
    row.figures.as_ref().is_some_and(|f| f.missed_frames.is_some_and(|n| n > 0))
}

/// Says which ways missed pages. The report begins with this sentence.
pub(super) fn alarm(rows: &[CellReport]) -> Option<String> {
    let parts: Vec<String> = rows
        .iter()
        .filter(|row| lost(row))
        .filter_map(|row| Some((row, row.figures.as_ref()?.missed_frames?)))
        .map(|(row, n)| format!("{} missed {n} of {}", row.way, row.guest.phrase()))
        .collect();
    (!parts.is_empty()).then(|| format!("PAGES WERE LOST: {}.", parts.join("; ")))
}

/// Returns the sentences about the checks, the most important first.
pub(super) fn findings(rows: &[CellReport]) -> Vec<String> {
    let mut out = Vec::from_iter(checked(rows));
    out.extend(marked_all(rows));
    out.extend(unknown(rows));
    out
}

/// Says that no page was lost, and how many checks this claim rests on.
fn checked(rows: &[CellReport]) -> Option<String> {
    let tracked = || rows.iter().filter(|r| r.way.tracks());
    let sum = |f: fn(&RowFigures) -> Option<u64>| -> u64 {
        tracked().filter_map(|r| r.figures.as_ref().and_then(f)).sum()
    };
    let (checks, written) =
        (sum(|f| f.strict_checks), sum(|f| f.strict_checks.and(f.written_frames)));
    match written {
        _ if rows.iter().any(lost) => None,
        0 => Some("It is not known whether pages were missed: no check was strict.".to_owned()),
        _ => Some(format!(
            "No way missed a page: in {checks} checks of a paused guest, all {written} pages \
             written since the check before were reported.{} While the guest ran, every page that \
             it wrote was in some epoch; whether in the right one is not checked there.",
            match sum(|f| f.extra_frames) {
                0 => String::new(),
                extra =>
                    format!(" {extra} more were reported although unchanged, which is harmless."),
            }
        )),
    }
}

/// Lists the rows in which all memory counted as dirty: no page can be missing there, whatever the
/// way of tracking has lost.
fn marked_all(rows: &[CellReport]) -> Option<String> {
    let parts: Vec<String> = rows
        .iter()
        .filter_map(|r| {
            let epochs = r.figures.as_ref()?.marked_all();
            (epochs > 0).then(|| {
                let guest = r.guest.phrase();
                format!("{} of {guest} with {} in {epochs}", r.way, size(r.mem_bytes))
            })
        })
        .collect();
    (!parts.is_empty()).then(|| {
        format!(
            "ALL MEMORY COUNTED AS DIRTY in some epochs, because a ring was overrun: {}. No page \
             can be found missing there, and the checks after such epochs are not counted.",
            parts.join("; ")
        )
    })
}

/// Lists the rows for which it is unknown whether they missed a page, with the reason: nothing was
/// measured, or no check was strict.
fn unknown(rows: &[CellReport]) -> Vec<String> {
    let measured = |r: &CellReport| r.figures.is_some();
    let is_checked = |r: &CellReport| {
        r.figures
            .as_ref()
            .is_none_or(|f| f.missed_frames.is_some_and(|n| n > 0) || f.strict_checks.is_some())
    };
    let any = rows.iter().any(|r| r.way.tracks() && measured(r) && is_checked(r));
    let unchecked = without(rows, is_checked).filter(|_| any);
    [
        without(rows, measured).map(|ways| format!("Nothing was measured of {ways}.")),
        unchecked.map(|ways| {
            format!("It is not known whether a page was missed by {ways}: no check was strict.")
        }),
    ]
    .into_iter()
    .flatten()
    .collect()
}

/// Names the ways that have rows without `what`. Returns `None` if there are no such rows.
fn without(rows: &[CellReport], what: impl Fn(&CellReport) -> bool) -> Option<String> {
    let all = || rows.iter().filter(|r| r.way.tracks());
    let mut ways: Vec<TrackingWay> = Vec::new();
    for row in all().filter(|r| !what(r)) {
        if !ways.contains(&row.way) {
            ways.push(row.way);
        }
    }
    let parts: Vec<String> = ways
        .iter()
        .map(|way| {
            let of = all().filter(|r| r.way == *way).count();
            match all().filter(|r| r.way == *way && !what(r)).count() {
                none if none == of => way.to_string(),
                some => format!("{way} (in {some} of {of} rows)"),
            }
        })
        .collect();
    (!parts.is_empty()).then(|| parts.join(", "))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{row, way};

    #[test]
    fn lost_page_raises_the_alarm_alone() {
        let mut rows = [row(way("dirty-ring+tree"), 1 << 30, [10.0; 3])];
        assert_eq!(alarm(&rows), None);
        rows[0].figures.as_mut().unwrap().missed_frames = Some(3);
        let text = alarm(&rows).unwrap();
        assert_eq!(text, "PAGES WERE LOST: dirty-ring+tree missed 3 of the light guest.");
        assert!(findings(&rows).is_empty());
        rows[0].figures = None;
        assert!(findings(&rows)[0].contains("not known"));
    }

    #[test]
    fn unchanged_pages_are_called_harmless() {
        let mut rows = [row(way("dirty-ring+tree"), 1 << 30, [10.0; 3])];
        let text = findings(&rows).join("\n");
        assert!(
            text.starts_with("No way missed a page: in 3 checks of a paused guest, all 10 pages")
        );
        assert!(!text.contains("unchanged"), "{text}");
        rows[0].figures.as_mut().unwrap().extra_frames = Some(7);
        let text = findings(&rows).join("\n");
        assert!(text.contains(" 7 more were reported although unchanged, which is harmless."));
    }

    #[test]
    fn what_was_not_checked_is_not_claimed() {
        let mut rows = [
            row(way("dirty-ring+tree"), 1 << 30, [10.0; 3]),
            row(way("dirty-ring+list"), 1 << 30, [10.0; 3]),
            row(way("dirty-ring+list"), 2 << 30, [10.0; 3]),
            row(way("dirty-bitmap+flat"), 1 << 30, [10.0; 3]),
        ];
        assert!(!findings(&rows).join("\n").contains("Nothing was measured"));
        rows[1].figures = None;
        rows[3].figures = None;
        rows[0].figures.as_mut().unwrap().marked_all_epochs = 2;
        rows[0].figures.as_mut().unwrap().marked_all_checks = 1;
        let text = findings(&rows);
        assert!(text[0].starts_with("No way missed a page: in 6 checks"), "{text:?}");
        let marked = "ALL MEMORY COUNTED AS DIRTY in some epochs, because a ring was overrun: \
            dirty-ring+tree of ";
        assert!(text[1].starts_with(marked) && text[1].contains("1 GiB in 3."), "{text:?}");
        let unknown =
            "Nothing was measured of dirty-ring+list (in 1 of 2 rows), dirty-bitmap+flat.";
        assert_eq!(text[2], unknown);
        rows[2].figures.as_mut().unwrap().strict_checks = None;
        rows[2].figures.as_mut().unwrap().missed_frames = None;
        let unchecked = "It is not known whether a page was missed by dirty-ring+list \
            (in 1 of 2 rows): no check was strict.";
        assert_eq!(findings(&rows)[3], unchecked);
    }
}
