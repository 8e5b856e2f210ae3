//! The processors of a guest of Firecracker's API, as Linux sees them.

use std::process::Command;

use serde_json::json;
use tests::{LINUX_CMDLINE, LinuxImage, ScratchDir, driftline};

use super::firecracker::FirecrackerProcess;
use super::text;

/// Returns the processors that are threads of the first one's core, and those of its package, in a
/// guest with two vCPUs.
fn siblings(linux: &LinuxImage, smt: bool) -> String {
    let scratch = ScratchDir::new();
    let mut process = FirecrackerProcess::start(Command::new(driftline()), &scratch);
    let machine = json!({ "vcpu_count": 2, "mem_size_mib": 128, "smt": smt });
    process.done("PUT", "/machine-config", &machine);
    let (kernel, initrd) = (linux.file("vmlinux"), linux.file("initramfs.cpio"));
    let boot = json!({ "kernel_image_path": text(&kernel), "initrd_path": text(&initrd),
        "boot_args": LINUX_CMDLINE });
    process.done("PUT", "/boot-source", &boot);
    process.done("PUT", "/actions", &json!({ "action_type": "InstanceStart" }));
    process.await_shell();
    let lists = ["thread", "core"].map(|of| format!("{of}_siblings_list")).join(" ");
    process.shell(&format!("cd /sys/devices/system/cpu/cpu0/topology; echo $(cat {lists})"))
}

#[test]
fn linux_sees_threads_of_a_core() {
    let _alone = tests::one_at_a_time();
    let Some(linux) = LinuxImage::or_skip("linux_sees_threads_of_a_core") else { return };
    assert_eq!(siblings(&linux, true), "0-1 0-1");
    assert_eq!(siblings(&linux, false), "0 0-1");
}
