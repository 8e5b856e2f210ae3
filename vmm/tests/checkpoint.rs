//! Checkpoints from the command line, on the threads backend: taken, killed, restored, and refused.
#![allow(clippy::unwrap_used)]

mod common;

use common::{Place, Vmm, fail, succeed, wait_for};
use serde_json::Value;

const GUEST: &[&str] = &[
    "--backend",
    "threads",
    "--mem",
    "64M",
    "--vcpus",
    "2",
    "--guest",
    "payload,ws=16M,pattern=random",
];

fn lines(json: &str) -> Vec<Value> {
    json.lines().map(|l| serde_json::from_str(l).unwrap()).collect()
}

#[test]
fn a_killed_guest_is_restored_and_runs_on_without_errors() {
    let place = Place::new();
    let store = place.text("store");
    let mut first = Vmm::run(&place, "first", GUEST);
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
    assert_eq!((&achieved["epochs"], &achieved["failed"]), (&10.into(), &0.into()), "{json}");
    for what in ["pause", "interval", "write"] {
        let [p50, p99, max] = ["p50_us", "p99_us", "max_us"].map(|p| achieved[what][p].as_u64());
        assert!(Some(0) < p50 && p50 <= p99 && p99 <= max, "{json}");
    }
    for (i, e) in epochs.iter().enumerate() {
        assert_eq!((&e["epoch"], &e["durable"]), (&(i + 1).into(), &true.into()));
        assert!(e["pause_us"].as_u64().unwrap() > 0 && e["write_ms"].as_f64().unwrap() > 0.0);
        assert!(e["frames"].as_u64().unwrap() > 0 && e["written_bytes"].as_u64().unwrap() > 4096);
    }
    first.kill();

    let listing: Value =
        serde_json::from_str(&succeed(&["store", "ls", "--json", &store])).unwrap();
    assert_eq!(listing["epochs"].as_array().unwrap().len(), 10);
    assert!(succeed(&["store", "ls", &store]).contains("full"));
    let sound = succeed(&["store", "verify", &store]);
    assert!(sound.starts_with("10 epochs are sound"), "{sound}");

    let mut second = Vmm::start(&place, "second", &["restore", "--store", &store]);
    second.await_api();
    assert_eq!(second.info().unwrap()["vcpus"], 2);
    second.await_progress(2, &before);
    // A restored guest can be checkpointed into the same store.
    let json = second.tell(&["checkpoint", "--store", &store, "--json"]);
    assert_eq!(lines(&json)[0]["epoch"], 11);
    second.kill();

    let mut third = Vmm::start(&place, "third", &["restore", "--store", &store, "--epoch", "4"]);
    third.await_api();
    assert!(third.said().contains("runs on from epoch 4: 4 epochs"), "{}", third.said());
    third.await_progress(2, &before);
    third.tell(&["stop"]);
    assert_eq!(third.wait(), Some(0));
}

#[test]
fn a_second_run_is_refused_and_an_operators_pause_respected() {
    let place = Place::new();
    let store = place.text("store");
    let mut vmm = Vmm::run(&place, "a", GUEST);
    let follower = std::thread::spawn({
        let args = ["checkpoint", "--every", "10ms", "--count", "100000", "--json"];
        let args = args.map(str::to_owned).to_vec();
        let more = ["--store".to_owned(), store.clone(), "--api-sock".to_owned(), vmm.socket()];
        move || {
            let args: Vec<String> = args.into_iter().chain(more).collect();
            common::output(&args.iter().map(String::as_str).collect::<Vec<_>>())
        }
    });
    wait_for("the run to begin", || (vmm.info()?["checkpointing"] == true).then_some(()));
    let other = place.text("other");
    let said = vmm.refuse(4, &["checkpoint", "--store", &other]);
    assert!(said.contains("checkpoints are being taken already"), "{said}");
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
    let epochs = lines(&common::text(&followed.stdout));
    assert!(epochs.len() > 3, "{epochs:?}");
    assert_eq!(followed.status.code(), Some(1), "the guest has gone");
    succeed(&["store", "verify", &store]);
}

#[test]
fn damage_and_absence_are_sentences() {
    let place = Place::new();
    let store = place.text("store");
    let said = fail(1, &["restore", "--store", &place.text("nowhere")]);
    assert!(said.contains("opening the store"), "{said}");
    let mut vmm = Vmm::run(&place, "a", GUEST);
    vmm.tell(&["checkpoint", "--store", &store]);
    let said = vmm.refuse(2, &["checkpoint", "--store", &store, "--max-pause", "2ms"]);
    assert!(said.contains("--every"), "{said}");
    let said = vmm.refuse(2, &["checkpoint", "--store", &store, "--every", "soon"]);
    assert!(said.contains("a duration is digits and ms or s"), "{said}");
    vmm.tell(&["stop"]);
    vmm.wait();
    let said = fail(1, &["restore", "--store", &store, "--epoch", "7"]);
    assert!(said.contains("has no epoch 7"), "{said}");

    let file = std::fs::read_dir(&store).unwrap().map(|e| e.unwrap().path());
    let file = file.filter(|p| p.extension().is_some()).max_by_key(|p| p.metadata().unwrap().len());
    let file = file.unwrap();
    let mut bytes = std::fs::read(&file).unwrap();
    let middle = bytes.len() / 2;
    bytes[middle] ^= 1;
    std::fs::write(&file, bytes).unwrap();
    let name = file.file_name().unwrap().to_str().unwrap();
    for args in [["store", "verify", &store].as_slice(), &["restore", "--store", &store]] {
        let said = fail(1, args);
        assert!(said.contains(name) && said.contains(", byte "), "{said}");
    }
}
