//! The messages for a user at a terminal: every refusal says what failed, where, and what to do
//! about it.

use std::os::unix::net::UnixListener;

use crate::common::{TestDir, Vmm, driftline, fail, receiver, text, wait_for};
use driftline_machine::testing::kvm_or_skip;
use rustix::process::Signal;

const RUN: &str = "run --guest payload,ws=1M --serial null --backend threads";

/// A command line, with PLACE for the test's directory; its exit code; a part of its message.
type Row = (&'static str, i32, &'static str);

const ROWS: &[Row] = &[
    (
        "RUN --vcpus abc",
        2,
        "invalid value 'abc' for '--vcpus <N>': --vcpus takes a number, 1 to 32",
    ),
    ("RUN --vcpus 33", 2, "invalid value '33' for '--vcpus <N>': a guest has 1 to 32 vCPUs"),
    ("RUN --mem 1", 2, "1 byte is not a multiple of 4K; did you mean 1G?"),
    ("RUN --mem 4096", 2, "a guest has from 16M to 16384G of memory; did you mean 4096M?"),
    ("RUN --ring-entries 1000", 2, "it must be a power of two, such as 1024"),
    ("RUN --disk x.img", 2, "a disk needs path=FILE: --disk path=x.img"),
    (
        "RUN --disk path=a,fast",
        2,
        "\"fast\" is not an option of a disk: they are path=FILE, readonly,",
    ),
    (
        "RUN --disk path=a,readonly,path=b",
        2,
        "\"path=b\" is the second path of a disk: give it once",
    ),
    ("RUN --disk path=", 2, "\"path=\" has no value: it is path=FILE"),
    ("RUN --net mac=02:00:00:00:00:01", 2, "lacks tap=NAME, which a network interface needs"),
    (
        "run --guest payload,ws=64",
        2,
        "is not a multiple of the page size, 4K, in bytes or with K, M, G, KiB, MiB or GiB; did \
         you mean ws=64M?",
    ),
    ("RUN --disk path=PLACE/file,copy", 2, "'copy' of --disk is only for receive-migration"),
    ("RUN --disk path=PLACE/file", 1, "driftline: the threads backend has no devices"),
    ("RUN --disk path=PLACE/file,identity=any", 2, "is only for receive-migration"),
    (
        "RUN --mem 16000G",
        3,
        "driftline: 16000 GiB of guest memory does not fit (--mem): this host has ",
    ),
    (
        "RUN --mem 15000G --hugepages hugetlbfs",
        3,
        "driftline: guest memory needs 7680000 huge pages of 2 MiB, and this host has ",
    ),
    ("RUN --allow-path PLACE/none", 1, "--allow-path PLACE/none: it does not exist"),
    ("RUN --api-sock PLACE", 1, "cannot listen on PLACE: it exists and is not a socket"),
    ("checkpoint --api-sock s --store d --keep 0", 2, "it must be a number of at least 1"),
    ("checkpoint --api-sock s --store d --every 0s", 2, "an interval is at least 1ms"),
    (
        "restore --store d --checkpoint foo",
        2,
        "a checkpoint has a number; `driftline store ls` lists them",
    ),
    (
        "info --api-sock PLACE/none",
        1,
        "PLACE/none does not exist: is the guest running, and was it started with --api-sock \
         PLACE/none?",
    ),
    ("store ls PLACE", 1, "PLACE is not a Driftline store (no manifest)"),
    ("restore --store PLACE", 1, "PLACE is not a Driftline store (no manifest)"),
    ("store verify PLACE/empty", 1, "PLACE/empty is neither a store nor an archive (0 bytes)"),
    ("info --api-sock PLACE/dead", 1, "nothing listens on PLACE/dead: "),
    (
        "restore --store PLACE/text --serial null --state-dir PLACE/state",
        1,
        "PLACE/text/manifest, byte 0: not a Driftline store: it begins with \"NNNN",
    ),
    (
        "restore --store PLACE/store --serial null --state-dir PLACE/state --net tap=none",
        2,
        "a network interface is given (tap=), but the guest has no network interface",
    ),
    ("resolve --state-dir PLACE/none --run", 1, "the state directory PLACE/none does not exist: "),
    ("resolve --state-dir PLACE --run", 1, "no migration is in doubt: PLACE has no record of "),
    ("top --api-sock PLACE/dead", 1, "top needs a terminal; use top --once, or top --json"),
    (
        "receive-migration tcp:127.0.0.1:0 --state-dir /proc/none",
        1,
        "cannot write to the state directory /proc/none: ",
    ),
];

#[test]
fn refusals_name_cause_place_and_remedy() {
    let tmp = TestDir::new();
    std::fs::write(tmp.path("file"), [0; 4096]).unwrap();
    std::fs::write(tmp.path("empty"), []).unwrap();
    std::fs::create_dir(tmp.path("text")).unwrap();
    std::fs::write(tmp.path("text").join("manifest"), [b'N'; 4096]).unwrap();
    let guest =
        ["--backend", "threads", "--mem", "32M", "--guest", "payload,ws=1M,rate=1M,burst=8"];
    let vmm = Vmm::run(&tmp, "a", &guest);
    vmm.tell(&["checkpoint", "--store", &tmp.text("store")]);
    drop(vmm);
    drop(UnixListener::bind(tmp.path("dead")).unwrap());
    let dir = tmp.text("file").strip_suffix("/file").unwrap().to_owned();
    let mut wrong = Vec::new();
    for &(line, code, part) in ROWS {
        let line = line.replace("RUN", RUN).replace("PLACE", &dir);
        let part = part.replace("PLACE", &dir);
        let stderr = fail(code, &line.split(' ').collect::<Vec<_>>());
        if !stderr.contains(&part) {
            wrong.push(format!("{line}\n  wanted: {part}\n  said: {stderr}"));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn commands_without_a_result_print_a_sentence() {
    let tmp = TestDir::new();
    let guest =
        ["--backend", "threads", "--mem", "32M", "--guest", "payload,ws=1M,rate=1M,burst=8"];
    let vmm = Vmm::run(&tmp, "a", &guest);
    let socket = vmm.socket();
    for (command, sentence) in [
        (&["pause"][..], "the guest is paused"),
        (&["resume"], "the guest runs"),
        (&["stop", "--wait"], "stopped; the VMM has ended"),
    ] {
        let args = [command, &["--api-sock", &socket]].concat();
        let out = driftline(&args).output().unwrap();
        let (printed, stderr) = (text(&out.stdout), text(&out.stderr));
        assert_eq!((printed, stderr), (String::new(), format!("driftline: {sentence}\n")));
    }
}

/// The payload takes the interrupt for a fault, prints its vector, and ends.
#[test]
fn nmi_reaches_a_kvm_guest() {
    let tmp = TestDir::new();
    let guest = ["--mem", "64M", "--guest", "payload,ws=1M"];
    let threads = Vmm::run(&tmp, "a", &[&guest[..], &["--backend", "threads"]].concat());
    let stderr = threads.refuse(1, &["nmi"]);
    assert!(stderr.contains("the threads backend has no interrupts"), "{stderr}");
    if !kvm_or_skip("nmi_reaches_a_kvm_guest") {
        return;
    }
    let mut vmm = Vmm::run(&tmp, "b", &guest);
    vmm.await_progress(1, &[]);
    vmm.tell(&["nmi"]);
    assert_eq!(vmm.wait(), Some(1), "{}", vmm.stderr());
    let printed = std::fs::read_to_string(tmp.path("b.serial")).unwrap();
    assert!(printed.contains("payload fault vcpu=0 vector=2 "), "{printed}");
}

#[test]
fn run_warns_of_an_unusable_state_directory() {
    let line = RUN.replace("ws=1M", "ws=1M,passes=1") + " --mem 32M --state-dir /proc/none";
    let out = driftline(&line.split(' ').collect::<Vec<_>>()).output().unwrap();
    let stderr = text(&out.stderr);
    assert_eq!(out.status.code(), Some(0), "{stderr}");
    assert!(stderr.contains(" WARN "), "{stderr}");
    assert!(stderr.contains("cannot write to the state directory /proc/none: "), "{stderr}");
    assert!(
        stderr.contains("; name another with --state-dir; this guest cannot be migrated"),
        "{stderr}"
    );
}

#[test]
fn ring_entries_message_has_the_hosts_limit() {
    if !kvm_or_skip("ring_entries_message_has_the_hosts_limit") {
        return;
    }
    let run = |code, entries| {
        let args = ["run", "--serial", "null", "--guest", "payload,ws=1M", "--ring-entries"];
        fail(code, &[&args[..], &[entries]].concat())
    };
    assert!(run(2, "1000").contains("such as 1024; this host takes up to "), "{}", run(2, "1000"));
    let stderr = run(3, "16777216");
    assert!(stderr.starts_with("driftline: this host's KVM supports at most "), "{stderr}");
    assert!(stderr.contains(" dirty-ring entries per vCPU (--ring-entries)"), "{stderr}");
}

#[test]
fn stopped_receiver_names_the_cause() {
    let tmp = TestDir::new();
    let (mut waiting, _) = receiver(&tmp, "waiting", &[]);
    waiting.await_api();
    waiting.signal(Signal::TERM);
    assert_eq!(waiting.wait(), Some(1));
    let stderr = waiting.stderr();
    assert!(stderr.contains("driftline: stopped by SIGTERM before a guest arrived"), "{stderr}");
    assert_eq!(stderr.lines().count(), 2, "that it waits, and why it has ended: {stderr}");
    let (mut waiting, _) = receiver(&tmp, "told", &[]);
    waiting.tell(&["stop"]);
    assert_eq!(waiting.wait(), Some(1));
    let stderr = waiting.stderr();
    assert!(stderr.contains("driftline: stopped over the API before a guest arrived"), "{stderr}");
}

#[test]
fn dead_vmm_leaves_its_last_checkpoints_number() {
    let tmp = TestDir::new();
    let guest =
        ["--backend", "threads", "--mem", "32M", "--guest", "payload,ws=1M,rate=1M,burst=8"];
    let mut vmm = Vmm::run(&tmp, "a", &guest);
    let (socket, store) = (vmm.socket(), tmp.text("store"));
    let out = std::fs::File::create(tmp.path("out")).unwrap();
    let client = driftline(&["checkpoint", "--api-sock", &socket, "--store", &store])
        .args(["--every", "10ms"])
        .stdout(out)
        .stderr(std::process::Stdio::piped())
        .spawn()
        .unwrap();
    wait_for("three checkpoints", || tmp.read("out").contains("checkpoint 3: ").then_some(()));
    vmm.kill();
    let out = client.wait_with_output().unwrap();
    let stderr = text(&out.stderr);
    assert_eq!(out.status.code(), Some(1), "{stderr}");
    let printed = tmp.read("out");
    let last = printed.lines().last().unwrap();
    let last = last.strip_prefix("checkpoint ").unwrap().split(':').next().unwrap();
    let all = format!(
        "driftline: the VMM on {socket} has ended; the last durable checkpoint is {last}\n"
    );
    assert_eq!(stderr, all);
}
