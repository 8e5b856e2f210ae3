//! The binary as `firecracker`: its command line, output, exit codes and socket.

use std::io::Write;
use std::os::unix::net::UnixStream;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Command, Stdio};

use driftline_machine::testing::{Elf, kvm_or_skip};
use rustix::process::Signal;
use serde_json::json;

use crate::common::serving::ServeProcess;
use crate::common::{TestDir, driftline, status_field, text};
use crate::serve_guest::{AfterPrint, await_line, configure};

/// Returns a command that runs the binary under Firecracker's name.
pub fn command(args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_driftline"));
    command.arg0("/firecracker").args(args).env_remove("RUST_LOG").stdin(Stdio::null());
    command
}

/// Runs the binary under Firecracker's name. Returns the exit code, stdout and stderr.
fn firecracker(args: &[&str]) -> (Option<i32>, String, String) {
    let out = command(args).output().unwrap();
    (out.status.code(), text(&out.stdout), text(&out.stderr))
}

/// Returns the log on stdout without the beginnings of its lines.
fn logged(stdout: &str) -> String {
    let message = |line: &str| match line.split_once("] ") {
        Some((start, message)) if start.contains(" [") => message.to_owned(),
        _ => line.to_owned(),
    };
    stdout.lines().map(|line| message(line) + "\n").collect()
}

/// Starts a process that serves the API.
pub fn serve(tmp: &TestDir, args: &[&str]) -> ServeProcess {
    let socket = tmp.text("fc.sock");
    ServeProcess::spawn(command(&[&["--api-sock", &socket], args].concat()), socket)
}

#[test]
fn versions_are_printed_for_clients() {
    let version = "Firecracker v1.16.1\n\n";
    assert_eq!(firecracker(&["--version"]), (Some(0), version.to_owned(), String::new()));
    // Whatever else is there.
    assert_eq!(firecracker(&["--foo", "--version", "--id"]).1, version);
    let out = driftline(&["firecracker", "--version"]).output().unwrap();
    assert_eq!((out.status.code(), text(&out.stdout).as_str()), (Some(0), version));
    let out = driftline(&["-v", "firecracker", "--version"]).output().unwrap();
    let first = "firecracker takes none of Driftline's options: write it first, as in driftline \
                 firecracker --version";
    assert!(out.status.code() == Some(2) && text(&out.stderr).contains(first), "{out:?}");
    for help in ["--help", "-h"] {
        let (code, stdout, _) = firecracker(&[help, "--version"]);
        assert_eq!(code, Some(0));
        assert!(
            stdout.starts_with(version) && stdout.contains("--api-sock <api-sock>"),
            "{stdout}"
        );
    }
}

#[test]
fn refused_line_is_reported_as_firecracker_does() {
    let (code, stdout, stderr) = firecracker(&["--foo"]);
    assert_eq!(
        (code, logged(&stdout), stderr),
        (
            Some(153),
            "Arguments parsing error: Found argument 'foo' which wasn't expected, or isn't valid \
             in this context. \n\nFor more information try --help.\nFirecracker exiting with \
             error. exit_code=153\n"
                .to_owned(),
            "Error: ParseArguments(UnexpectedArgument(\"foo\"))\n".to_owned()
        )
    );
    let (code, stdout, stderr) = firecracker(&["--level", "loud"]);
    assert_eq!(code, Some(152), "{stdout}{stderr}");
    assert!(logged(&stdout).starts_with("Invalid value for logger level: "), "{stdout}");
    assert!(
        logged(&stdout).ends_with("\nFirecracker exiting with error. exit_code=152\n"),
        "{stdout}"
    );
    assert_eq!(stderr, "Error: InvalidLogLevel(LevelFilterFromStrError(\"loud\"))\n");
    for (args, text) in [
        (&["--id"][..], "The argument 'id' requires a value, but none was supplied."),
        (&["--id", "a", "--id", "b"], "The argument 'id' was provided more than once."),
        (&["--id", "a_b"], "Invalid instance ID: "),
        (&["--no-api"], "Argument 'config-file' required, but not found."),
        (
            &["--no-seccomp", "--seccomp-filter", "f"],
            "Argument 'seccomp-filter' cannot be used together with argument 'no-seccomp'.",
        ),
        (&["--start-time-us", "soon"], "'start-time-us' parameter expected to be of 'u64' type."),
        (&["--api-sock=/tmp/a"], "Found argument 'api-sock=/tmp/a' which wasn't expected"),
    ] {
        let (code, stdout, stderr) = firecracker(args);
        assert_eq!(code, Some(153), "{args:?}: {stdout}{stderr}");
        assert!(stdout.contains(text), "{args:?}: {stdout}");
    }
}

#[test]
fn argument_without_effect_is_refused_by_name() {
    for args in [&["--enable-pci"][..], &["--seccomp-filter", "filters"]] {
        let (code, stdout, stderr) = firecracker(&[&["--id", "a"], args].concat());
        assert_eq!(code, Some(153), "{args:?}: {stdout}{stderr}");
        let name = args[0].trim_start_matches("--");
        let refusal = format!("The argument '{name}' is not honoured: ");
        assert!(stdout.contains(&refusal), "{args:?}: {stdout}");
        assert!(stderr.contains(&format!("RefusedArgument(\"{name}\", ")), "{args:?}: {stderr}");
    }
}

#[test]
fn version_of_a_snapshot_is_printed() {
    let version = (Some(0), "v1.0.0\n".to_owned(), String::new());
    assert_eq!(firecracker(&["--snapshot-version"]), version);
    let golden =
        concat!(env!("CARGO_MANIFEST_DIR"), "/../../checkpoint/tests/golden/snapshot-v1/state");
    assert_eq!(firecracker(&["--describe-snapshot", golden]), version);
    let tmp = TestDir::new();
    let other = tmp.text("other");
    let refused = |value: &str, text: &str| {
        let (code, stdout, stderr) = firecracker(&["--describe-snapshot", &other]);
        assert_eq!(code, Some(1), "{stdout}{stderr}");
        assert!(
            stderr.starts_with(&format!("Error: PrintSnapshotDataFormat({value}(")),
            "{stderr}"
        );
        let text = format!("] When printing Snapshot Data format: {text}");
        assert!(stdout.contains(&text), "{stdout}");
    };
    refused("OpenSnapshot", "Unable to open snapshot state file: No such file or directory");
    let mut state = std::fs::read(golden).unwrap();
    state[8] += 1;
    std::fs::write(&other, state).unwrap();
    refused("SnapshotVersion", "Invalid data format version of snapshot file: ");
}

#[test]
fn instance_has_the_name_of_its_line() {
    let tmp = TestDir::new();
    let vmm = serve(&tmp, &["--id", "web-1"]);
    let instance = json!({ "id": "web-1", "state": "Not started", "vmm_version": "1.16.1",
        "app_name": "Firecracker" });
    assert_eq!(vmm.get("/"), instance);
    assert_eq!(vmm.get("/version"), json!({ "firecracker_version": "1.16.1" }));
    let tmp = TestDir::new();
    let socket = tmp.text("fc.sock");
    let command = driftline(&["firecracker", "--api-sock", &socket]);
    let vmm = ServeProcess::spawn(command, socket);
    let instance = vmm.get("/");
    assert_eq!(instance["id"], "anonymous-instance");
    assert_eq!(instance["app_name"], "Firecracker");
}

#[test]
fn socket_is_neither_replaced_nor_removed() {
    let tmp = TestDir::new();
    let mut vmm = serve(&tmp, &[]);
    let socket = vmm.socket.clone();
    let in_use = |what: &str| {
        let (code, stdout, stderr) = firecracker(&["--api-sock", &socket]);
        assert_eq!(code, Some(1), "{what}: {stdout}{stderr}");
        let text = format!(
            "Running Firecracker v1.16.1, imitated by Driftline {}\nRunWithApiError error: \
             Failed to open the API socket at: {socket}. Check that it is \
             not already used.\nFirecracker exiting with error. exit_code=1\n",
            env!("CARGO_PKG_VERSION")
        );
        assert_eq!(logged(&stdout), text, "{what}");
        let value = format!("Error: RunWithApi(FailedToBindSocket({socket:?}))\n");
        assert_eq!(stderr, value, "{what}");
    };
    in_use("live");
    vmm.get("/");
    vmm.signal(Signal::TERM);
    vmm.wait();
    assert!(UnixStream::connect(&socket).is_err());
    in_use("stale");
    std::fs::remove_file(&socket).unwrap();
    serve(&tmp, &[]).get("/");
    let (code, stdout, _) = firecracker(&["--api-sock", &tmp.text("none/fc.sock")]);
    assert_eq!(code, Some(1));
    assert!(stdout.contains("Failed to bind and run the HTTP server: "), "{stdout}");
}

#[test]
fn limits_of_body_and_metadata_are_kept() {
    let tmp = TestDir::new();
    let vmm = serve(&tmp, &["--http-api-max-payload-size", "60"]);
    let metadata = |bytes: usize| format!("\"{}\"", "x".repeat(bytes - 2));
    vmm.done("PUT", "/mmds", &metadata(60));
    let (status, _, body) = vmm.answer("PUT", "/mmds", &metadata(61));
    let text = "Request payload with size 61 is larger than the limit of 60 allowed by server.";
    assert!(status == 400 && body.contains(text), "{status}: {body}");
    drop(vmm);
    let tmp = TestDir::new();
    let vmm = serve(&tmp, &["--mmds-size-limit", "60"]);
    vmm.done("PUT", "/mmds", &metadata(60));
    let (status, _, body) = vmm.answer("PUT", "/mmds", &metadata(61));
    assert_eq!(status, 413, "{body}");
    vmm.done("PUT", "/cpu-config", &format!("{{}}{}", " ".repeat(51_198)));
    assert_eq!(vmm.answer("PUT", "/cpu-config", &format!("{{}}{}", " ".repeat(51_199))).0, 400);
}

#[test]
fn metadata_is_read_from_its_file() {
    let tmp = TestDir::new();
    let (file, socket) = (tmp.text("metadata.json"), tmp.text("fc.sock"));
    std::fs::write(&file, r#"{"a": {"b": 1}}"#).unwrap();
    let vmm = serve(&tmp, &["--metadata", &file]);
    assert_eq!(vmm.get("/mmds"), json!({ "a": { "b": 1 } }));
    drop(vmm);
    std::fs::remove_file(&socket).unwrap();
    let refused = |args: &[&str], text: &str| {
        let (code, stdout, stderr) = firecracker(&[&["--api-sock", &socket], args].concat());
        assert_eq!(code, Some(1), "{stdout}{stderr}");
        assert!(stdout.contains(text), "{stdout}");
        assert!(!std::path::Path::new(&socket).exists(), "the corrected start would be refused");
    };
    refused(&["--metadata", &tmp.text("none")], "No such file or directory");
    let long = ["--metadata", &file, "--mmds-size-limit", "4"];
    refused(&long, "MMDS limit exceeded error");
    std::fs::write(&file, "{").unwrap();
    refused(&["--metadata", &file], "EOF while parsing an object");
    refused(&["--metadata", "/dev/zero"], "it is not a regular file");
    std::fs::write(&file, vec![b' '; (1 << 20) + 1]).unwrap();
    refused(&["--metadata", &file], "it has more than 1048576 bytes");
}

#[test]
fn sigsys_has_its_exit_code_without_filters() {
    let tmp = TestDir::new();
    let mut vmm = serve(&tmp, &["--no-seccomp", "--log-path", &tmp.text("log")]);
    vmm.get("/");
    vmm.signal(Signal::SYS);
    let (status, stderr) = vmm.wait_status();
    assert_eq!(status.code(), Some(2), "{status}: {stderr}");
    let log = tmp.read("log");
    let line = format!("intercepting signal {}, code 0.", Signal::SYS.as_raw());
    assert!(log.contains(&line), "{log}");
}

#[test]
fn system_calls_are_filtered_unless_told_otherwise() {
    for (args, mode) in [(&[][..], "2"), (&["--no-seccomp"], "0")] {
        let tmp = TestDir::new();
        let vmm = serve(&tmp, args);
        vmm.get("/");
        let status = std::fs::read_to_string(format!("/proc/{}/status", vmm.pid())).unwrap();
        assert_eq!(status_field(&status, "Seccomp:"), Some(mode), "{args:?}");
    }
}

#[test]
fn start_times_of_a_jailer_are_logged() {
    let tmp = TestDir::new();
    let times =
        ["--start-time-us", "1", "--start-time-cpu-us", "2", "--parent-cpu-time-us", "5000000"];
    let log = tmp.text("log");
    let log = ["--log-path", &log, "--id", "a"];
    let mut vmm = serve(&tmp, &[&log[..], &times].concat());
    vmm.get("/");
    vmm.signal(Signal::TERM);
    vmm.wait_status();
    let log = tmp.read("log");
    let us = |end: &str| -> u64 {
        let mut lines = log.lines().filter_map(|line| line.split_once("start-up took "));
        let number = lines.find_map(|(_, figure)| figure.strip_suffix(end));
        number.and_then(|number| number.parse().ok()).unwrap_or_else(|| panic!("{log}"))
    };
    assert!(us(" us") > 0, "{log}");
    assert!(us(" us of processor time") >= 4_999_998, "{log}");
    let [server, time] = ["] API server started.", "] start-up took "].map(|text| log.find(text));
    assert!(server.is_some() && server < time, "{log}");
}

/// Ends a process, with a guest if `starts`, by `signal`. Returns the exit code, the signal by
/// which it ended, and what it said.
fn ended_by(signal: Signal, starts: bool) -> (Option<i32>, Option<i32>, String) {
    let tmp = TestDir::new();
    let mut vmm = serve(&tmp, &[]);
    vmm.get("/");
    if starts {
        configure(&vmm, &tmp, AfterPrint::Wait);
        vmm.done("PUT", "/actions", r#"{"action_type": "InstanceStart"}"#);
        await_line(&tmp);
    }
    vmm.signal(signal);
    let (status, stderr) = vmm.wait_status();
    assert!(tmp.path("fc.sock").exists(), "clients remove it");
    (status.code(), status.signal(), stderr)
}

#[test]
fn signals_end_the_process_as_firecracker() {
    let cases: &[bool] = if kvm_or_skip("signals_end_the_process_as_firecracker") {
        &[false, true]
    } else {
        &[false]
    };
    for &starts in cases {
        for signal in [Signal::TERM, Signal::INT] {
            let (code, by, stderr) = ended_by(signal, starts);
            assert_eq!((code, by), (None, Some(signal.as_raw())), "{starts}: {stderr}");
        }
        // If `nohup` has started the test, its children ignore SIGHUP, too.
        if !driftline_machine::signals::ignores_hang_up() {
            let (code, by, stderr) = ended_by(Signal::HUP, starts);
            assert_eq!((code, by), (Some(156), None), "{starts}: {stderr}");
        }
    }
}

#[test]
fn fatal_signals_have_exit_codes() {
    let has_kvm = kvm_or_skip("fatal_signals_have_exit_codes");
    let mut of_main = 0;
    for (signal, code) in [
        (Signal::BUS, 149),
        (Signal::SEGV, 150),
        (Signal::XFSZ, 151),
        (Signal::XCPU, 154),
        (Signal::ILL, 157),
        // Firecracker's code for one that no filter has raised.
        (Signal::SYS, 2),
    ] {
        for starts in [false, has_kvm] {
            let tmp = TestDir::new();
            let mut vmm = serve(&tmp, &["--id", "s-1", "--log-path", &tmp.text("log")]);
            vmm.get("/");
            if starts {
                configure(&vmm, &tmp, AfterPrint::Wait);
                vmm.done("PUT", "/actions", r#"{"action_type": "InstanceStart"}"#);
                await_line(&tmp);
            }
            vmm.signal(signal);
            let (status, stderr) = vmm.wait_status();
            assert_eq!(status.code(), Some(code), "{signal:?}: {status}: {stderr}");
            let number = signal.as_raw();
            let line = format!("] Shutting down VM after intercepting signal {number}, code 0.");
            let log = tmp.read("log");
            let logged = log.lines().find(|logged| logged.ends_with(&line));
            let logged = logged.unwrap_or_else(|| panic!("{signal:?}: {log}"));
            assert!(logged.contains(" [s-1:"), "{logged}");
            of_main += u32::from(logged.contains(" [s-1:main]"));
        }
    }
    // The main thread blocks these signals while it starts another thread, which then takes the
    // signal. That thread has the program's name until it has set its own.
    assert!(of_main > 0, "no line names the main thread");
}

#[test]
fn file_size_limit_ends_with_its_exit_code() {
    let tmp = TestDir::new();
    let (socket, log) = (tmp.text("fc.sock"), tmp.text("log"));
    let mut command = Command::new("sh");
    command.args(["-c", "ulimit -f 16; exec \"$0\" \"$@\"", env!("CARGO_BIN_EXE_driftline")]);
    command.args(["firecracker", "--api-sock", &socket, "--log-path", &log]);
    let mut vmm = ServeProcess::spawn(command, socket);
    // The log line of this request exceeds the limit.
    let body = "x".repeat(40_000);
    let mut stream = UnixStream::connect(&vmm.socket).unwrap();
    let request = format!("PUT /vsock HTTP/1.1\r\nContent-Length: 40000\r\n\r\n{body}");
    stream.write_all(request.as_bytes()).unwrap();
    let (status, stderr) = vmm.wait_status();
    assert_eq!(status.code(), Some(151), "{status}: {stderr}");
}

#[test]
fn boot_timer_logs_the_time_to_boot() {
    if !kvm_or_skip("boot_timer_logs_the_time_to_boot") {
        return;
    }
    // mov byte [0xc0000000], 123, twice; mov al, 0xfe; out 0x64, al; hlt
    let write = [0xc6, 0x05, 0, 0, 0, 0xc0, 123];
    let kernel = Elf::new(&[&write[..], &write, &[0xb0, 0xfe, 0xe6, 0x64, 0xf4]].concat()).bytes();
    for (args, lines) in [(&["--boot-timer"][..], 1), (&[], 0)] {
        let tmp = TestDir::new();
        let mut vmm = serve(&tmp, &[args, &["--log-path", &tmp.text("log")]].concat());
        configure(&vmm, &tmp, AfterPrint::Reset);
        std::fs::write(tmp.path("kernel"), &kernel).unwrap();
        let source = json!({ "kernel_image_path": tmp.text("kernel") });
        vmm.done("PUT", "/boot-source", &source.to_string());
        vmm.done("PUT", "/actions", r#"{"action_type": "InstanceStart"}"#);
        let (code, stderr) = vmm.wait();
        assert_eq!(code, Some(0), "{stderr}");
        let log = tmp.read("log");
        let mut times = log.lines().filter_map(|line| line.split_once("] Guest-boot-time = "));
        let first = times.next();
        assert_eq!(usize::from(first.is_some()) + times.count(), lines, "{log}");
        if let Some((_, time)) = first {
            let us: u64 = time.trim_start().split(' ').next().unwrap().parse().unwrap();
            assert!(us > 0 && time.ends_with(" CPU ms"), "{time}");
        }
    }
}

#[test]
fn guest_decides_the_exit_code() {
    if !kvm_or_skip("guest_decides_the_exit_code") {
        return;
    }
    for (then, code) in [(AfterPrint::Reset, 0), (AfterPrint::Crash, 1)] {
        let tmp = TestDir::new();
        let mut vmm = serve(&tmp, &[]);
        configure(&vmm, &tmp, then);
        vmm.done("PUT", "/actions", r#"{"action_type": "InstanceStart"}"#);
        let (ended, stderr) = vmm.wait();
        assert_eq!(ended, Some(code), "{stderr}");
    }
}
