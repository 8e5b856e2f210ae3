//! `driftline serve` with a guest: its start, the requests that a started guest answers, and its
//! end.

use std::io::Read;

use driftline_machine::testing::{Elf, kvm_or_skip, skip};
use rustix::process::Signal;
use serde_json::{Value, json};

use crate::common::serving::ServeProcess;
use crate::common::{TestDir, fail, open_both_ends, succeed, text, wait_for};

const START: &str = r#"{"action_type": "InstanceStart"}"#;

/// What a guest does once it has printed its command line.
#[derive(Clone, Copy)]
pub enum AfterPrint {
    /// It waits for ever.
    Wait,
    /// It asks for a reset.
    Reset,
    /// It causes a triple fault.
    Crash,
}

/// Returns a kernel that prints its command line and a line feed.
pub fn printing_kernel(then: AfterPrint) -> Vec<u8> {
    // mov esi, [ebx+24] (the command line); mov dx, 0x3f8
    let mut code = vec![0x8b, 0x73, 24, 0x66, 0xba, 0xf8, 0x03];
    // next: lodsb; test al, al; jz end; out dx, al; jmp next; end: mov al, 10; out dx, al
    code.extend([0xac, 0x84, 0xc0, 0x74, 3, 0xee, 0xeb, 0xf8, 0xb0, 10, 0xee]);
    code.extend(match then {
        // hlt; jmp $-1
        AfterPrint::Wait => [0xf4, 0xeb, 0xfd].to_vec(),
        // mov al, 0xfe; out 0x64, al; hlt
        AfterPrint::Reset => [0xb0, 0xfe, 0xe6, 0x64, 0xf4].to_vec(),
        // ud2, without an IDT
        AfterPrint::Crash => [0x0f, 0x0b].to_vec(),
    });
    Elf::new(&code).bytes()
}

/// Names a printing kernel, and a file for what it prints.
pub fn configure(vmm: &ServeProcess, tmp: &TestDir, then: AfterPrint) {
    std::fs::write(tmp.path("kernel"), printing_kernel(then)).unwrap();
    let source = json!({ "kernel_image_path": tmp.text("kernel"), "boot_args": "quiet" });
    vmm.done("PUT", "/boot-source", &source.to_string());
    let serial = json!({ "serial_out_path": tmp.text("serial") });
    vmm.done("PUT", "/serial", &serial.to_string());
    vmm.done("PUT", "/machine-config", r#"{"vcpu_count": 1, "mem_size_mib": 32}"#);
}

fn drive(tmp: &TestDir, id: &str, more: Value) -> String {
    let path = tmp.path(id);
    std::fs::File::create(&path).unwrap().set_len(1 << 20).unwrap();
    let mut drive = json!({ "drive_id": id, "is_root_device": false, "path_on_host": path });
    drive.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    drive.to_string()
}

pub fn await_line(tmp: &TestDir) -> String {
    wait_for("the guest's line", || Some(tmp.read("serial")).filter(|text| text.ends_with('\n')))
}

#[test]
fn guest_boots_from_files_opened_when_named() {
    if !kvm_or_skip("guest_boots_from_files_opened_when_named") {
        return;
    }
    let tmp = TestDir::new();
    let mut vmm = ServeProcess::start(&tmp, &["--id", "web-1"]);
    configure(&vmm, &tmp, AfterPrint::Wait);
    let data = drive(&tmp, "data", json!({ "cache_type": "Writeback" }));
    vmm.done("PUT", "/drives/data", &data);
    let root = json!({ "is_root_device": true, "is_read_only": true, "io_engine": "Sync" });
    vmm.done("PUT", "/drives/root", &drive(&tmp, "root", root));
    vmm.done("PUT", "/entropy", "{}");
    let before = vmm.get("/vm/config");
    for name in ["kernel", "root", "data"] {
        std::fs::remove_file(tmp.path(name)).unwrap();
    }
    vmm.done("PUT", "/actions", START);
    // The answer says that the guest runs.
    assert_eq!(vmm.get("/")["state"], "Running");
    let devices = "virtio_mmio.device=4K@0xd0000000:5 virtio_mmio.device=4K@0xd0001000:6 \
                   virtio_mmio.device=4K@0xd0002000:7";
    assert_eq!(await_line(&tmp), format!("quiet pci=off root=/dev/vda ro {devices}\n"));
    let instance = vmm.get("/");
    assert_eq!((&instance["id"], &instance["app_name"]), (&json!("web-1"), &json!("Driftline")));
    assert_eq!(vmm.get("/vm/config"), before);
    assert_eq!(vmm.get("/machine-config"), before["machine-config"]);
    assert_eq!(vmm.get("/version")["firecracker_version"], instance["vmm_version"]);
    succeed(&["stop", "--wait", "--api-sock", &vmm.socket]);
    let (code, stderr) = vmm.wait();
    assert_eq!(code, Some(0), "{stderr}");
    assert!(stderr.contains("the guest was stopped: stopped over the API"), "{stderr}");
}

#[test]
fn started_guest_is_paused_and_resumed() {
    if !kvm_or_skip("started_guest_is_paused_and_resumed") {
        return;
    }
    let tmp = TestDir::new();
    let vmm = ServeProcess::start(&tmp, &[]);
    configure(&vmm, &tmp, AfterPrint::Wait);
    vmm.done("PUT", "/balloon", r#"{"amount_mib": 0, "deflate_on_oom": true}"#);
    vmm.done("PUT", "/actions", START);
    for (state, shown) in
        [("Paused", "Paused"), ("Paused", "Paused"), ("Resumed", "Running"), ("Resumed", "Running")]
    {
        vmm.done("PATCH", "/vm", &json!({ "state": state }).to_string());
        assert_eq!(vmm.get("/")["state"], shown);
    }
    vmm.done("PATCH", "/balloon", r#"{"amount_mib": 3}"#);
    assert_eq!(vmm.get("/balloon")["amount_mib"], 3);
    assert_eq!(vmm.get("/vm/config")["balloon"]["amount_mib"], 3);
    let refusal = vmm.refusal("PATCH", "/balloon", r#"{"amount_mib": 33}"#);
    let text = "Balloon update error: Balloon: Requested memory should be less than 33MiB";
    assert_eq!(refusal, text);
    vmm.done("PUT", "/actions", r#"{"action_type": "FlushMetrics"}"#);
    // Driftline's own requests reach the same guest.
    let info = succeed(&["info", "--json", "--api-sock", &vmm.socket]);
    let info: Value = serde_json::from_str(&info).unwrap();
    assert_eq!((&info["state"], &info["backend"]), (&json!("running"), &json!("kvm")));
    let store = tmp.text("store");
    succeed(&["checkpoint", "--store", &store, "--api-sock", &vmm.socket]);
}

#[test]
fn started_guest_refuses_in_firecrackers_words() {
    if !kvm_or_skip("started_guest_refuses_in_firecrackers_words") {
        return;
    }
    let tmp = TestDir::new();
    let vmm = ServeProcess::start(&tmp, &[]);
    configure(&vmm, &tmp, AfterPrint::Wait);
    vmm.done("PUT", "/actions", START);
    let after = "The requested operation is not supported after starting the microVM.";
    let no_metadata = "MMDS error: The MMDS data store is not initialized.";
    for (method, path, body, text) in [
        ("PUT", "/actions", START, after),
        ("PUT", "/boot-source", r#"{"kernel_image_path": "k"}"#, after),
        ("PUT", "/machine-config", r#"{"vcpu_count": 1, "mem_size_mib": 8}"#, after),
        ("PATCH", "/machine-config", r#"{"vcpu_count": 1}"#, after),
        ("PUT", "/drives/a", r#"{"drive_id": "a", "is_root_device": false}"#, "PCI is not enabled"),
        ("GET", "/mmds", "", no_metadata),
        ("PUT", "/mmds", "{}", no_metadata),
        (
            "PUT",
            "/snapshot/create",
            r#"{"snapshot_path": "s", "mem_file_path": "m"}"#,
            "Create snapshot error: Cannot save the microVM state: Operation not allowed: \
             save/restore unavailable while running",
        ),
    ] {
        assert_eq!(vmm.refusal(method, path, body), text, "{method} {path} {body}");
    }
    assert_eq!(vmm.get("/")["state"], "Running");
}

#[test]
fn started_guest_without_balloon_refuses_its_requests() {
    if !kvm_or_skip("started_guest_without_balloon_refuses_its_requests") {
        return;
    }
    let tmp = TestDir::new();
    let vmm = ServeProcess::start(&tmp, &[]);
    configure(&vmm, &tmp, AfterPrint::Wait);
    vmm.done("PUT", "/actions", START);
    let none = "Failed perform action on device: Device not found";
    let interval = r#"{"stats_polling_interval_s": 1}"#;
    for (method, path, body, prefix) in [
        ("GET", "/balloon", "", "Internal VMM error"),
        ("GET", "/balloon/statistics", "", "Internal VMM error"),
        ("PATCH", "/balloon", r#"{"amount_mib": 1}"#, "Balloon update error"),
        ("PATCH", "/balloon/statistics", interval, "Balloon update error"),
        ("PATCH", "/balloon/hinting/start", "", "Balloon update error"),
        ("PATCH", "/balloon/hinting/stop", "", "Balloon update error"),
        ("GET", "/balloon/hinting/status", "", "Balloon update error"),
    ] {
        assert_eq!(vmm.refusal(method, path, body), format!("{prefix}: {none}"), "{method} {path}");
    }
}

/// Starts a guest without a driver for its balloon, which has these fields.
fn with_balloon(tmp: &TestDir, more: &str) -> ServeProcess {
    let vmm = ServeProcess::start(tmp, &[]);
    configure(&vmm, tmp, AfterPrint::Wait);
    let balloon = format!(r#"{{"amount_mib": 2, "deflate_on_oom": false{more}}}"#);
    vmm.done("PUT", "/balloon", &balloon);
    vmm.done("PUT", "/actions", START);
    vmm
}

#[test]
fn statistics_stay_as_configured() {
    if !kvm_or_skip("statistics_stay_as_configured") {
        return;
    }
    let interval = |s: u16| json!({ "stats_polling_interval_s": s }).to_string();
    let path = "/balloon/statistics";
    let kept = "Balloon update error: Balloon: Statistics cannot be enabled/disabled after \
         activation.";
    let tmp = TestDir::new();
    let vmm = with_balloon(&tmp, "");
    vmm.done("PATCH", path, &interval(0));
    assert_eq!(vmm.refusal("PATCH", path, &interval(1)), kept);
    let off = "Internal VMM error: Balloon: Received stats query when stats are disabled.";
    assert_eq!(vmm.refusal("GET", path, ""), off);
    let tmp = TestDir::new();
    let vmm = with_balloon(&tmp, r#", "stats_polling_interval_s": 5"#);
    let sizes = json!({ "target_pages": 512, "actual_pages": 0, "target_mib": 2, "actual_mib": 0 });
    assert_eq!(vmm.get(path), sizes, "the guest has said nothing");
    assert_eq!(vmm.refusal("PATCH", path, &interval(0)), kept);
    vmm.done("PATCH", path, &interval(9));
    assert_eq!(vmm.get("/balloon")["stats_polling_interval_s"], 9);
    assert_eq!(vmm.get("/vm/config")["balloon"]["stats_polling_interval_s"], 9);
}

#[test]
fn hinting_needs_its_configuration_and_a_driver() {
    if !kvm_or_skip("hinting_needs_its_configuration_and_a_driver") {
        return;
    }
    let requests = [
        ("PATCH", "/balloon/hinting/start"),
        ("PATCH", "/balloon/hinting/stop"),
        ("GET", "/balloon/hinting/status"),
    ];
    let tmp = TestDir::new();
    let vmm = with_balloon(&tmp, "");
    for (method, path) in requests {
        let off = "Balloon update error: Balloon: Attempting to use hinting when not enabled";
        assert_eq!(vmm.refusal(method, path, ""), off, "{method} {path}");
    }
    let tmp = TestDir::new();
    let vmm = with_balloon(&tmp, r#", "free_page_hinting": true"#);
    assert_eq!(vmm.get("/balloon")["free_page_hinting"], true);
    for (method, path) in &requests[..2] {
        let no_driver = "Balloon update error: Balloon: Device not activated yet.";
        assert_eq!(vmm.refusal(method, path, ""), no_driver, "{method} {path}");
    }
    assert_eq!(vmm.get(requests[2].1), json!({ "host_cmd": 0, "guest_cmd": null }));
}

#[test]
fn failed_start_is_retried_with_another_kernel() {
    if !kvm_or_skip("failed_start_is_retried_with_another_kernel") {
        return;
    }
    let tmp = TestDir::new();
    let vmm = ServeProcess::start(&tmp, &[]);
    std::fs::write(tmp.path("bad"), [0; 4096]).unwrap();
    vmm.done("PUT", "/boot-source", &json!({ "kernel_image_path": tmp.text("bad") }).to_string());
    let limited = json!({ "rate_limiter": { "ops": { "size": 9, "refill_time": 1 } } });
    vmm.done("PUT", "/drives/a", &drive(&tmp, "a", limited));
    let refusal = vmm.refusal("PUT", "/actions", START);
    let text = format!("Start microvm error: kernel \"{}\" ", tmp.text("bad"));
    assert!(refusal.starts_with(&text), "{refusal}");
    assert_eq!(vmm.get("/")["state"], "Not started");
    configure(&vmm, &tmp, AfterPrint::Wait);
    vmm.done("PUT", "/actions", START);
    let line = "quiet pci=off virtio_mmio.device=4K@0xd0000000:5\n";
    assert_eq!(await_line(&tmp), line);
}

#[test]
fn failed_start_is_retried_with_another_drive() {
    if !kvm_or_skip("failed_start_is_retried_with_another_drive") {
        return;
    }
    let (tmp, own) = (TestDir::new(), TestDir::new());
    let holder = ServeProcess::start(&tmp, &[]);
    configure(&holder, &tmp, AfterPrint::Wait);
    let held = drive(&tmp, "a", json!({}));
    holder.done("PUT", "/drives/a", &held);
    holder.done("PUT", "/actions", START);
    let vmm = ServeProcess::start(&own, &[]);
    configure(&vmm, &own, AfterPrint::Wait);
    vmm.done("PUT", "/drives/a", &held);
    // The first failure comes after the sandbox has closed.
    for _ in 0..2 {
        let refusal = vmm.refusal("PUT", "/actions", START);
        assert!(refusal.contains("in use"), "{refusal}");
        assert_eq!(vmm.get("/")["state"], "Not started");
    }
    vmm.done("PUT", "/drives/a", &drive(&own, "a", json!({})));
    vmm.done("PUT", "/actions", START);
    await_line(&own);
}

#[test]
fn sandbox_closes_with_the_start() {
    if !kvm_or_skip("sandbox_closes_with_the_start") {
        return;
    }
    // Part of the system, which a process with a guest may not write to.
    let Ok(system) = tempfile::tempdir_in("/run") else {
        return skip("sandbox_closes_with_the_start", "this user may not write to /run");
    };
    let tmp = TestDir::new();
    let vmm = ServeProcess::start(&tmp, &[]);
    configure(&vmm, &tmp, AfterPrint::Wait);
    let image = system.path().join("image");
    std::fs::File::create(&image).unwrap().set_len(1 << 20).unwrap();
    let body = json!({ "drive_id": "a", "is_root_device": false, "path_on_host": image });
    vmm.done("PUT", "/drives/a", &body.to_string());
    vmm.done("PUT", "/actions", START);
    await_line(&tmp);
    let store = system.path().join("store");
    let checkpoint = ["checkpoint", "--store", store.to_str().unwrap(), "--api-sock", &vmm.socket];
    let message = fail(4, &checkpoint);
    assert!(message.contains("sandbox does not allow writes to"), "{message}");
    assert!(!store.exists());
}

#[test]
fn process_ends_with_its_configured_guest() {
    if !kvm_or_skip("process_ends_with_its_configured_guest") {
        return;
    }
    for (then, code, says) in [
        (AfterPrint::Reset, 0, "the guest asked for a reset"),
        (AfterPrint::Crash, 1, "the guest crashed: "),
    ] {
        let tmp = TestDir::new();
        let mut vmm = ServeProcess::start(&tmp, &[]);
        configure(&vmm, &tmp, then);
        vmm.done("PUT", "/actions", START);
        let (ended, stderr) = vmm.wait();
        assert_eq!(ended, Some(code), "{stderr}");
        assert!(stderr.contains(says), "{stderr}");
        assert_eq!(tmp.read("serial"), "quiet pci=off\n");
    }
}

/// Returns a kernel that prints the next four bytes from its keyboard and then asks for a reset.
fn listening_kernel() -> Vec<u8> {
    // mov ecx, 4; next: in al, 0x64; test al, 1; jz next; in al, 0x60
    let mut code = vec![0xb9, 4, 0, 0, 0, 0xe4, 0x64, 0xa8, 1, 0x74, 0xfa, 0xe4, 0x60];
    // mov dx, 0x3f8; out dx, al; loop next; mov al, 0xfe; out 0x64, al; hlt
    code.extend([0x66, 0xba, 0xf8, 0x03, 0xee, 0xe2, 0xf1, 0xb0, 0xfe, 0xe6, 0x64, 0xf4]);
    Elf::new(&code).bytes()
}

#[test]
fn keyboard_tells_the_guest_to_shut_down() {
    const CTRL_ALT_DEL: &str = r#"{"action_type": "SendCtrlAltDel"}"#;
    if !kvm_or_skip("keyboard_tells_the_guest_to_shut_down") {
        return;
    }
    let tmp = TestDir::new();
    let mut vmm = ServeProcess::start(&tmp, &[]);
    configure(&vmm, &tmp, AfterPrint::Wait);
    std::fs::write(tmp.path("kernel"), listening_kernel()).unwrap();
    let source = json!({ "kernel_image_path": tmp.text("kernel") });
    vmm.done("PUT", "/boot-source", &source.to_string());
    vmm.done("PUT", "/actions", START);
    vmm.done("PATCH", "/vm", r#"{"state": "Paused"}"#);
    for _ in 0..4 {
        vmm.done("PUT", "/actions", CTRL_ALT_DEL);
    }
    let full = "Internal VMM error: I8042 error: i8042 internal buffer full.";
    assert_eq!(vmm.refusal("PUT", "/actions", CTRL_ALT_DEL), full);
    vmm.done("PATCH", "/vm", r#"{"state": "Resumed"}"#);
    assert_eq!(vmm.wait().0, Some(0));
    assert_eq!(std::fs::read(tmp.path("serial")).unwrap(), [0x14, 0x11, 0xe0, 0x71]);
}

#[test]
fn serial_output_beyond_its_limit_is_dropped() {
    if !kvm_or_skip("serial_output_beyond_its_limit_is_dropped") {
        return;
    }
    let tmp = TestDir::new();
    let mut vmm = ServeProcess::start(&tmp, &[]);
    configure(&vmm, &tmp, AfterPrint::Reset);
    let bucket = json!({ "size": 3, "one_time_burst": 2, "refill_time": 1_000_000_000 });
    let serial = json!({ "serial_out_path": tmp.text("serial"), "rate_limiter": bucket });
    vmm.done("PUT", "/serial", &serial.to_string());
    vmm.done("PUT", "/actions", START);
    assert_eq!(vmm.wait().0, Some(0));
    assert_eq!(tmp.read("serial"), "quiet");
}

#[test]
fn signal_ends_a_configured_guest() {
    if !kvm_or_skip("signal_ends_a_configured_guest") {
        return;
    }
    let tmp = TestDir::new();
    let mut vmm = ServeProcess::start(&tmp, &[]);
    configure(&vmm, &tmp, AfterPrint::Wait);
    // Its output goes to a FIFO that has no reader before the guest has printed.
    let fifo = tmp.fifo("fifo");
    vmm.done("PUT", "/serial", &json!({ "serial_out_path": fifo }).to_string());
    vmm.done("PUT", "/actions", START);
    let mut line = Vec::new();
    wait_for("the guest's line", || {
        let _ = open_both_ends(&fifo).read_to_end(&mut line);
        line.ends_with(b"\n").then_some(())
    });
    assert!(text(&line).starts_with("quiet "), "{line:?}");
    vmm.signal(Signal::TERM);
    let (code, stderr) = vmm.wait();
    assert_eq!(code, Some(0), "{stderr}");
    assert!(stderr.contains("the guest was stopped: interrupted by SIGTERM"), "{stderr}");
}
