//! Formats figures for people: times, sizes, percentages.

/// Formats a time.
pub(super) fn us(us: f64) -> String {
    match us {
        us if us >= 99_950.0 => format!("{:.0} ms", us / 1e3),
        us if us >= 999.5 => format!("{:.1} ms", us / 1e3),
        us if us >= 99.95 => format!("{us:.0} us"),
        us => format!("{us:.1} us"),
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
