//! The log: its format, its destination, its filter, and a reader that has stopped reading.

use std::os::unix::net::UnixStream;
use std::process::Stdio;

use crate::common::{
    ClosedAddress, TIMEOUT, TestDir, Vmm, driftline, fail, output, text, wait_for,
};
use driftline_machine::testing::{Elf, kvm_or_skip};
use serde_json::Value;

const GUEST: &[&str] =
    &["--backend", "threads", "--mem", "64M", "--guest", "payload,ws=1M,rate=1M,burst=8"];

#[test]
fn verbose_run_logs_the_machine_in_plain_text() {
    let tmp = TestDir::new();
    let mut vmm = Vmm::run(&tmp, "a", &[GUEST, &["-v"][..]].concat());
    vmm.tell(&["stop"]);
    assert_eq!(vmm.wait(), Some(0));
    let stderr = vmm.stderr();
    assert!(stderr.contains(" INFO ") && !stderr.contains('\u{1b}'), "{stderr:?}");
    let socket = format!("API socket {}", tmp.text("a.sock"));
    for part in ["with 64 MiB of memory", "backing=anon", "seccomp=true", "landlock=", &socket] {
        assert!(stderr.contains(part), "{part}: {stderr}");
    }
}

#[test]
fn verbose_run_logs_the_devices() {
    if !kvm_or_skip("verbose_run_logs_the_devices") {
        return;
    }
    let tmp = TestDir::new();
    // hlt; jmp $-1
    std::fs::write(tmp.path("kernel"), Elf::new(&[0xf4, 0xeb, 0xfd]).bytes()).unwrap();
    std::fs::File::create(tmp.path("root.img")).unwrap().set_len(1 << 20).unwrap();
    let (kernel, image) = (tmp.text("kernel"), tmp.text("root.img"));
    let disk = format!("path={image},id=root");
    let run = ["--kernel", &kernel, "--mem", "64M", "--disk", &disk];
    for (more, devices) in [(&["--rng", "on"], 2), (&["--rng", "off"], 1)] {
        let mut vmm = Vmm::run(&tmp, "a", &[&run[..], more, &["-v"]].concat());
        vmm.tell(&["stop"]);
        vmm.wait();
        let stderr = vmm.stderr();
        let lines: Vec<&str> = stderr.lines().filter(|line| line.contains(": device ")).collect();
        assert_eq!(lines.len(), devices, "{stderr}");
        assert!(lines[0].contains("Disk") && lines[0].contains("root"), "{stderr}");
        assert!(lines[0].contains(&image), "{stderr}");
        assert!(lines.get(1).is_none_or(|line| line.contains("device Rng")), "{stderr}");
    }
}

#[test]
fn json_log_is_an_object_a_line() {
    let tmp = TestDir::new();
    let mut vmm = Vmm::run(&tmp, "a", &[GUEST, &["-v", "--log-format", "json"][..]].concat());
    vmm.tell(&["stop"]);
    vmm.wait();
    let stderr = vmm.stderr();
    let lines: Vec<Value> = stderr.lines().map(|l| serde_json::from_str(l).unwrap()).collect();
    let message = |line: &Value| line["fields"]["message"].as_str().unwrap_or_default().to_owned();
    assert!(
        lines.iter().any(|l| l["level"] == "INFO" && message(l) == "the guest runs"),
        "{stderr}"
    );
    let last = message(lines.last().unwrap());
    assert!(last.starts_with("the guest was stopped"), "{last}");
    assert!(
        lines.iter().all(|l| l["timestamp"].is_string() && l["target"].is_string()),
        "{stderr}"
    );
}

#[test]
fn log_file_has_events_and_stderr_messages() {
    let tmp = TestDir::new();
    let log = tmp.text("it.log");
    let mut vmm = Vmm::run(&tmp, "a", &[GUEST, &["-v", "--log-file", &log][..]].concat());
    vmm.tell(&["stop"]);
    vmm.wait();
    let (stderr, logged) = (vmm.stderr(), tmp.read("it.log"));
    assert!(
        !stderr.contains("INFO") && stderr.contains("driftline: the guest was stopped"),
        "{stderr}"
    );
    assert!(logged.contains("the guest runs") && logged.contains("the guest was stopped"));
    let stderr = fail(1, &[&["run", "--log-file", "/nonexistent/it.log"][..], GUEST].concat());
    assert!(stderr.contains("--log-file /nonexistent/it.log"), "{stderr}");
}

#[test]
fn a_bad_log_filter_is_wrong_usage() {
    let stderr = fail(2, &["doctor", "--log", "foo=bar=baz"]);
    assert!(stderr.starts_with("driftline: --log: 'foo=bar=baz' is not a log filter"), "{stderr}");
    let out = driftline(&["doctor"]).env("RUST_LOG", "foo=bar=baz").output().unwrap();
    assert_eq!(out.status.code(), Some(2));
    let stderr = text(&out.stderr);
    assert!(
        stderr.starts_with("driftline: RUST_LOG: 'foo=bar=baz' is not a log filter"),
        "{stderr}"
    );
    // The option takes precedence over the variable.
    let out = driftline(&["doctor", "--log", "warn"]).env("RUST_LOG", "a=b=c").output().unwrap();
    assert_ne!(out.status.code(), Some(2), "{}", text(&out.stderr));
    assert_ne!(output(&["doctor"]).status.code(), Some(2));
}

/// The command that requested the migration prints the failure. The guest's VMM logs it, too, for
/// users of its log.
#[test]
fn failed_migration_is_printed_once() {
    let closed = ClosedAddress::new();
    let to = format!("tcp:{}", closed.address);
    for (verbose, in_log) in [(&[][..], 0), (&["-v"], 1)] {
        let tmp = TestDir::new();
        let mut vmm = Vmm::run(&tmp, "a", &[GUEST, verbose].concat());
        let stderr = vmm.refuse(4, &[&["send-migration", &to], verbose].concat());
        let cause = format!("cannot connect to {}", closed.address);
        assert_eq!(stderr.matches(&cause).count(), 1, "{verbose:?}: {stderr}");
        assert_eq!(stderr.lines().count(), 1, "{verbose:?}: {stderr}");
        // The log is complete once the process has ended.
        vmm.tell(&["stop"]);
        vmm.wait();
        let logged = vmm.stderr();
        assert_eq!(logged.matches(&cause).count(), in_log, "{verbose:?}: {logged}");
    }
}

#[test]
fn a_stopped_reader_of_the_log_stops_nothing() {
    let tmp = TestDir::new();
    let socket = tmp.text("a.sock");
    // No process reads the pipe, which is soon full.
    let (reader, writer) = UnixStream::pair().unwrap();
    rustix::net::sockopt::set_socket_send_buffer_size(&writer, 4096).unwrap();
    let mut child =
        driftline(&[&["run", "--log", "trace", "--serial", "null"][..], GUEST].concat())
            .args(["--api-sock", &socket, "--state-dir", &tmp.text("state")])
            .stdout(Stdio::null())
            .stderr(std::os::fd::OwnedFd::from(writer))
            .spawn()
            .unwrap();
    let ask = |args: &[&str]| {
        let mut client =
            driftline(args).args(["--api-sock", &socket]).stdout(Stdio::null()).spawn().unwrap();
        let end = std::time::Instant::now() + TIMEOUT;
        while std::time::Instant::now() < end {
            if let Some(status) = client.try_wait().unwrap() {
                return status.code();
            }
            std::thread::sleep(std::time::Duration::from_millis(20));
        }
        client.kill().unwrap();
        client.wait().unwrap();
        None
    };
    wait_for("the socket", || tmp.path("a.sock").exists().then_some(()));
    let store = tmp.text("store");
    let taken = ask(&["checkpoint", "--store", &store, "--every", "1ms", "--count", "200"]);
    let (paused, stopped) = (ask(&["pause"]), ask(&["stop"]));
    let ended = (0..600).find_map(|_| {
        std::thread::sleep(std::time::Duration::from_millis(100));
        child.try_wait().unwrap()
    });
    child.kill().unwrap();
    child.wait().unwrap();
    drop(reader);
    assert_eq!((taken, paused, stopped), (Some(0), Some(0), Some(0)));
    assert_eq!(ended.and_then(|status| status.code()), Some(0));
}
