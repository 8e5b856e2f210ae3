//! Text on the stack, for signal handlers, which must not allocate.

use std::fmt::Write;

/// Text of at most `N` bytes. Text that does not fit is dropped.
pub(crate) struct StackText<const N: usize> {
    bytes: [u8; N],
    len: usize,
}

impl<const N: usize> StackText<N> {
    pub(crate) fn new() -> Self {
        Self { bytes: [0; N], len: 0 }
    }

    pub(crate) fn as_bytes(&self) -> &[u8] {
        self.bytes.get(..self.len).unwrap_or_default()
    }
}

impl<const N: usize> Write for StackText<N> {
    fn write_str(&mut self, text: &str) -> std::fmt::Result {
        let room = self.bytes.get_mut(self.len..).unwrap_or_default();
        for (to, from) in room.iter_mut().zip(text.bytes()) {
            *to = from;
            self.len += 1;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_that_does_not_fit_is_dropped() {
        let mut text = StackText::<5>::new();
        write!(text, "{}-{}", 12, 3456).unwrap();
        assert_eq!(text.as_bytes(), b"12-34");
    }
}
