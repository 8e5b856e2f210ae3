//! Records over a byte stream: sequence numbers, bounds, checksums.
//!
//! Generic over the stream, so that tests, tools and the fuzzer read the same way as a socket is
//! read. One buffer for the payload, reused, grown to what a message of a known tag may have.

use std::io::{self, IoSlice, Read, Write};

use checkpoint::VmId;
use checkpoint::format::{
    FormatError, HEADER_LEN, Header, MAGIC_STREAM, RECORD_HEAD_LEN, RecordHead,
};
use uuid::Uuid;

use crate::error::WireError;
use crate::link::Link;
use crate::message::{Message, Tag, clip};

/// Most payload bytes of a record of an unknown tag that may be skipped.
const MAX_SKIPPED: u32 = 64 << 10;

/// Most records of unknown tags that may be skipped between two messages.
const MAX_SKIPPED_RECORDS: u64 = 16;

/// Both directions of one connection.
#[derive(Debug)]
pub(crate) struct Wire<S> {
    stream: S,
    next_out: u32,
    next_in: u32,
    payload: Vec<u8>,
    sent_bytes: u64,
    received_bytes: u64,
    /// A write failed half-way: nothing that follows would be read as a record.
    torn: bool,
}

impl<S> Wire<S> {
    pub(crate) fn new(stream: S) -> Self {
        let payload = Vec::new();
        Self {
            stream,
            next_out: 0,
            next_in: 0,
            payload,
            sent_bytes: 0,
            received_bytes: 0,
            torn: false,
        }
    }

    pub(crate) fn stream(&self) -> &S {
        &self.stream
    }

    pub(crate) fn stream_mut(&mut self) -> &mut S {
        &mut self.stream
    }

    /// Everything written, heads included.
    pub(crate) fn sent_bytes(&self) -> u64 {
        self.sent_bytes
    }

    /// Everything read, heads included.
    pub(crate) fn received_bytes(&self) -> u64 {
        self.received_bytes
    }
}

impl<S: Write> Wire<S> {
    /// Opens this side of the conversation. A destination knows no guest yet: nil and 0.
    pub(crate) fn send_header(&mut self, guest: Option<(VmId, u32)>) -> Result<(), WireError> {
        let (vm_id, layout) = guest.unwrap_or((VmId(Uuid::nil()), 0));
        Header::new(MAGIC_STREAM, vm_id, 0, layout).write_to(&mut self.stream)?;
        self.sent_bytes += HEADER_LEN as u64;
        Ok(())
    }

    /// Sends a small message.
    pub(crate) fn send(&mut self, message: &Message<'_>) -> Result<(), WireError> {
        self.send_parts(message.tag(), &[&message.to_bytes()])
    }

    /// Sends a message whose payload lies in pieces, without joining them first. The pieces must not
    /// change meanwhile: the checksum goes before them.
    pub(crate) fn send_parts(&mut self, tag: Tag, parts: &[&[u8]]) -> Result<(), WireError> {
        let length: usize = parts.iter().map(|p| p.len()).sum();
        debug_assert!(length <= tag.limit() as usize, "{} of {length} bytes", tag.name());
        let head = RecordHead {
            tag: tag as u16,
            must_understand: true,
            instance: 0,
            length: length as u32,
            payload_crc: parts.iter().fold(0, |crc, p| crc32c::crc32c_append(crc, p)),
            sequence: self.next_out,
        }
        .to_bytes();
        let mut slices: Vec<IoSlice<'_>> = Vec::with_capacity(parts.len() + 1);
        slices.push(IoSlice::new(&head));
        slices.extend(parts.iter().map(|p| IoSlice::new(p)));
        self.torn = true;
        write_all_slices(&mut self.stream, &mut slices)?;
        self.torn = false;
        self.next_out = self.next_out.wrapping_add(1);
        self.sent_bytes += (RECORD_HEAD_LEN + length) as u64;
        Ok(())
    }
}

impl Wire<Link> {
    /// Last words: tells the peer that it ends here, if a record can still be written, and hangs up.
    /// Takes at most about two seconds, whatever was requested to stop.
    pub(crate) fn abort(&mut self, tag: Tag, reason: &str) {
        self.stream.begin_last_words();
        if !self.torn {
            // The peer may be gone; then it needs no reason.
            let _ = self.send_parts(tag, &[clip(reason).as_bytes()]);
        }
        self.stream.hang_up();
    }

    /// After a failed write: what the peer said before it went, if it did.
    pub(crate) fn last_words(&mut self) -> Option<WireError> {
        self.stream.begin_last_words();
        match self.recv() {
            Err(e @ (WireError::Aborted { .. } | WireError::Refused { .. })) => Some(e),
            _ => None,
        }
    }
}

fn write_all_slices(w: &mut impl Write, mut slices: &mut [IoSlice<'_>]) -> io::Result<()> {
    IoSlice::advance_slices(&mut slices, 0);
    while !slices.is_empty() {
        let n = w.write_vectored(slices)?;
        IoSlice::advance_slices(&mut slices, n);
    }
    Ok(())
}

impl<S: Read> Wire<S> {
    /// Reads the peer's header; refuses strangers, other versions and unknown required features.
    pub(crate) fn recv_header(&mut self) -> Result<Header, WireError> {
        let header = Header::read_from(&mut self.stream, MAGIC_STREAM)?;
        self.received_bytes += HEADER_LEN as u64;
        Ok(header)
    }

    /// The next message. Records of unknown tags that need not be understood are skipped. REFUSED
    /// and ABORT come back as errors: they end the conversation wherever they stand.
    pub(crate) fn recv(&mut self) -> Result<Message<'_>, WireError> {
        let mut skipped = 0;
        let (tag, length) = loop {
            let head = RecordHead::read_from(&mut self.stream, self.next_in)?;
            let tag = Tag::from_number(head.tag);
            if tag.is_none() && head.must_understand {
                return Err(WireError::UnknownTag { tag: head.tag });
            }
            let head = head.bounded(tag.map_or(MAX_SKIPPED, Tag::limit))?;
            let length = head.length as usize;
            if self.payload.len() < length {
                self.payload.resize(length, 0);
            }
            self.stream.read_exact(&mut self.payload[..length]).map_err(FormatError::Io)?;
            head.check(&self.payload[..length])?;
            self.next_in = self.next_in.wrapping_add(1);
            self.received_bytes += (RECORD_HEAD_LEN + length) as u64;
            if let Some(tag) = tag {
                break (tag, length);
            }
            skipped += 1;
            if skipped > MAX_SKIPPED_RECORDS {
                let (found, limit) = (skipped, MAX_SKIPPED_RECORDS);
                return Err(WireError::TooMany { what: "unknown records in a row", found, limit });
            }
        };
        match Message::parse(tag, &self.payload[..length])? {
            Message::Refused { reason } => Err(WireError::Refused { reason: reason.to_owned() }),
            Message::Abort { reason } => Err(WireError::Aborted { reason: reason.to_owned() }),
            message => Ok(message),
        }
    }
}

/// `found` came where something else should have.
pub(crate) fn unexpected(found: &Message<'_>, expected: &'static str) -> WireError {
    WireError::Unexpected { found: found.tag(), expected }
}
