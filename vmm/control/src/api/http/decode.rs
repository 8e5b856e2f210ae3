//! Turns a connection's bytes into requests. The decoder does no I/O and has no clock, and it
//! checks each limit before it allocates.

use std::ops::Range;

use axum::body::Bytes;
use axum::http::header::{CONNECTION, HeaderName, HeaderValue};
use axum::http::{HeaderMap, Method};

use super::dialect::{
    HeaderFault, HttpDialect, HttpFault, MAX_HEAD, MAX_HEADERS, READ_BYTES, is_own, path_of,
};
use crate::api::fault::MAX_BODY_BYTES;

/// A whole request.
#[derive(Clone, PartialEq, Debug)]
pub(super) struct HttpRequest {
    pub(super) method: Method,
    /// The target as the client sent it.
    pub(super) target: String,
    pub(super) headers: HeaderMap,
    pub(super) body: Bytes,
    /// Whether Firecracker's part of the API answers the request.
    pub(super) is_firecracker: bool,
    pub(super) persistence: Persistence,
}

/// Whether a connection stays open after a reply.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Persistence {
    /// It stays open, and the client expects that.
    Open,
    /// It stays open because the client asked for it, and the reply says so.
    OpenOnRequest,
    Close,
}

/// What the decoder found in the bytes.
#[derive(PartialEq, Debug)]
pub(super) enum HttpEvent {
    /// More bytes are needed.
    Incomplete,
    /// The client waits for permission to send its body.
    Continue,
    Request(Box<HttpRequest>),
    Fault(HttpFault),
}

/// What the decoder waits for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum HttpPhase {
    /// The first byte of a request.
    Idle,
    Head,
    Body,
}

/// A request whose body has not arrived yet.
#[derive(Debug)]
struct RequestHead {
    method: Method,
    target: String,
    /// Whether the version is HTTP/1.1, not 1.0.
    is_1_1: bool,
    headers: HeaderMap,
    is_firecracker: bool,
    content_length: Option<u64>,
    expects_continue: bool,
    /// Number of bytes so far.
    bytes: usize,
    /// Places in [`HttpDecoder::begun`] of the header lines that ask for permission.
    expectations: Vec<Range<usize>>,
    /// Number of header lines so far, including those that are ignored.
    lines: usize,
}

#[derive(Default, Debug)]
enum DecoderState {
    #[default]
    RequestLine,
    Headers(Box<RequestHead>),
    Body {
        head: Box<RequestHead>,
        /// Place of the body in [`HttpDecoder::begun`].
        from: usize,
        left: usize,
    },
    /// The rest of a refused body.
    Skip(u64),
}

/// The decoder of one connection.
#[derive(Debug)]
pub(super) struct HttpDecoder {
    dialect: HttpDialect,
    state: DecoderState,
    bytes: Vec<u8>,
    /// Number of `bytes` that were decoded.
    start: usize,
    /// The decoded bytes of the request that has begun to arrive, or was returned last.
    begun: Vec<u8>,
    /// Number of bytes from `start` on that contain no end of a line.
    scanned: usize,
}

impl HttpDecoder {
    pub(super) fn new(dialect: HttpDialect) -> Self {
        let state = DecoderState::default();
        Self { dialect, state, bytes: Vec::new(), start: 0, begun: Vec::new(), scanned: 0 }
    }

    /// Adds received bytes. The caller first takes all events, so that less than a line is left.
    pub(super) fn push(&mut self, received: &[u8]) {
        self.bytes.drain(..self.start);
        self.start = 0;
        self.bytes.extend_from_slice(received);
    }

    /// Returns the next event. After [`HttpEvent::Fault`] the decoder expects a new request: it
    /// drops what was received, or skips the body if its length is known.
    pub(super) fn next(&mut self) -> HttpEvent {
        match self.advance() {
            Ok(event) => event,
            Err(fault) => {
                if !self.is_skipping() {
                    self.state = DecoderState::RequestLine;
                    self.skip(self.bytes.len() - self.start);
                }
                HttpEvent::Fault(fault)
            }
        }
    }

    /// Returns what the decoder waits for.
    pub(super) fn phase(&self) -> HttpPhase {
        match self.state {
            DecoderState::RequestLine if self.start == self.bytes.len() => HttpPhase::Idle,
            DecoderState::RequestLine | DecoderState::Headers(_) => HttpPhase::Head,
            DecoderState::Body { .. } | DecoderState::Skip(_) => HttpPhase::Body,
        }
    }

    /// Returns the received bytes of the request that has begun to arrive, or was returned last,
    /// and those behind it. Another decoder decodes them to the same events, except that it does
    /// not ask for a body again. They are at most [`HttpDialect::unanswered_limit`], unless more
    /// were added at once.
    pub(super) fn unanswered(&self) -> Vec<u8> {
        [&self.begun[..], &self.bytes[self.start..]].concat()
    }

    /// Returns whether the rest of a refused body is to be skipped.
    pub(super) fn is_skipping(&self) -> bool {
        matches!(self.state, DecoderState::Skip(_))
    }

    /// Takes steps until one of them has an event.
    fn advance(&mut self) -> Result<HttpEvent, HttpFault> {
        loop {
            let event = match std::mem::take(&mut self.state) {
                DecoderState::RequestLine => self.take_request_line()?,
                DecoderState::Headers(head) => self.take_header(head)?,
                DecoderState::Body { head, from, left } => Some(self.take_body(head, from, left)),
                DecoderState::Skip(left) => self.skip_body(left),
            };
            if let Some(event) = event {
                return Ok(event);
            }
        }
    }

    fn take_request_line(&mut self) -> Result<Option<HttpEvent>, HttpFault> {
        self.begun.clear();
        self.begun.shrink_to(READ_BYTES);
        let Some(line) = self.line(|_| HttpFault::Request)? else {
            return Ok(Some(HttpEvent::Incomplete));
        };
        // A general server ignores empty lines before a request (RFC 9112, 2.2).
        if !line.is_empty() || self.dialect.is_firecracker() {
            let head = RequestHead::parse(self.dialect, &self.bytes[line])?;
            self.state = DecoderState::Headers(Box::new(head));
        }
        Ok(None)
    }

    /// Takes one header line, or the empty line that ends the head.
    fn take_header(&mut self, mut head: Box<RequestHead>) -> Result<Option<HttpEvent>, HttpFault> {
        let from = self.begun.len();
        let too_long = |line: &[u8]| {
            HeaderFault::TooLong { line: String::from_utf8_lossy(line).into_owned() }.into()
        };
        let Some(line) = self.line(too_long)? else {
            self.state = DecoderState::Headers(head);
            return Ok(Some(HttpEvent::Incomplete));
        };
        if line.is_empty() {
            return Ok(self.end_head(head)?.then_some(HttpEvent::Continue));
        }
        let expected = std::mem::take(&mut head.expects_continue);
        head.add_header(self.dialect, &self.bytes[line])?;
        if head.expects_continue {
            head.expectations.push(from..self.begun.len());
        }
        head.expects_continue |= expected;
        self.state = DecoderState::Headers(head);
        Ok(None)
    }

    /// Takes what has arrived of a body, of which `left` bytes are missing.
    fn take_body(&mut self, head: Box<RequestHead>, from: usize, left: usize) -> HttpEvent {
        let now = left.min(self.bytes.len() - self.start);
        self.consume(now);
        if now == left {
            let body = self.begun[from..].to_vec();
            return HttpEvent::Request(Box::new(head.finish(self.dialect, body)));
        }
        self.state = DecoderState::Body { head, from, left: left - now };
        HttpEvent::Incomplete
    }

    /// Skips what has arrived of a refused body, of which `left` bytes are missing.
    fn skip_body(&mut self, left: u64) -> Option<HttpEvent> {
        let arrived = (self.bytes.len() - self.start) as u64;
        let now = arrived.min(left);
        self.skip(now as usize);
        if now == left {
            return None;
        }
        self.state = DecoderState::Skip(left - now);
        Some(HttpEvent::Incomplete)
    }

    /// Begins a request's body. Returns whether the client waits for permission to send it.
    fn end_head(&mut self, head: Box<RequestHead>) -> Result<bool, HttpFault> {
        let size = head.content_length.unwrap_or(0);
        let limit = self.dialect.payload_limit();
        let length = usize::try_from(size).ok().filter(|length| *length <= limit);
        let Some(left) = length else {
            // A client that waits for permission may send the refused body nevertheless.
            let may_be_withheld = head.expects_continue;
            if !may_be_withheld {
                self.state = DecoderState::Skip(size);
            }
            return Err(HttpFault::PayloadTooLarge { size, limit, may_be_withheld });
        };
        let waits = head.expects_continue && left > 0;
        if waits {
            // From the last one, so that the others keep their places.
            head.expectations.iter().rev().for_each(|line| _ = self.begun.drain(line.clone()));
        }
        // An operator may allow more, which is allocated only as it arrives.
        self.begun.reserve_exact(left.min(MAX_BODY_BYTES));
        self.state = DecoderState::Body { head, from: self.begun.len(), left };
        Ok(waits)
    }

    fn consume(&mut self, bytes: usize) {
        self.begun.extend_from_slice(&self.bytes[self.start..self.start + bytes]);
        self.skip(bytes);
    }

    fn skip(&mut self, bytes: usize) {
        self.start += bytes;
        self.scanned = 0;
    }

    /// Takes a line and returns its place without its end, or `None` if its end has not arrived.
    /// `too_long` gets the beginning of a line that exceeds the limit.
    fn line(
        &mut self,
        too_long: impl Fn(&[u8]) -> HttpFault,
    ) -> Result<Option<Range<usize>>, HttpFault> {
        let limit = self.dialect.line_limit();
        let received = &self.bytes[self.start..];
        // The first byte of an end may have been the last one scanned.
        let from = self.scanned.saturating_sub(1);
        let end = match self.dialect {
            HttpDialect::Driftline => received[from..].iter().position(|b| *b == b'\n'),
            HttpDialect::Firecracker { .. } => {
                received[from..].windows(2).position(|pair| pair == b"\r\n").map(|at| at + 1)
            }
        };
        match end.map(|at| from + at + 1) {
            Some(taken) if taken <= limit => {
                let line = &received[..taken - 1];
                let length = line.strip_suffix(b"\r").unwrap_or(line).len();
                let line = self.start..self.start + length;
                self.consume(taken);
                Ok(Some(line))
            }
            None if received.len() < limit => {
                self.scanned = received.len();
                Ok(None)
            }
            _ => Err(too_long(&received[..limit])),
        }
    }

    /// Returns the number of bytes allocated.
    #[cfg(test)]
    pub(super) fn allocated(&self) -> usize {
        self.bytes.capacity() + self.begun.capacity()
    }
}

impl RequestHead {
    /// Parses a request line.
    fn parse(dialect: HttpDialect, line: &[u8]) -> Result<Self, HttpFault> {
        let mut parts = line.splitn(3, |b| *b == b' ');
        let (Some(method), Some(target), Some(version)) =
            (parts.next(), parts.next(), parts.next())
        else {
            return Err(HttpFault::Request);
        };
        let method = Method::from_bytes(method).map_err(|_| HttpFault::Method)?;
        let text = std::str::from_utf8(target);
        let own = text.is_ok_and(|target| is_own(&method, target));
        let is_firecracker = dialect.is_firecracker() && !own;
        let known = [Method::GET, Method::PUT, Method::PATCH, Method::DELETE];
        let ours = [Method::POST, Method::HEAD];
        let accepted = known.contains(&method) || (own && ours.contains(&method));
        if dialect.is_firecracker() && !accepted {
            return Err(HttpFault::Method);
        }
        let target = text.map_err(|_| HttpFault::Uri("Cannot parse URI as UTF-8."))?;
        if target.is_empty() {
            return Err(HttpFault::Uri("Empty URI not allowed."));
        }
        let is_1_1 = match version {
            b"HTTP/1.1" => true,
            b"HTTP/1.0" => false,
            _ => return Err(HttpFault::Version),
        };
        Ok(Self {
            method,
            target: target.to_owned(),
            is_1_1,
            headers: HeaderMap::new(),
            is_firecracker,
            content_length: None,
            expects_continue: false,
            bytes: line.len(),
            expectations: Vec::new(),
            lines: 0,
        })
    }

    fn add_header(&mut self, dialect: HttpDialect, line: &[u8]) -> Result<(), HttpFault> {
        self.lines += 1;
        self.bytes += line.len();
        if self.lines > MAX_HEADERS || self.bytes > MAX_HEAD {
            return Err(HttpFault::HeadTooLarge);
        }
        if dialect.is_firecracker() {
            std::str::from_utf8(line).map_err(HeaderFault::Characters)?;
        }
        let format = || HeaderFault::Format { line: String::from_utf8_lossy(line).into_owned() };
        let colon = line.iter().position(|b| *b == b':').ok_or_else(format)?;
        let (name, value) = (&line[..colon], &line[colon + 1..]);
        let plain = String::from_utf8_lossy(value).into_owned();
        let bad_value = |value: &str| HeaderFault::Value {
            name: String::from_utf8_lossy(name).into_owned(),
            value: value.to_owned(),
        };
        let parsed = match dialect {
            HttpDialect::Driftline => HeaderName::from_bytes(name),
            // Firecracker ignores spaces here.
            HttpDialect::Firecracker { .. } => HeaderName::from_bytes(name.trim_ascii()),
        };
        let name = match parsed {
            Ok(name) => name,
            // A header that Firecracker does not know, whatever its name.
            Err(_) if dialect.is_firecracker() => return Ok(()),
            Err(_) => return Err(format().into()),
        };
        match name.as_str() {
            "content-length" => {
                let length = content_length(dialect, plain.trim_ascii());
                let length = length.ok_or_else(|| bad_value(&plain))?;
                if self.content_length.is_some_and(|other| other != length) {
                    return Err(HttpFault::TwoLengths);
                }
                self.content_length = Some(length);
            }
            "transfer-encoding" if plain.trim_ascii() != "identity" => {
                return Err(HttpFault::TransferCoding { value: plain.trim_ascii().to_owned() });
            }
            "expect" if plain.trim_ascii() == "100-continue" => {
                self.expects_continue = self.is_1_1 || dialect.is_firecracker();
            }
            "accept-encoding" if dialect.is_firecracker() => check_encodings(plain.trim_ascii())?,
            _ => {}
        }
        match HeaderValue::from_bytes(value.trim_ascii()) {
            Ok(value) => _ = self.headers.append(name, value),
            Err(_) if dialect.is_firecracker() => {}
            Err(_) => return Err(bad_value(&plain).into()),
        }
        Ok(())
    }

    fn finish(self, dialect: HttpDialect, body: Vec<u8>) -> HttpRequest {
        let persistence = match dialect {
            HttpDialect::Firecracker { .. } => Persistence::Open,
            HttpDialect::Driftline => self.persistence(),
        };
        let Self { method, target, headers, is_firecracker, .. } = self;
        let target = if is_firecracker { path_of(&target).to_owned() } else { target };
        HttpRequest { method, target, headers, body: body.into(), is_firecracker, persistence }
    }

    fn persistence(&self) -> Persistence {
        let says = |word: &str| {
            let values = self.headers.get_all(CONNECTION).iter();
            let mut words = values.filter_map(|v| v.to_str().ok()).flat_map(|v| v.split(','));
            words.any(|one| one.trim_ascii().eq_ignore_ascii_case(word))
        };
        match self.is_1_1 {
            _ if says("close") => Persistence::Close,
            true => Persistence::Open,
            false if says("keep-alive") => Persistence::OpenOnRequest,
            false => Persistence::Close,
        }
    }
}

/// Parses the value of `Content-Length`. Firecracker's has 32 bits.
fn content_length(dialect: HttpDialect, value: &str) -> Option<u64> {
    let is_number = !value.is_empty() && value.bytes().all(|b| b.is_ascii_digit());
    let length = value.parse().ok().filter(|_| is_number)?;
    (!dialect.is_firecracker() || length <= u32::MAX.into()).then_some(length)
}

/// Refuses a client that does not accept a reply without an encoding.
fn check_encodings(value: &str) -> Result<(), HttpFault> {
    if value.is_empty() {
        return Err(HttpFault::Request);
    }
    let refused = |encoding: &&str| match encoding.trim_ascii() {
        "identity;q=0" => true,
        "*;q=0" => !value.contains("identity"),
        _ => false,
    };
    match value.split(',').find(refused) {
        None => Ok(()),
        Some(encoding) => {
            let (name, value) = ("Accept-Encoding".to_owned(), encoding.to_owned());
            Err(HeaderFault::Value { name, value }.into())
        }
    }
}
