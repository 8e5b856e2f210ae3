//! `/dirty/watch`: what a guest writes, for somebody who looks on: where, how fast, by whom, and
//! what its jobs are doing.
//!
//! `POST` begins a watch, which has a subscription of its own; each `GET` of it answers with what
//! was written since the one before, and `DELETE` ends it. One that nobody asks any more ends by
//! itself: a client that dies must not leave the guest's writes followed for ever.

use std::time::Duration;

use axum::Json;
use axum::extract::rejection::QueryRejection;
use axum::extract::{Query, State};
use axum::http::StatusCode;
use serde::Deserialize;

use super::fault::{Fault, Input};
use super::handler::{Answer, Shared, blocking};
use crate::model::{MAX_BINS, WatchBegun, WatchPage, WatchRequest};

/// Ranges where nobody asks for a number.
const USUAL_BINS: u32 = 1024;
/// The longest window that can be asked for.
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

/// Which watch is meant, and how long its window shall be.
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
