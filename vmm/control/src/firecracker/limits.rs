//! Rate limits of a started guest's devices.

use std::time::{Duration, Instant};

use driftline_machine::config::RateLimits;
use driftline_machine::devices::RateLimitControl;

use super::answer::Answer;
use super::config::MicroVmConfig;
use super::fault::{ApiFault, DriveFault, NetFault};
use super::model::{BlockDeviceUpdateConfig, NetworkInterfaceUpdateConfig, VmmConfig};
use crate::jobs::Jobs;
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
    if update.path_on_host.is_some() {
        return Err(ApiFault::NotBuilt("path_on_host of PATCH /drives"));
    }
    let limiter = update.rate_limiter.ok_or(DriveFault::NothingChanged)?;
    let control = control(jobs, &config.drive_name(&update.drive_id));
    let changes = [RateLimiterConfig::change(Some(limiter))];
    let changed = control.ok_or(DriveFault::Unknown)?.change(&changes, deadline());
    changed.map_err(|e| DriveFault::Unchanged(format!("{e}.")))?;
    Ok(Answer::Done)
}

/// Puts the limits that hold into what `GET /vm/config` shows.
pub(super) fn show_limits(shown: &mut VmmConfig, config: &MicroVmConfig, jobs: &Jobs) {
    let by = deadline();
    for drive in &mut shown.drives {
        if let Some([limits]) = limits(jobs, &config.drive_name(&drive.drive_id), by).as_deref() {
            drive.rate_limiter = RateLimiterConfig::shown(limits);
        }
    }
    for net in &mut shown.network_interfaces {
        let name = config.interface_name(&net.iface_id);
        if let Some([receive, transmit]) = limits(jobs, &name, by).as_deref() {
            net.rx_rate_limiter = RateLimiterConfig::shown(receive);
            net.tx_rate_limiter = RateLimiterConfig::shown(transmit);
        }
    }
}

fn deadline() -> Instant {
    Instant::now() + DEVICE_LIMIT
}

fn control<'j>(jobs: &'j Jobs, device: &str) -> Option<&'j RateLimitControl> {
    jobs.vm().rate_limits().iter().find(|control| control.device() == device)
}

/// Returns the limits of a device, or `None` if it does not answer: those that were configured are
/// shown then.
fn limits(jobs: &Jobs, device: &str, by: Instant) -> Option<Vec<RateLimits>> {
    let limits = control(jobs, device)?.limits(by);
    limits.inspect_err(|e| tracing::warn!("cannot show the rate limits of {device}: {e}")).ok()
}
