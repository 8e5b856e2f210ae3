//! Linux guests of `driftline serve`, and their snapshots.

use std::time::Duration;

use serde_json::{Value, json};
use tests::{LINUX_CMDLINE, LinuxImage, ScratchDir, ServingProcess, has_booted, wait_for};

use super::text;

/// Time limit of a boot, and of progress of the checkers.
pub(super) const BOOT: Duration = Duration::from_secs(240);

/// Boots a guest with 2 vCPUs and 128 MiB until its shell runs. `checkers` are on its command line.
/// `devices` are paths of the API and what is put there.
pub(super) fn boot_served(
    linux: &LinuxImage,
    scratch: &ScratchDir,
    checkers: &str,
    devices: &[(&str, Value)],
) -> ServingProcess {
    let guest = ServingProcess::start(scratch, "first");
    guest.done("PUT", "/machine-config", &json!({ "vcpu_count": 2, "mem_size_mib": 128 }));
    let boot = json!({ "kernel_image_path": text(&linux.file("vmlinux")),
        "initrd_path": text(&linux.file("initramfs.cpio")),
        "boot_args": format!("{LINUX_CMDLINE} {checkers}") });
    guest.done("PUT", "/boot-source", &boot);
    for (path, device) in devices {
        guest.done("PUT", path, device);
    }
    guest.done("PUT", "/actions", &json!({ "action_type": "InstanceStart" }));
    wait_for("shell of the guest", BOOT, || has_booted(&guest.console()).then_some(()));
    guest
}

/// Pauses the guest and takes its snapshot, which is `state` and `memory` in `scratch`.
pub(super) fn take_snapshot(guest: &ServingProcess, scratch: &ScratchDir) {
    guest.pause();
    let files = json!({ "snapshot_path": scratch.path("state"),
        "mem_file_path": scratch.path("memory") });
    guest.done("PUT", "/snapshot/create", &files);
}
