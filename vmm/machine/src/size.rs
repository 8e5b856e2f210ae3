//! Parses sizes as users write them.

/// Returns the bytes of a size: digits, then nothing, `K`, `M` or `G` (powers of two).
pub fn parse_size(text: &str) -> Option<u64> {
    let (digits, shift) = match text.strip_suffix(['K', 'M', 'G']) {
        Some(digits) if text.ends_with('K') => (digits, 10),
        Some(digits) if text.ends_with('M') => (digits, 20),
        Some(digits) => (digits, 30),
        None => (text, 0),
    };
    if digits.is_empty() || !digits.bytes().all(|b| b.is_ascii_digit()) {
        return None;
    }
    digits.parse::<u64>().ok()?.checked_mul(1 << shift)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_size_is_digits_and_a_unit() {
        assert_eq!(parse_size("4096"), Some(4096));
        assert_eq!(parse_size("3K"), Some(3 << 10));
        assert_eq!(parse_size("64M"), Some(64 << 20));
        assert_eq!(parse_size("16G"), Some(16 << 30));
        for wrong in
            ["", "M", "+1", "-1", "1.5G", "64MB", "1k", "18446744073709551616", "17179869184G"]
        {
            assert_eq!(parse_size(wrong), None, "{wrong}");
        }
    }
}
