//! Sources whose disk never answers: the migration fails, and the guest continues.

use crate::common::script::{DriverScript, MEM_BYTES};
use crate::common::stuck_guest::{
    DISK, StuckGuest, cases_or_skip, disk, in_time, sigterm, stop, storage_or_skip,
};
use crate::common::{TestDir, Vmm, driftline, fail, receiver, side_by_side, wait_for};

fn hand_over_fails_where_a_flush_hangs() {
    // The flush before the pause is answered and the one in the hand-over is not, or not even the
    // first is.
    side_by_side([1, 0], |answered| {
        let tmp = TestDir::new();
        let test = "hand_over_fails_where_a_flush_hangs";
        let Some(mut stuck) = StuckGuest::or_skip(&tmp, test) else { return };
        let StuckGuest { storage, vmm } = &mut stuck;
        storage.answer_only(answered);
        let (_receiver, address) = receiver(&tmp, "destination", &["--disk", &disk(storage)]);
        let stderr = in_time("a migration", || vmm.refuse(4, &["send-migration", &address]));
        assert!(stderr.contains("disk \"disk0\"") && stderr.contains("durable"), "{stderr}");
        assert!(storage.stuck() > 0, "no flush hung");
        assert_eq!(vmm.state(), "running");
        let before = vmm.reports();
        vmm.await_progress(1, &before);
        // No other guest gets the disk while its flush is in progress (I7).
        let guest =
            ["run", "--serial", "null", "--mem", "32M", "--guest", "payload,ws=1M,rate=64K"];
        let stderr = fail(1, &[&guest[..], &["--disk", &disk(storage)]].concat());
        assert!(stderr.contains("in use by another"), "{stderr}");
        in_time("a pause", || vmm.tell(&["pause"]));
        in_time("a resume", || vmm.tell(&["resume"]));
        in_time("a stop", || stop(vmm));
        stuck.ends_with(0);
    });
}

/// The disk is one hole, so that the first pass reads nothing of it. The guest writes zeros to it,
/// which the last pass reads.
fn guest_continues_where_the_last_pass_hangs() {
    let tmp = TestDir::new();
    let Some(storage) = storage_or_skip("guest_continues_where_the_last_pass_hangs") else {
        return;
    };
    let mut script = DriverScript::default();
    script.write_zeros_forever(DISK, 1000);
    std::fs::write(tmp.path("kernel"), script.kernel()).unwrap();
    let (kernel, memory) = (tmp.text("kernel"), MEM_BYTES.to_string());
    // Content that takes the first pass a second, in which the guest writes even on a slow host.
    let content: Vec<u8> = (0..1 << 18).flat_map(u32::to_le_bytes).collect();
    std::fs::write(tmp.path("initrd"), content).unwrap();
    let (initrd, disk_of_guest) = (tmp.text("initrd"), disk(&storage));
    let guest = [
        &["--mem", &memory, "--kernel", &kernel][..],
        &["--initrd", &initrd, "--disk", &disk_of_guest],
    ];
    let vmm = Vmm::run(&tmp, "source", &guest.concat());
    let stuck = StuckGuest { storage, vmm };
    let StuckGuest { storage, vmm } = &stuck;
    let copy = format!("path={},id=disk0,copy", tmp.text("copy"));
    let (_receiver, to) = receiver(&tmp, "destination", &["--disk", &copy]);
    storage.answer_only_reads(0);
    // The pause follows the first pass, even on a host so slow that a second one would shorten it.
    let limit = ["--timeout-s", "0", "--timeout-strategy", "switchover"];
    let send = ["send-migration", &to, "--copy-disks", "--max-bandwidth", "1M"];
    let send = [&send[..], &limit].concat();
    let stderr = in_time("a migration", || vmm.refuse(4, &send));
    let why = "failed (in switch-over): copying disk \"disk0\" failed: reading it: its storage has";
    assert!(stderr.contains(why), "{stderr}");
    assert!(stderr.contains("the guest continues here"), "{stderr}");
    assert_eq!((vmm.state().as_str(), storage.stuck()), ("running", 1));
    // The guest's next write waits for the page that is being read.
    storage.answer_only_writes(0);
    storage.fail_reads_that_wait();
    wait_for("the guest's next write", || (storage.stuck() == 1).then_some(()));
    in_time("a stop", || stop(vmm));
    stuck.ends_with(0);
}

fn sigterm_ends_a_process_whose_flush_hangs() {
    let tmp = TestDir::new();
    let Some(stuck) = StuckGuest::or_skip(&tmp, "sigterm_ends_a_process_whose_flush_hangs") else {
        return;
    };
    let StuckGuest { storage, vmm } = &stuck;
    storage.answer_only(1);
    let (_receiver, address) = receiver(&tmp, "destination", &["--disk", &disk(storage)]);
    let socket = vmm.socket();
    let mut sending =
        driftline(&["send-migration", &address, "--api-sock", &socket]).spawn().unwrap();
    stuck.await_stuck("the flush in the hand-over");
    sigterm(vmm);
    stuck.ends_with(0);
    assert_ne!(sending.wait().unwrap().code(), Some(0), "it did not move");
}

#[test]
fn sources_with_hanging_storage_keep_their_guest() {
    cases_or_skip(
        "sources_with_hanging_storage_keep_their_guest",
        [
            hand_over_fails_where_a_flush_hangs,
            guest_continues_where_the_last_pass_hangs,
            sigterm_ends_a_process_whose_flush_hangs,
        ],
    );
}
