//! Descriptors that travel over a unix socket, attached to one byte (SCM_RIGHTS).

use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, recvmsg, sendmsg,
};

/// Descriptors that came with a byte.
#[derive(Debug)]
pub struct ReceivedDescriptors {
    /// The descriptors, in the order in which they were sent. They close at exec.
    pub all: Vec<OwnedFd>,
    /// Whether the kernel has closed some: there was no room for them, or this process may not have
    /// so many.
    pub truncated: bool,
}

/// Sends one byte with `descriptors`. Their control data is built in `room`, whose size
/// `rustix::cmsg_space!` gives.
///
/// # Errors
///
/// [`io::ErrorKind::InvalidInput`] if `room` is too small, or the system's error. On a socket that
/// does not block, that is [`io::ErrorKind::WouldBlock`] if the socket cannot take the byte now.
pub fn send(
    socket: impl AsFd,
    descriptors: &[BorrowedFd<'_>],
    room: &mut [MaybeUninit<u8>],
) -> io::Result<()> {
    let mut control = SendAncillaryBuffer::new(room);
    if !control.push(SendAncillaryMessage::ScmRights(descriptors)) {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    match sendmsg(socket, &[IoSlice::new(&[0])], &mut control, SendFlags::NOSIGNAL)? {
        0 => Err(io::ErrorKind::WriteZero.into()),
        _ => Ok(()),
    }
}

/// Receives one byte, and at most as many descriptors as `room` has room for. Returns `None` at the
/// end of the stream.
///
/// # Errors
///
/// The system's error. On a socket that does not block, that is [`io::ErrorKind::WouldBlock`] if
/// nothing has arrived.
pub fn receive(
    socket: impl AsFd,
    room: &mut [MaybeUninit<u8>],
) -> io::Result<Option<ReceivedDescriptors>> {
    let (mut byte, mut control) = ([0], RecvAncillaryBuffer::new(room));
    let byte = &mut [IoSliceMut::new(&mut byte)];
    let received = recvmsg(socket, byte, &mut control, RecvFlags::CMSG_CLOEXEC)?;
    let rights = control.drain().filter_map(|message| match message {
        RecvAncillaryMessage::ScmRights(descriptors) => Some(descriptors),
        _ => None,
    });
    let all = rights.flatten().collect();
    let truncated = received.flags.contains(ReturnFlags::CTRUNC);
    Ok((received.bytes > 0).then_some(ReceivedDescriptors { all, truncated }))
}
