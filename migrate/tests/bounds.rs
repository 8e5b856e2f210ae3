//! What callers can make a receiver spend: files, memory, threads and file descriptors are where
//! they were.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "test code")]

mod common;

use std::io::Write;
use std::net::TcpStream;
use std::path::Path;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use checkpoint::format::FORMAT_VERSION;
use checkpoint::testing::{MemoryConfig, Op};
use common::raw::{JOIN, MOVE, QUERY, ask, caller, greeted, header, hello};
use common::{Host, Receiver, Sender, exactly_one_runs, quick_send, within};
use migrate::Records;

/// Verdicts of ANSWER.
const DISCARDED: u64 = 3;

/// These tests count what the process has: one at a time.
fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Threads and file descriptors of this process.
fn held() -> (usize, usize) {
    let count = |dir: &str| std::fs::read_dir(dir).unwrap().count();
    (count("/proc/self/task"), count("/proc/self/fd"))
}

/// Bytes of memory that the host has given this process.
fn resident() -> u64 {
    let statm = std::fs::read_to_string("/proc/self/statm").unwrap();
    statm.split(' ').nth(1).unwrap().parse::<u64>().unwrap() * 4096
}

fn files(dir: &Path) -> usize {
    std::fs::read_dir(dir).unwrap().count()
}

/// Waits until threads and descriptors are no more than `before`.
fn as_before(before: (usize, usize)) {
    let done = || {
        let now = held();
        now.0 <= before.0 && now.1 <= before.1
    };
    within(Duration::from_secs(60), &format!("as before: {before:?}"), done);
}

/// No wait of this receiver ends by itself within the test.
fn patient(host: &Host) -> Receiver {
    let mut options = host.receive_options();
    options.handshake_timeout = Duration::from_secs(600);
    options.patience = Duration::from_secs(600);
    host.receiver_with(options)
}

#[test]
fn questions_about_unknown_tokens_leave_nothing() {
    let _alone = alone();
    let host = Host::new();
    let there = host.receiver();
    let site = Records::open(host.destination_records()).unwrap().site().into_bytes();
    let token = |n: u128| (n | 1 << 100).to_le_bytes();
    // What the first ones need stays: threads' stacks that the allocator keeps, for one.
    for n in 0..100 {
        assert_eq!(ask(&there.to, token(n), site), DISCARDED);
    }
    let (before, memory) = (files(&host.destination_records()), resident());
    for n in 100..2_100 {
        assert_eq!(ask(&there.to, token(n), site), DISCARDED);
    }
    assert_eq!(files(&host.destination_records()), before);
    let grown = resident().saturating_sub(memory);
    assert!(grown < 16 << 20, "{grown} bytes more");
    let guest = host.start(MemoryConfig::small());
    let sent = Sender::start(&guest, &there.to, &quick_send(&host)).result();
    assert!(sent.is_ok(), "{sent:?}");
    exactly_one_runs(&host, &guest, &sent, there, "after questions");
}

#[test]
fn idle_connections_keep_out_neither_questions_nor_connections_that_join() {
    let _alone = alone();
    let host = Host::new();
    let there = patient(&host);
    let before = held();
    let mut idle: Vec<TcpStream> =
        (0..64).map(|_| TcpStream::connect(&there.to).unwrap()).collect();
    for purpose in [MOVE, JOIN, QUERY] {
        idle.extend((0..20).map(|_| caller(&there.to, purpose)));
    }
    let site = Records::open(host.destination_records()).unwrap().site().into_bytes();
    assert_eq!(ask(&there.to, [7; 16], site), DISCARDED);
    let guest = host.start(MemoryConfig::small());
    let mut options = quick_send(&host);
    options.connections = 4;
    let sent = Sender::start(&guest, &there.to, &options).result();
    assert!(sent.is_ok(), "{sent:?}");
    let (threads, _) = held();
    assert!(threads < before.0 + 160, "{threads} threads, {} before", before.0);
    drop(idle);
    exactly_one_runs(&host, &guest, &sent, there, "beside idle connections");
    drop(guest);
    as_before(before);
}

#[test]
fn short_connections_end_no_receiver() {
    let _alone = alone();
    let host = Host::new();
    let there = host.receiver();
    let whole = [header(FORMAT_VERSION), hello(MOVE)].concat();
    let kinds: [&[u8]; 4] = [b"", &whole[..30], &[b'x'; 200], &whole];
    for n in 0..200 {
        let mut stream = TcpStream::connect(&there.to).unwrap();
        // It may have been turned away already.
        let _ = stream.write_all(kinds[n % kinds.len()]);
    }
    // And those that get further.
    for _ in 0..8 {
        drop(greeted(&there.to, MOVE));
        drop(greeted(&there.to, JOIN));
    }
    let guest = host.start(MemoryConfig::small());
    let sent = Sender::start(&guest, &there.to, &quick_send(&host)).result();
    assert!(sent.is_ok(), "{sent:?}");
    exactly_one_runs(&host, &guest, &sent, there, "after short connections");
}

#[test]
fn migrations_that_fail_leave_a_receiver_as_it_was() {
    let _alone = alone();
    let host = Host::new();
    let there = host.receiver();
    let guest = host.start(MemoryConfig::small());
    let fail = |nth| {
        host.there.fail_next(Op::Restore, 1);
        let sent = Sender::start(&guest, &there.to, &quick_send(&host)).result();
        assert!(sent.unwrap_err().to_string().contains("restor"), "the source hears why");
        within(Duration::from_secs(15), "it waits on", || {
            there.waits_on() && there.control.progress().refused == nth
        });
    };
    fail(1);
    let before = (held(), files(&host.destination_records()));
    (2..10).for_each(fail);
    as_before(before.0);
    assert_eq!(files(&host.destination_records()), before.1);
    let sent = Sender::start(&guest, &there.to, &quick_send(&host)).result();
    exactly_one_runs(&host, &guest, &sent, there, "after failures");
}
