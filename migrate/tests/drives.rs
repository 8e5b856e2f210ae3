//! Drives that go along: copied while their guest writes to them, and what is left of a copy that
//! fails.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "test code")]

mod common;

use std::io::{Read, Write};
use std::net::TcpListener;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use common::{
    At, Cut, Disked, DiskedFactory, Host, LONG, Plan, Proxy, Receiver, Sender, exactly_one_runs,
    quick_send, tag, within,
};
use driftline_format::{Header, MAGIC_STREAM, RecordHead};
use driftline_guest::testing::MemoryConfig;
use driftline_guest::{GuestIdentity, Lifecycle, RunState, VmId};
use driftline_migrate::{
    Compression, CopyDrives, ReceiveOptions, SendControl, SendOptions, TimeoutStrategy, send,
};
use proptest::prelude::*;

/// A partial last block, and a drive of less than a block.
const SIZES: [u64; 3] = [(4 << 20) + 512, 1536, 1 << 20];

/// Hosts, and the directories of their drives.
struct World {
    host: Host,
    here: tempfile::TempDir,
    there: tempfile::TempDir,
    faults: Arc<common::CopyFaults>,
}

impl World {
    fn new() -> Self {
        let dir = || tempfile::tempdir().unwrap();
        Self { host: Host::new(), here: dir(), there: dir(), faults: Arc::default() }
    }

    fn guest(&self, seed: u64) -> Arc<Disked> {
        // Less than the links here carry.
        let config = MemoryConfig { writes_per_s: 1_000, ..MemoryConfig::small() };
        Disked::start(self.host.start(config), self.here.path(), &SIZES, seed)
    }

    fn receiver(&self) -> Receiver {
        let factory = DiskedFactory::new(&self.host, self.there.path());
        self.host.receiver_of(DiskedFactory { faults: self.faults.clone(), ..factory })
    }

    /// Which builds guests and copies of drives with such limits.
    fn receiver_by(&self, limits: impl FnOnce(&mut ReceiveOptions)) -> Receiver {
        let factory = DiskedFactory::new(&self.host, self.there.path());
        let factory = DiskedFactory { faults: self.faults.clone(), ..factory };
        let mut options = self.host.receive_options();
        limits(&mut options);
        self.host.receive(factory, options)
    }

    fn options(&self) -> SendOptions {
        SendOptions { copy_drives: CopyDrives::All, ..quick_send(&self.host) }
    }

    /// Slow enough for the guest to write during passes, and a pause that takes several to reach;
    /// on a busy machine it may take too many.
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

    fn compare(&self, guest: &Disked) {
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
    fn the_copy_is_what_the_guest_wrote_whenever_it_wrote_it(
        seed in any::<u64>(),
        wait_ms in 0u64..40,
    ) {
        let world = World::new();
        let guest = world.guest(seed);
        std::thread::sleep(Duration::from_millis(wait_ms));
        let there = world.receiver();
        let options = world.slow_options();
        let before = guest.writes.load(Ordering::SeqCst);
        let report = send(&*guest, &there.to, &options, &SendControl::new()).unwrap();
        let during = guest.writes.load(Ordering::SeqCst) - before;
        let arrived = there.guest();
        arrived.guest.verify().unwrap();
        world.compare(&guest);
        prop_assert!(during > 10, "{during} writes");
        prop_assert!(report.passes.len() >= 3, "{report:?}");
        let bytes: u64 = report.passes.iter().map(|p| p.disk_bytes).sum();
        prop_assert_eq!(bytes, report.disk_bytes + report.disk_zero_bytes);
        let all: u64 = SIZES.iter().sum();
        let half_and_more = report.disk_bytes >= all / 2 && report.passes[0].disk_bytes < all;
        prop_assert!(half_and_more, "holes are not sent: {report:?}");
        prop_assert_eq!(arrived.report.disk_bytes, report.disk_bytes);
        prop_assert_eq!(world.host.drive.most_running(), 1, "I7");
    }
}

#[test]
fn drives_go_along_with_whatever_else_is_asked_for() {
    let world = World::new();
    let guest = world.guest(17);
    let there = world.receiver();
    let options = SendOptions {
        connections: 3,
        compression: Compression::Lz4,
        verify: true,
        ..world.slow_options()
    };
    let report = send(&*guest, &there.to, &options, &SendControl::new()).unwrap();
    there.guest().guest.verify().unwrap();
    world.compare(&guest);
    assert!(report.passes.len() >= 3, "{report:?}");
}

#[test]
fn drives_that_are_not_named_stay() {
    let world = World::new();
    let guest = world.guest(3);
    let there = world.receiver();
    let named = |names: &[&str]| {
        let names = names.iter().map(|name| (*name).to_owned()).collect();
        SendOptions { copy_drives: CopyDrives::Named(names), ..world.options() }
    };
    let error = send(&*guest, &there.to, &named(&["disk7"]), &SendControl::new()).unwrap_err();
    assert!(error.to_string().contains("\"disk7\""), "{error}");
    assert_eq!(guest.run_state(), RunState::Running);
    send(&*guest, &there.to, &named(&["disk2"]), &SendControl::new()).unwrap();
    there.guest().guest.verify().unwrap();
    assert_eq!(world.copies(), 1);
    guest.compare(2, &world.copy(2));
}

#[test]
fn a_guest_without_drives_has_none_to_send() {
    let world = World::new();
    let guest = world.host.start(MemoryConfig::still());
    let there = world.receiver();
    let error = send(&*guest, &there.to, &world.options(), &SendControl::new()).unwrap_err();
    assert!(error.to_string().contains("copying disks"), "{error}");
    assert!(error.to_string().contains("the guest has none"), "{error}");
    send(&*guest, &there.to, &quick_send(&world.host), &SendControl::new()).unwrap();
    there.guest().guest.verify().unwrap();
}

#[test]
fn a_host_that_makes_no_copies_refuses_by_name() {
    let world = World::new();
    let guest = world.guest(1);
    let there = world.host.receiver();
    let error = send(&*guest, &there.to, &world.options(), &SendControl::new()).unwrap_err();
    let said = error.to_string();
    assert!(said.contains("disk \"disk0\" (4194816 bytes)"), "{said}");
    assert!(said.contains("no copies of drives are made here"), "{said}");
    assert_eq!(guest.run_state(), RunState::Running);
    within(LONG, "it waits on", || there.waits_on());
    let sent = Sender::start(guest.guest(), &there.to, &quick_send(&world.host)).result();
    sent.unwrap();
    there.guest().guest.verify().unwrap();
}

/// A destination of before there were copies: it says hello, without the feature, and hears the
/// rest.
#[test]
fn a_destination_that_is_too_old_is_told_so() {
    let world = World::new();
    let guest = world.guest(2);
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let to = listener.local_addr().unwrap().to_string();
    let old = std::thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        let mut said = Vec::new();
        Header::new(MAGIC_STREAM, VmId(Default::default()), 0, 0).write_to(&mut said).unwrap();
        let hello = [&[0; 16][..], b"0.0.1"].concat();
        let head = RecordHead {
            tag: tag("HELLO"),
            must_understand: true,
            instance: 0,
            length: hello.len() as u32,
            payload_crc: crc32c::crc32c(&hello),
            sequence: 0,
        };
        said.extend(head.to_bytes());
        stream.write_all(&[said, hello].concat()).unwrap();
        Header::read_from(&mut stream, MAGIC_STREAM).unwrap();
        let mut heard = Vec::new();
        for sequence in 0.. {
            let Ok(head) = RecordHead::read_from(&mut stream, sequence) else { break };
            let mut payload = vec![0; head.length as usize];
            stream.read_exact(&mut payload).unwrap();
            heard.push((head.tag, payload));
        }
        heard
    });
    let error = send(&*guest, &to, &world.options(), &SendControl::new()).unwrap_err().to_string();
    assert!(error.contains("does not offer copies of disks (--copy-disks)"), "{error}");
    assert!(error.ends_with("the guest continues here"), "{error}");
    let heard = old.join().unwrap();
    let tags: Vec<u16> = heard.iter().map(|(tag, _)| *tag).collect();
    assert_eq!(tags, [tag("HELLO"), tag("ABORT")], "it is not sent a guest");
    assert!(String::from_utf8_lossy(&heard[1].1).contains("--copy-disks"));
}

/// The connection cut in every message: exactly one guest runs, and of a guest that did not go
/// there is no copy.
fn cut_everywhere(cut: Cut) {
    let units = {
        let (world, plan) = (World::new(), Plan::default());
        let (guest, there) = (world.guest(5), world.receiver());
        let proxy = Proxy::start(&there.to, plan);
        let sent = Sender::start(&guest, &proxy.to, &one_pass(&world)).result();
        exactly_one_runs(&world.host, guest.guest(), &sent, there, "no cut");
        let units = proxy.from_source.lock().unwrap().clone();
        for name in ["DRIVES", "BLOCKS", "BLOCK_ZEROS", "BLOCKS_END"] {
            assert!(units.contains(&tag(name)), "{name} in {units:?}");
        }
        units
    };
    let about_drives = |t: &u16| *t >= tag("DRIVES") || *t == tag("CONFIG");
    let after = [tag("PASS_END"), tag("STATE_END"), tag("LATE"), tag("COMMIT")];
    for (unit, t) in units.iter().enumerate().filter(|(_, t)| about_drives(t) || after.contains(t))
    {
        let context = format!("{cut:?} unit {unit} (tag {t})");
        let world = World::new();
        let (guest, there) = (world.guest(unit as u64), world.receiver());
        let proxy = Proxy::start(&there.to, Plan::cut(true, At::Unit(unit), cut));
        let sent = Sender::start(&guest, &proxy.to, &one_pass(&world)).result();
        let moved = sent.is_ok();
        exactly_one_runs(&world.host, guest.guest(), &sent, there, &context);
        match moved {
            true => world.compare(&guest),
            false => assert_eq!(world.copies(), 0, "{context}"),
        }
    }
}

/// One pass, then the rest, so that runs are alike.
fn one_pass(world: &World) -> SendOptions {
    SendOptions { downtime: Duration::from_secs(60), ..world.options() }
}

#[test]
fn cut_within_messages_about_drives() {
    cut_everywhere(Cut::Within);
}

#[test]
fn cut_after_messages_about_drives() {
    cut_everywhere(Cut::After);
}

#[test]
fn a_full_disk_there_leaves_the_guest_here() {
    let world = World::new();
    let guest = world.guest(9);
    for (room, loses, why) in [
        (1 << 20, false, "writing its copy: No space left on device"),
        (0, true, "making its copy durable: Input/output error"),
    ] {
        world.faults.room.store(room, Ordering::SeqCst);
        world.faults.loses.store(loses, Ordering::SeqCst);
        let there = world.receiver();
        let error = send(&*guest, &there.to, &world.options(), &SendControl::new()).unwrap_err();
        let said = error.to_string();
        assert!(said.contains("copying disk \"disk0\" failed") && said.contains(why), "{said}");
        assert!(said.ends_with("the guest continues here"), "{said}");
        assert_eq!(guest.run_state(), RunState::Running);
        let refused = there.failure();
        assert!(refused.contains(why), "{refused}");
        assert_eq!(world.copies(), 0, "nothing is left");
    }
    world.faults.room.store(0, Ordering::SeqCst);
    world.faults.loses.store(false, Ordering::SeqCst);
    let there = world.receiver();
    send(&*guest, &there.to, &world.options(), &SendControl::new()).unwrap();
    there.guest().guest.verify().unwrap();
    world.compare(&guest);
}

#[test]
fn drives_do_not_hide_that_a_guest_outruns_the_link() {
    let world = World::new();
    let guest = world.guest(11);
    let there = world.receiver();
    let mut options = world.options();
    (options.downtime, options.max_passes) = (Duration::ZERO, 3);
    let nap = || std::thread::sleep(Duration::from_millis(30));
    let plan = Plan::default().before_from_source(tag("PASS_END"), nap);
    let proxy = Proxy::start(&there.to, plan);
    let error = send(&*guest, &proxy.to, &options, &SendControl::new()).unwrap_err();
    assert!(error.to_string().contains("outruns the link"), "{error}");
    assert_eq!(guest.run_state(), RunState::Running);
    assert!(there.failure().contains("outruns the link"));
    assert_eq!(world.copies(), 0);
}

#[test]
fn copy_that_hangs_leaves_the_guest_here() {
    let world = World::new();
    let guest = world.guest(13);
    let faults = &world.faults;
    for (hangs, why) in
        [(&faults.write_hangs, "writing its copy"), (&faults.sync_hangs, "making its copy durable")]
    {
        hangs.store(true, Ordering::SeqCst);
        let there = world.receiver_by(|o| o.disk_limit = Duration::from_millis(500));
        // Longer than the destination waits for its storage.
        let options = SendOptions { progress_timeout: LONG, ..world.options() };
        let error = send(&*guest, &there.to, &options, &SendControl::new()).unwrap_err();
        let said = error.to_string();
        assert!(said.contains("copying disk \"disk0\" failed") && said.contains(why), "{said}");
        assert!(said.contains("has not answered for 500ms"), "{said}");
        assert!(said.ends_with("the guest continues here"), "{said}");
        assert_eq!(guest.run_state(), RunState::Running);
        let refused = there.failure();
        assert!(refused.contains(why), "{refused}");
        // It answers after all: what was left behind goes.
        hangs.store(false, Ordering::SeqCst);
        within(LONG, "the copies are gone", || world.copies() == 0);
    }
}

#[test]
fn stop_ends_a_receiver_whose_copy_hangs() {
    let world = World::new();
    let guest = world.guest(15);
    world.faults.write_hangs.store(true, Ordering::SeqCst);
    let there = world.receiver_by(|o| o.disk_limit = LONG);
    let options = SendOptions { progress_timeout: LONG, ..world.options() };
    let sending = Sender::start(&guest, &there.to, &options);
    within(LONG, "a write hangs", || world.faults.hung.load(Ordering::SeqCst) > 0);
    there.control.cancel().unwrap();
    let said = sending.result().unwrap_err().to_string();
    assert!(said.contains("the receiver was stopped"), "{said}");
    assert_eq!(guest.run_state(), RunState::Running);
    let refused = there.error();
    assert!(matches!(refused.cause, driftline_migrate::Cause::Cancelled), "{refused}");
    world.faults.write_hangs.store(false, Ordering::SeqCst);
}

#[test]
fn guest_whose_copies_cannot_be_made_is_refused() {
    let world = World::new();
    let guest = world.guest(19);
    world.faults.make_hangs.store(true, Ordering::SeqCst);
    let there = world.receiver_by(|o| o.build_limit = Duration::from_millis(500));
    let options = SendOptions { setup_timeout: LONG, ..world.options() };
    let late = "was not built within 500ms (its disks or copies may be on storage that does not";
    let full = "earlier guests are still being built";
    for why in [late, late, late, late, full, full] {
        let error = send(&*guest, &there.to, &options, &SendControl::new()).unwrap_err();
        let said = error.to_string();
        assert!(said.contains("building the guest failed") && said.contains(why), "{said}");
        assert!(said.contains(&guest.vm_id().to_string()), "{said}");
        assert_eq!(guest.run_state(), RunState::Running);
        within(LONG, "it waits on", || there.waits_on());
    }
    within(LONG, "four threads hang", || world.faults.hung.load(Ordering::SeqCst) == 4);
    // They answer after all: what was left behind goes.
    world.faults.make_hangs.store(false, Ordering::SeqCst);
    within(LONG, "the next guest is built", || {
        send(&*guest, &there.to, &options, &SendControl::new()).is_ok()
    });
    there.guest().guest.verify().unwrap();
    world.compare(&guest);
}

#[test]
fn guest_is_built_beside_one_whose_storage_hangs() {
    let world = World::new();
    let guest = world.guest(27);
    world.faults.make_hangs.store(true, Ordering::SeqCst);
    let there = world.receiver_by(|o| o.build_limit = Duration::from_millis(500));
    let options = SendOptions { setup_timeout: LONG, ..world.options() };
    let error = send(&*guest, &there.to, &options, &SendControl::new()).unwrap_err();
    assert!(error.to_string().contains("was not built within 500ms"), "{error}");
    within(LONG, "it waits on", || there.waits_on());
    // Another one, of which no copies are made. A busy host may take longer than the limit.
    within(LONG, "another one is built", || {
        let sent = Sender::start(guest.guest(), &there.to, &quick_send(&world.host)).result();
        let late =
            |e: &driftline_migrate::SendError| e.to_string().contains("was not built within");
        sent.inspect_err(|e| assert!(late(e), "{e}")).is_ok()
    });
    there.guest().guest.verify().unwrap();
    assert_eq!(world.copies(), 0, "the first one's storage hangs still");
    world.faults.make_hangs.store(false, Ordering::SeqCst);
}

#[test]
fn stop_ends_a_receiver_whose_copies_are_not_made() {
    let world = World::new();
    let guest = world.guest(21);
    world.faults.make_hangs.store(true, Ordering::SeqCst);
    let there = world.receiver_by(|o| o.build_limit = LONG);
    let options = SendOptions { setup_timeout: LONG, ..world.options() };
    let sending = Sender::start(&guest, &there.to, &options);
    within(LONG, "it hangs", || world.faults.hung.load(Ordering::SeqCst) > 0);
    there.control.cancel().unwrap();
    let said = sending.result().unwrap_err().to_string();
    assert!(said.contains("the receiver was stopped"), "{said}");
    let refused = there.error();
    assert!(matches!(refused.cause, driftline_migrate::Cause::Cancelled), "{refused}");
    world.faults.make_hangs.store(false, Ordering::SeqCst);
    within(LONG, "the copies are gone", || world.copies() == 0);
}

/// Many drives of a block: the receiving thread waits for the first one while few bytes come. With
/// `DRIFTLINE_FULL=1` alone: the window has to be longer than a busy machine may stall.
#[test]
fn source_is_not_too_slow_while_storage_makes_it_wait() {
    if std::env::var("DRIFTLINE_FULL").as_deref() != Ok("1") {
        return;
    }
    let world = World::new();
    let guest = world.host.start(MemoryConfig::still());
    let guest = Disked::start(guest, world.here.path(), &[4096; 24], 23);
    let faults = &world.faults;
    faults.write_hangs.store(true, Ordering::SeqCst);
    let window = LONG / 2;
    let there = world.receiver_by(|o| (o.disk_limit, o.pace_window) = (2 * LONG, window));
    let options = SendOptions { progress_timeout: 2 * LONG, ..world.options() };
    let sending = Sender::start(&guest, &there.to, &options);
    within(LONG, "a write hangs", || faults.hung.load(Ordering::SeqCst) > 0);
    std::thread::sleep(window + Duration::from_secs(1));
    faults.write_hangs.store(false, Ordering::SeqCst);
    sending.result().unwrap();
    there.guest().guest.verify().unwrap();
    (0..24).for_each(|i| guest.compare(i, &world.copy(i)));
}

#[test]
fn no_guest_is_built_while_copies_of_the_last_are_being_removed() {
    let world = World::new();
    let guest = world.guest(25);
    world.faults.write_hangs.store(true, Ordering::SeqCst);
    let there = world.receiver_by(|o| o.disk_limit = Duration::from_millis(500));
    for why in ["copying disk \"disk0\" failed", "are still being removed"] {
        let error = send(&*guest, &there.to, &world.options(), &SendControl::new()).unwrap_err();
        assert!(error.to_string().contains(why), "{error}");
        within(LONG, "it waits on", || there.waits_on());
    }
    world.faults.write_hangs.store(false, Ordering::SeqCst);
    within(LONG, "the copies are gone", || world.copies() == 0);
    there.control.cancel().unwrap();
    there.error();
}
