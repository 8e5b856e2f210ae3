//! Connections from this side to a peer.

use std::io;
use std::net::{SocketAddr, TcpStream, ToSocketAddrs};
use std::os::unix::net::UnixStream;
use std::sync::mpsc;
use std::time::{Duration, Instant};

use super::address::Address;
use super::policy;
use super::socket::Socket;
use super::stop::StopFlag;
use super::wait::{self, SLICE, cancelled, timed_out};

/// Limits of a new connection.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ConnectLimits {
    /// Upper bound on connecting.
    pub(crate) timeout: Duration,
    /// Longest time without progress of the peer, later.
    pub(crate) progress_timeout: Duration,
    /// Whether only loopback addresses are tried.
    pub(crate) only_here: bool,
}

/// Connects to `peer`, trying each address of a host's name.
pub(super) fn connect(
    peer: &Address,
    limits: ConnectLimits,
    stop: &StopFlag,
) -> io::Result<Socket> {
    let (sender, result) = mpsc::channel();
    let (peer, timeout) = (peer.clone(), limits.timeout);
    // On a separate thread, because name look-ups and connects cannot be interrupted. If this side
    // stops waiting, the thread closes its connection and ends once its call returns.
    std::thread::Builder::new().name("migrate-connect".into()).spawn(move || {
        let _ = sender.send(connect_here(&peer, limits));
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

fn connect_here(peer: &Address, limits: ConnectLimits) -> io::Result<Socket> {
    match peer {
        Address::Tcp(name) => connect_any(name, limits)?.try_into(),
        Address::Unix(path) => UnixStream::connect(path)?.try_into(),
        Address::Descriptor(_) => Err(io::Error::new(
            io::ErrorKind::Unsupported,
            "only a receiver takes over a descriptor; connect to a socket with unix:PATH",
        )),
    }
}

fn connect_any(name: &str, limits: ConnectLimits) -> io::Result<TcpStream> {
    let mut last = io::Error::new(io::ErrorKind::NotFound, "the name has no address");
    let addresses: Vec<SocketAddr> = name.to_socket_addrs()?.collect();
    for address in &addresses {
        if limits.only_here
            && let Err(e) = policy::stays_here(*address)
        {
            last = e.into();
            continue;
        }
        match TcpStream::connect_timeout(address, limits.timeout / addresses.len() as u32) {
            Ok(stream) => return Ok(stream),
            Err(e) => last = e,
        }
    }
    Err(last)
}
