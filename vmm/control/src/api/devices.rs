//! Shows a guest's devices, under Firecracker's names where Firecracker has the same device. The
//! devices are chosen when the guest is started and do not change.

use axum::Json;
use axum::extract::{Path, State};
use driftline_machine::config::{DeviceConfig, DiskConfig, NetConfig, VsockConfig};
use serde_json::{Map, Value, json};

use super::fault::Fault;
use super::handler::{Answer, Shared, blocking};

/// `GET /drives/{id}`.
pub(super) async fn drive(State(app): Shared, Path(id): Path<String>) -> Answer<Value> {
    blocking(app, move |jobs| {
        let devices = &jobs.vm().machine_config().devices;
        let found = devices.iter().find_map(|device| match device {
            DeviceConfig::Disk(disk) if disk.id == id => Some(drive_view(disk)),
            _ => None,
        });
        found.map(Json).ok_or_else(|| none("disk", &id))
    })
    .await
}

/// `GET /network-interfaces/{id}`.
pub(super) async fn interface(State(app): Shared, Path(id): Path<String>) -> Answer<Value> {
    blocking(app, move |jobs| {
        let devices = &jobs.vm().machine_config().devices;
        let found = devices.iter().find_map(|device| match device {
            DeviceConfig::Net(net) if net.id == id => Some(interface_view(net)),
            _ => None,
        });
        found.map(Json).ok_or_else(|| none("network interface", &id))
    })
    .await
}

/// `GET /vsock`.
pub(super) async fn vsock(State(app): Shared) -> Answer<Value> {
    blocking(app, |jobs| {
        let devices = &jobs.vm().machine_config().devices;
        let found = devices.iter().find_map(|device| match device {
            DeviceConfig::Vsock(vsock) => Some(vsock_view(vsock)),
            _ => None,
        });
        found.map(Json).ok_or_else(|| Fault::new("the guest has no vsock"))
    })
    .await
}

fn none(kind: &str, id: &str) -> Fault {
    Fault::new(format!("the guest has no {kind} \"{id}\""))
}

/// Returns the devices' part of `GET /vm/config`: a list for each kind, or a single object where a
/// guest has at most one.
pub(super) fn all(devices: &[DeviceConfig]) -> Map<String, Value> {
    let (mut drives, mut interfaces) = (Vec::new(), Vec::new());
    let mut all = Map::new();
    for device in devices {
        match device {
            DeviceConfig::Disk(disk) => drives.push(drive_view(disk)),
            DeviceConfig::Net(net) => interfaces.push(interface_view(net)),
            DeviceConfig::Vsock(vsock) => {
                all.insert("vsock".into(), vsock_view(vsock));
            }
            DeviceConfig::Rng => {
                all.insert("entropy".into(), json!({}));
            }
            DeviceConfig::Balloon(balloon) => {
                all.insert(
                    "balloon".into(),
                    json!({
                        "amount_mib": balloon.bytes >> 20,
                        "deflate_on_oom": balloon.deflate_on_oom,
                        "free_page_hinting": balloon.hinting,
                        "free_page_reporting": balloon.reporting,
                    }),
                );
            }
        }
    }
    all.insert("drives".into(), drives.into());
    all.insert("network-interfaces".into(), interfaces.into());
    all
}

fn drive_view(disk: &DiskConfig) -> Value {
    json!({
        "drive_id": disk.id,
        "path_on_host": disk.path,
        "is_root_device": false,
        "is_read_only": disk.readonly,
        "serial": disk.serial,
        "bytes": disk.bytes,
    })
}

fn interface_view(net: &NetConfig) -> Value {
    json!({
        "iface_id": net.id,
        "host_dev_name": net.tap,
        "guest_mac": net.mac.to_string(),
        "queue_pairs": net.queues,
    })
}

fn vsock_view(vsock: &VsockConfig) -> Value {
    json!({ "guest_cid": vsock.cid, "uds_path": vsock.uds })
}
