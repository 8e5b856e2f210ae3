//! Answers to requests.

use serde::Serialize;
use serde_json::json;

use super::fault::ApiFault;

/// The answer to a request.
#[derive(Debug)]
pub enum Answer {
    /// The request is done: status 204, no body.
    Done,
    /// Status 200 with this JSON.
    Page(String),
    /// The request is refused.
    Fault(ApiFault),
}

impl Answer {
    /// Creates a page.
    pub(crate) fn page(value: &impl Serialize) -> Result<Self, ApiFault> {
        Ok(Self::Page(serde_json::to_string(value)?))
    }

    /// Creates the answer to `GET /version`.
    pub(crate) fn version(version: &str) -> Self {
        Self::Page(json!({ "firecracker_version": version }).to_string())
    }

    /// Returns the HTTP status.
    pub(crate) fn status(&self) -> u16 {
        match self {
            Self::Done => 204,
            Self::Page(_) => 200,
            Self::Fault(fault) => fault.status(),
        }
    }

    /// Returns the body, if there is one.
    pub(crate) fn into_body(self) -> Option<String> {
        match self {
            Self::Done => None,
            Self::Page(json) => Some(json),
            Self::Fault(fault) => Some(json!({ "fault_message": fault.to_string() }).to_string()),
        }
    }
}
