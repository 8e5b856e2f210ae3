//! `/dirty/watch`: shows where, how fast and by which vCPU a guest writes, and what its jobs do.
//!
//! `POST` begins a watch, which has its own subscription. Each `GET` of the watch answers with what
//! was written since the previous one, and `DELETE` ends the watch. A watch that no client reads
//! any more ends by itself, so that the guest's writes are not tracked forever for a client that
//! has died.

use std::time::Duration;

use axum::Json;
use axum::extract::rejection::QueryRejection;
use axum::extract::{Query, State};
use axum::http::StatusCode;
use serde::Deserialize;

use super::fault::{Fault, Input};
use super::handler::{Answer, Shared, blocking};
use crate::model::{MAX_BINS, WatchBegun, WatchPage, WatchRequest};

/// Default number of ranges.
const USUAL_BINS: u32 = 1024;
/// The longest window that a client can request.
pub const MAX_WAIT: Duration = Duration::from_secs(60);

pub(super) async fn begin(
    State(app): Shared,
    Input(request): Input<WatchRequest>,
) -> Answer<WatchBegun> {
    let bins = request.bins.unwrap_or(USUAL_BINS);
    if !(1..=MAX_BINS).contains(&bins) {
        return Err(Fault::new(format!("bins is {bins}; it is 1 to {MAX_BINS}")));
    }
    let begin = move |jobs: &_| crate::jobs::Jobs::begin_watch(jobs, bins).map_err(Fault::new);
    let watch = blocking(app, begin).await?;
    Ok(Json(WatchBegun { watch }))
}

/// The watch that a request names, and the length of its window.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Asked {
    watch: u64,
    #[serde(default)]
    wait_ms: u64,
}

pub(super) async fn look(
    State(app): Shared,
    asked: Result<Query<Asked>, QueryRejection>,
) -> Answer<WatchPage> {
    let Query(Asked { watch, wait_ms }) = asked.map_err(|e| Fault::new(e.body_text()))?;
    let wait = Duration::from_millis(wait_ms);
    if wait > MAX_WAIT {
        let most = MAX_WAIT.as_millis();
        return Err(Fault::new(format!("wait_ms is {wait_ms}; it is at most {most}")));
    }
    let jobs = app.jobs().map_err(Fault::new)?;
    let page = jobs.ask_watch(watch, wait).map_err(Fault::new)?.await;
    let ended = |_| Fault::new(format!("watch {watch} has ended"));
    page.map_err(ended)?.map(Json).map_err(Fault::new)
}

pub(super) async fn end(
    State(app): Shared,
    asked: Result<Query<Asked>, QueryRejection>,
) -> Result<StatusCode, Fault> {
    let Query(Asked { watch, .. }) = asked.map_err(|e| Fault::new(e.body_text()))?;
    app.jobs().map_err(Fault::new)?.end_watch(watch).map_err(Fault::new)?;
    Ok(StatusCode::NO_CONTENT)
}
