//! Serves `/metrics`, on the API socket and on an address of its own.

use std::sync::Arc;

use axum::Router;
use axum::extract::State;
use axum::http::HeaderMap;
use axum::http::header::{ACCEPT, CONTENT_TYPE, VARY};
use axum::response::{IntoResponse, Response};
use axum::routing::get;

use super::app::App;
use super::fault::Fault;
use super::handler::AppState;
use crate::metrics::{Format, Scrape};

/// Returns the router of `/metrics` alone.
pub(super) fn route() -> Router<Arc<App>> {
    Router::new().route("/metrics", get(show))
}

/// `GET /metrics`. Also works for a process that has no guest yet.
async fn show(State(app): AppState, headers: HeaderMap) -> Result<Response, Fault> {
    let accepted = headers.get_all(ACCEPT).iter().filter_map(|header| header.to_str().ok());
    let format = Format::accepted(&accepted.collect::<Vec<_>>().join(","));
    // A thread that is started before the sandbox closes keeps its rights, and would serve later
    // requests, too. Without a guest nothing blocks.
    let is_configuring = app.payload_limit().is_some() && app.jobs().is_err();
    let read = move || {
        let jobs = app.jobs().ok().map(|jobs| &**jobs);
        Scrape::read(jobs, app.received()).write(format)
    };
    let page = match is_configuring {
        true => Ok(read()),
        false => tokio::task::spawn_blocking(read).await,
    };
    match page {
        Ok(Ok(page)) => {
            Ok(([(CONTENT_TYPE, format.content_type()), (VARY, "Accept")], page).into_response())
        }
        Ok(Err(e)) => Err(Fault::internal(format!("the metrics cannot be written: {e}"))),
        Err(e) => Err(Fault::internal(format!("the request failed: {e}"))),
    }
}
