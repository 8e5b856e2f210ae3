//! Descriptors that travel over a unix socket, attached to one byte (SCM_RIGHTS).
//!
//! Only [`Link::receive_descriptors`] receives some. The kernel closes those that come with any
//! other byte, because no other read has room for them.

use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{BorrowedFd, OwnedFd};

use rustix::net::sockopt::{socket_domain, socket_peercred};
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags,
    SendAncillaryBuffer, SendAncillaryMessage, SendFlags, recvmsg, sendmsg,
};

use super::super::socket::Socket;
use super::super::stream::Stream;
use super::{Link, closed};
use driftline_guest::MAX_DEVICE_FILES;

/// Bytes of control data for the descriptors of FILES; MEMORY has fewer.
const SPACE: usize = rustix::cmsg_space!(ScmRights(MAX_DEVICE_FILES));

/// Descriptors that came with a byte.
#[derive(Debug)]
pub(crate) struct ReceivedDescriptors {
    pub(crate) all: Vec<OwnedFd>,
    /// Whether the kernel has closed some, because this process may not have so many.
    pub(crate) truncated: bool,
}

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
        // The type of the answer has no room for a process without an id, so the error's number
        // means nothing then.
        let peer = socket_peercred(socket).map_err(|_| {
            io::Error::other("the user of the peer is not known: its process is not visible here")
        })?;
        Ok(peer.uid.as_raw())
    }

    /// Sends one byte with `descriptors`, at most [`MAX_DEVICE_FILES`].
    pub(crate) fn send_descriptors(&mut self, descriptors: &[BorrowedFd<'_>]) -> io::Result<()> {
        self.wait_until("took", |stream| send(plain(stream)?, descriptors))
    }

    /// Receives one byte and the descriptors that come with it.
    pub(crate) fn receive_descriptors(&mut self) -> io::Result<ReceivedDescriptors> {
        self.wait_until("sent", |stream| receive(plain(stream)?))
    }
}

fn plain(stream: &Stream) -> io::Result<&Socket> {
    stream.plain_socket().ok_or_else(|| io::ErrorKind::Unsupported.into())
}

fn send(socket: &Socket, descriptors: &[BorrowedFd<'_>]) -> io::Result<()> {
    let mut space = [MaybeUninit::uninit(); SPACE];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !control.push(SendAncillaryMessage::ScmRights(descriptors)) {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    match sendmsg(socket, &[IoSlice::new(&[0])], &mut control, SendFlags::NOSIGNAL)? {
        0 => Err(closed()),
        _ => Ok(()),
    }
}

fn receive(socket: &Socket) -> io::Result<ReceivedDescriptors> {
    let (mut byte, mut space) = ([0], [MaybeUninit::uninit(); SPACE]);
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let byte = &mut [IoSliceMut::new(&mut byte)];
    let received = recvmsg(socket, byte, &mut control, RecvFlags::CMSG_CLOEXEC)?;
    // Before any error, so that descriptors that have arrived are closed.
    let rights = control.drain().filter_map(|message| match message {
        RecvAncillaryMessage::ScmRights(descriptors) => Some(descriptors),
        _ => None,
    });
    let all: Vec<OwnedFd> = rights.flatten().collect();
    match received.bytes {
        0 => Err(closed()),
        _ => {
            Ok(ReceivedDescriptors { all, truncated: received.flags.contains(ReturnFlags::CTRUNC) })
        }
    }
}
