//! The staging area's copies of the frames of an epoch that does not write-protect them. Most
//! copies are made before the pause, while the guest runs. A frame that the guest writes meanwhile
//! is dirty again in the pause, and is copied over its outdated copy.
//!
//! ```text
//! staging area   [ changed before the pause, in ascending runs ][ changed since, and not before ]
//!                    ^ a frame that changed again is copied to its place
//! ```
//!
//! So the length of the pause depends on what the guest writes during the copy before it. If the
//! guest writes mostly the same frames again, the early copy saves nothing.

use driftline_dirty_tracker::{DirtySet, FrameRun, Gfn};
use driftline_guest::GuestRam;

use crate::epoch_output::EpochOutput;
use crate::guest::Checkpointable;
use crate::report::EpochFailure;
use crate::staging::{Staging, batches};

/// The frames of an epoch that are in the staging area.
#[derive(Debug, Default)]
pub(crate) struct StagedFrames {
    /// Runs copied before the pause, ascending, each with the number of frames before it.
    early: Vec<(FrameRun, u64)>,
    pub(crate) early_frames: u64,
    /// Runs copied in the pause, stored after the early ones.
    late: Vec<FrameRun>,
    late_frames: u64,
    /// Early frames that were copied once more in the pause.
    pub(crate) again: u64,
    /// Early frames that went into the file in the pause, because the area had no room.
    written: u64,
}

impl StagedFrames {
    /// For tests of policies that depend on it: the number of frames of each kind.
    #[cfg(test)]
    pub(crate) fn of(early_frames: u64, late_frames: u64, again: u64) -> Self {
        Self { early_frames, late_frames, again, ..Self::default() }
    }

    /// Copies `early` while the guest runs; it must fit.
    pub(crate) fn before_pause(
        guest: &dyn Checkpointable,
        staging: &mut Staging,
        early: &DirtySet,
    ) -> Result<Self, EpochFailure> {
        let mut copied = Self::default();
        for run in early.runs() {
            copied.early.push((run, copied.early_frames));
            copied.early_frames += run.count;
        }
        staging.copy_to(0, guest.ram(), early.runs())?;
        Ok(copied)
    }

    /// In the pause: copies what changed since, ascending. If there is no room, the earlier copies
    /// go into the file first.
    pub(crate) fn in_pause(
        &mut self,
        guest: &dyn Checkpointable,
        staging: &mut Staging,
        file: &mut dyn EpochOutput,
        changed: impl Iterator<Item = FrameRun>,
    ) -> Result<(), EpochFailure> {
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
            // Their place in the area is free, but they belong to the epoch.
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

    /// Copies the part of `run` that was copied before the pause to its place; adds the rest to
    /// `new`.
    fn renew(
        &mut self,
        run: FrameRun,
        ram: &GuestRam,
        staging: &mut Staging,
        new: &mut Vec<FrameRun>,
    ) -> Result<(), EpochFailure> {
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

    /// Returns what is left in the area: runs, and the position of the first one's copy, in frames.
    pub(crate) fn left(&self) -> [(Vec<FrameRun>, u64); 2] {
        let early: Vec<FrameRun> = self.early.iter().map(|(run, _)| *run).collect();
        let at = if self.early.is_empty() { 0 } else { self.early_frames };
        [(early, 0), (self.late.clone(), at)]
    }

    /// Returns the number of frames for which the buffer should have had room.
    pub(crate) fn staged(&self) -> u64 {
        self.early_frames + self.late_frames
    }

    /// Returns the number of frames copied in the pause.
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
    use driftline_guest::{Clock, DirtyLog, GuestContents, Stateful, VmId};
    use driftline_store::testing::MemoryDisk;
    use driftline_store::{Committer, EpochWriter, Store};
    use vm_memory::{Bytes, GuestAddress};

    fn byte_of(guest: &MemoryGuest, gfn: u64) -> u8 {
        guest.ram().read_obj(GuestAddress(gfn * PAGE_SIZE)).unwrap()
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]
        /// Also with little room: each changed frame is in the epoch with its content in the pause.
        #[test]
        fn epoch_has_changed_frames_as_of_the_pause(
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
            let mut copied = StagedFrames::before_pause(&*guest, &mut staging, &before).unwrap();
            late.iter().for_each(|gfn| guest.write(Gfn(*gfn), &[2]).unwrap());
            guest.collect().unwrap();
            let since = subscription.drain();
            copied.in_pause(&*guest, &mut staging, &mut file, since.runs()).unwrap();
            let was: Vec<u8> = (0..300).map(|gfn| byte_of(&guest, gfn)).collect();
            // The guest resumes.
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
}
