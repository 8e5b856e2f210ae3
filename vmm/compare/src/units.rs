//! Formats figures for people: times, sizes, percentages.

/// Formats a time, given in microseconds.
pub(super) fn us(us: f64) -> String {
    match us {
        us if us >= 99_950.0 => format!("{:.0} ms", us / 1e3),
        us if us >= 999.5 => format!("{:.1} ms", us / 1e3),
        us if us >= 99.95 => format!("{us:.0} µs"),
        us => format!("{us:.1} µs"),
    }
}

/// Formats a number of microseconds, percent or the like, without its unit, for a table whose head
/// has the unit.
pub(super) fn number(value: f64) -> String {
    match value {
        value if value.abs() < 0.05 => "0".to_owned(),
        value if value.abs() < 99.95 => format!("{value:.1}"),
        value => format!("{value:.0}"),
    }
}

/// Formats how much faster or slower something is: a factor of at least 1.
pub(super) fn factor(times: f64) -> String {
    match times {
        times if times < 9.95 => format!("{times:.1}"),
        times => format!("{times:.0}"),
    }
}

/// Formats a percentage.
pub(super) fn percent(value: f64) -> String {
    // Rounding must not produce "-0.0".
    format!("{:.1} %", if value.abs() < 0.05 { 0.0 } else { value })
}

/// Formats a size in powers of two.
pub(super) fn size(bytes: u64) -> String {
    let units = [("TiB", 40), ("GiB", 30), ("MiB", 20), ("KiB", 10)];
    match units.into_iter().find(|(_, shift)| bytes >= 1 << shift) {
        None => format!("{bytes} B"),
        Some((unit, shift)) if bytes.is_multiple_of(1 << shift) => {
            format!("{} {unit}", bytes >> shift)
        }
        Some((unit, shift)) => format!("{:.1} {unit}", bytes as f64 / (1u64 << shift) as f64),
    }
}
