//! Bytes that wait to be written to a socket.

use std::io::{self, Write};

/// A queue of bytes. Its owner bounds it: it writes everything before it adds more.
#[derive(Debug, Default)]
pub(super) struct Outgoing {
    bytes: Vec<u8>,
    /// Bytes that are written already.
    written: usize,
    end: usize,
}

impl Outgoing {
    pub(super) fn is_empty(&self) -> bool {
        self.written == self.end
    }

    pub(super) fn len(&self) -> usize {
        self.end - self.written
    }

    /// Returns room for `length` bytes.
    pub(super) fn room(&mut self, length: usize) -> &mut [u8] {
        if self.is_empty() {
            (self.written, self.end) = (0, 0);
        }
        let needed = self.end + length;
        if self.bytes.len() < needed {
            self.bytes.resize(needed, 0);
        }
        &mut self.bytes[self.end..needed]
    }

    /// Adds the first `length` bytes of the room.
    pub(super) fn add(&mut self, length: usize) {
        self.end = (self.end + length).min(self.bytes.len());
    }

    /// Writes once. Returns `WouldBlock` if bytes are left, so that the caller can check its limits
    /// however slowly the peer reads; the next call continues.
    pub(super) fn write_to(&mut self, to: &mut impl Write) -> io::Result<()> {
        if self.is_empty() {
            return Ok(());
        }
        match to.write(&self.bytes[self.written..self.end])? {
            0 => return Err(io::ErrorKind::WriteZero.into()),
            n => self.written += n,
        }
        if self.is_empty() { Ok(()) } else { Err(io::ErrorKind::WouldBlock.into()) }
    }
}
