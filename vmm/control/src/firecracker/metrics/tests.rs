//! Tests of the lines of metrics.

use std::time::Duration;

use driftline_machine::devices::{DiscardCounts, RngCounts, SerialCounts, VsockCounts};

use super::calls::CountedCall;
use super::*;
use crate::firecracker::{Answer, ApiFault, Operation};

fn config(json: Value) -> MetricsConfig {
    serde_json::from_value(json).unwrap()
}

fn metrics(calls: &Arc<ApiCounts>) -> FirecrackerMetrics {
    let config = config(json!({ "metrics_path": "m" }));
    FirecrackerMetrics::new("web-1", &config, calls.clone(), MetadataStore::default())
}

fn parsed(line: &[u8]) -> Value {
    assert_eq!(line.iter().position(|&byte| byte == b'\n'), Some(line.len() - 1));
    serde_json::from_slice(line).unwrap()
}

fn next(metrics: &mut FirecrackerMetrics, devices: &[DeviceStats]) -> Value {
    let guest = GuestCounts { devices: devices.to_vec(), ..GuestCounts::default() };
    parsed(&metrics.line(&guest, UnwrittenLines::default()))
}

fn disk(id: &str, reads: u64) -> DeviceStats {
    DeviceStats::Disk {
        id: id.to_owned(),
        reads,
        read_bytes: reads * 512,
        writes: 0,
        written_bytes: 0,
        flushes: 0,
        errors: 0,
        stalls: 0,
    }
}

fn count(calls: &ApiCounts, method: &str, path: &str, is_parsed: bool) {
    let has_body = method != "GET";
    calls.count(&CountedCall { method, path, has_body }, is_parsed, false);
}

/// Adds the names of all numbers below `value`, with those of their groups.
fn add_names(prefix: &str, value: &Value, to: &mut Vec<String>) {
    match value {
        Value::Object(group) => {
            for (name, value) in group {
                add_names(&format!("{prefix}.{name}"), value, to);
            }
        }
        number => {
            assert!(number.is_u64(), "{prefix} is {number}");
            to.push(prefix.trim_start_matches('.').to_owned());
        }
    }
}

#[test]
fn every_line_has_all_names_of_firecracker() {
    let line = next(&mut metrics(&Arc::default()), &[]);
    assert!(line["utc_timestamp_ms"].as_u64().unwrap() > 1_700_000_000_000);
    let mut names = Vec::new();
    add_names("", &line, &mut names);
    names.sort_unstable();
    // Clients read the lines into types that need each of them: those of 1.17, and
    // `net.mac_address_updates` of 1.14.
    let expected: Vec<_> = include_str!("golden/names").lines().collect();
    assert_eq!(names, expected);
}

#[test]
fn devices_have_the_names_of_their_kind() {
    let line = next(&mut metrics(&Arc::default()), &[disk("a", 0)]);
    let names = |group: &str| {
        let mut names = Vec::new();
        add_names("", &line[group], &mut names);
        names
    };
    assert_eq!(names("block_a"), names("block"));
}

#[test]
fn counts_are_those_since_the_last_line() {
    let calls = Arc::<ApiCounts>::default();
    let mut metrics = metrics(&calls);
    count(&calls, "GET", "/", true);
    count(&calls, "GET", "/", true);
    let line = next(&mut metrics, &[disk("a", 3), disk("b", 1)]);
    assert_eq!(line["get_api_requests"]["instance_info_count"], 2);
    let reads = |line: &Value, group: &str| line[group]["read_count"].as_u64().unwrap();
    assert_eq!(
        [reads(&line, "block_a"), reads(&line, "block_b"), reads(&line, "block")],
        [3, 1, 4]
    );
    assert_eq!(line["block"]["read_bytes"], 4 * 512);
    let line = next(&mut metrics, &[disk("a", 5), disk("b", 1)]);
    assert_eq!(line["get_api_requests"]["instance_info_count"], 0);
    assert_eq!(
        [reads(&line, "block_a"), reads(&line, "block_b"), reads(&line, "block")],
        [2, 0, 2]
    );
    let unwritten = UnwrittenLines { log: 7, suppressed: 2, metrics: 1 };
    let line = parsed(&metrics.line(&GuestCounts::default(), unwritten));
    assert_eq!(line["logger"]["missed_log_count"], 7);
    assert_eq!(line["logger"]["missed_metrics_count"], 1);
    assert_eq!(line["logger"]["rate_limited_log_count"], 2);
    let line = parsed(&metrics.line(&GuestCounts::default(), unwritten));
    assert_eq!(line["logger"]["missed_log_count"], 0);
}

#[test]
fn bytes_of_frames_include_their_headers() {
    let net = DeviceStats::Net {
        id: "n".to_owned(),
        received_frames: 2,
        received_bytes: 100,
        sent_frames: 3,
        sent_bytes: 200,
        lost_frames: 0,
        stalls: 0,
    };
    let line = next(&mut metrics(&Arc::default()), &[net]);
    let count = |name: &str| line["net_n"][name].as_u64().unwrap();
    assert_eq!(["rx_bytes_count", "tx_bytes_count"].map(count), [124, 236]);
    assert_eq!(["rx_packets_count", "tx_packets_count"].map(count), [2, 3]);
}

#[test]
fn balloon_is_counted_since_the_last_line() {
    let mut metrics = metrics(&Arc::default());
    let balloon = BalloonCounts {
        inflations: 1,
        deflations: 2,
        statistics: 3,
        statistics_failures: 4,
        reports: DiscardCounts { pieces: 5, bytes: 6, failures: 7 },
        hints: DiscardCounts { pieces: 8, bytes: 9, failures: 10 },
    };
    let mut next = |balloon| {
        let guest = GuestCounts { balloon: Some(balloon), ..GuestCounts::default() };
        let line = parsed(&metrics.line(&guest, UnwrittenLines::default()));
        line["balloon"].clone()
    };
    let first = next(balloon);
    let expected = json!({ "activate_fails": 0, "inflate_count": 1, "deflate_count": 2,
        "stats_updates_count": 3, "stats_update_fails": 4, "event_fails": 0,
        "free_page_report_count": 5, "free_page_report_freed": 6, "free_page_report_fails": 7,
        "free_page_hint_count": 8, "free_page_hint_freed": 9, "free_page_hint_fails": 10 });
    assert_eq!(first, expected);
    let second = next(BalloonCounts { statistics: 5, ..balloon });
    assert_eq!((&second["stats_updates_count"], &second["inflate_count"]), (&json!(2), &json!(0)));
}

#[test]
fn machine_is_counted_since_the_last_line() {
    let mut metrics = metrics(&Arc::default());
    let numbers = |line: &Value, group: &str| -> BTreeMap<String, u64> {
        let group = line[group].as_object().unwrap();
        let numbers = group.iter().filter_map(|(name, n)| Some((name.clone(), n.as_u64()?)));
        numbers.filter(|(_, number)| *number > 0).collect()
    };
    let expected = |list: &[(&str, u64)]| -> BTreeMap<String, u64> {
        list.iter().map(|(name, number)| ((*name).to_owned(), *number)).collect()
    };
    let throttled = |name: &str, counts: &[u64]| (name.to_owned(), counts.to_vec());
    let machine = MachineCounts {
        serial: SerialCounts {
            read_bytes: 1,
            written_bytes: 20,
            limited_bytes: 3,
            lost_bytes: 4,
            errors: 5,
        },
        rng: RngCounts { requests: 6, bytes: 7, failures: 8 },
        vsock: VsockCounts { connections_begun: 9, taken_bytes: 10, ..VsockCounts::default() },
        throttles: vec![throttled("a", &[11]), throttled("rng", &[12])],
    };
    let guest = GuestCounts { devices: vec![disk("a", 0)], balloon: None, machine };
    let line = parsed(&metrics.line(&guest, UnwrittenLines::default()));
    let uart = [("error_count", 5), ("missed_write_count", 4), ("rate_limiter_dropped_bytes", 3)];
    let uart = [&uart[..], &[("read_count", 1), ("write_count", 20)]].concat();
    assert_eq!(numbers(&line, "uart"), expected(&uart));
    let entropy = [("entropy_bytes", 7), ("entropy_event_count", 6), ("entropy_event_fails", 8)];
    let more = [("entropy_rate_limiter_throttled", 12), ("host_rng_fails", 8)];
    assert_eq!(numbers(&line, "entropy"), expected(&[&entropy[..], &more].concat()));
    assert_eq!(numbers(&line, "vsock"), expected(&[("conns_added", 9), ("tx_bytes_count", 10)]));
    for group in ["block", "block_a"] {
        assert_eq!(numbers(&line, group), expected(&[("rate_limiter_throttled_events", 11)]));
    }
    let line = parsed(&metrics.line(&guest, UnwrittenLines::default()));
    for group in ["uart", "entropy", "vsock", "block"] {
        assert_eq!(numbers(&line, group), expected(&[]), "{group}: not counted again");
    }
}

#[test]
fn requests_are_counted_by_name_and_failure() {
    let calls = Arc::<ApiCounts>::default();
    for (method, path, is_parsed) in [
        ("PUT", "/drives/a", true),
        ("PUT", "/drives/b", false),
        ("PATCH", "/drives/a", true),
        ("PUT", "/hotplug/memory", true),
        ("PUT", "/hotplug/other", false),
        ("PUT", "/mmds/config", true),
        ("PUT", "/entropy", true),
        ("GET", "/vm/config", true),
        ("DELETE", "/drives/a", true),
    ] {
        count(&calls, method, path, is_parsed);
    }
    calls.count(&CountedCall { method: "PUT", path: "/vsock", has_body: false }, false, false);
    calls.count(&CountedCall { method: "PUT", path: "/vsock", has_body: true }, true, true);
    let line = next(&mut metrics(&calls), &[]);
    let numbers = |group: &str| -> Vec<(String, u64)> {
        let group = line[group].as_object().unwrap();
        let numbers = group.iter().map(|(name, number)| (name.clone(), number.as_u64().unwrap()));
        numbers.filter(|(_, number)| *number > 0).collect()
    };
    let expected = |list: &[(&str, u64)]| -> Vec<(String, u64)> {
        list.iter().map(|(name, number)| ((*name).to_owned(), *number)).collect()
    };
    let puts = [
        ("drive_count", 2),
        ("drive_fails", 1),
        ("hotplug_memory_count", 1),
        ("mmds_count", 1),
        ("vsock_count", 1),
    ];
    assert_eq!(numbers("put_api_requests"), expected(&puts));
    assert_eq!(numbers("patch_api_requests"), expected(&[("drive_count", 1)]));
    assert_eq!(numbers("get_api_requests"), []);
    assert_eq!(numbers("deprecated_api"), expected(&[("deprecated_http_api_calls", 1)]));
}

#[test]
fn latencies_are_the_last_successful_ones() {
    let calls = Arc::<ApiCounts>::default();
    let mut metrics = metrics(&calls);
    let pause = latency_names(&Operation::Pause).unwrap();
    calls.set_api_latency(pause, Duration::from_micros(5), &Answer::Done);
    let failed = Answer::Fault(ApiFault::BeforeStart);
    calls.set_api_latency(pause, Duration::from_micros(9), &failed);
    let answer = calls.time_guest(&Operation::Resume, || Answer::Fault(ApiFault::BeforeStart));
    assert!(matches!(answer, Answer::Fault(_)));
    calls.time_load(|| Err::<(), _>(())).unwrap_err();
    calls.set_start_up(Some(3), None);
    for _ in 0..2 {
        let line = next(&mut metrics, &[]);
        assert_eq!(line["latencies_us"]["pause_vm"], 5);
        assert_eq!(line["latencies_us"]["vmm_resume_vm"], 0);
        assert_eq!(line["latencies_us"]["vmm_load_snapshot"], 0);
        assert_eq!(line["api_server"]["process_startup_time_us"], 3);
    }
}

#[test]
fn id_and_properties_are_written_if_asked_for() {
    let properties = json!({ "zone": "a" });
    let asked = json!({ "metrics_path": "m", "emit_id": true, "properties": properties });
    let mut metrics =
        FirecrackerMetrics::new("web-1", &config(asked), Arc::default(), MetadataStore::default());
    let line = next(&mut metrics, &[]);
    assert_eq!((&line["id"], &line["properties"]), (&json!("web-1"), &properties));
}

#[test]
fn fatal_signal_is_in_further_lines() {
    let mut metrics = metrics(&Arc::default());
    assert_eq!(next(&mut metrics, &[])["signals"]["sigbus"], 0);
    // SIGUSR1 ends no process of ours.
    for (signal, bus, faults) in [(7, 1, 0), (31, 0, 1), (10, 0, 0)] {
        metrics.set_fatal_signal(signal);
        let line = next(&mut metrics, &[]);
        assert_eq!(
            (&line["signals"]["sigbus"], &line["seccomp"]["num_faults"]),
            (&json!(bus), &json!(faults))
        );
    }
}
