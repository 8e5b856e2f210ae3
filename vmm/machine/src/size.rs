//! Parses sizes as users write them.

use parse_size::{ByteSuffix, Config};

/// The forms of a size, as the end of a sentence that begins with "a size is".
pub const SIZE_FORMS: &str =
    "a number and K, M or G, or KiB, MiB or GiB (powers of two; not KB, MB or GB), such as 64M";

/// Returns the bytes of a size: a number, then nothing, or `K`, `M`, `G` and so on (powers of two),
/// each with or without `iB`. A unit such as `MB`, which others read as a power of ten, is refused.
pub fn parse_size(text: &str) -> Option<u64> {
    let text = text.strip_suffix('B').filter(|number| number.ends_with('i')).unwrap_or(text);
    let config = Config::new().with_binary().with_byte_suffix(ByteSuffix::Deny);
    config.parse_size(text).ok()
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
        assert_eq!(parse_size("64m"), Some(64 << 20));
        assert_eq!(parse_size("1.5G"), Some(3 << 29));
        for wrong in [
            "",
            "M",
            "MiB",
            "+1",
            "-1",
            "1,5G",
            "1.5.1G",
            "64MB",
            "64mb",
            "64B",
            "18446744073709551616",
            "17179869184G",
        ] {
            assert_eq!(parse_size(wrong), None, "{wrong}");
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
