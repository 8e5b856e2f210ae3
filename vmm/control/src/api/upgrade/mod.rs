//! Replaces the process of a running guest: another process continues with the guest, its open
//! files, the API's socket and its connections.
//!
//! ```text
//! driftline upgrade          the guest's process            the next process
//! starts the next process ---------------------------------> listens on a unix socket
//! POST /v1/upgrade ------->  connects there
//!                            offer: arguments, descriptors -> reads them as its own command line,
//!                                                            enters its sandbox
//!                                                       <--  ready, or why not
//!                            suspends a checkpoint run
//!                            holds the API's requests
//!                            hands the guest over (as by `send-migration --local`)
//!                            moves the API's connections --> answers them, once
//!                            moves the checkpoint run    --> it has the run
//!                                                       <--  serves, and is the main process
//! the report        <------  answers, and ends
//! ```
//!
//! Until the guest has changed hands, a failure leaves it in its process, as in any migration.
//!
//! | module | does |
//! | --- | --- |
//! | `offer` | what the next process gets before the guest: its bytes and descriptors |
//! | `run` | a checkpoint run that continues in the next process |
//! | `source` | the guest's process: makes the offer and hands the guest over |

mod offer;
mod run;
mod source;

use axum::Json;
use axum::extract::State;
use driftline_migrate::SendReport;
use tokio::task::spawn_blocking;

pub use self::offer::{GuestOffer, OfferError, OfferedFiles, TakenOffer, notify_socket};
pub use self::run::receive_run;
use super::fault::{Fault, JsonBody};
use super::handler::{AppState, JsonAnswer};
use crate::model::UpgradeRequest;

/// Answers `POST /v1/upgrade` once the guest has changed its process, or continues in this one.
pub(super) async fn upgrade(
    State(app): AppState,
    JsonBody(request): JsonBody<UpgradeRequest>,
) -> JsonAnswer<SendReport> {
    let jobs = app.jobs()?.clone();
    let work = move || {
        let span = jobs.span().clone();
        span.in_scope(|| source::upgrade(&app, &jobs, &request.socket))
    };
    match spawn_blocking(work).await {
        Ok(Ok(report)) => Ok(Json(report)),
        Ok(Err(e)) => Err(Fault::new(e.to_string())),
        Err(e) => Err(Fault::internal(format!("the request failed: {e}"))),
    }
}
