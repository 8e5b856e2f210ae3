//! Answers Firecracker's requests. `GET /` of a started guest is answered here. All others are
//! answered on the thread that configures the guest and, once it is started, asks the guest.

use std::fmt::{self, Display, Write};
use std::time::Instant;

use tokio::sync::oneshot;

use super::app::App;
use super::event::{ApiEvent, Caller};
use crate::firecracker::{
    Answer, ApiFault, CountedCall, Operation, ParsedCall, latency_names, parse,
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
    let has_details = tracing::enabled!(tracing::Level::DEBUG);
    let received = ReceivedRequest { method, path, body, has_details };
    tracing::info!("The API server received a {received}.");
    let begun = Instant::now();
    let counts = app.api_counts();
    let call = CountedCall { method, path, has_body: !body.is_empty() };
    let (answer, deprecation) = match parse(method, path, body) {
        Ok(ParsedCall { operation, deprecation }) => {
            counts.count(&call, true, deprecation.is_some());
            let measured = latency_names(&operation);
            let answer = ask(app, operation).await;
            if let Some(names) = measured {
                counts.set_api_latency(names, begun.elapsed(), &answer);
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
            let message = OneLine(fault.to_string());
            tracing::error!("Received Error. Status code: {status}. Message: {message}");
        }
    }
    FirecrackerAnswer { answer, is_deprecated: deprecation.is_some() }
}

/// A text that may contain parts of a request, on one line of a log: control characters are
/// escaped.
struct OneLine(String);

impl Display for OneLine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.chars().try_for_each(|c| match c.is_control() {
            true => write!(f, "{}", c.escape_default()),
            false => f.write_char(c),
        })
    }
}

/// A request as Firecracker's log describes it: with its body, unless that is metadata, or a CPU
/// template whose details are not logged.
struct ReceivedRequest<'a> {
    method: &'a str,
    path: &'a str,
    body: &'a [u8],
    /// Whether the level of the log includes details.
    has_details: bool,
}

impl Display for ReceivedRequest<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { method, path, body, has_details } = self;
        let method = match *method {
            "GET" => "Get",
            "PUT" => "Put",
            "PATCH" => "Patch",
            "DELETE" => "Delete",
            other => other,
        };
        write!(f, "{method} request on {path:?}")?;
        match path.trim_matches('/') {
            path if body.is_empty() || path == "mmds" => Ok(()),
            "cpu-config" if !has_details => f.write_str(
                ". To view the CPU template received by the API, configure log-level to DEBUG",
            ),
            _ => write!(f, " with body {:?}", String::from_utf8_lossy(body)),
        }
    }
}

/// Lets the thread that configures the guest answer. `GET /` of a guest is answered here, whatever
/// that thread is doing.
async fn ask(app: &App, operation: Operation) -> Answer {
    if let (Operation::GetInstance, Some(instance)) = (&operation, app.started_instance()) {
        return Answer::page(&instance).unwrap_or_else(Answer::Fault);
    }
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
        let detailed = |method, path, body: &str, has_details| {
            ReceivedRequest { method, path, body: body.as_bytes(), has_details }.to_string()
        };
        let logged = |method, path, body| detailed(method, path, body, false);
        assert_eq!(logged("GET", "/", ""), r#"Get request on "/""#);
        assert_eq!(logged("PUT", "/mmds", "{1}"), r#"Put request on "/mmds""#);
        assert_eq!(logged("PATCH", "/mmds/", "{1}"), r#"Patch request on "/mmds/""#);
        assert_eq!(logged("PUT", "/a\n", "{\n}"), r#"Put request on "/a\n" with body "{\n}""#);
        assert_eq!(
            logged("PUT", "/cpu-config", "{}"),
            "Put request on \"/cpu-config\". To view the CPU template received by the API, \
             configure log-level to DEBUG"
        );
        let with_body = r#"Put request on "/cpu-config" with body "{}""#;
        assert_eq!(detailed("PUT", "/cpu-config", "{}", true), with_body);
    }

    #[test]
    fn logged_fault_is_one_line() {
        let fault = OneLine("bad\n2026 [a:b] forged\x1b[2J\u{85}".to_owned());
        assert_eq!(fault.to_string(), r"bad\n2026 [a:b] forged\u{1b}[2J\u{85}");
    }
}
