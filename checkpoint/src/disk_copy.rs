//! Copies the blocks of drives that change shortly before a pause into the epoch.
//!
//! In the pause, blocks changed since the last copy are drained and [protected by
//! copy-before-write](driftline_guest::CopyBeforeWrite). They are copied after the guest has
//! resumed. Blocks that were saved before an overwrite are copied between pieces of memory, the
//! others after memory. After a write has waited for too long, blocks for which there may be no
//! room are copied in the pause, for the next epochs.

use std::fs::File;

use driftline_dirty_tracker::{DirtySet, FrameRun, PAGE_SIZE};
use driftline_guest::{
    CopyBeforeWriteError, FrozenBlocks, SAVED_BLOCKS_MAX, WRITE_WAIT_LIMIT, WriteWaits, read_blocks,
};
use driftline_store::{StoreError, of_object};

use crate::copy_policy::CopyPolicy;
use crate::epoch_drives::{EpochDrives, TrackedEpochDrive, unread, without_holes};
use crate::epoch_output::EpochOutput;
use crate::report::EpochFailure;
use crate::staging::{Staging, window};

/// The changed blocks of an epoch's drives, from the pause until they are in the file.
pub(crate) struct DiskCopy<'d> {
    drives: &'d mut EpochDrives,
    policy: &'d CopyPolicy,
    /// Whether writes to a drive may wait for room. If not, blocks that may find no room are copied
    /// in the pause.
    writes_may_wait: bool,
    changed: Vec<ChangedBlocks>,
    /// Holds saved blocks on their way to the file.
    buffer: Vec<u8>,
}

/// The changed blocks of a drive, under copy-before-write since a pause. Drop ends that and gives
/// the blocks back (I4).
struct ChangedBlocks {
    object: u16,
    id: String,
    changed: DirtySet,
    frozen: FrozenBlocks,
    /// Its blocks that are in the epoch, and how many of them were copied in the pause.
    copied: u64,
    in_pause: u64,
    /// Blocks copied in the pause that are not in the file yet.
    early: Vec<FrameRun>,
    contents: Vec<u8>,
}

fn not_copied(id: &str) -> impl Fn(CopyBeforeWriteError) -> EpochFailure {
    move |cause| match cause {
        CopyBeforeWriteError::Stalled => EpochFailure::Stalled(WRITE_WAIT_LIMIT),
        CopyBeforeWriteError::Unreadable(cause) => unread(id)(cause),
        cause => EpochFailure::NotCopied { id: id.to_owned(), cause },
    }
}

impl<'d> DiskCopy<'d> {
    pub(crate) fn new(
        drives: &'d mut EpochDrives,
        policy: &'d CopyPolicy,
        writes_may_wait: bool,
    ) -> Self {
        Self { drives, policy, writes_may_wait, changed: Vec::new(), buffer: Vec::new() }
    }

    /// Puts the blocks that changed since the last copy under copy-before-write. The guest is
    /// paused, so every write is marked. Unless writes may wait, this covers only as many blocks as
    /// have room whatever the guest overwrites, and copies the rest here.
    pub(crate) fn begin(&mut self, to: &mut dyn EpochOutput) -> Result<(), EpochFailure> {
        let mut room = self.policy.pause_blocks_bytes;
        for TrackedEpochDrive { object, head, file, copy_before_write, writes } in
            &mut self.drives.0
        {
            let changed = writes.drain();
            let many = changed.frames().saturating_sub(copy_before_write.capacity());
            let now = if self.writes_may_wait { 0 } else { many };
            let kept = window(changed.runs(), now, u64::MAX).collect();
            // This comes first: a drive that was released must not be read.
            let frozen = copy_before_write
                .freeze(file.clone(), head.bytes, kept)
                .map_err(not_copied(&head.id))?;
            let (object, id, early, contents) = (*object, head.id.clone(), Vec::new(), Vec::new());
            let mut blocks = ChangedBlocks {
                object,
                id,
                changed,
                frozen,
                copied: 0,
                in_pause: now,
                early,
                contents,
            };
            if now > 0 {
                tracing::debug!(blocks = now, disk = head.id, "copied in the pause");
                blocks.copy_now(self.policy, now, (file, head.bytes), &mut room, to)?;
            }
            self.changed.push(blocks);
        }
        Ok(())
    }

    /// Returns whether the epoch has no drives.
    pub(crate) fn is_empty(&self) -> bool {
        self.changed.is_empty()
    }

    /// Returns how many blocks were copied in the pause.
    pub(crate) fn copied_in_pause(&self) -> u64 {
        self.changed.iter().map(|blocks| blocks.in_pause).sum()
    }

    /// Writes the blocks that were saved before an overwrite, in the middle of other work: a writer
    /// may wait for their room. [`finish`](Self::finish) reports a failure of copy-before-write.
    pub(crate) fn write_saved(&mut self, file: &mut dyn EpochOutput) -> Result<(), StoreError> {
        let (piece, buffer) = (self.policy.piece_blocks, &mut self.buffer);
        let mut runs: Vec<FrameRun> = Vec::new();
        for ChangedBlocks { object, frozen, copied, .. } in &mut self.changed {
            buffer.resize((piece * PAGE_SIZE) as usize, 0);
            // More blocks may be saved meanwhile; the bound lets the caller's work continue, too.
            for _ in 0..SAVED_BLOCKS_MAX as u64 / piece {
                let count = frozen.next_saved(&mut runs, buffer);
                if count == 0 {
                    break;
                }
                *copied += count;
                file.frames(runs.iter().map(|run| of_object(*object, *run)), buffer, false)?;
            }
        }
        Ok(())
    }

    /// Copies the blocks under copy-before-write while the guest runs. Returns the dirty sets, to
    /// be committed once the epoch is durable, and how long devices waited.
    pub(crate) fn finish(
        mut self,
        staging: &mut Staging,
        file: &mut dyn EpochOutput,
    ) -> Result<(Vec<DirtySet>, WriteWaits), EpochFailure> {
        self.changed.iter_mut().try_for_each(|blocks| blocks.write_early(file))?;
        let contents = staging.split(self.policy.piece_blocks.min(staging.frames())).0;
        let mut runs: Vec<FrameRun> = Vec::new();
        // In turns: blocks saved for one drive do not wait for all of another drive.
        let mut more = true;
        while std::mem::take(&mut more) {
            for ChangedBlocks { object, id, frozen, copied, .. } in &mut self.changed {
                let count = frozen.next(&mut runs, contents).map_err(not_copied(id))?;
                if count > 0 {
                    *copied += count;
                    file.frames(runs.iter().map(|run| of_object(*object, *run)), contents, false)?;
                    more = true;
                }
            }
        }
        self.changed.iter().try_for_each(ChangedBlocks::check_complete)?;
        let mut waits = WriteWaits::default();
        let changed = self.changed.into_iter().map(|ChangedBlocks { changed, frozen, .. }| {
            let WriteWaits { times, time } = frozen.waits();
            (waits.times, waits.time) = (waits.times + times, waits.time + time);
            changed
        });
        Ok((changed.collect(), waits))
    }
}

impl ChangedBlocks {
    /// Copies the first `blocks` changed blocks: into memory as far as `room` bytes allow, the rest
    /// to the file.
    fn copy_now(
        &mut self,
        policy: &CopyPolicy,
        blocks: u64,
        (from, bytes): (&File, u64),
        room: &mut usize,
        to: &mut dyn EpochOutput,
    ) -> Result<(), EpochFailure> {
        let Self { object, id, changed, copied, early, contents, .. } = self;
        let all = window(changed.runs(), 0, blocks);
        let data = without_holes(policy, all, *object, (id, from, bytes), to)?;
        let stored: u64 = data.iter().map(|run| run.count).sum();
        let in_memory = stored.min(*room as u64 / PAGE_SIZE);
        *room -= (in_memory * PAGE_SIZE) as usize;
        // `vec!` of zeros touches no memory before it is needed.
        *contents = vec![0; (in_memory * PAGE_SIZE) as usize];
        let mut rest = &mut contents[..];
        for run in window(data.iter().copied(), 0, in_memory) {
            let (now, later) = std::mem::take(&mut rest).split_at_mut(run.bytes() as usize);
            read_blocks(from, bytes, run.start, now).map_err(unread(id))?;
            early.push(run);
            rest = later;
        }
        let (beyond, mut piece) = (window(data.into_iter(), in_memory, u64::MAX), Vec::new());
        for run in beyond.flat_map(|run| run.chunks(policy.live_blocks)) {
            piece.resize(run.bytes() as usize, 0);
            read_blocks(from, bytes, run.start, &mut piece).map_err(unread(id))?;
            to.frames([of_object(*object, run)].into_iter(), &piece, false)?;
        }
        *copied += blocks;
        Ok(())
    }

    /// Writes the blocks that were copied in the pause to the file.
    fn write_early(&mut self, file: &mut dyn EpochOutput) -> Result<(), StoreError> {
        let (early, contents) =
            (std::mem::take(&mut self.early), std::mem::take(&mut self.contents));
        let blocks = early.into_iter().map(|run| of_object(self.object, run));
        file.frames(blocks, &contents, false)
    }

    /// Fails if a block is missing: it would have the content of the previous epoch.
    fn check_complete(&self) -> Result<(), EpochFailure> {
        let (copied, changed) = (self.copied, self.changed.frames());
        if copied == changed {
            return Ok(());
        }
        Err(EpochFailure::BlocksMissing { id: self.id.clone(), copied, changed })
    }
}

#[cfg(all(test, feature = "testing"))]
mod tests;
