//! Decides when the frames of an epoch are copied: before the pause, in it, or in the background
//! after it; and whether the background copy is available.

use std::fmt;

use driftline_guest::{GuestContents, Shield};

use crate::precopy_buffer::Copied;
use crate::report::{Cause, Phase};

/// Epochs with at least this many changed frames are write-protected and copied after the guest has
/// resumed. This many frames take about 1 ms to copy. A threshold of 256 makes a single pause
/// shorter (`tests/bench/pause.rs`). At a hundred epochs a second of 1,000 frames, however, it
/// costs writes in a guest that keeps all processors busy, and late threads make its pauses longer
/// (`tests/bench/cadence.rs`).
pub(crate) const BEHIND_FROM: u64 = 1280;
/// The same threshold if, by the previous epoch's measure, a copy before the pause leaves at most
/// `FEW` frames for the pause. Such a copy takes some milliseconds. An epoch that comes late has
/// more frames than its share, and must not cost the guest more than the others for that.
const BEHIND_FROM_IF_FEW_LEFT: u64 = 5120;
/// Frames left for the pause that count as few: about a third of a millisecond.
const FEW: u64 = 512;
/// Smaller epochs take no measurable time in a pause.
const LEAST: u64 = 64;
/// Number of epochs that skip the copy before the pause after an epoch in which most frames were
/// written again.
const REST: u32 = 16;

/// When the frames of an epoch are copied.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Way {
    /// In the background, after the guest has resumed.
    Behind,
    /// Before the pause, while the guest runs; frames that are written again are copied in the
    /// pause.
    Before,
    /// All of them in the pause.
    InPause,
}

/// State of that decision.
#[derive(Debug)]
pub(crate) struct Ways {
    /// Number of frames from which they are copied in the background, if the guest can be
    /// write-protected.
    behind_from: u64,
    /// The same, if a copy before the pause would leave few frames for the pause.
    behind_from_if_few_left: u64,
    /// Remaining epochs that skip the copy before the pause.
    rest: u32,
    /// Frames that the last copy before a pause left for the pause, and frames it had copied.
    left: Option<(u64, u64)>,
}

impl Default for Ways {
    fn default() -> Self {
        Self { behind_from_if_few_left: BEHIND_FROM_IF_FEW_LEFT, ..Self::new(BEHIND_FROM) }
    }
}

impl Ways {
    /// A policy that copies in the background from `behind_from` frames on.
    pub(crate) fn new(behind_from: u64) -> Self {
        Self { behind_from, behind_from_if_few_left: behind_from, rest: 0, left: None }
    }

    /// Returns the number of frames below which write protection is not worth its cost.
    pub(crate) fn behind_from(&self) -> u64 {
        self.behind_from
    }

    /// Returns when to copy an epoch of `frames` frames, with `room` frames in the staging area.
    /// `shielded` says whether the guest can be write-protected.
    pub(crate) fn of_next(&mut self, frames: u64, room: u64, shielded: bool) -> Way {
        let may = frames >= LEAST && frames <= room / 2;
        let before = may && self.rest == 0;
        if may {
            self.rest = self.rest.saturating_sub(1);
        }
        // Assumes that the same share of a larger epoch is left.
        let few_left = |(left, of): (u64, u64)| left.saturating_mul(frames) / of.max(1) <= FEW;
        let from = match before && self.left.is_some_and(few_left) {
            true => self.behind_from_if_few_left,
            false => self.behind_from,
        };
        if shielded && room > 1 && frames >= from.max(1) {
            Way::Behind
        } else if before {
            Way::Before
        } else {
            Way::InPause
        }
    }

    /// Records the result of a copy before the pause.
    pub(crate) fn note(&mut self, copied: &Copied) {
        self.left = Some((copied.copied_in_pause(), copied.early_frames));
        if copied.again > copied.early_frames / 2 {
            self.rest = REST;
        }
    }
}

/// Number of epochs copied in the pause after write protection has failed, and after the store has
/// made the guest wait for too long. Then it is tried again.
const AFTER_FAILURE: u32 = 100;
const AFTER_STALL: u32 = 20;

/// Whether frames can be copied in the background.
#[derive(Default)]
pub(crate) struct Shielding {
    is: Shielded,
    /// Number of epochs for which write protection is neither used nor requested.
    rests: u32,
}

#[derive(Default)]
enum Shielded {
    #[default]
    NotAsked,
    /// The host or the guest does not offer it.
    No,
    Yes(Box<dyn Shield>),
}

impl Shielding {
    /// Returns whether the next epoch uses write protection.
    pub(crate) fn is_used(&self) -> bool {
        self.rests == 0 && matches!(self.is, Shielded::Yes(_))
    }

    /// Returns the shield for an epoch. Asks the guest the first time, and again some epochs after
    /// a failure.
    pub(crate) fn ask(&mut self, guest: &dyn GuestContents) -> Option<&dyn Shield> {
        if self.rests > 0 {
            self.rests -= 1;
            return None;
        }
        if let Shielded::NotAsked = self.is {
            match guest.shield() {
                Ok(Some(shield)) => self.is = Shielded::Yes(shield),
                Ok(None) => self.is = Shielded::No,
                Err(e) => self.rest(AFTER_FAILURE, &e),
            }
        }
        match &self.is {
            Shielded::Yes(shield) => Some(&**shield),
            Shielded::NotAsked | Shielded::No => None,
        }
    }

    /// Records that an epoch failed for `cause`.
    pub(crate) fn failed(&mut self, phase: Phase, cause: &Cause) {
        match (phase, cause) {
            // Failures of drives do not concern it.
            (Phase::CopyDrives, _) => {}
            (Phase::Protect | Phase::CopyBehind, Cause::Guest(_)) => {
                self.is = Shielded::NotAsked;
                self.rest(AFTER_FAILURE, cause);
            }
            (_, Cause::Stalled(_)) => self.rest(AFTER_STALL, cause),
            _ => {}
        }
    }

    fn rest(&mut self, epochs: u32, why: &dyn fmt::Display) {
        tracing::warn!("changed pages are copied in the pause for {epochs} checkpoints: {why}");
        self.rests = epochs;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_writes_the_same_again_is_copied_in_the_pause_for_a_while() {
        let mut ways = Ways::default();
        assert_eq!(ways.of_next(LEAST - 1, 1 << 20, true), Way::InPause);
        assert_eq!(ways.of_next(1000, 1999, true), Way::InPause);
        assert_eq!(ways.of_next(1000, 2000, true), Way::Before);
        ways.note(&Copied::of(1000, 0, 500));
        assert_eq!(ways.of_next(1000, 2000, true), Way::Before);
        // For epochs with few and many frames, with and without a shield.
        for (frames, shielded, meanwhile, then) in [
            (1000, true, Way::InPause, Way::Before),
            (2000, false, Way::InPause, Way::Before),
            // The share left by the small epoch says that these would leave many.
            (2000, true, Way::Behind, Way::Behind),
        ] {
            ways.note(&Copied::of(1000, 0, 501));
            for _ in 0..REST {
                assert_eq!(ways.of_next(frames, 1 << 20, shielded), meanwhile);
            }
            assert_eq!(ways.of_next(frames, 1 << 20, shielded), then);
        }
    }

    #[test]
    fn many_are_copied_before_the_pause_only_while_that_leaves_few_for_it() {
        let (mut ways, room, most) = (Ways::default(), 1 << 20, BEHIND_FROM_IF_FEW_LEFT - 1);
        assert_eq!(ways.of_next(BEHIND_FROM, room, true), Way::Behind, "nothing is known");
        let left = |early_frames, late_frames| Copied::of(early_frames, late_frames, 0);
        ways.note(&left(1000, 80));
        assert_eq!(ways.of_next(BEHIND_FROM, room, true), Way::Before);
        assert_eq!(ways.of_next(most, room, true), Way::Before);
        assert_eq!(ways.of_next(most + 1, room, true), Way::Behind);
        assert_eq!(ways.of_next(BEHIND_FROM, 2 * BEHIND_FROM - 1, true), Way::Behind, "no room");
        // A small epoch that left a fifth of its frames says that a large one leaves many.
        ways.note(&left(100, 20));
        assert_eq!(ways.of_next(most, room, true), Way::Behind);
        assert_eq!(ways.of_next(BEHIND_FROM, room, true), Way::Before);
        ways.note(&left(most, 2 * FEW));
        assert_eq!(ways.of_next(BEHIND_FROM - 1, room, true), Way::Before);
        (0..100).for_each(|_| assert_eq!(ways.of_next(most, room, true), Way::Behind));
        let mut asked = Ways::new(64);
        assert_eq!(asked.of_next(64, room, true), Way::Behind, "as it was asked for");
        assert_eq!(Ways::new(u64::MAX).of_next(1 << 18, room, true), Way::Before);
        assert_eq!(Ways::new(0).of_next(0, room, true), Way::InPause, "nothing to protect");
    }
}
