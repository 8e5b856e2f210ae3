//! The program in a jail as Firecracker's jailer makes it: a root of its own without /proc, and a
//! user who owns only what is there. Libraries are there as well, unless `DRIFTLINE_STATIC` names
//! a static program, which is then started in place of the one of these tests.

use std::fs::{self, File};
use std::process::{Command, Stdio};

use driftline_machine::testing::{kvm_or_skip, skip};
use rustix::process::Signal;
use serde_json::json;

use crate::common::serving::ServeProcess;
use crate::common::{TestDir, wait_for};
use crate::serve_guest::{AfterPrint, printing_kernel};

/// Makes the devices of the jail `$1`, and gives all of it to the user.
const FURNISH: &str = "cd \"$1\" && mkdir dev lib lib64 && touch firecracker && \
     mknod dev/kvm c 10 232 && mknod dev/urandom c 1 9 && chown -R 65534:65534 . && \
     : <dev/urandom";
/// Executes the program `$2` with the rest as its arguments, in the jail `$1`. `$LIBRARIES` are the
/// folders of the libraries that it needs.
const ENTER: &str = "cd \"$1\" && \
     for folder in $LIBRARIES; do mount --bind --read-only /$folder $folder || exit; done && \
     mount --bind --read-only \"$2\" firecracker && \
     shift 2 && exec chroot --userspec=65534:65534 . /firecracker \"$@\"";

/// A jail. Its root is this directory.
struct Jail(TestDir);

impl Jail {
    /// Returns `None`, and says so, if no jail can be made.
    fn new(test: &str) -> Option<Self> {
        let dir = TestDir::new();
        fs::create_dir(dir.path("data")).unwrap();
        for disk in ["data/disk", "x"] {
            File::create(dir.path(disk)).unwrap().set_len(1 << 20).unwrap();
        }
        fs::write(dir.path("kernel"), printing_kernel(AfterPrint::Wait)).unwrap();
        let mut furnish = Command::new("sh");
        furnish.args(["-c", FURNISH, "sh", &dir.text("")]);
        let jail = Self(dir);
        let works = |command: &mut Command| command.output().is_ok_and(|out| out.status.success());
        if !works(&mut furnish) || !works(jail.command().arg("--version")) {
            let program = std::env::var("DRIFTLINE_STATIC");
            assert!(program.is_err(), "{program:?} does not start in a jail");
            skip(test, "no jail can be made: that needs root, and a file system with devices");
            return None;
        }
        Some(jail)
    }

    /// Returns the command of the program in the jail.
    fn command(&self) -> Command {
        let mut command = Command::new("unshare");
        command.args(["--mount", "--propagation", "private", "sh", "-c", ENTER, "sh"]);
        let (program, libraries) = match std::env::var("DRIFTLINE_STATIC") {
            Ok(program) => (program, ""),
            Err(_) => (env!("CARGO_BIN_EXE_driftline").to_owned(), "lib lib64"),
        };
        command.arg(self.0.text("")).arg(program).env("LIBRARIES", libraries);
        command.env_remove("RUST_LOG").stdin(Stdio::null());
        command
    }

    fn start(&self, name: &str) -> ServeProcess {
        let mut command = self.command();
        // Firecracker's jailer adds the first four options.
        command.args(["--id", name, "--start-time-us", "1", "--start-time-cpu-us", "1"]);
        command.args(["--parent-cpu-time-us", "1", "--api-sock", &format!("/{name}.sock")]);
        ServeProcess::spawn(command, self.0.text(&format!("{name}.sock")))
    }
}

#[test]
fn jailed_guest_is_started_snapshotted_and_loaded() {
    let test = "jailed_guest_is_started_snapshotted_and_loaded";
    if !kvm_or_skip(test) {
        return;
    }
    let Some(jail) = Jail::new(test) else { return };
    let mut first = jail.start("first");
    for (path, body) in [
        ("/boot-source", json!({ "kernel_image_path": "/kernel" })),
        ("/machine-config", json!({ "vcpu_count": 2, "mem_size_mib": 32 })),
        ("/serial", json!({ "serial_out_path": "/data/serial" })),
        (
            "/drives/disk",
            json!({ "drive_id": "disk", "is_root_device": false, "path_on_host": "/data/disk",
                "cache_type": "Writeback" }),
        ),
        ("/vsock", json!({ "guest_cid": 3, "uds_path": "/data/vsock" })),
        ("/balloon", json!({ "amount_mib": 0, "deflate_on_oom": true })),
        ("/entropy", json!({})),
        ("/actions", json!({ "action_type": "InstanceStart" })),
    ] {
        first.done("PUT", path, &body.to_string());
    }
    wait_for("line of the guest", || jail.0.read("data/serial").ends_with('\n').then_some(()));
    // The jail's root has files of the client, too. It is also the working directory.
    first.done("PATCH", "/drives/disk", r#"{"drive_id": "disk", "path_on_host": "/x"}"#);
    first.done("PATCH", "/vm", r#"{"state": "Paused"}"#);
    for files in [
        json!({ "snapshot_path": "/data/state", "mem_file_path": "/data/memory" }),
        json!({ "snapshot_path": "vmstate", "mem_file_path": "mem" }),
    ] {
        first.done("PUT", "/snapshot/create", &files.to_string());
    }
    first.signal(Signal::TERM);
    let (status, stderr) = first.wait_status();
    assert!(!status.success(), "{stderr}");

    let second = jail.start("second");
    let backend = json!({ "backend_type": "File", "backend_path": "mem" });
    let load = json!({ "snapshot_path": "vmstate", "mem_backend": backend, "resume_vm": true,
        "vsock_override": { "uds_path": "/data/vsock-2" } });
    second.done("PUT", "/snapshot/load", &load.to_string());
    assert_eq!(second.get("/")["state"], "Running");
}
