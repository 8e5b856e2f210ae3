//! Metrics of a guest: its state, its vCPUs and its memory.

use std::fmt;

use driftline_dirty_tracker::PAGE_SIZE;
use driftline_machine::config::Lineage;
use driftline_machine::vm::{Timings, VcpuInfo};

use super::page::{MetricsPage, bytes, number, seconds};
use crate::model::{GuestState, Info};

pub(super) fn write(page: &mut MetricsPage<'_>, info: &Info, timings: &Timings) -> fmt::Result {
    write_state(page, info)?;
    write_vcpus(page, &info.vcpu)?;
    write_dirty(page, info, timings)?;
    write_restore(page, timings)
}

fn write_state(page: &mut MetricsPage<'_>, info: &Info) -> fmt::Result {
    let states = GuestState::ALL.map(|state| ([("state", state.name())], state == info.state));
    let states = states.map(|(labels, is)| (labels, u64::from(is)));
    page.gauges(number("driftline_guest_state", "1 for the guest's state, else 0."), states)?;
    let mut labels =
        vec![("tracking", info.tracking.to_string()), ("backend", info.backend.to_string())];
    if let Some(Lineage { parent, checkpoint }) = &info.lineage {
        labels.push(("parent", parent.to_string()));
        labels.push(("checkpoint", checkpoint.to_string()));
    }
    page.info(number("driftline_guest", "How the guest is run, and what it began as."), &labels)?;
    page.gauge(bytes("driftline_guest_memory", "Size of guest memory."), Some(info.mem_bytes))?;
    page.gauge(number("driftline_guest_vcpus", "Number of vCPUs."), Some(u64::from(info.vcpus)))?;
    let uptime_s = info.uptime_ms as f64 / 1e3;
    page.gauge(
        seconds("driftline_guest_uptime", "Time for which this process has had the guest."),
        Some(uptime_s),
    )
}

fn write_vcpus(page: &mut MetricsPage<'_>, vcpus: &[VcpuInfo]) -> fmt::Result {
    let each = || vcpus.iter().enumerate().map(|(i, vcpu)| ([("vcpu", i.to_string())], vcpu));
    page.counters(
        number("driftline_vcpu_exits", "Exits to the VMM."),
        each().map(|(labels, vcpu)| (labels, vcpu.exits)),
    )?;
    page.counters(
        number("driftline_vcpu_ring_full_exits", "Exits because the dirty ring was full."),
        each().map(|(labels, vcpu)| (labels, vcpu.ring_full_exits)),
    )?;
    page.counters(
        seconds("driftline_vcpu_throttled", "Time for which the vCPU was throttled."),
        each().map(|(labels, vcpu)| (labels, vcpu.throttled_ms as f64 / 1e3)),
    )?;
    page.gauges(
        number("driftline_vcpu_ring_peak_entries", "Fullest dirty ring of the last second."),
        each().filter_map(|(labels, vcpu)| Some((labels, vcpu.ring_peak_entries?))),
    )
}

fn write_dirty(page: &mut MetricsPage<'_>, info: &Info, timings: &Timings) -> fmt::Result {
    let dirty = &info.dirty;
    page.counter(
        bytes("driftline_dirty", "Pages marked dirty while there was a subscriber, as bytes."),
        Some(dirty.marked_frames.saturating_mul(PAGE_SIZE)),
    )?;
    page.counter(
        number("driftline_dirty_marked_all", "How often all memory was marked dirty."),
        Some(dirty.marked_all),
    )?;
    page.counter(
        number("driftline_dirty_marks_outside", "Marks outside guest memory: defects of the VMM."),
        Some(dirty.marks_outside),
    )?;
    page.counter(
        number("driftline_dirty_ring_overruns", "Dirty rings that were overrun."),
        Some(info.ring_overruns),
    )?;
    page.gauge(
        number("driftline_dirty_subscribers", "Checkpoint runs, migrations and watches."),
        Some(dirty.subscribers),
    )?;
    page.gauge(
        bytes("driftline_dirty_tree", "Address space reserved for dirty trees."),
        Some(dirty.tree_bytes),
    )?;
    page.times(
        seconds("driftline_dirty_harvest", "Time of a harvest, with reprotect and insertion."),
        timings.collections.as_ref(),
    )
}

fn write_restore(page: &mut MetricsPage<'_>, timings: &Timings) -> fmt::Result {
    let Some(restore) = &timings.restore else { return Ok(()) };
    page.gauge(
        number("driftline_restore_pages_left", "Pages not yet restored."),
        Some(restore.left),
    )?;
    page.counter(
        number("driftline_restore_pages", "Pages restored lazily."),
        Some(restore.fetched),
    )?;
    page.counter(
        number("driftline_restore_prefetched_pages", "Pages of those prefetched."),
        Some(restore.prefetched),
    )?;
    page.times(
        seconds("driftline_restore_fault", "Time from reading a page fault to answering it."),
        Some(&restore.faults),
    )
}
