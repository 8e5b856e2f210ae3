//! Receivers whose disk never answers: they can be stopped, and the guest continues at its source.

use std::process::{Child, Stdio};

use driftline_images::PayloadReport;
use driftline_machine::testing::{kvm_or_skip, skip};

use crate::common::stuck_guest::{
    DISK_BYTES, StuckGuest, cases_or_skip, disk, in_time, sigterm, stop, storage_or_skip,
};
use crate::common::stuck_storage::StuckStorage;
use crate::common::{TestDir, Vmm, driftline, receiver, side_by_side, text, wait_for};

/// The source's wait times out before the take-over does, and the source asks for the outcome.
fn receiver_in_hanging_take_over_can_be_stopped() {
    let test = "receiver_in_hanging_take_over_can_be_stopped";
    let ways: [fn(&Vmm<'_>); 2] = [stop, sigterm];
    side_by_side(ways, |way| {
        if !kvm_or_skip(test) {
            return;
        }
        let storage = StuckStorage::without_locks(DISK_BYTES);
        let Ok(storage) = storage.inspect_err(|why| skip(test, why)) else { return };
        let tmp = TestDir::new();
        std::fs::write(tmp.path("own"), vec![7; DISK_BYTES]).unwrap();
        let own = format!("path={}", tmp.text("own"));
        let guest =
            ["--mem", "32M", "--guest", "payload,ws=1M,rate=1M,burst=8,report=200", "--disk", &own];
        let source = Vmm::run(&tmp, "source", &guest);
        let before = source.await_progress(1, &[]);
        let there = format!("{},id=disk0,identity=any", disk(&storage));
        // Longer than this test takes: the source's question ends the wait.
        let receive = ["--disk", &there, "--answer-timeout", "600s"];
        let (vmm, to) = receiver(&tmp, "receiving", &receive);
        let receiver = StuckGuest { storage, vmm };
        let socket = source.socket();
        let send = ["send-migration", &to, "--api-sock", &socket];
        let sending = driftline(&send).stdout(Stdio::null()).stderr(Stdio::piped()).spawn();
        receiver.await_stuck("a lock that hangs");
        in_time("a stop", || way(&receiver.vmm));
        let stderr = receiver.ends_with(1);
        assert!(stderr.contains("virtio-blk \"disk0\" did not acquire its files"), "{stderr}");
        assert!(!stderr.contains("does not end yet"), "{stderr}");
        // Otherwise the migration stays in doubt.
        let runs = || (source.state() == "running").then_some(());
        wait_for("the guest at its source", runs);
        let sent = sending.unwrap().wait_with_output().unwrap();
        let sent = (sent.status.code(), text(&sent.stderr));
        assert_eq!(sent.0, Some(4), "{}", sent.1);
        assert!(sent.1.contains("the guest continues here"), "{}", sent.1);
        source.await_progress(1, &before);
    });
}

/// A guest with its own disk, and a receiver whose copy of the disk is on such storage.
struct StuckCopy<'p> {
    source: Vmm<'p>,
    before: Vec<PayloadReport>,
    receiver: StuckGuest<'p>,
    to: String,
}

impl<'p> StuckCopy<'p> {
    /// Starts both. The storage answers no write, and whatever else `stuck` configures.
    fn or_skip(tmp: &'p TestDir, test: &str, stuck: impl Fn(&StuckStorage)) -> Option<Self> {
        let storage = storage_or_skip(test)?;
        std::fs::write(tmp.path("own"), vec![7; DISK_BYTES]).unwrap();
        let own = format!("path={}", tmp.text("own"));
        let guest =
            ["--mem", "32M", "--guest", "payload,ws=1M,rate=1M,burst=8,report=200", "--disk", &own];
        let source = Vmm::run(tmp, "source", &guest);
        storage.answer_only_writes(0);
        stuck(&storage);
        let before = source.await_progress(1, &[]);
        let copy = format!("{},id=disk0,copy", disk(&storage));
        let (vmm, to) = receiver(tmp, "receiving", &["--disk", &copy]);
        Some(Self { source, before, receiver: StuckGuest { storage, vmm }, to })
    }

    fn send(&self) -> Child {
        let socket = self.source.socket();
        let send = ["send-migration", &self.to, "--copy-disks", "--api-sock", &socket];
        driftline(&send).stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap()
    }

    /// Checks that the receiver ends, the sender fails, and the guest continues at its source.
    /// Returns the receiver's messages.
    fn ends(self, sending: Option<Child>) -> String {
        let Self { source, before, receiver, .. } = self;
        let stderr = receiver.ends_with(1);
        if let Some(sending) = sending {
            let sent = sending.wait_with_output().unwrap();
            assert_eq!(sent.status.code(), Some(4), "{}", text(&sent.stderr));
        }
        assert_eq!(source.state(), "running");
        source.await_progress(1, &before);
        stderr
    }
}

fn receiver_refuses_where_writes_to_a_copy_hang() {
    let tmp = TestDir::new();
    let test = "receiver_refuses_where_writes_to_a_copy_hang";
    let Some(copying) = StuckCopy::or_skip(&tmp, test, |_| {}) else { return };
    let (source, receiving) = (&copying.source, &copying.receiver.vmm);
    let send = ["send-migration", &copying.to, "--copy-disks"];
    let stderr = in_time("a migration", || source.refuse(4, &send));
    assert!(stderr.contains("copying disk \"disk0\" failed: writing its copy: "), "{stderr}");
    assert!(stderr.contains("the guest continues here"), "{stderr}");
    assert!(copying.receiver.storage.stuck() > 0, "no write hung");
    wait_for("the receiver to wait again", || {
        receiving.stderr().contains("waiting for another source").then_some(())
    });
    stop(receiving);
    let stderr = copying.ends(None);
    assert!(stderr.contains("copying disk \"disk0\" failed"), "{stderr}");
}

fn receiver_whose_copy_hangs_can_be_stopped() {
    let ways: [fn(&Vmm<'_>); 2] = [stop, sigterm];
    side_by_side(ways, |way| {
        let tmp = TestDir::new();
        let test = "receiver_whose_copy_hangs_can_be_stopped";
        let Some(copying) = StuckCopy::or_skip(&tmp, test, |_| {}) else { return };
        let sending = copying.send();
        copying.receiver.await_stuck("a write that hangs");
        way(&copying.receiver.vmm);
        copying.ends(Some(sending));
    });
}

fn receiver_in_hanging_flush_can_be_stopped() {
    let tmp = TestDir::new();
    let test = "receiver_in_hanging_flush_can_be_stopped";
    // The file's size is made durable before anything arrives, so the thread that builds the guest
    // hangs.
    let flushes = |storage: &StuckStorage| storage.answer_only(0);
    let Some(copying) = StuckCopy::or_skip(&tmp, test, flushes) else { return };
    let sending = copying.send();
    copying.receiver.await_stuck("a flush that hangs");
    stop(&copying.receiver.vmm);
    let stderr = copying.ends(Some(sending));
    assert!(stderr.contains("stopped over the API before a guest arrived"), "{stderr}");
}

#[test]
fn receivers_with_hanging_storage_can_be_stopped() {
    cases_or_skip(
        "receivers_with_hanging_storage_can_be_stopped",
        [
            receiver_in_hanging_take_over_can_be_stopped,
            receiver_refuses_where_writes_to_a_copy_hang,
            receiver_whose_copy_hangs_can_be_stopped,
            receiver_in_hanging_flush_can_be_stopped,
        ],
    );
}
