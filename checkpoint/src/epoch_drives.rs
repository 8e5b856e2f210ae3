//! The drives in a chain of epochs: tracks writes to them, and copies their blocks while the guest
//! runs.
//!
//! A full epoch copies the whole content of a drive before the pause. Every epoch copies changed
//! blocks before the pause if there are many. [`DiskCopy`](crate::disk_copy::DiskCopy) copies
//! blocks that change after that.

use std::fs::File;
use std::io;
use std::sync::Arc;

use driftline_dirty_tracker::{DirtySet, FrameRun, FrameSet, Subscription};
use driftline_guest::{
    CopyBeforeWrite, DriveHead, GuestContents, data_runs, data_within, read_blocks,
};
use driftline_store::of_object;

use crate::copy_policy::CopyPolicy;
use crate::epoch_output::EpochOutput;
use crate::report::{DriveRefusal, EpochFailure};
use crate::staging::{Staging, batches};

/// Returns the drives of `guest` that are part of its epochs: those that it can write to.
pub(crate) fn drives_of(guest: &dyn GuestContents) -> Vec<DriveHead> {
    let heads = guest.drives().into_iter().map(|drive| drive.head());
    heads.filter(|head| !head.readonly).collect()
}

/// A drive whose writes are tracked.
pub(crate) struct TrackedEpochDrive {
    /// The number of its object in a store.
    pub(crate) object: u16,
    pub(crate) head: DriveHead,
    pub(crate) file: Arc<File>,
    pub(crate) copy_before_write: Arc<CopyBeforeWrite>,
    pub(crate) writes: Subscription,
}

/// The drives of a chain of epochs.
pub(crate) struct EpochDrives(pub(crate) Vec<TrackedEpochDrive>);

/// Result of copying drives before a pause.
pub(crate) struct AheadCopy {
    /// To be committed with the rest of the epoch.
    pub(crate) passes: Vec<DirtySet>,
    /// Blocks that were due when the copy began.
    pub(crate) due: u64,
}

impl EpochDrives {
    /// Begins to track the writes to `drives` of `guest`.
    pub(crate) fn track(
        guest: &dyn GuestContents,
        drives: &[DriveHead],
    ) -> Result<Self, EpochFailure> {
        if drives.is_empty() {
            return Ok(Self(Vec::new()));
        }
        let present = guest.drives();
        let mut tracked = Vec::new();
        for (object, head) in (1..).zip(drives) {
            let refused = |cause| EpochFailure::DriveRefused { drive: head.clone(), cause };
            let drive = present.iter().find(|drive| drive.head() == *head);
            let drive = drive.ok_or_else(|| refused(DriveRefusal::Detached))?;
            let copy_before_write = drive.copy_before_write();
            let copy_before_write =
                copy_before_write.ok_or_else(|| refused(DriveRefusal::NoCopyBeforeWrite))?;
            copy_before_write.reserve();
            let file = drive.open().map_err(unread(&head.id))?;
            let writes = drive.subscribe("checkpoint").map_err(|e| refused(e.into()))?;
            let writes = writes.ok_or_else(|| refused(DriveRefusal::NotTracked))?;
            let (head, file) = (head.clone(), Arc::new(file));
            tracked.push(TrackedEpochDrive { object, head, file, copy_before_write, writes });
        }
        Ok(Self(tracked))
    }

    /// Copies the content of the drives while the guest runs. What is written meanwhile is among
    /// the epoch's changed blocks, which come later in the file.
    pub(crate) fn copy_live(
        &self,
        policy: &CopyPolicy,
        staging: &mut Staging,
        file: &mut dyn EpochOutput,
    ) -> Result<(), EpochFailure> {
        for drive in &self.0 {
            let runs = data_runs(&drive.file, drive.head.bytes).map_err(unread(&drive.head.id))?;
            drive.copy_running(policy, &runs, staging, file, true)?;
        }
        Ok(())
    }

    /// Copies changed blocks while the guest runs, and then what changed meanwhile. Ends when
    /// copy-before-write has room for all that is left, whatever the guest overwrites, or when the
    /// number does not decrease. Takes the drives in turns: each changes while the others are
    /// copied.
    pub(crate) fn copy_ahead(
        &mut self,
        policy: &CopyPolicy,
        staging: &mut Staging,
        file: &mut dyn EpochOutput,
    ) -> Result<AheadCopy, EpochFailure> {
        let mut ahead = AheadCopy { passes: Vec::new(), due: self.due_ahead() };
        // `None` for a drive whose number does not decrease.
        let mut before = vec![Some(u64::MAX); self.0.len()];
        for _ in 0..policy.drive_passes {
            let mut copied = false;
            for (drive, before) in self.0.iter_mut().zip(&mut before) {
                let Some(last) = *before else { continue };
                let changed = drive.writes.drain();
                let blocks = changed.frames();
                if blocks <= drive.copy_before_write.capacity() {
                    changed.give_back();
                    continue;
                }
                let of = (&*drive.head.id, &*drive.file, drive.head.bytes);
                let runs = without_holes(policy, changed.runs(), drive.object, of, file);
                ahead.passes.push(changed);
                let runs = runs?;
                drive.copy_running(policy, &runs, staging, file, false)?;
                tracing::debug!(blocks, disk = drive.head.id, "copied while the guest ran");
                *before = policy.shrinks(blocks, last).then_some(blocks);
                copied = true;
            }
            if !copied {
                break;
            }
        }
        Ok(ahead)
    }

    /// Returns how many blocks would be copied before a pause if that began now, without those that
    /// change meanwhile.
    pub(crate) fn due_ahead(&self) -> u64 {
        let due = |drive: &TrackedEpochDrive| {
            let blocks = drive.writes.count();
            if blocks <= drive.copy_before_write.capacity() { 0 } else { blocks }
        };
        self.0.iter().map(due).sum()
    }
}

impl TrackedEpochDrive {
    fn copy_running(
        &self,
        policy: &CopyPolicy,
        runs: &[FrameRun],
        staging: &mut Staging,
        file: &mut dyn EpochOutput,
        forget_zeros: bool,
    ) -> Result<(), EpochFailure> {
        let Self { object, head, file: from, .. } = self;
        let batch_blocks = policy.live_blocks.min(staging.frames());
        for batch in batches(runs, batch_blocks) {
            let (contents, mut filled) = (&mut *staging.split(batch_blocks).0, 0);
            for run in &batch {
                let end = filled + run.bytes() as usize;
                let to = &mut contents[filled..end];
                read_blocks(from, head.bytes, run.start, to).map_err(unread(&head.id))?;
                filled = end;
            }
            let blocks = batch.iter().map(|run| of_object(*object, *run));
            file.frames(blocks, contents, forget_zeros)?;
        }
        Ok(())
    }
}

/// Records the holes in long runs of the drive `id` of `bytes` as zeros, without reading them: a
/// guest that discards all its unused space makes terabytes of holes. Returns the other blocks. A
/// block that the guest writes meanwhile is marked dirty again.
pub(crate) fn without_holes(
    policy: &CopyPolicy,
    runs: impl Iterator<Item = FrameRun>,
    object: u16,
    (id, from, bytes): (&str, &File, u64),
    to: &mut dyn EpochOutput,
) -> Result<Vec<FrameRun>, EpochFailure> {
    let mut left = Vec::new();
    for run in runs {
        if run.count <= policy.live_blocks {
            left.push(run);
            continue;
        }
        let data = data_within(from, run, bytes).map_err(unread(id))?;
        let there: FrameSet = data.iter().copied().collect();
        there.gaps(run).try_for_each(|gap| to.zeros(of_object(object, gap)))?;
        left.extend(data);
    }
    Ok(left)
}

/// Returns how an error of reading the drive `id` is reported.
pub(crate) fn unread(id: &str) -> impl Fn(io::Error) -> EpochFailure {
    move |cause| EpochFailure::Drive { id: id.to_owned(), cause }
}
