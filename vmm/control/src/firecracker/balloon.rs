//! Requests to a started guest's balloon: its size, its statistics, and its hints.

use driftline_machine::devices::{BalloonControl, HintingError};
use serde_json::json;

use super::answer::Answer;
use super::fault::{ApiFault, BalloonQueryFault, BalloonUpdateFault};
use super::model::{
    BalloonDeviceConfig, BalloonUpdateConfig, BalloonUpdateStatsConfig, StartHintingCmd,
};
use crate::jobs::Jobs;
use crate::model::BalloonStatistics;

/// `GET /balloon`
pub(super) fn show_balloon(jobs: &Jobs) -> Result<Answer, ApiFault> {
    let balloon = jobs.vm().balloon().ok_or(BalloonQueryFault::None)?;
    Answer::page(&balloon_shown(balloon))
}

/// Returns what `GET /balloon` shows.
pub(super) fn balloon_shown(balloon: &BalloonControl) -> BalloonDeviceConfig {
    let config = balloon.config();
    let target_mib = balloon.stats().target_bytes >> 20;
    BalloonDeviceConfig {
        // At most the guest's memory, which was given as a number of MiB.
        amount_mib: u32::try_from(target_mib).unwrap_or(u32::MAX),
        deflate_on_oom: config.deflate_on_oom,
        stats_polling_interval_s: balloon.statistics_interval_s(),
        free_page_hinting: config.hinting,
        free_page_reporting: config.reporting,
    }
}

/// `PATCH /balloon`
pub(super) fn resize(update: &BalloonUpdateConfig, jobs: &Jobs) -> Result<Answer, ApiFault> {
    let balloon = changeable(jobs)?;
    let memory_mib = jobs.vm().machine_config().mem_bytes >> 20;
    if u64::from(update.amount_mib) > memory_mib {
        return Err(BalloonUpdateFault::TooLarge(update.amount_mib).into());
    }
    balloon.set_target(u64::from(update.amount_mib) << 20);
    Ok(Answer::Done)
}

/// `GET /balloon/statistics`
pub(super) fn show_statistics(jobs: &Jobs) -> Result<Answer, ApiFault> {
    let balloon = jobs.vm().balloon().ok_or(BalloonQueryFault::None)?;
    let statistics = BalloonStatistics::of(balloon).ok_or(BalloonQueryFault::NoStatistics)?;
    Answer::page(&statistics)
}

/// `PATCH /balloon/statistics`
pub(super) fn change_interval(
    update: &BalloonUpdateStatsConfig,
    jobs: &Jobs,
) -> Result<Answer, ApiFault> {
    let changed = changeable(jobs)?.set_statistics_interval_s(update.stats_polling_interval_s);
    changed.map_err(|_| BalloonUpdateFault::Statistics)?;
    Ok(Answer::Done)
}

/// `PATCH /balloon/hinting/start`
pub(super) fn start_hinting(command: &StartHintingCmd, jobs: &Jobs) -> Result<Answer, ApiFault> {
    let started = changeable(jobs)?.start_hinting(command.acknowledge_on_stop);
    started.map_err(BalloonUpdateFault::from)?;
    Ok(Answer::Done)
}

/// `PATCH /balloon/hinting/stop`
pub(super) fn stop_hinting(jobs: &Jobs) -> Result<Answer, ApiFault> {
    changeable(jobs)?.stop_hinting().map_err(BalloonUpdateFault::from)?;
    Ok(Answer::Done)
}

/// `GET /balloon/hinting/status`
pub(super) fn show_hinting(jobs: &Jobs) -> Result<Answer, ApiFault> {
    let status = changeable(jobs)?.hinting_status().map_err(BalloonUpdateFault::from)?;
    Answer::page(&json!({ "host_cmd": status.host_command, "guest_cmd": status.guest_command }))
}

/// Ends a run of hints, if there is one. As in Firecracker, resuming the guest ends the run.
pub(super) fn end_hinting(jobs: &Jobs) {
    if let Some(balloon) = jobs.vm().balloon() {
        // Without hinting or a driver there is no run.
        let _ = balloon.stop_hinting();
    }
}

impl From<HintingError> for BalloonUpdateFault {
    fn from(e: HintingError) -> Self {
        match e {
            HintingError::Off => Self::NoHinting,
            HintingError::NotActive => Self::NotActive,
        }
    }
}

fn changeable(jobs: &Jobs) -> Result<&BalloonControl, BalloonUpdateFault> {
    jobs.vm().balloon().ok_or(BalloonUpdateFault::None)
}
