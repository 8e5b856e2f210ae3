//! What it costs to copy frames in a pause, and blocks of drives before it, learned from those before.

use std::time::Duration;

use crate::{Guest, VcpuPauses};

/// How long the vCPU stood that stood longest in the one pause since then; `None` if one of them has not gone on yet, has stood more
/// often, or does not know. Who asks for a pause is told of its end by a thread that has to get a processor first, which the guest
/// may have again.
pub(crate) fn stood_since(guest: &dyn Guest, before: &[VcpuPauses]) -> Option<Duration> {
    let now = guest.stood();
    let once = |(now, before): (&VcpuPauses, &VcpuPauses)| now.pauses == before.pauses + 1;
    let all = now.len() == before.len() && now.iter().zip(before).all(once);
    if all { now.iter().map(|stood| stood.last).max() } else { None }
}

/// What pauses have cost in which frames were copied.
#[derive(Clone, Copy, Default)]
pub(crate) struct CopyCost {
    /// The shortest of them.
    least: Duration,
    /// Of each frame, beyond that, in the last one that had many.
    frame: Duration,
}

impl CopyCost {
    pub(crate) fn note(&mut self, pause: Duration, frames: u64) {
        if self.least.is_zero() || pause < self.least {
            self.least = pause;
        }
        if let Ok(many @ 64..) = u32::try_from(frames) {
            self.frame = (pause - self.least) / many;
        }
    }

    /// How many frames a pause of `most` has room for, if that is known and there is any.
    pub(crate) fn fit(&self, most: Duration) -> Option<u64> {
        let room = most.checked_sub(self.least)?.as_nanos();
        let frames = room.checked_div(self.frame.as_nanos())?;
        Some(u64::try_from(frames).unwrap_or(u64::MAX))
    }
}

/// What it has cost to copy ahead of a pause what changed of drives.
#[derive(Clone, Copy, Default)]
pub(crate) struct AheadCost {
    /// Of a block that had changed when that began, in the last epoch that had some; what changed meanwhile, and was copied, too, is in it.
    block: Duration,
}

impl AheadCost {
    pub(crate) fn note(&mut self, took: Duration, blocks: u64) {
        if let Ok(blocks @ 1..) = u32::try_from(blocks) {
            self.block = took / blocks;
        }
    }

    /// How long it will take for so many.
    pub(crate) fn of(&self, blocks: u64) -> Duration {
        self.block.saturating_mul(u32::try_from(blocks).unwrap_or(u32::MAX))
    }
}
