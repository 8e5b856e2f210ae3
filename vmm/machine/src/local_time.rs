//! Formats times for a person on this host.

use std::time::{SystemTime, UNIX_EPOCH};

/// Formats a time, in milliseconds since 1970, in the host's time zone: `2026-11-24 18:19:40`.
pub fn local_time(unix_ms: u64) -> String {
    // 64 bits of milliseconds are 54 bits of seconds.
    let seconds = (unix_ms / 1000) as i64;
    calendar(seconds).map_or_else(|| format!("{seconds} s"), |tm| date_and_time(&tm, ' '))
}

/// Formats a time in the host's time zone to the nanosecond: `2026-11-24T18:19:40.000000001`. The C
/// library reads the time zone's file at the first call of the process only.
pub fn local_time_ns(time: SystemTime) -> String {
    // A clock before 1970 has no correct time.
    let since = time.duration_since(UNIX_EPOCH).unwrap_or_default();
    let seconds = i64::try_from(since.as_secs()).unwrap_or(i64::MAX);
    let nanoseconds = since.subsec_nanos();
    let whole = calendar(seconds).map_or_else(|| seconds.to_string(), |tm| date_and_time(&tm, 'T'));
    format!("{whole}.{nanoseconds:09}")
}

/// Returns the difference of the host's time zone to UTC, in seconds; 0 if it is unknown. Signal
/// handlers must not ask for it.
pub(crate) fn utc_offset() -> i64 {
    let now = SystemTime::now().duration_since(UNIX_EPOCH);
    let seconds = now.map_or(0, |since| since.as_secs().cast_signed());
    calendar(seconds).map_or(0, |tm| tm.tm_gmtoff)
}

/// Formats a date and a time of day to the second, with `separator` between them.
fn date_and_time(tm: &libc::tm, separator: char) -> String {
    format!(
        "{:04}-{:02}-{:02}{separator}{:02}:{:02}:{:02}",
        i64::from(tm.tm_year) + 1900,
        tm.tm_mon + 1,
        tm.tm_mday,
        tm.tm_hour,
        tm.tm_min,
        tm.tm_sec
    )
}

/// Returns the date and time of day of a time, in seconds since 1970, in the host's time zone.
fn calendar(seconds: i64) -> Option<libc::tm> {
    // SAFETY: all zeros are a `tm`: numbers, and a pointer that may be null.
    let mut tm: libc::tm = unsafe { std::mem::zeroed() };
    // SAFETY: both pointers are to values of this function, to which no other code has access.
    let result = unsafe { libc::localtime_r(&raw const seconds, &raw mut tm) };
    (!result.is_null()).then_some(tm)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn both_formats_name_the_same_second() {
        let time = UNIX_EPOCH + Duration::new(1_790_000_000, 7);
        let second = local_time(1_790_000_000_000).replace(' ', "T");
        assert_eq!(local_time_ns(time), format!("{second}.000000007"));
        assert_eq!(second.len(), "2026-11-24T18:19:40".len());
    }
}
