//! The two dialects of the API, their limits, and the reasons for refusing a request.

use std::str::Utf8Error;
use std::time::Duration;

use axum::http::{Method, StatusCode};

use crate::api::fault::MAX_BODY_BYTES;

/// The largest head of a request, in bytes.
pub(super) const MAX_HEAD: usize = 16 << 10;
/// Number of bytes that one read takes at most.
pub(super) const READ_BYTES: usize = 2048;
/// The maximum number of a request's headers.
pub(super) const MAX_HEADERS: usize = 128;
/// First part of the paths that are Driftline's own.
const OWN: &str = "v1";

/// The rules by which requests are read and replies are written.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum HttpDialect {
    /// HTTP/1.1 as its RFCs describe it, without transfer codings.
    Driftline,
    /// What Firecracker's server accepts and sends.
    Firecracker {
        /// The largest body, in bytes.
        payload_limit: usize,
    },
}

impl HttpDialect {
    pub(super) fn is_firecracker(self) -> bool {
        self != Self::Driftline
    }

    /// Returns the largest line of a head with its end, in bytes.
    pub(super) fn line_limit(self) -> usize {
        match self {
            Self::Driftline => 8 << 10,
            Self::Firecracker { .. } => 1024,
        }
    }

    /// Returns the largest body, in bytes.
    pub(super) fn payload_limit(self) -> usize {
        match self {
            Self::Driftline => MAX_BODY_BYTES,
            Self::Firecracker { payload_limit } => payload_limit,
        }
    }

    /// Returns the maximum number of bytes that are read and not answered: a request, with the ends
    /// of its lines, and the beginning of the next one.
    pub(super) fn unanswered_limit(self) -> usize {
        // The last line of a head may be read before it is found to exceed the limit.
        let head = MAX_HEAD + 2 * (MAX_HEADERS + 2) + self.line_limit();
        self.payload_limit().saturating_add(head + READ_BYTES)
    }
}

/// Returns the path of a request's target, which is a path or an address with a path. Without a
/// path it is empty, as Firecracker has it.
pub(super) fn path_of(target: &str) -> &str {
    match target.strip_prefix("http://") {
        Some(rest) => rest.find('/').map_or("", |at| &rest[at..]),
        None if target.starts_with('/') => target,
        None => "",
    }
}

/// Returns whether a request under Firecracker's API is one of Driftline's own.
pub(super) fn is_own(method: &Method, target: &str) -> bool {
    let path = path_of(target).split('?').next().unwrap_or_default();
    let first = path.trim_start_matches('/').split('/').next().unwrap_or_default();
    // Firecracker has only a PUT of this path.
    let metrics = first == "metrics" && [Method::GET, Method::HEAD].contains(method);
    metrics || first == OWN
}

/// The reason why bytes are not a request. The texts are Firecracker's where it has the reason.
#[derive(PartialEq, Eq, Debug, thiserror::Error)]
pub(super) enum HttpFault {
    #[error("Invalid request.")]
    Request,
    #[error("Invalid HTTP Method: Unsupported HTTP method.")]
    Method,
    #[error("Invalid HTTP Version: Unsupported HTTP version.")]
    Version,
    #[error("Invalid URI: {0}")]
    Uri(&'static str),
    #[error("Invalid header. Reason: {0}")]
    Header(#[from] HeaderFault),
    #[error(
        "Request payload with size {size} is larger than the limit of {limit} allowed by server."
    )]
    PayloadTooLarge {
        size: u64,
        limit: usize,
        /// Whether the client waits for permission before it sends the body.
        may_be_withheld: bool,
    },
    #[error(
        "Invalid header. Reason: The head of a request has at most {MAX_HEAD} bytes and \
         {MAX_HEADERS} headers."
    )]
    HeadTooLarge,
    #[error(
        "Invalid header. Reason: Unsupported value. Key:Transfer-Encoding; Value:{value}. Send \
         Content-Length instead."
    )]
    TransferCoding { value: String },
    #[error("Invalid header. Reason: Content-Length is given twice with different values.")]
    TwoLengths,
    #[error("The {part} of the request did not come within {limit:?}.")]
    Late { part: &'static str, limit: Duration },
}

impl HttpFault {
    /// Returns the status of the reply in Driftline's dialect. In Firecracker's it is always 400.
    pub(super) fn status(&self) -> StatusCode {
        match self {
            Self::PayloadTooLarge { .. } => StatusCode::PAYLOAD_TOO_LARGE,
            Self::HeadTooLarge | Self::Header(HeaderFault::TooLong { .. }) => {
                StatusCode::REQUEST_HEADER_FIELDS_TOO_LARGE
            }
            Self::TransferCoding { .. } => StatusCode::LENGTH_REQUIRED,
            Self::Late { .. } => StatusCode::REQUEST_TIMEOUT,
            _ => StatusCode::BAD_REQUEST,
        }
    }

    /// Returns whether the connection ends after the refusal, in either dialect: the end of the
    /// request is unknown then, and its rest must not be read as further requests. Of these
    /// reasons, Firecracker has only `PayloadTooLarge`, and keeps the connection.
    pub(super) fn ends_connection(&self) -> bool {
        match self {
            Self::HeadTooLarge
            | Self::TransferCoding { .. }
            | Self::TwoLengths
            | Self::Late { .. }
            | Self::PayloadTooLarge { may_be_withheld: true, .. } => true,
            Self::Request
            | Self::Method
            | Self::Version
            | Self::Uri(_)
            | Self::Header(_)
            | Self::PayloadTooLarge { may_be_withheld: false, .. } => false,
        }
    }
}

/// The reason why a header is refused.
#[derive(PartialEq, Eq, Debug, thiserror::Error)]
pub(super) enum HeaderFault {
    #[error("Header is incorrectly formatted. Key: {line}")]
    Format { line: String },
    #[error("Header contains invalid characters. Key: {0}")]
    Characters(Utf8Error),
    #[error("Invalid value. Key:{name}; Value:{value}")]
    Value { name: String, value: String },
    /// The line is longer than the dialect's limit.
    #[error("Invalid content length. Header: {line}")]
    TooLong { line: String },
}
