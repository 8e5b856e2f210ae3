//! What it costs to copy frames in a pause, and blocks of drives before it, learned from those before.

use std::time::Duration;

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
