//! Boundaries of TLS records in the bytes of a connection, and the number of records that were sent
//! with the same keys.

#[cfg(test)]
use std::cell::Cell;

/// Bytes of a record's head: type, version, and length of the rest.
const HEAD: usize = 5;

/// Upper bound on the plaintext of one record.
pub(super) const MAX_PLAINTEXT: u64 = 16 << 10;

/// Records after which a source makes new keys at the end of a pass. AES-GCM keys last for 2^24
/// records.
const REFRESH_AFTER: u64 = 3 << 22;

/// Upper bound on the records of a kernel session, whose keys cannot change. The count may miss
/// records that the kernel cuts short for lack of memory, for which an eighth of what the keys
/// allow is left.
const MOST_IN_THE_KERNEL: u64 = 7 << 21;

#[cfg(test)]
thread_local! {
    /// Whether keys of sessions that this thread begins and uses change at each opportunity.
    pub(super) static SHORT_LIVED_KEYS: Cell<bool> = const { Cell::new(false) };
}

/// Whether a test needs keys that change at each opportunity. A transfer after which they change
/// otherwise takes minutes.
pub(super) fn keys_are_short_lived() -> bool {
    #[cfg(test)]
    return SHORT_LIVED_KEYS.get();
    #[cfg(not(test))]
    return false;
}

/// Finds how many bytes to read from a socket, to read the current record and nothing behind it.
#[derive(Debug, Default)]
pub(super) struct RecordBoundary {
    head: [u8; HEAD],
    /// Bytes of the head that were read.
    read: usize,
    /// Bytes of the record that are missing behind its head.
    left: usize,
}

/// An upper bound on the records that were sent with the current keys.
#[derive(Debug, Default)]
pub(super) struct SentRecords {
    bytes: u64,
    /// Writes that have ended a record, full or not.
    writes: u64,
}

impl RecordBoundary {
    /// Returns the number of bytes that surely belong to the current record. Never 0.
    pub(super) fn missing(&self) -> usize {
        if self.read < HEAD { HEAD - self.read } else { self.left }
    }

    /// Notes the next bytes, at most as many as are [missing](Self::missing).
    pub(super) fn advance(&mut self, bytes: &[u8]) {
        if self.read < HEAD {
            let length = bytes.len().min(HEAD - self.read);
            self.head[self.read..self.read + length].copy_from_slice(&bytes[..length]);
            self.read += length;
            self.left = usize::from(u16::from_be_bytes([self.head[3], self.head[4]]));
        } else {
            self.left = self.left.saturating_sub(bytes.len());
        }
        if self.read == HEAD && self.left == 0 {
            *self = Self::default();
        }
    }
}

impl SentRecords {
    /// Notes one write of `bytes`, which ends its last record.
    pub(super) fn add(&mut self, bytes: usize) {
        self.writes += 1;
        self.add_more(bytes);
    }

    /// Notes one write of `bytes`, whose last record is left open for the next write.
    pub(super) fn add_more(&mut self, bytes: usize) {
        self.bytes += bytes as u64;
    }

    /// Each record is full, or was ended by a write.
    fn count(&self) -> u64 {
        self.bytes / MAX_PLAINTEXT + self.writes
    }

    /// Whether new keys are worth their message at the end of a pass.
    pub(super) fn are_many(&self) -> bool {
        self.count() >= if keys_are_short_lived() { 1 } else { REFRESH_AFTER }
    }

    /// Whether no more may be sent by the kernel.
    pub(super) fn are_too_many(&self) -> bool {
        self.count() >= MOST_IN_THE_KERNEL
    }

    /// Notes that the keys are new.
    pub(super) fn reset(&mut self) {
        *self = Self::default();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Reads `stream` in pieces of at most `piece` bytes, and returns where records ended.
    fn ends(stream: &[u8], piece: usize) -> Vec<usize> {
        let (mut boundary, mut at, mut ends) = (RecordBoundary::default(), 0, Vec::new());
        while at < stream.len() {
            let length = boundary.missing().min(piece).min(stream.len() - at);
            assert!(length > 0);
            boundary.advance(&stream[at..at + length]);
            at += length;
            if boundary.read == 0 {
                ends.push(at);
            }
        }
        ends
    }

    #[test]
    fn records_are_read_to_their_ends() {
        let mut stream = vec![22, 3, 3, 1, 2];
        stream.extend([7; 0x102]);
        stream.extend([20, 3, 3, 0, 1, 1]);
        stream.extend([22, 3, 3, 0, 0]);
        stream.extend([23, 3, 3, 0, 9, 0]);
        for piece in [1, 2, 4, 5, 6, 100, 1000] {
            assert_eq!(ends(&stream, piece), [263, 269, 274], "{piece}");
        }
    }

    #[test]
    fn records_are_counted_by_writes_and_bytes() {
        let mut sent = SentRecords::default();
        sent.add(1);
        sent.add(MAX_PLAINTEXT as usize - 1);
        sent.add(128 << 10);
        assert_eq!(sent.count(), 3 + 9);
        sent.add_more(16);
        sent.add(4096);
        assert_eq!(sent.count(), 4 + 9);
        sent.reset();
        sent.add((192 << 30) - (32 << 10));
        assert!(!sent.are_many() && !sent.are_too_many());
        sent.add(16 << 10);
        assert!(sent.are_many() && !sent.are_too_many());
        sent.add(32 << 30);
        assert!(sent.are_too_many());
        sent.reset();
        assert!(!sent.are_many());
    }
}
