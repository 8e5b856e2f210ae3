//! Upgrades seen from between their two processes: what the next process is when it gets the guest,
//! and what it gets if it offers fewer features.

use std::fs::{self, File};
use std::sync::Arc;

use crate::common::latest_process::{LatestProcess, is_running};
use crate::common::proxied_upgrade::ProxiedUpgrade;
use crate::common::upgrade_proxy::{StepAction, Then, UpgradeStep};
use crate::common::{
    TestDir, Vmm, driftline, has_landlock, side_by_side, status_field, text, thread_statuses,
};
use driftline_machine::testing::kvm_or_skip;
use parking_lot::Mutex;

/// The features of `migrate/PROTOCOL.md` by which a hand-over differs.
const EARLY_STATE: u64 = 32;
const WHOLE_STATE: u64 = 64;
const LOCAL: u64 = 128;
const DEVICE_FILES: u64 = 256;
const STATE_HEADS: u64 = 512;
/// Those without which the state comes later or in other messages, and those of other migrations.
const OPTIONAL: u64 = 1 | 2 | 4 | 8 | 16 | EARLY_STATE | WHOLE_STATE | STATE_HEADS;

/// A guest whose process can be replaced. Its writes are checked, and it has a disk.
fn guest(tmp: &TestDir) -> Vmm<'_> {
    File::create(tmp.path("disk")).unwrap().set_len(1 << 20).unwrap();
    let disk = format!("path={}", tmp.text("disk"));
    let machine = ["--backend", "kvm", "--mem", "64M", "--vcpus", "2", "--disk", &disk];
    let payload = ["--guest", "payload,ws=2M,rate=8M,burst=8,report=200"];
    Vmm::run(tmp, "first", &[&machine[..], &["--memory-backing", "memfd"], &payload].concat())
}

/// Upgrades to a process that offers all features but `hidden`. Returns the API's answer and the
/// names of the messages to the next process. The guest must go on, in the process that the answer
/// tells.
fn upgrade_without(hidden: u64) -> (String, Vec<&'static str>) {
    let tmp = TestDir::new();
    let vmm = guest(&tmp);
    let upgraded = ProxiedUpgrade::make(&tmp, &vmm, hidden, |_| None);
    let latest = LatestProcess::of(&vmm);
    let is_replaced = upgraded.answer.starts_with("HTTP/1.1 200");
    assert_eq!(latest.pid() == upgraded.next.0.id(), is_replaced, "{}", upgraded.answer);
    vmm.await_progress(2, &vmm.reports());
    let names = upgraded.proxy.steps().iter().filter(|s| s.to_next).map(|s| s.name).collect();
    (upgraded.answer, names)
}

#[test]
fn features_of_the_next_process_decide() {
    if !kvm_or_skip("features_of_the_next_process_decide") {
        return;
    }
    let last = |names: &[&str], name: &str| names.iter().rposition(|n| *n == name);
    let (answer, all) = upgrade_without(0);
    assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
    for name in ["FILES", "STATE_HEADS", "STATE_WHOLE"] {
        assert!(last(&all, name).is_some(), "{name}: {all:?}");
    }
    assert!(last(&all, "STATE") < last(&all, "PASS_BEGIN"), "{all:?}");
    // An earlier version, which cannot read the messages that have been added since. It opens the
    // disk itself.
    let (answer, few) = upgrade_without(OPTIONAL | DEVICE_FILES);
    assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
    for name in ["FILES", "STATE_HEADS", "STATE_WHOLE"] {
        assert_eq!(last(&few, name), None, "{name}: {few:?}");
    }
    assert!(last(&few, "STATE") > last(&few, "PASS_BEGIN"), "{few:?}");
}

#[test]
fn next_process_without_hand_overs_is_refused() {
    if !kvm_or_skip("next_process_without_hand_overs_is_refused") {
        return;
    }
    let (answer, names) = upgrade_without(LOCAL);
    let why = "does not offer a hand-over on one host";
    assert!(answer.starts_with("HTTP/1.1 400") && answer.contains(why), "{answer}");
    assert!(!names.contains(&"MEMORY"), "{names:?}");
}

/// Upgrades a guest to a later version of the program, and then to this one, which refuses its
/// state with the words `why`.
fn refuses_before_the_pause(change: &str, why: &str) {
    let tmp = TestDir::new();
    let vmm = guest(&tmp);
    let mut later = driftline(&["upgrade", "--api-sock", &vmm.socket()]);
    let later = later.env("DRIFTLINE_TEST_LATER_STATE", change).output().unwrap();
    assert!(later.status.success(), "{}", text(&later.stderr));
    let latest = LatestProcess::of(&vmm);
    let before = latest.pid();
    let upgraded = ProxiedUpgrade::make(&tmp, &vmm, 0, |_| None);
    assert!(upgraded.answer.contains(why), "{}", upgraded.answer);
    assert_eq!(latest.pid(), before);
    vmm.await_progress(2, &vmm.reports());
    let steps = upgraded.proxy.steps();
    let sent: Vec<_> = steps.iter().filter(|step| step.to_next).map(|step| step.name).collect();
    let heads = sent.iter().position(|name| *name == "STATE_HEADS").expect("the heads are sent");
    // The first pass may begin before the refusal arrives. A guest that is paused has its state
    // sent at once (STATE), and then a second pass.
    let pass = ["PASS_BEGIN", "PASS_END"];
    assert!(pass.starts_with(&sent[heads + 1..]), "{change}: {sent:?}");
}

#[test]
fn later_state_is_refused_before_the_pause() {
    if !kvm_or_skip("later_state_is_refused_before_the_pause") {
        return;
    }
    let cases = [
        // A section that this version does not know.
        ("must", "unknown section 32752, \\\"later state\\\" (instance 0)"),
        // A later version of a section.
        ("serial", "serial port (instance 0) cannot be used on this host: it has version 2"),
    ];
    side_by_side(cases, |(change, why)| refuses_before_the_pause(change, why));
}

/// What a process had when it was about to get the guest's memory.
struct ProcessBefore {
    threads: Vec<String>,
    maps: String,
    log: String,
}

#[test]
fn sandbox_is_on_before_memory_arrives() {
    if !kvm_or_skip("sandbox_is_on_before_memory_arrives") {
        return;
    }
    let tmp = TestDir::new();
    let vmm = guest(&tmp);
    let seen = Arc::new(Mutex::new(None));
    let upgraded = ProxiedUpgrade::make(&tmp, &vmm, 0, |next| {
        let seen = seen.clone();
        // The next process writes to the log of the one that offers its guest.
        let log = tmp.path("first.err");
        let act = Box::new(move || {
            let maps = fs::read_to_string(format!("/proc/{next}/maps")).unwrap();
            let log = fs::read_to_string(log).unwrap();
            *seen.lock() = Some(ProcessBefore { threads: thread_statuses(next), maps, log });
        });
        // The first message that has something of the guest.
        let at = UpgradeStep { to_next: true, name: "MEMORY", nth: 0 };
        Some(StepAction { at, act, then: Then::Pass })
    });
    let _latest = LatestProcess::of(&vmm);
    assert!(upgraded.answer.starts_with("HTTP/1.1 200"), "{}", upgraded.answer);
    let before = seen.lock().take().expect("MEMORY came");
    for thread in &before.threads {
        let filters = status_field(thread, "Seccomp_filters:").and_then(|n| n.parse::<u32>().ok());
        assert!(filters.is_some_and(|n| n > 0), "no filter: {thread}");
    }
    // Other processes cannot see a landlock domain. Older kernels enforce a part.
    let is_enforced = before.log.contains("landlock: FullyEnforced")
        || before.log.contains("landlock: PartiallyEnforced");
    assert_eq!(is_enforced, has_landlock(), "{}", before.log);
    assert!(!before.maps.contains("memfd:"), "the guest's memory was there: {}", before.maps);
    assert!(is_running(upgraded.next.0.id()));
}
