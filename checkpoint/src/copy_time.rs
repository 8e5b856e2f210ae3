//! Decides when the frames of an epoch are copied: before the pause, in it, or in the background
//! after it.

use crate::copy_policy::CopyPolicy;
use crate::precopy_buffer::StagedFrames;

/// When the frames of an epoch are copied.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum CopyTime {
    /// After the guest has resumed.
    Background,
    /// Before the pause, while the guest runs; frames that are written again are copied in the
    /// pause.
    BeforePause,
    /// All of them in the pause.
    InPause,
}

/// Findings of previous epochs that matter for the next.
#[derive(Debug, Default)]
pub(crate) struct CopyTimes {
    /// Remaining epochs that skip the copy before the pause.
    rest: u32,
    /// Frames that the last copy before a pause left for the pause, and frames it had copied.
    left: Option<(u64, u64)>,
}

impl CopyTimes {
    /// Returns when to copy an epoch of `frames` frames, with `room` frames in the staging area.
    /// `protectable` says whether the guest can be write-protected.
    pub(crate) fn of_next(
        &mut self,
        policy: &CopyPolicy,
        frames: u64,
        room: u64,
        protectable: bool,
    ) -> CopyTime {
        let may = frames >= policy.before_pause_from && frames <= room / 2;
        let before = may && self.rest == 0;
        if may {
            self.rest = self.rest.saturating_sub(1);
        }
        // Assumes that the same share of a larger epoch is left.
        let few_left =
            |(left, of): (u64, u64)| left.saturating_mul(frames) / of.max(1) <= policy.few_left;
        let from = match before && self.left.is_some_and(few_left) {
            true => policy.background_from_if_few_left,
            false => policy.background_from,
        };
        if protectable && room > 1 && frames >= from.max(1) {
            CopyTime::Background
        } else if before {
            CopyTime::BeforePause
        } else {
            CopyTime::InPause
        }
    }

    /// Records the result of a copy before the pause.
    pub(crate) fn note(&mut self, policy: &CopyPolicy, copied: &StagedFrames) {
        self.left = Some((copied.copied_in_pause(), copied.early_frames));
        if copied.again > copied.early_frames / 2 {
            self.rest = policy.rest_after_rewrites;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::CopyTime::{Background, BeforePause, InPause};
    use super::*;

    const POLICY: CopyPolicy = CopyPolicy::DEFAULT;

    #[test]
    fn rewritten_frames_are_copied_in_the_pause() {
        let mut times = CopyTimes::default();
        assert_eq!(times.of_next(&POLICY, POLICY.before_pause_from - 1, 1 << 20, true), InPause);
        assert_eq!(times.of_next(&POLICY, 1000, 1999, true), InPause);
        assert_eq!(times.of_next(&POLICY, 1000, 2000, true), BeforePause);
        times.note(&POLICY, &StagedFrames::of(1000, 0, 500));
        assert_eq!(times.of_next(&POLICY, 1000, 2000, true), BeforePause);
        // For epochs with few and many frames, with and without write protection.
        for (frames, protectable, meanwhile, then) in [
            (1000, true, InPause, BeforePause),
            (2000, false, InPause, BeforePause),
            // The share left by the small epoch says that these would leave many.
            (2000, true, Background, Background),
        ] {
            times.note(&POLICY, &StagedFrames::of(1000, 0, 501));
            for _ in 0..POLICY.rest_after_rewrites {
                assert_eq!(times.of_next(&POLICY, frames, 1 << 20, protectable), meanwhile);
            }
            assert_eq!(times.of_next(&POLICY, frames, 1 << 20, protectable), then);
        }
    }

    #[test]
    fn many_frames_are_copied_early_if_few_remain() {
        let (from, most) = (POLICY.background_from, POLICY.background_from_if_few_left - 1);
        let (mut times, room) = (CopyTimes::default(), 1 << 20);
        assert_eq!(times.of_next(&POLICY, from, room, true), Background, "nothing is known");
        let left = |early_frames, late_frames| StagedFrames::of(early_frames, late_frames, 0);
        times.note(&POLICY, &left(1000, 80));
        assert_eq!(times.of_next(&POLICY, from, room, true), BeforePause);
        assert_eq!(times.of_next(&POLICY, most, room, true), BeforePause);
        assert_eq!(times.of_next(&POLICY, most + 1, room, true), Background);
        assert_eq!(times.of_next(&POLICY, from, 2 * from - 1, true), Background, "no room");
        // A small epoch that left a fifth of its frames says that a large one leaves many.
        times.note(&POLICY, &left(100, 20));
        assert_eq!(times.of_next(&POLICY, most, room, true), Background);
        assert_eq!(times.of_next(&POLICY, from, room, true), BeforePause);
        times.note(&POLICY, &left(most, 2 * POLICY.few_left));
        assert_eq!(times.of_next(&POLICY, from - 1, room, true), BeforePause);
        (0..100).for_each(|_| assert_eq!(times.of_next(&POLICY, most, room, true), Background));
        let at = |from, frames| {
            CopyTimes::default().of_next(&CopyPolicy::background_from(from), frames, room, true)
        };
        assert_eq!(at(64, 64), Background, "as it was asked for");
        assert_eq!(at(u64::MAX, 1 << 18), BeforePause);
        assert_eq!(at(0, 0), InPause, "nothing to protect");
    }
}
