//! Parses method, path and body into an operation, or a fault in Firecracker's words. Does no I/O.

use serde::de::{DeserializeOwned, Error};

use super::fault::ApiFault;
use super::model::{
    ActionBody, ActionType, BlockDeviceConfig, BlockDeviceUpdateConfig, LoadSnapshotConfig,
    LoadSnapshotParams, MachineConfigUpdate, MachineConfiguration, MemBackendConfig,
    MemBackendType, MmdsConfig, MmdsVersion, NetworkInterfaceConfig, NetworkInterfaceUpdateConfig,
    PmemConfig, PmemDeviceUpdateConfig, StartHintingCmd, TargetState, VmStateChange,
    VsockDeviceConfig,
};
use super::operation::Operation;

/// An operation, and whether its request uses what is deprecated.
#[derive(Clone, PartialEq, Debug)]
pub(crate) struct ParsedCall {
    /// The operation.
    pub(crate) operation: Operation,
    /// What is deprecated, as a sentence for the log. The reply has a `Deprecation` header.
    pub(crate) deprecation: Option<&'static str>,
}

impl From<Operation> for ParsedCall {
    fn from(operation: Operation) -> Self {
        Self { operation, deprecation: None }
    }
}

type Parsing = Result<ParsedCall, ApiFault>;
/// The parts of a path after the first.
type Rest<'p> = std::str::SplitTerminator<'p, char>;

/// Parses a request. `path` is the path as sent, with its query, which Firecracker does not have;
/// an empty body is none.
///
/// # Errors
///
/// The fault that Firecracker answers.
pub(crate) fn parse(method: &str, path: &str, body: &[u8]) -> Parsing {
    let mut rest = path.trim_start_matches('/').split_terminator('/');
    let first = rest.next().unwrap_or("");
    let body = (!body.is_empty()).then_some(body);
    let operation = match method {
        "GET" => parse_get(first, rest, body),
        "PUT" => parse_put(first, rest, body),
        "PATCH" => parse_patch(first, rest, body),
        "DELETE" => parse_delete(first, rest, body),
        _ => Ok(None),
    };
    let unknown =
        || ApiFault::UnknownOperation { method: method.to_owned(), path: first.to_owned() };
    operation?.ok_or_else(unknown)
}

/// The result for one method: `None` for a path that does not have it.
type ByMethod = Result<Option<ParsedCall>, ApiFault>;

fn known(operation: Operation) -> ByMethod {
    Ok(Some(operation.into()))
}

fn parse_get(first: &str, mut rest: Rest<'_>, body: Option<&[u8]>) -> ByMethod {
    if body.is_some() {
        return Err(ApiFault::BodyOfGet);
    }
    match first {
        "" => known(Operation::GetInstance),
        "version" => known(Operation::GetVersion),
        "machine-config" => known(Operation::GetMachine),
        "mmds" => known(Operation::GetMetadata),
        "balloon" => get_balloon(rest),
        "vm" if rest.next() == Some("config") => known(Operation::GetConfig),
        "hotplug" if rest.next() == Some("memory") => known(Operation::GetMemoryHotplug),
        _ => Ok(None),
    }
}

fn get_balloon(mut rest: Rest<'_>) -> ByMethod {
    match rest.next() {
        None => known(Operation::GetBalloon),
        Some("statistics") => known(Operation::GetBalloonStatistics),
        Some("hinting") => match rest.next() {
            Some("status") => known(Operation::GetHinting),
            other => Err(unknown_hinting("GET", other)),
        },
        Some(other) => Err(unknown_end("GET", other)),
    }
}

fn parse_put(first: &str, mut rest: Rest<'_>, body: Option<&[u8]>) -> ByMethod {
    let body = body.ok_or(ApiFault::EmptyPut)?;
    match first {
        "actions" => known(match json::<ActionBody>(body)?.action_type {
            ActionType::FlushMetrics => Operation::FlushMetrics,
            ActionType::InstanceStart => Operation::Start,
            ActionType::SendCtrlAltDel => Operation::SendCtrlAltDel,
        }),
        "balloon" => known(Operation::PutBalloon(json(body)?)),
        "boot-source" => known(Operation::PutBootSource(json(body)?)),
        "cpu-config" => known(Operation::PutCpuTemplate(json(body)?)),
        "drives" => {
            let drive =
                named(rest.next(), body, |drive: &BlockDeviceConfig| &drive.drive_id, other_id)?;
            known(Operation::PutDrive(drive))
        }
        "entropy" => known(Operation::PutEntropy(json(body)?)),
        "hotplug" if rest.next() == Some("memory") => {
            known(Operation::PutMemoryHotplug(json(body)?))
        }
        "logger" => known(Operation::PutLogger(json(body)?)),
        "machine-config" => put_machine(body).map(Some),
        "metrics" => known(Operation::PutMetrics(json(body)?)),
        "mmds" => put_mmds(rest, body).map(Some),
        "network-interfaces" => {
            let net = named(
                rest.next(),
                body,
                |net: &NetworkInterfaceConfig| &net.iface_id,
                other_interface,
            )?;
            known(Operation::PutInterface(net))
        }
        "pmem" => {
            let pmem = named(rest.next(), body, |pmem: &PmemConfig| &pmem.id, other_id)?;
            known(Operation::PutPmem(pmem))
        }
        "serial" => known(Operation::PutSerial(json(body)?)),
        "snapshot" => put_snapshot(rest, body).map(Some),
        "vsock" => put_vsock(body).map(Some),
        _ => Ok(None),
    }
}

fn parse_patch(first: &str, mut rest: Rest<'_>, body: Option<&[u8]>) -> ByMethod {
    if first == "balloon" {
        return patch_balloon(rest, body);
    }
    let body = body.ok_or(ApiFault::EmptyPatch)?;
    match first {
        "drives" => {
            let update = named(
                rest.next(),
                body,
                |drive: &BlockDeviceUpdateConfig| &drive.drive_id,
                other_id,
            )?;
            known(Operation::PatchDrive(update))
        }
        "hotplug" if rest.next() == Some("memory") => {
            known(Operation::PatchMemoryHotplug(json(body)?))
        }
        "machine-config" => patch_machine(body).map(Some),
        "mmds" => known(Operation::PatchMetadata(json(body)?)),
        "network-interfaces" => {
            let update = named(
                rest.next(),
                body,
                |net: &NetworkInterfaceUpdateConfig| &net.iface_id,
                other_interface,
            )?;
            known(Operation::PatchInterface(update))
        }
        "pmem" => {
            let pmem =
                named(rest.next(), body, |pmem: &PmemDeviceUpdateConfig| &pmem.id, other_id)?;
            known(Operation::PatchPmem(pmem))
        }
        "vm" => known(match json::<VmStateChange>(body)?.state {
            TargetState::Paused => Operation::Pause,
            TargetState::Resumed => Operation::Resume,
        }),
        _ => Ok(None),
    }
}

fn patch_balloon(mut rest: Rest<'_>, body: Option<&[u8]>) -> ByMethod {
    match (rest.next(), body) {
        (Some("hinting"), body) => match rest.next() {
            Some("start") => {
                let command = body.map(json::<StartHintingCmd>).transpose()?;
                known(Operation::StartHinting(command.unwrap_or_default()))
            }
            Some("stop") => known(Operation::StopHinting),
            other => Err(unknown_hinting("PATCH", other)),
        },
        (Some("statistics"), Some(body)) => known(Operation::PatchBalloonStatistics(json(body)?)),
        (_, Some(body)) => known(Operation::PatchBalloon(json(body)?)),
        (_, None) => Err(ApiFault::EmptyPatch),
    }
}

fn parse_delete(first: &str, mut rest: Rest<'_>, body: Option<&[u8]>) -> ByMethod {
    if body.is_some() {
        return Err(ApiFault::BodyOfDelete);
    }
    match first {
        "drives" | "pmem" | "network-interfaces" => {
            known(Operation::Unplug(checked_id(rest.next())?.to_owned()))
        }
        _ => Ok(None),
    }
}

fn put_machine(body: &[u8]) -> Parsing {
    let update = MachineConfigUpdate::from(json::<MachineConfiguration>(body)?);
    let deprecated = "PUT /machine-config: cpu_template field is deprecated.";
    let deprecation = update.cpu_template.map(|_| deprecated);
    Ok(ParsedCall { operation: Operation::UpdateMachine(update), deprecation })
}

fn patch_machine(body: &[u8]) -> Parsing {
    let update: MachineConfigUpdate = json(body)?;
    if update == MachineConfigUpdate::default() {
        return Err(ApiFault::EmptyPatch);
    }
    let deprecated = "PATCH /machine-config: cpu_template field is deprecated.";
    let deprecation = update.cpu_template.map(|_| deprecated);
    Ok(ParsedCall { operation: Operation::UpdateMachine(update), deprecation })
}

fn put_mmds(mut rest: Rest<'_>, body: &[u8]) -> Parsing {
    match rest.next() {
        None => Ok(Operation::PutMetadata(json(body)?).into()),
        Some("config") => {
            let config: MmdsConfig = json(body)?;
            let deprecated = "PUT /mmds/config: V1 is deprecated. Use V2 instead.";
            let deprecation = (config.version == MmdsVersion::V1).then_some(deprecated);
            Ok(ParsedCall { operation: Operation::PutMmds(config), deprecation })
        }
        Some(other) => Err(unknown_end("PUT", other)),
    }
}

fn put_snapshot(mut rest: Rest<'_>, body: &[u8]) -> Parsing {
    match rest.next() {
        Some("create") => Ok(Operation::CreateSnapshot(json(body)?).into()),
        Some("load") => put_snapshot_load(json(body)?),
        Some(other) => Err(ApiFault::UnknownOperation {
            method: "PUT".to_owned(),
            path: format!("/snapshot/{other}"),
        }),
        None => Err(ApiFault::NoSnapshotOperation),
    }
}

fn put_snapshot_load(config: LoadSnapshotConfig) -> Parsing {
    let is_deprecated = config.mem_file_path.is_some() || config.enable_diff_snapshots;
    let mem_backend = match (config.mem_backend, config.mem_file_path) {
        (Some(backend), None) => backend,
        (None, Some(file)) => {
            MemBackendConfig { backend_path: file, backend_type: MemBackendType::File }
        }
        (Some(_), Some(_)) => {
            return Err(custom(
                "too many fields: either `mem_backend` or `mem_file_path` exclusively is required",
            ));
        }
        (None, None) => {
            return Err(custom(
                "missing field: either `mem_backend` or `mem_file_path` is required",
            ));
        }
    };
    let operation = Operation::LoadSnapshot(LoadSnapshotParams {
        snapshot_path: config.snapshot_path,
        mem_backend,
        track_dirty_pages: config.enable_diff_snapshots || config.track_dirty_pages,
        resume_vm: config.resume_vm,
        network_overrides: config.network_overrides,
        vsock_override: config.vsock_override,
        clock_realtime: config.clock_realtime,
        huge_pages: config.huge_pages,
    });
    let deprecated =
        "PUT /snapshot/load: mem_file_path and enable_diff_snapshots fields are deprecated.";
    Ok(ParsedCall { operation, deprecation: is_deprecated.then_some(deprecated) })
}

fn put_vsock(body: &[u8]) -> Parsing {
    let vsock: VsockDeviceConfig = json(body)?;
    let deprecated = "PUT /vsock: vsock_id field is deprecated.";
    let deprecation = vsock.vsock_id.is_some().then_some(deprecated);
    Ok(ParsedCall { operation: Operation::PutVsock(vsock), deprecation })
}

/// Parses the body of a device whose name is also in the path. `refusal` makes the fault for a name
/// in the path and another one in the body.
fn named<T: DeserializeOwned>(
    id: Option<&str>,
    body: &[u8],
    name: impl Fn(&T) -> &String,
    refusal: impl Fn(&str, &str) -> ApiFault,
) -> Result<T, ApiFault> {
    let id = checked_id(id)?;
    let device: T = json(body)?;
    if name(&device) == id { Ok(device) } else { Err(refusal(id, name(&device))) }
}

/// Returns the fault for a device that path and body name differently. It does not repeat the
/// names.
fn other_id(_: &str, _: &str) -> ApiFault {
    ApiFault::OtherId
}

/// Returns the fault for a network interface that path and body name differently.
fn other_interface(path: &str, body: &str) -> ApiFault {
    ApiFault::OtherInterface { path: path.to_owned(), body: body.to_owned() }
}

fn checked_id(id: Option<&str>) -> Result<&str, ApiFault> {
    let id = id.filter(|id| !id.is_empty()).ok_or(ApiFault::EmptyId)?;
    match id.chars().all(|c| c == '_' || c.is_alphanumeric()) {
        true => Ok(id),
        false => Err(ApiFault::InvalidId),
    }
}

fn json<T: DeserializeOwned>(body: &[u8]) -> Result<T, ApiFault> {
    Ok(serde_json::from_slice(body)?)
}

fn custom(text: &str) -> ApiFault {
    serde_json::Error::custom(text).into()
}

fn unknown_end(method: &'static str, path: &str) -> ApiFault {
    ApiFault::UnknownEnd { method, path: path.to_owned() }
}

fn unknown_hinting(method: &'static str, end: Option<&str>) -> ApiFault {
    unknown_end(method, &format!("/hinting/{}", end.unwrap_or_default()))
}

#[cfg(test)]
mod tests;
