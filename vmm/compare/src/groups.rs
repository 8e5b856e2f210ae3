//! Groups rows by guest and memory size, and ranks the ways within a group.

use super::matrix::GuestKind;
use super::report::{CellReport, RowFigures};
use super::stats::RunSpread;
use super::units::{percent, size, us};
use super::way::TrackingWay;

/// A figure of which less is better.
#[derive(Clone, Copy, Debug)]
pub(super) struct RankedFigure {
    /// Its name in a sentence.
    pub(super) what: &'static str,
    pub(super) of: fn(&RowFigures) -> Option<RunSpread>,
    pub(super) shown: fn(f64) -> String,
    /// Medians that differ by less than this are not clearly different.
    least: f64,
}

impl RankedFigure {
    /// Returns whether the order of the two is clear.
    pub(super) fn is_clear(&self, a: &RunSpread, b: &RunSpread) -> bool {
        a.is_apart_from(b) && (a.median - b.median).abs() >= self.least
    }
}

pub(super) const EPOCH: RankedFigure =
    RankedFigure { what: "an epoch", of: |f| f.epoch_us, shown: us, least: 0.0 };
pub(super) const PAUSE: RankedFigure =
    RankedFigure { what: "a pause", of: |f| f.pause_us, shown: us, least: 0.0 };
/// The slow-down. For a guest that keeps to a rate it is about 0 with every way, so a tenth of a
/// percentage point is not a clear difference.
pub(super) const SLOW_DOWN: RankedFigure =
    RankedFigure { what: "the slow-down", of: |f| f.slow_down_percent, shown: percent, least: 1.0 };

/// The rows of one guest of one size.
pub(super) struct RowGroup<'r> {
    pub(super) guest: &'r GuestKind,
    pub(super) mem_bytes: u64,
    pub(super) rows: Vec<&'r CellReport>,
}

impl RowGroup<'_> {
    /// Returns the title for headings.
    pub(super) fn name(&self) -> String {
        format!("{}, {}", self.guest.name(), size(self.mem_bytes))
    }

    /// Returns the ways that track and have this figure, in ascending order of it.
    pub(super) fn order(&self, measure: RankedFigure) -> Vec<(TrackingWay, RunSpread)> {
        let rows = self.rows.iter().filter(|row| row.way.tracks());
        let mut known: Vec<_> =
            rows.filter_map(|row| Some((row.way, (measure.of)(row.figures.as_ref()?)?))).collect();
        known.sort_by(|a, b| a.1.median.total_cmp(&b.1.median));
        known
    }

    /// Returns the way with the least figure and every way that is not clearly behind it. Empty if
    /// no way is clearly behind.
    pub(super) fn leaders(&self, measure: RankedFigure) -> Vec<TrackingWay> {
        let order = self.order(measure);
        let Some((_, least)) = order.first() else { return Vec::new() };
        let (behind, leaders): (Vec<_>, Vec<_>) =
            order.iter().partition(|(_, spread)| measure.is_clear(spread, least));
        if behind.is_empty() { Vec::new() } else { leaders.iter().map(|(way, _)| *way).collect() }
    }

    /// Returns the figure of one way.
    pub(super) fn figure(&self, measure: RankedFigure, way: TrackingWay) -> Option<RunSpread> {
        self.order(measure).into_iter().find(|(w, _)| *w == way).map(|(_, spread)| spread)
    }
}

/// Returns the groups, in the order of the rows.
pub(super) fn groups<'r>(rows: impl IntoIterator<Item = &'r CellReport>) -> Vec<RowGroup<'r>> {
    let mut groups: Vec<RowGroup<'_>> = Vec::new();
    for row in rows {
        let same = |g: &&mut RowGroup<'_>| g.mem_bytes == row.mem_bytes && *g.guest == row.guest;
        match groups.iter_mut().find(same) {
            Some(group) => group.rows.push(row),
            None => groups.push(RowGroup {
                guest: &row.guest,
                mem_bytes: row.mem_bytes,
                rows: vec![row],
            }),
        }
    }
    groups
}

/// Returns the groups of the guest with the most memory sizes (the first one if several have as
/// many), in ascending order of the sizes.
pub(super) fn series<'g, 'r>(
    groups: impl Iterator<Item = &'g RowGroup<'r>> + Clone,
) -> Vec<&'g RowGroup<'r>>
where
    'r: 'g,
{
    let of = |guest: &GuestKind| groups.clone().filter(|g| g.guest == guest).collect::<Vec<_>>();
    let mut most: Vec<&RowGroup<'_>> = Vec::new();
    for group in groups.clone() {
        let those = of(group.guest);
        if those.len() > most.len() {
            most = those;
        }
    }
    most.sort_by_key(|group| group.mem_bytes);
    most
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{row, way};

    #[test]
    fn leaders_are_all_that_are_not_clearly_behind() {
        let epochs = |name: &str, us: [f64; 3]| row(way(name), 1 << 30, us);
        let rows = [
            epochs("dirty-ring+tree", [10.0, 11.0, 12.0]),
            epochs("dirty-ring+flat", [9.0, 10.5, 13.0]),
            epochs("dirty-bitmap+flat", [50.0; 3]),
        ];
        let group = |rows| groups(rows).remove(0).leaders(EPOCH);
        assert_eq!(group(&rows[..]), [way("dirty-ring+flat"), way("dirty-ring+tree")]);
        assert_eq!(group(&rows[..2]), [], "no way is clearly behind");
        assert_eq!(group(&rows[2..]), [], "there is nothing to be ahead of");
    }

    #[test]
    fn series_is_the_guest_with_most_sizes() {
        let mut rows = [8, 4, 1, 2].map(|gib| row(way("dirty-ring"), gib << 30, [1.0; 3]));
        for row in &mut rows[..1] {
            row.guest = GuestKind::Payload("payload,ws=3M".to_owned());
        }
        let groups = groups(&rows);
        let sizes: Vec<u64> = series(groups.iter()).iter().map(|g| g.mem_bytes >> 30).collect();
        assert_eq!(sizes, [1, 2, 4]);
        assert!(series([].iter()).is_empty());
    }
}
