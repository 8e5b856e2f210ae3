//! The answer: a few sentences, computed from the figures, that say which mode to use, what it
//! costs, and where another way is ahead.
//!
//! No winner is assumed. A name in a sentence results from a comparison of medians, and a way is
//! called ahead only if the middle halves of at least three runs do not overlap.

use super::checks;
use super::groups::{EPOCH, PAUSE, RankedFigure, RowGroup, SLOW_DOWN, groups, series};
use super::report::CellReport;
use super::stats::RunSpread;
use super::units::{factor, size, us};
use super::way::{SinkKind, TrackingWay};

/// Maximum number of exceptions that are listed.
const EXCEPTIONS: usize = 4;

/// Returns the answer, as sentences.
pub(super) fn answer(rows: &[CellReport]) -> Vec<String> {
    // A way that misses pages is neither recommended nor a rival.
    let sound = rows.iter().filter(|row| !rows.iter().any(|r| r.way == row.way && checks::lost(r)));
    let groups = groups(sound);
    let mut out = Vec::from_iter(checks::alarm(rows));
    if let Some(choice) = Recommendation::of(&groups) {
        out.extend(choice.advice());
        out.extend(choice.cost());
        out.extend(choice.exceptions());
    }
    out.extend(checks::findings(rows));
    out
}

/// The recommended mode: one of the modes of `--tracking`, which all deliver to the tree.
struct Recommendation<'g> {
    way: TrackingWay,
    groups: &'g [RowGroup<'g>],
    /// Number of groups in which the way is the cheapest or not clearly more expensive.
    good: usize,
    /// Number of groups in which the way was measured.
    of: usize,
    /// Average, over these groups, of the logarithm of the way's cost relative to the cheapest way.
    cost: f64,
}

impl<'g> Recommendation<'g> {
    /// Returns the mode that was measured in most groups and is good in most of them. If several
    /// are, the cheapest.
    fn of(groups: &'g [RowGroup<'g>]) -> Option<Self> {
        let ways = groups.iter().flat_map(|group| group.rows.iter().map(|row| row.way));
        let modes = ways.filter(|way| way.sink() == Some(SinkKind::Tree));
        let choices = modes.map(|way| Self::rate(groups, way)).filter(|choice| choice.of > 0);
        choices.min_by(|a, b| {
            b.of.cmp(&a.of).then(b.good.cmp(&a.good)).then(a.cost.total_cmp(&b.cost))
        })
    }

    fn rate(groups: &'g [RowGroup<'g>], way: TrackingWay) -> Self {
        let (mut good, mut of, mut sum) = (0, 0, 0.0);
        for group in groups {
            let order = group.order(EPOCH);
            let own = order.iter().find(|(w, _)| *w == way);
            if let (Some((_, own)), Some((_, least))) = (own, order.first()) {
                of += 1;
                good += usize::from(!EPOCH.is_clear(own, least));
                sum += (own.median / least.median.max(f64::MIN_POSITIVE)).max(1.0).ln();
            }
        }
        Self { way, groups, good, of, cost: sum / of.max(1) as f64 }
    }

    fn has_rivals(&self) -> bool {
        self.groups.iter().any(|group| group.order(EPOCH).len() > 1)
    }

    /// Says which mode to use, or that no difference is clear.
    fn advice(&self) -> Option<String> {
        let name = format!("{} (--tracking {})", self.way, self.way.source());
        let clear = self.groups.iter().any(|group| !group.leaders(EPOCH).is_empty());
        let (good, of) = (self.good, self.of);
        let cheap = "its epoch is the cheapest or not clearly more expensive than the cheapest";
        Some(match (clear, good) {
            _ if !self.has_rivals() => return None,
            (false, _) => format!(
                "No way's epoch is clearly cheaper than another's. Of the modes of --tracking, \
                    {name} is the cheapest in the medians."
            ),
            (true, 0) => format!(
                "Of the modes of --tracking, {name} has the cheapest epoch, but another way is \
                    always clearly cheaper."
            ),
            (true, _) if good == of => {
                format!("Use {name}: with every guest and memory size, {cheap}.")
            }
            (true, _) => {
                format!("Use {name}: in {good} of {of} pairs of guest and memory size, {cheap}.")
            }
        })
    }

    /// Says what an epoch costs with the least and the most memory, compared with the cheapest way
    /// of every other source.
    fn cost(&self) -> Option<String> {
        let measured = self.groups.iter().filter(|g| g.figure(EPOCH, self.way).is_some());
        let series = series(measured);
        let (first, last) = (series.first()?, series.last()?);
        let mut rivals: Vec<TrackingWay> = Vec::new();
        for (way, _) in last.order(EPOCH) {
            if way.source() != self.way.source()
                && rivals.iter().all(|r| r.source() != way.source())
            {
                rivals.push(way);
            }
        }
        let frames = first.rows.iter().find(|row| row.way == self.way)?.figures.as_ref()?;
        let frames = frames.dirty_frames.map(|s| format!(" (about {:.0} dirty pages)", s.median));
        let subject =
            format!("an epoch of {}{} takes", first.guest.phrase(), frames.unwrap_or_default());
        let mut out = self.cost_with(first, &subject, &rivals)?;
        if first.mem_bytes != last.mem_bytes {
            out.push(' ');
            out.push_str(&self.cost_with(last, "it takes", &rivals)?);
        }
        Some(out)
    }

    fn cost_with(
        &self,
        group: &RowGroup<'_>,
        subject: &str,
        rivals: &[TrackingWay],
    ) -> Option<String> {
        let own = group.figure(EPOCH, self.way)?;
        let compared: Vec<String> = rivals
            .iter()
            .filter_map(|way| Some(compared(&own, *way, &group.figure(EPOCH, *way)?)))
            .collect();
        let colon = if compared.is_empty() { "" } else { ": " };
        let (mem, own) = (size(group.mem_bytes), us(own.median));
        Some(format!("With {mem}, {subject} {own}{colon}{}.", listed(&compared)))
    }

    /// Says where another way is clearly ahead.
    fn exceptions(&self) -> Option<String> {
        let all: Vec<String> = [EPOCH, PAUSE, SLOW_DOWN]
            .into_iter()
            .flat_map(|measure| self.groups.iter().filter_map(move |g| self.exception(g, measure)))
            .collect();
        let first: Vec<&str> = all.iter().take(EXCEPTIONS).map(String::as_str).collect();
        let more = match all.len().saturating_sub(EXCEPTIONS) {
            0 => String::new(),
            more => format!("; and {more} more"),
        };
        match all.len() {
            _ if !self.has_rivals() => None,
            0 => Some(format!(
                "Nowhere is another way clearly ahead of {} in epoch, pause or slow-down of the \
                    guest.",
                self.way
            )),
            _ => Some(format!("Exceptions: {}{more}.", first.join("; "))),
        }
    }

    fn exception(&self, group: &RowGroup<'_>, measure: RankedFigure) -> Option<String> {
        let own = group.figure(measure, self.way)?;
        let order = group.order(measure);
        let (rival, least) = order.first()?;
        let RankedFigure { what, shown, .. } = measure;
        measure.is_clear(&own, least).then(|| {
            format!(
                "{what} of {} with {} ({}; {rival} {})",
                group.guest.phrase(),
                size(group.mem_bytes),
                shown(own.median),
                shown(least.median)
            )
        })
    }
}

/// Compares an epoch with that of a rival.
fn compared(own: &RunSpread, rival: TrackingWay, other: &RunSpread) -> String {
    let shown = us(other.median);
    let times = other.median / own.median;
    match (EPOCH.is_clear(own, other), times) {
        (true, times) if times >= 1.0 => {
            format!("{} times faster than {rival} ({shown})", factor(times))
        }
        (true, times) => format!("{} times slower than {rival} ({shown})", factor(1.0 / times)),
        (false, _) => format!("not clearly different from {rival} ({shown})"),
    }
}

/// Joins the items of an enumeration.
fn listed(items: &[String]) -> String {
    match items.split_last() {
        Some((last, rest)) if !rest.is_empty() => format!("{} and {last}", rest.join(", ")),
        _ => items.concat(),
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::report::RowFigures;
    use crate::testing::{row, way};

    /// Returns an epoch's median in a row.
    fn epoch(row: &CellReport) -> f64 {
        row.figures.as_ref().unwrap().epoch_us.unwrap().median
    }

    fn figures(row: &mut CellReport) -> &mut RowFigures {
        row.figures.as_mut().unwrap()
    }

    proptest! {
        #[test]
        fn recommended_mode_is_never_clearly_behind_another(
            figures in prop::collection::vec(prop::array::uniform3(0.1f64..1e6), 2..5)
        ) {
            let modes = TrackingWay::all().filter(|w| w.sink() == Some(SinkKind::Tree));
            let rows = figures.iter().zip(modes).map(|(f, w)| row(w, 1 << 30, *f));
            let rows: Vec<_> = rows.collect();
            let text = answer(&rows).join("\n");
            let least = rows.iter().min_by(|a, b| epoch(a).total_cmp(&epoch(b))).unwrap();
            let spread = |r: &CellReport| r.figures.as_ref().unwrap().epoch_us.unwrap();
            let clear = rows.iter().any(|r| spread(r).is_apart_from(&spread(least)));
            prop_assert_eq!(text.starts_with("Use "), clear, "{}", text);
            prop_assert_eq!(text.starts_with("No way's epoch is clearly"), !clear, "{}", text);
            // One group: the cheapest mode is always good, and the cheapest of the good ones.
            prop_assert!(text.contains(&format!("{} (--tracking", least.way)), "{}", text);
            prop_assert!(text.contains(&format!(" takes {}", us(epoch(least)))), "{}", text);
        }

        #[test]
        fn exception_is_listed_exactly_where_another_leads(
            ring in 1.0f64..100.0, other in 1.0f64..100.0
        ) {
            // With 1 GiB the ring is clearly ahead; the sizes of 2 GiB vary.
            let rows = [
                row(way("dirty-ring+tree"), 1 << 30, [1.0; 3]),
                row(way("dirty-bitmap+flat"), 1 << 30, [200.0; 3]),
                row(way("dirty-ring+tree"), 2 << 30, [ring, ring * 1.1, ring * 1.2]),
                row(way("dirty-bitmap+flat"), 2 << 30, [other, other * 1.1, other * 1.2]),
            ];
            let text = answer(&rows).join("\n");
            let (ring, other) = ((ring * 1.05, ring * 1.15), (other * 1.05, other * 1.15));
            let behind = other.1 < ring.0;
            let exception = text.contains("Exceptions: an epoch of the light guest with 2 GiB");
            prop_assert_eq!(exception, behind, "{}", text);
            prop_assert_eq!(text.contains("Nowhere is another way"), !behind, "{}", text);
            let good = if behind { "in 1 of 2 pairs" } else { "with every guest and memory size" };
            prop_assert!(text.contains(good), "{}", text);
            let slower = text.contains("times slower than dirty-bitmap+flat");
            prop_assert_eq!(slower, behind, "{}", text);
            let faster = text.matches("times faster than dirty-bitmap+flat").count();
            prop_assert_eq!(faster, 1 + usize::from(ring.1 < other.0), "{}", text);
        }
    }

    #[test]
    fn cost_covers_smallest_and_largest_memory_size() {
        let rows = [
            row(way("dirty-ring+tree"), 1 << 30, [10.0; 3]),
            row(way("dirty-bitmap+flat"), 1 << 30, [50.0; 3]),
            row(way("userfault-wp+tree"), 1 << 30, [90.0; 3]),
            row(way("dirty-ring+tree"), 64 << 30, [11.0; 3]),
            row(way("dirty-ring+flat"), 64 << 30, [12.0; 3]),
            row(way("dirty-bitmap+flat"), 64 << 30, [3200.0; 3]),
            row(way("userfault-wp+tree"), 64 << 30, [91.0; 3]),
        ];
        assert_eq!(
            answer(&rows)[1],
            "With 1 GiB, an epoch of the light guest (about 100 dirty pages) takes 10.0 µs: 9.0 \
             times faster than userfault-wp+tree (90.0 µs) and 5.0 times faster than \
             dirty-bitmap+flat (50.0 µs). With 64 GiB, it takes 11.0 µs: 8.3 times faster than \
             userfault-wp+tree (91.0 µs) and 291 times faster than dirty-bitmap+flat (3.2 ms)."
        );
    }

    #[test]
    fn recommendation_follows_the_figures() {
        let text = |ring: f64, bitmap: f64| {
            let rows = [
                row(way("dirty-ring+tree"), 1 << 30, [ring; 3]),
                row(way("dirty-bitmap+tree"), 1 << 30, [bitmap; 3]),
            ];
            answer(&rows).join("\n")
        };
        assert!(
            text(1.0, 9.0).starts_with("Use dirty-ring+tree (--tracking dirty-ring): with every")
        );
        assert!(
            text(9.0, 1.0).starts_with("Use dirty-bitmap+tree (--tracking dirty-bitmap): with")
        );
    }

    #[test]
    fn no_recommendation_without_a_clear_difference() {
        let text = |ring: Vec<f64>, other: Vec<f64>| {
            let mut rows = [
                row(way("dirty-ring+tree"), 1 << 30, [0.0; 3]),
                row(way("dirty-bitmap+flat"), 1 << 30, [0.0; 3]),
            ];
            figures(&mut rows[0]).epoch_us = RunSpread::of(ring);
            figures(&mut rows[1]).epoch_us = RunSpread::of(other);
            answer(&rows).join("\n")
        };
        for unclear in [text(vec![1.0; 2], vec![9.0; 2]), text(vec![1.0; 3], vec![1.0; 3])] {
            assert!(unclear.starts_with("No way's epoch is clearly cheaper"), "{unclear}");
            assert!(unclear.contains("not clearly different from dirty-bitmap+flat"), "{unclear}");
        }
        let always = text(vec![9.0; 3], vec![1.0; 3]);
        assert!(always.contains("but another way is always clearly cheaper"), "{always}");
        let alone = answer(&[row(way("dirty-ring"), 1 << 30, [1.0; 3])]).join("\n");
        assert!(alone.starts_with("With 1 GiB, an epoch of the light guest"), "{alone}");
        assert!(!alone.contains("Nowhere") && !alone.contains("cheap"), "{alone}");
    }

    #[test]
    fn slow_down_counts_from_one_percentage_point() {
        let text = |ring: f64| {
            let mut rows = [
                row(way("dirty-ring+tree"), 1 << 30, [1.0; 3]),
                row(way("dirty-bitmap+flat"), 1 << 30, [9.0; 3]),
            ];
            figures(&mut rows[0]).slow_down_percent = RunSpread::of([ring; 3]);
            figures(&mut rows[1]).slow_down_percent = RunSpread::of([0.0; 3]);
            answer(&rows).join("\n")
        };
        assert!(text(0.9).contains("Nowhere is another way"));
        let expected = "Exceptions: the slow-down of the light guest with 1 GiB (1.0 %; \
            dirty-bitmap+flat 0.0 %).";
        assert!(text(1.0).contains(expected), "{}", text(1.0));
    }

    #[test]
    fn long_list_of_exceptions_is_cut() {
        let mut rows = Vec::new();
        for gib in 1..=9 {
            let ring = if gib == 1 { 1.0 } else { 9.0 };
            rows.push(row(way("dirty-ring+tree"), gib << 30, [ring; 3]));
            rows.push(row(way("dirty-bitmap+flat"), gib << 30, [2.0; 3]));
        }
        let text = answer(&rows).join("\n");
        assert_eq!(text.matches("an epoch of the light guest with").count(), EXCEPTIONS, "{text}");
        assert!(text.contains("; and 4 more."), "{text}");
    }

    #[test]
    fn lossy_way_is_reported_first_not_recommended() {
        let mut rows = [
            row(way("dirty-ring+tree"), 1 << 30, [1.0; 3]),
            row(way("dirty-bitmap+tree"), 1 << 30, [9.0; 3]),
            row(way("dirty-bitmap+flat"), 1 << 30, [90.0; 3]),
        ];
        figures(&mut rows[0]).missed_frames = Some(3);
        let text = answer(&rows);
        assert!(text[0].starts_with("PAGES WERE LOST: dirty-ring+tree missed 3"), "{text:?}");
        assert!(text[1].starts_with("Use dirty-bitmap+tree"), "{text:?}");
        assert!(text[1..].iter().all(|line| !line.contains("dirty-ring")), "{text:?}");
    }
}
