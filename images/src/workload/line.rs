//! A line of output under construction, without the formatting machinery of `core`.

/// A line under construction. Text beyond the maximal length is dropped.
#[derive(Clone, Debug)]
pub struct LineBuffer {
    bytes: [u8; LineBuffer::CAPACITY],
    len: usize,
}

impl LineBuffer {
    /// The longest line, its newline included.
    pub const CAPACITY: usize = 256;

    /// Returns an empty line.
    pub fn new() -> Self {
        LineBuffer { bytes: [0; LineBuffer::CAPACITY], len: 0 }
    }

    /// Appends `text`.
    pub fn text(&mut self, text: &str) -> &mut Self {
        for &byte in text.as_bytes() {
            self.byte(byte);
        }
        self
    }

    /// Appends one byte.
    pub fn byte(&mut self, byte: u8) -> &mut Self {
        if let Some(place) = self.bytes.get_mut(self.len) {
            *place = byte;
            self.len += 1;
        }
        self
    }

    /// Appends `value` in decimal.
    pub fn number(&mut self, value: u64) -> &mut Self {
        self.digits(value, 10)
    }

    /// Appends `value` in hexadecimal, with `0x`.
    pub fn hex(&mut self, value: u64) -> &mut Self {
        self.text("0x").digits(value, 16)
    }

    /// Appends `key=value` and a space before it.
    pub fn field(&mut self, key: &str, value: u64) -> &mut Self {
        self.byte(b' ').text(key).byte(b'=').number(value)
    }

    /// Returns the bytes so far.
    pub fn as_bytes(&self) -> &[u8] {
        self.bytes.get(..self.len).unwrap_or(&[])
    }

    fn digits(&mut self, value: u64, radix: u64) -> &mut Self {
        let mut unit = 1;
        while value / unit >= radix {
            unit *= radix;
        }
        while unit > 0 {
            let digit = (value / unit % radix) as u8;
            self.byte(if digit < 10 { b'0' + digit } else { b'a' + digit - 10 });
            unit /= radix;
        }
        self
    }
}

impl Default for LineBuffer {
    fn default() -> Self {
        LineBuffer::new()
    }
}
