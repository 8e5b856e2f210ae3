//! The host's time of day, by which a guest's clock advances while the guest is stored or moves.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use driftline_guest::Clock;

/// The longest plausible downtime of a migration. A longer one means that the hosts' clocks
/// disagree.
const LONGEST_DOWNTIME: Duration = Duration::from_secs(3600);

/// Returns the host's wall clock, in nanoseconds.
pub fn wall_ns() -> u64 {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(now.as_nanos()).unwrap_or(u64::MAX)
}

/// Returns the nanoseconds by which the clock of a guest that was saved at `saved_ns` advances if
/// the guest is restored at `now_ns`.
pub fn advance_ns(clock: Clock, saved_ns: u64, now_ns: u64) -> u64 {
    let away = now_ns.saturating_sub(saved_ns);
    match clock {
        Clock::Continue => 0,
        Clock::Advance if u128::from(away) > LONGEST_DOWNTIME.as_nanos() => {
            tracing::warn!(
                "the host's clock and the clock at the save differ by more than an hour, so the \
                 guest's clock does not advance: check the time of both hosts"
            );
            0
        }
        Clock::Advance | Clock::AdvanceAnyTime => away,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_snapshots_clock_advances_by_hours() {
        let hour = 3_600_000_000_000;
        for (clock, after_one, after_two) in [
            (Clock::Advance, hour, 0),
            (Clock::AdvanceAnyTime, hour, 2 * hour),
            (Clock::Continue, 0, 0),
        ] {
            assert_eq!(advance_ns(clock, 5, 5 + hour), after_one, "{clock:?}");
            assert_eq!(advance_ns(clock, 5, 5 + 2 * hour), after_two, "{clock:?}");
            assert_eq!(advance_ns(clock, 5, 4), 0, "{clock:?}");
        }
    }
}
