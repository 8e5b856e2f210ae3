//! Taps and the vsock's socket of a guest that a client of Firecracker's API configures, and
//! changes of its devices while it runs.

use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;

use driftline_machine::testing::{TestTap, kvm_or_skip, skip};
use rustix::process::Signal;
use serde_json::{Value, json};

use crate::common::serving::ServeProcess;
use crate::common::{TestDir, fail, has_landlock, output, succeed, wait_for};
use crate::serve_guest::{AfterPrint, await_line, configure};

const START: &str = r#"{"action_type": "InstanceStart"}"#;

fn interface(id: &str, tap: &str) -> String {
    json!({ "iface_id": id, "host_dev_name": tap }).to_string()
}

fn vsock(path: &str) -> String {
    json!({ "guest_cid": 7, "uds_path": path }).to_string()
}

/// Returns a tap, or reports why `test` has none.
fn tap_or_skip(test: &str, name: &str) -> Option<TestTap> {
    TestTap::new(name).inspect_err(|e| skip(test, &e.to_string())).ok()
}

fn tap_refusal(cause: &str, tap: &str) -> String {
    format!(
        "Network config error: Could not create the network device: Open tap device failed: Error \
         while creating ifreq structure: {cause}. Invalid TUN/TAP Backend provided by {tap}. Check \
         our documentation on setting up the network devices."
    )
}

#[test]
fn unusable_tap_is_refused_when_named() {
    let tmp = TestDir::new();
    let vmm = ServeProcess::start(&tmp, &[]);
    let put = |tap: &str| vmm.refusal("PUT", "/network-interfaces/a", &interface("a", tap));
    assert_eq!(put("dl-none"), tap_refusal("No such device (os error 19)", "dl-none"));
    assert_eq!(
        put("sixteen-letters-"),
        "Network config error: Could not create the network device: Open tap device failed: \
         Invalid interface name"
    );
    assert_eq!(vmm.get("/vm/config")["network-interfaces"], json!([]));
}

#[test]
fn tap_belongs_to_one_interface_at_once() {
    let test = "tap_belongs_to_one_interface_at_once";
    let Some(tap) = tap_or_skip(test, "s0") else { return };
    let Some(second) = tap_or_skip(test, "s1") else { return };
    let (tmp, other) = (TestDir::new(), TestDir::new());
    let (vmm, other) = (ServeProcess::start(&tmp, &[]), ServeProcess::start(&other, &[]));
    let busy = tap_refusal("Device or resource busy (os error 16)", &tap.0);
    vmm.done("PUT", "/network-interfaces/a", &interface("a", &tap.0));
    assert_eq!(vmm.refusal("PUT", "/network-interfaces/b", &interface("b", &tap.0)), busy);
    assert_eq!(other.refusal("PUT", "/network-interfaces/a", &interface("a", &tap.0)), busy);
    // The same tap again, and then another one, which releases the first.
    vmm.done("PUT", "/network-interfaces/a", &interface("a", &tap.0));
    vmm.done("PUT", "/network-interfaces/a", &interface("a", &second.0));
    other.done("PUT", "/network-interfaces/a", &interface("a", &tap.0));
}

#[test]
fn vsock_path_must_be_free() {
    const IN_USE: &str = "Vsock config error: Cannot create backend for vsock device: Error \
                          binding to the host-side Unix socket: Address already in use (os error \
                          98)";
    let tmp = TestDir::new();
    let mut vmm = ServeProcess::start(&tmp, &[]);
    std::fs::write(tmp.path("file"), "").unwrap();
    drop(UnixListener::bind(tmp.path("stale")).unwrap());
    for name in ["file", "stale"] {
        assert_eq!(vmm.refusal("PUT", "/vsock", &vsock(&tmp.text(name))), IN_USE);
        assert!(tmp.path(name).exists());
    }
    let nowhere = vmm.refusal("PUT", "/vsock", &vsock(&tmp.text("no/v")));
    assert!(nowhere.ends_with("Unix socket: No such file or directory (os error 2)"), "{nowhere}");
    assert_eq!(vmm.get("/vm/config")["vsock"], Value::Null);
    for name in ["v", "v", "other"] {
        vmm.done("PUT", "/vsock", &vsock(&tmp.text(name)));
        assert!(UnixStream::connect(tmp.path(name)).is_ok());
    }
    assert!(!tmp.path("v").exists(), "another socket has replaced it");
    vmm.signal(Signal::TERM);
    vmm.wait();
    assert!(tmp.path("other").exists());
}

/// Configures a guest with a tap, a vsock and a drive, which has the interface's name.
fn configure_devices(vmm: &ServeProcess, tmp: &TestDir, tap: &TestTap) {
    configure(vmm, tmp, AfterPrint::Wait);
    let net = json!({ "iface_id": "1", "host_dev_name": tap.0, "guest_mac": "06:00:00:00:00:01",
        "rx_rate_limiter": { "ops": { "size": 10, "refill_time": 100 } } });
    vmm.done("PUT", "/network-interfaces/1", &net.to_string());
    vmm.done("PUT", "/vsock", &vsock(&tmp.text("v")));
    put_drive(vmm, tmp);
}

fn put_drive(vmm: &ServeProcess, tmp: &TestDir) {
    let path = tmp.path("disk");
    std::fs::File::create(&path).unwrap().set_len(1 << 20).unwrap();
    let drive = json!({ "drive_id": "1", "is_root_device": false, "path_on_host": path });
    vmm.done("PUT", "/drives/1", &drive.to_string());
}

#[test]
fn guest_gets_the_tap_and_the_socket() {
    let test = "guest_gets_the_tap_and_the_socket";
    if !kvm_or_skip(test) {
        return;
    }
    let Some(tap) = tap_or_skip(test, "s2") else { return };
    let tmp = TestDir::new();
    let mut vmm = ServeProcess::start(&tmp, &[]);
    configure_devices(&vmm, &tmp, &tap);
    let before = vmm.get("/vm/config");
    // The tap that is attached to is used, whatever has its name.
    let renamed = renamed(tap);
    let imposter = TestTap::new("s2").unwrap();
    vmm.done("PUT", "/actions", START);
    await_line(&tmp);
    assert_eq!(vmm.get("/vm/config"), before);
    assert!(has_carrier(&renamed) && !has_carrier(&imposter));
    let info = succeed(&["info", "--json", "--api-sock", &vmm.socket]);
    assert!(info.contains("\"net-1\""), "{info}");
    assert!(UnixStream::connect(tmp.path("v")).is_ok());
    vmm.signal(Signal::TERM);
    vmm.wait();
    assert!(tmp.path("v").exists());
    assert!(!has_carrier(&renamed));
}

fn ip(args: &[&str]) -> String {
    let out = std::process::Command::new("ip").args(args).output().unwrap();
    assert!(out.status.success(), "{out:?}");
    String::from_utf8(out.stdout).unwrap()
}

/// Gives the tap another name.
fn renamed(mut tap: TestTap) -> TestTap {
    let name = format!("{}x", tap.0);
    ip(&["link", "set", &tap.0, "name", &name]);
    tap.0 = name;
    tap
}

/// Returns whether a process is attached to the tap.
fn has_carrier(tap: &TestTap) -> bool {
    ip(&["link", "set", &tap.0, "up"]);
    ip(&["link", "show", &tap.0]).contains("LOWER_UP")
}

#[test]
fn changed_limits_of_a_started_guest_are_shown() {
    let test = "changed_limits_of_a_started_guest_are_shown";
    if !kvm_or_skip(test) {
        return;
    }
    let Some(tap) = tap_or_skip(test, "s3") else { return };
    let tmp = TestDir::new();
    let vmm = ServeProcess::start(&tmp, &[]);
    configure_devices(&vmm, &tmp, &tap);
    vmm.done("PUT", "/actions", START);
    let bucket = |size| json!({ "size": size, "one_time_burst": null, "refill_time": 100 });
    let limits = |bandwidth, ops| json!({ "bandwidth": bandwidth, "ops": ops });
    let shown = || {
        let mut config = vmm.get("/vm/config");
        let net = &mut config["network-interfaces"][0];
        let limits = [net["rx_rate_limiter"].take(), net["tx_rate_limiter"].take()];
        (limits, config["drives"][0]["rate_limiter"].take())
    };
    let unchanged = limits(Value::Null, bucket(10));
    assert_eq!(shown(), ([unchanged.clone(), Value::Null], Value::Null));
    let patch = |body: Value| vmm.done("PATCH", "/network-interfaces/1", &body.to_string());
    patch(json!({ "iface_id": "1" }));
    patch(json!({ "iface_id": "1", "tx_rate_limiter": { "bandwidth": bucket(7) } }));
    assert_eq!(shown().0, [unchanged, limits(bucket(7), Value::Null)]);
    patch(json!({ "iface_id": "1", "rx_rate_limiter": { "ops": bucket(0),
        "bandwidth": { "size": 8, "one_time_burst": 9, "refill_time": 100 } } }));
    let burst = json!({ "size": 8, "one_time_burst": 9, "refill_time": 100 });
    assert_eq!(shown().0[0], limits(burst, Value::Null));
    let patch = json!({ "drive_id": "1", "rate_limiter": { "ops": bucket(5) } });
    // A paused guest's, too.
    vmm.done("PATCH", "/vm", r#"{"state": "Paused"}"#);
    vmm.done("PATCH", "/drives/1", &patch.to_string());
    assert_eq!(shown().1, limits(Value::Null, bucket(5)));
    vmm.done("PATCH", "/vm", r#"{"state": "Resumed"}"#);
    for (path, body, text) in [
        (
            "/network-interfaces/x",
            r#"{"iface_id": "x"}"#,
            "Network config error: Unable to update the net device: Failed perform action on \
             device: Device not found",
        ),
        (
            "/drives/x",
            r#"{"drive_id": "x"}"#,
            "Drive config error: Unable to patch the block device: Failed perform action on \
             device: Device not found Please verify the request arguments.",
        ),
        (
            "/drives/1",
            r#"{"drive_id": "1"}"#,
            "Drive config error: Unable to patch the block device: Block: Running method expected \
             different backend. Please verify the request arguments.",
        ),
    ] {
        assert_eq!(vmm.refusal("PATCH", path, body), text);
    }
}

/// Returns a process whose guest runs with a drive named `1`, or reports why `test` has none.
fn guest_with_drive(test: &str, tmp: &TestDir) -> Option<ServeProcess> {
    if !kvm_or_skip(test) {
        return None;
    }
    let vmm = ServeProcess::start(tmp, &[]);
    configure(&vmm, tmp, AfterPrint::Wait);
    put_drive(&vmm, tmp);
    vmm.done("PUT", "/actions", START);
    Some(vmm)
}

fn new_file(path: &str) -> String {
    json!({ "drive_id": "1", "path_on_host": path }).to_string()
}

const UNPATCHED: &str = "Drive config error: Unable to patch the block device: ";

/// Returns the files that a process has open.
fn open_files(vmm: &ServeProcess) -> Vec<PathBuf> {
    let fds = std::fs::read_dir(format!("/proc/{}/fd", vmm.pid())).unwrap().flatten();
    fds.filter_map(|fd| std::fs::read_link(fd.path()).ok()).collect()
}

#[test]
fn drive_of_a_started_guest_gets_another_file() {
    let tmp = TestDir::new();
    let test = "drive_of_a_started_guest_gets_another_file";
    let Some(vmm) = guest_with_drive(test, &tmp) else { return };
    let store = tmp.text("store");
    succeed(&["checkpoint", "--store", &store, "--api-sock", &vmm.socket]);
    std::fs::File::create(tmp.path("new")).unwrap().set_len(3 << 20).unwrap();
    let missing = tmp.text("missing");
    assert_eq!(
        vmm.refusal("PATCH", "/drives/1", &new_file(&missing)),
        format!(
            "{UNPATCHED}Block: Virtio backend error: Error manipulating the backing file: No such \
             file or directory (os error 2) {missing} Please verify the request arguments."
        )
    );
    assert_eq!(vmm.get("/vm/config")["drives"][0]["path_on_host"], tmp.text("disk"));
    assert!(open_files(&vmm).contains(&tmp.path("disk")));
    vmm.done("PATCH", "/drives/1", &new_file(&tmp.text("new")));
    assert_eq!(vmm.get("/vm/config")["drives"][0]["path_on_host"], tmp.text("new"));
    assert!(open_files(&vmm).contains(&tmp.path("new")));
    // io_uring closes its registered files a moment later.
    wait_for("the old file's end", || {
        (!open_files(&vmm).contains(&tmp.path("disk"))).then_some(())
    });
    // What would copy the first file is refused, and the guest continues.
    let nowhere = "tcp:127.0.0.1:1";
    for job in [["checkpoint", "--store", &store].as_slice(), &["send-migration", nowhere]] {
        let message = fail(4, &[job, &["--api-sock", &vmm.socket]].concat());
        assert!(message.contains("was exchanged since the guest's start"), "{message}");
        assert!(message.contains("drive \"1\"") && message.contains("snapshot"), "{message}");
    }
    assert_eq!(vmm.get("/")["state"], "Running");
}

#[test]
fn drive_keeps_the_file_of_a_job() {
    let tmp = TestDir::new();
    let test = "drive_keeps_the_file_of_a_job";
    let Some(vmm) = guest_with_drive(test, &tmp) else { return };
    std::fs::File::create(tmp.path("new")).unwrap().set_len(1 << 20).unwrap();
    let new = new_file(&tmp.text("new"));
    let refusal = || vmm.refusal("PATCH", "/drives/1", &new);
    let ask = |args: &[&str]| succeed(&[args, &["--api-sock", &vmm.socket]].concat());
    ask(&["checkpoint", "--store", &tmp.text("store"), "--every", "1s", "--detach"]);
    let why = refusal();
    let job = "the drive keeps its file, because a checkpoint run (job 1, every 1000 ms, into ";
    assert!(why.starts_with(&format!("{UNPATCHED}{job}")), "{why}");
    ask(&["checkpoint", "--stop"]);
    // A destination that does not answer.
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let to = listener.local_addr().unwrap();
    let address = format!("tcp:{to}");
    std::thread::scope(|scope| {
        let send = ["send-migration", &address, "--api-sock", &vmm.socket];
        let sent = scope.spawn(move || output(&send));
        wait_for("the migration", || ask(&["info", "--json"]).contains("migrating").then_some(()));
        let why = refusal();
        let job = format!("because the guest is being migrated already, to {to}; try again once");
        assert!(why.contains(&job), "{why}");
        drop(listener);
        assert_eq!(sent.join().unwrap().status.code(), Some(4));
    });
    assert_eq!(vmm.get("/vm/config")["drives"][0]["path_on_host"], tmp.text("disk"));
    vmm.done("PATCH", "/drives/1", &new);
}

#[test]
fn file_outside_of_the_sandbox_is_refused() {
    let test = "file_outside_of_the_sandbox_is_refused";
    let tmp = TestDir::new();
    let Some(vmm) = guest_with_drive(test, &tmp) else { return };
    if !has_landlock() {
        return skip(test, "landlock");
    }
    let why = vmm.refusal("PATCH", "/drives/1", &new_file("/etc/passwd"));
    let refusal = "Block: Virtio backend error: the VMM's sandbox does not allow writes to disk \
                   file \"/etc/passwd\": put it into a directory below /";
    assert!(why.starts_with(&format!("{UNPATCHED}{refusal}")), "{why}");
    assert_eq!(vmm.get("/vm/config")["drives"][0]["path_on_host"], tmp.text("disk"));
}
