//! Handles the requests for a guest's balloon.

use axum::Json;
use axum::extract::State;
use axum::http::StatusCode;
use driftline_machine::devices::BalloonControl;

use super::fault::{Fault, JsonBody};
use super::handler::{AppState, JsonAnswer, blocking};
use crate::jobs::Jobs;
use crate::model::{BalloonRequest, BalloonStatistics, BalloonView};

/// `GET /balloon`.
pub(super) async fn show(State(app): AppState) -> JsonAnswer<BalloonView> {
    blocking(app, |jobs| Ok(Json(view(balloon(jobs)?)))).await
}

/// `GET /balloon/statistics`.
pub(super) async fn show_statistics(State(app): AppState) -> JsonAnswer<BalloonStatistics> {
    blocking(app, |jobs| {
        let off = || Fault::new("the guest's balloon was configured without statistics");
        Ok(Json(BalloonStatistics::of(balloon(jobs)?).ok_or_else(off)?))
    })
    .await
}

/// `PATCH /balloon`.
pub(super) async fn resize(
    State(app): AppState,
    JsonBody(request): JsonBody<BalloonRequest>,
) -> Result<StatusCode, Fault> {
    blocking(app, move |jobs| {
        let balloon = balloon(jobs)?;
        let most = jobs.vm().machine_config().mem_bytes >> 20;
        if request.amount_mib > most {
            let requested = request.amount_mib;
            return Err(Fault::new(format!(
                "a balloon of {requested} MiB is more than the guest's memory of {most} MiB"
            )));
        }
        balloon.set_target(request.amount_mib << 20);
        Ok(StatusCode::NO_CONTENT)
    })
    .await
}

fn balloon(jobs: &Jobs) -> Result<&BalloonControl, Fault> {
    let none = || Fault::new("the guest has no balloon; `driftline run --balloon` gives it one");
    jobs.vm().balloon().ok_or_else(none)
}

fn view(balloon: &BalloonControl) -> BalloonView {
    let (config, figures) = (balloon.config(), balloon.stats());
    BalloonView {
        amount_mib: figures.target_bytes >> 20,
        deflate_on_oom: config.deflate_on_oom,
        stats_polling_interval_s: balloon.statistics_interval_s(),
        free_page_hinting: config.hinting,
        free_page_reporting: config.reporting,
        target_bytes: figures.target_bytes,
        actual_bytes: figures.actual_bytes,
        discarded_bytes: figures.discarded_bytes,
    }
}
