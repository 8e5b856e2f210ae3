//! Records over a byte stream, with sequence numbers, bounds and checksums.
//!
//! Generic over the stream, so that tests, tools and the fuzzer share the code with a socket. One
//! reused buffer holds payloads. It grows at most to the bound of a known tag.

mod descriptors;

use std::io::{self, IoSlice, Read, Write};
use std::iter;
use std::time::{Duration, Instant};

use driftline_dirty_tracker::FrameRun;
use driftline_format::{
    FormatError, HEADER_LEN, Header, MAGIC_STREAM, RECORD_HEAD_LEN, RecordHead,
};
use driftline_guest::{GuestRam, VmId};
use uuid::Uuid;
use vm_memory::{GuestAddress, GuestMemoryBackend};
use zerocopy::IntoBytes;

use super::error::TransportError;
use super::link::Link;
use super::tls::TlsError;
use crate::protocol::error::WireError;
use crate::protocol::message::{RawRun, WireMessage, clip, printable};
use crate::protocol::tag::Tag;

/// Upper bound on the payload bytes of a skipped record with an unknown tag.
const MAX_SKIPPED: u32 = 64 << 10;

/// Most parts that the kernel takes in one call (`UIO_MAXIOV`).
const MAX_SLICES: usize = 1024;

/// Upper bound on skipped records with unknown tags between two messages.
const MAX_SKIPPED_RECORDS: u64 = 16;

/// Upper bound on waiting for a peer's reason after another connection failed.
const PENDING_LIMIT: Duration = Duration::from_millis(500);

/// Both directions of one connection.
#[derive(Debug)]
pub(crate) struct Wire<S> {
    stream: S,
    next_out: u32,
    next_in: u32,
    payload: Vec<u8>,
    sent_bytes: u64,
    received_bytes: u64,
    /// Bytes of the last message's content that have not been read yet.
    content: usize,
    /// Whether reading failed within a record. The bytes that follow do not begin with a record.
    out_of_step: bool,
    /// Whether a write failed within a record. The peer cannot read later records.
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
            content: 0,
            out_of_step: false,
            torn: false,
        }
    }

    pub(crate) fn stream(&self) -> &S {
        &self.stream
    }

    pub(crate) fn stream_mut(&mut self) -> &mut S {
        &mut self.stream
    }

    /// Returns the bytes written, including headers.
    pub(crate) fn sent_bytes(&self) -> u64 {
        self.sent_bytes
    }

    /// Returns the bytes read, including headers.
    pub(crate) fn received_bytes(&self) -> u64 {
        self.received_bytes
    }
}

impl<S: Write> Wire<S> {
    /// Sends this side's header. A destination has no guest yet, and sends a nil id and layout 0.
    pub(crate) fn send_header(&mut self, guest: Option<(VmId, u32)>) -> Result<(), WireError> {
        let (vm_id, layout) = guest.unwrap_or((VmId(Uuid::nil()), 0));
        Header::new(MAGIC_STREAM, vm_id, 0, layout).write_to(&mut self.stream)?;
        self.sent_bytes += HEADER_LEN as u64;
        Ok(())
    }

    /// Sends a small message.
    pub(crate) fn send(&mut self, message: &WireMessage<'_>) -> Result<(), WireError> {
        self.send_parts(message.tag(), &[&message.to_bytes()])
    }

    /// Sends a message whose payload is in several parts, without copying them. The parts must not
    /// change meanwhile, because the checksum precedes them.
    pub(crate) fn send_parts(&mut self, tag: Tag, parts: &[&[u8]]) -> Result<(), WireError> {
        self.send_records(&[(tag, parts)])
    }

    /// Sends messages as [`send_parts`](Self::send_parts) sends one, and writes them together: each
    /// call takes microseconds of a downtime.
    pub(crate) fn send_records<'p>(
        &mut self,
        records: &[(Tag, impl AsRef<[&'p [u8]]>)],
    ) -> Result<(), WireError> {
        let (mut heads, mut bytes) = (Vec::with_capacity(records.len()), 0);
        // Numbers are taken only by records that are written: after a failure that wrote nothing,
        // ABORT has the first of them.
        let mut sequence = self.next_out;
        for (tag, parts) in records.iter().map(|(tag, parts)| (*tag, parts.as_ref())) {
            let length: usize = parts.iter().map(|p| p.len()).sum();
            heads.push(head(sequence, tag, length, parts));
            sequence = sequence.wrapping_add(1);
            bytes += (RECORD_HEAD_LEN + length) as u64;
        }
        let slices = heads.iter().zip(records).flat_map(|(head, (_, parts))| {
            iter::once(&head[..]).chain(parts.as_ref().iter().copied()).map(IoSlice::new)
        });
        let mut slices: Vec<IoSlice<'_>> = slices.collect();
        write_all_slices(&mut self.stream, &mut slices, &mut self.torn)?;
        self.next_out = sequence;
        self.sent_bytes += bytes;
        Ok(())
    }
}

/// Returns the head of record `sequence`, with a checksum over `parts`.
fn head(sequence: u32, tag: Tag, length: usize, parts: &[&[u8]]) -> [u8; RECORD_HEAD_LEN] {
    debug_assert!(length <= tag.limit() as usize, "{} of {length} bytes", tag.name());
    RecordHead {
        tag: tag as u16,
        must_understand: true,
        instance: 0,
        length: length as u32,
        payload_crc: parts.iter().fold(0, |crc, p| crc32c::crc32c_append(crc, p)),
        sequence,
    }
    .to_bytes()
}

impl Wire<Link> {
    /// Sends a run of frames straight from guest memory. They have no checksum, because the guest
    /// may write them meanwhile.
    pub(crate) fn send_frames(
        &mut self,
        ram: &GuestRam,
        run: FrameRun,
    ) -> Result<(), TransportError> {
        let table = RawRun::from(run);
        let length = table.as_bytes().len() + run.bytes() as usize;
        let head = head(self.next_out, Tag::Frames, length, &[table.as_bytes()]);
        let mut start = [0; RECORD_HEAD_LEN + size_of::<RawRun>()];
        start[..RECORD_HEAD_LEN].copy_from_slice(&head);
        start[RECORD_HEAD_LEN..].copy_from_slice(table.as_bytes());
        self.stream.write_all_more(&start, &mut self.torn).map_err(WireError::from)?;
        for slice in ram.get_slices(GuestAddress(run.start.gpa()), run.bytes() as usize) {
            let slice = slice.map_err(memory("reading guest memory"))?;
            self.stream.write_all_volatile(&slice).map_err(WireError::from)?;
        }
        self.torn = false;
        self.next_out = self.next_out.wrapping_add(1);
        self.sent_bytes += (RECORD_HEAD_LEN + length) as u64;
        Ok(())
    }

    /// Reads the content of the FRAMES that [`recv`](Self::recv) has just returned straight into
    /// guest memory.
    pub(crate) fn recv_frames(
        &mut self,
        ram: &GuestRam,
        run: FrameRun,
    ) -> Result<(), TransportError> {
        let length = std::mem::take(&mut self.content);
        debug_assert_eq!(length as u64, run.bytes());
        self.out_of_step = true;
        for slice in ram.get_slices(GuestAddress(run.start.gpa()), length) {
            let slice = slice.map_err(memory("writing guest memory"))?;
            self.stream.read_exact_volatile(&slice).map_err(WireError::from)?;
        }
        self.out_of_step = false;
        self.received_bytes += length as u64;
        Ok(())
    }

    /// Sends the peer a reason, if a record can still be written, and closes the connection. Takes
    /// at most about two seconds, and ignores stop requests.
    pub(crate) fn abort(&mut self, tag: Tag, reason: &str) {
        self.stream.begin_closing();
        if !self.torn && !self.stream.is_torn() {
            // Closing continues even if the reason cannot be sent.
            let _ = self.send_parts(tag, &[clip(reason).as_bytes()]);
        }
        self.stream.hang_up();
    }

    /// Returns the reason of a peer that gives up, if it arrives within [`PENDING_LIMIT`].
    pub(crate) fn pending_abort(&mut self) -> Option<WireError> {
        self.stream.set_deadline(Some(Instant::now() + PENDING_LIMIT));
        let reason = self.read_abort();
        self.stream.set_deadline(None);
        reason
    }

    /// Begins to close, and returns the reason that the peer sent before a write to it failed, if
    /// it sent one.
    pub(crate) fn closing_abort(&mut self) -> Option<WireError> {
        self.stream.begin_closing();
        self.read_abort()
    }

    /// Reads up to the peer's ABORT or REFUSED, and discards messages before it.
    fn read_abort(&mut self) -> Option<WireError> {
        while !self.out_of_step {
            if self.content > 0 {
                self.recv_content().ok()?;
            }
            match self.recv() {
                Ok(_) => {}
                Err(e @ (WireError::Aborted { .. } | WireError::Refused { .. })) => return Some(e),
                Err(_) => return None,
            }
        }
        None
    }
}

fn memory(what: &'static str) -> impl Fn(vm_memory::GuestMemoryError) -> TransportError {
    move |cause| TransportError::Memory { what, cause }
}

/// Writes all slices. Sets `torn` while only a part of them has been written.
fn write_all_slices(
    w: &mut impl Write,
    mut slices: &mut [IoSlice<'_>],
    torn: &mut bool,
) -> io::Result<()> {
    IoSlice::advance_slices(&mut slices, 0);
    while !slices.is_empty() {
        let n = w.write_vectored(&slices[..slices.len().min(MAX_SLICES)])?;
        *torn = true;
        IoSlice::advance_slices(&mut slices, n);
    }
    *torn = false;
    Ok(())
}

impl<S: Read> Wire<S> {
    /// Reads the peer's header. Fails for other formats, other versions and unknown required
    /// features.
    pub(crate) fn recv_header(&mut self) -> Result<Header, WireError> {
        let header = match Header::read_from(&mut self.stream, MAGIC_STREAM) {
            // A TLS record of a handshake, or of an alert.
            Err(FormatError::Magic { found: [22 | 21, 3, ..], .. }) => {
                return Err(io::Error::from(TlsError::TlsPeer).into());
            }
            header => header?,
        };
        self.received_bytes += HEADER_LEN as u64;
        Ok(header)
    }

    /// Reads the content of the FRAMES that [`recv`](Self::recv) has just returned, or the last
    /// byte of MEMORY or FILES, without its descriptors.
    pub(crate) fn recv_content(&mut self) -> Result<&[u8], WireError> {
        let length = std::mem::take(&mut self.content);
        if self.payload.len() < length {
            self.payload.resize(length, 0);
        }
        self.out_of_step = true;
        self.stream.read_exact(&mut self.payload[..length]).map_err(FormatError::Io)?;
        self.out_of_step = false;
        self.received_bytes += length as u64;
        Ok(&self.payload[..length])
    }

    /// Receives the next message. After FRAMES the caller has to read its content, and after MEMORY
    /// or FILES its last byte; until then this fails, because a peer may send content that no
    /// caller expects. Skips records with unknown tags that need not be understood. Returns REFUSED
    /// and ABORT as errors, because they end the connection.
    pub(crate) fn recv(&mut self) -> Result<WireMessage<'_>, WireError> {
        if self.content > 0 {
            return Err(io::Error::other("the last message's content was not read").into());
        }
        let mut skipped = 0;
        let (tag, length) = loop {
            let mut stream = CountingReader { stream: &mut self.stream, bytes: 0 };
            let head = RecordHead::read_from(&mut stream, self.next_in);
            // Also set if the head is refused, because the record's length is not known then.
            self.out_of_step = stream.bytes > 0;
            let head = head?;
            let tag = Tag::from_number(head.tag);
            if tag.is_none() && head.must_understand {
                return Err(WireError::UnknownTag { tag: head.tag });
            }
            let head = head.bounded(tag.map_or(MAX_SKIPPED, Tag::limit))?;
            let length = tag.map_or(head.length, |tag| tag.checked(head.length)) as usize;
            self.content = head.length as usize - length;
            if self.payload.len() < length {
                self.payload.resize(length, 0);
            }
            self.stream.read_exact(&mut self.payload[..length]).map_err(FormatError::Io)?;
            self.out_of_step = false;
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
        match WireMessage::parse(tag, &self.payload[..length])? {
            WireMessage::Refused { reason } => {
                Err(WireError::Refused { reason: printable(reason) })
            }
            WireMessage::Abort { reason } => Err(WireError::Aborted { reason: printable(reason) }),
            WireMessage::Frames { run } if run.bytes() != self.content as u64 => {
                let why = "its content is not as long as its run requires";
                Err(WireError::Malformed { message: Tag::Frames, why })
            }
            message => Ok(message),
        }
    }
}

/// Counts the bytes read.
struct CountingReader<'s, S> {
    stream: &'s mut S,
    bytes: usize,
}

impl<S: Read> Read for CountingReader<'_, S> {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        let read = self.stream.read(buf)?;
        self.bytes += read;
        Ok(read)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use driftline_dirty_tracker::Gfn;

    use super::super::socket::Socket;
    use super::*;

    fn ends() -> (Wire<Link>, Wire<Link>) {
        let (one, other) = Socket::pair().unwrap();
        let wire = |socket| Wire::new(Link::new(socket, Duration::from_secs(5), Arc::default()));
        (wire(one), wire(other))
    }

    /// Sends FRAMES of two frames with only `bytes` bytes of their content.
    fn send_two(wire: &mut Wire<Link>, bytes: usize) {
        let table = RawRun::from(FrameRun { start: Gfn(3), count: 2 });
        let head = super::head(
            wire.next_out,
            Tag::Frames,
            table.as_bytes().len() + 8192,
            &[table.as_bytes()],
        );
        wire.stream.write_all(&[&head, table.as_bytes(), &vec![7; bytes]].concat()).unwrap();
        wire.next_out += 1;
    }

    #[test]
    fn many_records_are_written_together() {
        const COUNT: usize = 2 * MAX_SLICES;
        let (mut here, mut there) = ends();
        let heads: Vec<_> = (0..COUNT).map(|n| (n as u64).to_le_bytes()).collect();
        let reader = std::thread::spawn(move || {
            for n in 0..COUNT {
                let mut record = [0; RECORD_HEAD_LEN + 8 + 3];
                here.stream.read_exact(&mut record).unwrap();
                let head = RecordHead::read_from(&record[..], n as u32).unwrap();
                head.check(&record[RECORD_HEAD_LEN..]).unwrap();
                assert_eq!(record[RECORD_HEAD_LEN..][..8], (n as u64).to_le_bytes());
            }
        });
        let record = |head| -> (Tag, [&[u8]; 2]) { (Tag::State, [head, b"abc"]) };
        let records: Vec<_> = heads.iter().map(|head| record(&head[..])).collect();
        there.send_records(&records).unwrap();
        reader.join().unwrap();
        assert_eq!(there.sent_bytes, (COUNT * (RECORD_HEAD_LEN + 11)) as u64);
    }

    /// Fails the first write.
    struct FailsOnce(bool, Vec<u8>);

    impl Write for FailsOnce {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            match std::mem::replace(&mut self.0, true) {
                true => self.1.write(bytes),
                false => Err(io::ErrorKind::TimedOut.into()),
            }
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn unwritten_records_leave_their_numbers_to_abort() {
        let mut wire = Wire::new(FailsOnce(false, Vec::new()));
        let records: [(Tag, [&[u8]; 1]); 2] = [(Tag::State, [b"one"]), (Tag::State, [b"two"])];
        wire.send_records(&records).unwrap_err();
        assert!(!wire.torn);
        wire.send_parts(Tag::Abort, &[b"cancelled"]).unwrap();
        RecordHead::read_from(&wire.stream.1[..RECORD_HEAD_LEN], 0).unwrap();
    }

    #[test]
    fn unread_content_fails_the_next_message() {
        let (mut here, mut there) = ends();
        send_two(&mut there, 8192);
        there.send(&WireMessage::Verify).unwrap();
        assert!(matches!(here.recv().unwrap(), WireMessage::Frames { .. }));
        let error = here.recv().unwrap_err().to_string();
        assert!(error.contains("the last message's content was not read"), "{error}");
        here.recv_content().unwrap();
        assert!(matches!(here.recv().unwrap(), WireMessage::Verify));
    }

    #[test]
    fn control_characters_of_a_reason_are_replaced() {
        let reason = "no\n\x1b[2Jroom\u{9b}";
        for message in [WireMessage::Refused { reason }, WireMessage::Abort { reason }] {
            let (mut here, mut there) = ends();
            there.send(&message).unwrap();
            let error = here.recv().unwrap_err().to_string();
            assert!(error.ends_with(": no  [2Jroom "), "{error:?}");
        }
    }

    #[test]
    fn reason_is_read_past_unfetched_frames() {
        let (mut here, mut there) = ends();
        send_two(&mut there, 8192);
        send_two(&mut there, 8192);
        there.abort(Tag::Abort, "enough");
        assert!(matches!(here.recv().unwrap(), WireMessage::Frames { .. }));
        let said = here.pending_abort().unwrap().to_string();
        assert!(said.contains("enough"), "{said}");
    }

    #[test]
    fn reason_is_not_read_after_an_oversized_record() {
        let (mut here, mut there) = ends();
        let head = RecordHead {
            tag: Tag::Ready as u16,
            must_understand: true,
            instance: 0,
            length: Tag::Ready.limit() + 1,
            payload_crc: 0,
            sequence: 0,
        };
        there.stream.write_all(&head.to_bytes()).unwrap();
        there.next_out += 1;
        // The ABORT lies where the oversized record's payload would be, so it must not be read.
        there.abort(Tag::Abort, "forged");
        assert!(here.recv().is_err());
        assert!(here.out_of_step);
        assert!(here.closing_abort().is_none());
    }

    #[test]
    fn reason_is_not_read_within_a_record() {
        let (mut here, mut there) = ends();
        send_two(&mut there, 100);
        there.abort(Tag::Abort, "enough");
        assert!(matches!(here.recv().unwrap(), WireMessage::Frames { .. }));
        assert!(here.recv_content().is_err());
        assert!(here.out_of_step);
        assert!(here.pending_abort().is_none());
    }
}
