//! Bounds on what callers can make a receiver use: files, memory, threads and file descriptors.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "test code")]

#[path = "migrations/common/mod.rs"]
mod common;

use std::io::Write;
use std::net::TcpStream;
use std::path::Path;
use std::time::{Duration, Instant};

use common::raw::{
    JOIN, MOVE, QUERY, admitted, ask, caller, ends, golden, greeted, header, hello, next, record,
};
use common::{HostPair, LONG, Receiver, Sender, exactly_one_runs, quick_send, tag, within};
use driftline_format::STREAM_VERSION;
use driftline_guest::testing::{MemoryConfig, MemoryGuest, Op, repeats, threads};
use driftline_guest::{Lifecycle, RunState};
use driftline_migrate::{Received, Records};
use parking_lot::{Mutex, MutexGuard};

/// The verdict *discarded* of ANSWER.
const DISCARDED: u64 = 3;

/// Connections that a receiver serves at a time: before HELLO, sources, joins and questions.
const SERVED: usize = 4 * 16;

/// Duration of an attack with `DRIFTLINE_FULL=1`.
const MINUTE: Duration = Duration::from_secs(60);

/// Attacks for this number of rounds, and at least for a minute with `DRIFTLINE_FULL=1`.
fn attack(rounds: u32, mut round: impl FnMut(u32)) {
    let until = repeats(None, Some(MINUTE)).map(|minute| Instant::now() + minute);
    for n in 0.. {
        if n >= rounds && until.is_none_or(|until| Instant::now() >= until) {
            return;
        }
        round(n);
    }
}

/// Lets one test run at a time, because the tests count resources of the process.
fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE.lock()
}

/// Returns the numbers of migration threads and of file descriptors of this process. Threads of the
/// test harness do not count.
fn threads_and_files() -> (usize, usize) {
    let ours = threads(|name| name.starts_with("migrate-"));
    (ours.len(), std::fs::read_dir("/proc/self/fd").unwrap().count())
}

/// Returns the resident bytes of this process.
fn resident() -> u64 {
    let statm = std::fs::read_to_string("/proc/self/statm").unwrap();
    statm.split(' ').nth(1).unwrap().parse::<u64>().unwrap() * 4096
}

fn files(dir: &Path) -> usize {
    std::fs::read_dir(dir).unwrap().count()
}

/// Waits until threads and descriptors are at most `before`.
fn await_release(before: (usize, usize)) {
    let done = || {
        let now = threads_and_files();
        now.0 <= before.0 && now.1 <= before.1
    };
    within(LONG, &format!("at most {before:?}"), done);
}

/// Waits until the receiver has ended the threads of displaced connections.
fn await_displaced(before: (usize, usize)) {
    let done = || threads_and_files().0 <= before.0 + SERVED;
    within(LONG, &format!("at most {SERVED} more threads: {before:?}"), done);
}

/// Returns the threads and descriptors of this process once `there` listens and has answered.
fn at_rest(hosts: &HostPair, there: &Receiver) -> (usize, usize) {
    assert_eq!(ask(&there.to, [1; 16], site(hosts)), DISCARDED);
    threads_and_files()
}

fn site(hosts: &HostPair) -> [u8; 16] {
    Records::open(hosts.destination_records()).unwrap().site().into_bytes()
}

/// Moves a guest to `there`, and checks it.
fn takes_a_guest(
    hosts: &HostPair,
    there: Receiver,
    connections: u32,
    context: &str,
) -> Received<MemoryGuest> {
    let guest = hosts.start(MemoryConfig::small());
    let mut options = quick_send(hosts);
    options.connections = connections;
    let sent = Sender::start(&guest, &there.to, &options).result();
    sent.unwrap_or_else(|e| panic!("{context}: {e}"));
    let arrived = there.guest();
    assert_eq!(guest.run_state(), RunState::Stopped, "{context}");
    assert_eq!(arrived.guest.run_state(), RunState::Running, "{context}");
    arrived.guest.verify().unwrap_or_else(|e| panic!("{context}: {e}"));
    assert_eq!(hosts.drive.most_running(), 1, "{context}: I7");
    arrived
}

/// Starts a receiver none of whose timeouts ends during a test.
fn receiver_without_timeouts(hosts: &HostPair) -> Receiver {
    let mut options = hosts.receive_options();
    options.handshake_timeout = Duration::from_secs(600);
    options.progress_timeout = Duration::from_secs(600);
    hosts.receiver_with(options)
}

#[test]
fn questions_about_unknown_tokens_leave_nothing() {
    let _alone = alone();
    let hosts = HostPair::new();
    let there = hosts.receiver();
    let site = site(&hosts);
    let question = |n: u128| {
        assert_eq!(ask(&there.to, (n | 1 << 100).to_le_bytes(), site), DISCARDED);
    };
    // The first questions allocate memory that stays, such as cached thread stacks.
    (0..100).for_each(question);
    let (before, memory) = (files(&hosts.destination_records()), resident());
    attack(2_000, |n| question(100 + u128::from(n)));
    assert_eq!(files(&hosts.destination_records()), before);
    let grown = resident().saturating_sub(memory);
    assert!(grown < 16 << 20, "{grown} bytes more");
    takes_a_guest(&hosts, there, 1, "after questions");
}

#[test]
fn idle_connections_do_not_exclude_queries_or_joins() {
    let _alone = alone();
    let hosts = HostPair::new();
    let there = receiver_without_timeouts(&hosts);
    let before = at_rest(&hosts, &there);
    let mut idle: Vec<TcpStream> = Vec::new();
    attack(1, |_| {
        let mut more: Vec<TcpStream> =
            (0..64).map(|_| TcpStream::connect(&there.to).unwrap()).collect();
        for purpose in [MOVE, JOIN, QUERY] {
            more.extend((0..20).map(|_| caller(&there.to, purpose)));
        }
        idle = more;
    });
    await_displaced(before);
    assert_eq!(ask(&there.to, [7; 16], site(&hosts)), DISCARDED);
    let to = there.to.clone();
    let arrived = takes_a_guest(&hosts, there, 4, "beside idle connections");
    // The responder of the arrived guest has the same bounds.
    for purpose in [MOVE, JOIN, QUERY] {
        idle.extend((0..20).map(|_| caller(&to, purpose)));
    }
    await_displaced(before);
    assert_eq!(ask(&to, [8; 16], site(&hosts)), DISCARDED);
    drop((idle, arrived));
    await_release(before);
}

#[test]
fn stray_joins_exclude_no_other_caller() {
    let _alone = alone();
    let hosts = HostPair::new();
    let there = receiver_without_timeouts(&hosts);
    let before = at_rest(&hosts, &there);
    let mut refused = Vec::new();
    attack(160, |n| {
        let mut stream = greeted(&there.to, JOIN);
        stream.write_all(&record(tag("JOIN"), 1, 48, &[n as u8; 48])).unwrap();
        assert_eq!(next(&mut stream, 1).0, tag("REFUSED"));
        // The caller stays connected, and the receiver waits for its end.
        refused.push(stream);
        if refused.len() > 300 {
            refused.remove(0);
        }
    });
    await_displaced(before);
    takes_a_guest(&hosts, there, 4, "beside connections that join nothing");
    drop(refused);
    await_release(before);
}

#[test]
fn refused_sources_exclude_no_other_caller() {
    let _alone = alone();
    let hosts = HostPair::new();
    let there = receiver_without_timeouts(&hosts);
    let before = at_rest(&hosts, &there);
    let (stream, ends) = (golden(), ends(&golden()));
    let mut refused = Vec::new();
    attack(12, |n| {
        let mut late: Vec<TcpStream> = (0..15).map(|_| greeted(&there.to, MOVE)).collect();
        let first = admitted(&there.to);
        for late in &mut late {
            late.write_all(&stream[ends[1]..ends[2]]).unwrap();
            assert_eq!(next(late, 1).0, tag("REFUSED"));
        }
        refused.extend(late);
        refused.drain(..refused.len().saturating_sub(300));
        drop(first);
        // The 15 refused ones and the first one.
        within(LONG, "the receiver waits again", || {
            there.waits_on() && there.control.progress().refused == 16 * u64::from(n + 1)
        });
    });
    await_displaced(before);
    takes_a_guest(&hosts, there, 1, "beside sources that came second");
    drop(refused);
    await_release(before);
}

#[test]
fn short_connections_do_not_end_the_receiver() {
    let _alone = alone();
    let hosts = HostPair::new();
    let there = hosts.receiver();
    let before = at_rest(&hosts, &there);
    let whole = [header(STREAM_VERSION), hello(MOVE)].concat();
    let kinds: [&[u8]; 4] = [b"", &whole[..30], &[b'x'; 200], &whole];
    attack(200, |n| {
        let mut stream = TcpStream::connect(&there.to).unwrap();
        // The receiver may have refused the connection already.
        let _ = stream.write_all(kinds[n as usize % kinds.len()]);
    });
    // Connections that end after HELLO.
    for _ in 0..8 {
        drop(greeted(&there.to, MOVE));
        drop(greeted(&there.to, JOIN));
    }
    await_release(before);
    takes_a_guest(&hosts, there, 1, "after short connections");
}

#[test]
fn failed_migrations_leave_nothing_behind() {
    let _alone = alone();
    let hosts = HostPair::new();
    let there = hosts.receiver();
    let guest = hosts.start(MemoryConfig::small());
    let fail = |nth| {
        hosts.there.fail_next(Op::Restore, 1);
        let sent = Sender::start(&guest, &there.to, &quick_send(&hosts)).result();
        assert!(sent.unwrap_err().to_string().contains("restor"), "the source receives the reason");
        within(LONG, "the receiver waits again", || {
            there.waits_on() && there.control.progress().refused == nth
        });
    };
    fail(1);
    let before = (threads_and_files(), files(&hosts.destination_records()));
    attack(8, |n| fail(2 + u64::from(n)));
    await_release(before.0);
    assert_eq!(files(&hosts.destination_records()), before.1);
    let sent = Sender::start(&guest, &there.to, &quick_send(&hosts)).result();
    exactly_one_runs(&hosts, &guest, &sent, there, "after failures");
}
