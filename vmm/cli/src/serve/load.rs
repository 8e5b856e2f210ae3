//! Turns a snapshot's files into a machine to load. All that they say is checked, here or where the
//! machine is built: they may come from anywhere.

use std::collections::BTreeMap;
use std::fs::File;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use driftline_checkpoint::{OpenSnapshot, SnapshotError, open_snapshot};
use driftline_control::firecracker::{
    ApiFault, BlockDeviceConfig, HugePageConfig, LoadFault, LoadSnapshotParams,
    MachineConfiguration, MachineFault, MemBackendType, MicroVmConfig, SnapshotLoadHugePageConfig,
};
use driftline_guest::{Section, SectionTag};
use driftline_machine::config::{
    DeviceConfig, HostConfig, Identity, MachineConfig, NetLimits, NetSpec, OpenedSocket, VsockSpec,
    disks,
};
use driftline_machine::machine::{FirstContents, MachineError};
use driftline_machine::memory::{
    HandlerStep, MemoryError, PageHandlerError, PageHandlerSocket, layout,
};
use driftline_store::{SnapshotState, StoreError};

use super::opened::ClientFiles;
use super::opened_networks::bind_new;
use super::plan::{memory_options, serial_limit, serial_sink};

/// What a guest is loaded from.
#[derive(Debug)]
pub(super) struct LoadPlan {
    pub(super) config: MachineConfig,
    pub(super) host: HostConfig,
    pub(super) contents: FirstContents,
    /// Identity of the memory file that is mapped, if one is: device and inode.
    pub(super) backing: Option<(u64, u64)>,
    /// State of the machine.
    pub(super) sections: Vec<Section>,
    /// The configuration that the API shows for the guest.
    pub(super) shown: MicroVmConfig,
}

/// Opens the snapshot that `params` name, for a process of the configuration `own`. `id` is the
/// instance's.
///
/// # Errors
///
/// A part of the request cannot be honoured; or a file cannot be used, which ends the process.
pub(super) fn load_plan(
    id: &str,
    params: &LoadSnapshotParams,
    own: &MicroVmConfig,
) -> Result<LoadPlan, ApiFault> {
    let serial = serial_sink(&own.serial)?;
    let (mut state, memory) = open(params)?;
    let mut config = MachineConfig::decode(&state.config).map_err(damaged)?;
    if layout(config.mem_bytes).ok().as_ref() != Some(&state.layout) {
        return Err(damaged("its layout is not that of its machine's memory").into());
    }
    let mut shown = own.clone();
    shown.load(&take_api_section(&mut state)?).map_err(damaged)?;
    check_shown(&shown, &config)?;
    let (nets, vsock) = replace_channels(params, &mut shown)?;
    shown.machine.track_dirty_pages = params.track_dirty_pages;
    shown.machine.huge_pages = huge_pages(params, &shown.machine)?;
    resolve_paths(&shown, &mut config)?;
    let files = open_drives(&shown, &config)?;
    config.identity = Identity::booted(id.parse().ok());
    let opened = files.for_machine(&shown);
    let mut host = HostConfig {
        serial,
        serial_limit: serial_limit(&own.serial),
        memory: memory_options(shown.machine.huge_pages),
        nets,
        vsock,
        metadata: own.metadata.clone(),
        opened,
        // Clones run on copies, and the client decides which files they are.
        disks_are_copies: true,
        ..HostConfig::default()
    };
    let config = config.on_host(&host).map_err(machine_fault)?;
    let (contents, backing) = match memory {
        Some(memory) => {
            let of = memory.metadata().map_err(LoadFault::Memory)?;
            (FirstContents::File(memory.into()), Some((of.dev(), of.ino())))
        }
        // After the checks of the files, so that a handler does not wait for memory that is not
        // there. Only the vsock's socket can still be refused, as in Firecracker.
        None => {
            let handler = PageHandlerSocket::connect(&params.mem_backend.backend_path);
            (FirstContents::Handler(handler.map_err(handler_fault)?), None)
        }
    };
    // As in Firecracker, last: programs may connect from now on, and wait until the guest runs.
    host.opened.vsock = bind_vsock(&shown)?;
    let sections = state.sections;
    Ok(LoadPlan { config, host, contents, backing, sections, shown })
}

/// Opens the state and, unless another process serves the memory, the memory file.
fn open(params: &LoadSnapshotParams) -> Result<(SnapshotState, Option<File>), LoadFault> {
    let memory = &params.mem_backend.backend_path;
    match params.mem_backend.backend_type {
        MemBackendType::File => {
            let opened = open_snapshot(&params.snapshot_path, memory);
            let OpenSnapshot { state, memory, .. } = opened.map_err(|e| open_fault(e, memory))?;
            Ok((state, Some(memory)))
        }
        MemBackendType::Uffd => {
            let state = SnapshotState::open(&params.snapshot_path);
            Ok((state.map_err(|e| open_fault(e.into(), memory))?, None))
        }
    }
}

/// Returns Firecracker's words for a machine that cannot be built.
pub(super) fn build_fault(e: MachineError) -> LoadFault {
    match e {
        MachineError::Memory(MemoryError::Handler(e)) => handler_fault(e),
        e => machine_fault(e),
    }
}

/// Returns Firecracker's words for memory that cannot be handed over to a page handler.
fn handler_fault(PageHandlerError { step, cause }: PageHandlerError) -> LoadFault {
    let what = match step {
        HandlerStep::Open => "Failed to UFFD object",
        HandlerStep::Register => {
            "Failed to register memory address range with the userfaultfd object"
        }
        HandlerStep::Connect => "Failed to connect to UDS Unix stream",
        HandlerStep::Send => "Failed to sends file descriptor",
    };
    LoadFault::PageHandler { what, cause }
}

/// Returns Firecracker's words for a snapshot that cannot be opened. `memory` is its memory file.
fn open_fault(e: SnapshotError, memory: &Path) -> LoadFault {
    match e {
        SnapshotError::File(StoreError::Io { path, cause, .. }) if path == memory => {
            LoadFault::Memory(cause)
        }
        SnapshotError::File(StoreError::Io { cause, .. }) => LoadFault::State(cause),
        SnapshotError::MemoryLength { .. } | SnapshotError::InUse(_) => {
            LoadFault::OtherMemory(e.to_string())
        }
        _ => damaged(e),
    }
}

/// Takes the configuration of the API out of a snapshot's state.
fn take_api_section(state: &mut SnapshotState) -> Result<Section, LoadFault> {
    let is_api = |section: &Section| section.tag == SectionTag::API;
    let (api, own) = std::mem::take(&mut state.sections).into_iter().partition(is_api);
    state.sections = own;
    let api: Vec<Section> = api;
    <[Section; 1]>::try_from(api).map(|[api]| api).map_err(|found| {
        damaged(format_args!("it has {} configurations of the API instead of one", found.len()))
    })
}

/// Checks that the configuration that the API would show is that of the machine.
fn check_shown(shown: &MicroVmConfig, config: &MachineConfig) -> Result<(), LoadFault> {
    let machine = &shown.machine;
    let mut named = Vec::new();
    for device in &config.devices {
        named.push(match device {
            DeviceConfig::Disk(disk) => ("drive", disk.id.clone()),
            DeviceConfig::Net(net) => ("interface", net.id.clone()),
            DeviceConfig::Vsock(_) => ("vsock", String::new()),
            DeviceConfig::Balloon(_) => ("balloon", String::new()),
            DeviceConfig::Rng(_) => ("entropy", String::new()),
        });
    }
    let drives = shown.drives.iter().map(|drive| ("drive", shown.drive_name(&drive.drive_id)));
    let nets = shown.interfaces.iter();
    let nets = nets.map(|net| ("interface", shown.interface_name(&net.iface_id)));
    let single = [
        (shown.vsock.is_some(), "vsock"),
        (shown.balloon.is_some(), "balloon"),
        (shown.entropy.is_some(), "entropy"),
    ];
    let single = single.into_iter().filter(|(is_there, _)| *is_there);
    let single = single.map(|(_, kind)| (kind, String::new()));
    let mut expected: Vec<_> = drives.chain(nets).chain(single).collect();
    named.sort_unstable();
    expected.sort_unstable();
    let mem_bytes = (machine.mem_size_mib as u64).checked_mul(1 << 20);
    let fits = mem_bytes == Some(config.mem_bytes)
        && machine.vcpu_count == config.vcpus
        && machine.smt == config.cpu.smt
        && is_metadata_shown(shown, config);
    match fits && named == expected {
        true => Ok(()),
        false => Err(damaged("the configuration of the API is not that of the machine")),
    }
}

/// Returns whether the API would show through which interfaces the guest reads its metadata.
fn is_metadata_shown(shown: &MicroVmConfig, config: &MachineConfig) -> bool {
    let shown_metadata: BTreeMap<_, _> = shown
        .interfaces
        .iter()
        .map(|net| (shown.interface_name(&net.iface_id), shown.interface_metadata(&net.iface_id)))
        .collect();
    let mut served = 0;
    let is_shown = config.devices.iter().all(|device| match device {
        DeviceConfig::Net(net) => {
            served += usize::from(net.metadata.is_some());
            shown_metadata.get(&net.id) == Some(&net.metadata)
        }
        _ => true,
    });
    is_shown && shown.mmds.as_ref().map_or(0, |mmds| mmds.network_interfaces.len()) == served
}

/// Gives the guest the taps and the socket that the client names. Returns them as a machine takes
/// them.
fn replace_channels(
    params: &LoadSnapshotParams,
    shown: &mut MicroVmConfig,
) -> Result<(Vec<NetSpec>, Option<VsockSpec>), LoadFault> {
    let mut nets = Vec::new();
    for with in &params.network_overrides {
        let net = shown.interfaces.iter_mut().find(|net| net.iface_id == with.iface_id);
        net.ok_or(LoadFault::UnknownInterface)?.host_dev_name.clone_from(&with.host_dev_name);
        let id = shown.interface_name(&with.iface_id);
        // As in Firecracker, the last one counts.
        nets.retain(|spec: &NetSpec| spec.id.as_deref() != Some(&id));
        nets.push(NetSpec {
            tap: with.host_dev_name.clone(),
            mac: None,
            id: Some(id),
            queues: None,
            limits: NetLimits::default(),
        });
    }
    let Some(with) = &params.vsock_override else { return Ok((nets, None)) };
    let vsock = shown.vsock.as_mut().ok_or(LoadFault::UnknownVsock)?;
    vsock.uds_path.clone_from(&with.uds_path);
    let uds = std::path::absolute(&with.uds_path).map_err(machine_fault)?;
    Ok((nets, Some(VsockSpec { cid: None, uds })))
}

/// Binds the socket of the guest's vsock, whose file stays when the process ends.
fn bind_vsock(shown: &MicroVmConfig) -> Result<Option<OpenedSocket>, LoadFault> {
    let Some(vsock) = &shown.vsock else { return Ok(None) };
    bind_new(Path::new(&vsock.uds_path)).map(Some).map_err(|cause| {
        machine_fault(format_args!(
            "Failed to restore devices: Error restoring MMIO devices: VsockUnixBackend: Error \
             binding to the host-side Unix socket: {cause}"
        ))
    })
}

/// Returns the pages that back a loaded guest's memory. `machine` is the snapshot's.
fn huge_pages(
    params: &LoadSnapshotParams,
    machine: &MachineConfiguration,
) -> Result<HugePageConfig, LoadFault> {
    let pages = match params.huge_pages {
        SnapshotLoadHugePageConfig::Snapshot => machine.huge_pages,
        SnapshotLoadHugePageConfig::None => HugePageConfig::None,
        SnapshotLoadHugePageConfig::Transparent => HugePageConfig::Transparent,
        SnapshotLoadHugePageConfig::Hugetlbfs2M => HugePageConfig::Hugetlbfs2M,
    };
    if !pages.divides(machine.mem_size_mib) {
        let fault = MachineFault::Memory;
        return Err(machine_fault(format_args!("Failed to update microVM configuration: {fault}")));
    }
    match (pages, params.mem_backend.backend_type) {
        (HugePageConfig::Hugetlbfs2M, MemBackendType::File) => Err(LoadFault::HugePages),
        (pages, _) => Ok(pages),
    }
}

/// Gives the machine the paths of drives and of the socket as the client has named them: a relative
/// one starts in this process's working directory, as in Firecracker.
fn resolve_paths(shown: &MicroVmConfig, config: &mut MachineConfig) -> Result<(), LoadFault> {
    let absolute = |path: &str| std::path::absolute(path).map_err(machine_fault);
    for device in &mut config.devices {
        match device {
            DeviceConfig::Disk(disk) => {
                let drive =
                    |drive: &&BlockDeviceConfig| shown.drive_name(&drive.drive_id) == disk.id;
                let drive = shown.drives.iter().find(drive);
                let path = drive.and_then(|drive| drive.path_on_host.as_deref());
                disk.path = absolute(path.ok_or_else(|| damaged("a drive has no path"))?)?;
            }
            DeviceConfig::Vsock(vsock) => {
                let path = shown.vsock.as_ref().map(|vsock| vsock.uds_path.as_str());
                vsock.uds = absolute(path.ok_or_else(|| damaged("a socket has no path"))?)?;
            }
            _ => {}
        }
    }
    Ok(())
}

/// Opens the drives' files where the snapshot says that they are.
fn open_drives(shown: &MicroVmConfig, config: &MachineConfig) -> Result<ClientFiles, LoadFault> {
    let mut files = ClientFiles::default();
    for disk in disks(&config.devices) {
        let drive = shown.drives.iter().find(|drive| shown.drive_name(&drive.drive_id) == disk.id);
        let drive = drive.ok_or_else(|| damaged("a drive has no configuration"))?;
        let path = disk.path.to_str().ok_or_else(|| damaged("a drive's path is not UTF-8"))?;
        let drive = BlockDeviceConfig {
            path_on_host: Some(path.to_owned()),
            is_read_only: Some(disk.readonly),
            ..drive.clone()
        };
        files.open_drive(&drive).map_err(machine_fault)?;
    }
    Ok(files)
}

fn damaged(e: impl ToString) -> LoadFault {
    LoadFault::Damaged(e.to_string())
}

fn machine_fault(e: impl ToString) -> LoadFault {
    LoadFault::Machine(e.to_string())
}

#[cfg(test)]
mod tests;
