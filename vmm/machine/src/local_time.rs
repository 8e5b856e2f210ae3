//! Formats times for a person on this host.

/// Formats a time, in milliseconds since 1970, in the host's time zone: `2026-11-24 18:19:40`.
pub fn local_time(unix_ms: u64) -> String {
    // 64 bits of milliseconds are 54 bits of seconds.
    let seconds = (unix_ms / 1000) as i64;
    // SAFETY: all zeros are a `tm`: numbers, and a pointer that may be null.
    let mut tm: libc::tm = unsafe { std::mem::zeroed() };
    // SAFETY: both pointers are to values of this function, to which no other code has access.
    if unsafe { libc::localtime_r(&raw const seconds, &raw mut tm) }.is_null() {
        return format!("{seconds} s");
    }
    format!(
        "{:04}-{:02}-{:02} {:02}:{:02}:{:02}",
        i64::from(tm.tm_year) + 1900,
        tm.tm_mon + 1,
        tm.tm_mday,
        tm.tm_hour,
        tm.tm_min,
        tm.tm_sec
    )
}
