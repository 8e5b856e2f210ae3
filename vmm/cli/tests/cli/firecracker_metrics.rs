//! The metrics that a client of Firecracker's API asks for, by an argument and by `PUT /metrics`.

use std::io::{Read, Write};
use std::time::Instant;

use driftline_machine::testing::kvm_or_skip;
use rustix::process::Signal;
use serde_json::{Value, json};

use crate::common::serving::ServeProcess;
use crate::common::{TestDir, open_both_ends, read_now, wait_for};
use crate::firecracker::{command, serve};
use crate::serve_guest::{AfterPrint, await_line, configure};

const START: &str = r#"{"action_type": "InstanceStart"}"#;
const FLUSH: &str = r#"{"action_type": "FlushMetrics"}"#;

fn parsed(lines: &str) -> Vec<Value> {
    lines.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

#[test]
fn metrics_have_one_file() {
    let tmp = TestDir::new();
    let metrics = json!({ "metrics_path": tmp.text("metrics"), "later": 1 }).to_string();
    let again = "Metrics error: Cannot initialize the metrics system due to bad user input: \
                 Reinitialization of metrics not allowed.";
    let vmm = ServeProcess::start(&tmp, &[]);
    let none = json!({ "metrics_path": tmp.text("none/metrics") }).to_string();
    let text = "Metrics error: Cannot initialize the metrics system due to bad user input: No such \
                file or directory (os error 2)";
    assert_eq!(vmm.refusal("PUT", "/metrics", &none), text);
    vmm.done("PUT", "/metrics", &metrics);
    assert_eq!(vmm.refusal("PUT", "/metrics", &metrics), again);
    let text = "The requested operation is not supported before starting the microVM.";
    assert_eq!(vmm.refusal("PUT", "/actions", FLUSH), text);
    assert_eq!(tmp.read("metrics"), "", "there is no guest");
    drop(vmm);
    let own = TestDir::new();
    let vmm = serve(&own, &["--metrics-path", &own.text("metrics")]);
    assert_eq!(vmm.refusal("PUT", "/metrics", &metrics), again);
    let out = command(&["--metrics-path", &own.text("none/metrics")]).output().unwrap();
    assert_eq!(out.status.code(), Some(1));
    let stdout = crate::common::text(&out.stdout);
    assert!(stdout.contains("Could not initialize metrics: Cannot initialize"), "{stdout}");
}

#[test]
fn guest_is_counted_from_line_to_line() {
    if !kvm_or_skip("guest_is_counted_from_line_to_line") {
        return;
    }
    let tmp = TestDir::new();
    let times = ["--start-time-us", "1", "--start-time-cpu-us", "0"];
    let path = tmp.text("metrics");
    let log = tmp.text("log");
    let args = ["--metrics-path", &path, "--id", "m-1", "--log-path", &log];
    let mut vmm = serve(&tmp, &[&args[..], &times].concat());
    configure(&vmm, &tmp, AfterPrint::Wait);
    let disk = tmp.path("disk");
    std::fs::write(&disk, [0; 4096]).unwrap();
    let drive = json!({ "drive_id": "data", "is_root_device": false, "path_on_host": disk });
    vmm.done("PUT", "/drives/data", &drive.to_string());
    vmm.refusal("PUT", "/drives/data", "{");
    vmm.done("PUT", "/actions", START);
    wait_for("the first line", || tmp.read("metrics").ends_with('\n').then_some(()));
    // Its line is written before the answer.
    vmm.done("PUT", "/actions", FLUSH);
    let lines = parsed(&tmp.read("metrics"));
    assert_eq!(lines.len(), 2, "one at the start, one on request");
    let puts = &lines[0]["put_api_requests"];
    assert_eq!((&puts["drive_count"], &puts["drive_fails"]), (&json!(2), &json!(1)));
    assert!(lines[0]["api_server"]["process_startup_time_us"].as_u64().unwrap() > 0);
    assert!(lines.iter().all(|line| line["block_data"]["read_count"] == 0));
    assert_eq!(lines[1]["put_api_requests"]["drive_count"], 0, "not counted again");
    assert_eq!(lines[1]["put_api_requests"]["actions_count"], 1);
    vmm.done("PATCH", "/vm", r#"{"state": "Paused"}"#);
    vmm.done("PATCH", "/vm", r#"{"state": "Resumed"}"#);
    vmm.done("PUT", "/actions", FLUSH);
    let latencies = &parsed(&tmp.read("metrics"))[2]["latencies_us"];
    for name in ["pause_vm", "resume_vm", "vmm_pause_vm", "vmm_resume_vm"] {
        assert!(latencies[name].as_u64().unwrap() > 0, "{name}: {latencies}");
    }
    for line in ["'pause vm' API request took ", "'resume vm' VMM action took "] {
        // A separate thread writes the log.
        wait_for(line, || tmp.read("log").contains(line).then_some(()));
    }
    assert_eq!(parsed(&tmp.read("metrics")).len(), 3);
    // The guest prints its command line, on a busy host later than this.
    let lines = wait_for("the guest's output", || {
        vmm.done("PUT", "/actions", FLUSH);
        let lines = parsed(&tmp.read("metrics"));
        let printed = lines.iter().filter_map(|line| line["uart"]["write_count"].as_u64());
        (printed.sum::<u64>() > 5).then_some(lines.len())
    });
    vmm.signal(Signal::TERM);
    vmm.wait_status();
    assert_eq!(parsed(&tmp.read("metrics")).len(), lines + 1, "one at the end");
}

#[test]
fn last_line_names_the_fatal_signal() {
    if !kvm_or_skip("last_line_names_the_fatal_signal") {
        return;
    }
    for (signal, code, group, name) in [
        (Signal::BUS, 149, "signals", "sigbus"),
        (Signal::SEGV, 150, "signals", "sigsegv"),
        (Signal::XFSZ, 151, "signals", "sigxfsz"),
        (Signal::XCPU, 154, "signals", "sigxcpu"),
        (Signal::ILL, 157, "signals", "sigill"),
        // As Firecracker's: also one that no filter has raised.
        (Signal::SYS, 2, "seccomp", "num_faults"),
    ] {
        let tmp = TestDir::new();
        // FIFOs: the limits of the handler would cut off writes to a slow disk.
        let [mut log, mut metrics] = ["log", "metrics"].map(|name| open_both_ends(&tmp.fifo(name)));
        let paths = ["--metrics-path", &tmp.text("metrics"), "--log-path", &tmp.text("log")];
        let mut vmm = serve(&tmp, &paths);
        configure(&vmm, &tmp, AfterPrint::Wait);
        vmm.done("PUT", "/actions", START);
        await_line(&tmp);
        vmm.done("PUT", "/actions", FLUSH);
        vmm.get("/machine-config");
        let since = Instant::now();
        vmm.signal(signal);
        let (status, stderr) = vmm.wait_status();
        // Whether the handler gave up, and which thread it interrupted.
        let ended =
            format!("{signal:?}, {} ms: {}", since.elapsed().as_millis(), read_now(&mut log));
        assert_eq!(status.code(), Some(code), "{ended}: {status}: {stderr}");
        let lines = parsed(&read_now(&mut metrics));
        let counted: Vec<_> = lines.iter().map(|line| line[group][name].as_u64()).collect();
        assert_eq!(counted, [Some(0), Some(0), Some(1)], "{ended}");
        assert_eq!(lines[2]["get_api_requests"]["machine_cfg_count"], 1, "{}", lines[2]);
    }
}

#[test]
fn full_fifo_of_metrics_delays_no_guest() {
    if !kvm_or_skip("full_fifo_of_metrics_delays_no_guest") {
        return;
    }
    let tmp = TestDir::new();
    let fifo = tmp.fifo("fifo");
    let mut both = open_both_ends(&fifo);
    while both.write(&[b'\n'; 4096]).is_ok() {}
    let mut vmm = ServeProcess::start(&tmp, &[]);
    configure(&vmm, &tmp, AfterPrint::Wait);
    vmm.done("PUT", "/metrics", &json!({ "metrics_path": fifo }).to_string());
    vmm.done("PUT", "/actions", START);
    await_line(&tmp);
    let refusal = vmm.refusal("PUT", "/actions", FLUSH);
    let start = "Internal VMM error: Metrics error: Failed to write metrics: ";
    assert!(refusal.starts_with(start), "{refusal}");
    read_now(&mut both);
    vmm.done("PUT", "/actions", FLUSH);
    let lines = parsed(&read_now(&mut both));
    let [line] = &lines[..] else { panic!("{lines:?}") };
    assert!(line["logger"]["missed_metrics_count"].as_u64().unwrap() > 0, "{line}");
    vmm.signal(Signal::TERM);
    assert_eq!(vmm.wait().0, Some(0));
}

#[test]
fn partly_written_metrics_are_not_flushed() {
    if !kvm_or_skip("partly_written_metrics_are_not_flushed") {
        return;
    }
    let tmp = TestDir::new();
    let fifo = tmp.fifo("fifo");
    let mut both = open_both_ends(&fifo);
    let mut vmm = ServeProcess::start(&tmp, &[]);
    configure(&vmm, &tmp, AfterPrint::Wait);
    vmm.done("PUT", "/metrics", &json!({ "metrics_path": fifo }).to_string());
    vmm.done("PUT", "/actions", START);
    await_line(&tmp);
    vmm.done("PUT", "/actions", FLUSH);
    read_now(&mut both);
    while both.write(&[b'\n'; 4096]).is_ok() {}
    // Room for the beginning of a line.
    both.read_exact(&mut [0; 4096]).unwrap();
    let refusal = vmm.refusal("PUT", "/actions", FLUSH);
    assert!(refusal.contains("Failed to write metrics"), "{refusal}");
    // The rest follows without another line.
    let mut read = String::new();
    wait_for("the rest", || {
        read.push_str(&read_now(&mut both));
        read.ends_with("}\n").then_some(())
    });
    assert_eq!(parsed(read.trim_start()).len(), 1);
    vmm.signal(Signal::TERM);
    assert_eq!(vmm.wait().0, Some(0));
}
