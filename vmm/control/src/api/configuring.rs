//! Answers Firecracker's requests while there is no guest: parses each request and lets the thread
//! that configures the guest answer it.

use tokio::sync::oneshot;

use super::app::App;
use super::event::{ApiEvent, Caller};
use crate::firecracker::{Answer, ApiFault, Operation, ParsedCall, parse};

/// The answer to a request of Firecracker's API.
#[derive(Debug)]
pub(super) struct FirecrackerAnswer {
    pub(super) answer: Answer,
    /// Whether the request uses something deprecated.
    pub(super) is_deprecated: bool,
}

/// Answers a request of Firecracker's API. `path` includes the query.
pub(super) async fn answer(app: &App, method: &str, path: &str, body: &[u8]) -> FirecrackerAnswer {
    let (answer, deprecation) = match parse(method, path, body) {
        Ok(ParsedCall { operation, deprecation }) => (ask(app, operation).await, deprecation),
        Err(fault) => (Answer::Fault(fault), None),
    };
    if let Some(what) = deprecation {
        tracing::warn!("{what}");
    }
    FirecrackerAnswer { answer, is_deprecated: deprecation.is_some() }
}

/// Lets the thread that configures the guest answer.
async fn ask(app: &App, operation: Operation) -> Answer {
    let (answer, answered) = oneshot::channel();
    let sent = app.configure(ApiEvent::Call(Caller::new(answer), operation));
    let ending = || Answer::Fault(ApiFault::Ending);
    if !sent {
        return ending();
    }
    answered.await.unwrap_or_else(|_| ending())
}
