//! Connections from this side to a peer.

use std::io;
use std::net::{SocketAddr, TcpStream, ToSocketAddrs};
use std::os::unix::net::UnixStream;
use std::sync::mpsc;
use std::time::{Duration, Instant};

use super::address::Address;
use super::link::{cancelled, timed_out};
use super::socket::Socket;
use super::stop::StopFlag;
use super::wait::{self, SLICE};

/// Connects to `peer`, trying each address of a host's name.
pub(super) fn connect(peer: &Address, timeout: Duration, stop: &StopFlag) -> io::Result<Socket> {
    let (sender, result) = mpsc::channel();
    let peer = peer.clone();
    // On a separate thread, because name look-ups and connects cannot be interrupted. If this side
    // stops waiting, the thread ends by itself and closes its connection.
    std::thread::Builder::new().name("migrate-connect".into()).spawn(move || {
        let _ = sender.send(connect_here(&peer, timeout));
    })?;
    let give_up = Instant::now() + timeout + SLICE;
    let ended = || io::Error::other("the connecting thread ended early");
    wait::answer(&result, ended, || {
        if stop.is_cancelled() {
            return Err(cancelled());
        }
        match Instant::now() > give_up {
            true => Err(timed_out("answered", timeout)),
            false => Ok(()),
        }
    })?
}

fn connect_here(peer: &Address, timeout: Duration) -> io::Result<Socket> {
    match peer {
        Address::Tcp(name) => connect_any(name, timeout)?.try_into(),
        Address::Unix(path) => UnixStream::connect(path)?.try_into(),
        Address::Descriptor(_) => Err(io::Error::new(
            io::ErrorKind::Unsupported,
            "only a receiver takes over a descriptor; connect to a socket with unix:PATH",
        )),
    }
}

fn connect_any(name: &str, timeout: Duration) -> io::Result<TcpStream> {
    let mut last = io::Error::new(io::ErrorKind::NotFound, "the name has no address");
    let addresses: Vec<SocketAddr> = name.to_socket_addrs()?.collect();
    for address in &addresses {
        match TcpStream::connect_timeout(address, timeout / addresses.len() as u32) {
            Ok(stream) => return Ok(stream),
            Err(e) => last = e,
        }
    }
    Err(last)
}
