//! Changes of a started guest's drives and interfaces: rate limits, and a drive's file.

use std::path::Path;
use std::time::{Duration, Instant};

use driftline_machine::config::RateLimits;
use driftline_machine::devices::{DiskError, DiskFileControl, ExchangeError, RateLimitControl};

use super::answer::Answer;
use super::config::MicroVmConfig;
use super::fault::{ApiFault, DriveFault, NetFault};
use super::model::{
    BlockDeviceConfig, BlockDeviceUpdateConfig, NetworkInterfaceUpdateConfig, VmmConfig,
};
use crate::jobs::{Jobs, KeptFile};
use crate::model::RateLimiterConfig;

/// Longest wait for a device.
const DEVICE_LIMIT: Duration = Duration::from_secs(5);

/// `PATCH /network-interfaces/{id}`
pub(super) fn patch_interface(
    update: &NetworkInterfaceUpdateConfig,
    config: &MicroVmConfig,
    jobs: &Jobs,
) -> Result<Answer, ApiFault> {
    if !config.interfaces.iter().any(|net| net.iface_id == update.iface_id) {
        return Err(NetFault::Unknown.into());
    }
    let control = control(jobs, &config.interface_name(&update.iface_id));
    let changes = [update.rx_rate_limiter, update.tx_rate_limiter].map(RateLimiterConfig::change);
    let changed = control.ok_or(NetFault::Unknown)?.change(&changes, deadline());
    changed.map_err(|e| NetFault::Unchanged(e.to_string()))?;
    Ok(Answer::Done)
}

/// `PATCH /drives/{id}`
pub(super) fn patch_drive(
    update: &BlockDeviceUpdateConfig,
    config: &MicroVmConfig,
    jobs: &Jobs,
) -> Result<Answer, ApiFault> {
    if !config.drives.iter().any(|drive| drive.drive_id == update.drive_id) {
        return Err(DriveFault::Unknown.into());
    }
    if update.path_on_host.is_none() && update.rate_limiter.is_none() {
        return Err(DriveFault::NothingChanged.into());
    }
    let name = config.drive_name(&update.drive_id);
    if let Some(path) = &update.path_on_host {
        let file = disk_file(jobs, &name).ok_or(DriveFault::Unknown)?;
        let exchanged = jobs.exchange_file(file, Path::new(path), DEVICE_LIMIT);
        exchanged.map_err(|e| file_fault(e, path))?;
    }
    if update.rate_limiter.is_some() {
        let control = control(jobs, &name).ok_or(DriveFault::Unknown)?;
        let changed = control.change(&[RateLimiterConfig::change(update.rate_limiter)], deadline());
        changed.map_err(|e| DriveFault::Unchanged(format!("{e}.")))?;
    }
    Ok(Answer::Done)
}

/// Returns the fault that Firecracker answers for a file that a drive does not get.
fn file_fault(e: KeptFile, path: &str) -> ApiFault {
    let path = path.to_owned();
    match e {
        KeptFile::Exchange(ExchangeError::Disk(DiskError::Open { cause, .. })) => {
            DriveFault::NewFile { cause, path }
        }
        KeptFile::Exchange(other) => {
            DriveFault::Unchanged(format!("Block: Virtio backend error: {other}."))
        }
        other => DriveFault::Unchanged(format!("{other}.")),
    }
    .into()
}

/// Puts the limits and the files that the devices have now into what `GET /vm/config` shows.
pub(super) fn show_changes(shown: &mut VmmConfig, config: &MicroVmConfig, jobs: &Jobs) {
    let by = deadline();
    for drive in &mut shown.drives {
        let name = config.drive_name(&drive.drive_id);
        if let Some([limits]) = limits(jobs, &name, by).as_deref() {
            drive.rate_limiter = RateLimiterConfig::shown(limits);
        }
    }
    show_files(&mut shown.drives, config, jobs);
    for net in &mut shown.network_interfaces {
        let name = config.interface_name(&net.iface_id);
        if let Some([receive, transmit]) = limits(jobs, &name, by).as_deref() {
            net.rx_rate_limiter = RateLimiterConfig::shown(receive);
            net.tx_rate_limiter = RateLimiterConfig::shown(transmit);
        }
    }
}

/// Puts the files that the drives have now into `shown`, the drives of `config`.
pub(super) fn show_files(shown: &mut [BlockDeviceConfig], config: &MicroVmConfig, jobs: &Jobs) {
    for drive in shown {
        let file = disk_file(jobs, &config.drive_name(&drive.drive_id));
        let path = file.and_then(DiskFileControl::exchanged_path);
        // The client gave it as text.
        if let Some(path) = path.and_then(|path| path.into_os_string().into_string().ok()) {
            drive.path_on_host = Some(path);
        }
    }
}

fn deadline() -> Instant {
    Instant::now() + DEVICE_LIMIT
}

fn control<'j>(jobs: &'j Jobs, device: &str) -> Option<&'j RateLimitControl> {
    jobs.vm().rate_limits().iter().find(|control| control.device() == device)
}

fn disk_file<'j>(jobs: &'j Jobs, disk: &str) -> Option<&'j DiskFileControl> {
    jobs.vm().disk_files().iter().find(|control| control.disk() == disk)
}

/// Returns the limits of a device, or `None` if it does not answer: those that were configured are
/// shown then.
fn limits(jobs: &Jobs, device: &str, by: Instant) -> Option<Vec<RateLimits>> {
    let limits = control(jobs, device)?.limits(by);
    limits.inspect_err(|e| tracing::warn!("cannot show the rate limits of {device}: {e}")).ok()
}
