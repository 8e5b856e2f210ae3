//! The end of the program as `firecracker` while storage does not answer.

use std::os::unix::process::ExitStatusExt;

use rustix::process::Signal;
use serde_json::json;

use crate::common::script::{DriverScript, MEM_BYTES};
use crate::common::stuck_guest::{DISK, storage_or_skip};
use crate::common::{TestDir, status_field, wait_for};
use crate::firecracker::serve;

/// Returns whether the process has ended, except for threads that wait in the kernel for storage.
fn has_ended(pid: u32) -> bool {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    status_field(&status, "State:").is_none_or(|state| state.starts_with(['Z', 'X']))
}

/// Firecracker is killed by the first signal.
#[test]
fn second_signal_kills_a_stuck_process() {
    let Some(storage) = storage_or_skip("second_signal_kills_a_stuck_process") else { return };
    let tmp = TestDir::new();
    let mut script = DriverScript::default();
    script.flush(DISK);
    std::fs::write(tmp.path("kernel"), script.kernel()).unwrap();
    let mut vmm = serve(&tmp, &["--log-path", &tmp.text("log")]);
    let drive = json!({ "drive_id": "disk0", "is_root_device": false, "cache_type": "Writeback",
        "path_on_host": storage.disk() });
    vmm.done("PUT", "/drives/disk0", &drive.to_string());
    let source = json!({ "kernel_image_path": tmp.text("kernel") });
    vmm.done("PUT", "/boot-source", &source.to_string());
    let machine = json!({ "vcpu_count": 1, "mem_size_mib": MEM_BYTES >> 20 });
    vmm.done("PUT", "/machine-config", &machine.to_string());
    storage.answer_only(0);
    vmm.done("PUT", "/actions", r#"{"action_type": "InstanceStart"}"#);
    wait_for("the guest's flush", || (storage.stuck() > 0).then_some(()));
    // Signals within a second are one request.
    wait_for("the second signal's effect", || {
        vmm.signal(Signal::TERM);
        has_ended(vmm.pid()).then_some(())
    });
    let log = tmp.read("log");
    assert!(log.contains("interrupted by SIGTERM again: the process ends immediately"), "{log}");
    // A thread that waits for the flush cannot be killed.
    drop(storage);
    let (status, stderr) = vmm.wait_status();
    assert_eq!(status.signal(), Some(Signal::TERM.as_raw()), "{status}: {stderr}");
}
