//! Copies in the staging area of an epoch whose frames are not shielded. Most are taken before the
//! pause, while the guest runs on: what it writes meanwhile has changed once more, is known in the
//! pause, and is copied there over what is no longer true.
//!
//! ```text
//! staging area   [ changed before the pause, in ascending runs ][ changed since, and not before ]
//!                    ^ what changed again is copied to its place
//! ```
//!
//! So the pause costs what the guest writes while the rest is copied. Where that is mostly the same
//! again, nothing is won.

use driftline_dirty_tracker::{Epoch, FrameRun, Gfn};
use driftline_guest::{Guest, GuestRam};
use driftline_store::EpochWriter;

use crate::live::batches;
use crate::report::Cause;
use crate::staging::Staging;

/// Of so many changed frames on they are copied behind the guest's back: those that take about a
/// millisecond to copy. From 256 on that makes a single pause shorter (`tests/bench/pause.rs`), but
/// at a hundred epochs a second of 1,000 frames it takes a guest that keeps all processors busy
/// more writes, and late threads make its pauses longer (`tests/bench/cadence.rs`).
pub(crate) const BEHIND_FROM: u64 = 1280;
/// So it is of those that take some milliseconds to copy before the pause, where by what the last
/// epoch left for it that leaves little: an epoch that comes late has more than its share, and is
/// not to cost the guest more than the others for that.
const BEHIND_FROM_IF_FEW_LEFT: u64 = 5120;
/// So many left for the pause are few: a third of a millisecond's.
const FEW: u64 = 512;
/// Fewer take no time in a pause.
const LEAST: u64 = 64;
/// After an epoch most of which was written again, so many that could be copied before their pauses
/// are not.
const REST: u32 = 16;

/// When the frames of an epoch are copied.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Way {
    /// Behind the guest's back.
    Behind,
    /// Before the pause, while the guest runs, and what is written again in it.
    Before,
    /// In the pause, all of them.
    InPause,
}

/// What decides about that.
#[derive(Debug)]
pub(crate) struct Ways {
    /// Of so many on they are copied behind the guest's back, where it can be shielded.
    behind_from: u64,
    /// The same where copying before the pause would leave few for it.
    behind_from_if_few_left: u64,
    /// Epochs that are not copied before their pauses.
    rest: u32,
    /// Frames that the last one copied before its pause left for it, and those that it had copied.
    left: Option<(u64, u64)>,
}

impl Default for Ways {
    fn default() -> Self {
        Self { behind_from_if_few_left: BEHIND_FROM_IF_FEW_LEFT, ..Self::new(BEHIND_FROM) }
    }
}

impl Ways {
    /// Of `behind_from` frames on behind the guest's back.
    pub(crate) fn new(behind_from: u64) -> Self {
        Self { behind_from, behind_from_if_few_left: behind_from, rest: 0, left: None }
    }

    /// Fewer frames are not worth being protected.
    pub(crate) fn behind_from(&self) -> u64 {
        self.behind_from
    }

    /// The way for an epoch of so many frames of a guest that is `shielded` or not, where there is
    /// room for so many.
    pub(crate) fn of_next(&mut self, frames: u64, room: u64, shielded: bool) -> Way {
        let may = frames >= LEAST && frames <= room / 2;
        let before = may && self.rest == 0;
        if may {
            self.rest = self.rest.saturating_sub(1);
        }
        // Of one that has more, as large a part will be left.
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

    /// What came of copying before the pause.
    pub(crate) fn note(&mut self, copied: &Copied) {
        self.left = Some((copied.copied_in_pause(), copied.early_frames));
        if copied.again > copied.early_frames / 2 {
            self.rest = REST;
        }
    }
}

/// What of an epoch is in the staging area.
#[derive(Debug, Default)]
pub(crate) struct Copied {
    /// Copied before the pause, ascending, each with the number of frames before it.
    early: Vec<(FrameRun, u64)>,
    early_frames: u64,
    /// Copied in the pause behind those.
    late: Vec<FrameRun>,
    late_frames: u64,
    /// Of the early ones, copied once more in the pause.
    again: u64,
    /// Of the late ones, those that had no room and are in the file.
    written: u64,
}

impl Copied {
    /// Copies `early` while the guest runs; it must fit.
    pub(crate) fn before_pause(
        guest: &dyn Guest,
        staging: &mut Staging,
        early: &Epoch,
    ) -> Result<Self, Cause> {
        let mut copied = Self::default();
        for run in early.runs() {
            copied.early.push((run, copied.early_frames));
            copied.early_frames += run.count;
        }
        staging.copy_to(0, guest.ram(), early.runs())?;
        Ok(copied)
    }

    /// In the pause: copies what changed since, ascending. Where there is no room, what was copied
    /// goes into the file first.
    pub(crate) fn in_pause(
        &mut self,
        guest: &dyn Guest,
        staging: &mut Staging,
        file: &mut EpochWriter,
        changed: impl Iterator<Item = FrameRun>,
    ) -> Result<(), Cause> {
        let ram = guest.ram();
        let mut new = Vec::new();
        for run in changed {
            self.renew(run, ram, staging, &mut new)?;
        }
        self.late_frames = frames(&new);
        if self.early_frames + self.late_frames > staging.frames() {
            let early = std::mem::take(&mut self.early);
            let runs = early.iter().map(|(run, _)| *run);
            file.frames(runs, staging.from(0, self.early_frames), false)?;
            // The area is free for them, but they were in the epoch.
            self.written = self.early_frames;
            let mut rest = batches(&new, staging.frames()).peekable();
            while let Some(batch) = rest.next() {
                staging.copy_to(0, ram, batch.iter().copied())?;
                if rest.peek().is_none() {
                    self.late = batch;
                    break;
                }
                file.frames(batch.iter().copied(), staging.from(0, frames(&batch)), false)?;
            }
            return Ok(());
        }
        staging.copy_to(self.early_frames, ram, new.iter().copied())?;
        self.late = new;
        Ok(())
    }

    /// Copies to its place what of `run` was copied before the pause; the rest goes to `new`.
    fn renew(
        &mut self,
        run: FrameRun,
        ram: &GuestRam,
        staging: &mut Staging,
        new: &mut Vec<FrameRun>,
    ) -> Result<(), Cause> {
        let mut at = run.start;
        let mut next = self.early.partition_point(|(early, _)| early.end() <= at);
        while at < run.end() {
            let until = |end: Gfn| FrameRun { start: at, count: end.min(run.end()).0 - at.0 };
            let part = match self.early.get(next) {
                Some((early, before)) if early.start <= at => {
                    let part = until(early.end());
                    staging.copy_to(before + (at.0 - early.start.0), ram, [part].into_iter())?;
                    self.again += part.count;
                    next += 1;
                    part
                }
                Some((early, _)) => {
                    new.push(until(early.start));
                    until(early.start)
                }
                None => {
                    new.push(until(run.end()));
                    until(run.end())
                }
            };
            at = part.end();
        }
        Ok(())
    }

    /// What is left in the area: runs, and where the copy of the first begins, in frames.
    pub(crate) fn left(&self) -> [(Vec<FrameRun>, u64); 2] {
        let early: Vec<FrameRun> = self.early.iter().map(|(run, _)| *run).collect();
        let at = if self.early.is_empty() { 0 } else { self.early_frames };
        [(early, 0), (self.late.clone(), at)]
    }

    /// Frames for which there should have been room at once.
    pub(crate) fn staged(&self) -> u64 {
        self.early_frames + self.late_frames
    }

    /// Frames that were copied in the pause.
    pub(crate) fn copied_in_pause(&self) -> u64 {
        self.again + self.late_frames + self.written
    }
}

fn frames(runs: &[FrameRun]) -> u64 {
    runs.iter().map(|run| run.count).sum()
}

#[cfg(all(test, feature = "testing"))]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::sync::Arc;

    use proptest::prelude::*;

    use super::*;
    use crate::restore;
    use crate::staging::StagingLimits;
    use driftline_dirty_tracker::PAGE_SIZE;
    use driftline_guest::testing::{MemoryConfig, MemoryGuest, MemoryGuestFactory};
    use driftline_guest::{Clock, VmId};
    use driftline_store::testing::MemoryDisk;
    use driftline_store::{Committer, Store};
    use vm_memory::{Bytes, GuestAddress};

    fn byte_of(guest: &MemoryGuest, gfn: u64) -> u8 {
        guest.ram().read_obj(GuestAddress(gfn * PAGE_SIZE)).unwrap()
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]
        /// Also where there is little room: each frame that changed is in the epoch as it was in
        /// the pause.
        #[test]
        fn what_is_in_the_epoch_is_what_changed_as_it_is_in_the_pause(
            early in prop::collection::btree_set(0u64..300, 0..120),
            late in prop::collection::btree_set(0u64..300, 0..120),
            more in 0u64..200,
        ) {
            let guest = MemoryGuest::new(VmId::random(), MemoryConfig::still()).unwrap();
            let disk = MemoryDisk::default();
            let store = Arc::new(Store::with_backend(Box::new(disk.clone()), true).unwrap());
            let mut committer = Committer::create(&store, &*guest).unwrap();
            let pages = committer.pages().clone();
            let mut file = EpochWriter::new(pages, 1, &*guest, None, Vec::new()).unwrap();
            let room = (early.len() as u64 + more).max(1) * PAGE_SIZE;
            let mut staging = Staging::new(StagingLimits { first_bytes: room, most_bytes: room });
            let mut subscription = guest.subscribe("test").unwrap();
            early.iter().for_each(|gfn| guest.write(Gfn(*gfn), &[1]).unwrap());
            guest.collect().unwrap();
            let before = subscription.drain();
            let mut copied = Copied::before_pause(&*guest, &mut staging, &before).unwrap();
            late.iter().for_each(|gfn| guest.write(Gfn(*gfn), &[2]).unwrap());
            guest.collect().unwrap();
            let since = subscription.drain();
            copied.in_pause(&*guest, &mut staging, &mut file, since.runs()).unwrap();
            let was: Vec<u8> = (0..300).map(|gfn| byte_of(&guest, gfn)).collect();
            // It goes on.
            (0..300).for_each(|gfn| guest.write(Gfn(gfn), &[3]).unwrap());
            for (runs, at) in copied.left() {
                let contents = staging.from(at, frames(&runs));
                file.frames(runs.into_iter(), contents, false).unwrap();
            }
            prop_assert_eq!(copied.again as usize, early.intersection(&late).count());
            prop_assert_eq!(copied.staged() as usize, early.union(&late).count());
            for section in guest.save_state().unwrap() {
                file.section(&section).unwrap();
            }
            committer.commit(file.finish()).unwrap();
            before.commit();
            since.commit();
            drop((committer, store));
            let store = Store::with_backend(Box::new(disk), false).unwrap();
            let factory = MemoryGuestFactory::default();
            let (restored, _) = restore(&store, None, &factory, Clock::Continue).unwrap();
            for gfn in early.union(&late) {
                prop_assert_eq!(byte_of(&restored, *gfn), was[*gfn as usize], "frame {}", gfn);
            }
        }
    }

    #[test]
    fn who_writes_the_same_again_is_copied_in_the_pause_for_a_while() {
        let mut ways = Ways::default();
        assert_eq!(ways.of_next(LEAST - 1, 1 << 20, true), Way::InPause);
        assert_eq!(ways.of_next(1000, 1999, true), Way::InPause);
        assert_eq!(ways.of_next(1000, 2000, true), Way::Before);
        ways.note(&Copied { early_frames: 1000, again: 500, ..Copied::default() });
        assert_eq!(ways.of_next(1000, 2000, true), Way::Before);
        // Of few and of many frames, shielded or not.
        for (frames, shielded, meanwhile, then) in [
            (1000, true, Way::InPause, Way::Before),
            (2000, false, Way::InPause, Way::Before),
            // What one left that had few says that these would leave many.
            (2000, true, Way::Behind, Way::Behind),
        ] {
            ways.note(&Copied { early_frames: 1000, again: 501, ..Copied::default() });
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
        let left =
            |early_frames, late_frames| Copied { early_frames, late_frames, ..Copied::default() };
        ways.note(&left(1000, 80));
        assert_eq!(ways.of_next(BEHIND_FROM, room, true), Way::Before);
        assert_eq!(ways.of_next(most, room, true), Way::Before);
        assert_eq!(ways.of_next(most + 1, room, true), Way::Behind);
        assert_eq!(ways.of_next(BEHIND_FROM, 2 * BEHIND_FROM - 1, true), Way::Behind, "no room");
        // One that had few, of which it left a fifth, says nothing good of one that has many.
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
