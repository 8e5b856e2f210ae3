//! Parses sizes as users write them.

/// The forms of a size, as the end of a sentence that begins with "a size is".
pub const SIZE_FORMS: &str = "a number of bytes, or a number with K, M, G or T, or with KiB, \
                              MiB, GiB or TiB (powers of two; not KB, MB or GB), such as 64M";

/// Returns the bytes of a size: digits, perhaps with a fraction, then nothing or `K`, `M`, `G` or
/// `T` (powers of two), each perhaps with `i` or `iB`. A unit such as `MB`, which others read as a
/// power of ten, is refused, and so is a fraction that is not a whole number of bytes.
pub fn parse_size(text: &str) -> Option<u64> {
    let is_number = |c: char| c.is_ascii_digit() || c == '.';
    let (number, unit) = text.split_at(text.find(|c| !is_number(c)).unwrap_or(text.len()));
    let shift = match unit {
        "" => 0,
        "K" | "Ki" | "KiB" => 10,
        "M" | "Mi" | "MiB" => 20,
        "G" | "Gi" | "GiB" => 30,
        "T" | "Ti" | "TiB" => 40,
        _ => return None,
    };
    let (whole, fraction) = number.split_once('.').unwrap_or((number, "0"));
    let (whole, parts): (u128, u128) = (whole.parse().ok()?, fraction.parse().ok()?);
    let scale = 10_u128.checked_pow(fraction.len().try_into().ok()?)?;
    let scaled = whole.checked_mul(scale)?.checked_add(parts)?.checked_mul(1 << shift)?;
    scaled.is_multiple_of(scale).then(|| u64::try_from(scaled / scale).ok())?
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_size_is_a_number_and_a_unit() {
        assert_eq!(parse_size("4096"), Some(4096));
        assert_eq!(parse_size("3K"), Some(3 << 10));
        assert_eq!(parse_size("64M"), Some(64 << 20));
        assert_eq!(parse_size("16G"), Some(16 << 30));
        assert_eq!(parse_size("64MiB"), Some(64 << 20));
        assert_eq!(parse_size("1.5G"), Some(3 << 29));
        assert_eq!(parse_size("0.50KiB"), Some(512));
        assert_eq!(parse_size("18446744073709551615"), Some(u64::MAX));
        assert_eq!(parse_size("16777215.5T"), Some(33_554_431 << 39));
    }

    #[test]
    fn other_forms_of_a_size_are_refused() {
        for wrong in [
            "", "M", "MiB", ".", ".5G", "1.G", "+1", "-1", "1,5G", "1.5.1G", "1.+5G", " 1", "1 M",
            "64MB", "64mb", "64B", "64b", "64i", "64iB", "64m", "64mib", "64miB", "64MIB", "64Mib",
            "1e", "1E", "1e3", "1P", "1_0 0M", "1_000", "1.5", "0.0001K", "0.1M", "٣K", "1MM",
        ] {
            assert_eq!(parse_size(wrong), None, "{wrong}");
        }
        let long = format!("0.{}", "0".repeat(64 << 10));
        for large in ["18446744073709551616", "17179869184G", "16777216T", &long] {
            assert_eq!(parse_size(large), None, "{large}");
        }
    }

    #[test]
    fn units_are_powers_of_two_in_every_form() {
        for (unit, shift) in [('K', 10), ('M', 20), ('G', 30), ('T', 40)] {
            for text in [format!("3{unit}"), format!("3{unit}i"), format!("3{unit}iB")] {
                assert_eq!(parse_size(&text), Some(3 << shift), "{text}");
            }
            assert_eq!(parse_size(&format!("3{unit}B")), None, "{unit}B");
        }
    }
}
