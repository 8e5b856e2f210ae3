//! Copied disks: copies made while the guest writes, and removal of copies that fail.

use std::io::{Read, Write};
use std::net::TcpListener;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use crate::common::{
    AT_ONCE, At, CUT_COMMIT_DEADLINE, CopyFaults, CutPoint, DriveCopyFactory, GuestWithDrives,
    HostPair, LONG, Proxy, ProxyPlan, Receiver, Sender, await_writes, each, exactly_one_runs,
    quick_send, tag, within,
};
use driftline_format::{Header, MAGIC_STREAM, RecordHead};
use driftline_guest::testing::{MemoryConfig, repeats};
use driftline_guest::{GuestIdentity, Lifecycle, RunState, VmId};
use driftline_migrate::{
    Compression, CopyDrives, ReceiveOptions, SendControl, SendOptions, TimeoutStrategy, send,
};
use proptest::prelude::*;

/// Sizes of disks in bytes, with a partial last block and a disk of less than a block.
const SIZES: [u64; 3] = [(4 << 20) + 512, 1536, 1 << 20];

/// Two hosts, with the directories of their disks.
struct DriveHosts {
    pair: HostPair,
    here: tempfile::TempDir,
    there: tempfile::TempDir,
    faults: Arc<CopyFaults>,
}

impl DriveHosts {
    fn new() -> Self {
        let dir = || tempfile::tempdir().unwrap();
        Self { pair: HostPair::new(), here: dir(), there: dir(), faults: Arc::default() }
    }

    fn guest(&self, seed: u64) -> Arc<GuestWithDrives> {
        // Slower than the link.
        let config = MemoryConfig { writes_per_s: 1_000, ..MemoryConfig::small() };
        GuestWithDrives::start(self.pair.start(config), self.here.path(), &SIZES, seed)
    }

    fn receiver(&self) -> Receiver {
        let factory = DriveCopyFactory::new(&self.pair, self.there.path());
        self.pair.receiver_of(DriveCopyFactory { faults: self.faults.clone(), ..factory })
    }

    /// Starts a receiver with changed options.
    fn receiver_with(&self, limits: impl FnOnce(&mut ReceiveOptions)) -> Receiver {
        let factory = DriveCopyFactory::new(&self.pair, self.there.path());
        let factory = DriveCopyFactory { faults: self.faults.clone(), ..factory };
        let mut options = self.pair.receive_options();
        limits(&mut options);
        self.pair.receive(factory, options)
    }

    fn options(&self) -> SendOptions {
        SendOptions { copy_drives: CopyDrives::All, ..quick_send(&self.pair) }
    }

    /// Returns options by which the guest writes during passes, and several passes precede the
    /// pause. On a busy machine pre-copy may not converge, and pauses then.
    fn slow_options(&self) -> SendOptions {
        let (max_bandwidth, downtime) = (Some(48 << 20), Duration::from_millis(4));
        let timeout_strategy = TimeoutStrategy::Switchover;
        SendOptions { max_bandwidth, downtime, timeout_strategy, ..self.options() }
    }

    fn copy(&self, i: usize) -> PathBuf {
        self.there.path().join(format!("disk{i}"))
    }

    fn copies(&self) -> usize {
        std::fs::read_dir(self.there.path()).unwrap().count()
    }

    fn compare(&self, guest: &GuestWithDrives) {
        (0..SIZES.len()).for_each(|i| guest.compare(i, &self.copy(i)));
    }
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: 6,
        failure_persistence: None,
        ..ProptestConfig::default()
    })]

    #[test]
    fn copy_equals_the_disk_written_during_passes(
        seed in any::<u64>(),
        first_writes in 0u64..40,
    ) {
        let hosts = DriveHosts::new();
        let guest = hosts.guest(seed);
        await_writes(&*guest, || guest.writes.load(Ordering::SeqCst), first_writes);
        let there = hosts.receiver();
        let options = hosts.slow_options();
        let before = guest.writes.load(Ordering::SeqCst);
        let report = send(&*guest, &there.to, &options, &SendControl::new()).unwrap();
        let during = guest.writes.load(Ordering::SeqCst) - before;
        let arrived = there.guest();
        arrived.guest.verify().unwrap();
        hosts.compare(&guest);
        prop_assert!(during > 10, "{during} writes");
        prop_assert!(report.passes.len() >= 3, "{report:?}");
        let bytes: u64 = report.passes.iter().map(|p| p.disk_bytes).sum();
        prop_assert_eq!(bytes, report.disk_bytes + report.disk_zero_bytes);
        let all: u64 = SIZES.iter().sum();
        let half_and_more = report.disk_bytes >= all / 2 && report.passes[0].disk_bytes < all;
        prop_assert!(half_and_more, "holes are not sent: {report:?}");
        prop_assert_eq!(arrived.report.disk_bytes, report.disk_bytes);
        prop_assert_eq!(hosts.pair.drive.most_running(), 1, "I7");
    }
}

#[test]
fn drives_are_copied_with_all_other_options() {
    let hosts = DriveHosts::new();
    let guest = hosts.guest(17);
    let there = hosts.receiver();
    let options = SendOptions {
        connections: 3,
        compression: Compression::Lz4,
        verify: true,
        ..hosts.slow_options()
    };
    let report = send(&*guest, &there.to, &options, &SendControl::new()).unwrap();
    there.guest().guest.verify().unwrap();
    hosts.compare(&guest);
    assert!(report.passes.len() >= 3, "{report:?}");
}

#[test]
fn only_named_drives_are_copied() {
    let hosts = DriveHosts::new();
    let guest = hosts.guest(3);
    let there = hosts.receiver();
    let named = |names: &[&str]| {
        let names = names.iter().map(|name| (*name).to_owned()).collect();
        SendOptions { copy_drives: CopyDrives::Named(names), ..hosts.options() }
    };
    let error = send(&*guest, &there.to, &named(&["disk7"]), &SendControl::new()).unwrap_err();
    assert!(error.to_string().contains("\"disk7\""), "{error}");
    assert_eq!(guest.run_state(), RunState::Running);
    send(&*guest, &there.to, &named(&["disk2"]), &SendControl::new()).unwrap();
    there.guest().guest.verify().unwrap();
    assert_eq!(hosts.copies(), 1);
    guest.compare(2, &hosts.copy(2));
}

#[test]
fn guest_without_drives_cannot_copy_drives() {
    let hosts = DriveHosts::new();
    let guest = hosts.pair.start(MemoryConfig::still());
    let there = hosts.receiver();
    let error = send(&*guest, &there.to, &hosts.options(), &SendControl::new()).unwrap_err();
    assert!(error.to_string().contains("copying disks"), "{error}");
    assert!(error.to_string().contains("the guest has none"), "{error}");
    send(&*guest, &there.to, &quick_send(&hosts.pair), &SendControl::new()).unwrap();
    there.guest().guest.verify().unwrap();
}

#[test]
fn host_without_copies_refuses_by_disk_name() {
    let hosts = DriveHosts::new();
    let guest = hosts.guest(1);
    let there = hosts.pair.receiver();
    let error = send(&*guest, &there.to, &hosts.options(), &SendControl::new()).unwrap_err();
    let message = error.to_string();
    assert!(message.contains("disk \"disk0\" (4194816 bytes)"), "{message}");
    assert!(message.contains("no copies of drives are made here"), "{message}");
    assert_eq!(guest.run_state(), RunState::Running);
    within(LONG, "the receiver waits again", || there.waits_on());
    let sent = Sender::start(guest.guest(), &there.to, &quick_send(&hosts.pair)).result();
    sent.unwrap();
    there.guest().guest.verify().unwrap();
}

/// The destination sends HELLO without the feature, and records what the source sends.
#[test]
fn destination_without_the_feature_gets_abort() {
    let hosts = DriveHosts::new();
    let guest = hosts.guest(2);
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let to = listener.local_addr().unwrap().to_string();
    let old = std::thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        let mut hello_bytes = Vec::new();
        Header::new(MAGIC_STREAM, VmId(Default::default()), 0, 0)
            .write_to(&mut hello_bytes)
            .unwrap();
        let hello = [&[0; 16][..], b"0.0.1"].concat();
        let head = RecordHead {
            tag: tag("HELLO"),
            must_understand: true,
            instance: 0,
            length: hello.len() as u32,
            payload_crc: crc32c::crc32c(&hello),
            sequence: 0,
        };
        hello_bytes.extend(head.to_bytes());
        stream.write_all(&[hello_bytes, hello].concat()).unwrap();
        Header::read_from(&mut stream, MAGIC_STREAM).unwrap();
        let mut received = Vec::new();
        for sequence in 0.. {
            let Ok(head) = RecordHead::read_from(&mut stream, sequence) else { break };
            let mut payload = vec![0; head.length as usize];
            stream.read_exact(&mut payload).unwrap();
            received.push((head.tag, payload));
        }
        received
    });
    let error = send(&*guest, &to, &hosts.options(), &SendControl::new()).unwrap_err().to_string();
    assert!(error.contains("does not offer copies of disks (--copy-disks)"), "{error}");
    assert!(error.ends_with("the guest continues here"), "{error}");
    let received = old.join().unwrap();
    let tags: Vec<u16> = received.iter().map(|(tag, _)| *tag).collect();
    assert_eq!(tags, [tag("HELLO"), tag("ABORT")], "no guest is sent");
    assert!(String::from_utf8_lossy(&received[1].1).contains("--copy-disks"));
}

/// Cuts the connection at every message about disks. Exactly one guest runs, and no copy is left of
/// a guest that did not move.
fn cut_everywhere(cut: CutPoint) {
    let units = {
        let (hosts, plan) = (DriveHosts::new(), ProxyPlan::default());
        let (guest, there) = (hosts.guest(5), hosts.receiver());
        let proxy = Proxy::start(&there.to, plan);
        let sent = Sender::start(&guest, &proxy.to, &one_pass(&hosts)).result();
        exactly_one_runs(&hosts.pair, guest.guest(), &sent, there, "no cut");
        let units = proxy.from_source.lock().unwrap().clone();
        for name in ["DRIVES", "BLOCKS", "BLOCK_ZEROS", "BLOCKS_END"] {
            assert!(units.contains(&tag(name)), "{name} in {units:?}");
        }
        units
    };
    let about_drives = |t: &u16| *t >= tag("DRIVES") || *t == tag("CONFIG");
    let after = [tag("PASS_END"), tag("STATE_END"), tag("LATE"), tag("COMMIT")];
    let cuts = units.into_iter().enumerate();
    let cuts = cuts.filter(|(_, t)| about_drives(t) || after.contains(t)).collect();
    each(cuts, AT_ONCE, |(unit, t)| cut_at(cut, unit, t));
}

/// Cuts the connection at a message from the source, which has the tag `t`.
fn cut_at(cut: CutPoint, unit: usize, t: u16) {
    let context = format!("{cut:?} unit {unit} (tag {t})");
    let hosts = DriveHosts::new();
    let there = hosts.receiver_with(|o| o.commit_deadline = CUT_COMMIT_DEADLINE);
    let guest = hosts.guest(unit as u64);
    let proxy = Proxy::start(&there.to, ProxyPlan::cut(true, At::Unit(unit), cut));
    let sent = Sender::start(&guest, &proxy.to, &one_pass(&hosts)).result();
    let moved = sent.is_ok();
    exactly_one_runs(&hosts.pair, guest.guest(), &sent, there, &context);
    match moved {
        true => hosts.compare(&guest),
        false => assert_eq!(hosts.copies(), 0, "{context}"),
    }
}

/// Returns options for one pass and the pause, so that runs are alike.
fn one_pass(hosts: &DriveHosts) -> SendOptions {
    SendOptions { downtime: Duration::from_secs(60), ..hosts.options() }
}

#[test]
fn cut_within_messages_about_drives() {
    cut_everywhere(CutPoint::Within);
}

#[test]
fn cut_after_messages_about_drives() {
    cut_everywhere(CutPoint::After);
}

#[test]
fn full_destination_disk_fails_the_migration() {
    let hosts = DriveHosts::new();
    let guest = hosts.guest(9);
    for (room, loses, why) in [
        (1 << 20, false, "writing its copy: No space left on device"),
        (0, true, "making its copy durable: Input/output error"),
    ] {
        hosts.faults.room.store(room, Ordering::SeqCst);
        hosts.faults.sync_fails.store(loses, Ordering::SeqCst);
        let there = hosts.receiver();
        let error = send(&*guest, &there.to, &hosts.options(), &SendControl::new()).unwrap_err();
        let message = error.to_string();
        assert!(
            message.contains("copying disk \"disk0\" failed") && message.contains(why),
            "{message}"
        );
        assert!(message.ends_with("the guest continues here"), "{message}");
        assert_eq!(guest.run_state(), RunState::Running);
        let refused = there.failure();
        assert!(refused.contains(why), "{refused}");
        assert_eq!(hosts.copies(), 0, "no copy is left");
    }
    hosts.faults.room.store(0, Ordering::SeqCst);
    hosts.faults.sync_fails.store(false, Ordering::SeqCst);
    let there = hosts.receiver();
    send(&*guest, &there.to, &hosts.options(), &SendControl::new()).unwrap();
    there.guest().guest.verify().unwrap();
    hosts.compare(&guest);
}

#[test]
fn fast_writer_with_drives_is_given_up() {
    let hosts = DriveHosts::new();
    let guest = hosts.guest(11);
    let there = hosts.receiver();
    let mut options = hosts.options();
    (options.downtime, options.max_passes) = (Duration::ZERO, 3);
    let writer = guest.clone();
    let written = move || await_writes(&*writer, || writer.writes.load(Ordering::SeqCst), 20);
    let plan = ProxyPlan::default().before_from_source(tag("PASS_END"), written);
    let proxy = Proxy::start(&there.to, plan);
    let error = send(&*guest, &proxy.to, &options, &SendControl::new()).unwrap_err();
    assert!(error.to_string().contains("outruns the link"), "{error}");
    assert_eq!(guest.run_state(), RunState::Running);
    assert!(there.failure().contains("outruns the link"));
    assert_eq!(hosts.copies(), 0);
}

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
