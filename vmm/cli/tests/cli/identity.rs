//! A guest's identity: ids, names, lineages, and which guests may add checkpoints to a store.

use crate::common::{TestDir, Vmm, fail, receiver, request, succeed, wait_for};
use driftline_machine::testing::kvm_or_skip;
use serde_json::{Value, json};

const ID: &str = "3f2504e0-4f89-41d3-9a0c-0305e82c3301";
const THREADS: [&str; 6] =
    ["--backend", "threads", "--mem", "32M", "--guest", "payload,ws=1M,rate=1M,burst=8"];

fn run<'p>(tmp: &'p TestDir, name: &'static str, more: &[&str]) -> Vmm<'p> {
    let mut vmm = Vmm::run(tmp, name, &[&THREADS[..], more].concat());
    vmm.await_api();
    vmm
}

fn restore<'p>(tmp: &'p TestDir, name: &'static str, store: &str, more: &[&str]) -> Vmm<'p> {
    let args = [&["restore", "--store", store], more].concat();
    let mut vmm = Vmm::start(tmp, name, &args);
    vmm.await_api();
    vmm
}

fn listing(store: &str) -> Value {
    serde_json::from_str(&succeed(&["store", "ls", "--json", store])).unwrap()
}

fn epochs(store: &str) -> Vec<u64> {
    let listing = listing(store);
    listing["checkpoints"]
        .as_array()
        .unwrap()
        .iter()
        .map(|e| e["checkpoint"].as_u64().unwrap())
        .collect()
}

#[test]
fn clones_cannot_use_their_parents_store() {
    let tmp = TestDir::new();
    let (store, other) = (tmp.text("store"), tmp.text("other"));
    let parent = run(&tmp, "parent", &["--id", ID, "--name", "web-1"]);
    parent.tell(&["checkpoint", "--store", &store]);
    let info = parent.info().unwrap();
    assert_eq!((&info["vm_id"], &info["name"]), (&json!(ID), &json!("web-1")));
    assert_eq!(info["lineage"], Value::Null);
    let mut clones = [
        restore(&tmp, "one", &store, &["--name", "two"]),
        restore(&tmp, "another", &store, &["--lazy"]),
    ];
    let ids = clones.each_ref().map(|clone| clone.info().unwrap()["vm_id"].clone());
    assert!(ids[0] != ids[1] && !ids.contains(&json!(ID)), "{ids:?}");
    assert_eq!(clones[0].info().unwrap()["name"], "two");
    assert_eq!(clones[1].info().unwrap()["name"], Value::Null);
    for clone in &clones {
        assert_eq!(clone.info().unwrap()["lineage"], json!({ "parent": ID, "checkpoint": 1 }));
        let stderr = clone.refuse(4, &["checkpoint", "--store", &store]);
        assert!(stderr.contains(&format!("holds checkpoints of guest {ID}")), "{stderr}");
        assert!(stderr.contains("--new-store"), "{stderr}");
    }
    let stderr = clones[0].refuse(4, &["checkpoint", "--store", &store, "--new-store"]);
    assert!(stderr.contains("it is not empty"), "{stderr}");
    clones[0].tell(&["checkpoint", "--store", &other, "--new-store"]);
    clones[0].tell(&["checkpoint", "--store", &other]);
    parent.tell(&["checkpoint", "--store", &store]);
    assert_eq!((epochs(&store), epochs(&other)), (vec![1, 2], vec![1, 2]));
    let listed = listing(&other);
    assert_eq!((&listed["vm_id"], &listed["name"]), (&ids[0], &json!("two")));
    assert_eq!(listed["lineage"], json!({ "parent": ID, "checkpoint": 1 }));
    let text = succeed(&["store", "ls", &other]);
    assert!(text.contains(&format!("\"two\", which began as checkpoint 1 of {ID}")), "{text}");
    assert!(clones[0].tell(&["info"]).contains(&format!("checkpoint 1 of {ID}")));
    // A guest's name, id and lineage migrate with it.
    let (mut there, to) = receiver(&tmp, "there", &[]);
    clones[0].tell(&["send-migration", &to]);
    assert_eq!(clones[0].wait(), Some(0));
    there.await_api();
    let info = wait_for("the guest", || there.info().filter(|info| info["vm_id"] == ids[0]));
    assert_eq!(info["name"], "two");
    assert_eq!(info["lineage"], json!({ "parent": ID, "checkpoint": 1 }));
    // It is the same line of checkpoints and continues its store.
    there.tell(&["checkpoint", "--store", &other]);
    assert_eq!(epochs(&other), [1, 2, 3]);
    there.kill();
}

#[test]
fn only_the_latest_line_continues_a_store() {
    let tmp = TestDir::new();
    let store = tmp.text("store");
    let mut first = run(&tmp, "first", &["--id", ID, "--name", "a"]);
    first.tell(&["checkpoint", "--store", &store]);
    first.tell(&["checkpoint", "--store", &store]);
    let older = restore(&tmp, "older", &store, &["--same-id", "--checkpoint", "1"]);
    let latest = restore(&tmp, "latest", &store, &["--same-id"]);
    let stale = restore(&tmp, "stale", &store, &["--same-id"]);
    for vmm in [&older, &latest, &stale] {
        let info = vmm.info().unwrap();
        assert_eq!((&info["vm_id"], &info["name"]), (&json!(ID), &json!("a")));
    }
    let stderr = older.refuse(4, &["checkpoint", "--store", &store]);
    assert!(
        stderr.contains("continues from checkpoint 1.") && stderr.contains("--new-store"),
        "{stderr}"
    );
    latest.tell(&["checkpoint", "--store", &store]);
    latest.tell(&["checkpoint", "--store", &store]);
    // The store contains checkpoints that this guest does not know.
    let stderr = stale.refuse(4, &["checkpoint", "--store", &store]);
    assert!(stderr.contains("checkpoint 4, the latest in the store"), "{stderr}");
    assert!(stderr.contains("continue from checkpoint 4 (restore --same-id)"), "{stderr}");
    let stderr = first.refuse(4, &["checkpoint", "--store", &store]);
    assert!(stderr.contains("this one was not restored from it"), "{stderr}");
    assert_eq!(epochs(&store), [1, 2, 3, 4]);
    first.kill();
}

#[test]
fn a_clone_in_doubt_blocks_no_sibling() {
    let tmp = TestDir::new();
    let (store, state) = (tmp.text("store"), tmp.text("state"));
    let parent = run(&tmp, "parent", &["--id", ID]);
    parent.tell(&["checkpoint", "--store", &store]);
    let clone = "aaaaaaaa-0000-4000-8000-000000000001";
    pending(&tmp, clone);
    restore(&tmp, "sibling", &store, &[]);
    restore(&tmp, "recovered", &store, &["--same-id"]);
    pending(&tmp, ID);
    let args = ["restore", "--store", &store, "--state-dir", &state];
    for more in [&[][..], &["--same-id"]] {
        let stderr = fail(1, &[&args[..], more].concat());
        assert!(stderr.contains(&format!("guest {ID} may be running at tcp:b:1")), "{stderr}");
        assert!(stderr.contains("driftline resolve") && stderr.contains("--new-id"), "{stderr}");
    }
    let new = restore(&tmp, "new", &store, &["--new-id"]);
    assert_ne!(new.info().unwrap()["vm_id"], ID);
}

#[test]
fn clone_in_doubt_needs_other_disks() {
    if !kvm_or_skip("clone_in_doubt_needs_other_disks") {
        return;
    }
    let tmp = TestDir::new();
    for name in ["disk", "copy"] {
        std::fs::File::create(tmp.path(name)).unwrap().set_len(1 << 20).unwrap();
    }
    let (store, disk) = (tmp.text("store"), format!("path={}", tmp.text("disk")));
    let args =
        ["--mem", "32M", "--guest", "payload,ws=1M,rate=1M,burst=8", "--id", ID, "--disk", &disk];
    let parent = Vmm::run(&tmp, "parent", &args);
    parent.tell(&["checkpoint", "--store", &store, "--disks", "external"]);
    drop(parent);
    pending(&tmp, ID);
    let state = tmp.text("state");
    let new = ["restore", "--store", &store, "--state-dir", &state, "--serial", "null", "--new-id"];
    std::os::unix::fs::symlink(tmp.path("disk"), tmp.path("link")).unwrap();
    let link = format!("path={}", tmp.text("link"));
    for more in [&[][..], &["--disk", &disk], &["--disk", &link]] {
        let stderr = fail(1, &[&new[..], more].concat());
        assert!(stderr.contains(&format!("guest {ID} may be running at tcp:b:1")), "{stderr}");
        assert!(stderr.contains("its clone must not use its disk \"disk0\""), "{stderr}");
        assert!(stderr.contains("--disk path=COPY,id=disk0"), "{stderr}");
    }
    let copy = format!("path={}", tmp.text("copy"));
    let clone = restore(&tmp, "clone", &store, &["--new-id", "--disk", &copy]);
    assert_ne!(clone.info().unwrap()["vm_id"], ID);
}

/// Writes a record of a hand-over of `vm` that is in doubt.
fn pending(tmp: &TestDir, vm: &str) {
    let token = "bbbbbbbb-0000-4000-8000-000000000002";
    let record = json!({
        "version": 1,
        "token": token,
        "vm_id": vm,
        "peer": "tcp:b:1",
        "site": token,
        "time_unix_ms": 1,
    });
    std::fs::create_dir_all(tmp.path("state")).unwrap();
    let path = tmp.path("state").join(format!("{token}.source.json"));
    std::fs::write(path, record.to_string()).unwrap();
}

#[test]
fn an_id_and_a_name_are_checked() {
    let run = |more: &[&str]| fail(2, &[&["run"], &THREADS[..], more].concat());
    assert!(run(&["--id", "a"]).contains("is not a UUID"));
    assert!(run(&["--name", "a b"]).contains("is not a valid name of a guest"));
    assert!(run(&["--name", &"a".repeat(65)]).contains("1 to 64 of the characters"));
    assert!(fail(2, &["restore", "--store", "s", "--same-id", "--new-id"]).contains("--new-id"));
}

#[test]
fn logs_and_metrics_name_their_guest() {
    let tmp = TestDir::new();
    let vmm = run(&tmp, "a", &["--id", ID, "--name", "web-1", "-v"]);
    wait_for("the log", || vmm.stderr().contains("the guest runs").then_some(()));
    let stderr = vmm.stderr();
    assert!(stderr.contains(ID) && stderr.contains("web-1"), "{stderr}");
    let labels = format!("{{vm_id=\"{ID}\",name=\"web-1\",state=\"running\"}} 1");
    let socket = vmm.socket();
    assert!(request(&socket, "GET", "/metrics", "").contains(&labels));
}

/// Returns the guest's identity from the line of the JSON log which says that the guest runs.
fn logged_guest(vmm: &Vmm<'_>) -> Value {
    wait_for("the log", || {
        let stderr = vmm.stderr();
        let mut lines = stderr.lines().filter_map(|l| serde_json::from_str::<Value>(l).ok());
        let line = lines.find(|line| line["fields"]["message"] == "the guest runs")?;
        Some(line["spans"][0].clone())
    })
}

#[test]
fn logs_and_metrics_show_the_lineage() {
    let tmp = TestDir::new();
    let (store, json_log) = (tmp.text("store"), ["-v", "--log-format", "json"]);
    let parent = run(&tmp, "parent", &[&["--id", ID], &json_log[..]].concat());
    parent.tell(&["checkpoint", "--store", &store]);
    let guest = logged_guest(&parent);
    assert_eq!(guest["vm_id"], ID);
    assert!(guest.get("vm_parent").is_none(), "{guest}");
    assert!(guest.get("vm_parent_checkpoint").is_none(), "{guest}");
    let metrics = request(&parent.socket(), "GET", "/metrics", "");
    assert!(metrics.contains("driftline_guest_info{") && !metrics.contains("parent="), "{metrics}");
    let clone = restore(&tmp, "clone", &store, &[&["--name", "two"], &json_log[..]].concat());
    let guest = logged_guest(&clone);
    let id = clone.info().unwrap()["vm_id"].as_str().unwrap().to_owned();
    assert!(guest["vm_id"] == json!(id) && guest["vm_name"] == "two", "{guest}");
    assert_eq!(guest["vm_parent"], ID, "{guest}");
    assert_eq!(guest["vm_parent_checkpoint"], 1, "{guest}");
    let whose = format!("driftline_guest_info{{vm_id=\"{id}\",name=\"two\",");
    let lineage = format!(",parent=\"{ID}\",checkpoint=\"1\"}} 1");
    let metrics = request(&clone.socket(), "GET", "/metrics", "");
    let is_lineage = |line: &str| line.starts_with(&whose) && line.ends_with(&lineage);
    assert!(metrics.lines().any(is_lineage), "{metrics}");
}

/// Threads of jobs and of the API also log the guest's identity.
#[test]
fn every_thread_logs_its_guest() {
    let tmp = TestDir::new();
    let log = [
        "--log-format",
        "json",
        "--log",
        "driftline=info,driftline_machine=trace,driftline_control=trace,\
         driftline_migrate=trace,driftline_checkpoint=trace,driftline_store=trace,\
         driftline_guest=trace",
    ];
    let more = [&["--id", ID, "--name", "web-1"], &log[..]].concat();
    let mut vmm = run(&tmp, "a", &more);
    vmm.tell(&["checkpoint", "--store", &tmp.text("store")]);
    vmm.refuse(4, &["send-migration", "tcp:127.0.0.1:1"]);
    vmm.tell(&["top", "--once", "--interval", "100ms"]);
    let (mut there, to) = receiver(&tmp, "there", &[]);
    vmm.tell(&["send-migration", &to, "--connections", "2"]);
    assert_eq!(vmm.wait(), Some(0));
    there.kill();
    let stderr = vmm.stderr();
    let lines: Vec<Value> = stderr.lines().map(|l| serde_json::from_str(l).unwrap()).collect();
    let runs = |line: &Value| line["fields"]["message"] == "the guest runs";
    let from = lines.iter().position(runs).unwrap();
    // Messages for the operator are not events of a thread.
    let events = || lines[from..].iter().filter(|line| line["target"] != "driftline");
    for line in events() {
        let span = &line["spans"][0];
        assert!(span["vm_id"] == ID && span["vm_name"] == "web-1", "{line}");
        let of_guests = line["spans"].as_array().unwrap().iter().filter(|s| s["name"] == "guest");
        assert_eq!(of_guests.count(), 1, "{line}");
    }
    let of = |target: &str| events().any(|l| l["target"].as_str().unwrap().starts_with(target));
    assert!(of("driftline_migrate::source"), "{stderr}");
}
