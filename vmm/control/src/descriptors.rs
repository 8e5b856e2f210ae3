//! The descriptors that processes of a guest send each other: at most [`MAX_DESCRIPTORS`] at once.

use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd};

use driftline_format::descriptors;
pub(crate) use driftline_format::descriptors::ReceivedDescriptors;

/// Maximum number of descriptors with one byte.
pub(crate) const MAX_DESCRIPTORS: usize = 8;
/// Bytes of control data for [`MAX_DESCRIPTORS`] descriptors.
const SPACE: usize = rustix::cmsg_space!(ScmRights(MAX_DESCRIPTORS));

/// Sends one byte with `descriptors`; see [`descriptors::send`].
pub(crate) fn send(socket: impl AsFd, descriptors: &[BorrowedFd<'_>]) -> io::Result<()> {
    descriptors::send(socket, descriptors, &mut [MaybeUninit::uninit(); SPACE])
}

/// Receives one byte with its descriptors; see [`descriptors::receive`].
pub(crate) fn receive(socket: impl AsFd) -> io::Result<Option<ReceivedDescriptors>> {
    descriptors::receive(socket, &mut [MaybeUninit::uninit(); SPACE])
}
