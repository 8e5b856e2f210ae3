//! Changes of keys, between two sessions and in a migration.

use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::{Arc, Mutex};

use driftline_guest::testing::{MemoryConfig, MemoryGuest, MemoryGuestFactory};
use driftline_guest::{Lifecycle, RunState};

use super::super::super::records::SHORT_LIVED_KEYS;
use super::*;
use crate::{
    Listener, ReceiveControl, ReceiveOptions, ReceiveTls, SendControl, SendOptions, SendTls,
};

/// Bytes behind the head of the record of a KeyUpdate: the message, its type, and the tag. No
/// message of a migration is as short.
const KEY_UPDATE_RECORD: usize = 5 + 1 + 16;

/// Returns both ends of a session that has carried so much that its client's keys should change.
fn used_up(dir: &Path) -> [(TlsSession, Socket); 2] {
    let [mut client, mut server] = half_open(dir, (32 << 30) + 1);
    while !is_done(server.0.handshake(&mut server.1)) {}
    client.0.refresh_keys().unwrap();
    assert!(client.0.outgoing.is_empty(), "its keys are new");
    client.0.sent.add(192 << 30);
    client.0.refresh_keys().unwrap();
    assert_eq!(client.0.outgoing.len(), 5 + KEY_UPDATE_RECORD);
    [client, server]
}

fn write(end: &mut (TlsSession, Socket), bytes: &[u8]) {
    end.0.encrypt([bytes].into_iter()).unwrap();
    end.0.flush(&mut end.1).unwrap();
}

#[test]
fn changed_keys_carry_data_both_ways() {
    let dir = certificates();
    let [mut client, mut server] = used_up(dir.path());
    for round in 0..3 {
        write(&mut client, &[round, 1]);
        assert_eq!(next_bytes(&mut server).unwrap(), [round, 1]);
        // The first answer announces new keys of the server.
        write(&mut server, &[round, 2]);
        assert_eq!(next_bytes(&mut client).unwrap(), [round, 2]);
    }
    client.0.refresh_keys().unwrap();
    assert!(client.0.outgoing.is_empty(), "few records have new keys");
}

#[test]
fn old_keys_do_not_decrypt_new_records() {
    let dir = certificates();
    let [mut client, mut server] = used_up(dir.path());
    // The announcement is lost.
    client.0.outgoing = Outgoing::default();
    write(&mut client, b"data");
    let e = next_bytes(&mut server).unwrap_err().to_string();
    assert!(e.contains("cannot decrypt peer's message"), "{e}");
    // The client is told once.
    server.0.flush(&mut server.1).unwrap();
    assert_eq!(next_bytes(&mut server).unwrap_err().to_string(), e);
    server.0.end();
    assert!(!server.0.is_pending());
    let e = next_bytes(&mut client).unwrap_err().to_string();
    assert!(e.contains("BadRecordMac"), "{e}");
}

/// Forwards the records of one direction, and notes the state of the guest at each KeyUpdate.
fn forward(
    mut from: TcpStream,
    mut to: TcpStream,
    guest: &MemoryGuest,
    updates: &Mutex<Vec<RunState>>,
) {
    let mut record = vec![0; 5];
    while from.read_exact(&mut record[..5]).is_ok() {
        let length = usize::from(u16::from_be_bytes([record[3], record[4]]));
        record.resize(5 + length, 0);
        if from.read_exact(&mut record[5..]).is_err() {
            break;
        }
        if length == KEY_UPDATE_RECORD {
            updates.lock().unwrap().push(guest.run_state());
        }
        if to.write_all(&record).is_err() {
            break;
        }
    }
    let _ = to.shutdown(Shutdown::Write);
}

#[test]
fn no_keys_change_while_a_guest_is_paused() {
    let (dir, records) = (certificates(), tempfile::tempdir().unwrap());
    let guest = MemoryGuest::start(MemoryConfig::small()).unwrap();
    let listener = Listener::bind("127.0.0.1:0").unwrap();
    let there = listener.address().strip_prefix("tcp:").unwrap().to_owned();
    let tls = ReceiveTls { dir: dir.path().to_owned(), allow: Vec::new() };
    let options = ReceiveOptions { tls: Some(tls), ..ReceiveOptions::new(records.path()) };
    let receiver = std::thread::spawn(move || {
        let factory = Arc::new(MemoryGuestFactory::default());
        crate::receive(listener, factory, &options, &ReceiveControl::new())
    });
    let between = TcpListener::bind("127.0.0.1:0").unwrap();
    let to = between.local_addr().unwrap().to_string();
    let updates: Arc<[Mutex<Vec<RunState>>; 2]> = Arc::default();
    let (seen, moved) = (updates.clone(), guest.clone());
    let relay = std::thread::spawn(move || {
        let (near, far) = (between.accept().unwrap().0, TcpStream::connect(there).unwrap());
        let (back, forth) = (far.try_clone().unwrap(), near.try_clone().unwrap());
        std::thread::scope(|scope| {
            scope.spawn(|| forward(near, far, &moved, &seen[0]));
            scope.spawn(|| forward(back, forth, &moved, &seen[1]));
        });
    });
    SHORT_LIVED_KEYS.set(true);
    let tls = SendTls { dir: dir.path().to_owned(), peer: Some("host".parse().unwrap()) };
    let options = SendOptions { tls: Some(tls), ..SendOptions::new(records.path()) };
    let sent = crate::send(&*guest, &to, &options, &SendControl::new());
    SHORT_LIVED_KEYS.set(false);
    let report = sent.unwrap();
    receiver.join().unwrap().unwrap().guest.verify().unwrap();
    relay.join().unwrap();
    // One change for each pass before the pause, in either direction.
    let before_the_pause = vec![RunState::Running; report.passes.len() - 1];
    for (from, updates) in ["source", "destination"].into_iter().zip(&*updates) {
        assert_eq!(*updates.lock().unwrap(), before_the_pause, "{from}");
    }
    assert!(!before_the_pause.is_empty());
}
