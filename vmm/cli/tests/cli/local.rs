//! Hand-overs to another process of this host, from the command line: nothing is copied.

use crate::common::{TestDir, Vmm, fail, receiver, side_by_side, succeed, wait_for};
use driftline_machine::testing::{kvm_or_skip, most_together, share_kib};
use serde_json::Value;

const THREADS: &[&str] = &["--backend", "threads", "--mem", "64M", "--vcpus", "2"];
const KVM: &[&str] = &["--backend", "kvm", "--mem", "128M", "--vcpus", "2", "--prefault"];
const IN_FILES: &[&str] =
    &["--memory-backing", "memfd", "--guest", "payload,ws=16M,rate=32M,burst=32,report=200"];

/// Starts a process that waits for a guest at a unix socket. Returns it with its address.
fn local_receiver<'p>(tmp: &'p TestDir, name: &'static str, more: &[&str]) -> (Vmm<'p>, String) {
    let address = format!("unix:{}", tmp.text(&format!("{name}.in")));
    let vmm = Vmm::start(tmp, name, &[&["receive-migration", &address], more].concat());
    let line = format!("waiting for a migration on {address}\n");
    wait_for("the receiver to listen", || vmm.stderr().contains(&line).then_some(()));
    (vmm, address)
}

fn changes_hands_three_times(machine: &[&str], mem_bytes: u64) {
    let tmp = TestDir::new();
    let mut vmm = Vmm::run(&tmp, "first", &[machine, IN_FILES].concat());
    let id = vmm.info().unwrap()["vm_id"].clone();
    let mut before = vmm.await_progress(2, &[]);
    let own_kib = share_kib(vmm.pid()).unwrap();
    assert!(own_kib > 4 << 10, "{own_kib} KiB are less than the guest has written");
    for name in ["second", "third", "fourth"] {
        // The kind of memory is that of the guest, whatever the receiver's own.
        let (mut next, to) = local_receiver(&tmp, name, &[]);
        let (report, most_kib) = most_together([vmm.pid(), next.pid()], || {
            vmm.tell(&["send-migration", &to, "--local", "--json"])
        });
        let report: Value = serde_json::from_str(&report).unwrap();
        assert_eq!(report["status"], "completed", "{report}");
        assert_eq!(report["shared_memory_bytes"], mem_bytes, "{report}");
        assert_eq!((&report["normal_frames"], &report["zero_frames"]), (&0.into(), &0.into()));
        assert!(report["transferred_bytes"].as_u64().unwrap() < 256 << 10, "{report}");
        assert_eq!(vmm.wait(), Some(0), "{}", vmm.stderr());
        next.await_api();
        assert_eq!((&next.info().unwrap()["vm_id"], next.state()), (&id, "running".to_owned()));
        before = next.await_progress(2, &before);
        let most_kib = most_kib.expect("both processes were there");
        println!("{name}: {own_kib} KiB before, at most {most_kib} KiB together: {report}");
        assert!(most_kib < own_kib + (32 << 10), "{most_kib} KiB, and {own_kib} KiB before");
        vmm = next;
    }
    if machine.contains(&"none") {
        return;
    }
    // To a process that gets a copy, for which writes must be tracked.
    let (mut copy, to) = receiver(&tmp, "copy", &[]);
    vmm.tell(&["send-migration", &to]);
    assert_eq!(vmm.wait(), Some(0));
    copy.await_api();
    copy.await_progress(2, &before);
    copy.tell(&["stop"]);
    assert_eq!(copy.wait(), Some(0));
}

#[test]
fn guest_of_threads_changes_hands() {
    changes_hands_three_times(THREADS, 64 << 20);
}

#[test]
fn kvm_guest_changes_hands() {
    if kvm_or_skip("kvm_guest_changes_hands") {
        let modes = ["dirty-ring", "dirty-bitmap", "dirty-bitmap-manual", "userfault-wp", "none"];
        side_by_side(modes, |mode| {
            changes_hands_three_times(&[KVM, &["--tracking", mode]].concat(), 128 << 20);
        });
    }
}

#[test]
fn checkpoints_follow_a_hand_over() {
    let tmp = TestDir::new();
    let store = tmp.text("store");
    let mut vmm = Vmm::run(&tmp, "first", &[THREADS, IN_FILES].concat());
    // Checkpoints are under way at every hand-over.
    let begin = |vmm: &Vmm<'_>| {
        vmm.tell(&["checkpoint", "--store", &store, "--every", "1ms", "--detach"]);
    };
    begin(&vmm);
    for name in ["second", "third", "fourth"] {
        let (mut next, to) = local_receiver(&tmp, name, &[]);
        let table = vmm.tell(&["send-migration", &to, "--local"]);
        assert!(table.contains("64 MiB handed over as it is, nothing copied"), "{table}");
        assert_eq!(vmm.wait(), Some(0), "{}", vmm.stderr());
        next.await_api();
        next.await_progress(2, &[]);
        begin(&next);
        vmm = next;
    }
    vmm.tell(&["checkpoint", "--stop"]);
    vmm.tell(&["stop"]);
    assert_eq!(vmm.wait(), Some(0));
    succeed(&["store", "verify", &store]);
    // The guest checks its memory.
    let mut restored = Vmm::start(&tmp, "restored", &["restore", "--store", &store]);
    restored.await_api();
    restored.await_progress(2, &[]);
}

#[test]
fn guest_that_cannot_change_hands_is_refused() {
    let tmp = TestDir::new();
    let private = ["--guest", "payload,ws=4M,rate=1M,burst=8,report=200"];
    let vmm = Vmm::run(&tmp, "first", &[THREADS, &private].concat());
    let (mut next, to) = local_receiver(&tmp, "second", &[]);
    let said = vmm.refuse(4, &["send-migration", &to, "--local"]);
    assert!(said.contains("start the guest with --memory-backing memfd"), "{said}");
    let said = vmm.refuse(4, &["send-migration", "tcp:127.0.0.1:1", "--local"]);
    assert!(said.contains("give the unix:PATH of a receiver here"), "{said}");
    for more in [["--tls-dir", "/none"], ["--compress", "lz4"], ["--connections", "2"]] {
        let said = fail(2, &[&["send-migration", &to, "--local"], &more[..]].concat());
        assert!(said.contains("--local") && said.contains(more[0]), "{said}");
    }
    assert_eq!((vmm.state(), next.is_alive()), ("running".to_owned(), true));
    // The receiver was not disturbed, and takes a copy.
    vmm.tell(&["send-migration", &to]);
    next.await_api();
    assert_eq!(next.state(), "running");
}
