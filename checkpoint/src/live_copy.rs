//! Copies memory while the guest runs: what a full epoch does before it pauses the guest.

use driftline_dirty_tracker::{DirtySet, FrameRun, Gfn, Subscription};
use driftline_store::EpochWriter;

use crate::guest::Checkpointable;
use crate::report::Cause;
use crate::staging::Staging;

/// Frames copied at a time from a running guest's memory: 1 MiB.
const LIVE_FRAMES: u64 = 256;
/// Maximum number of passes over changed memory before a full epoch pauses the guest.
const LIVE_PASSES: usize = 4;

/// Copies all populated memory into the file while the guest runs, then what was written meanwhile,
/// for as long as that becomes less. The rest is appended after the pause and so overrides these
/// copies. Returns the dirty sets that went into the file: none of them is safe until the file is.
pub(crate) fn copy_live(
    guest: &dyn Checkpointable,
    staging: &mut Staging,
    file: &mut EpochWriter,
    subscription: &mut Subscription,
) -> Result<Vec<DirtySet>, Cause> {
    let populated = guest.populated()?;
    copy_running(guest, staging, file, &populated, true)?;
    let frames = populated.iter().map(|run| run.count).sum::<u64>();
    tracing::debug!(frames, "copied while the guest ran");
    catch_up(guest, staging, file, subscription, frames)
}

/// Copies what was written since, for as long as each pass is smaller than the one before, which
/// had `before` frames. Returns the dirty sets of all passes.
pub(crate) fn catch_up(
    guest: &dyn Checkpointable,
    staging: &mut Staging,
    file: &mut EpochWriter,
    subscription: &mut Subscription,
    mut before: u64,
) -> Result<Vec<DirtySet>, Cause> {
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

/// Copies frames of a running guest into the file, a batch at a time.
fn copy_running(
    guest: &dyn Checkpointable,
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

/// Splits runs into consecutive groups of at most `frames` frames each. A lazy iterator, because a
/// drive may have many.
pub(crate) fn batches(runs: &[FrameRun], frames: u64) -> impl Iterator<Item = Vec<FrameRun>> {
    let mut pieces = runs.iter().copied();
    let mut rest: Option<FrameRun> = None;
    std::iter::from_fn(move || {
        let (mut group, mut room) = (Vec::new(), frames);
        while room > 0 {
            let Some(run) = rest.take().or_else(|| pieces.next()) else { break };
            let count = run.count.min(room);
            group.push(FrameRun { start: run.start, count });
            room -= count;
            let left = FrameRun { start: Gfn(run.start.0 + count), count: run.count - count };
            rest = (left.count > 0).then_some(left);
        }
        (!group.is_empty()).then_some(group)
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn groups_are_full_and_together_are_all(
            runs in prop::collection::vec((1u64..5, 1u64..40), 0..20),
            most in 1u64..30,
        ) {
            let mut at = 0;
            let mut all = Vec::new();
            for (gap, count) in runs {
                all.push(FrameRun { start: Gfn(at + gap), count });
                at += gap + count;
            }
            let groups: Vec<Vec<FrameRun>> = batches(&all, most).collect();
            let frames = |runs: &[FrameRun]| runs.iter().flat_map(|r| r.frames()).collect::<Vec<_>>();
            prop_assert_eq!(frames(&groups.concat()), frames(&all));
            for (n, group) in groups.iter().enumerate() {
                let count = frames(group).len() as u64;
                prop_assert!(count == most || (n + 1 == groups.len() && count < most));
            }
        }
    }
}
