//! The processors of a guest of Firecracker's API, as Linux sees them.

use std::process::Command;

use serde_json::json;
use tests::{LINUX_CMDLINE, LinuxImage, ScratchDir, driftline};

use super::firecracker::FirecrackerProcess;
use super::text;

/// Returns the processors that are threads of the first one's core, and those of its package.
pub(super) fn siblings(process: &mut FirecrackerProcess) -> String {
    let lists = ["thread", "core"].map(|of| format!("{of}_siblings_list")).join(" ");
    process.shell(&format!("cd /sys/devices/system/cpu/cpu0/topology; echo $(cat {lists})"))
}

/// `client_of_firecracker_boots_linux` checks a guest without `smt`.
#[test]
fn linux_sees_threads_of_a_core() {
    let _alone = tests::one_at_a_time();
    let Some(linux) = LinuxImage::or_skip("linux_sees_threads_of_a_core") else { return };
    let scratch = ScratchDir::new();
    let mut process = FirecrackerProcess::start(Command::new(driftline()), &scratch);
    let machine = json!({ "vcpu_count": 2, "mem_size_mib": 128, "smt": true });
    process.done("PUT", "/machine-config", &machine);
    let (kernel, initrd) = (linux.file("vmlinux"), linux.file("initramfs.cpio"));
    let boot = json!({ "kernel_image_path": text(&kernel), "initrd_path": text(&initrd),
        "boot_args": LINUX_CMDLINE });
    process.done("PUT", "/boot-source", &boot);
    process.done("PUT", "/actions", &json!({ "action_type": "InstanceStart" }));
    process.await_shell();
    assert_eq!(siblings(&mut process), "0-1 0-1");
}
