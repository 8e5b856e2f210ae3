//! Shared parts of the request handlers: their state, their answers, and calls that may block.

use std::sync::Arc;

use axum::Json;
use axum::extract::State;

use super::app::App;
use super::fault::Fault;
use crate::jobs::Jobs;

/// The state that every handler receives.
pub(super) type AppState = State<Arc<App>>;
/// The result of most handlers.
pub(super) type JsonAnswer<T> = Result<Json<T>, Fault>;

/// Runs `call` on a thread that may block.
pub(super) async fn blocking<T: Send + 'static>(
    app: Arc<App>,
    call: impl FnOnce(&Arc<Jobs>) -> Result<T, Fault> + Send + 'static,
) -> Result<T, Fault> {
    let jobs = app.jobs()?.clone();
    let called = tokio::task::spawn_blocking(move || jobs.span().in_scope(|| call(&jobs)));
    let called = called.await;
    called.unwrap_or_else(|e| Err(Fault::internal(format!("the request failed: {e}"))))
}
