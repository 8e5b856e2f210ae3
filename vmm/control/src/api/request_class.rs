//! Groups requests: each group has a limit of its own on requests under way.

use axum::http::{Method, Uri};

/// Maximum number of concurrent requests of [`RequestClass::Wait`], and of [`RequestClass::Other`].
const MAX_BUSY: usize = 64;
/// Maximum number of concurrent requests of each other class.
const MAX_RESERVED: usize = 16;

/// A group of requests with a limit of its own.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum RequestClass {
    /// An operator reads the guest's state.
    Status,
    /// An operator ends the guest.
    Stop,
    /// An operator ends a job, or resolves a migration in doubt.
    EndJob,
    /// A client waits for news.
    Wait,
    /// All other requests.
    Other,
}

impl RequestClass {
    pub(super) const COUNT: usize = 5;

    pub(super) fn of(method: &Method, uri: &Uri) -> Self {
        // A router that answers GET also answers HEAD in the same way.
        let reads = [Method::GET, Method::HEAD].contains(method);
        let path = uri.path();
        // Dropping a request of either kind changes nothing, except that dropping one to attach
        // ends an attached run.
        let waits =
            path == "/v1/checkpoint/attach" || uri.query().is_some_and(|q| q.contains("wait_ms="));
        match path {
            "/" | "/v1/info" | "/metrics" if reads => Self::Status,
            "/v1/stop" => Self::Stop,
            "/v1/migration/resolve" => Self::EndJob,
            _ if method == Method::DELETE => Self::EndJob,
            _ if reads && waits => Self::Wait,
            _ => Self::Other,
        }
    }

    /// Returns the maximum number of concurrent requests of this class.
    pub(super) fn limit(self) -> usize {
        match self {
            Self::Wait | Self::Other => MAX_BUSY,
            Self::Status | Self::Stop | Self::EndJob => MAX_RESERVED,
        }
    }
}
