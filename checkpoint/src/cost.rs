//! Estimates of the cost of copying frames in a pause, and blocks of drives before it, learned from
//! previous epochs.

use std::time::Duration;

use crate::copy_policy::CopyPolicy;

/// Cost of previous pauses in which frames were copied.
#[derive(Clone, Copy, Default)]
pub(crate) struct CopyCost {
    /// Shortest pause.
    least: Duration,
    /// Time per frame beyond that, in the last pause that copied many frames.
    frame: Duration,
    /// Ratio of changed frames to frames copied in the pause, in the last epoch; the other frames
    /// were copied before the pause.
    one_in: u64,
}

impl CopyCost {
    /// Records a pause in which `copied` frames were copied, of an epoch with `changed` frames.
    pub(crate) fn note(&mut self, policy: &CopyPolicy, pause: Duration, copied: u64, changed: u64) {
        if self.least.is_zero() || pause < self.least {
            self.least = pause;
        }
        match u32::try_from(copied) {
            Ok(many) if copied >= policy.telling_frames => self.frame = (pause - self.least) / many,
            // One outlier must not count for ever.
            _ => self.frame -= self.frame / 8,
        }
        self.one_in = (changed / copied.max(1)).clamp(1, policy.most_changed_per_copied);
    }

    /// Returns how many frames may have changed for a pause of at most `most`. `None` if that is
    /// unknown, or if no pause is that short.
    pub(crate) fn fit(&self, most: Duration) -> Option<u64> {
        let room = most.checked_sub(self.least)?.as_nanos();
        let frames = room.checked_div(self.frame.as_nanos())?;
        Some(u64::try_from(frames).unwrap_or(u64::MAX).saturating_mul(self.one_in))
    }
}

/// Cost of copying changed blocks of drives before a pause.
#[derive(Clone, Copy, Default)]
pub(crate) struct AheadCost {
    /// Time per block that had changed when the copy began, in the last epoch with such blocks.
    /// Includes the copies of what changed meanwhile.
    block: Duration,
}

impl AheadCost {
    pub(crate) fn note(&mut self, took: Duration, blocks: u64) {
        if let Ok(blocks @ 1..) = u32::try_from(blocks) {
            self.block = took / blocks;
        }
    }

    /// Returns the estimated time for this many blocks.
    pub(crate) fn of(&self, blocks: u64) -> Duration {
        self.block.saturating_mul(u32::try_from(blocks).unwrap_or(u32::MAX))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const POLICY: CopyPolicy = CopyPolicy::DEFAULT;
    const US: Duration = Duration::from_micros(1);

    #[test]
    fn only_frames_copied_in_the_pause_cost_time() {
        let mut cost = CopyCost::default();
        assert_eq!(cost.fit(2000 * US), None, "nothing is known");
        cost.note(&POLICY, 400 * US, 0, 0);
        assert_eq!(cost.fit(2000 * US), None);
        cost.note(&POLICY, 1400 * US, 1000, 1000);
        assert_eq!(cost.fit(2400 * US), Some(2000));
        cost.note(&POLICY, 500 * US, 100, 1000);
        assert_eq!(cost.fit(2400 * US), Some(20_000));
        cost.note(&POLICY, 500 * US, 100, 1_000_000);
        assert_eq!(cost.fit(2400 * US), Some(2000 * POLICY.most_changed_per_copied));
        assert_eq!(cost.fit(300 * US), None, "no pause is so short");
    }

    #[test]
    fn outlier_pause_is_forgotten() {
        let mut cost = CopyCost::default();
        cost.note(&POLICY, 400 * US, 0, 0);
        cost.note(&POLICY, 1400 * US, 64, 250);
        let fits = |cost: &CopyCost| cost.fit(2000 * US).unwrap_or(u64::MAX);
        assert!(fits(&cost) < 1000);
        (0..40).for_each(|_| cost.note(&POLICY, 430 * US, 30, 250));
        assert!(fits(&cost) > 10_000, "{}", fits(&cost));
    }
}
