//! Maps each path to the part of the guest or its jobs that it shows or changes.

use std::sync::Arc;
use std::time::Duration;

use axum::extract::rejection::QueryRejection;
use axum::extract::{Query, Request, State};
use axum::http::{Method, StatusCode, Uri};
use axum::middleware::{self, Next};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, patch, post, put};
use axum::{Json, Router};
use driftline_dirty_tracker::TrackerStats;
use serde::Deserialize;
use serde_json::{Value, json};

use super::app::App;
use super::balloon;
use super::devices;
use super::dirty_watch;
use super::fault::{Fault, JsonBody};
use super::handler::{AppState, JsonAnswer, blocking};
use super::metrics;
use super::plan;
use super::upgrade;
use crate::jobs::Jobs;
use crate::model::{
    ActionRequest, ArrivingInfo, CheckpointPage, CheckpointRequest, GuestState, Info, InfoPage,
    InstanceInfo, JobStarted, MachineSettings, MigrationPage, MigrationRequest, ResolveRequest,
    VmConfig, VmRequest, VmTarget, at_most,
};

/// Returns the routes of a process: Driftline's own and, unless the guest is configured over the
/// API, those whose paths Firecracker has, too.
pub(super) fn all(app: Arc<App>) -> Router {
    let routes = match app.payload_limit() {
        None => own().merge(shared()),
        Some(_) => own(),
    };
    routes.fallback(unknown).method_not_allowed_fallback(unknown).with_state(app)
}

/// Returns the routes that Firecracker does not have.
fn own() -> Router<Arc<App>> {
    let without_query = Router::new()
        .route("/v1/info", get(info))
        .route("/v1/stop", post(stop))
        .route("/v1/upgrade", post(upgrade::upgrade))
        .route("/v1/nmi", post(send_nmi))
        .route("/v1/migration/plan", post(plan::plan))
        .route("/v1/migration/resolve", post(resolve_migration))
        .route("/v1/dirty", get(dirty))
        .merge(metrics::route())
        .route_layer(middleware::from_fn(refuse_query));
    Router::new()
        .route("/v1/checkpoint", post(start_checkpoints).get(checkpoints).delete(stop_checkpoints))
        .route("/v1/checkpoint/attach", get(attach_to_checkpoints))
        .route("/v1/migration", post(start_migration).get(migration).delete(cancel_migration))
        .route(
            "/v1/dirty/watch",
            post(dirty_watch::start).get(dirty_watch::show).delete(dirty_watch::end),
        )
        .merge(without_query)
}

/// Returns the routes whose paths Firecracker has, too, for a guest that was not configured over
/// the API.
fn shared() -> Router<Arc<App>> {
    Router::new()
        .route("/", get(instance))
        .route("/version", get(version))
        .route("/machine-config", get(machine_config))
        .route("/vm/config", get(vm_config))
        .route("/vm", patch(change_vm))
        .route("/actions", put(act))
        .route("/drives/{id}", get(devices::drive))
        .route("/network-interfaces/{id}", get(devices::interface))
        .route("/vsock", get(devices::vsock))
        .route("/balloon", get(balloon::show).patch(balloon::resize))
        .route("/balloon/statistics", get(balloon::show_statistics))
        .route_layer(middleware::from_fn(refuse_query))
}

/// Refuses query parameters on a request that takes none, just as bodies refuse unknown fields.
async fn refuse_query(request: Request, next: Next) -> Response {
    match request.uri().query() {
        None | Some("") => next.run(request).await,
        Some(query) => {
            let (method, path) = (request.method(), request.uri().path());
            Fault::new(format!("{method} {path} takes no parameters, and was given \"{query}\""))
                .into_response()
        }
    }
}

async fn unknown(method: Method, uri: Uri) -> Fault {
    Fault::new(format!("there is no request {method} {}", uri.path()))
}

async fn instance(State(app): AppState) -> JsonAnswer<InstanceInfo> {
    let (id, state) = match app.jobs() {
        Err(_) => (String::new(), "Not started"),
        Ok(_) => {
            let info = current_info(app).await?;
            // Firecracker has two states for a started guest.
            let state = if info.state == GuestState::Running { "Running" } else { "Paused" };
            (info.vm_id.to_string(), state)
        }
    };
    Ok(Json(InstanceInfo {
        id,
        state: state.into(),
        vmm_version: env!("CARGO_PKG_VERSION").into(),
        app_name: "Driftline".into(),
    }))
}

async fn version() -> Json<Value> {
    Json(json!({ "driftline_version": env!("CARGO_PKG_VERSION") }))
}

async fn info(State(app): AppState) -> JsonAnswer<InfoPage> {
    match app.arriving() {
        Some(migration) => Ok(Json(InfoPage::Arriving(ArrivingInfo::new(migration)))),
        None => Ok(Json(InfoPage::Guest(Box::new(current_info(app).await?)))),
    }
}

async fn current_info(app: Arc<App>) -> Result<Info, Fault> {
    blocking(app, |jobs| Ok(jobs.info())).await
}

async fn machine_config(State(app): AppState) -> JsonAnswer<MachineSettings> {
    blocking(app, |jobs| Ok(Json(jobs.vm().machine_config().into()))).await
}

async fn vm_config(State(app): AppState) -> JsonAnswer<VmConfig> {
    blocking(app, |jobs| Ok(Json(jobs.vm().machine_config().into()))).await
}

async fn change_vm(
    State(app): AppState,
    JsonBody(request): JsonBody<VmRequest>,
) -> Result<StatusCode, Fault> {
    blocking(app, move |jobs| {
        match request.state {
            VmTarget::Paused => jobs.pause()?,
            VmTarget::Resumed => jobs.resume()?,
        }
        Ok(StatusCode::NO_CONTENT)
    })
    .await
}

async fn act(
    State(app): AppState,
    JsonBody(request): JsonBody<ActionRequest>,
) -> Result<StatusCode, Fault> {
    let jobs = app.jobs()?;
    Err(Fault::new(match request.action_type.as_str() {
        "InstanceStart" => format!("the guest {} has been started already", jobs.vm().vm_id()),
        other => format!("there is no action \"{other}\" on this machine"),
    }))
}

/// Also works for a process that has no guest yet.
async fn stop(State(app): AppState) -> Result<StatusCode, Fault> {
    app.interrupt_aside("stopped over the API").await?;
    Ok(StatusCode::NO_CONTENT)
}

async fn send_nmi(State(app): AppState) -> Result<StatusCode, Fault> {
    blocking(app, |jobs| Ok(jobs.vm().send_nmi()?)).await?;
    Ok(StatusCode::NO_CONTENT)
}

async fn start_checkpoints(
    State(app): AppState,
    JsonBody(request): JsonBody<CheckpointRequest>,
) -> JsonAnswer<JobStarted> {
    if !request.store.is_absolute() {
        let store = request.store.display();
        return Err(Fault::new(format!("the store {store} is not an absolute path")));
    }
    let begin = move |jobs: &Arc<Jobs>| {
        let job = jobs.start_checkpoints(&request)?;
        Ok((job, jobs.clone()))
    };
    // The client may have disconnected meanwhile. That does not end this function.
    let (job, jobs) = blocking(app, begin).await?;
    tokio::spawn(async move { jobs.expect_client(job).await });
    Ok(Json(JobStarted { job }))
}

/// Answers when the run has ended. An attached run ends when this connection does.
async fn attach_to_checkpoints(
    State(app): AppState,
    query: Result<Query<JobQuery>, QueryRejection>,
) -> Result<StatusCode, Fault> {
    let JobQuery { job, .. } = JobQuery::read(query)?;
    let jobs = app.jobs()?;
    jobs.attach_to_checkpoints(job).await?;
    Ok(StatusCode::NO_CONTENT)
}

/// The job that a request names, the position of the reader, and how long the reader waits for
/// news.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct JobQuery {
    /// The job's number; by default the latest job.
    job: Option<u64>,
    #[serde(default)]
    since: u64,
    #[serde(default)]
    wait_ms: u64,
}

/// The longest wait for news that a client can request.
const MAX_NEWS_WAIT: Duration = Duration::from_secs(30);

impl JobQuery {
    /// Returns a request's query, unless a value is outside its limits.
    fn read(query: Result<Query<Self>, QueryRejection>) -> Result<Self, Fault> {
        let Query(query) = query.map_err(|e| Fault::new(e.body_text()))?;
        at_most("wait_ms", query.wait_ms, MAX_NEWS_WAIT.as_millis() as u64)?;
        Ok(query)
    }

    fn wait(&self) -> Duration {
        Duration::from_millis(self.wait_ms)
    }
}

async fn checkpoints(
    State(app): AppState,
    query: Result<Query<JobQuery>, QueryRejection>,
) -> JsonAnswer<CheckpointPage> {
    let query = JobQuery::read(query)?;
    let jobs = app.jobs()?;
    jobs.checkpoints(query.job, query.since, query.wait()).await.map(Json).map_err(Fault::from)
}

async fn stop_checkpoints(
    State(app): AppState,
    query: Result<Query<JobQuery>, QueryRejection>,
) -> Result<StatusCode, Fault> {
    let JobQuery { job, .. } = JobQuery::read(query)?;
    blocking(app, move |jobs| jobs.stop_checkpoints(job).map_err(Fault::from)).await?;
    Ok(StatusCode::NO_CONTENT)
}

async fn start_migration(
    State(app): AppState,
    JsonBody(request): JsonBody<MigrationRequest>,
) -> JsonAnswer<JobStarted> {
    request.check()?;
    let begin = move |jobs: &Arc<Jobs>| jobs.start_migration(&request).map_err(Fault::from);
    let job = blocking(app, begin).await?;
    Ok(Json(JobStarted { job }))
}

async fn migration(
    State(app): AppState,
    query: Result<Query<JobQuery>, QueryRejection>,
) -> JsonAnswer<MigrationPage> {
    let query = JobQuery::read(query)?;
    let jobs = app.jobs()?;
    jobs.migration(query.job, query.wait()).await.map(Json).map_err(Fault::from)
}

async fn cancel_migration(
    State(app): AppState,
    query: Result<Query<JobQuery>, QueryRejection>,
) -> Result<StatusCode, Fault> {
    let JobQuery { job, .. } = JobQuery::read(query)?;
    blocking(app, move |jobs| jobs.cancel_migration(job).map_err(Fault::from)).await?;
    Ok(StatusCode::NO_CONTENT)
}

async fn resolve_migration(
    State(app): AppState,
    JsonBody(request): JsonBody<ResolveRequest>,
) -> Result<StatusCode, Fault> {
    let resolve =
        move |jobs: &Arc<Jobs>| jobs.resolve_migration(request.action).map_err(Fault::from);
    blocking(app, resolve).await?;
    Ok(StatusCode::NO_CONTENT)
}

async fn dirty(State(app): AppState) -> JsonAnswer<TrackerStats> {
    Ok(Json(current_info(app).await?.dirty))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn wait_for_news_is_bounded() {
        let read = |query: &str| {
            let uri: Uri = format!("/v1/migration?{query}").parse().unwrap();
            JobQuery::read(Query::try_from_uri(&uri))
        };
        assert_eq!(read("wait_ms=30000").unwrap().wait(), MAX_NEWS_WAIT);
        assert_eq!(read("job=1").unwrap().wait(), Duration::ZERO);
        assert!(read("wait_ms=30001").is_err());
    }
}
