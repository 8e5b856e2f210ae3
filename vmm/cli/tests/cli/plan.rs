//! `driftline plan` from the command line: its output for a guest of the threads backend, and its
//! refusals.

use std::net::TcpListener;

use crate::common::{TestDir, Vmm, driftline, fail, wait_for};
use serde_json::Value;

const MACHINE: &[&str] = &["--backend", "threads", "--mem", "64M", "--vcpus", "2"];
const GUEST: &[&str] = &["--guest", "payload,ws=16M,rate=8M,burst=8"];

#[test]
fn plan_leaves_the_guest_as_it_was() {
    let tmp = TestDir::new();
    let vmm = Vmm::run(&tmp, "guest", &[MACHINE, GUEST].concat());
    vmm.await_progress(2, &[]);
    let plan = vmm.tell(&["plan", "--json", "--bandwidth", "100M", "--downtime-ms", "200"]);
    let plan: Value = serde_json::from_str(&plan).unwrap();
    assert_eq!(plan["bandwidth_bytes_per_s"], 100 << 20);
    assert_eq!(plan["bandwidth_assumed"], false);
    assert_eq!(plan["downtime_target_ms"], 200);
    assert_eq!(plan["postcopy_offered"], false);
    // The threads backend does not know which thread writes.
    assert_eq!(plan["throttle_possible"], false);
    assert_eq!(plan["migration"]["most_bytes_per_s"], Value::Null);
    assert_eq!(plan["verdict"], "converges", "{plan}");
    let migration = &plan["migration"];
    for field in ["total_time_ms", "downtime_ms", "transferred_bytes"] {
        assert!(migration[field].as_f64().unwrap() > 0.0, "{field} in {plan}");
    }
    assert!(migration["passes"][0]["frames"].as_u64() >= Some(16 << 20 >> 12), "{plan}");
    let lengths: Vec<f64> = plan["guest"]["curve"]
        .as_array()
        .unwrap()
        .iter()
        .map(|w| w["window_ms"].as_f64().unwrap())
        .collect();
    assert_eq!(lengths.len(), 5);
    for (length, least) in lengths.iter().zip([10.0, 50.0, 250.0, 750.0, 1500.0]) {
        assert!(*length >= least * 0.9, "{lengths:?}");
    }
    assert_eq!(plan["checkpoints"].as_array().unwrap().len(), 7);
    assert_eq!(plan["checkpoints"][3]["every_ms"], 100.0);
    // No subscriber tracks the guest's writes any more.
    assert_eq!(vmm.state(), "running");
    assert_eq!(vmm.info().unwrap()["dirty"]["subscribers"], 0);

    let table = vmm.tell(&["plan"]);
    assert!(table.contains("assumed: set it with --bandwidth"), "{table}");
    for row in ["migration ", "downtime ", "cadence "] {
        assert!(table.lines().any(|line| line.starts_with(row)), "{row}in {table}");
    }
}

#[test]
fn guest_that_writes_nothing_has_no_plan() {
    let tmp = TestDir::new();
    let vmm = Vmm::run(&tmp, "guest", &[MACHINE, GUEST].concat());
    let socket = vmm.socket();
    let plan = ["plan", "--api-sock", &socket];
    vmm.tell(&["pause"]);
    let stderr = fail(1, &plan);
    assert!(stderr.contains("the guest is paused and writes nothing"), "{stderr}");
    vmm.tell(&["resume"]);

    // No process answers there, so the migration waits.
    let silent = TcpListener::bind("127.0.0.1:0").unwrap();
    let to = format!("tcp:{}", silent.local_addr().unwrap());
    let mut sending = driftline(&["send-migration", &to, "--api-sock", &socket])
        .stderr(std::process::Stdio::null())
        .spawn()
        .unwrap();
    wait_for("a migration", || (vmm.state() == "migrating").then_some(()));
    let stderr = fail(1, &plan);
    assert!(stderr.contains("the guest is being migrated already"), "{stderr}");
    vmm.tell(&["cancel-migration"]);
    sending.wait().unwrap();

    let untracked =
        Vmm::run(&tmp, "untracked", &[MACHINE, GUEST, &["--tracking", "none"]].concat());
    let stderr = fail(1, &["plan", "--api-sock", &untracked.socket()]);
    assert!(stderr.contains("--tracking none"), "{stderr}");
    let stderr = fail(2, &["plan", "--api-sock", &socket, "--bandwidth", "10"]);
    assert!(stderr.contains("a bandwidth is at least"), "{stderr}");
    let stderr = fail(1, &["plan", "--api-sock", &tmp.text("none.sock")]);
    assert!(stderr.contains("does not exist: is the guest running"), "{stderr}");
}
