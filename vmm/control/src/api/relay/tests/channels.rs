//! Tests of channels that fail, and of what is not a connection on a channel.

use std::fs::File;
use std::io::IoSlice;
use std::mem::MaybeUninit;
use std::net::{TcpListener, TcpStream};
use std::os::fd::{AsFd, BorrowedFd};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use rustix::net::sockopt::set_socket_send_buffer_size;
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};

use super::*;

/// Sends a byte with `descriptors`.
fn send(channel: &UnixStream, descriptors: &[BorrowedFd<'_>]) {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(8))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    assert!(descriptors.is_empty() || control.push(SendAncillaryMessage::ScmRights(descriptors)));
    sendmsg(channel, &[IoSlice::new(b"x")], &mut control, SendFlags::empty()).unwrap();
}

fn memory(bytes: u64) -> File {
    let file = memfd_create("test", MemfdFlags::CLOEXEC).unwrap();
    ftruncate(&file, bytes).unwrap();
    file.into()
}

#[test]
fn what_is_no_connection_is_dropped() {
    let dir = tempfile::tempdir().unwrap();
    let (mut channel, adopted) = UnixStream::pair().unwrap();
    let socket = ListeningSocket::bind(&dir.path().join("api")).unwrap();
    let process = Process::serve(waiting("process"), socket, Some(adopted));
    let (stream, client) = UnixStream::pair().unwrap();
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let tcp = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let (datagram, _other) = std::os::unix::net::UnixDatagram::pair().unwrap();
    let (pipe, _writer) = std::io::pipe().unwrap();
    let unix_listener = process.app.relay().socket().unwrap().listener().unwrap();
    let (plain, small, large) = (tempfile::tempfile().unwrap(), memory(9), memory(1 << 20));
    let good = stream.as_fd();
    let wrong: [&[BorrowedFd<'_>]; 12] = [
        &[],
        &[plain.as_fd()],
        &[tcp.as_fd()],
        &[datagram.as_fd()],
        &[listener.as_fd()],
        &[unix_listener.as_fd()],
        &[small.as_fd(), good],
        &[good, plain.as_fd()],
        &[good, pipe.as_fd()],
        &[good, large.as_fd()],
        &[good, small.as_fd(), small.as_fd()],
        &[good; 8],
    ];
    for descriptors in wrong {
        send(&channel, descriptors);
    }
    channel.write_all(&[b'x'; 1000]).unwrap();
    let mut request = memory(0);
    request.write_all(ASK.as_bytes()).unwrap();
    send(&channel, &[good, request.as_fd()]);
    drop(channel);
    client.set_read_timeout(Some(TIMEOUT)).unwrap();
    let mut client = KeptClient(client);
    client.assert_answered_by("process");
    KeptClient::connect(&dir).ask(ASK);
}

#[test]
fn vanished_receiver_ends_connections() {
    let (dir, first) = start("first");
    let mut clients: Vec<_> = (0..3).map(|_| KeptClient::connect(&dir)).collect();
    clients.iter_mut().for_each(|client| _ = client.ask(ASK));
    let (channel, receiver) = UnixStream::pair().unwrap();
    drop(receiver);
    first.app.relay().move_to(channel);
    clients.iter_mut().for_each(KeptClient::assert_ends);
}

#[test]
fn stuck_receiver_ends_connections() {
    let (dir, first) = start("first");
    let mut clients: Vec<_> = (0..60).map(|_| KeptClient::connect(&dir)).collect();
    clients.iter_mut().for_each(|client| _ = client.ask(ASK));
    let (channel, mut receiver) = UnixStream::pair().unwrap();
    set_socket_send_buffer_size(&channel, 1).unwrap();
    first.app.relay().move_to(channel);
    let mut closed = [PollFd::new(&receiver, PollFlags::RDHUP)];
    let limit = Timespec { tv_sec: TIMEOUT.as_secs() as i64, tv_nsec: 0 };
    assert_eq!(poll(&mut closed, Some(&limit)).unwrap(), 1, "the channel is still open");
    // The channel has the connections for which it had room. Their descriptors are closed, because
    // this read has no room for them.
    let mut sent = Vec::new();
    receiver.read_to_end(&mut sent).unwrap();
    assert!((1..60).contains(&sent.len()), "{}", sent.len());
    clients.iter_mut().for_each(KeptClient::assert_ends);
}

#[test]
fn channel_closes_after_the_last_connection() {
    let (dir, first) = start("first");
    let mut client = KeptClient::connect(&dir);
    client.ask(ASK);
    let (channel, mut receiver) = UnixStream::pair().unwrap();
    first.app.relay().move_to(channel);
    let mut sent = Vec::new();
    receiver.read_to_end(&mut sent).unwrap();
    assert_eq!(sent.len(), 1);
    // A second channel has no effect.
    let (channel, mut receiver) = UnixStream::pair().unwrap();
    first.app.relay().move_to(channel);
    assert_eq!(receiver.read(&mut [0]).unwrap(), 0);
}

#[test]
fn channel_of_an_ended_server_closes() {
    let (_dir, first) = start("first");
    let Process { app, server } = first;
    drop(server);
    let (channel, mut receiver) = UnixStream::pair().unwrap();
    app.relay().move_to(channel);
    assert_eq!(receiver.read(&mut [0]).unwrap(), 0);
}

#[test]
fn held_request_ends_with_its_server() {
    let (dir, first) = start("first");
    let mut client = KeptClient::connect(&dir);
    first.app.relay().hold();
    client.send(ASK);
    first.run_ready_tasks();
    drop(first);
    client.assert_ends();
}
