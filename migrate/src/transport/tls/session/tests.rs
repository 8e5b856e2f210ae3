mod key_changes;

use std::path::Path;

use super::super::config::{client, server};
use super::super::kernel::NEW_KEYS_EXPECTED;
use super::super::names::PeerName;
use super::offload::Offload;
use super::*;
use crate::transport::socket::waits;
use certificates::{NOW, TestCa};

#[allow(dead_code, reason = "only `migrations` tests dates and twins")]
#[path = "../../../../tests/migrations/tls/certificates.rs"]
mod certificates;

fn certificates() -> tempfile::TempDir {
    let (dir, ca) = (tempfile::tempdir().unwrap(), TestCa::new());
    ca.issue(dir.path(), "client", "DNS:host", NOW);
    ca.issue(dir.path(), "server", "DNS:host", NOW);
    std::fs::copy(ca.certificate(), dir.path().join("ca-cert.pem")).unwrap();
    dir
}

/// A session that is to carry `bytes` once, its server's side, and their sockets. The client
/// has ended its handshake; the server has not.
fn half_open(dir: &Path, bytes: u64) -> [(TlsSession, Socket); 2] {
    let (one, other) = Socket::pair().unwrap();
    let peer: PeerName = "host".parse().unwrap();
    let mut client = (client(dir, &peer, bytes).unwrap(), one);
    let mut server = (server(dir).unwrap(), other);
    while !is_done(client.0.handshake(&mut client.1)) {
        assert!(!is_done(server.0.handshake(&mut server.1)));
    }
    [client, server]
}

fn is_done(step: io::Result<()>) -> bool {
    match step {
        Ok(()) => true,
        Err(e) if waits(&e) => false,
        Err(e) => panic!("{e}"),
    }
}

/// Reads what has arrived, or waits for it.
fn next_bytes(end: &mut (TlsSession, Socket)) -> io::Result<Vec<u8>> {
    let mut data = [0; 64];
    loop {
        match end.0.read(&mut end.1, &mut data) {
            Err(e) if waits(&e) => {}
            read => return read.map(|length| data[..length].to_vec()),
        }
    }
}

#[test]
fn bytes_behind_the_handshake_stay_unread() {
    let dir = certificates();
    let [mut client, mut server] = half_open(dir.path(), 0);
    client.0.encrypt([&b"data"[..]].into_iter()).unwrap();
    client.0.flush(&mut client.1).unwrap();
    while !is_done(server.0.handshake(&mut server.1)) {}
    assert!(server.0.unprocessed.is_empty() && server.0.plain.is_empty());
    assert_eq!(next_bytes(&mut server).unwrap(), b"data");
}

#[test]
fn much_memory_is_announced() {
    let dir = certificates();
    for (bytes, announced) in [(32 << 30, None), ((32 << 30) + 1, Some(NEW_KEYS_EXPECTED))] {
        let [mut client, mut server] = half_open(dir.path(), bytes);
        while !is_done(server.0.handshake(&mut server.1)) {}
        for session in [&mut client.0, &mut server.0] {
            assert_eq!(session.state().alpn_protocol(), announced);
            session.outgoing = Outgoing::default();
            assert_eq!(session.can_leave(), announced.is_none(), "{bytes}");
        }
    }
}

#[test]
fn session_with_bytes_in_this_process_stays() {
    let dir = certificates();
    let [mut client, mut server] = half_open(dir.path(), 0);
    client.0.encrypt([&b"data"[..]].into_iter()).unwrap();
    assert!(!client.0.can_leave(), "they are not sent yet");
    client.0.flush(&mut client.1).unwrap();
    assert!(client.0.can_leave());
    while !is_done(server.0.handshake(&mut server.1)) {}
    server.0.fill(&mut server.1).unwrap();
    assert!(!server.0.can_leave(), "they are not read yet");
}

#[test]
fn unix_sockets_keep_their_sessions() {
    let dir = certificates();
    let [client, _server] = half_open(dir.path(), 0);
    let kept = Box::new(client.0).offload(&client.1).unwrap();
    assert!(matches!(kept, Offload::Impossible(_)));
}
