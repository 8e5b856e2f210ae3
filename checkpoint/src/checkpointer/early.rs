//! Decides when to take an epoch before it is due, so that its pause does not become too long.

use std::time::Duration;

use super::Checkpointer;

impl Checkpointer {
    /// Returns the number of changed frames at which an epoch begins early, so that its pause stays
    /// within `max_pause`: a share of what fits. `None` before the first epoch.
    pub(crate) fn most_changed(&self, max_pause: Duration) -> Option<u64> {
        self.chain.as_ref()?;
        Some(self.planner.most_changed(max_pause, self.staging.frames()))
    }

    /// Returns how many frames will have changed since the last epoch at the pause of an epoch that
    /// begins now, or `None` if that is unknown. Changed blocks of drives are copied before that
    /// pause; the estimate assumes that the guest keeps writing at the same rate meanwhile.
    pub(crate) fn expected(&mut self) -> Option<u64> {
        let chain = self.chain.as_ref()?;
        self.guest.collect().ok()?;
        let frames = chain.subscription.count();
        let ahead = self.planner.ahead.of(chain.drives.due_ahead());
        Some(grown(frames, chain.since.elapsed(), ahead))
    }
}

/// Extrapolates `frames`, which changed within `since`, by another `more`.
fn grown(frames: u64, since: Duration, more: Duration) -> u64 {
    let since = since.max(Duration::from_millis(1)).as_micros();
    let grown = u128::from(frames).saturating_mul(since.saturating_add(more.as_micros())) / since;
    u64::try_from(grown).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cost::AheadCost;

    const MS: Duration = Duration::from_millis(1);

    #[test]
    fn drive_copy_time_raises_expected_frames() {
        let mut cost = AheadCost::default();
        assert_eq!(grown(1000, 20 * MS, cost.of(50_000)), 1000, "nothing is known yet");
        cost.note(100 * MS, 10_000);
        assert_eq!(grown(1000, 20 * MS, cost.of(0)), 1000);
        assert_eq!(grown(1000, 20 * MS, cost.of(4000)), 3000);
        // An epoch without blocks to copy says nothing about their cost.
        cost.note(MS, 0);
        assert_eq!(grown(1000, 20 * MS, cost.of(4000)), 3000);
        assert_eq!(grown(u64::MAX, Duration::ZERO, Duration::MAX), u64::MAX);
    }
}
