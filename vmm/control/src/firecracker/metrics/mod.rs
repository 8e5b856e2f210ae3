//! Firecracker's metrics: one JSON object a line, with all of Firecracker's names. What Driftline
//! does not count is 0.
//!
//! Numbers of events count those since the line before. Latencies, times of the start and signals
//! are the last ones.

mod calls;
mod keys;
mod machine;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use driftline_machine::devices::{BalloonCounts, DeviceStats, MachineCounts, NET_HEADER};
use driftline_machine::metadata::{MetadataCounts, MetadataStore};
use rustix::process::Signal;
use serde_json::{Map, Value, json};

pub use calls::ApiCounts;
pub(crate) use calls::{CountedCall, latency_names};
use keys::{BLOCK, GROUPS, MetricsGroup, NET};
use machine::{rng_counts, serial_counts, vsock_counts};

use super::model::MetricsConfig;

/// What a guest's machine has counted since the start of the process.
#[derive(Clone, PartialEq, Eq, Default, Debug)]
pub struct GuestCounts {
    /// Drives and interfaces.
    pub devices: Vec<DeviceStats>,
    /// The balloon, if there is one.
    pub balloon: Option<BalloonCounts>,
    /// Everything else.
    pub machine: MachineCounts,
}

impl GuestCounts {
    /// Returns how many times each rate limit of `device` has made a queue wait.
    fn throttles(&self, device: &str) -> &[u64] {
        let of = self.machine.throttles.iter().find(|(name, _)| name == device);
        of.map_or(&[], |(_, throttles)| throttles)
    }
}

/// What the process has not written, as counts since its start.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct UnwrittenLines {
    /// Lines of the log that its destination did not take.
    pub log: u64,
    /// Lines of the log that exceeded the limit of their call sites.
    pub suppressed: u64,
    /// Lines of the metrics.
    pub metrics: u64,
}

/// The metrics of a process that serves Firecracker's API.
#[derive(Debug)]
pub struct FirecrackerMetrics {
    /// What each line has besides the groups.
    extra: Map<String, Value>,
    calls: Arc<ApiCounts>,
    metadata: MetadataStore,
    /// The counts when the last line was made, by group and name.
    last: BTreeMap<(String, &'static str), u64>,
    /// The metric of the signal that ends the process.
    signal: Option<(&'static str, &'static str)>,
}

impl FirecrackerMetrics {
    /// Creates the metrics of the instance `id`, whose requests are counted in `calls`, and whose
    /// guest reads `metadata`.
    pub fn new(
        id: &str,
        config: &MetricsConfig,
        calls: Arc<ApiCounts>,
        metadata: MetadataStore,
    ) -> Self {
        let mut extra = Map::new();
        if config.emit_id {
            extra.insert("id".to_owned(), id.into());
        }
        if let Some(properties) = &config.properties {
            extra.insert("properties".to_owned(), json!(properties));
        }
        Self { extra, calls, metadata, last: BTreeMap::new(), signal: None }
    }

    /// Adds the signal that ends the process to further lines.
    pub fn set_fatal_signal(&mut self, signal: i32) {
        self.signal = Signal::from_named_raw(signal).and_then(fatal_signal_name);
    }

    /// Returns the next line, with its end.
    pub fn line(&mut self, guest: &GuestCounts, unwritten: UnwrittenLines) -> Vec<u8> {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let now_ms = u64::try_from(now.as_millis()).unwrap_or(u64::MAX);
        let mut line = MetricsLine(self.extra.clone());
        line.0.insert("utc_timestamp_ms".to_owned(), now_ms.into());
        GROUPS.iter().for_each(|group| line.add_group(group.name, group));
        for ((group, name), count) in self.calls.counts() {
            let new = self.new_events(group.to_owned(), name, count);
            line.add(group, name, new);
        }
        for ((group, name), value) in self.calls.values() {
            line.add(group, name, value);
        }
        if let Some((group, name)) = self.signal {
            line.add(group, name, 1);
        }
        for (name, count) in [
            ("missed_log_count", unwritten.log),
            ("rate_limited_log_count", unwritten.suppressed),
            ("missed_metrics_count", unwritten.metrics),
        ] {
            let new = self.new_events("logger".to_owned(), name, count);
            line.add("logger", name, new);
        }
        let metadata = self.metadata.counts();
        let machine = &guest.machine;
        let throttles = guest.throttles("rng").first().copied().unwrap_or(0);
        for (group, counts) in [
            (
                "balloon",
                guest.balloon.map_or_else(Vec::new, |counts| balloon_counts(counts).to_vec()),
            ),
            ("mmds", metadata_counts(metadata).to_vec()),
            ("uart", serial_counts(machine.serial).to_vec()),
            ("entropy", rng_counts(machine.rng, throttles).to_vec()),
            ("vsock", vsock_counts(machine.vsock).to_vec()),
        ] {
            for (name, count) in counts {
                let new = self.new_events(group.to_owned(), name, count);
                line.add(group, name, new);
            }
        }
        for device in &guest.devices {
            let DeviceCounts { kind, id, counts } = DeviceCounts::of(device, guest);
            let group = format!("{}_{id}", kind.name);
            line.add_group(&group, kind);
            for (name, count) in counts {
                let new = self.new_events(group.clone(), name, count);
                line.add(&group, name, new);
                line.add(kind.name, name, new);
            }
        }
        line.text().into_bytes()
    }

    /// Returns how many events of `count` the last line did not have.
    fn new_events(&mut self, group: String, name: &'static str, count: u64) -> u64 {
        let last = self.last.insert((group, name), count).unwrap_or(0);
        count.saturating_sub(last)
    }
}

/// A line under construction.
struct MetricsLine(Map<String, Value>);

impl MetricsLine {
    /// Adds a group of zeros.
    fn add_group(&mut self, name: &str, group: &MetricsGroup) {
        let numbers = group.numbers.iter().map(|&name| (name.to_owned(), json!(0)));
        let zero = || json!({ "min_us": 0, "max_us": 0, "sum_us": 0 });
        let times = group.times.iter().map(|&name| (name.to_owned(), zero()));
        self.0.insert(name.to_owned(), Value::Object(numbers.chain(times).collect()));
    }

    /// Returns the line with its end.
    fn text(self) -> String {
        format!("{}\n", Value::Object(self.0))
    }

    /// Adds to a number of a group.
    fn add(&mut self, group: &str, name: &str, more: u64) {
        if let Some(number) = self.0.get_mut(group).and_then(|group| group.get_mut(name)) {
            *number = number.as_u64().unwrap_or(0).saturating_add(more).into();
        }
    }
}

/// Returns the group and the name of the metric of a signal that ends the process.
fn fatal_signal_name(signal: Signal) -> Option<(&'static str, &'static str)> {
    let name = match signal {
        Signal::SYS => return Some(("seccomp", "num_faults")),
        Signal::BUS => "sigbus",
        Signal::SEGV => "sigsegv",
        Signal::XFSZ => "sigxfsz",
        Signal::XCPU => "sigxcpu",
        Signal::ILL => "sigill",
        _ => return None,
    };
    Some(("signals", name))
}

/// Returns what a balloon has counted, by name.
fn balloon_counts(counts: BalloonCounts) -> [(&'static str, u64); 10] {
    let BalloonCounts { reports, hints, .. } = counts;
    [
        ("inflate_count", counts.inflations),
        ("deflate_count", counts.deflations),
        ("stats_updates_count", counts.statistics),
        ("stats_update_fails", counts.statistics_failures),
        ("free_page_report_count", reports.pieces),
        ("free_page_report_freed", reports.bytes),
        ("free_page_report_fails", reports.failures),
        ("free_page_hint_count", hints.pieces),
        ("free_page_hint_freed", hints.bytes),
        ("free_page_hint_fails", hints.failures),
    ]
}

/// Returns Firecracker's names for what the interfaces have done for the guest's metadata.
fn metadata_counts(counts: MetadataCounts) -> [(&'static str, u64); 11] {
    [
        ("rx_accepted", counts.taken_frames),
        ("rx_accepted_err", counts.bad_packets),
        ("rx_accepted_unusual", counts.other_packets),
        ("rx_count", counts.segments),
        ("rx_no_token", counts.without_token),
        ("rx_invalid_token", counts.invalid_tokens),
        ("tx_count", counts.made_frames),
        ("tx_frames", counts.given_frames),
        ("tx_bytes", counts.given_bytes),
        ("connections_created", counts.connections_begun),
        ("connections_destroyed", counts.connections_ended),
    ]
}

/// What a device has counted.
struct DeviceCounts<'d> {
    kind: &'static MetricsGroup,
    /// The device's name.
    id: &'d str,
    /// Names and values.
    counts: Vec<(&'static str, u64)>,
}

impl<'d> DeviceCounts<'d> {
    fn of(device: &'d DeviceStats, guest: &GuestCounts) -> Self {
        let throttles = |id: &str, i: usize| guest.throttles(id).get(i).copied().unwrap_or(0);
        match device {
            DeviceStats::Disk {
                id,
                reads,
                read_bytes,
                writes,
                written_bytes,
                flushes,
                errors,
                stalls,
            } => Self {
                kind: &BLOCK,
                id,
                counts: vec![
                    ("read_count", *reads),
                    ("read_bytes", *read_bytes),
                    ("write_count", *writes),
                    ("write_bytes", *written_bytes),
                    ("flush_count", *flushes),
                    ("execute_fails", *errors),
                    ("io_engine_throttled_events", *stalls),
                    ("rate_limiter_throttled_events", throttles(id, 0)),
                ],
            },
            DeviceStats::Net {
                id,
                received_frames,
                received_bytes,
                sent_frames,
                sent_bytes,
                stalls,
                ..
            } => Self {
                kind: &NET,
                id,
                // Firecracker counts virtio's header as well.
                counts: vec![
                    ("rx_packets_count", *received_frames),
                    ("rx_count", *received_frames),
                    ("rx_bytes_count", received_bytes + received_frames * NET_HEADER as u64),
                    ("tx_packets_count", *sent_frames),
                    ("tx_count", *sent_frames),
                    ("tx_bytes_count", sent_bytes + sent_frames * NET_HEADER as u64),
                    ("no_rx_avail_buffer", *stalls),
                    ("rx_rate_limiter_throttled", throttles(id, 0)),
                    ("tx_rate_limiter_throttled", throttles(id, 1)),
                ],
            },
        }
    }
}

#[cfg(test)]
mod tests;
