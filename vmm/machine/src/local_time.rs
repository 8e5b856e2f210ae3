//! Owns moments as a person on this host reads them.

/// A moment, in milliseconds since 1970, by the host's time zone: `2026-11-24 18:19:40`.
pub fn local_time(unix_ms: u64) -> String {
    // Milliseconds of 64 bits are seconds of 54.
    let seconds = (unix_ms / 1000) as libc::time_t;
    // SAFETY: all zeros are a `tm`: numbers, and a pointer that may be null.
    let mut tm: libc::tm = unsafe { std::mem::zeroed() };
    // SAFETY: both pointers are to values of this function, which nobody else has.
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
