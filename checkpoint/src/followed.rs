//! The drives that a chain of epochs has: who follows their writes, and how their blocks get into an epoch.
//!
//! What a drive holds is copied while the guest runs, before the pause of a full epoch. In each pause what changed since is drained and
//! [kept](crate::Keeper), and it is copied when the guest runs again.

use std::fs::File;
use std::io;
use std::sync::Arc;

use dirty_tracker::{Epoch, FrameRun, Subscription};

use crate::drive::read_blocks;
use crate::instant::PATIENCE;
use crate::keeper::{Keeping, Waits};
use crate::report::Cause;
use crate::staging::Staging;
use crate::store::{EpochWriter, of_object};
use crate::{DriveHead, Guest, GuestError, KeepError, Keeper, data_runs};

/// Blocks that are copied at a time while the guest runs: of a drive that nobody waits for, and of one that is kept.
const LIVE_BLOCKS: u64 = 256;
const PIECE_BLOCKS: u64 = 64;

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
    let at_once = LIVE_BLOCKS.min(staging.frames());
    for Followed { object, head, file: from, .. } in drives {
        let runs = data_runs(from, head.bytes).map_err(failed(&head.id))?;
        for run in runs.iter().flat_map(|run| run.chunks(at_once)) {
            let contents = staging.split(run.count).0;
            read_blocks(from, head.bytes, run.start, contents).map_err(failed(&head.id))?;
            file.frames(std::iter::once(of_object(*object, run)), contents, true)?;
        }
    }
    Ok(())
}

/// Keeps what has changed since the last epoch. The guest stands, and so all that was written is marked.
pub(crate) fn stand(drives: &mut [Followed]) -> Result<Vec<Stood>, Cause> {
    let keep = |drive: &mut Followed| {
        let Followed { object, head, file, keeper, writes } = drive;
        let changed = writes.drain();
        let keeping = keeper.keep(file.clone(), head.bytes, changed.runs().collect());
        let keeping = keeping.map_err(not_kept(&head.id))?;
        Ok(Stood { object: *object, id: head.id.clone(), changed, keeping })
    };
    drives.iter_mut().map(keep).collect()
}

/// Copies what is kept, behind the running guest. Returns what changed, to be committed once it is durable, and how devices waited.
pub(crate) fn copy_behind(
    stood: Vec<Stood>,
    staging: &mut Staging,
    file: &mut EpochWriter,
) -> Result<(Vec<Epoch>, Waits), Cause> {
    let (mut all, mut waits) = (Vec::new(), Waits::default());
    let contents = staging.split(PIECE_BLOCKS.min(staging.frames())).0;
    let mut runs: Vec<FrameRun> = Vec::new();
    for Stood { object, id, changed, mut keeping } in stood {
        while keeping.next(&mut runs, contents).map_err(not_kept(&id))? > 0 {
            file.frames(runs.iter().map(|run| of_object(object, *run)), contents, false)?;
        }
        let Waits { times, time } = keeping.waits();
        (waits.times, waits.time) = (waits.times + times, waits.time + time);
        all.push(changed);
    }
    Ok((all, waits))
}
