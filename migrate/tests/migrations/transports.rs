//! Migrations over unix sockets and inherited descriptors.

use std::io::Write;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;

use crate::common::{HostPair, Sender, exactly_one_runs, quick_send, raw};
use driftline_format::{Header, MAGIC_STREAM, STREAM_VERSION};
use driftline_guest::testing::MemoryConfig;
use driftline_migrate::{Compression, Listener, SendOptions};

/// Moves a guest to a receiver that waits at `listener`, from which `to` is reached.
fn moves(listener: Listener, to: &str, more: impl FnOnce(&mut SendOptions)) {
    let hosts = HostPair::new();
    let guest = hosts.start(MemoryConfig::small());
    let there = hosts.receive_on(listener, hosts.factory(), hosts.receive_options());
    let mut options = quick_send(&hosts);
    more(&mut options);
    let sent = Sender::start(&guest, to, &options).result();
    sent.as_ref().unwrap();
    exactly_one_runs(&hosts, &guest, &sent, there, to);
}

fn unix_listener(path: &Path) -> (UnixListener, String) {
    (UnixListener::bind(path).unwrap(), format!("unix:{}", path.display()))
}

#[test]
fn guest_moves_over_a_unix_socket() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a");
    let (listener, to) = unix_listener(&path);
    moves(Listener::unix(listener, &path), &to, |options| {
        (options.connections, options.compression) = (4, Compression::Lz4);
    });
}

#[test]
fn inherited_listening_socket_is_used() {
    let dir = tempfile::tempdir().unwrap();
    let (listener, to) = unix_listener(&dir.path().join("a"));
    moves(Listener::inherited(listener.into()).unwrap(), &to, |_| {});
}

#[test]
fn inherited_connection_carries_one_migration() {
    let dir = tempfile::tempdir().unwrap();
    let (listener, to) = unix_listener(&dir.path().join("a"));
    let hosts = HostPair::new();
    let guest = hosts.start(MemoryConfig::small());
    // The source's connection is accepted here and passed on, as a super-server does it.
    let sender = Sender::start(&guest, &to, &quick_send(&hosts));
    let (connection, _) = listener.accept().unwrap();
    let inherited = Listener::inherited(connection.into()).unwrap();
    let there = hosts.receive_on(inherited, hosts.factory(), hosts.receive_options());
    let sent = sender.result();
    sent.as_ref().unwrap();
    exactly_one_runs(&hosts, &guest, &sent, there, &to);
}

#[test]
fn receiver_ends_with_its_inherited_connection() {
    type OtherEnd = fn(UnixStream);
    let cases: [(OtherEnd, &str); 3] = [
        (drop, "no guest came over the connection that this receiver was started with"),
        (
            |mut peer| peer.write_all(&[b'-'; 64]).unwrap(),
            "a process of this host: not a Driftline migration stream",
        ),
        (
            |mut peer| {
                // A source that leaves.
                peer.write_all(&[raw::header(STREAM_VERSION), raw::hello(raw::MOVE)].concat())
                    .unwrap();
                Header::read_from(&mut peer, MAGIC_STREAM).unwrap();
            },
            "left before it sent its configuration",
        ),
    ];
    for (peer, why) in cases {
        let hosts = HostPair::new();
        let (connection, other) = UnixStream::pair().unwrap();
        let inherited = Listener::inherited(connection.into()).unwrap();
        let there = hosts.receive_on(inherited, hosts.factory(), hosts.receive_options());
        peer(other);
        let said = there.error().to_string();
        assert!(said.contains(why), "{said}");
    }
}

#[test]
fn only_stream_sockets_are_inherited() {
    let refused = |fd: OwnedFd| Listener::inherited(fd).unwrap_err().to_string();
    assert!(refused(tempfile::tempfile().unwrap().into()).contains("is not a stream socket"));
    let datagrams = std::net::UdpSocket::bind("127.0.0.1:0").unwrap();
    assert!(refused(datagrams.into()).contains("is not a stream socket"));
    let (connected, _other) = UnixStream::pair().unwrap();
    let (number, connected) = (connected.as_raw_fd(), Listener::inherited(connected.into()));
    assert_eq!(connected.unwrap().address(), format!("fd:{number}"));
    let kinds = socket2::Type::STREAM;
    let unbound = socket2::Socket::new(socket2::Domain::UNIX, kinds, None).unwrap();
    assert!(refused(unbound.into()).contains("neither listens nor is connected"));
}

#[test]
fn unusable_addresses_are_refused_by_name() {
    let hosts = HostPair::new();
    let guest = hosts.start(MemoryConfig::still());
    for (to, why) in [
        ("nowhere", "\"nowhere\" is not an address: use tcp:HOST:PORT"),
        ("fd:7", "only a receiver takes over a descriptor; connect to a socket with unix:PATH"),
        ("unix:/none/a", "cannot connect to unix:/none/a: No such file or directory"),
    ] {
        let e = Sender::start(&guest, to, &quick_send(&hosts)).result().unwrap_err().to_string();
        assert!(e.contains(why) && e.ends_with("the guest continues here"), "{e}");
    }
}
