//! Serves Firecracker's API while there is no guest: parses each request and lets the thread that
//! configures the guest answer it.

use axum::body::Body;
use axum::extract::{Request, State};
use axum::http::header::CONTENT_TYPE;
use axum::http::{HeaderValue, Response, StatusCode};
use axum::response::IntoResponse;
use tokio::sync::oneshot;

use super::app::App;
use super::event::{ApiEvent, Caller};
use super::fault::{Fault, read_body};
use super::handler::AppState;
use crate::firecracker::{Answer, ApiFault, Operation, ParsedCall, parse};

/// Answers any request of Firecracker's API.
pub(super) async fn answer(
    State(app): AppState,
    request: Request,
) -> Result<Response<Body>, Fault> {
    let (head, body) = request.into_parts();
    let body = read_body(body).await?;
    let path = head.uri.path_and_query().map_or("/", |path| path.as_str());
    let (answer, deprecation) = match parse(head.method.as_str(), path, &body) {
        Ok(ParsedCall { operation, deprecation }) => (ask(&app, operation).await, deprecation),
        Err(fault) => (Answer::Fault(fault), None),
    };
    if let Some(what) = deprecation {
        tracing::warn!("{what}");
    }
    let mut response = reply(answer)?;
    if deprecation.is_some() {
        response.headers_mut().insert("Deprecation", HeaderValue::from_static("true"));
    }
    Ok(response)
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

fn reply(answer: Answer) -> Result<Response<Body>, Fault> {
    let status = StatusCode::from_u16(answer.status())
        .map_err(|e| Fault::internal(format!("the answer has no status: {e}")))?;
    Ok(match answer.into_body() {
        None => status.into_response(),
        Some(body) => (status, [(CONTENT_TYPE, "application/json")], body).into_response(),
    })
}
