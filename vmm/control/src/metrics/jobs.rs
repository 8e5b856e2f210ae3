//! Metrics of the jobs on a guest: checkpoints, and migrations at either end.

use std::fmt;
use std::num::NonZeroU64;
use std::time::UNIX_EPOCH;

use driftline_dirty_tracker::PAGE_SIZE;
use driftline_migrate::{Phase, Progress};

use super::page::{MetricsPage, bytes, number, seconds};
use crate::jobs::{CheckpointFigures, MigrationFigures};
use crate::model::{Info, MigrationPage};

pub(super) fn write_checkpoints(
    page: &mut MetricsPage<'_>,
    info: &Info,
    figures: &CheckpointFigures,
) -> fmt::Result {
    let counts = &figures.counts;
    page.gauge(
        number("driftline_checkpoint_running", "1 while a checkpoint run is active, else 0."),
        Some(u64::from(info.checkpointing)),
    )?;
    page.counter(
        number("driftline_checkpoints", "Checkpoints that are durable."),
        Some(counts.taken),
    )?;
    page.counter(
        number("driftline_checkpoint_failures", "Checkpoints that were not stored."),
        Some(counts.failed),
    )?;
    page.counter(
        number("driftline_checkpoint_early", "Checkpoints taken before they were due."),
        Some(counts.early),
    )?;
    page.counter(
        number("driftline_checkpoint_skipped", "Checkpoints that were due and not taken."),
        Some(counts.skipped),
    )?;
    page.counter(
        bytes("driftline_checkpoint_written", "Bytes written to the store."),
        Some(counts.written_bytes),
    )?;
    page.counter(
        number("driftline_checkpoint_pages", "Pages of memory stored."),
        Some(counts.pages),
    )?;
    page.counter(
        number("driftline_checkpoint_background_pages", "Pages of those copied after the pause."),
        Some(counts.background_pages),
    )?;
    page.counter(
        bytes("driftline_checkpoint_disk", "Changed blocks of disks stored, as bytes."),
        Some(counts.disk_blocks.saturating_mul(PAGE_SIZE)),
    )?;
    page.counter(
        number("driftline_checkpoint_write_waits", "Writes that waited for a page to be copied."),
        Some(counts.write_waits),
    )?;
    page.counter(
        seconds("driftline_checkpoint_write_wait", "Time for which writes waited."),
        Some(counts.write_waited.as_secs_f64()),
    )?;
    write_checkpoint_times(page, info, figures)
}

/// Writes how long checkpoints took, and when they were taken.
fn write_checkpoint_times(
    page: &mut MetricsPage<'_>,
    info: &Info,
    figures: &CheckpointFigures,
) -> fmt::Result {
    let counts = &figures.counts;
    page.times(
        seconds("driftline_checkpoint_pause", "Time for which a checkpoint paused the guest."),
        Some(&figures.pause),
    )?;
    page.times(
        seconds(
            "driftline_checkpoint_durable",
            "Time from the start of the pause until the checkpoint was durable.",
        ),
        Some(&figures.durable),
    )?;
    let requested_s = info.every_ms.filter(|_| info.checkpointing).map(NonZeroU64::get);
    page.gauge(
        seconds("driftline_checkpoint_requested_interval", "Requested interval, while active."),
        requested_s.map(|ms| ms as f64 / 1e3),
    )?;
    page.gauge(
        seconds("driftline_checkpoint_last_interval", "Time between the last two checkpoints."),
        counts.last_interval.map(|interval| interval.as_secs_f64()),
    )?;
    let success = counts.last_success.and_then(|at| at.duration_since(UNIX_EPOCH).ok());
    page.gauge(
        seconds(
            "driftline_checkpoint_last_success_timestamp",
            "When the last checkpoint became durable, since 1970.",
        ),
        success.map(|since| since.as_secs_f64()),
    )
}

/// A migration at one of its ends.
struct MigrationEnd<'p> {
    role: &'static str,
    progress: &'p Progress,
}

/// Writes the latest migration from here, and what arrives or has arrived here.
pub(super) fn write_migrations(
    page: &mut MetricsPage<'_>,
    sent: Option<&MigrationFigures>,
    received: Option<&Progress>,
) -> fmt::Result {
    let latest = sent.and_then(|sent| sent.latest.as_ref());
    let source = latest.map(|page| MigrationEnd { role: "source", progress: &page.progress });
    let destination = received.map(|progress| MigrationEnd { role: "destination", progress });
    let ends: Vec<MigrationEnd<'_>> = source.into_iter().chain(destination).collect();
    write_ends(page, &ends)?;
    page.counters(
        bytes(
            "driftline_migration_transferred",
            "Bytes sent by a source, or received by a destination.",
        ),
        sent.map(|sent| ([("role", "source")], sent.counts.sent_bytes))
            .into_iter()
            .chain(received.map(|p| ([("role", "destination")], p.earlier_bytes + p.sent_bytes))),
    )?;
    if let Some(sent) = sent {
        let counts = &sent.counts;
        page.counters(
            number("driftline_migrations", "Migrations from this process that are over."),
            [
                ([("result", "completed")], counts.completed),
                ([("result", "failed")], counts.failed),
                ([("result", "cancelled")], counts.cancelled),
            ],
        )?;
    }
    page.counter(
        number("driftline_migration_refusals", "Sources that a receiver refused, or lost."),
        received.map(|progress| progress.refused),
    )?;
    write_source(page, latest)
}

/// Writes what both ends of a migration have.
fn write_ends(page: &mut MetricsPage<'_>, ends: &[MigrationEnd<'_>]) -> fmt::Result {
    let phases = ends.iter().flat_map(|end| {
        PHASES.map(|phase| {
            let is = u64::from(phase == end.progress.phase);
            ([("role", end.role), ("phase", name(phase))], is)
        })
    });
    page.gauges(number("driftline_migration_phase", "1 for the phase, else 0."), phases)?;
    page.gauges(
        number("driftline_migration_pass", "The pass over memory, from 0."),
        ends.iter().map(|end| ([("role", end.role)], u64::from(end.progress.pass))),
    )
}

/// Writes what only the source of a migration knows.
fn write_source(page: &mut MetricsPage<'_>, latest: Option<&MigrationPage>) -> fmt::Result {
    let Some(MigrationPage { progress, report, .. }) = latest else { return Ok(()) };
    page.gauge(
        number("driftline_migration_remaining_pages", "Pages that the pass has still to send."),
        Some(progress.remaining_frames),
    )?;
    page.gauge(
        bytes("driftline_migration_remaining_disk", "Bytes of disks still to be sent."),
        Some(progress.remaining_disk_bytes),
    )?;
    page.gauge(
        number("driftline_migration_dirty_bytes_per_second", "Dirty rate of the last pass."),
        Some(progress.dirty_rate_bytes_per_s),
    )?;
    page.gauge(
        number("driftline_migration_throughput_bytes_per_second", "Throughput of the last pass."),
        Some(progress.link_rate_bytes_per_s),
    )?;
    page.gauge(
        seconds(
            "driftline_migration_expected_downtime",
            "Downtime if the migration switched over now.",
        ),
        Some(progress.expected_downtime_ms / 1e3),
    )?;
    page.gauge(
        seconds("driftline_migration_downtime", "Downtime, once the migration is completed."),
        report.as_ref().map(|report| report.downtime_ms / 1e3),
    )?;
    let limits = progress
        .throttle
        .iter()
        .filter_map(|vcpu| Some(([("vcpu", vcpu.vcpu.to_string())], vcpu.most_bytes_per_s?)));
    page.gauges(
        number("driftline_migration_throttle_bytes_per_second", "Limit of a vCPU's dirty rate."),
        limits,
    )
}

const PHASES: [Phase; 8] = [
    Phase::Waiting,
    Phase::Connect,
    Phase::Setup,
    Phase::Precopy,
    Phase::SwitchOver,
    Phase::HandOver,
    Phase::InDoubt,
    Phase::Finished,
];

/// Returns the phase as JSON spells it.
fn name(phase: Phase) -> &'static str {
    match phase {
        Phase::Waiting => "waiting",
        Phase::Connect => "connect",
        Phase::Setup => "setup",
        Phase::Precopy => "precopy",
        Phase::SwitchOver => "switch-over",
        Phase::HandOver => "hand-over",
        Phase::InDoubt => "in-doubt",
        Phase::Finished => "finished",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn phases_are_spelled_as_in_json() {
        for phase in PHASES {
            assert_eq!(serde_json::to_value(phase).unwrap(), name(phase));
        }
    }
}
