//! `--config-file`: a guest that is configured by a file and started immediately.

use std::process::{Child, Stdio};

use driftline_machine::testing::kvm_or_skip;
use serde_json::{Value, json};

use crate::common::{TestDir, text, wait_for};
use crate::firecracker::{command, serve};
use crate::serve_guest::{AfterPrint, printing_kernel};

/// Writes a configuration of a guest that prints its command line to stdout, with `more` parts.
fn write_config(tmp: &TestDir, then: AfterPrint, more: Value) -> String {
    std::fs::write(tmp.path("kernel"), printing_kernel(then)).unwrap();
    let mut config = json!({
        "boot-source": { "kernel_image_path": tmp.path("kernel"), "boot_args": "quiet" },
        "drives": [],
        "machine-config": { "vcpu_count": 1, "mem_size_mib": 32 },
        "logger": { "log_path": tmp.path("log") },
        "metrics": { "metrics_path": tmp.path("metrics") },
    });
    config.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    let path = tmp.path("vm.json");
    std::fs::write(&path, config.to_string()).unwrap();
    path.to_str().unwrap().to_owned()
}

fn spawn(args: &[&str]) -> Child {
    command(args).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
}

#[test]
fn file_starts_a_guest_without_api() {
    if !kvm_or_skip("file_starts_a_guest_without_api") {
        return;
    }
    let tmp = TestDir::new();
    let drive = tmp.path("drive");
    std::fs::write(&drive, [0; 4096]).unwrap();
    let drives = json!([{ "drive_id": "root", "is_root_device": true, "path_on_host": drive }]);
    let config = write_config(&tmp, AfterPrint::Reset, json!({ "drives": drives }));
    let out = spawn(&["--no-api", "--config-file", &config, "--id", "f-1"]);
    let out = out.wait_with_output().unwrap();
    assert_eq!((out.status.code(), text(&out.stderr)), (Some(0), String::new()));
    let stdout = text(&out.stdout);
    let line = "quiet pci=off root=/dev/vda rw virtio_mmio.device=4K@0xd0000000:5\n";
    assert!(stdout.ends_with(line), "{stdout}");
    let log = tmp.read("log");
    let started = "Successfully started microvm that was configured from one single json";
    assert_eq!(log.matches(started).count(), 1, "{log}");
    assert!(!log.contains("API socket"), "{log}");
    let metrics = tmp.read("metrics");
    assert_eq!(metrics.lines().count(), 2, "{metrics}");
}

#[test]
fn file_starts_a_guest_that_the_api_shows() {
    if !kvm_or_skip("file_starts_a_guest_that_the_api_shows") {
        return;
    }
    let tmp = TestDir::new();
    let balloon = json!({ "amount_mib": 1, "deflate_on_oom": true });
    let config = write_config(&tmp, AfterPrint::Wait, json!({ "balloon": balloon }));
    let vmm = serve(&tmp, &["--config-file", &config]);
    wait_for("the guest", || (vmm.get("/")["state"] == "Running").then_some(()));
    let shown = vmm.get("/vm/config");
    assert_eq!(shown["balloon"]["amount_mib"], 1);
    assert_eq!(shown["boot-source"]["boot_args"], "quiet");
    let after = "The requested operation is not supported after starting the microVM.";
    assert_eq!(vmm.refusal("PUT", "/logger", "{}"), after);
    vmm.done("PUT", "/actions", r#"{"action_type": "FlushMetrics"}"#);
}

#[test]
fn refused_file_is_reported_as_firecracker_does() {
    let tmp = TestDir::new();
    let without_api = "RunWithoutApiError error: Failed to build MicroVM from Json: ";
    let with_api = "RunWithApiError error: Failed to build MicroVM from Json: ";
    let socket = tmp.text("fc.sock");
    let refused = |more: Value, why: &str| {
        let config = write_config(&tmp, AfterPrint::Wait, more);
        for (args, run) in [(&["--no-api"][..], without_api), (&["--api-sock", &socket], with_api)]
        {
            let unparsed = ["Invalid JSON", "File operation"];
            let is_parsed = !unparsed.iter().any(|text| why.contains(text));
            let _ = std::fs::remove_file(&socket);
            std::fs::write(tmp.path("log"), "").unwrap();
            let out = command(&[args, &["--config-file", &config]].concat()).output().unwrap();
            let (stdout, stderr) = (text(&out.stdout), text(&out.stderr));
            assert_eq!(out.status.code(), Some(1), "{stdout}{stderr}");
            let log = stdout + &tmp.read("log");
            assert!(log.contains(&format!("] {run}{why}")), "{why}: {log}");
            let name = match args {
                ["--no-api"] => "Error: RunWithoutApiError(BuildMicroVMFromJson(",
                _ => "Error: RunWithApi(BuildFromJson(",
            };
            assert!(stderr.starts_with(name), "{stderr}");
            let has_socket = std::path::Path::new(&socket).exists();
            assert_eq!(has_socket, is_parsed && args != ["--no-api"], "{why}");
            assert!(log.ends_with("Firecracker exiting with error. exit_code=1\n"), "{log}");
        }
    };
    let from_file = "Configuration for VMM from one single json failed: ";
    let failed = |why: &str| format!("{from_file}{why}");
    refused(json!({ "drives": 1 }), &failed("Invalid JSON: invalid type: integer `1`"));
    refused(json!({ "logger": { "level": "loud" } }), &failed("Invalid JSON: Invalid LevelFilter"));
    refused(
        json!({ "machine-config": { "vcpu_count": 0, "mem_size_mib": 32 } }),
        &failed("VM config error: The number of vCPUs must be greater than 0"),
    );
    refused(
        json!({ "boot-source": { "kernel_image_path": tmp.path("none") } }),
        &failed("Boot source error: The kernel file cannot be opened: No such file or directory"),
    );
    refused(
        json!({ "pmem": [{ "id": "p", "path_on_host": "p" }] }),
        &failed("The requested operation is not supported: Driftline has no pmem devices."),
    );
    refused(
        json!({ "vsock": { "guest_cid": 2, "uds_path": "v" } }),
        &failed("Vsock device error: \"2\" is not a valid context ID of a guest: it is a number"),
    );
    let long = json!({ "kernel_image_path": tmp.path("kernel"), "boot_args": "x".repeat(2040) });
    refused(
        json!({ "boot-source": long }),
        "Could not Start MicroVM from one single json: Kernel cmdline error: ",
    );
    for (path, why) in
        [(tmp.text("none").as_str(), "No such file"), ("/dev/zero", "it is not a regular file")]
    {
        let out = command(&["--no-api", "--config-file", path]).output().unwrap();
        assert_eq!(out.status.code(), Some(1));
        assert!(text(&out.stdout).contains(&format!("cannot be read: {why}")), "{why}");
    }
    let template = json!({ "cpu-config": "/dev/zero" });
    refused(template, &failed("File operation error: it is not a regular file"));
}

#[test]
fn signal_ends_a_guest_without_api() {
    use std::os::unix::process::ExitStatusExt;

    use rustix::process::{Pid, Signal, kill_process};
    if !kvm_or_skip("signal_ends_a_guest_without_api") {
        return;
    }
    let tmp = TestDir::new();
    let config = write_config(&tmp, AfterPrint::Wait, json!({}));
    let mut child = spawn(&["--no-api", "--config-file", &config]);
    wait_for("the first metrics", || {
        std::fs::read(tmp.path("metrics")).ok().filter(|lines| lines.ends_with(b"\n"))
    });
    kill_process(Pid::from_child(&child), Signal::TERM).unwrap();
    let status = wait_for("the end", || child.try_wait().unwrap());
    assert_eq!(status.signal(), Some(Signal::TERM.as_raw()));
    assert_eq!(tmp.read("metrics").lines().count(), 2, "one at the end");
}
