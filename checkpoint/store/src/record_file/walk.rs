//! Reads a file's records, one after the other. The file is untrusted: each length is checked
//! against a limit before it is used.

use std::io;
use std::path::Path;

use driftline_format::{RECORD_HEAD_LEN, RecordHead};

use crate::backend::StoreFile;
use crate::damage::Damage;
use crate::error::StoreError;
use crate::record_file::records::{End, TAG_END, decode_head, is_known};
use crate::records::{Digest, TAG_STORE};

/// Position at which a record begins, and what comes before it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RecordPosition {
    pub(crate) at: u64,
    /// Number of records before it.
    pub(crate) records: u32,
    pub(crate) digest: Digest,
}

/// A walk through a file, up to the end of the head that was read last.
pub(crate) struct RecordWalk<'f> {
    file: &'f dyn StoreFile,
    path: &'f Path,
    len: u64,
    /// Position of the next record.
    next: RecordPosition,
    /// Offset of the record that was read last, in bytes.
    record_at: u64,
}

impl<'f> RecordWalk<'f> {
    /// Begins a walk at the first byte of `file`, which is its header's. `path` is for messages.
    pub(crate) fn new(file: &'f dyn StoreFile, path: &'f Path) -> Result<Self, StoreError> {
        let len = file.len().map_err(|e| reading(path, e))?;
        let next = RecordPosition { at: 0, records: 0, digest: Digest(0) };
        Ok(Self { file, path, len, next, record_at: 0 })
    }

    /// Returns a walk through the same file that begins at another record.
    pub(crate) fn from(self, next: RecordPosition) -> Self {
        Self { next, record_at: next.at, ..self }
    }

    /// Returns the file's length in bytes, as it was when the walk began.
    pub(crate) fn len(&self) -> u64 {
        self.len
    }

    /// Returns the position of the next record.
    pub(crate) fn next(&self) -> RecordPosition {
        self.next
    }

    /// Returns the offset of the record that was read last, in bytes.
    pub(crate) fn record_at(&self) -> u64 {
        self.record_at
    }

    /// Returns an error for damage of the record that was read last.
    pub(crate) fn damaged(&self, damage: impl Into<Damage>) -> StoreError {
        let (file, damage) = (self.path.to_owned(), damage.into());
        StoreError::Damaged { file, offset: self.record_at, damage }
    }

    pub(crate) fn read(&self, at: u64, bytes: &mut [u8]) -> Result<(), StoreError> {
        if self.len.saturating_sub(at) < bytes.len() as u64 {
            return Err(self.ends_early(at, bytes.len() as u64));
        }
        self.file.read_exact_at(bytes, at).map_err(|e| match e.kind() {
            // Another process truncates the file while it is read.
            io::ErrorKind::UnexpectedEof => self.ends_early(at, bytes.len() as u64),
            _ => reading(self.path, e),
        })
    }

    fn ends_early(&self, at: u64, wanted: u64) -> StoreError {
        let damage = Damage::EndsEarly { length: self.len, wanted };
        StoreError::Damaged { file: self.path.to_owned(), offset: at, damage }
    }

    /// Returns the head of the next record that this program knows, or must know; the file has all
    /// of its payload. At the end of the file, returns the decoded end as well, after checking
    /// it against the records before it.
    pub(crate) fn head(
        &mut self,
        payload: &mut Vec<u8>,
    ) -> Result<(RecordHead, Option<End>), StoreError> {
        loop {
            let before = self.next;
            self.record_at = before.at;
            let mut bytes = [0; RECORD_HEAD_LEN];
            self.read(before.at, &mut bytes)?;
            let head = decode_head(&bytes, before.records).map_err(|e| self.damaged(e))?;
            let (from, length) = (before.at + RECORD_HEAD_LEN as u64, u64::from(head.length));
            if self.len - from < length {
                return Err(self.ends_early(from, length));
            }
            let Some(records) = before.records.checked_add(1) else {
                return Err(self.damaged(Damage::Misplaced { tag: head.tag }));
            };
            let mut digest = before.digest;
            digest.add(&bytes);
            self.next = RecordPosition { at: from + length, records, digest };
            if head.tag == TAG_END {
                self.payload(&head, payload)?;
                let end = End::decode(payload).map_err(|e| self.damaged(e))?;
                self.check_end(&end, before)?;
                return Ok((head, Some(end)));
            }
            // A record of a later version, which its writer allows readers to skip, is skipped.
            if head.tag < TAG_STORE || is_known(head.tag) || head.must_understand {
                return Ok((head, None));
            }
        }
    }

    fn check_end(&self, end: &End, before: RecordPosition) -> Result<(), StoreError> {
        let fields = [
            ("the number of records", end.records.into(), self.next.records.into()),
            ("the digest", end.digest.0.into(), before.digest.0.into()),
            ("the length of the file", self.len, self.next.at),
        ];
        match fields.into_iter().find(|(_, found, expected)| found != expected) {
            Some((what, found, expected)) => {
                Err(self.damaged(Damage::Mismatch { what, found, expected }))
            }
            None => Ok(()),
        }
    }

    /// Reads the payload of the record whose head was read last, and checks it. Takes as much
    /// memory as the limit of the head allows.
    pub(crate) fn payload(
        &self,
        head: &RecordHead,
        payload: &mut Vec<u8>,
    ) -> Result<(), StoreError> {
        payload.clear();
        payload.resize(head.length as usize, 0);
        self.read(self.record_at + RECORD_HEAD_LEN as u64, payload)?;
        head.check(payload).map_err(|e| self.damaged(e))
    }
}

pub(crate) fn reading(path: &Path, cause: io::Error) -> StoreError {
    StoreError::Io { what: "reading", path: path.to_owned(), cause }
}
