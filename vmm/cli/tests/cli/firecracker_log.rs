//! The log that a client of Firecracker's API configures, by arguments and by `PUT /logger`.

use std::fs::OpenOptions;
use std::io::Read;
use std::os::unix::fs::OpenOptionsExt;
use std::process::{Command, Stdio};

use driftline_machine::testing::kvm_or_skip;
use rustix::fs::OFlags;
use rustix::process::Signal;
use serde_json::{Value, json};

use crate::common::serving::ServeProcess;
use crate::common::{TestDir, read_now, text, wait_for};
use crate::firecracker::{command, serve};
use crate::serve_guest::{AfterPrint, await_line, configure};

/// Returns the end of each line of a log. Every line must have the form of Firecracker's.
fn messages<'l>(log: &'l str, id: &str) -> Vec<&'l str> {
    let message = |line: &'l str| {
        let (time, rest) = line.split_once(" [").unwrap_or_else(|| panic!("{line}"));
        let digits = time.replace(|c: char| c.is_ascii_digit(), "0");
        assert_eq!(digits, "0000-00-00T00:00:00.000000000", "{line}");
        let (origin, message) = rest.split_once("] ").unwrap_or_else(|| panic!("{line}"));
        assert!(origin.starts_with(&format!("{id}:")), "{line}");
        message
    };
    log.lines().map(message).collect()
}

/// Ends a process, which then has written its log.
fn end(mut vmm: ServeProcess) {
    vmm.signal(Signal::TERM);
    vmm.wait_status();
}

#[test]
fn log_is_on_stdout_without_a_file() {
    let tmp = TestDir::new();
    let socket = tmp.text("fc.sock");
    let mut command = command(&["--id", "a-1", "--api-sock", &socket]);
    let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let mut stdout = child.stdout.take().unwrap();
    let vmm = ServeProcess::adopt(child, socket.clone());
    let logger = json!({ "log_path": tmp.text("log"), "show_level": true });
    vmm.done("PUT", "/logger", &logger.to_string());
    let refusal = vmm.refusal("PUT", "/vsock", "{");
    end(vmm);
    let mut early = Vec::new();
    stdout.read_to_end(&mut early).unwrap();
    let early = text(&early);
    let early = messages(&early, "a-1");
    assert!(early[0].starts_with("Running Firecracker v1.16.1"), "{early:?}");
    let listening = format!("Listening on API socket ({socket:?}).");
    assert!(early.contains(&listening.as_str()), "{early:?}");
    assert!(early.contains(&"API server started."), "{early:?}");
    let log = tmp.read("log");
    let late = messages(&log, "a-1");
    let done = "The request was executed successfully. Status code: 204 No Content.";
    assert!(late.contains(&done), "{log}");
    let received = r#"The API server received a Put request on "/vsock" with body "{"."#;
    assert!(late.contains(&received), "{log}");
    let refused = format!("Received Error. Status code: 400 Bad Request. Message: {refusal}");
    assert!(late.contains(&refused.as_str()), "{log}");
    assert!(log.lines().any(|line| line.contains(" [a-1:control:ERROR] ")), "{log}");
}

#[test]
fn arguments_choose_file_level_and_origin() {
    let tmp = TestDir::new();
    let log = tmp.text("log");
    let arguments = ["--log-path", &log, "--show-level", "--show-log-origin", "--id", "b"];
    let vmm = serve(&tmp, &arguments);
    vmm.refusal("PUT", "/vsock", "{");
    end(vmm);
    let lines = tmp.read("log");
    messages(&lines, "b");
    let refused = lines.lines().find(|line| line.contains("Received Error")).unwrap();
    let origin = "[b:control:ERROR:vmm/control/src/api/configuring.rs:";
    assert!(refused.contains(origin), "{refused}");
    for (more, has_error) in [
        (&["--level", "Warning"][..], true),
        (&["--level", "Error", "--module", "driftline_control::api"], true),
        (&["--level", "Error", "--module", "driftline_machine"], false),
        (&["--level", "off"], false),
    ] {
        std::fs::remove_file(tmp.path("fc.sock")).unwrap();
        std::fs::write(&log, "earlier\n").unwrap();
        let vmm = serve(&tmp, &[&["--log-path", &log], more].concat());
        vmm.get("/");
        vmm.refusal("PUT", "/vsock", "{");
        end(vmm);
        let lines = tmp.read("log");
        let lines = lines.strip_prefix("earlier\n").expect("what it contains stays");
        let infos = ["Running Firecracker", "Status code: 200"];
        assert!(!infos.iter().any(|info| lines.contains(info)), "{more:?}: {lines}");
        assert_eq!(lines.contains("Received Error"), has_error, "{more:?}: {lines}");
    }
    let none = tmp.text("none/log");
    let out = command(&["--log-path", &none]).output().unwrap();
    assert_eq!(out.status.code(), Some(1));
    let stdout = text(&out.stdout);
    let refusal = "Could not initialize logger: Failed to open target file: No such file or \
                   directory (os error 2)";
    assert_eq!(messages(&stdout, "anonymous-instance")[0], refusal);
}

#[test]
fn logger_is_refused_as_firecracker_does() {
    let tmp = TestDir::new();
    let vmm = ServeProcess::start(&tmp, &[]);
    let refusal = |body| vmm.refusal("PUT", "/logger", body);
    let none = json!({ "log_path": tmp.text("none/log") }).to_string();
    let text = "Logger error: Failed to open target file: No such file or directory (os error 2)";
    assert_eq!(refusal(&none), text);
    assert!(refusal(r#"{"level": "loud"}"#).contains("Invalid LevelFilter"));
    assert!(refusal(r#"{"levels": "Info"}"#).contains("unknown field `levels`"));
    let log = json!({ "log_path": tmp.text("log") }).to_string();
    vmm.done("PUT", "/logger", &log);
    // `PUT /logger` can be repeated. It does not decide whether a snapshot can be loaded.
    vmm.done("PUT", "/logger", r#"{"level": "Off"}"#);
    vmm.get("/");
    vmm.done("PUT", "/logger", r#"{"level": "Info"}"#);
    vmm.get("/version");
    end(vmm);
    let log = tmp.read("log");
    assert!(!log.contains(r#"Get request on "/"."#), "{log}");
    assert!(log.contains(r#"Get request on "/version"."#), "{log}");
}

#[test]
fn fifo_without_reader_loses_whole_lines() {
    if !kvm_or_skip("fifo_without_reader_loses_whole_lines") {
        return;
    }
    let tmp = TestDir::new();
    let fifo = tmp.fifo("fifo");
    let mut vmm = ServeProcess::start(&tmp, &[]);
    vmm.done("PUT", "/logger", &json!({ "log_path": fifo }).to_string());
    vmm.done("PUT", "/metrics", &json!({ "metrics_path": tmp.text("metrics") }).to_string());
    // More than a FIFO takes, which is 64 KiB, and than the process keeps, which is 1 MiB.
    let body = format!("\"{}\"", "x".repeat(40_000));
    for _ in 0..40 {
        vmm.refusal("PUT", "/vsock", &body);
    }
    let flags = OFlags::NONBLOCK.bits().cast_signed();
    let mut reader = OpenOptions::new().read(true).custom_flags(flags).open(&fifo).unwrap();
    let mut log = String::new();
    wait_for("the next lines", || {
        vmm.get("/version");
        log += &read_now(&mut reader);
        log.contains("Get request on \"/version\".").then_some(())
    });
    configure(&vmm, &tmp, AfterPrint::Wait);
    vmm.done("PUT", "/actions", r#"{"action_type": "InstanceStart"}"#);
    await_line(&tmp);
    vmm.done("PUT", "/actions", r#"{"action_type": "FlushMetrics"}"#);
    let metrics = tmp.read("metrics");
    let missed = metrics.lines().map(|line| {
        let line: Value = serde_json::from_str(line).unwrap();
        line["logger"]["missed_log_count"].as_u64().unwrap()
    });
    assert!(missed.sum::<u64>() >= 38, "one of them is as long as the room: {metrics}");
    vmm.signal(Signal::TERM);
    vmm.wait_status();
    log += &read_now(&mut reader);
    // Each line has its own beginning, and none contains the beginning of another line.
    for message in messages(&log, "anonymous-instance") {
        assert!(!message.contains(" [anonymous-instance:"), "{message}");
        assert!(!message.contains("xxx") || message.ends_with('.'), "it is whole");
    }
}

#[test]
fn client_cannot_forge_a_line() {
    let tmp = TestDir::new();
    let vmm = serve(&tmp, &["--id", "a", "--log-path", &tmp.text("log")]);
    let forged = "2026-11-24T18:19:40.000000000 [a:main] forged";
    let path = json!({ "kernel_image_path": format!("/none\n{forged}") });
    vmm.refusal("PUT", "/boot-source", &path.to_string());
    let field = json!({ format!("f\n{forged}"): 1 });
    vmm.refusal("PUT", "/vsock", &field.to_string());
    let drive = json!({ "drive_id": "d", "is_root_device": false,
        "path_on_host": format!("/none\n{forged}") });
    vmm.refusal("PUT", "/drives/d", &drive.to_string());
    end(vmm);
    let log = tmp.read("log");
    assert!(messages(&log, "a").iter().all(|message| *message != "forged"), "{log}");
    assert!(log.contains("forged"), "{log}");
}

#[test]
fn own_log_needs_no_log_of_a_client() {
    let tmp = TestDir::new();
    let mut vmm = ServeProcess::start(&tmp, &[]);
    vmm.refusal("PUT", "/vsock", "{");
    vmm.signal(Signal::TERM);
    let (_, stderr) = vmm.wait_status();
    assert!(stderr.contains("ERROR") && stderr.contains("Received Error. Status code: 400"));
}

#[test]
fn line_after_a_full_file_is_whole() {
    let tmp = TestDir::new();
    let (socket, log) = (tmp.text("fc.sock"), tmp.text("log"));
    let mut command = Command::new("sh");
    command.args(["-c", "ulimit -f 16; exec \"$0\" \"$@\"", env!("CARGO_BIN_EXE_driftline")]);
    command.args(["serve", "--api-sock", &socket]);
    let vmm = ServeProcess::spawn(command, socket);
    vmm.done("PUT", "/logger", &json!({ "log_path": log }).to_string());
    let body = format!("\"{}\"", "x".repeat(40_000));
    vmm.refusal("PUT", "/vsock", &body);
    // The file is full, and ends with a part of that line.
    wait_for("the limit", || tmp.read("log").ends_with("xxx").then_some(()));
    wait_for("the next line", || {
        // The line about the answer is as long, and may come after the answer.
        if tmp.read("log").ends_with("xxx") {
            OpenOptions::new().write(true).open(&log).unwrap().set_len(0).unwrap();
        }
        vmm.get("/version");
        tmp.read("log").contains("Get request on \"/version\".").then_some(())
    });
    end(vmm);
    let log = tmp.read("log");
    messages(log.trim_start_matches('\n'), "anonymous-instance");
}

#[test]
fn started_guest_logs_into_the_clients_file() {
    if !kvm_or_skip("started_guest_logs_into_the_clients_file") {
        return;
    }
    let tmp = TestDir::new();
    let mut vmm = serve(&tmp, &["--id", "c", "--level", "Debug", "--log-path", &tmp.text("log")]);
    configure(&vmm, &tmp, AfterPrint::Reset);
    vmm.done("PUT", "/actions", r#"{"action_type": "InstanceStart"}"#);
    await_line(&tmp);
    let (code, stderr) = vmm.wait();
    assert_eq!((code, stderr.as_str()), (Some(0), ""));
    let log = tmp.read("log");
    let logged = messages(&log, "c");
    let lines = ["the guest runs", "Vmm is stopping.", "the guest asked for a reset"];
    for line in lines {
        assert!(logged.contains(&line), "{line}: {log}");
    }
    assert_eq!(logged.last(), Some(&"Firecracker exiting successfully. exit_code=0"));
}
