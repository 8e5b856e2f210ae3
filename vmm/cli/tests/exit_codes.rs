//! The exit codes, all in one table, and the object that `--json` prints for each failure.
#![allow(clippy::unwrap_used)]

mod common;

use common::{Place, Vmm, output, text};
use driftline_machine::testing::kvm_or_skip;
use serde_json::Value;

const THREADS: &[&str] =
    &["run", "--serial", "null", "--backend", "threads", "--guest", "payload,ws=1M,passes=1"];
const KVM: &[&str] = &["run", "--serial", "null", "--guest", "payload,ws=1M"];

/// The exit code of a command, what it printed, and what it said.
fn ended(args: &[&str]) -> (Option<i32>, String, String) {
    let out = output(args);
    (out.status.code(), text(&out.stdout), text(&out.stderr))
}

#[test]
fn exit_codes_follow_the_table() {
    let place = Place::new();
    let (state, store, none) = (place.text("state"), place.text("store"), place.text("none"));
    let mut vmm = Vmm::run(
        &place,
        "a",
        &["--backend", "threads", "--mem", "64M", "--guest", "payload,ws=1M"],
    );
    vmm.tell(&["checkpoint", "--store", &store]);
    let socket = vmm.socket();
    let here = ["--state-dir", &state];
    let restore: &[&str] = &["restore", "--serial", "null", "--store", &store];
    let (no_disk, no_tap) = (format!("path={none},id=foo"), "tap=dlnone,id=foo");
    let no_vsock = format!("uds={none}");
    let cases: &[(i32, &[&str], &[&str])] = &[
        (0, &["--version"], &[]),
        (0, THREADS, &["--mem", "64M"]),
        (0, &["doctor"], &[]),
        (0, &["info", "--api-sock", &socket], &[]),
        (1, &["info", "--api-sock", &none], &[]),
        (1, restore, &["--epoch", "99"]),
        (1, THREADS, &["--mem", "64M", "--log-file", "/nonexistent/log"]),
        (1, &["run", "--backend", "threads", "--guest", "payload,ws=2G", "--mem", "1G"], &[]),
        (2, &["run"], &[]),
        (2, &["info", "--api-sock", &socket, "--log", "a=b=c"], &[]),
        (2, KVM, &["--disk", "path=/dev/null,copy"]),
        (2, KVM, &["--disk", "path=/dev/null,identity=any"]),
        (2, KVM, &["--shadow", "compare", "--tracking", "none"]),
        (2, restore, &["--disk", &no_disk]),
        (2, restore, &["--net", no_tap]),
        (2, restore, &["--vsock", &no_vsock]),
        (3, THREADS, &["--mem", "16384G"]),
        (3, THREADS, &["--mem", "15000G", "--hugepages", "hugetlbfs"]),
        (4, &["checkpoint", "--api-sock", &socket, "--store", "/proc/none"], &[]),
        (4, &["send-migration", "tcp:127.0.0.1:1", "--api-sock", &socket], &[]),
    ];
    for (code, args, more) in cases {
        let hosted = matches!(args[0], "run" | "restore");
        let here: &[&str] = if hosted && args.len() > 1 { &here } else { &[] };
        let args = [*args, *more, here].concat();
        let (ended, _, said) = ended(&args);
        assert_eq!(ended, Some(*code), "{args:?}: {said}");
    }
    assert_eq!(vmm.state(), "running", "after all that");
    vmm.tell(&["stop"]);
    assert_eq!(vmm.wait(), Some(0));
}

#[test]
fn kvm_guests_end_with_the_same_codes() {
    if !kvm_or_skip("kvm_guests_end_with_the_same_codes") {
        return;
    }
    let place = Place::new();
    let here = ["--state-dir", &place.text("state")];
    let cases: &[(i32, &[&str])] = &[
        (0, &["doctor", "--check"]),
        (0, &["run", "--serial", "null", "--mem", "64M", "--guest", "payload,ws=1M,passes=1"]),
        // The payload says that it cannot go on, and why, on its console.
        (
            1,
            &[KVM, &["--mem", "64M", "--cpu", "host,-kvmclock,-kvmclock2,-kvmclock_stable"]]
                .concat(),
        ),
        (1, &["run", "--serial", "null", "--mem", "1G", "--guest", "payload,ws=2G"]),
        (3, &[KVM, &["--mem", "64M", "--net", "tap=dlnone"]].concat()),
        (3, &[KVM, &["--mem", "16384G"]].concat()),
        (3, &[KVM, &["--mem", "15000G", "--hugepages", "hugetlbfs"]].concat()),
    ];
    for (code, args) in cases {
        let here: &[&str] = if args[0] == "run" { &here } else { &[] };
        let args = [*args, here].concat();
        let (ended, _, said) = ended(&args);
        assert_eq!(ended, Some(*code), "{args:?}: {said}");
    }
}

/// What is damaged is listed in the same object that has the error.
#[test]
fn a_damaged_store_is_one_object_on_stdout() {
    let place = Place::new();
    let store = place.text("store");
    let vmm = Vmm::run(
        &place,
        "a",
        &["--backend", "threads", "--mem", "64M", "--guest", "payload,ws=1M"],
    );
    vmm.tell(&["checkpoint", "--store", &store]);
    drop(vmm);
    let part = |prefix: &str| {
        let mut names = std::fs::read_dir(&store).unwrap().map(|e| e.unwrap().path());
        names.find(|p| p.file_name().unwrap().to_str().unwrap().starts_with(prefix)).unwrap()
    };
    for damaged in ["pages-", "log-", "manifest"] {
        let path = part(damaged);
        let sound = std::fs::read(&path).unwrap();
        std::fs::write(&path, sound.iter().map(|byte| !byte).collect::<Vec<u8>>()).unwrap();
        let commands: &[&[&str]] = &[
            &["ls"],
            &["verify"],
            &["repair", "--dry-run"],
            &["compact"],
            &["export", "--output", &place.text("out")],
        ];
        for args in commands {
            let args = [&["store"], *args, &["--json", &store]].concat();
            let (code, printed, said) = ended(&args);
            let object: Value = serde_json::from_str(&printed)
                .unwrap_or_else(|e| panic!("{damaged}: {args:?}: {e}: {printed}{said}"));
            let message = object["error"]["message"].as_str().unwrap_or_default();
            assert_eq!(code == Some(0), message.is_empty(), "{damaged}: {args:?}: {printed}");
            assert!(said.contains(message), "{damaged}: {args:?}: {printed}: {said}");
        }
        std::fs::write(&path, sound).unwrap();
    }
}

#[test]
fn json_failures_are_one_object_on_stdout() {
    let place = Place::new();
    let (none, store) = (place.text("none"), place.text("empty"));
    let cases: &[(i32, &str, &[&str])] = &[
        (1, "no-vmm", &["info", "--json", "--api-sock", &none]),
        (1, "no-vmm", &["plan", "--json", "--api-sock", &none]),
        (1, "no-vmm", &["top", "--once", "--json", "--api-sock", &none]),
        (1, "no-vmm", &["balloon", "--json", "--api-sock", &none]),
        (1, "no-vmm", &["checkpoint", "--json", "--api-sock", &none, "--store", &store]),
        (2, "usage", &["info", "--json"]),
        (2, "usage", &["doctor", "--json", "--log", "a=b=c"]),
        (2, "usage", &["compare", "--json", "--interval", "1s", "--duration", "1s"]),
        (1, "failed", &["store", "verify", "--json", &none]),
    ];
    for (code, word, args) in cases {
        let (ended, printed, said) = ended(args);
        assert_eq!(ended, Some(*code), "{args:?}: {said}");
        let object: Value =
            serde_json::from_str(&printed).unwrap_or_else(|e| panic!("{args:?}: {e}: {printed}"));
        assert_eq!(object["error"]["code"], *word, "{args:?}: {printed}");
        let message = object["error"]["message"].as_str().unwrap();
        assert!(!message.is_empty() && said.contains(message), "{args:?}: {message}: {said}");
    }
}
