//! Copied disks: copies made while the guest writes, and removal of copies that fail.

use std::io::{Read, Write};
use std::net::TcpListener;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use crate::common::{
    AT_ONCE, At, CUT_COMMIT_DEADLINE, CopyFaults, CutPoint, DriveCopyFactory, GuestWithDrives,
    HostPair, LONG, Proxy, ProxyPlan, Receiver, Sender, await_writes, each, exactly_one_runs,
    quick_send, tag, within,
};
use driftline_format::{Header, MAGIC_STREAM, RecordHead};
use driftline_guest::testing::MemoryConfig;
use driftline_guest::{Lifecycle, RunState, VmId};
use driftline_migrate::{
    Compression, CopyDrives, ReceiveOptions, SendControl, SendOptions, TimeoutStrategy, send,
};
use proptest::prelude::*;

mod hanging;

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
