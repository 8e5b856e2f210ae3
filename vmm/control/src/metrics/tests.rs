//! Tests of the whole page, with a guest that has one of everything: against the book, and against
//! the dashboard and the alerts.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use driftline_guest::VmId;
use driftline_machine::config::{BackendKind, HostConfig, Lineage, SerialSink};
use driftline_machine::devices::{BalloonStats, DeviceStats, RngCounts, SerialCounts, VsockCounts};
use driftline_machine::histogram::Histogram;
use driftline_machine::memory::RestoreFigures;
use driftline_machine::testing::payload_config;
use driftline_migrate::VcpuThrottle;
use serde_json::json;

use super::*;
use crate::model::{MigrationPage, MigrationState};

/// A family: its type, and the labels of its samples without those of all metrics.
type Families = BTreeMap<String, (String, BTreeSet<String>)>;

fn jobs() -> Arc<Jobs> {
    let config = payload_config(BackendKind::Threads);
    let host = HostConfig { serial: SerialSink::Null, ..Default::default() };
    let vm = driftline_backends::launch(config, &host).unwrap();
    Jobs::new(vm, std::env::temp_dir())
}

/// Returns the figures of a guest that has one of everything.
fn everything() -> Scrape {
    let jobs = jobs();
    let progress = Progress {
        throttle: vec![VcpuThrottle { most_bytes_per_s: Some(1), ..Default::default() }],
        ..Progress::default()
    };
    let mut scrape = Scrape::read(Some(&jobs), Some(progress.clone()));
    let guest = scrape.guest.as_mut().unwrap();
    let some = Histogram::new(&[1]);
    some.observe(Duration::from_secs(1));
    guest.info.name = Some("web-1".parse().unwrap());
    guest.info.lineage = Some(Lineage { parent: VmId::random(), checkpoint: 7 });
    guest.info.every_ms = std::num::NonZeroU64::new(100);
    guest.info.checkpointing = true;
    guest.info.vcpu[0].ring_peak_entries = Some(3);
    guest.info.devices = vec![
        DeviceStats::Disk {
            id: "disk0".to_owned(),
            reads: 1,
            read_bytes: 2,
            writes: 3,
            written_bytes: 4,
            flushes: 5,
            errors: 6,
            stalls: 7,
        },
        DeviceStats::Net {
            id: "net0".to_owned(),
            received_frames: 1,
            received_bytes: 2,
            sent_frames: 3,
            sent_bytes: 4,
            lost_frames: 5,
            stalls: 6,
        },
    ];
    let faults = some.read();
    guest.timings.collections = Some(some.read());
    guest.timings.restore = Some(RestoreFigures { left: 1, fetched: 2, prefetched: 3, faults });
    guest.devices.balloon = Some(BalloonStats {
        target_bytes: 1,
        actual_bytes: 2,
        discarded_bytes: 3,
        ..Default::default()
    });
    guest.devices.serial = Some(SerialCounts::default());
    guest.devices.entropy = Some(RngCounts { requests: 1, bytes: 2, failures: 3 });
    guest.devices.vsock =
        Some(VsockCounts { connections_begun: 5, connections_ended: 2, ..Default::default() });
    guest.devices.throttles = vec![("disk0".to_owned(), vec![3]), ("net0".to_owned(), vec![4, 5])];
    guest.checkpoints.counts.last_interval = Some(Duration::from_millis(99));
    guest.checkpoints.counts.last_success = Some(SystemTime::now());
    let report = json!({
        "status": "completed", "vm_id": guest.info.vm_id, "total_time_ms": 1.0,
        "downtime_ms": 2.5, "paused_at_unix_us": 1, "setup_time_ms": 1.0,
        "transferred_bytes": 1, "zero_frames": 1, "normal_frames": 1, "disk_bytes": 0,
        "disk_zero_bytes": 0, "shared_memory_bytes": 0, "throughput_bytes_per_s": 1,
        "converged": "", "passes": [], "throttle": [],
    });
    guest.migrations.latest = Some(MigrationPage {
        job: 1,
        state: MigrationState::Completed,
        to: String::new(),
        progress,
        report: Some(serde_json::from_value(report).unwrap()),
        failure: None,
    });
    scrape
}

/// Returns the families of a page in the text format.
fn families(page: &str) -> Families {
    let mut all = Families::new();
    let mut last = String::new();
    for line in page.lines() {
        if let Some(of) = line.strip_prefix("# TYPE ") {
            let (name, kind) = of.split_once(' ').unwrap();
            assert!(!all.contains_key(name), "{name} is on the page twice");
            all.insert(name.to_owned(), (kind.to_owned(), BTreeSet::new()));
            last = name.to_owned();
        } else if !line.starts_with('#') {
            let (sample, value) = line.rsplit_once(' ').unwrap();
            assert!(value.parse::<f64>().is_ok(), "{line}");
            let (name, labels) = sample.split_once('{').unwrap_or((sample, ""));
            let suffix = name.strip_prefix(&last).unwrap_or_else(|| panic!("{line} after {last}"));
            assert!(["", "_bucket", "_sum", "_count"].contains(&suffix), "{line}");
            let names = labels.split("\",").filter_map(|l| Some(l.split_once("=\"")?.0.to_owned()));
            let own = names.filter(|label| !["vm_id", "name", "le"].contains(&label.as_str()));
            all.get_mut(&last).unwrap().1.extend(own);
        }
    }
    all
}

fn document(path: &str) -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs").join(path);
    std::fs::read_to_string(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()))
}

/// Returns the families that the tables of the book list.
fn documented() -> Families {
    let page = document("src/operating/metrics.md");
    let rows = page.lines().filter(|line| {
        ["| `driftline_", "| `process_"].iter().any(|begin| line.starts_with(begin))
    });
    let words = |cell: &str| -> Vec<String> {
        cell.split('`').skip(1).step_by(2).map(str::to_owned).collect()
    };
    rows.map(|row| {
        let cells: Vec<&str> = row.split('|').map(str::trim).collect();
        let [_, name, kind, unit, labels, meaning, _] = cells[..] else { panic!("{row}") };
        let name = words(name).remove(0);
        let suffix = match unit {
            "" => "",
            "bytes/s" => "_bytes_per_second",
            "seconds" | "bytes" => unit,
            _ => panic!("the unit of {row}"),
        };
        assert!(name.contains(suffix) && !meaning.is_empty(), "{row}");
        // The text format has no type for labels with the value 1.
        let kind = if kind == "info" { "gauge" } else { kind };
        (name, (kind.to_owned(), words(labels).into_iter().collect()))
    })
    .collect()
}

#[test]
fn book_lists_what_is_on_the_page() {
    let page = everything().write(Format::Text).unwrap();
    let (written, listed) = (families(&page), documented());
    for (name, family) in &written {
        assert_eq!(listed.get(name), Some(family), "{name}: the book, and the page");
    }
    for name in listed.keys() {
        assert!(written.contains_key(name), "{name} is in the book alone");
    }
}

#[test]
fn dashboard_and_alerts_name_metrics_that_exist() {
    let dashboard: serde_json::Value = serde_json::from_str(&document("grafana.json")).unwrap();
    let panels = dashboard["panels"].as_array().unwrap();
    let targets = panels.iter().filter_map(|panel| panel["targets"].as_array()).flatten();
    let mut expressions: Vec<String> =
        targets.map(|target| target["expr"].as_str().unwrap().to_owned()).collect();
    assert!(expressions.len() > 30, "{}", expressions.len());
    let variables = dashboard["templating"]["list"].as_array().unwrap();
    expressions.extend(variables.iter().filter_map(|v| Some(v["definition"].as_str()?.to_owned())));
    expressions.push(document("alerts.yml").lines().filter(|l| !l.contains("name:")).collect());
    let exist = families(&everything().write(Format::Text).unwrap());
    let mut used = BTreeSet::new();
    for expression in &expressions {
        let is_part = |c: char| c.is_ascii_alphanumeric() || c == '_';
        for word in expression.split(|c| !is_part(c)) {
            if !word.starts_with("driftline_") && !word.starts_with("process_") {
                continue;
            }
            let histogram = word.strip_suffix("_bucket");
            let kind = exist.get(histogram.unwrap_or(word)).map(|(kind, _)| kind.as_str());
            let fits = kind.is_some_and(|kind| (kind == "histogram") == histogram.is_some());
            assert!(fits, "{word} of {expression}");
            used.insert(word.to_owned());
        }
    }
    for about in ["pause", "durable", "dirty_bytes", "written", "phase", "throttled", "disk", "cpu"]
    {
        assert!(used.iter().any(|name| name.contains(about)), "nothing about {about}");
    }
}

#[test]
fn all_metrics_have_the_labels_of_their_guest() {
    let scrape = everything();
    let id = scrape.guest.as_ref().unwrap().info.vm_id;
    for format in [Format::Text, Format::OpenMetrics] {
        let page = everything().write(format).unwrap();
        assert!(page.lines().any(|line| line.starts_with("driftline_build_info{")));
        assert_eq!(page.ends_with("# EOF\n"), format == Format::OpenMetrics);
    }
    let page = scrape.write(Format::Text).unwrap();
    let begin = format!("{{vm_id=\"{id}\",name=\"web-1\"");
    for line in page.lines().filter(|line| !line.starts_with('#')) {
        assert!(line.contains(&begin), "{line}");
    }
}

#[test]
fn process_without_a_guest_has_metrics() {
    let received = Progress { sent_bytes: 3, earlier_bytes: 4, ..Progress::default() };
    let page = Scrape::read(None, Some(received)).write(Format::Text).unwrap();
    assert!(page.contains("driftline_migration_phase{role=\"destination\",phase=\"waiting\"} 1\n"));
    assert!(page.contains("driftline_migration_transferred_bytes_total{role=\"destination\"} 7\n"));
    assert!(page.contains("\nprocess_open_fds "), "{page}");
    assert!(!page.contains("guest_state") && !page.contains("vm_id"), "{page}");
}

#[test]
fn values_have_base_units() {
    let page = everything().write(Format::Text).unwrap();
    let sample = |begin: &str| {
        let line = page.lines().find(|line| line.starts_with(begin));
        line.unwrap_or_else(|| panic!("no {begin}")).rsplit_once(' ').unwrap().1.to_owned()
    };
    assert_eq!(sample("driftline_migration_downtime_seconds"), "0.0025");
    assert_eq!(sample("driftline_vsock_open_connections"), "3");
    assert_eq!(sample("driftline_checkpoint_requested_interval_seconds"), "0.1");
    assert_eq!(sample("driftline_checkpoint_last_interval_seconds"), "0.099");
    assert_eq!(sample("driftline_dirty_harvest_seconds_sum"), "1.0");
    assert_eq!(sample("driftline_dirty_harvest_seconds_count"), "1");
}
