//! Copied disks whose storage does not answer.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use super::DriveHosts;
use crate::common::{CopyFaults, GuestWithDrives, LONG, Sender, each, quick_send, within};
use driftline_guest::testing::{MemoryConfig, repeats};
use driftline_guest::{GuestIdentity, Lifecycle, RunState};
use driftline_migrate::{SendControl, SendOptions, send};

#[test]
fn hanging_copy_fails_the_migration() {
    type Hangs = fn(&CopyFaults) -> &AtomicBool;
    let cases: [(Hangs, &str); 2] = [
        (|faults| &faults.write_hangs, "writing its copy"),
        (|faults| &faults.sync_hangs, "making its copy durable"),
    ];
    each(cases.into(), 2, |(hangs, why)| {
        let hosts = DriveHosts::new();
        let guest = hosts.guest(13);
        let hangs = hangs(&hosts.faults);
        hangs.store(true, Ordering::SeqCst);
        let there = hosts.receiver_with(|o| o.disk_limit = Duration::from_millis(500));
        // Longer than the destination's disk limit.
        let options = SendOptions { progress_timeout: LONG, ..hosts.options() };
        let error = send(&*guest, &there.to, &options, &SendControl::new()).unwrap_err();
        let message = error.to_string();
        assert!(
            message.contains("copying disk \"disk0\" failed") && message.contains(why),
            "{message}"
        );
        assert!(message.contains("has not answered for 500ms"), "{message}");
        assert!(message.ends_with("the guest continues here"), "{message}");
        assert_eq!(guest.run_state(), RunState::Running);
        let refused = there.failure();
        assert!(refused.contains(why), "{refused}");
        // The storage answers again, and the abandoned threads end.
        hangs.store(false, Ordering::SeqCst);
        within(LONG, "the copies are gone", || hosts.copies() == 0);
    });
}

#[test]
fn hanging_disk_of_the_source_fails_the_migration() {
    let hosts = DriveHosts::new();
    let guest = hosts.guest(31);
    let disk = &guest.drives[0];
    disk.open_hangs.store(true, Ordering::SeqCst);
    let there = hosts.receiver();
    let options = SendOptions { disk_limit: Duration::from_millis(500), ..hosts.options() };
    let message = Sender::start(&guest, &there.to, &options).result().unwrap_err().to_string();
    let why = "copying disk \"disk0\" failed: opening it: its storage has not answered for 500ms";
    assert!(message.contains(why), "{message}");
    assert!(message.ends_with("the guest continues here"), "{message}");
    assert_eq!(guest.run_state(), RunState::Running);
    within(LONG, "the receiver waits again", || there.waits_on());
    // No limit has passed.
    let sending = Sender::start(&guest, &there.to, &hosts.options());
    within(LONG, "it hangs again", || disk.hung.load(Ordering::SeqCst) == 2);
    sending.control.cancel().unwrap();
    let error = sending.result().unwrap_err();
    assert!(matches!(error.cause, driftline_migrate::Cause::Cancelled), "{error}");
    // The storage answers again, and the abandoned threads end.
    disk.open_hangs.store(false, Ordering::SeqCst);
    within(LONG, "the receiver waits again", || there.waits_on());
    send(&*guest, &there.to, &hosts.options(), &SendControl::new()).unwrap();
    there.guest().guest.verify().unwrap();
    hosts.compare(&guest);
}

#[test]
fn stop_ends_a_receiver_whose_copy_hangs() {
    let hosts = DriveHosts::new();
    let guest = hosts.guest(15);
    hosts.faults.write_hangs.store(true, Ordering::SeqCst);
    let there = hosts.receiver_with(|o| o.disk_limit = LONG);
    let options = SendOptions { progress_timeout: LONG, ..hosts.options() };
    let sending = Sender::start(&guest, &there.to, &options);
    within(LONG, "a write hangs", || hosts.faults.hung.load(Ordering::SeqCst) > 0);
    there.control.cancel().unwrap();
    let message = sending.result().unwrap_err().to_string();
    assert!(message.contains("the receiver was stopped"), "{message}");
    assert_eq!(guest.run_state(), RunState::Running);
    let refused = there.error();
    assert!(matches!(refused.cause, driftline_migrate::Cause::Cancelled), "{refused}");
    hosts.faults.write_hangs.store(false, Ordering::SeqCst);
}

#[test]
fn hanging_creation_of_copies_is_refused() {
    let hosts = DriveHosts::new();
    let guest = hosts.guest(19);
    hosts.faults.make_hangs.store(true, Ordering::SeqCst);
    let there = hosts.receiver_with(|o| o.build_limit = Duration::from_millis(500));
    let options = SendOptions { setup_timeout: LONG, ..hosts.options() };
    let late = "was not built within 500ms (its disks or copies may be on storage that does not";
    let full = "earlier guests are still being built";
    for why in [late, late, late, late, full, full] {
        let error = send(&*guest, &there.to, &options, &SendControl::new()).unwrap_err();
        let message = error.to_string();
        assert!(
            message.contains("building the guest failed") && message.contains(why),
            "{message}"
        );
        assert!(message.contains(&guest.vm_id().to_string()), "{message}");
        assert_eq!(guest.run_state(), RunState::Running);
        within(LONG, "the receiver waits again", || there.waits_on());
    }
    within(LONG, "four threads hang", || hosts.faults.hung.load(Ordering::SeqCst) == 4);
    // The storage answers again, and the abandoned threads end.
    hosts.faults.make_hangs.store(false, Ordering::SeqCst);
    within(LONG, "the next guest is built", || {
        send(&*guest, &there.to, &options, &SendControl::new()).is_ok()
    });
    there.guest().guest.verify().unwrap();
    hosts.compare(&guest);
}

#[test]
fn guest_is_built_beside_one_whose_storage_hangs() {
    let hosts = DriveHosts::new();
    let guest = hosts.guest(27);
    hosts.faults.make_hangs.store(true, Ordering::SeqCst);
    let there = hosts.receiver_with(|o| o.build_limit = Duration::from_millis(500));
    let options = SendOptions { setup_timeout: LONG, ..hosts.options() };
    let error = send(&*guest, &there.to, &options, &SendControl::new()).unwrap_err();
    assert!(error.to_string().contains("was not built within 500ms"), "{error}");
    within(LONG, "the receiver waits again", || there.waits_on());
    // A guest without copies. A busy machine may exceed the limit.
    within(LONG, "another one is built", || {
        let sent = Sender::start(guest.guest(), &there.to, &quick_send(&hosts.pair)).result();
        let late =
            |e: &driftline_migrate::SendError| e.to_string().contains("was not built within");
        sent.inspect_err(|e| assert!(late(e), "{e}")).is_ok()
    });
    there.guest().guest.verify().unwrap();
    assert_eq!(hosts.copies(), 0, "the first guest's storage still hangs");
    hosts.faults.make_hangs.store(false, Ordering::SeqCst);
}

#[test]
fn stop_ends_a_receiver_that_makes_copies() {
    let hosts = DriveHosts::new();
    let guest = hosts.guest(21);
    hosts.faults.make_hangs.store(true, Ordering::SeqCst);
    let there = hosts.receiver_with(|o| o.build_limit = LONG);
    let options = SendOptions { setup_timeout: LONG, ..hosts.options() };
    let sending = Sender::start(&guest, &there.to, &options);
    within(LONG, "it hangs", || hosts.faults.hung.load(Ordering::SeqCst) > 0);
    there.control.cancel().unwrap();
    let message = sending.result().unwrap_err().to_string();
    assert!(message.contains("the receiver was stopped"), "{message}");
    let refused = there.error();
    assert!(matches!(refused.cause, driftline_migrate::Cause::Cancelled), "{refused}");
    hosts.faults.make_hangs.store(false, Ordering::SeqCst);
    within(LONG, "the copies are gone", || hosts.copies() == 0);
}

/// Many disks of one block: the receiving thread waits for the first one while few bytes arrive.
/// Runs only with `DRIFTLINE_FULL=1`, because the window is longer than a busy machine may stall.
#[test]
fn storage_waits_do_not_count_as_source_pace() {
    if !repeats(false, true) {
        return;
    }
    let hosts = DriveHosts::new();
    let guest = hosts.pair.start(MemoryConfig::still());
    let guest = GuestWithDrives::start(guest, hosts.here.path(), &[4096; 24], 23);
    let faults = &hosts.faults;
    faults.write_hangs.store(true, Ordering::SeqCst);
    let window = LONG / 2;
    let there = hosts.receiver_with(|o| (o.disk_limit, o.pace_window) = (2 * LONG, window));
    let options = SendOptions { progress_timeout: 2 * LONG, ..hosts.options() };
    let sending = Sender::start(&guest, &there.to, &options);
    within(LONG, "a write hangs", || faults.hung.load(Ordering::SeqCst) > 0);
    // The window passes while the write hangs.
    std::thread::sleep(window + Duration::from_secs(1));
    faults.write_hangs.store(false, Ordering::SeqCst);
    sending.result().unwrap();
    there.guest().guest.verify().unwrap();
    (0..24).for_each(|i| guest.compare(i, &hosts.copy(i)));
}

#[test]
fn no_guest_is_built_while_copies_are_removed() {
    let hosts = DriveHosts::new();
    let guest = hosts.guest(25);
    hosts.faults.write_hangs.store(true, Ordering::SeqCst);
    let there = hosts.receiver_with(|o| o.disk_limit = Duration::from_millis(500));
    for why in ["copying disk \"disk0\" failed", "are still being removed"] {
        let error = send(&*guest, &there.to, &hosts.options(), &SendControl::new()).unwrap_err();
        assert!(error.to_string().contains(why), "{error}");
        within(LONG, "the receiver waits again", || there.waits_on());
    }
    hosts.faults.write_hangs.store(false, Ordering::SeqCst);
    within(LONG, "the copies are gone", || hosts.copies() == 0);
    there.control.cancel().unwrap();
    there.error();
}
