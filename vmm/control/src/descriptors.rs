//! Sends and receives descriptors over unix sockets, attached to one byte (SCM_RIGHTS).

use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, recvmsg, sendmsg,
};

/// Maximum number of descriptors with one byte.
pub(crate) const MAX_DESCRIPTORS: usize = 8;
/// Bytes of control data for [`MAX_DESCRIPTORS`] descriptors.
const SPACE: usize = rustix::cmsg_space!(ScmRights(MAX_DESCRIPTORS));

/// Descriptors that came with a byte.
#[derive(Debug)]
pub(crate) struct ArrivedDescriptors {
    pub(crate) all: Vec<OwnedFd>,
    /// Whether the kernel has closed some: there were more than [`MAX_DESCRIPTORS`], or this
    /// process may not have so many.
    pub(crate) truncated: bool,
}

/// Sends one byte with `descriptors`, at most [`MAX_DESCRIPTORS`].
///
/// # Errors
///
/// The system's error. On a socket that does not block, it may be that there is no room.
pub(crate) fn send(socket: impl AsFd, descriptors: &[BorrowedFd<'_>]) -> io::Result<()> {
    let mut space = [MaybeUninit::uninit(); SPACE];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !control.push(SendAncillaryMessage::ScmRights(descriptors)) {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    sendmsg(socket, &[IoSlice::new(&[0])], &mut control, SendFlags::NOSIGNAL)?;
    Ok(())
}

/// Receives one byte with its descriptors. Returns `None` at the end of the stream.
///
/// # Errors
///
/// The system's error. On a socket that does not block, it may be that nothing has arrived.
pub(crate) fn receive(socket: impl AsFd) -> io::Result<Option<ArrivedDescriptors>> {
    let (mut byte, mut space) = ([0], [MaybeUninit::uninit(); SPACE]);
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let byte = &mut [IoSliceMut::new(&mut byte)];
    let received = recvmsg(socket, byte, &mut control, RecvFlags::CMSG_CLOEXEC)?;
    let rights = control.drain().filter_map(|message| match message {
        RecvAncillaryMessage::ScmRights(descriptors) => Some(descriptors),
        _ => None,
    });
    let all = rights.flatten().collect();
    let truncated = received.flags.contains(ReturnFlags::CTRUNC);
    Ok((received.bytes > 0).then_some(ArrivedDescriptors { all, truncated }))
}
