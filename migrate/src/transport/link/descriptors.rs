//! Descriptors that travel over a unix socket, attached to one byte (SCM_RIGHTS).
//!
//! Only [`Link::receive_descriptors`] receives some. The kernel closes those that come with any
//! other byte, because no other read has room for them.

use std::io;
use std::mem::MaybeUninit;
use std::os::fd::BorrowedFd;

use driftline_format::descriptors::{self, ReceivedDescriptors};
use driftline_guest::MAX_DEVICE_FILES;
use rustix::net::AddressFamily;
use rustix::net::sockopt::{socket_domain, socket_peercred};

use super::super::socket::Socket;
use super::super::stream::Stream;
use super::{Link, closed};

/// Bytes of control data for the descriptors of FILES; MEMORY has fewer.
const SPACE: usize = rustix::cmsg_space!(ScmRights(MAX_DEVICE_FILES));

impl Link {
    /// Whether descriptors can travel over this connection: it is a unix socket without TLS.
    pub(crate) fn carries_descriptors(&self) -> bool {
        let socket = self.stream.plain_socket();
        socket.is_some_and(|s| socket_domain(s).is_ok_and(|d| d == AddressFamily::UNIX))
    }

    /// Returns the user of the peer's process at the time when it connected, or listened. Fails if
    /// that process is not visible in this PID namespace.
    pub(crate) fn peer_user(&self) -> io::Result<u32> {
        let socket = self.stream.plain_socket().ok_or(io::ErrorKind::Unsupported)?;
        // The kernel reports pid 0 for a process of another PID namespace. `UCred` cannot represent
        // that, so the call fails with a meaningless error number.
        let peer = socket_peercred(socket).map_err(|_| {
            io::Error::other("the user of the peer is not known: its process is not visible here")
        })?;
        Ok(peer.uid.as_raw())
    }

    /// Sends one byte with the descriptors `all`, at most [`MAX_DEVICE_FILES`].
    pub(crate) fn send_descriptors(&mut self, all: &[BorrowedFd<'_>]) -> io::Result<()> {
        self.wait_until("accepted", |stream| {
            descriptors::send(plain(stream)?, all, &mut [MaybeUninit::uninit(); SPACE])
        })
    }

    /// Receives one byte and the descriptors that come with it.
    pub(crate) fn receive_descriptors(&mut self) -> io::Result<ReceivedDescriptors> {
        self.wait_until("sent", |stream| receive(plain(stream)?))
    }
}

fn plain(stream: &Stream) -> io::Result<&Socket> {
    stream.plain_socket().ok_or_else(|| io::ErrorKind::Unsupported.into())
}

fn receive(socket: &Socket) -> io::Result<ReceivedDescriptors> {
    let received = descriptors::receive(socket, &mut [MaybeUninit::uninit(); SPACE])?;
    received.ok_or_else(closed)
}
