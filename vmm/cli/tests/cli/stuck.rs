//! Processes whose guest has a disk that never answers: they end when they are asked to.

use crate::common::stuck_guest::{
    DISK_BYTES, StuckGuest, await_end, disk, in_time, sigterm, stop, storage_or_skip,
};
use crate::common::{TestDir, Vmm, side_by_side};

#[test]
fn guest_in_hanging_flush_can_be_stopped() {
    // A checkpoint of the run waits for the disk, too.
    let stop_in_a_run: fn(&Vmm<'_>, &str) = |vmm, store| {
        vmm.tell(&["checkpoint", "--store", store, "--every", "1ms", "--detach"]);
        in_time("a stop", || stop(vmm));
    };
    side_by_side([stop_in_a_run, |vmm, _| sigterm(vmm)], |way| {
        let tmp = TestDir::new();
        let test = "guest_in_hanging_flush_can_be_stopped";
        let Some(stuck) = StuckGuest::in_a_flush(&tmp, test) else { return };
        way(&stuck.vmm, &tmp.text("store"));
        let stderr = stuck.ends_with(0);
        assert!(stderr.contains("\"disk0\""), "{stderr}");
    });
}

#[test]
fn sigterm_ends_a_restore_whose_writes_hang() {
    let test = "sigterm_ends_a_restore_whose_writes_hang";
    let tmp = TestDir::new();
    let Some(storage) = storage_or_skip(test) else { return };
    std::fs::write(tmp.path("own"), vec![7; DISK_BYTES]).unwrap();
    let (own, store) = (format!("path={}", tmp.text("own")), tmp.text("store"));
    let guest =
        ["--mem", "32M", "--guest", "payload,ws=1M,rate=1M,burst=8,report=200", "--disk", &own];
    let source = Vmm::run(&tmp, "source", &guest);
    source.tell(&["checkpoint", "--store", &store]);
    storage.answer_only_writes(0);
    let disk = disk(&storage);
    let restore = ["restore", "--store", &store, "--disk", &disk];
    let restored = StuckGuest { storage, vmm: Vmm::start(&tmp, "restored", &restore) };
    restored.await_stuck("a write that hangs");
    sigterm(&restored.vmm);
    await_end(&restored.vmm);
}
