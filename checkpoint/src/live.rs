//! Copying memory of a guest that runs on: what a full epoch does before it pauses the guest.

use dirty_tracker::{Epoch, FrameRun, Subscription};

use crate::Guest;
use crate::report::Cause;
use crate::staging::{Staging, window};
use crate::store::EpochWriter;

/// Frames that the copy of a running guest's memory takes at a time: 1 MiB.
const LIVE_FRAMES: u64 = 256;
/// How often a full epoch goes over what changed under its copy before it pauses the guest.
const LIVE_PASSES: usize = 4;

/// Copies all populated memory into the file while the guest runs, then what was written meanwhile,
/// for as long as that gets less. What is left then is appended after the pause, so that it wins.
/// Returns the epochs that went into the file: nothing in them is safe until the file is.
pub(crate) fn copy_live(
    guest: &dyn Guest,
    staging: &mut Staging,
    file: &mut EpochWriter,
    subscription: &mut Subscription,
) -> Result<Vec<Epoch>, Cause> {
    let populated = guest.populated()?;
    copy_running(guest, staging, file, &populated, true)?;
    let mut before = populated.iter().map(|run| run.count).sum::<u64>();
    tracing::debug!(frames = before, "copied while the guest ran");
    let mut passes = Vec::new();
    while passes.len() < LIVE_PASSES {
        guest.collect()?;
        let changed = subscription.drain();
        let frames = changed.frames();
        let runs: Vec<FrameRun> = changed.runs().collect();
        copy_running(guest, staging, file, &runs, false)?;
        tracing::debug!(frames, "copied again while the guest ran");
        passes.push(changed);
        if frames <= LIVE_FRAMES || frames > before / 4 * 3 {
            break;
        }
        before = frames;
    }
    Ok(passes)
}

/// Copies frames of a running guest into the file, a little at a time.
fn copy_running(
    guest: &dyn Guest,
    staging: &mut Staging,
    file: &mut EpochWriter,
    runs: &[FrameRun],
    forget_zeros: bool,
) -> Result<(), Cause> {
    let at_once = LIVE_FRAMES.min(staging.frames());
    for batch in batches(runs, at_once) {
        let contents = staging.copy(guest.ram(), batch.iter().copied())?;
        file.frames(batch.iter().copied(), contents, forget_zeros)?;
    }
    Ok(())
}

/// Cuts runs into groups of at most `frames` frames each.
pub(crate) fn batches(runs: &[FrameRun], frames: u64) -> Vec<Vec<FrameRun>> {
    let mut groups: Vec<Vec<FrameRun>> = Vec::new();
    let mut room = 0;
    for &run in runs {
        let head = room.min(run.count);
        let first = window(std::iter::once(run), 0, head);
        let rest = window(std::iter::once(run), head, u64::MAX).flat_map(|r| r.chunks(frames));
        for piece in first.chain(rest) {
            match groups.last_mut() {
                Some(group) if room > 0 => group.push(piece),
                _ => {
                    groups.push(vec![piece]);
                    room = frames;
                }
            }
            room -= piece.count;
        }
    }
    groups
}
