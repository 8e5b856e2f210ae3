//! Turns the configuration of Firecracker's API into that of a machine.

use std::fs::{FileType, OpenOptions};
use std::io;
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};

use driftline_control::firecracker::{
    ApiFault, BlockDeviceConfig, DriveFault, HugePageConfig, MicroVmConfig, NetworkInterfaceConfig,
    SerialConfig, StartFault,
};
use driftline_control::model::RateLimiterConfig;
use driftline_machine::boot::LINUX_CMDLINE_BYTES;
use driftline_machine::config::{
    BackendKind, BalloonConfig, Boot, CpuConfig, CpuTemplate, DEFAULT_RING_ENTRIES, DeviceConfig,
    DiskConfig, HostConfig, Identity, MacAddr, MachineConfig, NetConfig, NetLimits, RateLimit,
    RateLimits, RngConfig, SerialSink, VsockConfig,
};
use driftline_machine::devices::{file_serial, probe_opened_disk};
use driftline_machine::machine::command_line;
use driftline_machine::memory::{HugePages, MemoryOptions};
use driftline_machine::tracking::TrackingMode;
use driftline_store::open_kind;

use super::opened::ClientFiles;

/// Firecracker's command line for a client that gives none.
const DEFAULT_BOOT_ARGS: &str = "reboot=k panic=1 nomodule 8250.nr_uarts=0 i8042.noaux \
                                 i8042.nomux i8042.dumbkbd swiotlb=noforce";
/// Block size of a drive, in bytes. Firecracker's guests see no other, and their partition tables
/// count in it.
const BLOCK_BYTES: u32 = 512;

/// What a guest is built from.
#[derive(Debug)]
pub(super) struct GuestPlan {
    pub(super) config: MachineConfig,
    pub(super) host: HostConfig,
}

/// Returns the machine of a configuration with its open files. `id` is the instance's.
///
/// # Errors
///
/// A part of the configuration cannot be honoured, or a file cannot be used.
pub(super) fn plan(
    id: &str,
    config: &MicroVmConfig,
    files: &ClientFiles,
) -> Result<GuestPlan, ApiFault> {
    let serial = serial_sink(&config.serial)?;
    let source = config.boot_source.as_ref().ok_or(StartFault::NoKernel)?;
    let devices = devices(config, files)?;
    let given = source.boot_args.as_deref().unwrap_or(DEFAULT_BOOT_ARGS);
    let parameters = parameters(config.drives.first());
    let cmdline = command_line(given.trim(), &parameters, devices.len()).map_err(machine_fault)?;
    if cmdline.len() >= LINUX_CMDLINE_BYTES {
        return Err(StartFault::CommandLine.into());
    }
    let initrd = source.initrd_path.as_deref().map(absolute).transpose()?;
    let kernel = absolute(&source.kernel_image_path)?;
    let machine = &config.machine;
    let plan = MachineConfig {
        identity: Identity::booted(id.parse().ok()),
        // A size that exceeds 64 bits is refused with all others that are too large.
        mem_bytes: (machine.mem_size_mib as u64).saturating_mul(1 << 20),
        vcpus: machine.vcpu_count,
        tracking: TrackingMode::default(),
        ring_entries: DEFAULT_RING_ENTRIES,
        backend: BackendKind::Kvm,
        boot: Boot::Kernel { kernel, initrd, cmdline, bare: true },
        cpu: CpuConfig {
            smt: machine.smt,
            template: config.cpu_template.as_ref().map_or_else(CpuTemplate::default, Into::into),
            ..CpuConfig::default()
        },
        devices,
    };
    plan.check().map_err(machine_fault)?;
    let host = HostConfig {
        serial,
        serial_limit: serial_limit(&config.serial),
        memory: memory_options(machine.huge_pages),
        keyboard: true,
        metadata: config.metadata.clone(),
        opened: files.for_machine(config),
        ..HostConfig::default()
    };
    Ok(GuestPlan { config: plan, host })
}

/// Returns the options of memory that has these pages.
pub(super) fn memory_options(pages: HugePageConfig) -> MemoryOptions {
    let huge_pages = match pages {
        // The administrator's setting applies, as in Firecracker.
        HugePageConfig::None => None,
        HugePageConfig::Transparent => Some(HugePages::Thp),
        HugePageConfig::Hugetlbfs2M => Some(HugePages::Hugetlbfs),
    };
    MemoryOptions { huge_pages, ..MemoryOptions::default() }
}

/// Returns the kernel's parameters that Firecracker adds to the client's. `root` is the first
/// drive.
fn parameters(root: Option<&BlockDeviceConfig>) -> Vec<String> {
    let mut parameters = vec!["pci=off".to_owned()];
    if let Some(root) = root.filter(|drive| drive.is_root_device) {
        let mode = if root.is_read_only == Some(true) { "ro" } else { "rw" };
        parameters.push(match &root.partuuid {
            Some(partition) => format!("root=PARTUUID={partition} {mode}"),
            None => format!("root=/dev/vda {mode}"),
        });
    }
    parameters
}

/// Returns the devices in Firecracker's order.
fn devices(config: &MicroVmConfig, files: &ClientFiles) -> Result<Vec<DeviceConfig>, ApiFault> {
    let mut devices: Vec<DeviceConfig> = Vec::new();
    devices.extend(config.balloon.as_ref().map(|balloon| {
        DeviceConfig::Balloon(BalloonConfig {
            bytes: u64::from(balloon.amount_mib) << 20,
            deflate_on_oom: balloon.deflate_on_oom,
            reporting: balloon.free_page_reporting,
            hinting: balloon.free_page_hinting,
            statistics_interval_s: balloon.stats_polling_interval_s,
        })
    }));
    for drive in &config.drives {
        let id = config.drive_name(&drive.drive_id);
        devices.push(DeviceConfig::Disk(disk(id, drive, files)?));
    }
    let net = |net| DeviceConfig::Net(interface(config, net));
    devices.extend(config.interfaces.iter().map(net));
    if let Some(vsock) = &config.vsock {
        let (cid, uds) = (vsock.guest_cid, absolute(&vsock.uds_path)?);
        devices.push(DeviceConfig::Vsock(VsockConfig { cid, uds }));
    }
    devices.extend(
        config
            .entropy
            .as_ref()
            .map(|entropy| DeviceConfig::Rng(RngConfig { limits: limits(entropy.rate_limiter) })),
    );
    Ok(devices)
}

fn interface(config: &MicroVmConfig, net: &NetworkInterfaceConfig) -> NetConfig {
    NetConfig {
        id: config.interface_name(&net.iface_id),
        tap: net.host_dev_name.clone(),
        // Without an address in Firecracker, the guest makes one up.
        mac: net.guest_mac.map_or_else(MacAddr::random, |mac| MacAddr(mac.0)),
        queues: 1,
        mtu: net.mtu,
        limits: NetLimits {
            receive: limits(net.rx_rate_limiter),
            transmit: limits(net.tx_rate_limiter),
        },
        metadata: config.interface_metadata(&net.iface_id),
    }
}

/// Returns the configuration of a drive, which the machine calls `id`.
fn disk(
    id: String,
    drive: &BlockDeviceConfig,
    files: &ClientFiles,
) -> Result<DiskConfig, ApiFault> {
    let path = drive.path_on_host.as_deref().ok_or(DriveFault::NoBackend)?;
    let opened = files.drive(&drive.drive_id).ok_or(DriveFault::NoBackend)?;
    let readonly = drive.is_read_only == Some(true);
    let path = absolute(path)?;
    let bytes = probe_opened_disk(&opened.file, &path, readonly).map_err(machine_fault)?;
    Ok(DiskConfig {
        id,
        serial: file_serial(opened.file.file()).map_err(machine_fault)?,
        path,
        readonly,
        bytes,
        block_bytes: BLOCK_BYTES,
        // Recorded once the disk is open.
        identity: None,
        limits: limits(drive.rate_limiter),
    })
}

/// Returns the limits of a device. The configuration has no bucket that is off: `PUT` drops those.
fn limits(limiter: Option<RateLimiterConfig>) -> RateLimits {
    limiter.map(RateLimits::from).unwrap_or_default()
}

/// Returns the destination of the serial port's output, which exists afterwards.
///
/// # Errors
///
/// The file cannot be used or created.
pub(super) fn serial_sink(serial: &SerialConfig) -> Result<SerialSink, ApiFault> {
    serial.serial_out_path.as_deref().map_or(Ok(SerialSink::Stdio), sink)
}

/// Returns the limit of the serial port's output. The configuration has no bucket that is off.
pub(super) fn serial_limit(serial: &SerialConfig) -> Option<RateLimit> {
    serial.rate_limiter.map(RateLimit::from)
}

fn sink(path: &Path) -> Result<SerialSink, ApiFault> {
    let failed = |e: io::Error| machine_fault(format!("the serial port's output: {e}"));
    // The sandbox can allow only paths that exist.
    let options = OpenOptions::new().read(true).append(true).create(true).clone();
    let is_output = |kind: &FileType| kind.is_file() || kind.is_fifo() || kind.is_char_device();
    match open_kind(path, &options, is_output).map_err(failed)? {
        Some(_) => Ok(SerialSink::File(std::path::absolute(path).map_err(failed)?)),
        None => {
            let why = "it is neither a regular file nor a FIFO nor a character device";
            Err(failed(io::Error::other(why)))
        }
    }
}

/// Returns the path as another start from this configuration may need it, from any working
/// directory.
fn absolute(path: &str) -> Result<PathBuf, ApiFault> {
    std::path::absolute(path).map_err(machine_fault)
}

fn machine_fault(e: impl ToString) -> ApiFault {
    StartFault::Machine(e.to_string()).into()
}

#[cfg(test)]
mod tests;
