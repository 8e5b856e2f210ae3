//! The command line and the API on one guest of the threads backend: messages, their destination,
//! and exit codes.

use std::path::Path;
use std::process::{Command, Stdio};

use crate::common::{TestDir, Vmm, fail, output, raw, request, succeed, text, wait_for};
use rustix::process::Signal;

const THREADS: &[&str] = &["--backend", "threads", "--mem", "64M"];

fn payload(spec: &'static str) -> Vec<&'static str> {
    [THREADS, &["--guest", spec]].concat()
}

#[test]
fn guest_is_shown_paused_resumed_and_stopped() {
    let tmp = TestDir::new();
    let mut vmm = Vmm::run(
        &tmp,
        "a",
        &[&payload("payload,ws=4M,rate=8M,burst=8"), &["--vcpus", "2"][..]].concat(),
    );
    let info = vmm.info().unwrap();
    assert_eq!(info["state"], "running");
    assert_eq!((&info["vcpus"], &info["mem_bytes"]), (&2.into(), &(64 << 20).into()));
    assert_eq!((&info["tracking"], &info["backend"]), (&"dirty-ring".into(), &"threads".into()));
    let table = vmm.tell(&["info"]);
    assert!(table.contains("memory             64 MiB\n"), "{table}");

    vmm.tell(&["pause"]);
    vmm.tell(&["pause"]);
    assert_eq!(vmm.state(), "paused");
    vmm.tell(&["resume"]);
    assert_eq!(vmm.state(), "running");
    vmm.tell(&["resume"]);
    vmm.await_progress(2, &[]);

    vmm.tell(&["stop"]);
    assert_eq!(vmm.wait(), Some(0));
    assert!(
        vmm.stderr().contains("the guest was stopped: stopped over the API"),
        "{}",
        vmm.stderr()
    );
    assert!(!tmp.path("a.sock").exists(), "the socket goes with its process");
}

#[test]
fn process_ends_with_its_guest() {
    let out = output(&[&["run"][..], &payload("payload,ws=1M,rate=max,passes=3")].concat());
    let (lines, stderr) = (text(&out.stdout), text(&out.stderr));
    assert_eq!(out.status.code(), Some(0), "{stderr}");
    assert!(lines.starts_with("payload ready vcpus=1 ws_pages=256"), "{lines}");
    assert!(lines.contains("payload vcpu=0 done ") && lines.contains(" errors=0 "), "{lines}");
    assert_eq!(stderr, "driftline: the guest powered itself off\n");
}

#[test]
fn a_signal_stops_the_guest_cleanly() {
    let tmp = TestDir::new();
    let mut vmm = Vmm::run(&tmp, "a", &payload("payload,ws=1M,rate=1M,burst=8"));
    vmm.signal(Signal::TERM);
    assert_eq!(vmm.wait(), Some(0));
    assert!(vmm.stderr().contains("interrupted by SIGTERM"), "{}", vmm.stderr());
    assert!(!tmp.path("a.sock").exists());
}

#[test]
fn wrong_usage_exits_2_with_a_hint() {
    let stderr = fail(2, &["run", "--guest", "payload", "--mem", "64Q"]);
    assert!(stderr.contains("a size is a number"), "{stderr}");
    let stderr = fail(2, &["run", "--guest", "payload,colour=red"]);
    assert!(stderr.contains("colour"), "{stderr}");
    fail(2, &["run", "--guest", "payload", "--kernel", "vmlinux"]);
    fail(2, &["run", "--mem", "64M"]);
    for (option, value) in [
        ("--initrd", Some("initrd")),
        ("--cmdline", Some("quiet")),
        ("--bare-cmdline", None),
        ("--balloon", None),
    ] {
        let beside = ["run", "--guest", "payload", option];
        let stderr = fail(2, &[&beside[..], value.as_slice()].concat());
        assert!(stderr.contains("cannot be used with") && stderr.contains(option), "{stderr}");
        let alone = ["run", option];
        fail(2, &[&alone[..], value.as_slice()].concat());
    }
    for wrong in ["0", "33"] {
        let stderr = fail(2, &["run", "--guest", "payload", "--vcpus", wrong]);
        assert!(
            stderr.contains(&format!("'{wrong}'")) && stderr.contains("1 to 32 vCPUs"),
            "{stderr}"
        );
    }
    for (cpu, why) in [
        ("max", "unknown processor \"max\": use host or baseline"),
        ("host,-warp", "unknown processor feature \"warp\""),
    ] {
        let stderr = fail(2, &["run", "--guest", "payload", "--cpu", cpu]);
        assert!(stderr.contains(why), "{stderr}");
    }
    let stderr = fail(2, &["run", "--guest", "payload", "--tracking", "magic"]);
    assert!(stderr.contains("unknown tracking mode \"magic\""), "{stderr}");
    fail(2, &["run", "--guest", "payload", "--shiny"]);
    fail(2, &["fly"]);
    fail(2, &["info"]);
    assert!(succeed(&["--help"]).contains("Exit codes: 0 done"));
}

/// The page "Command line" of the book.
#[test]
fn book_has_the_help_of_every_command() {
    let docs = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs");
    let mut script = Command::new(docs.join("cli.sh"));
    // Help is as wide as a terminal, if there is one.
    script.arg(env!("CARGO_BIN_EXE_driftline")).stdin(Stdio::null()).env_remove("COLUMNS");
    let out = script.output().unwrap();
    assert!(out.status.success(), "{}", text(&out.stderr));
    let page = std::fs::read_to_string(docs.join("src/reference/cli.md")).unwrap();
    assert!(text(&out.stdout) == page, "run docs/cli.sh: docs/src/reference/cli.md is out of date");
    let (_, commands) = page.split_once("\nCommands:\n").unwrap();
    let (commands, _) = commands.split_once("\n\n").unwrap();
    let names = commands.lines().filter_map(|line| line.split_whitespace().next());
    for name in names.filter(|name| *name != "help") {
        assert!(page.contains(&format!("\n## driftline {name}")), "{name} has no section");
    }
}

#[test]
fn missing_or_dead_socket_is_explained() {
    let tmp = TestDir::new();
    let socket = tmp.text("none.sock");
    let stderr = fail(1, &["info", "--api-sock", &socket]);
    assert!(stderr.contains("does not exist: is the guest running"), "{stderr}");

    let mut first = Vmm::run(&tmp, "a", &payload("payload,ws=1M,rate=1M,burst=8"));
    let stderr =
        fail(1, &[&["run"][..], &payload("payload"), &["--api-sock", &first.socket()]].concat());
    assert!(stderr.contains("is in use: another process listens there"), "{stderr}");
    first.kill();
    assert!(tmp.path("a.sock").exists(), "a killed process leaves its socket");
    let mut second = Vmm::run(&tmp, "a", &payload("payload,ws=1M,rate=1M,burst=8"));
    assert_eq!(second.state(), "running");
    second.tell(&["stop"]);
    second.wait();
}

#[test]
fn impossible_guest_is_refused_with_the_reason() {
    let stderr =
        fail(1, &["run", "--backend", "threads", "--mem", "16M", "--guest", "payload,ws=64M"]);
    assert!(stderr.contains("its working set takes 16384 pages"), "{stderr}");
    let stderr = fail(1, &["run", "--backend", "threads", "--kernel", "vmlinux"]);
    assert!(stderr.contains("the threads backend runs only the payload"), "{stderr}");
    let stderr = fail(1, &["run", "--backend", "threads", "--guest", "payload,io=5"]);
    assert!(stderr.contains("io= needs a disk or an interface, and the threads"), "{stderr}");
}

#[test]
fn a_job_is_followed_by_its_number() {
    let tmp = TestDir::new();
    let mut vmm = Vmm::run(&tmp, "a", &payload("payload,ws=1M,rate=1M,burst=8"));
    let socket = vmm.socket();
    let ask = |method: &str, path: &str, body: &str| request(&socket, method, path, body);
    // A client may send null for a field that it does not use.
    for (n, epochs, disks) in [(1, 1, ""), (2, 3, r#","disks":null"#)] {
        let body = format!(
            r#"{{"store":"{}","every_ms":1,"count":{epochs}{disks}}}"#,
            tmp.text(&format!("store{n}"))
        );
        let answer = ask("POST", "/v1/checkpoint", &body);
        assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
        assert!(answer.ends_with(&format!("{{\"job\":{n}}}")), "{answer}");
        wait_for("its end", || {
            let page = ask("GET", &format!("/v1/checkpoint?job={n}&since={epochs}"), "");
            page.contains("\"running\":false").then_some(())
        });
    }
    let first = ask("GET", "/v1/checkpoint?job=1", "");
    assert!(first.contains("\"job\":1,") && first.contains("/store1\""), "{first}");
    assert!(first.contains("\"next\":1,"), "the reports of its own run only: {first}");
    let latest = ask("GET", "/v1/checkpoint", "");
    assert!(latest.contains("\"job\":2,") && latest.contains("\"next\":3,"), "{latest}");
    let answer = ask("POST", "/v1/migration", r#"{"to":"tcp:127.0.0.1:1"}"#);
    assert!(answer.ends_with("{\"job\":3}"), "{answer}");
    let page = ask("GET", "/v1/migration?job=3&wait_ms=20000", "");
    assert!(page.contains("\"job\":3,\"state\":\"failed\""), "{page}");
    for path in ["/v1/checkpoint?job=3", "/v1/migration?job=1"] {
        let answer = ask("GET", path, "");
        assert!(answer.starts_with("HTTP/1.1 400"), "{path}: {answer}");
        assert!(answer.contains("there is no job "), "{path}: {answer}");
    }
    assert!(ask("DELETE", "/v1/checkpoint?job=2", "").contains("no checkpoints are being taken"));
    assert!(ask("DELETE", "/v1/checkpoint?job=9", "").contains("there is no job 9"));
    vmm.tell(&["stop"]);
    assert_eq!(vmm.wait(), Some(0));
}

#[test]
fn the_api_speaks_firecrackers_json() {
    let tmp = TestDir::new();
    let mut vmm = Vmm::run(&tmp, "a", &payload("payload,ws=1M"));
    let socket = vmm.socket();
    let ask = |method: &str, path: &str, body: &str| request(&socket, method, path, body);

    let answer = ask("GET", "/", "");
    assert!(
        answer.contains("\"state\":\"Running\"") && answer.contains("\"app_name\""),
        "{answer}"
    );
    assert!(ask("GET", "/version", "").starts_with("HTTP/1.1 200"));
    let answer = ask("GET", "/machine-config", "");
    assert!(answer.contains("\"vcpu_count\":1,\"mem_size_mib\":64"), "{answer}");
    assert!(ask("GET", "/vm/config", "").contains("\"guest\":\"payload,ws=1M\""));
    assert!(ask("PATCH", "/vm", r#"{"state":"Paused"}"#).starts_with("HTTP/1.1 204"));
    assert!(ask("GET", "/", "").contains("\"state\":\"Paused\""));
    assert!(ask("PATCH", "/vm", r#"{"state":"Resumed"}"#).starts_with("HTTP/1.1 204"));
    assert!(ask("GET", "/metrics", "").contains("\ndriftline_guest_state{vm_id=\""));
    assert!(ask("GET", "/v1/dirty", "").contains("\"marked_frames\""));

    for (method, path, body, fault) in [
        ("PATCH", "/vm", r#"{"state":"Sideways"}"#, "unknown variant"),
        ("PATCH", "/vm", r#"{"state":"Paused","hard":true}"#, "unknown field"),
        ("PATCH", "/vm", "", "the request body is empty; expected JSON"),
        ("GET", "/nowhere", "", "there is no request GET /nowhere"),
        ("GET", "/drives/root", "", "the guest has no disk \\\"root\\\""),
        ("GET", "/network-interfaces/e", "", "the guest has no network interface"),
        ("GET", "/vsock", "", "the guest has no vsock"),
        ("DELETE", "/vm", "", "there is no request DELETE /vm"),
        (
            "POST",
            "/v1/migration",
            r#"{"to":"127.0.0.1:1","timeout_s":18446744073709551615}"#,
            "timeout_s is 18446744073709551615; it must be at most",
        ),
        (
            "POST",
            "/v1/migration",
            r#"{"to":"127.0.0.1:1","max_bandwidth_bytes_per_s":1000}"#,
            "max_bandwidth_bytes_per_s is 1000; it must be at least 1048576",
        ),
        ("PUT", "/actions", r#"{"action_type":"InstanceStart"}"#, "has been started already"),
    ] {
        let answer = ask(method, path, body);
        assert!(answer.starts_with("HTTP/1.1 400"), "{method} {path} {body}: {answer}");
        assert!(answer.contains("\"fault_message\":\""), "{answer}");
        assert!(answer.contains(fault), "{answer}");
    }
    let answer = ask("PATCH", "/vm", &format!(r#"{{"state":"{}"}}"#, "x".repeat(1 << 20)));
    assert!(answer.is_empty() || answer.starts_with("HTTP/1.1 413"), "{answer}");
    assert!(!raw(&socket, "\r\nnonsense\r\n\r\n").starts_with("HTTP/1.1 200"));
    assert_eq!(vmm.state(), "running", "none of this has hurt the guest");
    vmm.tell(&["stop"]);
    assert_eq!(vmm.wait(), Some(0));
    wait_for("the socket to go", || (!tmp.path("a.sock").exists()).then_some(()));
}
