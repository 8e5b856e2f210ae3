//! Options of a migration: several connections, compressed contents, a comparison of all memory.

use std::sync::{Arc, Mutex, OnceLock};
use std::time::Duration;

use crate::common::{
    At, CutPoint, HostPair, LONG, Proxy, ProxyPlan, Sender, each, exactly_one_runs, quick_send,
    tag, within,
};
use driftline_dirty_tracker::{Gfn, PAGE_SIZE, Slot, SlotId};
use driftline_guest::testing::{MemoryConfig, Op};
use driftline_guest::{Guest, GuestContents, Lifecycle, RunState};
use driftline_migrate::{
    Cause, Compression, MAX_CONNECTIONS, ReceiveOptions, SendControl, SendOptions,
};
use vm_memory::{Bytes, GuestAddress};

const FRAMES: u64 = 16 << 10;

/// Returns a guest of 64 MiB in two slots, a part of which two writers use.
fn large() -> MemoryConfig {
    let slots = vec![
        Slot { id: SlotId(0), base: Gfn(0), frames: 5000 },
        Slot { id: SlotId(1), base: Gfn(0x2000), frames: FRAMES - 5000 },
    ];
    MemoryConfig { slots, working_set: 2048, ..MemoryConfig::small() }
}

/// Fills frames after the working set with the values of `byte`.
fn fill(guest: &dyn Guest, frames: std::ops::Range<u64>, byte: impl Fn(u64, usize) -> u8) {
    for gfn in frames {
        let page: Vec<u8> = (0..PAGE_SIZE as usize).map(|at| byte(gfn, at)).collect();
        guest.ram().write_slice(&page, GuestAddress(gfn * PAGE_SIZE)).unwrap();
    }
}

const FILLED: std::ops::Range<u64> = 0x2800..0x2800 + 4096;

fn same(ours: &dyn Guest, theirs: &dyn Guest, context: &str) {
    for gfn in FILLED {
        let [mut a, mut b] = [[0; PAGE_SIZE as usize]; 2];
        ours.ram().read_slice(&mut a, GuestAddress(gfn * PAGE_SIZE)).unwrap();
        theirs.ram().read_slice(&mut b, GuestAddress(gfn * PAGE_SIZE)).unwrap();
        assert_eq!(a, b, "{context}: frame {gfn:#x}");
    }
}

fn with(hosts: &HostPair, change: impl FnOnce(&mut SendOptions)) -> SendOptions {
    let mut options = quick_send(hosts);
    change(&mut options);
    options
}

#[test]
fn memory_arrives_over_connections_and_codecs() {
    let several = [1, 2, 5, MAX_CONNECTIONS];
    for (compression, several) in [
        (Compression::None, &several[..]),
        (Compression::Lz4, &several[..1]),
        (Compression::Zstd, &several[1..2]),
    ] {
        for &connections in several {
            let context = format!("{connections} connections, {compression}");
            let hosts = HostPair::new();
            let guest = hosts.start(large());
            // A third is zeros, a third packs well, a third does not.
            fill(&*guest, FILLED, |gfn, at| match gfn % 3 {
                0 => 0,
                1 => gfn as u8,
                _ => (gfn as usize ^ at.wrapping_mul(0x9e37_79b9) >> 7) as u8,
            });
            let there = hosts.receiver();
            let options = with(&hosts, |o| {
                (o.connections, o.compression, o.verify) = (connections, compression, true);
            });
            let sent = Sender::start(&guest, &there.to, &options).result();
            let report = sent.unwrap_or_else(|e| panic!("{context}: {e}"));
            let arrived = there.guest();
            same(&*guest, &*arrived.guest, &context);
            assert_eq!(arrived.report.normal_frames, report.normal_frames, "{context}");
            assert_eq!(arrived.report.zero_frames, report.zero_frames, "{context}");
            let content = report.normal_frames * PAGE_SIZE;
            match compression {
                Compression::None => assert!(report.transferred_bytes > content, "{context}"),
                _ => assert!(report.transferred_bytes < content, "{context}: {report:?}"),
            }
            // The destination's figure does not have the last small messages.
            let difference = report.transferred_bytes.abs_diff(arrived.report.received_bytes);
            let bound = 500 + 200 * u64::from(connections);
            assert!(difference < bound, "{context}: {difference}");
            assert_eq!(hosts.drive.most_running(), 1, "{context}: I7");
        }
    }
}

#[test]
fn each_connection_carries_a_share() {
    let hosts = HostPair::new();
    // Several times the size of a connection's buffers.
    let frames = 12 << 10;
    let slots = vec![Slot { id: SlotId(0), base: Gfn(0), frames }];
    let guest = hosts.start(MemoryConfig { slots, writers: 0, working_set: 0, ..large() });
    for gfn in 0..frames {
        let page = [gfn as u8 | 1; PAGE_SIZE as usize];
        guest.ram().write_slice(&page, GuestAddress(gfn * PAGE_SIZE)).unwrap();
    }
    let there = hosts.receiver();
    // The first connection stalls until an eighth is left, so that the others carry the rest.
    let control = Arc::new(OnceLock::<Arc<SendControl>>::new());
    let (mut stalled, watched) = (false, control.clone());
    let stall = move || {
        let left = || watched.get().map_or(frames, |c| c.progress().remaining_frames);
        if !std::mem::replace(&mut stalled, true) {
            within(LONG, "the other connections send", || left() <= frames / 8);
        }
    };
    let plan = ProxyPlan::default().before_from_source(tag("FRAMES"), stall);
    let proxy = Proxy::start(&there.to, plan);
    let options = with(&hosts, |o| o.connections = 3);
    let sender = Sender::start(&guest, &proxy.to, &options);
    control.set(sender.control.clone()).unwrap();
    let report = sender.result().unwrap();
    let first = proxy.from_source.lock().unwrap();
    let over_first = first.iter().filter(|t| **t == tag("FRAMES")).count() as u64;
    assert!(over_first * 256 < report.passes[0].frames / 2, "{over_first}: {report:?}");
    let arrived = there.guest().guest;
    for gfn in 0..frames {
        let mut page = [0; PAGE_SIZE as usize];
        arrived.ram().read_slice(&mut page, GuestAddress(gfn * PAGE_SIZE)).unwrap();
        assert_eq!(page, [gfn as u8 | 1; PAGE_SIZE as usize], "frame {gfn:#x}");
    }
}

#[test]
fn broken_connection_ends_the_migration() {
    let cuts = [CutPoint::Within, CutPoint::Stall];
    let cases = cuts.into_iter().flat_map(|cut| [0, 1, 2].map(|which| (cut, which)));
    each(cases.collect(), 6, |(cut, which)| {
        let context = format!("{cut:?} in connection {which}");
        let hosts = HostPair::new();
        let guest = hosts.start(large());
        // Only a limit ends a stall.
        let stalls = cut == CutPoint::Stall;
        let progress_timeout = if stalls { Duration::from_millis(1500) } else { LONG };
        let receiving = ReceiveOptions { progress_timeout, ..hosts.receive_options() };
        let mut there = hosts.receiver_with(receiving);
        // With this limit a whole migration may fail on a busy machine.
        there.again = !stalls;
        let plan = ProxyPlan::cut(true, At::Tag(tag("PASS_END")), cut);
        let proxy = Proxy::nth(&there.to, which, plan);
        let options = with(&hosts, |o| (o.connections, o.progress_timeout) = (3, progress_timeout));
        let sent = Sender::start(&guest, &proxy.to, &options).result();
        let error = sent.as_ref().unwrap_err().to_string();
        // The error names a joined connection that is cut. A stalled one cannot be told from
        // one that waits for another.
        if cut == CutPoint::Within && which > 0 {
            assert!(error.contains("connection"), "{context}: {error}");
        }
        exactly_one_runs(&hosts, &guest, &sent, there, &context);
    });
}

#[test]
fn stranger_cannot_join() {
    use std::io::{Read, Write};
    let hosts = HostPair::new();
    let guest = hosts.start(MemoryConfig::small());
    let there = hosts.receiver();
    let recorded = Arc::new(Mutex::new(Vec::new()));
    let proxy = Proxy::nth(&there.to, 1, ProxyPlan::record(&recorded));
    let options = with(&hosts, |o| o.connections = 2);
    Sender::start(&guest, &proxy.to, &options).result().unwrap();
    let arrived = there.guest();
    // Replays the second connection: the migration accepts no further connection.
    let joining = recorded.lock().unwrap().clone();
    let address = arrived.responder.address().strip_prefix("tcp:").unwrap();
    let mut stranger = std::net::TcpStream::connect(address).unwrap();
    stranger.set_read_timeout(Some(LONG)).unwrap();
    stranger.write_all(&joining[..64 + 24 + 16 + 5 + 24 + 48]).unwrap();
    let mut answer = Vec::new();
    let _ = stranger.read_to_end(&mut answer);
    let answer = String::from_utf8_lossy(&answer).into_owned();
    assert!(answer.contains("not in progress here"), "{answer:?}");
    arrived.guest.verify().unwrap();
}

#[test]
fn only_verify_finds_a_flipped_bit() {
    // In the content, after the record's head and the run.
    let flip = || ProxyPlan::flip(true, At::Tag(tag("FRAMES")), 24 + 16 + 5000);
    let hosts = HostPair::new();
    let guest = hosts.start(MemoryConfig { writers: 0, working_set: 0, ..large() });
    fill(&*guest, FILLED, |gfn, at| (gfn as usize + at) as u8 | 1);
    let there = hosts.receiver();
    let proxy = Proxy::start(&there.to, flip());
    let options = with(&hosts, |o| o.verify = true);
    let sent = Sender::start(&guest, &proxy.to, &options).result();
    let error = sent.as_ref().unwrap_err();
    assert!(matches!(error.cause, Cause::MemoryDiffers(_)), "{error}");
    assert!(error.to_string().ends_with("the guest continues here"), "{error}");
    let refusal = there.failure();
    assert!(refusal.contains("memory is not the guest's"), "{refusal}");
    assert_eq!(guest.run_state(), RunState::Running);
    let there = hosts.receiver();
    let proxy = Proxy::start(&there.to, flip());
    Sender::start(&guest, &proxy.to, &quick_send(&hosts)).result().unwrap();
    there.guest();
}

#[test]
fn verify_finds_an_untracked_write() {
    let hosts = HostPair::new();
    let guest = hosts.start(MemoryConfig { writers: 0, working_set: 0, ..large() });
    fill(&*guest, FILLED, |gfn, at| (gfn as usize + at) as u8 | 1);
    // A write that the tracker does not see.
    let (region, offset) = {
        use vm_memory::GuestMemoryBackend;
        let at = GuestAddress(0x2900 * PAGE_SIZE);
        (guest.ram().get_host_address(at).unwrap() as usize, 77)
    };
    let missed = move || {
        let byte = (region + offset) as *mut u8;
        // SAFETY: inside the guest's memory, which outlives the proxy; no other thread writes
        // there.
        unsafe { byte.write_volatile(0x55) };
    };
    let there = hosts.receiver();
    let proxy =
        Proxy::start(&there.to, ProxyPlan::default().before_from_source(tag("PASS_END"), missed));
    let options = with(&hosts, |o| o.verify = true);
    let sent = Sender::start(&guest, &proxy.to, &options).result();
    let error = sent.unwrap_err();
    assert!(matches!(error.cause, Cause::MemoryDiffers(_)), "{error}");
    there.failure();
    assert_eq!(guest.run_state(), RunState::Running);
}

#[test]
fn cancel_reaches_the_destination_over_several_connections() {
    let hosts = HostPair::new();
    let guest = hosts.start(large());
    let there = hosts.receiver();
    // Slow enough to cancel it during a pass.
    let options = with(&hosts, |o| (o.connections, o.max_bandwidth) = (3, Some(4 << 20)));
    let sender = Sender::start(&guest, &there.to, &options);
    within(LONG, "a pass", || sender.control.progress().sent_bytes > 1 << 20);
    sender.control.cancel().unwrap();
    let error = sender.result().unwrap_err();
    assert!(matches!(error.cause, Cause::Cancelled), "{error}");
    let refusal = there.failure();
    assert!(refusal.contains("cancelled"), "{refusal}");
    assert_eq!(guest.run_state(), RunState::Running);
    guest.verify().unwrap();
}

#[test]
fn destination_failure_is_reported_over_several_connections() {
    let hosts = HostPair::new();
    let guest = hosts.start(large());
    hosts.there.fail_next(Op::Restore, 1);
    let there = hosts.receiver();
    let options = with(&hosts, |o| o.connections = 3);
    let sent = Sender::start(&guest, &there.to, &options).result();
    let error = sent.as_ref().unwrap_err().to_string();
    assert!(error.contains("restor"), "{error}");
    exactly_one_runs(&hosts, &guest, &sent, there, "restoring fails");
}

#[test]
fn many_connections_share_a_small_bandwidth() {
    let hosts = HostPair::new();
    let guest = hosts.start(MemoryConfig { writers: 0, working_set: 0, ..large() });
    fill(&*guest, FILLED, |gfn, at| (gfn as usize + at) as u8 | 1);
    // 16 MiB at 4 MiB/s: each connection waits for 15 others, and the progress timeout is 2 s.
    let progress_timeout = Duration::from_secs(2);
    let options = with(&hosts, |o| {
        (o.connections, o.max_bandwidth, o.progress_timeout) =
            (MAX_CONNECTIONS, Some(4 << 20), progress_timeout);
    });
    let there = hosts.receiver_with(ReceiveOptions { progress_timeout, ..hosts.receive_options() });
    Sender::start(&guest, &there.to, &options).result().unwrap();
    same(&*guest, &*there.guest().guest, "16 connections");
}
