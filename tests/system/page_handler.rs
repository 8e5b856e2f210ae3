//! Guests whose memory a page handler serves: another process, which gets their faults. The guest
//! is the payload, which checks its memory.

use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use driftline_images::{PAYLOAD_ELF, PayloadSpec};
use driftline_machine::testing::{kvm_or_skip, skip};
use rustix::fs::{SeekFrom, seek};
use serde_json::{Value, json};
use tests::{Driftline, HandlerProcess, SOON, ScratchDir, ServingProcess, repeats, run_cli};

const PROGRAM: &str = env!("CARGO_BIN_EXE_page_handler");
const MIB: u64 = 1 << 20;
const VCPUS: u32 = 2;

/// A snapshot of a payload guest, with the files of its tests.
struct PayloadSnapshot {
    scratch: ScratchDir,
}

impl PayloadSnapshot {
    /// Returns `None` if there is no KVM.
    fn or_skip(test: &str) -> Option<Self> {
        if !kvm_or_skip(test) {
            return None;
        }
        let scratch = ScratchDir::new();
        let guest = ServingProcess::start(&scratch, "first");
        fs::write(scratch.path("kernel"), PAYLOAD_ELF).expect("a file");
        let spec: PayloadSpec =
            "payload,ws=1M,rate=40M,pattern=seq,report=100".parse().expect("a payload");
        let source = json!({ "kernel_image_path": scratch.path("kernel"),
            "boot_args": spec.cmdline(VCPUS) });
        guest.done("PUT", "/boot-source", &source);
        let machine = json!({ "vcpu_count": VCPUS, "mem_size_mib": 32 });
        guest.done("PUT", "/machine-config", &machine);
        guest.done("PUT", "/actions", &json!({ "action_type": "InstanceStart" }));
        guest.console().wait_pass(VCPUS, SOON);
        guest.pause();
        let snapshot = Self { scratch };
        snapshot.create(&guest, "Full", "state", "memory");
        Some(snapshot)
    }

    fn path(&self, name: &str) -> PathBuf {
        self.scratch.path(name)
    }

    fn create(&self, guest: &ServingProcess, kind: &str, state: &str, memory: &str) {
        guest.done("PUT", "/snapshot/create", &self.create_body(kind, state, memory));
    }

    fn create_body(&self, kind: &str, state: &str, memory: &str) -> Value {
        json!({ "snapshot_type": kind, "snapshot_path": self.path(state),
            "mem_file_path": self.path(memory) })
    }

    fn handler(&self, name: &str, args: &[&str]) -> HandlerProcess {
        HandlerProcess::start(PROGRAM, &self.scratch, name, &self.path("memory"), args)
    }

    fn load_body(&self, handler: &HandlerProcess, resume: bool) -> Value {
        json!({ "snapshot_path": self.path("state"), "resume_vm": resume,
            "track_dirty_pages": true,
            "mem_backend": { "backend_path": handler.socket(), "backend_type": "Uffd" } })
    }

    /// Loads a guest whose memory `handler` serves.
    fn load(&self, name: &str, handler: &HandlerProcess, resume: bool) -> ServingProcess {
        let guest = ServingProcess::start(&self.scratch, name);
        guest.done("PUT", "/snapshot/load", &self.load_body(handler, resume));
        guest
    }

    /// Loads a guest from files, and checks that its memory is right.
    fn check(&self, name: &str, state: &str, memory: &str) {
        let guest = ServingProcess::start(&self.scratch, name);
        let body = json!({ "snapshot_path": self.path(state), "resume_vm": true,
            "mem_backend": { "backend_path": self.path(memory), "backend_type": "File" } });
        guest.done("PUT", "/snapshot/load", &body);
        guest.console().wait_pass(VCPUS, SOON);
    }
}

/// Waits for the end of a process whose page handler has ended at `since`, and checks why it ended.
fn assert_ended(mut guest: ServingProcess, handler: &HandlerProcess, since: Instant) {
    assert_eq!(guest.wait_exit(SOON), 1);
    let took = since.elapsed();
    eprintln!("ended after {} ms", took.as_millis());
    // On the clock of the host: only the long form, on an idle host.
    assert!(repeats(0, 1) == 0 || took < Duration::from_secs(1), "ended after {took:?}");
    let log = guest.log();
    let why = format!("the page handler at {} has ended", handler.socket().display());
    assert!(log.contains(&format!("the guest crashed: its memory cannot be restored: {why}")));
    guest.console().assert_clean();
}

#[test]
fn guest_runs_on_the_handlers_pages() {
    let Some(snapshot) = PayloadSnapshot::or_skip("guest_runs_on_the_handlers_pages") else {
        return;
    };
    let before = fs::read(snapshot.path("memory")).expect("a memory file");
    let handler = snapshot.handler("second", &[]);
    let mut guest = snapshot.load("second", &handler, true);
    guest.console().wait_pass(VCPUS, SOON);
    let counts = handler.counts();
    assert!(counts.copied >= MIB / 4096 && counts.copied < 32 * MIB / 4096, "{counts:?}");
    guest.pause();
    guest.resume();
    guest.console().wait_reports(VCPUS, 2, SOON);
    guest.must_live();
    assert_eq!(fs::read(snapshot.path("memory")).expect("a memory file"), before);
}

#[test]
fn handlers_death_ends_a_guest_that_waits() {
    let Some(snapshot) = PayloadSnapshot::or_skip("handlers_death_ends_a_guest_that_waits") else {
        return;
    };
    // A load needs some pages, and the guest's first pass many more.
    let mut handler = snapshot.handler("second", &["--exit-after", "100"]);
    let guest = snapshot.load("second", &handler, false);
    // The process may end before it has answered.
    let _ = guest.ask("PATCH", "/vm", &json!({ "state": "Resumed" }));
    handler.wait_end();
    assert_ended(guest, &handler, Instant::now());
}

#[test]
fn handlers_death_ends_an_idle_guest() {
    let Some(snapshot) = PayloadSnapshot::or_skip("handlers_death_ends_an_idle_guest") else {
        return;
    };
    for (name, runs) in [("paused", false), ("running", true)] {
        let mut handler = snapshot.handler(name, &[]);
        let guest = snapshot.load(name, &handler, runs);
        if runs {
            guest.console().wait_pass(VCPUS, SOON);
        }
        let since = Instant::now();
        handler.kill();
        assert_ended(guest, &handler, since);
    }
}

#[test]
fn guest_with_all_pages_outlives_its_handler() {
    let Some(snapshot) = PayloadSnapshot::or_skip("guest_with_all_pages_outlives_its_handler")
    else {
        return;
    };
    let mut handler = snapshot.handler("second", &["--copy-all"]);
    let mut guest = snapshot.load("second", &handler, true);
    handler.wait_end();
    assert_eq!(handler.counts().copied, 32 * MIB / 4096);
    guest.console().wait_pass(VCPUS, SOON);
    guest.must_live();
    guest.pause();
    snapshot.create(&guest, "Full", "state-2", "memory-2");
}

#[test]
fn handlers_death_ends_a_load() {
    let Some(snapshot) = PayloadSnapshot::or_skip("handlers_death_ends_a_load") else { return };
    for (name, arguments) in [("first-fault", &["--exit-after", "0"][..]), ("closed", &["--close"])]
    {
        let handler = snapshot.handler(name, arguments);
        let mut guest = ServingProcess::start(&snapshot.scratch, &format!("guest-{name}"));
        // The process may end before it has answered.
        let answer = guest.ask("PUT", "/snapshot/load", &snapshot.load_body(&handler, false));
        if let Ok((status, text)) = answer {
            assert_eq!(status, 400, "{text}");
        }
        assert_eq!(guest.wait_exit(SOON), 1);
        let log = guest.log();
        let of_uffd = "Error creating guest memory from uffd: Failed to sends file descriptor: ";
        let ends = ["the page handler at ", of_uffd];
        assert!(ends.iter().any(|end| log.contains(end)), "{log}");
    }
}

/// The short form skips this test: the load waits for half a minute.
#[test]
fn load_with_a_hanging_handler_fails() {
    let test = "load_with_a_hanging_handler_fails";
    if repeats(0, 1) == 0 {
        return skip(test, "it takes half a minute: DRIFTLINE_FULL=1");
    }
    let Some(snapshot) = PayloadSnapshot::or_skip(test) else { return };
    let handler = snapshot.handler("second", &["--hang-after", "0"]);
    let mut guest = ServingProcess::start(&snapshot.scratch, "second");
    let why = guest.refusal("PUT", "/snapshot/load", &snapshot.load_body(&handler, false));
    assert!(why.starts_with("Load snapshot error: "), "{why}");
    assert_eq!(guest.wait_exit(SOON), 1);
}

#[test]
fn handler_that_hangs_stops_no_request() {
    let Some(snapshot) = PayloadSnapshot::or_skip("handler_that_hangs_stops_no_request") else {
        return;
    };
    let mut handler = snapshot.handler("second", &["--hang-after", "100"]);
    let guest = snapshot.load("second", &handler, true);
    tests::wait_for("100 pages", SOON, || (handler.counts().copied >= 100).then_some(()));
    assert_eq!(guest.page("/")["state"], "Running");
    // KVM waits for some pages, such as one that it reads to emulate an instruction, where no
    // signal interrupts it: then the pause is refused.
    let pause = json!({ "state": "Paused" });
    let (status, answer) = guest.ask("PATCH", "/vm", &pause).expect("an answer");
    let kinds: &[&str] = match status {
        204 => &["Full", "Diff"],
        _ => &[],
    };
    let why = answer["fault_message"].as_str().unwrap_or_default();
    assert!(status == 204 || why.contains(" did not pause within "), "{status} {why}");
    let state = if kinds.is_empty() { "Running" } else { "Paused" };
    assert_eq!(guest.page("/")["state"], state);
    for &kind in kinds {
        let body = snapshot.create_body(kind, "state-2", "memory-2");
        // What the guest has written is there.
        if kind == "Full" {
            let text = guest.refusal("PUT", "/snapshot/create", &body);
            let silent =
                format!("the page handler at {} has not served", handler.socket().display());
            assert!(text.contains(&silent), "{text}");
            assert!(!snapshot.path("memory-2").exists() && !snapshot.path("state-2").exists());
        } else {
            guest.done("PUT", "/snapshot/create", &body);
        }
    }
    assert_eq!(guest.page("/")["state"], state);
    let since = Instant::now();
    handler.kill();
    assert_ended(guest, &handler, since);
}

#[test]
fn diff_of_a_served_guest_is_complete() {
    let Some(snapshot) = PayloadSnapshot::or_skip("diff_of_a_served_guest_is_complete") else {
        return;
    };
    let mut handler = snapshot.handler("second", &[]);
    let guest = snapshot.load("second", &handler, true);
    guest.console().wait_pass(VCPUS, SOON);
    guest.pause();
    snapshot.create(&guest, "Diff", "state-diff", "diff");
    // A Diff needs no page that the guest has not written.
    assert!(handler.counts().copied < 32 * MIB / 4096, "{:?}", handler.counts());
    fs::copy(snapshot.path("memory"), snapshot.path("rebased")).expect("a copy");
    let base = File::options().write(true).open(snapshot.path("rebased")).expect("a file");
    let diff = File::open(snapshot.path("diff")).expect("a diff");
    let mut at = 0;
    while let Ok(start) = seek(&diff, SeekFrom::Data(at)) {
        at = seek(&diff, SeekFrom::Hole(start)).expect("a hole");
        let mut data = vec![0; (at - start) as usize];
        diff.read_exact_at(&mut data, start).expect("data");
        base.write_all_at(&data, start).expect("room");
    }
    // All of memory, after which nothing is left to be served.
    guest.resume();
    guest.pause();
    snapshot.create(&guest, "Full", "state-full", "full");
    handler.kill();
    guest.resume();
    guest.console().wait_reports(VCPUS, 3, SOON);
    guest.console().assert_clean();
    drop(guest);
    snapshot.check("third", "state-diff", "rebased");
    snapshot.check("fourth", "state-full", "full");
}

#[test]
fn served_guest_is_checkpointed_and_migrated() {
    let Some(snapshot) = PayloadSnapshot::or_skip("served_guest_is_checkpointed_and_migrated")
    else {
        return;
    };
    let scratch = &snapshot.scratch;
    let text = |path: PathBuf| path.to_str().expect("UTF-8").to_owned();
    let handler = snapshot.handler("second", &[]);
    let guest = snapshot.load("second", &handler, true);
    let store = text(scratch.path("store"));
    let args = ["--every", "20ms", "--count", "5", "--api-sock", guest.socket()];
    let taken = run_cli(&[&["checkpoint", "--store", &store], &args[..]].concat());
    assert_eq!(taken.status.code(), Some(0), "{}", String::from_utf8_lossy(&taken.stderr));
    assert!(guest.log().contains("the guest does not need its page handler any more"));
    guest.console().wait_reports(VCPUS, 2, SOON);
    let restored = Driftline::start(scratch, "restored", &["restore", "--store", &store]);
    restored.console().wait_pass(VCPUS, SOON);

    let handler = snapshot.handler("third", &[]);
    let mut source = snapshot.load("third", &handler, true);
    let (receiver, address) = Driftline::receive(scratch, "receiver");
    let moved = run_cli(&["send-migration", &address, "--api-sock", source.socket()]);
    assert_eq!(moved.status.code(), Some(0), "{}", String::from_utf8_lossy(&moved.stderr));
    receiver.console().wait_pass(VCPUS, SOON);
    assert_eq!(source.wait_exit(SOON), 0);
}
