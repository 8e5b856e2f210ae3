//! The figures that decide how an epoch is copied, in one place.
//!
//! "Measured" means: on a host with two cores, nested KVM and an NVMe disk, by the bench named with
//! it. "Chosen" means: a round figure whose neighbours make no difference that a bench shows.

use std::time::Duration;

/// How the frames and blocks of an epoch are copied. The figures of the default are tuned together.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct CopyPolicy {
    /// Frames: an epoch with at least this many changed frames is write-protected and copied after
    /// the guest has resumed. 1,280, about 1 ms of copying. Measured: 256 makes a single pause
    /// shorter (`tests/bench/pause.rs`); at a hundred epochs a second of 1,000 frames it costs
    /// writes in a guest that keeps all processors busy, and threads that get a processor late make
    /// its pauses longer (`tests/bench/cadence.rs`).
    pub(crate) background_from: u64,
    /// Frames: the same threshold if, by the previous epoch's measure, a copy before the pause
    /// leaves at most [`few_left`](Self::few_left) frames for the pause. 5,120, some milliseconds
    /// of copying. A late epoch has more frames than the others, and must not cost the guest more
    /// because of that.
    pub(crate) background_from_if_few_left: u64,
    /// Frames left for the pause that count as few: 512, a third of a millisecond of copying.
    pub(crate) few_left: u64,
    /// Frames: a smaller epoch is copied in the pause. 64 take no measurable time there.
    pub(crate) before_pause_from: u64,
    /// Epochs that skip the copy before the pause after an epoch in which most frames were written
    /// again. 16, chosen.
    pub(crate) rest_after_rewrites: u32,
    /// Epochs that are copied in the pause after write protection has failed. 100, chosen: the
    /// cause seldom goes away by itself, and asking again costs a few pauses.
    pub(crate) rest_after_failure: u32,
    /// Epochs that are copied in the pause after the store has made the guest wait for too long.
    /// 20, chosen: a busy disk recovers.
    pub(crate) rest_after_stall: u32,

    /// Frames copied and unprotected at a time. 64, chosen: smaller pieces cost more system calls,
    /// larger ones delay a writer for longer.
    pub(crate) piece_frames: u64,
    /// Frames: runs with at most this many frames between them are protected as one. 16, chosen:
    /// saves system calls, and protects some frames without need.
    pub(crate) span_gap: u64,
    /// Frames that changed while others were being protected: copied in the pause if there are at
    /// most this many, protected too otherwise. 512, a third of a millisecond of copying.
    pub(crate) late_frames: u64,
    /// Frames that changed while others were being protected: protected before the pause if there
    /// are more than this many, or more than [`background_from`](Self::background_from) if that is
    /// lower. 256, half of `late_frames`: mostly fewer change in each round, so each round takes
    /// less long.
    pub(crate) protect_again_from: u64,
    /// Extra rounds of protection before the pause. 2, chosen: after that the guest writes faster
    /// than frames are protected.
    pub(crate) protect_again_rounds: u32,
    /// Interval at which the copy thread checks whether the pause has come. 0.5 ms, the length of a
    /// short pause.
    pub(crate) pause_poll: Duration,
    /// Interval at which the copy thread checks for waiting writers while there is no room for a
    /// copy. 1 ms, chosen.
    pub(crate) room_poll: Duration,
    /// Frames written to the file between two looks at blocks that copy-before-write has saved:
    /// 1,024, as many as it can save ([`SAVED_BLOCKS_MAX`](driftline_guest::SAVED_BLOCKS_MAX)).
    pub(crate) frames_per_look: u64,

    /// Frames of a running guest copied at a time by a full epoch. 256, 1 MiB, chosen. A pass that
    /// is no larger ends the passes.
    pub(crate) live_frames: u64,
    /// Passes over changed memory before a full epoch pauses the guest. 4, chosen.
    pub(crate) live_passes: usize,
    /// Per cent: passes over changed memory or blocks continue while each has at most this share of
    /// the one before. 75, chosen.
    pub(crate) live_shrink_percent: u64,

    /// Blocks of a drive copied at a time while the guest runs, without copy-before-write. 256,
    /// 1 MiB, chosen. A longer run is searched for holes first.
    pub(crate) live_blocks: u64,
    /// Blocks of a drive copied at a time under copy-before-write. 64, chosen, as
    /// [`piece_frames`](Self::piece_frames).
    pub(crate) piece_blocks: u64,
    /// Passes over a drive's changed blocks before a pause. 4, chosen.
    pub(crate) drive_passes: usize,
    /// Bytes of memory that hold blocks copied in a pause until they are written to the file. 64
    /// MiB, as the staging area has at first. What is beyond is written in the pause.
    pub(crate) pause_blocks_bytes: usize,

    /// Frames: a pause that copied fewer says little about the cost of a frame. 64, as
    /// [`before_pause_from`](Self::before_pause_from).
    pub(crate) telling_frames: u64,
    /// Upper bound on the ratio of changed frames to frames copied in the pause that an estimate
    /// assumes. 16, chosen: the next pause may copy a larger share of the frames.
    pub(crate) most_changed_per_copied: u64,
    /// Per cent of the frames that fit into a pause or the staging area at which an epoch begins
    /// early. 75, chosen: more frames change until the pause.
    pub(crate) early_percent: u64,
}

impl Default for CopyPolicy {
    fn default() -> Self {
        Self::DEFAULT
    }
}

impl CopyPolicy {
    /// The default, as a constant.
    pub(crate) const DEFAULT: Self = Self {
        background_from: 1280,
        background_from_if_few_left: 5120,
        few_left: 512,
        before_pause_from: 64,
        rest_after_rewrites: 16,
        rest_after_failure: 100,
        rest_after_stall: 20,
        piece_frames: 64,
        span_gap: 16,
        late_frames: 512,
        protect_again_from: 256,
        protect_again_rounds: 2,
        pause_poll: Duration::from_micros(500),
        room_poll: Duration::from_millis(1),
        frames_per_look: 1024,
        live_frames: 256,
        live_passes: 4,
        live_shrink_percent: 75,
        live_blocks: 256,
        piece_blocks: 64,
        drive_passes: 4,
        pause_blocks_bytes: 64 << 20,
        telling_frames: 64,
        most_changed_per_copied: 16,
        early_percent: 75,
    };

    /// Returns the default with another number of frames from which an epoch is copied in the
    /// background, whatever a copy before the pause would leave.
    #[cfg(feature = "testing")]
    pub(crate) fn background_from(frames: u64) -> Self {
        let (background_from, background_from_if_few_left) = (frames, frames);
        Self { background_from, background_from_if_few_left, ..Self::DEFAULT }
    }

    /// Returns whether a pass over `now` frames or blocks is enough smaller than the one over
    /// `before` for another pass to be worth it.
    pub(crate) fn shrinks(&self, now: u64, before: u64) -> bool {
        now <= share(before, self.live_shrink_percent)
    }

    /// Returns the number of changed frames at which an epoch begins early, if `most` fit.
    pub(crate) fn early_at(&self, most: u64) -> u64 {
        share(most, self.early_percent).max(1)
    }
}

/// Returns this many per cent of `all`.
fn share(all: u64, percent: u64) -> u64 {
    all / 100 * percent + all % 100 * percent / 100
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares_of_any_size_are_rounded_down() {
        let policy = CopyPolicy::DEFAULT;
        assert!(policy.shrinks(3, 4) && !policy.shrinks(4, 5) && policy.shrinks(0, 0));
        assert!(policy.shrinks(u64::MAX / 4 * 3, u64::MAX) && !policy.shrinks(u64::MAX, u64::MAX));
        assert_eq!([0, 1, 4, 1000].map(|most| policy.early_at(most)), [1, 1, 3, 750]);
    }

    /// Relations that the figures assume.
    #[test]
    fn figures_fit_together() {
        let policy = CopyPolicy::DEFAULT;
        assert!(policy.background_from <= policy.background_from_if_few_left);
        assert!(policy.protect_again_from <= policy.late_frames);
        assert!(policy.few_left <= policy.background_from);
        assert!(policy.frames_per_look <= driftline_guest::SAVED_BLOCKS_MAX as u64);
        assert!(policy.live_shrink_percent < 100 && policy.early_percent < 100);
    }
}
