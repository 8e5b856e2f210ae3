//! Writes the header and the records of a file.

use std::io::{self, Write};

use driftline_dirty_tracker::Layout;
use driftline_format::{HEADER_LEN, Header, RECORD_HEAD_LEN, RecordHead};
use driftline_guest::{Section, SectionTag};

use crate::record_file::records::{End, TAG_END};
use crate::records::{Digest, TAG_LAYOUT, encode_layout};

/// The part of the file that is written.
pub(crate) struct RecordOutput<W> {
    out: W,
    digest: Digest,
    records: u32,
    bytes: u64,
}

impl<W: Write> RecordOutput<W> {
    /// Writes the header.
    pub(crate) fn new(out: W, header: &Header) -> io::Result<Self> {
        let mut new = Self { out, digest: Digest(header.checksum()), records: 0, bytes: 0 };
        let mut bytes = Vec::with_capacity(HEADER_LEN);
        header.write_to(&mut bytes)?;
        new.write(&bytes)?;
        Ok(new)
    }

    fn write(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.bytes += bytes.len() as u64;
        self.out.write_all(bytes)
    }

    /// Writes a record that a reader must understand.
    pub(crate) fn record(&mut self, tag: u16, instance: u16, payload: &[u8]) -> io::Result<()> {
        self.any_record(tag, instance, true, payload)
    }

    fn any_record(
        &mut self,
        tag: u16,
        instance: u16,
        must_understand: bool,
        payload: &[u8],
    ) -> io::Result<()> {
        let head = RecordHead {
            tag,
            must_understand,
            instance,
            // All payloads have limits far below 4 GiB.
            length: payload.len() as u32,
            payload_crc: crc32c::crc32c(payload),
            sequence: self.records,
        };
        let head: [u8; RECORD_HEAD_LEN] = head.to_bytes();
        self.digest.add(&head);
        self.records = self.records.checked_add(1).ok_or(io::ErrorKind::FileTooLarge)?;
        self.write(&head)?;
        self.write(payload)
    }

    /// Writes what the guest's machine is built from.
    pub(crate) fn machine(&mut self, layout: &Layout, config: &[u8]) -> io::Result<()> {
        self.record(TAG_LAYOUT, 0, &encode_layout(layout))?;
        self.record(SectionTag::CONFIG.0, 0, config)
    }

    /// Writes the guest's state.
    pub(crate) fn sections(&mut self, sections: &[Section]) -> io::Result<()> {
        sections
            .iter()
            .try_for_each(|s| self.any_record(s.tag.0, s.instance, s.must_understand, &s.bytes))
    }

    /// Writes the totals. Returns the number of bytes of the file.
    pub(crate) fn end(mut self, epoch: u64, frames: u64) -> io::Result<u64> {
        let records = self.records.checked_add(1).ok_or(io::ErrorKind::FileTooLarge)?;
        let end = End { epoch, frames, records, digest: self.digest };
        self.record(TAG_END, 0, &end.encode())?;
        Ok(self.bytes)
    }
}
