//! Connections that send headers and records byte by byte.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::time::Duration;

use driftline_format::{Header, MAGIC_STREAM, RECORD_HEAD_LEN, RecordHead, STREAM_VERSION};
use driftline_guest::VmId;

use super::tag;

/// Purposes of HELLO.
pub const MOVE: u8 = 1;
pub const QUERY: u8 = 2;
pub const JOIN: u8 = 3;

pub fn header(version: u16) -> Vec<u8> {
    let mut bytes = Vec::new();
    Header::new(MAGIC_STREAM, VmId::random(), 0, 7).write_to(&mut bytes).unwrap();
    bytes[8..10].copy_from_slice(&version.to_le_bytes());
    let crc = crc32c::crc32c(&bytes[..60]);
    bytes[60..].copy_from_slice(&crc.to_le_bytes());
    bytes
}

pub fn record(tag: u16, sequence: u32, length: u32, payload: &[u8]) -> Vec<u8> {
    let payload_crc = crc32c::crc32c(payload);
    let head =
        RecordHead { tag, must_understand: true, instance: 0, length, payload_crc, sequence };
    [&head.to_bytes()[..], payload].concat()
}

/// Returns HELLO, the first record of a caller.
pub fn hello(purpose: u8) -> Vec<u8> {
    let mut payload = vec![purpose, 0, 0, 0, 0, 0, 0, 0];
    payload.extend_from_slice(&[0; 8]);
    payload.extend_from_slice(b"test");
    record(tag("HELLO"), 0, payload.len() as u32, &payload)
}

/// Returns a connection that has sent its header and HELLO. Its reads time out after a minute.
pub fn caller(to: &str, purpose: u8) -> TcpStream {
    let mut stream = TcpStream::connect(to).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
    stream.write_all(&[header(STREAM_VERSION), hello(purpose)].concat()).unwrap();
    stream
}

/// Returns a connection that has exchanged HELLOs.
pub fn greeted(to: &str, purpose: u8) -> TcpStream {
    let mut stream = caller(to, purpose);
    Header::read_from(&mut stream, MAGIC_STREAM).unwrap();
    assert_eq!(next(&mut stream, 0).0, tag("HELLO"));
    stream
}

/// Reads the next record, and returns its tag and payload.
pub fn next(stream: &mut TcpStream, sequence: u32) -> (u16, Vec<u8>) {
    let head = RecordHead::read_from(&mut *stream, sequence).unwrap();
    let mut payload = vec![0; head.length as usize];
    stream.read_exact(&mut payload).unwrap();
    (head.tag, payload)
}

/// Asks about a token of which the receiver has no record, with a made-up secret. Returns the
/// verdict.
pub fn ask(to: &str, token: [u8; 16], site: [u8; 16]) -> u64 {
    let mut stream = greeted(to, QUERY);
    stream
        .write_all(&record(tag("QUERY"), 1, 64, &[token, site, [9; 16], [9; 16]].concat()))
        .unwrap();
    let (answer, payload) = next(&mut stream, 1);
    assert_eq!(answer, tag("ANSWER"));
    u64::from_le_bytes(*payload[16..].first_chunk().unwrap())
}

/// Returns a whole recorded stream of a source.
pub fn golden() -> Vec<u8> {
    include_bytes!("../../golden/stream-v1.bin").to_vec()
}

/// Returns the end offsets of the header and of each record.
pub fn ends(stream: &[u8]) -> Vec<usize> {
    let mut ends = vec![64];
    while let Some(length) = stream.get(ends[ends.len() - 1] + 8..).and_then(|b| b.first_chunk()) {
        let at = ends[ends.len() - 1];
        ends.push(at + RECORD_HEAD_LEN + u32::from_le_bytes(*length) as usize);
    }
    ends
}

/// Returns a connection of a source that has received READY.
pub fn admitted(to: &str) -> TcpStream {
    let stream = golden();
    let ends = ends(&stream);
    let mut source = TcpStream::connect(to).unwrap();
    source.write_all(&stream[..ends[2]]).unwrap();
    Header::read_from(&mut source, MAGIC_STREAM).unwrap();
    for (sequence, expected) in ["HELLO", "READY"].into_iter().enumerate() {
        let head = RecordHead::read_from(&mut source, sequence as u32).unwrap();
        assert_eq!(head.tag, tag(expected));
        source.read_exact(&mut vec![0; head.length as usize]).unwrap();
    }
    source
}
