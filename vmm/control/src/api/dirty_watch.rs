//! `/v1/dirty/watch`: shows where, how fast and by which vCPU a guest writes, and what its jobs do.
//!
//! `POST` begins a watch, which has its own subscription. Each `GET` of the watch answers with what
//! was written since the previous one, and `DELETE` ends the watch. A watch that no client reads
//! any more ends by itself, so that the guest's writes are not tracked forever for a client that
//! has died.

use std::sync::Arc;
use std::time::Duration;

use axum::Json;
use axum::extract::rejection::QueryRejection;
use axum::extract::{Query, State};
use axum::http::StatusCode;
use serde::Deserialize;

use super::fault::{Fault, JsonBody};
use super::handler::{AppState, JsonAnswer, blocking};
use crate::jobs::Jobs;
use crate::model::{MAX_BINS, WatchPage, WatchRequest, WatchStarted, at_most, one_to};

/// Default number of ranges.
const DEFAULT_BINS: u32 = 1024;
/// The longest window that a client can request.
const MAX_WINDOW: Duration = Duration::from_secs(60);

pub(super) async fn start(
    State(app): AppState,
    JsonBody(request): JsonBody<WatchRequest>,
) -> JsonAnswer<WatchStarted> {
    let bins = request.bins.unwrap_or(DEFAULT_BINS);
    one_to("bins", bins.into(), MAX_BINS.into())?;
    let begin = move |jobs: &Arc<Jobs>| jobs.begin_watch(bins).map_err(Fault::from);
    let watch = blocking(app, begin).await?;
    Ok(Json(WatchStarted { watch }))
}

/// The watch that a request names, and the length of its window.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct WatchQuery {
    watch: u64,
    #[serde(default)]
    wait_ms: u64,
}

pub(super) async fn show(
    State(app): AppState,
    query: Result<Query<WatchQuery>, QueryRejection>,
) -> JsonAnswer<WatchPage> {
    let Query(WatchQuery { watch, wait_ms }) = query.map_err(|e| Fault::new(e.body_text()))?;
    let wait = Duration::from_millis(wait_ms);
    at_most("wait_ms", wait_ms, MAX_WINDOW.as_millis() as u64)?;
    let jobs = app.jobs()?;
    let page = jobs.ask_watch(watch, wait)?.await;
    let ended = |_| Fault::new(format!("watch {watch} has ended"));
    page.map_err(ended)?.map(Json).map_err(Fault::from)
}

pub(super) async fn end(
    State(app): AppState,
    query: Result<Query<WatchQuery>, QueryRejection>,
) -> Result<StatusCode, Fault> {
    let Query(WatchQuery { watch, .. }) = query.map_err(|e| Fault::new(e.body_text()))?;
    app.jobs()?.end_watch(watch)?;
    Ok(StatusCode::NO_CONTENT)
}
