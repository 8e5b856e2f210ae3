//! Shows a guest's devices. They are chosen when the guest is started and do not change.

use axum::Json;
use axum::extract::{Path, State};

use super::fault::Fault;
use super::handler::{AppState, JsonAnswer, blocking};
use crate::jobs::Jobs;
use crate::model::{DriveSettings, InterfaceSettings, VmConfig, VsockSettings};

/// `GET /drives/{id}`.
pub(super) async fn drive(
    State(app): AppState,
    Path(id): Path<String>,
) -> JsonAnswer<DriveSettings> {
    blocking(app, move |jobs| {
        let mut drives = config(jobs).drives.into_iter();
        let found = drives.find(|drive| drive.drive_id.as_ref() == Some(&id));
        found.map(Json).ok_or_else(|| none("disk", &id))
    })
    .await
}

/// `GET /network-interfaces/{id}`.
pub(super) async fn interface(
    State(app): AppState,
    Path(id): Path<String>,
) -> JsonAnswer<InterfaceSettings> {
    blocking(app, move |jobs| {
        let mut interfaces = config(jobs).network_interfaces.into_iter();
        let found = interfaces.find(|interface| interface.iface_id.as_ref() == Some(&id));
        found.map(Json).ok_or_else(|| none("network interface", &id))
    })
    .await
}

/// `GET /vsock`.
pub(super) async fn vsock(State(app): AppState) -> JsonAnswer<VsockSettings> {
    blocking(app, |jobs| {
        config(jobs).vsock.map(Json).ok_or_else(|| Fault::new("the guest has no vsock"))
    })
    .await
}

fn config(jobs: &Jobs) -> VmConfig {
    jobs.vm().machine_config().into()
}

fn none(kind: &str, id: &str) -> Fault {
    Fault::new(format!("the guest has no {kind} \"{id}\""))
}
