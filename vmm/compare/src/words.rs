//! Turns figures into sentences. No winner is assumed: every name results from a comparison of
//! medians.

use std::cmp::Ordering;

use driftline_dirty_tracker::TrackingMode;

use super::looks;
use super::matrix::GuestKind;
use super::report::{CellReport, Figures};
use super::stats::Spread;
use super::units::{percent, size, us};
use super::way::Way;

/// A figure for which less is better.
#[derive(Clone, Copy, Debug)]
struct Measure {
    /// Its name in a sentence.
    what: &'static str,
    of: fn(&Figures) -> Option<Spread>,
    shown: fn(f64) -> String,
    /// Medians that differ by less than this are not clearly different.
    least: f64,
}

impl Measure {
    /// Returns whether the order of the two is clear.
    fn is_clear(&self, a: &Spread, b: &Spread) -> bool {
        a.is_apart_from(b) && (a.median - b.median).abs() >= self.least
    }
}

const EPOCH: Measure = Measure { what: "an epoch", of: |f| f.epoch_us, shown: us, least: 0.0 };
const PAUSE: Measure = Measure { what: "the pause", of: |f| f.pause_us, shown: us, least: 0.0 };
/// The slow-down. For a guest that keeps to a rate it is about 0 with every way, so a tenth of a
/// percentage point is not a clear difference.
const SLOW_DOWN: Measure = Measure {
    what: "the guest's slow-down",
    of: |f| f.slow_down_percent,
    shown: percent,
    least: 1.0,
};
const HOST_CPU: Measure =
    Measure { what: "host processor time", of: |f| f.host_cpu_percent, shown: percent, least: 0.0 };

/// The rows of one guest of one size.
struct Group<'r> {
    guest: &'r GuestKind,
    mem_bytes: u64,
    rows: Vec<(Way, &'r Figures)>,
}

impl Group<'_> {
    fn name(&self) -> String {
        format!("{} with {}", self.guest.name(), size(self.mem_bytes))
    }

    /// Returns the ways in ascending order of `measure`.
    fn order(&self, measure: Measure, which: impl Fn(Way) -> bool) -> Vec<(Way, Spread)> {
        let rows = self.rows.iter().filter(|(way, _)| way.tracks() && which(*way));
        let mut known: Vec<_> =
            rows.filter_map(|(way, f)| Some((*way, (measure.of)(f)?))).collect();
        known.sort_by(|a, b| a.1.median.total_cmp(&b.1.median));
        known
    }
}

fn groups(rows: &[CellReport]) -> Vec<Group<'_>> {
    let mut groups: Vec<Group<'_>> = Vec::new();
    for row in rows {
        let Some(figures) = &row.figures else { continue };
        let same = |g: &&mut Group<'_>| g.mem_bytes == row.mem_bytes && *g.guest == row.guest;
        match groups.iter_mut().find(same) {
            Some(group) => group.rows.push((row.way, figures)),
            None => groups.push(Group {
                guest: &row.guest,
                mem_bytes: row.mem_bytes,
                rows: vec![(row.way, figures)],
            }),
        }
    }
    groups
}

fn is_ring(way: Way) -> bool {
    way.source() == TrackingMode::DirtyRing
}

/// Returns all findings of the rows.
pub(super) fn findings(rows: &[CellReport]) -> Vec<String> {
    let groups = groups(rows);
    let mut out = looks::findings(rows);
    out.extend(where_the_ring_stands(&groups));
    out.extend(growth(&groups));
    out.extend(groups.iter().filter_map(best));
    out
}

/// Says which way has the least of each measure in one group.
fn best(group: &Group<'_>) -> Option<String> {
    let frames = group.order(EPOCH, |_| true);
    let told: Vec<String> = [EPOCH, PAUSE, SLOW_DOWN, HOST_CPU]
        .into_iter()
        .filter_map(|measure| verdict(measure, &group.order(measure, |_| true)))
        .collect();
    if told.is_empty() {
        return None;
    }
    let typical = frames.first().and_then(|(way, _)| {
        let (_, figures) = group.rows.iter().find(|(w, _)| w == way)?;
        Some(format!(", {:.0} dirty frames an epoch", figures.dirty_frames?.median))
    });
    Some(format!("{}{}: {}.", group.name(), typical.unwrap_or_default(), told.join("; ")))
}

/// Describes one measure of one group. Returns `None` if there are fewer than two ways.
fn verdict(measure: Measure, order: &[(Way, Spread)]) -> Option<String> {
    let ((winner, least), rest) = order.split_first()?;
    let (last, most) = rest.last()?;
    let level = rest.iter().filter(|(_, spread)| !measure.is_clear(spread, least)).count();
    let shown = measure.shown;
    let (least, most) = (shown(least.median), shown(most.median));
    let what = measure.what;
    Some(match level {
        n if n == rest.len() => {
            format!("{what} has no clear winner ({least} with {winner} to {most} with {last})")
        }
        0 => format!("{what} is least with {winner}: {least}, greatest with {last}: {most}"),
        n => format!(
            "{what} is least with {winner}: {least} (not clearly ahead of {n} of the others), greatest with {last}: {most}"
        ),
    })
}

/// Says where the best dirty ring is behind the best other way, and where it is ahead.
fn where_the_ring_stands(groups: &[Group<'_>]) -> Vec<String> {
    let (mut loses, mut wins, mut behind) = (Vec::new(), Vec::new(), Vec::new());
    let (mut ahead, mut even) = (0, 0);
    for group in groups {
        for measure in [EPOCH, PAUSE, SLOW_DOWN] {
            let ring = group.order(measure, is_ring);
            let other = group.order(measure, |way| !is_ring(way));
            let (Some((ring, r)), Some((other, o))) = (ring.first(), other.first()) else {
                continue;
            };
            let shown = measure.shown;
            let line = format!(
                "{} of {} ({ring} {}, {other} {})",
                measure.what,
                group.name(),
                shown(r.median),
                shown(o.median)
            );
            match (measure.is_clear(r, o), o.median.total_cmp(&r.median)) {
                (true, Ordering::Less) => loses.push(line),
                (true, _) => wins.push(line),
                (false, Ordering::Less) => behind.push(line),
                (false, Ordering::Equal) => even += 1,
                (false, Ordering::Greater) => ahead += 1,
            }
        }
    }
    let mut out = Vec::new();
    if !loses.is_empty() {
        out.push(format!("The ring loses: {}.", loses.join("; ")));
    }
    if !wins.is_empty() {
        out.push(format!("The ring wins: {}.", wins.join("; ")));
    }
    if !behind.is_empty() {
        out.push(format!(
            "The ring is behind in the median, but not clearly, in: {}.",
            behind.join("; ")
        ));
    }
    if loses.is_empty() && !wins.is_empty() {
        out.push("Nowhere does the ring clearly lose.".to_owned());
    }
    if ahead > 0 {
        out.push(format!(
            "Comparisons in which the ring is ahead in the median, but not clearly: {ahead}."
        ));
    }
    if even > 0 {
        out.push(format!("Comparisons in which the medians are equal: {even}."));
    }
    out
}

/// Says how an epoch's cost changes when only the memory size grows.
fn growth(groups: &[Group<'_>]) -> Vec<String> {
    let mut out = Vec::new();
    let mut seen: Vec<&GuestKind> = Vec::new();
    for group in groups {
        if seen.contains(&group.guest) {
            continue;
        }
        seen.push(group.guest);
        let mut sizes: Vec<&Group<'_>> = groups.iter().filter(|g| g.guest == group.guest).collect();
        sizes.sort_by_key(|g| g.mem_bytes);
        let (Some(small), Some(large)) = (sizes.first(), sizes.last()) else { continue };
        if small.mem_bytes == large.mem_bytes {
            continue;
        }
        let (from, to) = (small.order(EPOCH, |_| true), large.order(EPOCH, |_| true));
        let grown: Vec<String> = to
            .iter()
            .filter_map(|(way, at_end)| {
                let (_, at_first) = from.iter().find(|(w, _)| w == way)?;
                let times = at_end.median / at_first.median;
                times.is_finite().then(|| {
                    format!(
                        "{way} {times:.1} times ({} to {})",
                        us(at_first.median),
                        us(at_end.median)
                    )
                })
            })
            .collect();
        if !grown.is_empty() {
            out.push(format!(
                "From {} to {} of memory, with the same writes ({}), the time of an epoch is multiplied: {}.",
                size(small.mem_bytes),
                size(large.mem_bytes),
                group.guest.name(),
                grown.join(", ")
            ));
        }
        out.extend(sizes.iter().filter_map(|g| times_apart(g)));
    }
    out
}

/// Says by what factor the epoch costs of the dirty ring's tree and the flat bitmap differ.
fn times_apart(group: &Group<'_>) -> Option<String> {
    let of = |name: &str| {
        let way: Way = name.parse().ok()?;
        let (_, figures) = group.rows.iter().find(|(w, _)| *w == way)?;
        figures.epoch_us.filter(|epoch| epoch.median > 0.0)
    };
    let (ring, flat) = (of("dirty-ring+tree")?, of("dirty-bitmap+flat")?);
    let (times, less) = match flat.median / ring.median {
        times if times >= 1.0 => (times, "less"),
        times => (1.0 / times, "more"),
    };
    Some(format!(
        "With {}, an epoch by dirty-ring+tree takes {times:.1} times {less} than by dirty-bitmap+flat ({}, {}).",
        size(group.mem_bytes),
        us(ring.median),
        us(flat.median)
    ))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::matrix::LIGHT;

    fn row(way: Way, mem_bytes: u64, epoch_us: [f64; 3]) -> CellReport {
        CellReport {
            way,
            source: way.source().to_string(),
            sink: way.sink(),
            guest: GuestKind::Payload(LIGHT.to_owned()),
            mem_bytes,
            figures: Some(Figures {
                epoch_us: Spread::of(epoch_us),
                dirty_frames: Spread::of([100.0]),
                missed_frames: Some(0),
                strict_looks: Some(3),
                written_frames: Some(10),
                ..Figures::default()
            }),
            why: None,
        }
    }

    fn way(name: &str) -> Way {
        name.parse().unwrap()
    }

    proptest! {
        #[test]
        fn whoever_is_named_the_winner_has_the_least_figure(
            figures in prop::collection::vec(prop::array::uniform3(0.1f64..1e6), 2..5)
        ) {
            let ways: Vec<Way> = Way::all().filter(|w| w.tracks()).collect();
            let rows: Vec<_> =
                figures.iter().zip(&ways).map(|(f, w)| row(*w, 1 << 30, *f)).collect();
            let least = rows
                .iter()
                .min_by(|a, b| {
                    let median = |r: &CellReport| r.figures.as_ref().unwrap().epoch_us.unwrap().median;
                    median(a).total_cmp(&median(b))
                })
                .unwrap();
            let said = findings(&rows).join("\n");
            let name = least.way.to_string();
            match said.split("an epoch is least with ").nth(1) {
                Some(named) => prop_assert!(named.starts_with(&format!("{name}: ")), "{}", said),
                None => {
                    let tied = said.split("an epoch has no clear winner (").nth(1).unwrap();
                    let named = tied.split(" with ").nth(1).unwrap();
                    prop_assert!(named.starts_with(&format!("{name} to ")), "{}", said);
                    let spread = least.figures.as_ref().unwrap().epoch_us.unwrap();
                    let apart = rows.iter().filter(|r| r.way != least.way).any(|r| {
                        r.figures.as_ref().unwrap().epoch_us.unwrap().is_apart_from(&spread)
                    });
                    prop_assert!(!apart, "{}", said);
                }
            }
        }

        #[test]
        fn the_ring_is_said_to_lose_exactly_where_all_its_runs_are_worse(ring in 1.0f64..100.0, other in 1.0f64..100.0) {
            let rows = [
                row(way("dirty-ring+tree"), 1 << 30, [ring, ring * 1.1, ring * 1.2]),
                row(way("dirty-bitmap+flat"), 1 << 30, [other, other * 1.1, other * 1.2]),
            ];
            let said = findings(&rows).join("\n");
            let (ring, other) = ((ring * 1.05, ring * 1.15), (other * 1.05, other * 1.15));
            prop_assert_eq!(said.contains("The ring loses: an epoch"), other.1 < ring.0, "{}", said);
            prop_assert_eq!(said.contains("The ring wins: an epoch"), ring.1 < other.0, "{}", said);
        }
    }

    #[test]
    fn growth_with_memory_is_told_way_by_way() {
        let rows = [
            row(way("dirty-ring+tree"), 1 << 30, [10.0; 3]),
            row(way("dirty-bitmap+flat"), 1 << 30, [50.0; 3]),
            row(way("dirty-ring+tree"), 64 << 30, [11.0; 3]),
            row(way("dirty-bitmap+flat"), 64 << 30, [3200.0; 3]),
        ];
        let said = findings(&rows).join("\n");
        assert!(said.contains("dirty-ring+tree 1.1 times (10.0 us to 11.0 us)"), "{said}");
        assert!(said.contains("dirty-bitmap+flat 64.0 times (50.0 us to 3.2 ms)"), "{said}");
        assert!(
            said.contains("With 64 GiB, an epoch by dirty-ring+tree takes 290.9 times less"),
            "{said}"
        );
        let looked = "No way missed a frame in 12 looks at a standing guest: all 40 frames ";
        assert!(said.contains(looked), "{said}");
    }

    #[test]
    fn a_lost_frame_is_the_first_thing_said() {
        let mut rows = [row(way("dirty-ring+tree"), 1 << 30, [10.0; 3])];
        rows[0].figures.as_mut().unwrap().missed_frames = Some(3);
        assert!(findings(&rows)[0].starts_with("FRAMES WERE LOST: dirty-ring+tree missed 3"));
        rows[0].figures = None;
        assert!(findings(&rows)[0].contains("not known"));
    }
    #[test]
    fn what_was_not_looked_at_is_not_claimed() {
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
        rows[0].figures.as_mut().unwrap().marked_all_looks = 1;
        let said = findings(&rows);
        assert!(said[0].starts_with("No way missed a frame in 6 looks"), "{said:?}");
        let marked = "ALL MEMORY COUNTED AS DIRTY in some epochs, because a ring was overrun: dirty-ring+tree of ";
        assert!(said[1].starts_with(marked) && said[1].contains("1 GiB in 3."), "{said:?}");
        let unknown =
            "Nothing was measured of dirty-ring+list (in 1 of 2 rows), dirty-bitmap+flat.";
        assert_eq!(said[2], unknown);
        rows[2].figures.as_mut().unwrap().strict_looks = None;
        rows[2].figures.as_mut().unwrap().missed_frames = None;
        let blind = "Whether a frame was missed is not known of dirty-ring+list (in 1 of 2 rows): no look tells.";
        assert_eq!(findings(&rows)[3], blind);
    }

    #[test]
    fn nobody_is_ahead_by_too_few_runs_equal_medians_or_a_tenth_of_a_percent() {
        let said = |ring: Vec<f64>, other: Vec<f64>, slow: f64| {
            let mut rows = [
                row(way("dirty-ring+tree"), 1 << 30, [0.0; 3]),
                row(way("dirty-bitmap+flat"), 1 << 30, [0.0; 3]),
            ];
            for (row, (epochs, slow)) in rows.iter_mut().zip([(ring, 0.0), (other, slow)]) {
                let figures = row.figures.as_mut().unwrap();
                figures.epoch_us = Spread::of(epochs);
                figures.slow_down_percent = Spread::of([slow; 3]);
            }
            findings(&rows).join("\n")
        };
        let few = said(vec![1.0; 2], vec![9.0; 2], 0.0);
        assert!(!few.contains("The ring wins") && few.contains("no clear winner"), "{few}");
        assert!(few.contains("ahead in the median, but not clearly: 1."), "{few}");
        assert!(few.contains("the medians are equal: 1."), "{few}");
        let enough = said(vec![1.0; 3], vec![9.0; 3], 0.9);
        assert!(enough.contains("The ring wins: an epoch"), "{enough}");
        assert!(
            !enough.contains("wins: the guest's") && !enough.contains("; the guest's slow-down of")
        );
        assert!(said(vec![1.0; 3], vec![1.0; 3], 1.0).contains("The ring wins: the guest's slow"));
        let equal = said(vec![1.0; 3], vec![1.0; 3], 0.0);
        assert!(equal.contains("equal: 2.") && !equal.contains("ahead in the median"), "{equal}");
    }
}
