//! The connection is cut before, in and after every message, in both directions, or stalls at it.
//! After each case exactly one guest runs and its memory is whole.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use crate::common::{
    AT_ONCE, At, CUT_COMMIT_DEADLINE, CutPoint, HostPair, LONG, Proxy, ProxyPlan, Receiver, Sender,
    await_last_message, each, exactly_one_runs, quick_send, tag, within,
};
use driftline_dirty_tracker::PAGE_SIZE;
use driftline_guest::testing::{MemoryConfig, MemoryGuest, image, repeats};
use driftline_guest::{GuestContents, Lifecycle, RunState};
use driftline_migrate::{GuestPlace, ReceiveOptions};
use vm_memory::{Bytes, GuestAddress};

/// How memory reaches the destination.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum HandOverKind {
    Copying,
    /// Over a unix socket, by descriptors.
    Local,
}

/// Returns options for one pass and the pause, so that runs are alike.
fn options(hosts: &HostPair, kind: HandOverKind) -> driftline_migrate::SendOptions {
    let mut options = quick_send(hosts);
    options.downtime = Duration::from_secs(60);
    options.local = kind == HandOverKind::Local;
    options
}

fn receiver(hosts: &HostPair, kind: HandOverKind, options: ReceiveOptions) -> Receiver {
    match kind {
        HandOverKind::Copying => hosts.receiver_with(options),
        HandOverKind::Local => hosts.local_receiver(options),
    }
}

fn config() -> MemoryConfig {
    MemoryConfig::small()
}

/// Enough writes for runs that are long enough for FRAMES.
const WRITES: u64 = 1000;

/// Starts a guest, and waits until it has written more than [`WRITES`] times.
fn start(hosts: &HostPair, kind: HandOverKind) -> Arc<MemoryGuest> {
    let guest = match kind {
        HandOverKind::Copying => hosts.start(config()),
        HandOverKind::Local => hosts.start_in_files(config()),
    };
    within(LONG, &format!("{WRITES} writes"), || guest.writes() > WRITES);
    guest
}

/// Returns the tags of a whole migration from the source and from the destination; 0 is the header.
fn units(kind: HandOverKind) -> (Vec<u16>, Vec<u16>) {
    let hosts = HostPair::new();
    let guest = start(&hosts, kind);
    let there = receiver(&hosts, kind, hosts.receive_options());
    let proxy = Proxy::start(&there.to, ProxyPlan::default());
    let sent = Sender::start(&guest, &proxy.to, &options(&hosts, kind)).result();
    exactly_one_runs(&hosts, &guest, &sent, there, "no cut");
    await_last_message(&proxy);
    within(LONG, "RUNNING is forwarded", || {
        proxy.from_destination.lock().unwrap().last() == Some(&tag("RUNNING"))
    });
    let seen = |tags: &Mutex<Vec<u16>>| tags.lock().unwrap().clone();
    (seen(&proxy.from_source), seen(&proxy.from_destination))
}

/// Returns the first unit and the last unit of each tag, because the number of messages with memory
/// varies; in the long form also the second.
fn some_of_each(tags: &[u16]) -> Vec<(usize, u16)> {
    let units = || tags.iter().copied().enumerate();
    let among = |unit: usize, tag: u16| {
        let before = tags[..unit].iter().filter(|t| **t == tag).count();
        before < repeats(1, 2) || !tags[unit + 1..].contains(&tag)
    };
    units().filter(|(unit, tag)| among(*unit, *tag)).collect()
}

/// Cuts at each unit; in the long form in each of the ways, otherwise in the ways in turn.
fn cut_everywhere(kind: HandOverKind, cuts: &[CutPoint]) {
    let (from_source, from_destination) = units(kind);
    for name in ["MEMORY", "FILES"] {
        assert_eq!(from_source.contains(&tag(name)), kind == HandOverKind::Local, "{name}");
    }
    assert_eq!(from_source.last(), Some(&tag("ENDED")), "{from_source:?}");
    assert_eq!(from_destination.last(), Some(&tag("RUNNING")), "{from_destination:?}");
    let sides = [(true, from_source), (false, from_destination)];
    let units = sides.iter().flat_map(|(source, tags)| {
        some_of_each(tags).into_iter().map(|(unit, tag)| (*source, unit, tag))
    });
    let each_cut = units.enumerate().flat_map(|(number, unit)| {
        let first = number % cuts.len();
        let times = repeats(1, cuts.len());
        cuts.iter().cycle().skip(first).take(times).map(move |cut| (*cut, unit))
    });
    each(each_cut.collect(), AT_ONCE, |(cut, (source, unit, tag))| {
        cut_at(kind, cut, source, unit, tag);
    });
}

fn cut_at(kind: HandOverKind, cut: CutPoint, source: bool, unit: usize, tag: u16) {
    let side = if source { "source" } else { "destination" };
    let context = format!("{kind:?}, {cut:?} unit {unit} (tag {tag}) from the {side}");
    println!("{context}");
    let hosts = HostPair::new();
    let guest = start(&hosts, kind);
    let mut receiving = hosts.receive_options();
    let mut sending = options(&hosts, kind);
    receiving.commit_deadline = CUT_COMMIT_DEADLINE;
    if cut == CutPoint::Stall {
        // Only a limit ends a stall. It is short for the stalled step, and long for earlier steps,
        // which a busy machine may delay.
        let limit = |here| if here { Duration::from_millis(300) } else { LONG };
        sending.connect_timeout = limit(unit <= 1);
        // The unit of CONFIG, which MEMORY and FILES precede.
        let config = if kind == HandOverKind::Local { 4 } else { 2 };
        receiving.handshake_timeout = limit(unit <= if source { config } else { 1 });
        sending.setup_timeout = limit(unit == 2 || source && (2..=config).contains(&unit));
        receiving.progress_timeout = limit(true);
        sending.progress_timeout = limit(true);
        receiving.commit_deadline = Duration::from_millis(500);
        sending.commit_timeout = Duration::from_millis(400);
    }
    let mut there = receiver(&hosts, kind, receiving);
    // With the limits of a stall a whole migration may fail on a busy machine. The short form sends
    // the guest again only after one kind of cut.
    there.again = match cut {
        CutPoint::Stall => false,
        CutPoint::Within => true,
        _ => repeats(false, true),
    };
    let proxy = Proxy::start(&there.to, ProxyPlan::cut(source, At::Unit(unit), cut));
    let sent = Sender::start(&guest, &proxy.to, &sending).result();
    exactly_one_runs(&hosts, &guest, &sent, there, &context);
}

#[test]
fn cut_before_every_message() {
    cut_everywhere(HandOverKind::Copying, &[CutPoint::Before]);
}

#[test]
fn cut_in_every_message() {
    cut_everywhere(HandOverKind::Copying, &[CutPoint::Within]);
}

#[test]
fn cut_after_every_message() {
    cut_everywhere(HandOverKind::Copying, &[CutPoint::After]);
}

#[test]
fn stall_at_every_message() {
    cut_everywhere(HandOverKind::Copying, &[CutPoint::Stall]);
}

#[test]
fn local_hand_over_is_cut_at_every_message() {
    let cuts = [CutPoint::Before, CutPoint::Within, CutPoint::After];
    cut_everywhere(HandOverKind::Local, &cuts);
}

#[test]
fn local_hand_over_stalls_at_every_message() {
    cut_everywhere(HandOverKind::Local, &[CutPoint::Stall]);
}

#[test]
fn flipped_bit_in_any_message_is_detected() {
    flip_everywhere(HandOverKind::Copying);
}

#[test]
fn local_hand_over_detects_any_flipped_bit() {
    flip_everywhere(HandOverKind::Local);
}

fn flip_everywhere(kind: HandOverKind) {
    let (from_source, from_destination) = units(kind);
    for (source, mut tags) in [(true, from_source), (false, from_destination)] {
        // By tag, because the numbers of PAGES and ZERO vary. EXPECT comes by chance: it needs 64
        // frames in a row that are not zero, and every eighth is. It has a test of its own.
        tags.retain(|tag| *tag != self::tag("EXPECT"));
        tags.sort();
        tags.dedup();
        // In the head of a record, and in its payload (or in the head again if there is none).
        let flips = tags.into_iter().enumerate().flat_map(|(number, tag)| {
            let bytes = [13, 30].into_iter().cycle().skip(number % 2);
            // A hand-over that copies has the other messages as well, each with both flips.
            let is_both = ["MEMORY", "FILES"].map(self::tag).contains(&tag);
            let is_short = kind == HandOverKind::Local && !is_both;
            bytes.take(if is_short { repeats(1, 2) } else { 2 }).map(move |byte| (tag, byte))
        });
        each(flips.collect(), AT_ONCE, |(tag, byte)| flip(kind, source, tag, byte));
    }
}

/// Flips a bit in the first message of a tag.
fn flip(kind: HandOverKind, source: bool, tag_number: u16, byte: usize) {
    let context = format!("{kind:?}, bit flipped in byte {byte} of tag {tag_number}");
    for _ in 0..10 {
        let hosts = HostPair::new();
        let guest = start(&hosts, kind);
        let mut there = receiver(&hosts, kind, hosts.receive_options());
        // After cuts, the short form sends the guest again, too.
        there.again = repeats(false, true);
        let plan = ProxyPlan::flip(source, At::Tag(tag_number), byte);
        let proxy = Proxy::start(&there.to, plan);
        let sent = Sender::start(&guest, &proxy.to, &options(&hosts, kind)).result();
        exactly_one_runs(&hosts, &guest, &sent, there, &context);
        // After RUNNING is sent, the guest is at the destination.
        let moved = [tag("RUNNING"), tag("ENDED")].contains(&tag_number);
        if sent.is_ok() == moved {
            return;
        }
        // A guest that by chance has no zero frame needs no ZERO.
        let carried = if source { &proxy.from_source } else { &proxy.from_destination };
        let there_was_one = carried.lock().unwrap().contains(&tag_number);
        assert!(sent.is_ok() && !there_was_one, "{context}: {sent:?}");
    }
    panic!("{context}: ten migrations had no such message");
}

#[test]
fn flipped_bit_in_an_announcement_is_detected() {
    // In the head, and in the payload.
    for (byte, what) in [(13, "a record's head"), (30, "a record")] {
        let hosts = HostPair::new();
        let config = MemoryConfig::still();
        let runs: Vec<_> =
            config.slots.iter().map(|slot| slot.base.0..slot.base.0 + slot.frames).collect();
        let guest = hosts.start(config);
        // Without a frame of zeros, each slot is announced.
        for gfn in runs.into_iter().flatten() {
            let page = [gfn as u8 | 1; PAGE_SIZE as usize];
            guest.ram().write_slice(&page, GuestAddress(gfn * PAGE_SIZE)).unwrap();
        }
        let before = image(&guest);
        let there = hosts.receiver();
        let plan = ProxyPlan::flip(true, At::Tag(tag("EXPECT")), byte);
        let proxy = Proxy::start(&there.to, plan);
        let e = Sender::start(&guest, &proxy.to, &quick_send(&hosts)).result().unwrap_err();
        assert!(matches!(e.guest, GuestPlace::Here), "{e}");
        assert!(proxy.from_source.lock().unwrap().contains(&tag("EXPECT")), "{e}");
        assert_eq!(guest.run_state(), RunState::Running, "{e}");
        within(LONG, "the receiver refuses", || there.waits_on());
        let refusal = there.control.progress().last_refusal.unwrap();
        let text = format!("checksum of {what} ");
        assert!(refusal.contains(&text) && e.to_string().contains(&text), "{refusal}, {e}");
        // The failure has left nothing behind.
        Sender::start(&guest, &there.to, &quick_send(&hosts)).result().unwrap();
        let arrived = there.guest().guest;
        assert!(image(&guest) == before && image(&arrived) == before, "byte {byte}");
        assert_eq!(hosts.drive.most_running(), 1, "byte {byte}: I7");
    }
}
