//! `driftline run`: runs a new guest as the command line describes it.

use std::process::ExitCode;
use std::time::Instant;

use driftline_backends::LaunchError;
use driftline_control::api::{App, Server};
use driftline_control::jobs::{Jobs, ShadowError, ShadowMode};
use driftline_guest::{GuestError, RunState, VmId};
use driftline_machine::config::{
    BackendKind, Boot, DEFAULT_RING_ENTRIES, DeviceConfig, DiskConfig, DiskSpec, Identity,
    MAX_SERIAL_BYTES, MacAddr, MachineConfig, NetConfig, NetSpec, RngConfig, VsockConfig,
    VsockSpec, guest_span,
};
use driftline_machine::devices::probe_disk;
use driftline_machine::tracking::TrackingMode;
use driftline_machine::vm::Vm;

use super::args::{DeviceArgs, OnOff, RunArgs};
use super::config_file;
use super::end::run_to_end;
use super::failure::Failure;
use super::notify;
use super::process_line::process_line;
use super::setup::{NamedFiles, host_config, log_machine, prepare, warn_of_state_dir};
use super::values;

/// Guest memory without `--mem`, in bytes.
const DEFAULT_MEM_BYTES: u64 = 1 << 30;

/// `driftline run`, in a process that started at `started`.
pub(super) fn run(args: RunArgs, started: Instant) -> Result<ExitCode, Failure> {
    let args = config_file::complete(args)?;
    let mut named = NamedFiles::of_devices(&args.disks, args.vsock.as_ref());
    named.read.extend(args.kernel.iter().chain(&args.initrd).cloned());
    let listeners = prepare(&args.host, named)?;
    let host = host_config(&args.host, DeviceArgs::default())?;
    let (state_dir, line) = (args.host.state_dir.clone(), process_line(&args.host));
    warn_of_state_dir(&args.host);
    let shadow = args.shadow;
    check_shadow(shadow, args.tracking.unwrap_or_default())?;
    let vm_id = args.id.unwrap_or_else(VmId::random);
    let file = args.config_file.clone();
    let config = machine_config(args)?;
    if let (Some(file), Err(why)) = (file, config.check()) {
        let file = file.display();
        return Err(Failure::usage(format_args!("the guest of --config-file {file}: {why}")));
    }
    check_rings(&config)?;
    let _logged = guest_span(vm_id, &config.identity).entered();
    let mut server = Server::begin()?;
    let vm = driftline_backends::launch_as(vm_id, config, &host).map_err(launch_failure)?;
    log_machine(&*vm, &host.memory);
    let jobs = Jobs::new(vm.clone(), state_dir);
    if let Some(mode) = shadow {
        jobs.start_shadow(mode).map_err(shadow_failure)?;
    }
    let app = App::new(jobs.clone());
    app.set_process_line(line);
    server.serve(listeners, app)?;
    if resume(&*vm)? {
        // The vCPU threads have just been notified. All that remains before the guest's first
        // instruction is the wake-up of one thread.
        tracing::info!(boot_us = started.elapsed().as_micros(), "the guest runs");
        notify::ready(format_args!("guest {vm_id} runs"));
    }
    run_to_end(vm, jobs, server, None)
}

/// Resumes the guest. Returns whether it runs: a client may have resumed it already, or a client or
/// a signal has ended it.
fn resume(vm: &dyn Vm) -> Result<bool, GuestError> {
    match vm.resume() {
        Ok(()) | Err(GuestError::State { state: RunState::Running, .. }) => Ok(true),
        Err(GuestError::State { state: RunState::Stopped, .. }) => Ok(false),
        Err(e) => Err(e),
    }
}

fn machine_config(args: RunArgs) -> Result<MachineConfig, Failure> {
    let boot = match (args.guest, args.kernel) {
        (Some(spec), _) => Boot::Payload(spec),
        (None, Some(kernel)) => {
            // Another start from this configuration may have another working directory.
            let kernel = std::path::absolute(kernel)?;
            let initrd = args.initrd.map(std::path::absolute).transpose()?;
            let cmdline = args.cmdline.unwrap_or_default();
            Boot::Kernel { kernel, initrd, cmdline, bare: args.bare_cmdline }
        }
        // clap and the configuration file require one of the two.
        (None, None) => return Err(Failure::error("neither --kernel nor --guest was given")),
    };
    let mut devices = Vec::new();
    for (disk, i) in args.disks.into_iter().zip(0..) {
        devices.push(DeviceConfig::Disk(disk_config(disk, i)?));
    }
    for (net, i) in args.nets.into_iter().zip(0..) {
        devices.push(DeviceConfig::Net(net_config(net, i)));
    }
    if let Some(vsock) = args.vsock {
        devices.push(DeviceConfig::Vsock(vsock_config(vsock)?));
    }
    // The payload has no drivers, and the threads backend has no devices.
    let backend = args.backend.unwrap_or_default();
    let has_drivers = backend == BackendKind::Kvm && matches!(boot, Boot::Kernel { .. });
    if args.rng != Some(OnOff::Off) && has_drivers {
        devices.push(DeviceConfig::Rng(RngConfig { limits: args.rng_limits }));
    }
    devices.extend(args.balloon.map(DeviceConfig::Balloon));
    Ok(MachineConfig {
        identity: Identity::booted(args.name),
        mem_bytes: args.mem.unwrap_or(DEFAULT_MEM_BYTES),
        vcpus: args.vcpus.unwrap_or(1),
        tracking: args.tracking.unwrap_or_default(),
        ring_entries: args.ring_entries.unwrap_or(DEFAULT_RING_ENTRIES),
        backend,
        boot,
        cpu: args.cpu.unwrap_or_default(),
        devices,
    })
}

/// Returns the configuration of disk `i` of a new guest. The disk is as large as its file.
fn disk_config(spec: DiskSpec, i: u32) -> Result<DiskConfig, Failure> {
    let DiskSpec { path, readonly, id, serial, limits, any_identity, copy } = spec;
    if any_identity || copy {
        let what = if copy { "copy" } else { "identity=any" };
        return Err(Failure::usage(format_args!(
            "'{what}' of --disk is only for {}, where a guest comes with its disks",
            if copy { "receive-migration" } else { "receive-migration and restore" }
        )));
    }
    let (bytes, block_bytes) = probe_disk(&path, readonly).map_err(Failure::error)?;
    // After a restore, the file may be opened from another working directory.
    let path = std::path::absolute(path)?;
    let id = id.unwrap_or_else(|| format!("disk{i}"));
    Ok(DiskConfig {
        serial: serial.unwrap_or_else(|| default_serial(&id)),
        id,
        path,
        readonly,
        bytes,
        block_bytes,
        // Recorded once the disk is open.
        identity: None,
        limits,
    })
}

/// Returns the configuration of network interface `i` of a new guest.
fn net_config(spec: NetSpec, i: u32) -> NetConfig {
    let NetSpec { tap, mac, id, queues, limits } = spec;
    NetConfig {
        id: id.unwrap_or_else(|| format!("net{i}")),
        tap,
        mac: mac.unwrap_or_else(MacAddr::random),
        queues: queues.unwrap_or(1),
        mtu: None,
        limits,
        metadata: None,
    }
}

fn vsock_config(spec: VsockSpec) -> Result<VsockConfig, Failure> {
    let cid = spec.cid.ok_or_else(|| {
        Failure::usage("the vsock of a new guest needs a context ID: cid=N is missing")
    })?;
    Ok(VsockConfig { cid, uds: std::path::absolute(spec.uds)? })
}

/// Returns a disk's id, truncated to the length of a serial.
fn default_serial(id: &str) -> String {
    id.chars().take(MAX_SERIAL_BYTES).collect()
}

fn launch_failure(e: LaunchError) -> Failure {
    if e.host_lacks() { Failure::host_lacks(e) } else { Failure::error(e) }
}

/// Refuses dirty rings that are larger than this host's KVM allows. Every host allows the default
/// size.
fn check_rings(config: &MachineConfig) -> Result<(), Failure> {
    let rings = (config.backend, config.tracking) == (BackendKind::Kvm, TrackingMode::DirtyRing);
    if !rings || config.ring_entries == DEFAULT_RING_ENTRIES {
        return Ok(());
    }
    match values::most_ring_entries() {
        Some(most) if most < config.ring_entries => Err(Failure::host_lacks(format_args!(
            "this host's KVM supports at most {most} dirty-ring entries per vCPU (--ring-entries)"
        ))),
        _ => Ok(()),
    }
}

/// Refuses a shadow that has nothing to compare with, before there is a guest.
fn check_shadow(shadow: Option<ShadowMode>, tracking: TrackingMode) -> Result<(), Failure> {
    match (shadow, tracking) {
        (Some(shadow), TrackingMode::None) => Err(Failure::usage(format_args!(
            "--shadow {shadow} has nothing to compare with: --tracking none reports no pages"
        ))),
        (Some(ShadowMode::UserfaultWp), TrackingMode::UserfaultWp) => Err(Failure::usage(
            "--shadow userfault-wp cannot be used with --tracking userfault-wp: guest memory has \
             at most one userfaultfd; use --shadow compare",
        )),
        _ => Ok(()),
    }
}

fn shadow_failure(e: ShadowError) -> Failure {
    match e {
        ShadowError::HostLacks(_) => Failure::host_lacks(e),
        _ => Failure::error(e),
    }
}
