//! `driftline run --config-file`: completes a command line with what a file says. The file is the
//! JSON of `GET /vm/config`.

use std::fmt::Display;
use std::io::ErrorKind;
use std::path::Path;

use driftline_control::model::{
    BalloonSettings, BootSource, DriveSettings, InterfaceSettings, MachineSettings, VmConfig,
};
use driftline_machine::config::{
    BalloonConfig, DiskSpec, NetLimits, NetSpec, RateLimits, VsockSpec,
};
use driftline_machine::devices::probe_disk;
use driftline_machine::tracking::TrackingMode;

use super::args::{OnOff, RunArgs};
use super::bounded_file::{MAX_CONFIG_FILE, read_bounded};
use super::failure::Failure;
use super::values;

/// Returns `args`, completed with the file of `--config-file`. Options override the file.
pub(super) fn complete(args: RunArgs) -> Result<RunArgs, Failure> {
    let Some(path) = args.config_file.clone() else { return Ok(args) };
    let completed = read(&path).and_then(|config| fill(args, config));
    completed.map_err(|e| e.prefixed(format_args!("--config-file {}: ", path.display())))
}

fn read(path: &Path) -> Result<VmConfig, Failure> {
    let bytes = read_bounded(path, MAX_CONFIG_FILE).map_err(|e| match e.kind() {
        ErrorKind::FileTooLarge => Failure::usage(format_args!(
            "it has more than {} MiB: a configuration has a few KiB",
            MAX_CONFIG_FILE >> 20
        )),
        _ => Failure::error(e),
    })?;
    let mut json = serde_json::Deserializer::from_slice(&bytes);
    let config = serde_path_to_error::deserialize(&mut json).map_err(Failure::usage)?;
    json.end().map_err(Failure::usage)?;
    Ok(config)
}

/// Fills in what the command line leaves open.
fn fill(mut args: RunArgs, config: VmConfig) -> Result<RunArgs, Failure> {
    let VmConfig { name, boot_source, machine_config: machine, .. } = config;
    fill_boot(&mut args, boot_source)?;
    fill_machine(&mut args, machine)?;
    args.name = args.name.or(name);
    if args.disks.is_empty() {
        let drives = config.drives.into_iter().enumerate();
        args.disks = drives.map(|(i, drive)| disk(i, drive)).collect::<Result<_, _>>()?;
    }
    if args.nets.is_empty() {
        args.nets = config.network_interfaces.into_iter().map(net).collect();
    }
    let vsock = config.vsock.map(|v| VsockSpec { cid: Some(v.guest_cid), uds: v.uds_path });
    args.vsock = args.vsock.or(vsock);
    let boots_kernel = args.kernel.is_some();
    let without_driver = |device: &str| {
        wrong(device, "the embedded guest has no driver for it; only a kernel can have it")
    };
    if config.entropy.is_some() && !boots_kernel {
        return Err(without_driver("entropy"));
    }
    let whether = if config.entropy.is_some() { OnOff::On } else { OnOff::Off };
    args.rng = args.rng.or(Some(whether));
    let limits = config.entropy.and_then(|entropy| entropy.rate_limiter);
    args.rng_limits = limits.map(RateLimits::from).unwrap_or_default();
    match config.balloon {
        Some(_) if !boots_kernel => return Err(without_driver("balloon")),
        Some(settings) if args.balloon.is_none() => args.balloon = Some(balloon(&settings)?),
        _ => {}
    }
    Ok(args)
}

/// Fills in the image. `--guest` replaces the file's whole boot source. `--kernel` replaces the
/// file's embedded guest, or its kernel; initrd and command line of that kernel stay.
fn fill_boot(args: &mut RunArgs, boot: BootSource) -> Result<(), Failure> {
    let BootSource { guest, kernel_image_path: kernel, initrd_path, boot_args, bare_boot_args } =
        boot;
    let of_kernel = kernel.is_some() || initrd_path.is_some() || boot_args.is_some();
    if guest.is_some() && (of_kernel || bare_boot_args) {
        return Err(wrong("boot-source.guest", "the embedded guest has no kernel to describe"));
    }
    if args.guest.is_some() {
        return Ok(());
    }
    if let (Some(spec), None) = (&guest, &args.kernel) {
        if args.initrd.is_some() || args.cmdline.is_some() || args.bare_cmdline {
            let why = "options about a kernel need --kernel, since the file boots this guest";
            return Err(wrong("boot-source.guest", why));
        }
        args.guest = Some(values::guest_spec(spec).map_err(|e| wrong("boot-source.guest", e))?);
        return Ok(());
    }
    args.kernel = args.kernel.take().or(kernel);
    if args.kernel.is_none() {
        let why =
            "neither kernel_image_path nor guest is set: set one, or give --kernel or --guest";
        return Err(wrong("boot-source", why));
    }
    args.initrd = args.initrd.take().or(initrd_path);
    args.cmdline = args.cmdline.take().or(boot_args);
    args.bare_cmdline |= bare_boot_args;
    Ok(())
}

fn fill_machine(args: &mut RunArgs, machine: MachineSettings) -> Result<(), Failure> {
    let within = |name: &str| format!("machine-config.{name}");
    if let Some(vcpus) = machine.vcpu_count {
        values::vcpus(&vcpus.to_string()).map_err(|e| wrong(within("vcpu_count"), e))?;
    }
    if let Some(entries) = machine.ring_entries {
        values::ring_entries(&entries.to_string()).map_err(|e| wrong(within("ring_entries"), e))?;
    }
    let mem = bytes(&within("mem_size_mib"), machine.mem_size_mib, "mem_bytes", machine.mem_bytes)?;
    if let Some(mem) = mem {
        values::memory(&mem.to_string()).map_err(|e| wrong(within("mem_size_mib"), e))?;
    }
    let tracking = match (machine.tracking, machine.track_dirty_pages) {
        (Some(mode), Some(tracked)) if tracked != (mode != TrackingMode::None) => {
            let why = format!("it is {tracked}, and tracking is {mode}: leave one out");
            return Err(wrong(within("track_dirty_pages"), why));
        }
        (None, Some(false)) => Some(TrackingMode::None),
        (mode, _) => mode,
    };
    args.vcpus = args.vcpus.or(machine.vcpu_count);
    args.mem = args.mem.or(mem);
    args.tracking = args.tracking.or(tracking);
    args.ring_entries = args.ring_entries.or(machine.ring_entries);
    args.backend = args.backend.or(machine.backend);
    args.cpu = args.cpu.take().or(machine.cpu);
    if machine.smt {
        let vcpus = args.vcpus.unwrap_or(1);
        if vcpus > 1 && !vcpus.is_multiple_of(2) {
            let why =
                format!("each core has two threads: {vcpus} vCPUs must be 1 or an even number");
            return Err(wrong(within("smt"), why));
        }
        args.cpu.get_or_insert_default().smt = true;
    }
    Ok(())
}

/// Returns a size that may be given in MiB, in bytes, or in both.
fn bytes(
    mib_field: &str,
    mib: Option<u64>,
    bytes_field: &str,
    bytes: Option<u64>,
) -> Result<Option<u64>, Failure> {
    match (mib, bytes) {
        (Some(mib), Some(bytes)) if bytes >> 20 != mib => {
            let why = format!("it is {mib}, and {bytes_field} is {bytes}: leave one out");
            Err(wrong(mib_field, why))
        }
        (Some(mib), None) => {
            let bytes = mib.checked_mul(1 << 20);
            Ok(Some(bytes.ok_or_else(|| wrong(mib_field, format!("{mib} MiB is too much")))?))
        }
        (_, bytes) => Ok(bytes),
    }
}

fn disk(i: usize, drive: DriveSettings) -> Result<DiskSpec, Failure> {
    let DriveSettings {
        drive_id,
        path_on_host,
        is_root_device,
        is_read_only,
        serial,
        bytes,
        rate_limiter,
    } = drive;
    if is_root_device {
        let why = "the kernel's command line names the root device: write false, and root=/dev/vda \
                   (vdb for the second disk) into boot_args";
        return Err(wrong(format_args!("drives[{i}].is_root_device"), why));
    }
    if let Some(expected) = bytes {
        let (found, _) = probe_disk(&path_on_host, is_read_only)
            .map_err(|e| wrong(format_args!("drives[{i}].path_on_host"), e))?;
        if found != expected {
            let path = path_on_host.display();
            let why = format!(
                "it is {expected}, and {path} has {found} bytes: name the right disk, or omit bytes"
            );
            return Err(wrong(format_args!("drives[{i}].bytes"), why));
        }
    }
    Ok(DiskSpec {
        path: path_on_host,
        readonly: is_read_only,
        id: drive_id,
        serial,
        limits: rate_limiter.map(RateLimits::from).unwrap_or_default(),
        any_identity: false,
        copy: false,
    })
}

fn net(interface: InterfaceSettings) -> NetSpec {
    let InterfaceSettings {
        iface_id,
        host_dev_name,
        guest_mac,
        queue_pairs,
        rx_rate_limiter,
        tx_rate_limiter,
    } = interface;
    let limits = NetLimits {
        receive: rx_rate_limiter.map(RateLimits::from).unwrap_or_default(),
        transmit: tx_rate_limiter.map(RateLimits::from).unwrap_or_default(),
    };
    NetSpec { tap: host_dev_name, mac: guest_mac, id: iface_id, queues: queue_pairs, limits }
}

fn balloon(settings: &BalloonSettings) -> Result<BalloonConfig, Failure> {
    let BalloonSettings { amount_mib, target_bytes, .. } = *settings;
    let target = bytes("balloon.amount_mib", amount_mib, "target_bytes", target_bytes)?;
    Ok(BalloonConfig {
        bytes: target.unwrap_or(0),
        deflate_on_oom: settings.deflate_on_oom,
        reporting: settings.free_page_reporting,
        hinting: settings.free_page_hinting,
        statistics_interval_s: settings.stats_polling_interval_s,
    })
}

/// Returns a refusal that names the field.
fn wrong(field: impl Display, why: impl Display) -> Failure {
    Failure::usage(format_args!("{field}: {why}"))
}
