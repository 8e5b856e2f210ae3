//! Checkpoints from the command line, on the threads backend: taken, restored after a kill, and
//! refused.

use crate::common::{TestDir, Vmm, driftline, fail, output, succeed, text, wait_for};
use serde_json::{Value, json};

const GUEST: &[&str] = &[
    "--backend",
    "threads",
    "--mem",
    "64M",
    "--vcpus",
    "2",
    "--guest",
    "payload,ws=16M,rate=64M,pattern=random,report=200",
];

/// Pages that each vCPU of the guest below writes, one after the other.
const SHARE: u64 = (16 << 8) / 2;
const SEQUENTIAL: &[&str] = &[
    "--backend",
    "threads",
    "--mem",
    "64M",
    "--vcpus",
    "2",
    "--guest",
    "payload,ws=16M,rate=64M,report=200",
];

fn lines(json: &str) -> Vec<Value> {
    json.lines().map(|l| serde_json::from_str(l).unwrap()).collect()
}

#[test]
fn killed_guest_is_restored_without_errors() {
    let tmp = TestDir::new();
    let store = tmp.text("store");
    let mut first = Vmm::run(&tmp, "first", GUEST);
    let before = first.await_progress(2, &[]);
    let json = first.tell(&[
        "checkpoint",
        "--store",
        &store,
        "--every",
        "20ms",
        "--count",
        "10",
        "--json",
    ]);
    let mut epochs = lines(&json);
    let achieved = epochs.pop().unwrap();
    assert_eq!(epochs.len(), 10, "{json}");
    let achieved = &achieved["achieved"];
    assert_eq!((&achieved["taken"], &achieved["failed"]), (&10.into(), &0.into()), "{json}");
    for what in ["pause", "interval", "write"] {
        let [p50, p99, max] = ["p50_us", "p99_us", "max_us"].map(|p| achieved[what][p].as_u64());
        assert!(Some(0) < p50 && p50 <= p99 && p99 <= max, "{json}");
    }
    for (i, e) in epochs.iter().enumerate() {
        assert_eq!((&e["checkpoint"], &e["durable"]), (&(i + 1).into(), &true.into()));
        assert!(e["pause_us"].as_u64().unwrap() > 0 && e["write_ms"].as_f64().unwrap() > 0.0);
        assert!(e["frames"].as_u64().unwrap() > 0 && e["written_bytes"].as_u64().unwrap() > 4096);
    }
    first.kill();

    let listing: Value =
        serde_json::from_str(&succeed(&["store", "ls", "--json", &store])).unwrap();
    assert_eq!(listing["checkpoints"].as_array().unwrap().len(), 10);
    assert!(succeed(&["store", "ls", &store]).contains("full"));
    let sound = succeed(&["store", "verify", &store]);
    let verdict = "10 of 10 checkpoints are sound; the latest sound one is 10\n";
    assert!(sound.ends_with(verdict), "{sound}");
    assert_eq!(succeed(&["store", "repair", &store]), verdict, "there is nothing to do");

    let mut second = Vmm::start(&tmp, "second", &["restore", "--same-id", "--store", &store]);
    second.await_api();
    assert_eq!(second.info().unwrap()["vcpus"], 2);
    second.await_progress(2, &before);
    // A restored guest can be checkpointed into the same store.
    let json = second.tell(&["checkpoint", "--store", &store, "--json"]);
    assert_eq!(lines(&json)[0]["checkpoint"], 11);
    second.kill();

    let mut third = Vmm::start(
        &tmp,
        "third",
        &["restore", "--same-id", "--store", &store, "--checkpoint", "4"],
    );
    third.await_api();
    let resumed = || third.stderr().contains("resumed from checkpoint 4 after ").then_some(());
    wait_for("the guest to be resumed", resumed);
    third.await_progress(2, &before);
    third.tell(&["stop"]);
    assert_eq!(third.wait(), Some(0));
}

#[test]
fn active_run_refuses_another_and_respects_pauses() {
    let tmp = TestDir::new();
    let store = tmp.text("store");
    let mut vmm = Vmm::run(&tmp, "a", GUEST);
    let follower = std::thread::spawn({
        let args = ["checkpoint", "--every", "10ms", "--count", "100000", "--json"];
        let args = args.map(str::to_owned).to_vec();
        let more = ["--store".to_owned(), store.clone(), "--api-sock".to_owned(), vmm.socket()];
        move || {
            let args: Vec<String> = args.into_iter().chain(more).collect();
            output(&args.iter().map(String::as_str).collect::<Vec<_>>())
        }
    });
    wait_for("the run to begin", || (vmm.info()?["checkpointing"] == true).then_some(()));
    let other = tmp.text("other");
    let stderr = vmm.refuse(4, &["checkpoint", "--store", &other]);
    assert!(stderr.contains("a checkpoint run (job 1, every 10 ms, into "), "{stderr}");
    assert!(stderr.contains("driftline checkpoint --stop --api-sock "), "{stderr}");
    for _ in 0..5 {
        vmm.tell(&["pause"]);
        assert_eq!(vmm.state(), "paused");
        std::thread::sleep(std::time::Duration::from_millis(30));
        assert_eq!(vmm.state(), "paused", "a checkpoint's end has resumed a paused guest");
        vmm.tell(&["resume"]);
        assert_eq!(vmm.state(), "running");
    }
    vmm.tell(&["stop"]);
    assert_eq!(vmm.wait(), Some(0));
    let followed = follower.join().unwrap();
    let epochs = lines(&text(&followed.stdout));
    assert!(epochs.len() > 3, "{epochs:?}");
    assert_eq!(followed.status.code(), Some(1), "the guest has ended");
    succeed(&["store", "verify", &store]);
}

#[test]
fn a_folder_without_a_manifest_is_no_store() {
    let tmp = TestDir::new();
    let dir = tmp.text("plain");
    std::fs::create_dir(&dir).unwrap();
    let expected = format!("driftline: {dir} is not a Driftline store (no manifest)\n");
    let file = tmp.text("file");
    for args in [
        &["store", "ls", &dir][..],
        &["store", "verify", &dir],
        &["store", "repair", &dir],
        &["store", "compact", &dir],
        &["store", "export", &dir, "--output", &file],
        &["restore", "--store", &dir],
    ] {
        assert_eq!(fail(1, args), expected, "{args:?}");
    }
    assert_eq!(std::fs::read_dir(&dir).unwrap().count(), 0, "nothing was made there");
    std::fs::write(&file, "").unwrap();
    let stderr = fail(1, &["store", "ls", &file]);
    assert!(stderr.contains("file is neither a store nor an archive (0 bytes)"), "{stderr}");
}

#[test]
fn damage_and_absence_are_explained() {
    let tmp = TestDir::new();
    let store = tmp.text("store");
    let stderr = fail(1, &["restore", "--store", &tmp.text("nowhere")]);
    assert!(stderr.contains("opening the store"), "{stderr}");
    let mut vmm = Vmm::run(&tmp, "a", GUEST);
    vmm.tell(&["checkpoint", "--store", &store]);
    let stderr = vmm.refuse(2, &["checkpoint", "--store", &store, "--max-pause", "2ms"]);
    assert!(stderr.contains("--every"), "{stderr}");
    let stderr = vmm.refuse(2, &["checkpoint", "--store", &store, "--every", "soon"]);
    assert!(stderr.contains("a duration is a number and ms, s, m, h or d"), "{stderr}");
    vmm.tell(&["stop"]);
    vmm.wait();
    let stderr = fail(1, &["restore", "--store", &store, "--checkpoint", "7"]);
    assert!(stderr.contains("has no checkpoint 7"), "{stderr}");

    // A byte of every frame, and the middle of the files that locate the frames.
    for name in ["pages-1", "log-1", "manifest"] {
        let file = tmp.path("store").join(name);
        let sound = std::fs::read(&file).unwrap();
        let mut bytes = sound.clone();
        match name {
            "pages-1" => bytes.iter_mut().skip(5000).step_by(4096).for_each(|byte| *byte ^= 1),
            _ => bytes[sound.len() / 2] ^= 1,
        }
        std::fs::write(&file, bytes).unwrap();
        let restore = ["restore", "--store", &store, "--lazy"];
        // Only a KVM guest can run before its memory is restored. The memory of this one is
        // restored first, whether requested or not.
        for args in [["store", "verify", &store].as_slice(), &restore[..3], &restore] {
            let stderr = fail(1, args);
            assert!(stderr.contains(name) && stderr.contains(", byte "), "{stderr}");
        }
        std::fs::write(&file, sound).unwrap();
    }
    succeed(&["store", "verify", &store]);

    // A missing manifest, which repair reconstructs.
    let manifest = tmp.path("store").join("manifest");
    std::fs::remove_file(&manifest).unwrap();
    let stderr = fail(1, &["restore", "--store", &store]);
    assert!(
        stderr.contains(&format!("rebuild it with: driftline store repair {store}")),
        "{stderr}"
    );
    let stderr = fail(1, &["store", "repair", "--dry-run", &store]);
    let verdict = "1 of 1 checkpoint is sound; the latest sound one is 1\n";
    assert!(stderr.ends_with(verdict) && !manifest.exists(), "{stderr}");
    let out = output(&["store", "verify", "--json", &store]);
    let survey: Value = serde_json::from_slice(&out.stdout).unwrap();
    assert_eq!((out.status.code(), &survey["sound"]), (Some(1), &1.into()), "{survey}");
    assert_eq!(succeed(&["store", "repair", &store]), verdict);
    assert!(succeed(&["store", "verify", &store]).ends_with(verdict));
}

#[test]
fn store_is_retained_compacted_and_exported() {
    let tmp = TestDir::new();
    let store = tmp.text("store");
    let mut vmm = Vmm::run(&tmp, "a", SEQUENTIAL);
    wait_for("every page to be written", || {
        let reports = vmm.reports();
        (reports.len() == 2 && reports.iter().all(|r| r.pages >= SHARE)).then_some(())
    });
    let stderr = vmm.refuse(2, &["checkpoint", "--store", &store, "--keep", "0"]);
    assert!(stderr.contains("--keep"), "{stderr}");
    let every =
        ["checkpoint", "--store", &store, "--every", "10ms", "--count", "12", "--keep", "3"];
    vmm.tell(&every);
    let epochs = || -> Vec<u64> {
        let listing: Value =
            serde_json::from_str(&succeed(&["store", "ls", "--json", &store])).unwrap();
        let epochs = listing["checkpoints"].as_array().unwrap();
        epochs.iter().filter_map(|e| e["checkpoint"].as_u64()).collect()
    };
    assert_eq!(epochs(), [10, 11, 12]);
    // Without `--keep` no checkpoint is dropped.
    vmm.tell(&["checkpoint", "--store", &store]);
    assert_eq!(epochs(), [10, 11, 12, 13]);
    vmm.tell(&["stop"]);
    vmm.wait();
    let compacted: Value =
        serde_json::from_str(&succeed(&["store", "compact", "--json", &store])).unwrap();
    assert_eq!(compacted["retained"], 4);
    assert!(compacted["after_bytes"].as_u64() < compacted["before_bytes"].as_u64(), "{compacted}");
    assert_eq!(epochs(), [10, 11, 12, 13]);
    let stderr = fail(1, &["store", "compact", &tmp.text("nowhere")]);
    assert!(stderr.contains("opening the store") && !tmp.path("nowhere").exists(), "{stderr}");

    let (file, path) = (tmp.text("memory"), tmp.path("memory"));
    let export =
        ["store", "export", &store, "--format", "raw", "--checkpoint", "11", "--output", &file];
    let exported: Value =
        serde_json::from_str(&succeed(&[&export[..], &["--json"]].concat())).unwrap();
    assert_eq!((&exported["checkpoint"], path.metadata().unwrap().len()), (&11.into(), 64 << 20));
    assert!(exported["frames"].as_u64() >= Some(2 * SHARE), "{exported}");
    let stderr = fail(1, &export);
    assert!(stderr.contains("it exists; --force overwrites it"), "{stderr}");
    succeed(&[&export[..], &["--force"]].concat());
    let (nowhere, dir) = (tmp.text("no/file"), tmp.text("store"));
    let to = |file| fail(1, &["store", "export", &store, "--output", file]);
    let stderr = to(&nowhere);
    assert!(stderr.contains(&format!("cannot write {nowhere}: the directory ")), "{stderr}");
    let stderr = to(&dir);
    assert!(stderr.contains(&format!("cannot write {dir}: is a directory")), "{stderr}");
    let stderr =
        fail(1, &["store", "export", &store, "--checkpoint", "2", "--output", &tmp.text("no")]);
    assert!(stderr.contains("has no checkpoint 2") && !tmp.path("no").exists(), "{stderr}");
}

#[test]
fn a_run_ends_with_its_client_unless_detached() {
    let tmp = TestDir::new();
    let store = tmp.text("store");
    let vmm = Vmm::run(&tmp, "a", GUEST);
    let socket = vmm.socket();
    let run = ["checkpoint", "--api-sock", &socket, "--store", &store, "--every", "20ms"];
    let mut client = driftline(&run).stdout(std::process::Stdio::null()).spawn().unwrap();
    let active = || vmm.info().unwrap()["checkpointing"] == true;
    let status = || -> Value {
        serde_json::from_str(&vmm.tell(&["checkpoint", "--status", "--json"])).unwrap()
    };
    wait_for("checkpoints", || active().then(status).filter(|s| s["last"]["stored"].is_object()));
    let row = |command: &[&str], name: &str| {
        let table = vmm.tell(command);
        let row = table.lines().find_map(|line| line.strip_prefix(name)).map(str::trim_start);
        row.unwrap_or_else(|| panic!("no {name} in {table}")).to_owned()
    };
    let every = format!("every 20 ms into {store}");
    assert_eq!(row(&["info"], "checkpointing "), every);
    client.kill().unwrap();
    client.wait().unwrap();
    wait_for("the end of the run", || (!active()).then_some(()));
    assert_eq!(row(&["info"], "checkpointing "), format!("no; the last run: {every}"));
    let info = vmm.info().unwrap();
    assert_eq!((&info["store"], &info["every_ms"]), (&json!(store), &json!(20)));
    let over = status();
    assert_eq!((&over["running"], &over["every_ms"]), (&false.into(), &20.into()));
    vmm.refuse(1, &["checkpoint", "--stop"]);
    vmm.tell(&["checkpoint", "--store", &store, "--every", "20ms", "--keep", "3", "--detach"]);
    let before = status();
    assert_eq!((&before["attached"], &before["keep"]), (&false.into(), &3.into()));
    wait_for("more checkpoints", || {
        (status()["achieved"]["taken"].as_u64() > Some(3)).then_some(())
    });
    let shown = status();
    assert_eq!(shown["store"], json!(store));
    let median = shown["achieved"]["interval"]["p50_us"].as_u64().unwrap();
    assert!(median > 0, "{shown}");
    let row_of_status = |name: &str| row(&["checkpoint", "--status"], name);
    assert_eq!(row_of_status("state "), "active, detached");
    assert_eq!(
        (row_of_status("store "), row_of_status("interval ")),
        (store.clone(), "20 ms".to_owned())
    );
    let achieved = row_of_status("achieved ");
    let median: f64 = achieved.split_once(" ms p50, ").unwrap().0.parse().unwrap();
    assert!(median > 0.0, "{achieved}");
    vmm.tell(&["checkpoint", "--stop"]);
    assert!(!active());
    vmm.tell(&["checkpoint", "--store", &store]);
    let one = format!("no; the last run: one checkpoint into {store}");
    assert_eq!(row(&["info"], "checkpointing "), one);
}
