//! Callers that are not a source, other versions, a second source, and tampered streams.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::time::Duration;

use crate::common::raw::{MOVE, admitted, ends, golden, greeted, header, hello, record};
use crate::common::{
    HostPair, LONG, Proxy, ProxyPlan, Receiver, Sender, each, exactly_one_runs, quick_send, tag,
    within,
};
use driftline_format::{Header, MAGIC_STREAM, RECORD_HEAD_LEN, RecordHead, STREAM_VERSION};
use driftline_guest::testing::MemoryConfig;
use driftline_guest::{GuestIdentity, MAX_QUEUED_PACKET_BYTES};
use driftline_migrate::{Phase, ReceiveOptions};
use proptest::prelude::*;

/// Waits until the receiver has refused a caller, and returns the reason.
fn refusal(there: &Receiver, nth: u64) -> String {
    within(LONG, "the caller is refused", || there.control.progress().refused >= nth);
    there.control.progress().last_refusal.unwrap_or_default()
}

/// Starts a receiver with a short handshake timeout.
fn receiver_with_short_handshake(hosts: &HostPair) -> Receiver {
    let handshake_timeout = Duration::from_millis(500);
    hosts.receiver_with(ReceiveOptions { handshake_timeout, ..hosts.receive_options() })
}

/// Checks that the receiver waits for another source. No source is sent, because a busy machine may
/// exceed the receiver's short timeout.
fn still_waits(there: Receiver) {
    assert!(there.waits_on());
    there.control.cancel().unwrap();
    assert!(matches!(there.error().cause, driftline_migrate::Cause::Cancelled));
}

fn takes_a_proper_source(hosts: &HostPair, there: Receiver) {
    let guest = hosts.start(MemoryConfig::small());
    let sent = Sender::start(&guest, &there.to, &quick_send(hosts)).result();
    assert!(sent.is_ok(), "{sent:?}");
    exactly_one_runs(hosts, &guest, &sent, there, "a proper source");
}

#[test]
fn strangers_are_refused_and_the_receiver_waits() {
    let hosts = HostPair::new();
    let there = hosts.receiver();
    let absurd = [header(STREAM_VERSION), record(tag("HELLO"), 0, u32::MAX, b"")].concat();
    let unknown = [header(STREAM_VERSION), record(999, 0, 0, b"")].concat();
    let early = [header(STREAM_VERSION), record(tag("COMMIT"), 0, 16, &[0; 16])].concat();
    let mut padded = header(STREAM_VERSION);
    for sequence in 0..17 {
        let (tag, must_understand, instance, length) = (999, false, 0, 0);
        let payload_crc = crc32c::crc32c(b"");
        let head = RecordHead { tag, must_understand, instance, length, payload_crc, sequence };
        padded.extend(head.to_bytes());
    }
    let cases: [(&str, Vec<u8>, &str); 7] = [
        ("padding", padded, "17 unknown records in a row, more than the 16 allowed"),
        (
            "HTTP",
            b"GET / HTTP/1.1\r\nHost: x\r\n\r\n".repeat(4),
            "not a Driftline migration stream",
        ),
        ("nothing", Vec::new(), "closed the connection"),
        ("half a header", header(STREAM_VERSION)[..30].to_vec(), "closed the connection"),
        ("an absurd length", absurd, "claims 4294967295 bytes"),
        ("an unknown tag", unknown, "unknown tag 999"),
        ("COMMIT first", early, "COMMIT came where HELLO was expected"),
    ];
    for (n, (what, bytes, reason)) in cases.into_iter().enumerate() {
        let mut stream = TcpStream::connect(&there.to).unwrap();
        stream.write_all(&bytes).unwrap();
        // The receiver may have refused it already, and reset the connection.
        let _ = stream.shutdown(std::net::Shutdown::Write);
        let message = refusal(&there, n as u64 + 1);
        assert!(message.contains(reason), "{what}: {message}");
    }
    takes_a_proper_source(&hosts, there);
}

#[test]
fn silent_caller_delays_no_other_source() {
    let hosts = HostPair::new();
    let there = hosts.receiver();
    let _silent: Vec<TcpStream> = (0..4).map(|_| TcpStream::connect(&there.to).unwrap()).collect();
    takes_a_proper_source(&hosts, there);
}

#[test]
fn silent_caller_is_refused_in_time() {
    let hosts = HostPair::new();
    let there = receiver_with_short_handshake(&hosts);
    let _silent = TcpStream::connect(&there.to).unwrap();
    let message = refusal(&there, 1);
    assert!(message.contains("sent nothing for"), "{message}");
    still_waits(there);
}

#[test]
fn early_leave_does_not_end_the_receiver() {
    let hosts = HostPair::new();
    let there = hosts.receiver();
    drop(greeted(&there.to, MOVE));
    let message = refusal(&there, 1);
    assert!(message.contains("left before its CONFIG"), "{message}");
    takes_a_proper_source(&hosts, there);
}

#[test]
fn early_leave_ends_a_receiver_with_once() {
    let hosts = HostPair::new();
    let there = hosts.receiver_with(ReceiveOptions { once: true, ..hosts.receive_options() });
    drop(greeted(&there.to, MOVE));
    let error = there.error();
    assert_eq!(error.phase, Phase::Waiting);
    let message = error.to_string();
    assert!(message.contains("left before it sent its configuration"), "{message}");
    assert!(message.contains("start this receiver again"), "{message}");
}

#[test]
fn bad_source_after_hello_is_refused() {
    let hosts = HostPair::new();
    let there = hosts.receiver();
    let greeted = [header(STREAM_VERSION), hello(MOVE)].concat();
    let abort = [greeted.clone(), record(tag("ABORT"), 1, 2, b"no")].concat();
    let ready = [greeted.clone(), record(tag("READY"), 1, 48, &[0; 48])].concat();
    let torn = [greeted.clone(), vec![0xff; RECORD_HEAD_LEN]].concat();
    let cases = [
        (abort, "the peer aborted: no"),
        (ready, "READY came where CONFIG was expected"),
        (torn, "the checksum of"),
    ];
    for (n, (bytes, reason)) in cases.into_iter().enumerate() {
        let mut stream = TcpStream::connect(&there.to).unwrap();
        stream.write_all(&bytes).unwrap();
        let message = refusal(&there, n as u64 + 1);
        assert!(message.contains(reason), "{message}");
    }
    takes_a_proper_source(&hosts, there);
    let there = receiver_with_short_handshake(&hosts);
    let mut stream = TcpStream::connect(&there.to).unwrap();
    stream.write_all(&greeted).unwrap();
    let message = refusal(&there, 1);
    assert!(message.contains("sent nothing for"), "{message}");
    still_waits(there);
}

#[test]
fn silent_source_delays_no_other_source() {
    let hosts = HostPair::new();
    let mut options = hosts.receive_options();
    options.handshake_timeout = Duration::from_secs(600);
    let there = hosts.receiver_with(options);
    let mut silent = TcpStream::connect(&there.to).unwrap();
    silent.write_all(&[header(STREAM_VERSION), hello(MOVE)].concat()).unwrap();
    Header::read_from(&mut silent, MAGIC_STREAM).unwrap();
    let guest = hosts.start(MemoryConfig::small());
    let sent = Sender::start(&guest, &there.to, &quick_send(&hosts)).result();
    assert!(sent.is_ok(), "{sent:?}");
    exactly_one_runs(&hosts, &guest, &sent, there, "beside a silent source");
}

#[test]
fn first_config_gets_the_session() {
    let hosts = HostPair::new();
    let guest = hosts.start(MemoryConfig::small());
    // No timeout ends here, because messages are delayed until the test lets them pass.
    let long = Duration::from_secs(600);
    let mut options = hosts.receive_options();
    (options.handshake_timeout, options.progress_timeout) = (long, long);
    let there = hosts.receiver_with(options);
    let without_timeouts = |hosts: &HostPair| {
        let mut options = quick_send(hosts);
        (options.progress_timeout, options.setup_timeout, options.connect_timeout) =
            (long, long, long);
        options.downtime = Duration::from_secs(60);
        options
    };
    // The first source gets HELLO, and its CONFIG is delayed until the other's guest arrives.
    let control = there.control.clone();
    let hold = move || {
        within(LONG, "the other guest arrives", || control.progress().phase == Phase::Precopy);
    };
    let late =
        Proxy::start(&there.to, ProxyPlan::default().before_from_source(tag("CONFIG"), hold));
    let other = HostPair::new();
    let second = other.start(MemoryConfig::small());
    let second_sender = Sender::start(&second, &late.to, &without_timeouts(&other));
    within(LONG, "HELLO is answered", || {
        late.from_destination.lock().unwrap().contains(&tag("HELLO"))
    });
    let (release, delayed) = std::sync::mpsc::channel::<()>();
    let wait = move || {
        let _ = delayed.recv();
    };
    let proxy =
        Proxy::start(&there.to, ProxyPlan::default().before_from_source(tag("PASS_END"), wait));
    let sender = Sender::start(&guest, &proxy.to, &without_timeouts(&hosts));
    let error = second_sender.result().unwrap_err();
    drop(release);
    let busy = format!("busy with guest {}", guest.vm_id());
    assert!(error.to_string().contains(&busy), "{error}");
    second.verify().unwrap();
    let sent = sender.result();
    exactly_one_runs(&hosts, &guest, &sent, there, "two were greeted");
}

#[test]
fn other_version_gets_a_readable_refusal() {
    let hosts = HostPair::new();
    let there = hosts.receiver();
    let mut stream = TcpStream::connect(&there.to).unwrap();
    stream.write_all(&header(STREAM_VERSION + 1)).unwrap();
    stream.write_all(&hello(MOVE)).unwrap();
    let answered = Header::read_from(&mut stream, MAGIC_STREAM).unwrap();
    assert_eq!(answered.layout_hash(), 0);
    let head = RecordHead::read_from(&mut stream, 0).unwrap();
    assert_eq!(head.tag, tag("REFUSED"));
    let mut reason = vec![0; head.length as usize];
    stream.read_exact(&mut reason).unwrap();
    let reason = String::from_utf8(reason).unwrap();
    assert_eq!(reason, "format version 2 is not the version 1 that this program reads");
    drop(stream);
    assert!(refusal(&there, 1).contains("format version 2"));
    takes_a_proper_source(&hosts, there);
}

#[test]
fn second_source_is_refused_promptly() {
    let hosts = HostPair::new();
    let guest = hosts.start(MemoryConfig::small());
    let there = hosts.receiver();
    // The first source is delayed in its pass until the second has its answer.
    let (release, delayed) = std::sync::mpsc::channel::<()>();
    let hold = move || {
        let _ = delayed.recv();
    };
    let plan = ProxyPlan::default().before_from_source(tag("PASS_END"), hold);
    let proxy = Proxy::start(&there.to, plan);
    let mut options = quick_send(&hosts);
    options.downtime = Duration::from_secs(60);
    let sender = Sender::start(&guest, &proxy.to, &options);
    within(LONG, "the first guest arrives", || there.control.progress().phase == Phase::Precopy);
    let other = HostPair::new();
    let second = other.start(MemoryConfig::small());
    let error = Sender::start(&second, &there.to, &quick_send(&other)).result().unwrap_err();
    assert_eq!(there.control.progress().phase, Phase::Precopy, "the first migration continues");
    drop(release);
    let busy = format!("busy with guest {}", guest.vm_id());
    assert!(error.to_string().contains(&busy), "{error}");
    second.verify().unwrap();
    let sent = sender.result();
    assert!(sent.is_ok(), "{sent:?}");
    exactly_one_runs(&hosts, &guest, &sent, there, "beside a second source");
}

#[test]
fn receiver_with_a_guest_takes_no_other() {
    let hosts = HostPair::new();
    let guest = hosts.start(MemoryConfig::small());
    let there = hosts.receiver();
    let to = there.to.clone();
    Sender::start(&guest, &to, &quick_send(&hosts)).result().unwrap();
    let arrived = there.guest();
    let other = HostPair::new();
    let second = other.start(MemoryConfig::still());
    let error = Sender::start(&second, &to, &quick_send(&other)).result().unwrap_err();
    assert!(error.to_string().contains("has taken over guest"), "{error}");
    assert_eq!(arrived.responder.address(), format!("tcp:{to}"));
}

#[test]
fn failed_connect_names_the_peer() {
    let hosts = HostPair::new();
    let guest = hosts.start(MemoryConfig::still());
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let to = format!("tcp:{}", listener.local_addr().unwrap());
    drop(listener);
    let error = Sender::start(&guest, &to, &quick_send(&hosts)).result().unwrap_err();
    assert_eq!(error.phase, Phase::Connect);
    assert!(error.to_string().contains("cannot connect to tcp:127.0.0.1:"), "{error}");
    let error = Sender::start(&guest, "nonsense", &quick_send(&hosts)).result().unwrap_err();
    assert!(error.to_string().contains("cannot connect to nonsense"), "{error}");
}

#[test]
fn trickling_source_does_not_occupy_the_receiver() {
    let hosts = HostPair::new();
    let mut options = hosts.receive_options();
    // The progress timeout never ends; only the pace window does.
    options.progress_timeout = Duration::from_secs(600);
    options.pace_window = Duration::from_millis(300);
    let there = hosts.receiver_with(options);
    let mut source = admitted(&there.to);
    let (stream, from) = (golden(), ends(&golden())[2]);
    for byte in &stream[from..] {
        if there.waits_on() || source.write_all(&[*byte]).is_err() {
            break;
        }
        // The pace of the source, far below the least.
        std::thread::sleep(Duration::from_millis(20));
    }
    let message = there.failure();
    assert!(
        message.contains("bytes of memory, disks and state in 0.3 s, less than the 262144"),
        "{message}"
    );
}

/// Returns the index of the first record of this kind. `ends` are those of `stream`.
fn position(stream: &[u8], ends: &[usize], name: &str) -> usize {
    let is =
        |end: &usize| stream.get(*end..).is_some_and(|s| s.starts_with(&tag(name).to_le_bytes()));
    ends.iter().position(is).unwrap()
}

#[test]
fn frames_in_place_of_commit_are_refused() {
    let hosts = HostPair::new();
    let options = ReceiveOptions { answer_timeout: Duration::ZERO, ..hosts.receive_options() };
    let there = hosts.receiver_with(options);
    let (stream, ends) = (golden(), ends(&golden()));
    let commit = position(&stream, &ends, "COMMIT");
    let run = [0u64, 1].map(u64::to_le_bytes).concat();
    let frames = record(tag("FRAMES"), commit as u32, 16 + 4096, &run);
    let mut source = TcpStream::connect(&there.to).unwrap();
    source.write_all(&[&stream[..ends[commit]], &frames, &[7; 4096]].concat()).unwrap();
    let message = there.failure();
    assert!(message.contains("FRAMES came where COMMIT was expected"), "{message}");
    assert!(!hosts.drive.is_held());
}

#[test]
fn late_is_bounded_and_comes_once() {
    let stream = include_bytes!("../golden/stream-v1-late.bin");
    let ends = ends(stream);
    let at = |name: &str| position(stream, &ends, name);
    let (late, state_end) = (at("LATE"), at("STATE_END"));
    assert_eq!(late, state_end + 1);
    let sequence = late as u32;
    let cases = [
        (
            "twice",
            late + 1,
            record(tag("LATE"), sequence + 1, 1, &[0]),
            "LATE came where COMMIT was expected",
        ),
        (
            "before PREPARED",
            state_end,
            record(tag("LATE"), sequence - 1, 1, &[0]),
            "LATE came where",
        ),
        (
            "too much",
            late,
            record(tag("LATE"), sequence, MAX_QUEUED_PACKET_BYTES as u32 + 1, &[]),
            "claims 262145 bytes",
        ),
    ];
    each(cases.into(), 3, |(what, until, more, reason)| {
        let hosts = HostPair::new();
        let there = hosts.receiver();
        let mut source = TcpStream::connect(&there.to).unwrap();
        source.write_all(&[&stream[..ends[until]], &more].concat()).unwrap();
        // Otherwise the receiver waits for seconds until this side closes the connection. It may
        // have reset the connection already.
        let _ = source.shutdown(std::net::Shutdown::Write);
        let message = there.failure();
        assert!(message.contains(reason), "{what}: {message}");
        assert!(!hosts.drive.is_held(), "{what}");
    });
}

#[test]
fn endless_empty_passes_are_refused() {
    let hosts = HostPair::new();
    let there = hosts.receiver();
    let mut source = admitted(&there.to);
    let mut sequence = 2;
    let mut send = |source: &mut TcpStream, name: &str, payload: &[u8]| {
        let record = record(tag(name), sequence, payload.len() as u32, payload);
        sequence += 1;
        source.write_all(&record)
    };
    for pass in 0u32.. {
        let begin = [&pass.to_le_bytes()[..], &[0; 12]].concat();
        let end = [&pass.to_le_bytes()[..], &[0; 20]].concat();
        let _ = send(&mut source, "PASS_BEGIN", &begin);
        let _ = send(&mut source, "PASS_END", &end);
        let head = RecordHead::read_from(&mut source, 2 + pass).unwrap();
        let mut payload = vec![0; head.length as usize];
        source.read_exact(&mut payload).unwrap();
        if head.tag == tag("ABORT") {
            let reason = String::from_utf8(payload).unwrap();
            assert_eq!(reason, "17 empty passes, more than the 16 allowed");
            break;
        }
        assert_eq!(head.tag, tag("PASS_ACK"));
    }
    drop(source);
    assert!(there.failure().contains("empty passes"));
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: 32,
        failure_persistence: None,
        ..ProptestConfig::default()
    })]

    /// Drops, doubles, exchanges and changes records, and corrects checksums and sequence numbers,
    /// so that only the protocol's own checks can refuse the stream.
    #[test]
    fn tampered_stream_never_panics(
        edits in prop::collection::vec(
            (0usize..64, 0usize..64, 0usize..4, any::<u16>(), any::<u8>()),
            1..4,
        )
    ) {
        let stream = golden();
        let ends = ends(&stream);
        let mut records: Vec<Vec<u8>> =
            ends.windows(2).map(|w| stream[w[0]..w[1]].to_vec()).collect();
        for (a, b, what, offset, byte) in edits {
            let (a, b) = (a % records.len(), b % records.len());
            match what {
                0 => records.swap(a, b),
                1 => {
                    let doubled = records[a].clone();
                    records.insert(b, doubled);
                }
                2 if records.len() > 2 => drop(records.remove(a)),
                _ => {
                    let at = RECORD_HEAD_LEN + usize::from(offset) % records[a].len().max(1);
                    if let Some(place) = records[a].get_mut(at) {
                        *place = byte;
                    }
                }
            }
        }
        let mut bytes = stream[..64].to_vec();
        for (sequence, record) in records.iter().enumerate() {
            let (head, payload) = record.split_at(RECORD_HEAD_LEN);
            let tag = u16::from_le_bytes([head[0], head[1]]);
            bytes.extend(self::record(tag, sequence as u32, payload.len() as u32, payload));
        }
        let _ = driftline_migrate::inspect(&bytes[..]);

        let hosts = HostPair::new();
        let mut options = hosts.receive_options();
        options.answer_timeout = Duration::ZERO;
        options.handshake_timeout = Duration::from_millis(200);
        let there = hosts.receiver_with(options);
        let mut socket = TcpStream::connect(&there.to).unwrap();
        let _ = socket.write_all(&bytes);
        let _ = socket.shutdown(std::net::Shutdown::Write);
        let mut sink = Vec::new();
        let _ = socket.read_to_end(&mut sink);
        drop(socket);
        // Refused, failed, or received if the edits undo each other; never a panic.
        within(LONG, "the receiver ends or waits", || {
            there.thread.is_finished()
                || (there.control.progress().refused > 0
                    && there.control.progress().phase == Phase::Waiting)
        });
        let _ = there.control.cancel();
        let _ = there.outcome();
    }
}
