//! When an epoch is to be taken before it is due, so that the guest does not stand for too long.

use std::time::Duration;

use super::Checkpointer;
use crate::disk_copy;

impl Checkpointer {
    /// With so many changed frames an epoch should be taken if its pause is not to exceed
    /// `max_pause`: three quarters of what has room. `None` before the first one.
    pub(crate) fn most_changed(&self, max_pause: Duration) -> Option<u64> {
        self.chain.as_ref()?;
        let room = self.staging.frames();
        let most = match self.shield.is_used() {
            // What is copied behind the guest's back is not in the pause.
            true => room,
            // More than half are not copied before it.
            false => self.cost.fit(max_pause).unwrap_or(u64::MAX).min(room / 3 * 2),
        };
        Some((most / 4 * 3).max(1))
    }

    /// How many frames will have changed since the last epoch when the guest stands for one that is
    /// begun now; `None` if nobody knows. Before that what changed much of drives is copied, and
    /// the guest goes on writing as it did.
    pub(crate) fn expected(&mut self) -> Option<u64> {
        let chain = self.chain.as_mut()?;
        self.guest.collect().ok()?;
        let changed = chain.subscription.drain();
        let frames = changed.frames();
        changed.give_back();
        let ahead = self.ahead.of(disk_copy::due_ahead(&mut chain.drives));
        Some(grown(frames, chain.since.elapsed(), ahead))
    }
}

/// What becomes of `frames` that changed in so long, if it goes on so for `more`.
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
    fn what_is_copied_ahead_lets_more_change() {
        let mut cost = AheadCost::default();
        assert_eq!(grown(1000, 20 * MS, cost.of(50_000)), 1000, "nothing is known yet");
        cost.note(100 * MS, 10_000);
        assert_eq!(grown(1000, 20 * MS, cost.of(0)), 1000);
        assert_eq!(grown(1000, 20 * MS, cost.of(4000)), 3000);
        // One that has nothing to copy says nothing of what that takes.
        cost.note(MS, 0);
        assert_eq!(grown(1000, 20 * MS, cost.of(4000)), 3000);
        assert_eq!(grown(u64::MAX, Duration::ZERO, Duration::MAX), u64::MAX);
    }
}
