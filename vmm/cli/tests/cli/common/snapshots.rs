//! A `driftline serve` process whose guest is the payload, for tests of snapshots.

use std::fs::{self, File};
use std::process::{Command, Stdio};

use driftline_images::{PAYLOAD_ELF, PayloadReport, PayloadSpec};
use serde_json::{Value, json};

use super::serving::ServeProcess;
use super::{TestDir, driftline, last_reports, wait_for};

const START: &str = r#"{"action_type": "InstanceStart"}"#;
const PAUSE: &str = r#"{"state": "Paused"}"#;
pub const RESUME: &str = r#"{"state": "Resumed"}"#;
pub const NOT_RESTORED: &str = "Load snapshot error: Failed to restore from snapshot: ";
pub const MIB: u64 = 1 << 20;

/// A process with a socket and a serial log of its own.
pub struct Instance<'t> {
    pub vmm: ServeProcess,
    tmp: &'t TestDir,
    name: &'static str,
}

impl<'t> Instance<'t> {
    pub fn new(tmp: &'t TestDir, name: &'static str) -> Self {
        Self::wrapped(tmp, name, &[])
    }

    /// As [`new`](Self::new). If `wrapper` has a command, that starts the process.
    pub fn wrapped(tmp: &'t TestDir, name: &'static str, wrapper: &[&str]) -> Self {
        let socket = tmp.text(&format!("{name}.sock"));
        let mut command = driftline(&["serve", "--api-sock", &socket, "--id", name]);
        if let [program, args @ ..] = wrapper {
            let mut outer = Command::new(program);
            outer.args(args).arg(command.get_program()).args(command.get_args());
            outer.env_remove("RUST_LOG").stdin(Stdio::null());
            command = outer;
        }
        let vmm = ServeProcess::spawn(command, socket);
        let serial = json!({ "serial_out_path": tmp.path(&format!("{name}.serial")) });
        vmm.done("PUT", "/serial", &serial.to_string());
        Self { vmm, tmp, name }
    }

    /// Configures the payload with two vCPUs and 32 MiB.
    pub fn boot(tmp: &'t TestDir, tracked: bool) -> Self {
        Self::new(tmp, "first").configured(tracked)
    }

    pub fn configured(self, tracked: bool) -> Self {
        let (tmp, guest) = (self.tmp, self);
        fs::write(tmp.path("kernel"), PAYLOAD_ELF).unwrap();
        let spec: PayloadSpec =
            "payload,ws=1M,rate=10M,burst=16,pattern=seq,report=300".parse().unwrap();
        let source =
            json!({ "kernel_image_path": tmp.path("kernel"), "boot_args": spec.cmdline(2) });
        guest.vmm.done("PUT", "/boot-source", &source.to_string());
        let machine = json!({ "vcpu_count": 2, "mem_size_mib": 32, "track_dirty_pages": tracked });
        guest.vmm.done("PUT", "/machine-config", &machine.to_string());
        guest
    }

    pub fn add_drive(&self) {
        let disk = self.tmp.path("disk");
        File::create(&disk).unwrap().set_len(MIB).unwrap();
        let drive = json!({ "drive_id": "data", "is_root_device": false, "io_engine": "Sync",
            "cache_type": "Writeback", "path_on_host": disk,
            "rate_limiter": { "ops": { "size": 100, "refill_time": 10 } } });
        self.vmm.done("PUT", "/drives/data", &drive.to_string());
    }

    pub fn start(self) -> Self {
        self.vmm.done("PUT", "/actions", START);
        self.progress();
        self
    }

    /// Loads a snapshot.
    pub fn load(tmp: &'t TestDir, name: &'static str, files: (&str, &str), more: Value) -> Self {
        Self::new(tmp, name).loaded(files, more)
    }

    pub fn loaded(self, files: (&str, &str), more: Value) -> Self {
        self.vmm.done("PUT", "/snapshot/load", &load_body(self.tmp, files, more));
        self
    }

    /// Sends a load that fails and ends the process. Returns the text.
    pub fn failed_load(tmp: &'t TestDir, name: &'static str, body: &str) -> String {
        let mut guest = Self::new(tmp, name);
        let text = guest.vmm.refusal("PUT", "/snapshot/load", body);
        let (code, stderr) = guest.vmm.wait();
        assert_eq!(code, Some(1), "{stderr}");
        assert!(stderr.contains(&format!("no guest is loaded: {text}")), "{stderr}");
        text
    }

    pub fn reports(&self) -> Vec<PayloadReport> {
        last_reports(&self.tmp.path(&format!("{}.serial", self.name)))
    }

    /// Waits until both vCPUs have gone through all their pages some more times, and so have
    /// checked each. The payload queues its lines, so the log may lag behind on a busy host.
    pub fn progress(&self) -> Vec<PayloadReport> {
        let begin = wait_for("both vCPUs", || Some(self.reports()).filter(|now| now.len() == 2));
        let is_through = |now: &[PayloadReport]| {
            now.iter().zip(&begin).all(|(now, begin)| now.passes >= begin.passes + 4)
        };
        let reports = || Some(self.reports()).filter(|now| is_through(now));
        let now = wait_for("the guest's reports", reports);
        assert!(now.iter().all(|report| report.errors == 0), "{now:?}");
        now
    }

    pub fn pause(&self) {
        self.vmm.done("PATCH", "/vm", PAUSE);
    }

    pub fn resume(&self) -> Vec<PayloadReport> {
        self.vmm.done("PATCH", "/vm", RESUME);
        self.progress()
    }

    pub fn create(&self, kind: &str, files: (&str, &str)) {
        self.vmm.done("PUT", "/snapshot/create", &create_body(self.tmp, kind, files));
    }
}

pub fn create_body(tmp: &TestDir, kind: &str, (state, memory): (&str, &str)) -> String {
    json!({ "snapshot_type": kind, "snapshot_path": tmp.path(state),
        "mem_file_path": tmp.path(memory) })
    .to_string()
}

pub fn load_body(tmp: &TestDir, (state, memory): (&str, &str), more: Value) -> String {
    let mut body = json!({ "snapshot_path": tmp.path(state),
        "mem_backend": { "backend_path": tmp.path(memory), "backend_type": "File" } });
    body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    body.to_string()
}

/// Returns a directory with a full snapshot, "state" and "memory".
pub fn snapshot() -> TestDir {
    let tmp = TestDir::new();
    let guest = Instance::boot(&tmp, false).start();
    guest.pause();
    guest.create("Full", ("state", "memory"));
    drop(guest);
    tmp
}
