//! Answers Firecracker's requests while there is no guest: parses each request and lets the thread
//! that configures the guest answer it.

use std::fmt::{self, Display};
use std::time::Instant;

use tokio::sync::oneshot;

use super::app::App;
use super::event::{ApiEvent, Caller};
use crate::firecracker::{
    Answer, ApiFault, CountedCall, Operation, ParsedCall, api_latency, parse,
};

/// The answer to a request of Firecracker's API.
#[derive(Debug)]
pub(super) struct FirecrackerAnswer {
    pub(super) answer: Answer,
    /// Whether the request uses something deprecated.
    pub(super) is_deprecated: bool,
}

/// Answers a request of Firecracker's API. `path` includes the query.
pub(super) async fn answer(app: &App, method: &str, path: &str, body: &[u8]) -> FirecrackerAnswer {
    tracing::info!("The API server received a {}.", ReceivedRequest { method, path, body });
    let begun = Instant::now();
    let counts = app.api_counts();
    let call = CountedCall { method, path, has_body: !body.is_empty() };
    let (answer, deprecation) = match parse(method, path, body) {
        Ok(ParsedCall { operation, deprecation }) => {
            counts.count(&call, true, deprecation.is_some());
            let latency = api_latency(&operation);
            let answer = ask(app, operation).await;
            if let Some(name) = latency {
                counts.set_api_latency(name, begun.elapsed(), &answer);
            }
            (answer, deprecation)
        }
        Err(fault) => {
            counts.count(&call, false, false);
            (Answer::Fault(fault), None)
        }
    };
    if let Some(what) = deprecation {
        tracing::warn!("{what}");
    }
    match &answer {
        Answer::Done => {
            tracing::info!("The request was executed successfully. Status code: 204 No Content.");
        }
        Answer::Page(_) => {
            tracing::info!("The request was executed successfully. Status code: 200 OK.");
        }
        Answer::Fault(fault) => {
            let status = match fault.status() {
                413 => "413 Payload too large",
                _ => "400 Bad Request",
            };
            tracing::error!("Received Error. Status code: {status}. Message: {fault}");
        }
    }
    FirecrackerAnswer { answer, is_deprecated: deprecation.is_some() }
}

/// A request as Firecracker's log describes it: with its body, unless that is metadata.
struct ReceivedRequest<'a> {
    method: &'a str,
    path: &'a str,
    body: &'a [u8],
}

impl Display for ReceivedRequest<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { method, path, body } = self;
        let method = match *method {
            "GET" => "Get",
            "PUT" => "Put",
            "PATCH" => "Patch",
            "DELETE" => "Delete",
            other => other,
        };
        write!(f, "{method} request on {path:?}")?;
        match body.is_empty() || path.trim_matches('/') == "mmds" {
            true => Ok(()),
            false => write!(f, " with body {:?}", String::from_utf8_lossy(body)),
        }
    }
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn logged_request_has_no_metadata() {
        let logged = |method, path, body: &str| {
            ReceivedRequest { method, path, body: body.as_bytes() }.to_string()
        };
        assert_eq!(logged("GET", "/", ""), r#"Get request on "/""#);
        assert_eq!(logged("PUT", "/mmds", "{1}"), r#"Put request on "/mmds""#);
        assert_eq!(logged("PATCH", "/mmds/", "{1}"), r#"Patch request on "/mmds/""#);
        assert_eq!(logged("PUT", "/a\n", "{\n}"), r#"Put request on "/a\n" with body "{\n}""#);
    }
}
