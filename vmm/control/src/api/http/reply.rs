//! Turns replies into bytes.

use axum::body::Bytes;
use axum::http::header::{CONNECTION, CONTENT_LENGTH, CONTENT_TYPE};
use axum::http::{HeaderMap, HeaderValue, StatusCode};

use super::decode::Persistence;
use super::dialect::{HttpDialect, HttpFault};
use crate::model::FaultMessage;

/// Size of the reads of firecracker-rs-sdk, in bytes. That client stops at the first shorter read,
/// so a reply whose length is a multiple of this size would make it wait for more.
const CLIENT_READ: usize = 64;

/// A reply. It has no body if its status has none.
#[derive(Debug)]
pub(super) struct HttpReply {
    status: StatusCode,
    /// Headers other than the length and those of the connection.
    headers: HeaderMap,
    body: Bytes,
    /// Length of the body, which a reply to HEAD announces without having the body.
    length: usize,
    /// Whether the request used a deprecated field.
    deprecated: bool,
}

impl HttpReply {
    /// Creates a reply from an answer of the router.
    pub(super) fn routed(status: StatusCode, mut headers: HeaderMap, body: Bytes) -> Self {
        let announced = headers.remove(CONTENT_LENGTH);
        let announced = announced.and_then(|length| length.to_str().ok()?.parse().ok());
        headers.remove(CONNECTION);
        let length = if body.is_empty() { announced.unwrap_or(0) } else { body.len() };
        Self { status, headers, body, length, deprecated: false }
    }

    /// Creates a reply with a JSON body.
    pub(super) fn json(status: StatusCode, body: impl Into<Bytes>, deprecated: bool) -> Self {
        let body = body.into();
        let mut headers = HeaderMap::new();
        headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
        Self { status, headers, length: body.len(), body, deprecated }
    }

    /// Creates the reply to bytes that are not a request.
    pub(super) fn refusal(dialect: HttpDialect, fault: &HttpFault) -> Self {
        match dialect {
            HttpDialect::Firecracker { .. } => {
                // Firecracker's body, which is not valid JSON.
                let body = format!(
                    "{{ \"error\": \"{fault}\nAll previous unanswered requests will be \
                     dropped.\" }}"
                );
                Self::json(StatusCode::BAD_REQUEST, body, false)
            }
            HttpDialect::Driftline => Self::fault(fault.status(), fault.to_string()),
        }
    }

    /// Creates a refusal with a sentence.
    pub(super) fn fault(status: StatusCode, fault_message: String) -> Self {
        let body = serde_json::to_vec(&FaultMessage { fault_message }).unwrap_or_default();
        Self::json(status, body, false)
    }

    /// Returns the reply to HEAD: the body is announced and not sent.
    pub(super) fn without_body(self) -> Self {
        Self { body: Bytes::new(), ..self }
    }

    /// Returns the bytes of the reply.
    pub(super) fn encode(&self, dialect: HttpDialect, persistence: Persistence) -> Vec<u8> {
        let head = |padding| match dialect {
            HttpDialect::Driftline => self.plain_head(persistence),
            HttpDialect::Firecracker { .. } => self.firecracker_head(persistence, padding),
        };
        let mut bytes = head("");
        if (bytes.len() + self.body.len()).is_multiple_of(CLIENT_READ) {
            bytes = head(" ");
        }
        if self.has_body() {
            bytes.extend_from_slice(&self.body);
        }
        bytes
    }

    fn has_body(&self) -> bool {
        !self.status.is_informational() && self.status != StatusCode::NO_CONTENT
    }

    fn plain_head(&self, persistence: Persistence) -> Vec<u8> {
        let mut head = Vec::with_capacity(256 + self.body.len());
        let reason = self.status.canonical_reason().unwrap_or_default();
        line(&mut head, &["HTTP/1.1 ", self.status.as_str(), " ", reason]);
        for (name, value) in &self.headers {
            header(&mut head, name.as_str(), value, "");
        }
        if self.has_body() {
            line(&mut head, &["content-length: ", &self.length.to_string()]);
        }
        match persistence {
            Persistence::Open => {}
            Persistence::OpenOnRequest => line(&mut head, &["connection: keep-alive"]),
            Persistence::Close => line(&mut head, &["connection: close"]),
        }
        line(&mut head, &[]);
        head
    }

    /// Returns the head with the headers in Firecracker's order. `padding` follows the body's type.
    fn firecracker_head(&self, persistence: Persistence, padding: &str) -> Vec<u8> {
        let mut head = Vec::with_capacity(256 + self.body.len());
        // Firecracker sends no reason phrase, and keeps the space before it.
        line(&mut head, &["HTTP/1.1 ", self.status.as_str(), " "]);
        line(&mut head, &["Server: Firecracker API"]);
        let connection = if persistence == Persistence::Close { "close" } else { "keep-alive" };
        line(&mut head, &["Connection: ", connection]);
        if self.deprecated {
            line(&mut head, &["Deprecation: true"]);
        }
        for (name, value) in self.headers.iter().filter(|(name, _)| *name != CONTENT_TYPE) {
            header(&mut head, name.as_str(), value, "");
        }
        if self.has_body() {
            let json = HeaderValue::from_static("application/json");
            let kind = self.headers.get(CONTENT_TYPE).unwrap_or(&json);
            header(&mut head, "Content-Type", kind, padding);
            line(&mut head, &["Content-Length: ", &self.length.to_string()]);
        }
        line(&mut head, &[]);
        head
    }
}

/// Returns the reply that permits a client to send its body.
pub(super) fn permission(dialect: HttpDialect) -> Vec<u8> {
    match dialect {
        HttpDialect::Driftline => b"HTTP/1.1 100 Continue\r\n\r\n".to_vec(),
        HttpDialect::Firecracker { .. } => {
            HttpReply::routed(StatusCode::CONTINUE, HeaderMap::new(), Bytes::new())
                .encode(dialect, Persistence::Open)
        }
    }
}

fn line(head: &mut Vec<u8>, parts: &[&str]) {
    parts.iter().for_each(|part| head.extend_from_slice(part.as_bytes()));
    head.extend_from_slice(b"\r\n");
}

fn header(head: &mut Vec<u8>, name: &str, value: &HeaderValue, padding: &str) {
    head.extend_from_slice(name.as_bytes());
    head.extend_from_slice(b": ");
    head.extend_from_slice(value.as_bytes());
    line(head, &[padding]);
}
