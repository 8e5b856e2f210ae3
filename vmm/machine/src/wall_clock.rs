//! The host's time of day, by which a guest's clock advances while the guest is stored or moves.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// The longest plausible time away. A longer one means that the hosts' clocks disagree.
const LONGEST_AWAY: Duration = Duration::from_secs(3600);

/// Returns the host's wall clock, in nanoseconds.
pub fn wall_ns() -> u64 {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(now.as_nanos()).unwrap_or(u64::MAX)
}

/// Returns how long a guest that was saved at `saved_ns` has been away at `now_ns`, in nanoseconds;
/// 0 if the times are implausible.
pub fn away_ns(saved_ns: u64, now_ns: u64) -> u64 {
    let away = now_ns.saturating_sub(saved_ns);
    if u128::from(away) > LONGEST_AWAY.as_nanos() {
        tracing::warn!(
            "the host's clock and the clock at the save differ by more than an hour, so the \
             guest's clock does not advance: check the time of both hosts"
        );
        return 0;
    }
    away
}
