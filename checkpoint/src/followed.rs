//! The drives that a chain of epochs has: who follows their writes, and how their blocks get into an epoch.
//!
//! What a drive holds is copied while the guest runs, before the pause of a full epoch; so is, before any, what changed, if that is much.
//! In each pause what changed since is drained and [kept](crate::Keeper), and it is copied when the guest runs again: what was written
//! over between pieces of memory, the rest after it.

use std::fs::File;
use std::io;
use std::sync::Arc;

use dirty_tracker::{Epoch, FrameRun, PAGE_SIZE, Subscription};

use crate::drive::read_blocks;
use crate::instant::PATIENCE;
use crate::keeper::{Keeping, ROOM, Waits};
use crate::live::batches;
use crate::report::{Cause, Phase};
use crate::staging::Staging;
use crate::store::{EpochWriter, StoreError, of_object};
use crate::{DriveHead, Guest, GuestError, KeepError, Keeper, data_runs};

/// Blocks that are copied at a time while the guest runs: of a drive that nobody waits for, and of one that is kept.
const LIVE_BLOCKS: u64 = 256;
const PIECE_BLOCKS: u64 = 64;
/// How often what changed of a drive is copied ahead of a pause.
const MOST_PASSES: usize = 4;
/// Epochs in which no write waits, after one has waited for too long.
const AFTER_STALL: u32 = 20;

/// The drives of `guest` that its epochs have: those that it can write to.
pub(crate) fn drives_of(guest: &dyn Guest) -> Vec<DriveHead> {
    let heads = guest.drives().into_iter().map(|drive| drive.head());
    heads.filter(|head| !head.readonly).collect()
}

/// A drive whose writes are followed.
pub(crate) struct Followed {
    /// What its blocks are in a store.
    object: u16,
    head: DriveHead,
    file: Arc<File>,
    keeper: Arc<Keeper>,
    writes: Subscription,
}

/// What of a drive is kept since a pause. Dropping it lets go of the blocks and gives them back (I4).
pub(crate) struct Stood {
    object: u16,
    id: String,
    changed: Epoch,
    keeping: Keeping,
    /// Blocks of it that are in the epoch.
    copied: u64,
}

fn failed(id: &str) -> impl Fn(io::Error) -> Cause {
    move |cause| Cause::Drive { id: id.to_owned(), cause }
}

fn not_kept(id: &str) -> impl Fn(KeepError) -> Cause {
    move |why| match why {
        KeepError::Stalled => Cause::Stalled(PATIENCE),
        KeepError::Unread(cause) => failed(id)(cause),
        why => failed(id)(io::Error::other(why)),
    }
}

/// Begins to follow the writes to `drives` of `guest`.
pub(crate) fn follow(guest: &dyn Guest, drives: &[DriveHead]) -> Result<Vec<Followed>, Cause> {
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
        let writes = drive.subscribe("checkpoint");
        let writes = writes.ok_or_else(|| unsupported("its writes are not followed"))?;
        let (head, file) = (head.clone(), Arc::new(file));
        followed.push(Followed { object, head, file, keeper, writes });
    }
    Ok(followed)
}

/// Copies what the drives hold while the guest runs; what is written meanwhile is in the epoch's own blocks, which come after.
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

/// Copies what has changed while the guest runs, and what changed meanwhile, until that is little enough to be set aside whatever the
/// guest writes over, or does not get less. What that was, to be committed as the rest of the epoch is.
pub(crate) fn copy_ahead(
    drives: &mut [Followed],
    staging: &mut Staging,
    file: &mut EpochWriter,
) -> Result<Vec<Epoch>, Cause> {
    let mut passes = Vec::new();
    for drive in drives {
        let mut before = u64::MAX;
        for _ in 0..MOST_PASSES {
            let changed = drive.writes.drain();
            let blocks = changed.frames();
            if blocks <= ROOM as u64 {
                changed.give_back();
                break;
            }
            let runs: Vec<FrameRun> = changed.runs().collect();
            passes.push(changed);
            drive.copy_running(&runs, staging, file, false)?;
            tracing::debug!(blocks, disk = drive.head.id, "copied while the guest ran");
            if blocks > before / 4 * 3 {
                break;
            }
            before = blocks;
        }
    }
    Ok(passes)
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

/// Keeps what has changed since the last epoch. The guest stands, and so all that was written is marked. A write that
/// would have to wait for room gives up, unless they are `patient`.
pub(crate) fn stand(drives: &mut [Followed], patient: bool) -> Result<Vec<Stood>, Cause> {
    let keep = |drive: &mut Followed| {
        let Followed { object, head, file, keeper, writes } = drive;
        let changed = writes.drain();
        let keeping = keeper.keep(file.clone(), head.bytes, changed.runs().collect());
        let keeping = keeping.map_err(not_kept(&head.id))?;
        if !patient {
            keeping.do_not_wait();
        }
        Ok(Stood { object: *object, id: head.id.clone(), changed, keeping, copied: 0 })
    };
    drives.iter_mut().map(keep).collect()
}

/// Writes what was set aside of what is kept, amid something else: somebody may wait for its room. That nothing is kept any more is said
/// by [`copy_behind`].
pub(crate) fn save_aside(
    stood: &mut [Stood],
    buffer: &mut Vec<u8>,
    file: &mut EpochWriter,
) -> Result<(), StoreError> {
    let mut runs: Vec<FrameRun> = Vec::new();
    for Stood { object, keeping, copied, .. } in stood {
        buffer.resize((PIECE_BLOCKS * PAGE_SIZE) as usize, 0);
        // More may be set aside meanwhile; the other has to go on, too.
        for _ in 0..ROOM as u64 / PIECE_BLOCKS {
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

/// Copies what is kept, behind the running guest. Returns what changed, to be committed once it is durable, and how devices waited.
pub(crate) fn copy_behind(
    mut stood: Vec<Stood>,
    staging: &mut Staging,
    file: &mut EpochWriter,
) -> Result<(Vec<Epoch>, Waits), Cause> {
    let contents = staging.split(PIECE_BLOCKS.min(staging.frames())).0;
    let mut runs: Vec<FrameRun> = Vec::new();
    // In turns: what one has set aside does not wait for all of another.
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
    // A block that was missed would be that of the epoch before.
    for Stood { id, changed, copied, .. } in &stood {
        if *copied != changed.frames() {
            let why = format!("{copied} blocks were copied of {} that changed", changed.frames());
            return Err(failed(id)(io::Error::other(why)));
        }
    }
    let mut waits = Waits::default();
    let changed = stood.into_iter().map(|Stood { changed, keeping, .. }| {
        let Waits { times, time } = keeping.waits();
        (waits.times, waits.time) = (waits.times + times, waits.time + time);
        changed
    });
    Ok((changed.collect(), waits))
}

/// Whether who writes to a drive waits for the store: not in the next epochs, once somebody has waited for too long. They rather fail.
#[derive(Default)]
pub(crate) struct Patience {
    rests: u32,
}

impl Patience {
    /// For an epoch.
    pub(crate) fn ask(&mut self) -> bool {
        let patient = self.rests == 0;
        self.rests = self.rests.saturating_sub(1);
        patient
    }

    /// An epoch failed for `cause`.
    pub(crate) fn failed(&mut self, phase: Phase, cause: &Cause) {
        if let (Phase::CopyDrives, Cause::Stalled(_)) = (phase, cause) {
            tracing::warn!("no write to a disk waits for the next {AFTER_STALL} epochs: {cause}");
            self.rests = AFTER_STALL;
        }
    }
}
