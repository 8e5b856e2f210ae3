//! The figures by which pre-copy ends and vCPUs are throttled, in one place.
//!
//! "Chosen" means: a round figure, without a measurement that prefers it to its neighbours.

use std::time::Duration;

/// The figures of [`convergence`](super::convergence) and [`throttle`](super::throttle), which
/// depend on each other.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PrecopyFigures {
    /// Least bytes of a pass that is a measurement of the link's rate. 1 MiB, chosen: the time of
    /// a smaller pass is mostly that of its acknowledgement.
    pub(crate) min_measured_bytes: u64,
    /// Expected pause below which no further pass is sent. 2 ms, because pausing and resuming a
    /// guest takes about as long by itself: the median downtimes in
    /// `docs/src/performance/migration.md` are 0.8 to 2.3 ms.
    pub(crate) short_pause: Duration,
    /// Upper bound on the ratio of dirty frames to the pass's frames at which another pass shortens
    /// the pause. It counts frames, because zero frames and compressed frames have few bytes in any
    /// pass. 0.7: the passes that only make the pause shorter take, in total, at most
    /// `1 / (1 - 0.7)`, 3.3 times as long as the pause without them.
    pub(crate) shrink_ratio: f64,
    /// First share of the link's rate that vCPUs may fill. 0.6, so far below
    /// [`shrink_ratio`](Self::shrink_ratio) that the throttle need not be exact: a guest that
    /// exceeds its share by a tenth still converges.
    pub(crate) first_share: f64,
    /// Factor of the share after a pass that did not shrink under the throttle. 0.5, chosen.
    pub(crate) tighten_factor: f64,
    /// Least share, after tightening three times: 0.075. A guest that outruns the link even so
    /// writes in a way that the throttle does not slow down.
    pub(crate) least_share: f64,
    /// Share during the approach. A smaller share makes the pause shorter and the guest slower
    /// before it. With 0.6 each pass has 0.6 times the frames of the previous one; with 0.15 the
    /// second pass takes some milliseconds. 0.15, chosen. The guest of
    /// `docs/src/performance/migration.md` that writes one word a page of 256 MiB has such an
    /// approach.
    pub(crate) approach_share: f64,
    /// Expected pause above which the approach begins. 5 ms, chosen, and longer than
    /// [`short_pause`](Self::short_pause): else the approach would gain nothing.
    pub(crate) long_pause: Duration,
}

/// The figures in use.
pub(crate) const FIGURES: PrecopyFigures = PrecopyFigures {
    min_measured_bytes: 1 << 20,
    short_pause: Duration::from_millis(2),
    shrink_ratio: 0.7,
    first_share: 0.6,
    tighten_factor: 0.5,
    least_share: 0.6 / 8.0,
    approach_share: 0.6 / 4.0,
    long_pause: Duration::from_millis(5),
};

// Relations that the figures assume.
const _: () = {
    let PrecopyFigures { shrink_ratio, first_share, least_share, approach_share, .. } = FIGURES;
    assert!(first_share < shrink_ratio && shrink_ratio < 1.0);
    assert!(least_share < approach_share && approach_share < first_share);
    assert!(FIGURES.short_pause.as_nanos() < FIGURES.long_pause.as_nanos());
};
