//! States what is known of missed frames, and where nothing is known.

use super::report::{CellReport, Figures};
use super::units::size;
use super::way::Way;

/// Returns the sentences, the most important first.
pub(super) fn findings(rows: &[CellReport]) -> Vec<String> {
    let mut out = vec![missed(rows)];
    out.extend(marked_all(rows));
    out.extend(unknown(rows));
    out
}

/// Says whether any frame was lost. This is the most important finding, and it claims no more than
/// the looks covered.
fn missed(rows: &[CellReport]) -> String {
    let tracked = || rows.iter().filter(|r| r.way.tracks());
    let lost: Vec<String> = tracked()
        .filter_map(|r| Some((r, r.figures.as_ref()?.missed_frames.filter(|n| *n > 0)?)))
        .map(|(r, n)| format!("{} missed {n} of {}", r.way, r.guest.name()))
        .collect();
    let sum = |f: fn(&Figures) -> Option<u64>| -> u64 {
        tracked().filter_map(|r| r.figures.as_ref().and_then(f)).sum()
    };
    let looks = sum(|f| f.strict_looks);
    let written = sum(|f| f.strict_looks.and(f.written_frames));
    match (lost.is_empty(), written) {
        (false, _) => format!("FRAMES WERE LOST: {}.", lost.join("; ")),
        (true, 0) => {
            "Whether frames were missed is not known: no look at a guest tells.".to_owned()
        }
        (true, _) => format!(
            "No way missed a frame in {looks} looks at a standing guest: all {written} frames of its working set that were written since \
             the look before were reported, and {} that were not. While it ran, every page that was written was in some epoch; whether in the \
             right one is not looked at there.",
            sum(|f| f.extra_frames)
        ),
    }
}

/// Lists the rows in which all memory counted as dirty: no frame can be missing there, whatever the
/// way of tracking has lost.
fn marked_all(rows: &[CellReport]) -> Option<String> {
    let told: Vec<String> = rows
        .iter()
        .filter_map(|r| {
            let figures = r.figures.as_ref()?;
            let (epochs, looks) = (figures.marked_all_epochs, figures.marked_all_looks);
            (epochs + looks > 0).then(|| {
                let guest = r.guest.name();
                format!("{} of {guest} with {} in {}", r.way, size(r.mem_bytes), epochs + looks)
            })
        })
        .collect();
    (!told.is_empty()).then(|| {
        format!(
            "ALL MEMORY COUNTED AS DIRTY in some epochs, because a ring was overrun: {}. There no frame can be found missing, and the looks \
             after such epochs are not counted.",
            told.join("; ")
        )
    })
}

/// Lists the rows for which it is unknown whether they missed a frame, with the reason: nothing was
/// measured, or no look was strict.
fn unknown(rows: &[CellReport]) -> Vec<String> {
    let measured = |r: &CellReport| r.figures.is_some();
    let looked = |r: &CellReport| {
        r.figures
            .as_ref()
            .is_none_or(|f| f.missed_frames.is_some_and(|n| n > 0) || f.strict_looks.is_some())
    };
    let any = rows.iter().any(|r| r.way.tracks() && measured(r) && looked(r));
    let blind = without(rows, looked).filter(|_| any);
    [
        without(rows, measured).map(|ways| format!("Nothing was measured of {ways}.")),
        blind.map(|ways| {
            format!("Whether a frame was missed is not known of {ways}: no look tells.")
        }),
    ]
    .into_iter()
    .flatten()
    .collect()
}

/// Names the ways that have rows without `what`. Returns `None` if there are no such rows.
fn without(rows: &[CellReport], what: impl Fn(&CellReport) -> bool) -> Option<String> {
    let all = || rows.iter().filter(|r| r.way.tracks());
    let mut ways: Vec<Way> = Vec::new();
    for row in all().filter(|r| !what(r)) {
        if !ways.contains(&row.way) {
            ways.push(row.way);
        }
    }
    let told: Vec<String> = ways
        .iter()
        .map(|way| {
            let of = all().filter(|r| r.way == *way).count();
            match all().filter(|r| r.way == *way && !what(r)).count() {
                none if none == of => way.to_string(),
                some => format!("{way} (in {some} of {of} rows)"),
            }
        })
        .collect();
    (!told.is_empty()).then(|| told.join(", "))
}
