//! The drives in a chain of epochs: how their writes are tracked, and how their blocks get into an
//! epoch.
//!
//! A full epoch copies the whole content of a drive while the guest runs, before the pause. Every
//! epoch copies changed blocks before the pause if there are many. In the pause, blocks changed
//! since then are drained and [protected by copy-before-write](driftline_guest::Keeper). They are
//! copied when the guest runs again: blocks that were saved before an overwrite between pieces of
//! memory, the rest after memory. After a write has waited for too long, the next epochs copy
//! blocks that may find no room in the pause.

use std::fs::File;
use std::io;
use std::sync::Arc;

use driftline_dirty_tracker::{DirtySet, FrameRun, FrameSet, PAGE_SIZE, Subscription};
use driftline_guest::{
    DriveHead, GuestContents, GuestError, KeepError, Keeper, Keeping, SAVED_BLOCKS_MAX,
    WRITE_WAIT_LIMIT, WriteWaits, data_runs, data_within, read_blocks,
};
use driftline_store::{EpochWriter, StoreError, of_object};

use crate::live_copy::batches;
use crate::report::{Cause, Phase};
use crate::staging::{Staging, window};

/// Blocks copied at a time while the guest runs: of a drive without copy-before-write, and of one
/// with it.
const LIVE_BLOCKS: u64 = 256;
const PIECE_BLOCKS: u64 = 64;
/// Maximum number of passes over a drive's changed blocks before a pause.
const MOST_PASSES: usize = 4;
/// Number of epochs in which no write waits for room, after a write has waited for too long.
const AFTER_STALL: u32 = 20;
/// Bytes of memory that hold blocks copied in a pause until they are written to the file. What is
/// beyond is written in the pause.
const MOST_IN_PAUSE: usize = 64 << 20;

/// Returns the drives of `guest` that are part of its epochs: those that it can write to.
pub(crate) fn drives_of(guest: &dyn GuestContents) -> Vec<DriveHead> {
    let heads = guest.drives().into_iter().map(|drive| drive.head());
    heads.filter(|head| !head.readonly).collect()
}

/// A drive whose writes are tracked.
pub(crate) struct Followed {
    /// The number of its object in a store.
    object: u16,
    head: DriveHead,
    file: Arc<File>,
    keeper: Arc<Keeper>,
    writes: Subscription,
}

/// What was copied of drives before a pause.
pub(crate) struct Ahead {
    /// To be committed with the rest of the epoch.
    pub(crate) passes: Vec<DirtySet>,
    /// Blocks that were due when the copy began.
    pub(crate) due: u64,
}

/// The changed blocks of a drive, under copy-before-write since a pause. Drop ends that and gives
/// the blocks back (I4).
pub(crate) struct Stood {
    object: u16,
    id: String,
    changed: DirtySet,
    keeping: Keeping,
    /// Its blocks that are in the epoch, and how many of them were copied in the pause.
    copied: u64,
    in_pause: u64,
    /// Blocks copied in the pause that are not in the file yet.
    early: Vec<FrameRun>,
    contents: Vec<u8>,
}

fn failed(id: &str) -> impl Fn(io::Error) -> Cause {
    move |cause| Cause::Drive { id: id.to_owned(), cause }
}

fn not_kept(id: &str) -> impl Fn(KeepError) -> Cause {
    move |why| match why {
        KeepError::Stalled => Cause::Stalled(WRITE_WAIT_LIMIT),
        KeepError::Unread(cause) => failed(id)(cause),
        why => Cause::NotKept { id: id.to_owned(), why },
    }
}

/// Begins to track the writes to `drives` of `guest`.
pub(crate) fn follow(
    guest: &dyn GuestContents,
    drives: &[DriveHead],
) -> Result<Vec<Followed>, Cause> {
    if drives.is_empty() {
        return Ok(Vec::new());
    }
    let there = guest.drives();
    let mut followed = Vec::new();
    for (object, head) in (1..).zip(drives) {
        let unsupported =
            |why: &str| GuestError::Unsupported { what: head.to_string(), why: why.into() };
        let drive = there.iter().find(|drive| drive.head() == *head);
        let drive = drive.ok_or_else(|| unsupported("the guest does not have it any more"))?;
        let keeper = drive.keeper();
        let keeper = keeper.ok_or_else(|| unsupported("its blocks cannot be kept as they are"))?;
        keeper.reserve();
        let file = drive.open().map_err(failed(&head.id))?;
        let writes = drive.subscribe("checkpoint").map_err(|e| GuestError::System {
            what: "following a drive's writes",
            cause: e.into(),
        })?;
        let writes = writes.ok_or_else(|| unsupported("its writes are not followed"))?;
        let (head, file) = (head.clone(), Arc::new(file));
        followed.push(Followed { object, head, file, keeper, writes });
    }
    Ok(followed)
}

/// Copies the content of the drives while the guest runs. What is written meanwhile is among the
/// epoch's changed blocks, which come later in the file.
pub(crate) fn copy_live(
    drives: &[Followed],
    staging: &mut Staging,
    file: &mut EpochWriter,
) -> Result<(), Cause> {
    for drive in drives {
        let runs = data_runs(&drive.file, drive.head.bytes).map_err(failed(&drive.head.id))?;
        drive.copy_running(&runs, staging, file, true)?;
    }
    Ok(())
}

/// Copies changed blocks while the guest runs, and then what changed meanwhile. Ends when
/// copy-before-write has room for all that is left, whatever the guest overwrites, or when the
/// number does not decrease. Takes the drives in turns: each changes while the others are copied.
pub(crate) fn copy_ahead(
    drives: &mut [Followed],
    staging: &mut Staging,
    file: &mut EpochWriter,
) -> Result<Ahead, Cause> {
    let mut ahead = Ahead { passes: Vec::new(), due: due_ahead(drives) };
    // `None` for a drive whose number does not decrease.
    let mut before = vec![Some(u64::MAX); drives.len()];
    for _ in 0..MOST_PASSES {
        let mut copied = false;
        for (drive, before) in drives.iter_mut().zip(&mut before) {
            let Some(last) = *before else { continue };
            let changed = drive.writes.drain();
            let blocks = changed.frames();
            if blocks <= drive.keeper.room() {
                changed.give_back();
                continue;
            }
            let of = (&*drive.file, drive.head.bytes);
            let runs = without_holes(changed.runs(), drive.object, of, file);
            ahead.passes.push(changed);
            let runs = runs.map_err(failed(&drive.head.id))?;
            drive.copy_running(&runs, staging, file, false)?;
            tracing::debug!(blocks, disk = drive.head.id, "copied while the guest ran");
            *before = (blocks <= last / 4 * 3).then_some(blocks);
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
pub(crate) fn due_ahead(drives: &mut [Followed]) -> u64 {
    let due = |drive: &mut Followed| {
        let changed = drive.writes.drain();
        let blocks = changed.frames();
        changed.give_back();
        if blocks <= drive.keeper.room() { 0 } else { blocks }
    };
    drives.iter_mut().map(due).sum()
}

/// Records the holes in long runs of a drive of `bytes` as zeros, without reading them: a guest
/// that discards all its unused space makes terabytes of holes. Returns the other blocks. A block
/// that the guest writes meanwhile is marked dirty again.
fn without_holes(
    runs: impl Iterator<Item = FrameRun>,
    object: u16,
    (from, bytes): (&File, u64),
    to: &mut EpochWriter,
) -> io::Result<Vec<FrameRun>> {
    let mut left = Vec::new();
    for run in runs {
        if run.count <= LIVE_BLOCKS {
            left.push(run);
            continue;
        }
        let data = data_within(from, run, bytes)?;
        let there: FrameSet = data.iter().copied().collect();
        there.gaps(run).for_each(|gap| to.zeros(of_object(object, gap)));
        left.extend(data);
    }
    Ok(left)
}

impl Followed {
    fn copy_running(
        &self,
        runs: &[FrameRun],
        staging: &mut Staging,
        file: &mut EpochWriter,
        forget_zeros: bool,
    ) -> Result<(), Cause> {
        let Self { object, head, file: from, .. } = self;
        let at_once = LIVE_BLOCKS.min(staging.frames());
        for batch in batches(runs, at_once) {
            let (contents, mut filled) = (&mut *staging.split(at_once).0, 0);
            for run in &batch {
                let end = filled + run.bytes() as usize;
                let to = &mut contents[filled..end];
                read_blocks(from, head.bytes, run.start, to).map_err(failed(&head.id))?;
                filled = end;
            }
            let blocks = batch.iter().map(|run| of_object(*object, *run));
            file.frames(blocks, contents, forget_zeros)?;
        }
        Ok(())
    }
}

/// Puts the blocks that changed since the last epoch under copy-before-write. The guest is paused,
/// so every write is marked. Unless the writers are `patient`, this covers only as many blocks as
/// have room whatever the guest overwrites, and copies the rest here.
pub(crate) fn stand(
    drives: &mut [Followed],
    patient: bool,
    to: &mut EpochWriter,
) -> Result<Vec<Stood>, Cause> {
    stand_with(drives, patient, MOST_IN_PAUSE, to)
}

/// Like [`stand`], with `room` bytes of memory.
fn stand_with(
    drives: &mut [Followed],
    patient: bool,
    mut room: usize,
    to: &mut EpochWriter,
) -> Result<Vec<Stood>, Cause> {
    let mut all = Vec::new();
    for Followed { object, head, file, keeper, writes } in drives {
        let changed = writes.drain();
        let many = changed.frames().saturating_sub(keeper.room());
        let now = if patient { 0 } else { many };
        let kept = window(changed.runs(), now, u64::MAX).collect();
        // This comes first: a drive that was released must not be read.
        let keeping = keeper.keep(file.clone(), head.bytes, kept).map_err(not_kept(&head.id))?;
        let (early, contents) = (Vec::new(), Vec::new());
        let (object, id) = (*object, head.id.clone());
        let mut stood =
            Stood { object, id, changed, keeping, copied: 0, in_pause: now, early, contents };
        if now > 0 {
            tracing::debug!(blocks = now, disk = head.id, "copied in the pause");
            stood.copy_now(now, (file, head.bytes), &mut room, to)?;
        }
        all.push(stood);
    }
    Ok(all)
}

/// Returns how many blocks were copied in the pause.
pub(crate) fn in_pause(stood: &[Stood]) -> u64 {
    stood.iter().map(|stood| stood.in_pause).sum()
}

impl Stood {
    /// Copies the first `blocks` changed blocks: into memory as far as `room` bytes allow, the rest
    /// to the file.
    fn copy_now(
        &mut self,
        blocks: u64,
        (from, bytes): (&File, u64),
        room: &mut usize,
        to: &mut EpochWriter,
    ) -> Result<(), Cause> {
        let Self { object, id, changed, copied, early, contents, .. } = self;
        let all = window(changed.runs(), 0, blocks);
        let data = without_holes(all, *object, (from, bytes), to).map_err(failed(id))?;
        let stored: u64 = data.iter().map(|run| run.count).sum();
        let in_memory = stored.min(*room as u64 / PAGE_SIZE);
        *room -= (in_memory * PAGE_SIZE) as usize;
        // `vec!` of zeros touches no memory before it is needed.
        *contents = vec![0; (in_memory * PAGE_SIZE) as usize];
        let mut rest = &mut contents[..];
        for run in window(data.iter().copied(), 0, in_memory) {
            let (now, later) = std::mem::take(&mut rest).split_at_mut(run.bytes() as usize);
            read_blocks(from, bytes, run.start, now).map_err(failed(id))?;
            early.push(run);
            rest = later;
        }
        let (beyond, mut piece) = (window(data.into_iter(), in_memory, u64::MAX), Vec::new());
        for run in beyond.flat_map(|run| run.chunks(LIVE_BLOCKS)) {
            piece.resize(run.bytes() as usize, 0);
            read_blocks(from, bytes, run.start, &mut piece).map_err(failed(id))?;
            to.frames([of_object(*object, run)].into_iter(), &piece, false)?;
        }
        *copied += blocks;
        Ok(())
    }

    /// Writes the blocks that were copied in the pause to the file.
    fn write_early(&mut self, file: &mut EpochWriter) -> Result<(), StoreError> {
        let (early, contents) =
            (std::mem::take(&mut self.early), std::mem::take(&mut self.contents));
        let blocks = early.into_iter().map(|run| of_object(self.object, run));
        file.frames(blocks, &contents, false)
    }
}

/// Writes the blocks that were saved before an overwrite, in the middle of other work: a writer may
/// wait for their room. [`copy_behind`] reports a failure of copy-before-write.
pub(crate) fn save_aside(
    stood: &mut [Stood],
    buffer: &mut Vec<u8>,
    file: &mut EpochWriter,
) -> Result<(), StoreError> {
    let mut runs: Vec<FrameRun> = Vec::new();
    for Stood { object, keeping, copied, .. } in stood {
        buffer.resize((PIECE_BLOCKS * PAGE_SIZE) as usize, 0);
        // More blocks may be saved meanwhile; the bound lets the caller's work continue, too.
        for _ in 0..SAVED_BLOCKS_MAX as u64 / PIECE_BLOCKS {
            let count = keeping.aside(&mut runs, buffer);
            if count == 0 {
                break;
            }
            *copied += count;
            file.frames(runs.iter().map(|run| of_object(*object, *run)), buffer, false)?;
        }
    }
    Ok(())
}

/// Copies the blocks under copy-before-write while the guest runs. Returns the dirty sets, to be
/// committed once the epoch is durable, and how long devices waited.
pub(crate) fn copy_behind(
    mut stood: Vec<Stood>,
    staging: &mut Staging,
    file: &mut EpochWriter,
) -> Result<(Vec<DirtySet>, WriteWaits), Cause> {
    stood.iter_mut().try_for_each(|stood| stood.write_early(file))?;
    let contents = staging.split(PIECE_BLOCKS.min(staging.frames())).0;
    let mut runs: Vec<FrameRun> = Vec::new();
    // In turns: blocks saved for one drive do not wait for all of another drive.
    let mut more = true;
    while std::mem::take(&mut more) {
        for Stood { object, id, keeping, copied, .. } in &mut stood {
            let count = keeping.next(&mut runs, contents).map_err(not_kept(id))?;
            if count > 0 {
                *copied += count;
                file.frames(runs.iter().map(|run| of_object(*object, *run)), contents, false)?;
                more = true;
            }
        }
    }
    // A missed block would have the content of the previous epoch.
    for Stood { id, changed, copied, .. } in &stood {
        if *copied != changed.frames() {
            let why = format!("{copied} blocks were copied of {} that changed", changed.frames());
            return Err(failed(id)(io::Error::other(why)));
        }
    }
    let mut waits = WriteWaits::default();
    let changed = stood.into_iter().map(|Stood { changed, keeping, .. }| {
        let WriteWaits { times, time } = keeping.waits();
        (waits.times, waits.time) = (waits.times + times, waits.time + time);
        changed
    });
    Ok((changed.collect(), waits))
}

/// Whether a write to a drive waits for room. After a write has waited for too long, writes do not
/// wait in the next epochs; their pauses are longer instead.
#[derive(Default)]
pub(crate) struct Patience {
    rests: u32,
}

impl Patience {
    /// Returns whether writes may wait in the next epoch.
    pub(crate) fn ask(&mut self) -> bool {
        let patient = self.rests == 0;
        self.rests = self.rests.saturating_sub(1);
        patient
    }

    /// Records that an epoch failed for `cause`.
    pub(crate) fn failed(&mut self, phase: Phase, cause: &Cause) {
        if let (Phase::CopyDrives, Cause::Stalled(_)) = (phase, cause) {
            tracing::warn!(
                "disks that change much are copied in the pause for {AFTER_STALL} checkpoints: {cause}"
            );
            self.rests = AFTER_STALL;
        }
    }
}

#[cfg(all(test, feature = "testing"))]
mod tests;
