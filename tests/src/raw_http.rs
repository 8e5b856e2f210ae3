//! A client that writes bytes to an API socket and reads replies, and that accepts only what
//! Firecracker's server sends.

use std::io::{self, Read, Write};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::path::Path;

use crate::SOON;

/// Largest head of a reply, in bytes.
const MAX_HEAD: usize = 16 << 10;
/// Largest body of a reply, in bytes.
const MAX_BODY: usize = 1 << 20;

/// A connection to an API socket. Each wait for the server ends after [`SOON`].
#[derive(Debug)]
pub struct RawConnection {
    stream: UnixStream,
    /// Bytes that have been read and are not part of a reply yet.
    received: Vec<u8>,
}

/// A reply.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct RawReply {
    /// The status.
    pub status: u16,
    /// Names and values of the headers, in order.
    pub headers: Vec<(String, String)>,
    /// The body; `None` without a `Content-Length`.
    pub body: Option<Vec<u8>>,
}

impl RawReply {
    /// Returns the value of a header whose name has exactly these letters.
    pub fn header(&self, name: &str) -> Option<&str> {
        let found = self.headers.iter().find(|(given, _)| given == name);
        found.map(|(_, value)| value.as_str())
    }
}

impl RawConnection {
    /// Connects to `socket`.
    ///
    /// # Errors
    ///
    /// The socket has no listener.
    pub fn open(socket: &Path) -> io::Result<Self> {
        let stream = UnixStream::connect(socket)?;
        stream.set_read_timeout(Some(SOON))?;
        stream.set_write_timeout(Some(SOON))?;
        Ok(Self { stream, received: Vec::new() })
    }

    /// Sends bytes in one write where the socket has room.
    ///
    /// # Errors
    ///
    /// The server has closed the connection or does not read.
    pub fn send(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.stream.write_all(bytes)
    }

    /// Waits for a reply.
    ///
    /// # Errors
    ///
    /// The server closes the connection, does not answer, or answers in another form.
    pub fn reply(&mut self) -> io::Result<RawReply> {
        let head = loop {
            if let Some(at) = find(&self.received, b"\r\n\r\n") {
                break String::from_utf8(self.take(at + 4)).map_err(io::Error::other)?;
            }
            self.receive(MAX_HEAD)?;
        };
        let mut lines = head.trim_end_matches("\r\n").split("\r\n");
        let line = lines.next().unwrap_or_default();
        let status = line.strip_prefix("HTTP/1.1 ").and_then(|rest| rest.trim_end().parse().ok());
        let status = status.ok_or_else(|| malformed(line))?;
        let headers = lines.map(|line| {
            let (name, value) = line.split_once(": ").ok_or_else(|| malformed(line))?;
            Ok((name.to_owned(), value.to_owned()))
        });
        let headers = headers.collect::<io::Result<Vec<_>>>()?;
        let mut reply = RawReply { status, headers, body: None };
        if let Some(length) = reply.header("Content-Length") {
            let length = length.parse().ok().filter(|length| *length <= MAX_BODY);
            let length = length.ok_or_else(|| malformed("Content-Length"))?;
            while self.received.len() < length {
                self.receive(MAX_BODY)?;
            }
            reply.body = Some(self.take(length));
        }
        Ok(reply)
    }

    /// Says that nothing more is sent. Returns all that the server still sends.
    ///
    /// # Errors
    ///
    /// The server does not close the connection.
    pub fn finish(mut self) -> io::Result<Vec<u8>> {
        // The server may have closed it already.
        let _ = self.stream.shutdown(Shutdown::Write);
        match self.stream.take(MAX_BODY as u64).read_to_end(&mut self.received) {
            Err(e) if e.kind() != io::ErrorKind::ConnectionReset => Err(e),
            _ => Ok(self.received),
        }
    }

    fn take(&mut self, length: usize) -> Vec<u8> {
        let rest = self.received.split_off(length);
        std::mem::replace(&mut self.received, rest)
    }

    fn receive(&mut self, limit: usize) -> io::Result<()> {
        if self.received.len() >= limit {
            return Err(malformed("too long"));
        }
        let mut bytes = [0; 4096];
        match self.stream.read(&mut bytes)? {
            0 => Err(io::ErrorKind::UnexpectedEof.into()),
            length => {
                self.received.extend_from_slice(&bytes[..length]);
                Ok(())
            }
        }
    }
}

fn find(bytes: &[u8], what: &[u8]) -> Option<usize> {
    bytes.windows(what.len()).position(|window| window == what)
}

fn malformed(what: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, format!("no reply of this API: {what:?}"))
}
