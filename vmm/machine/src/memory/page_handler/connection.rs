//! The connection to a page handler, as Firecracker has it: one message hands the memory over, and
//! nothing follows. The process at the other end is watched for as long as it is needed.

use std::fmt;
use std::io;
use std::io::IoSlice;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::sockopt::{Timeout, set_socket_timeout, socket_error};
use rustix::net::{
    AddressFamily, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketAddrUnix,
    SocketFlags, SocketType, connect, sendmsg, socket_with,
};
use serde::Serialize;

use crate::memory::error::{HandlerStep, PageHandlerError};

/// Limit on waiting for a handler that does not accept its connections, and for room for the
/// message.
const ANSWER_LIMIT: Duration = Duration::from_secs(if cfg!(test) { 1 } else { 5 });

/// One mapping of guest memory, as it is described to a page handler.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
pub(super) struct HandlerMapping {
    /// Address in this process.
    pub(super) base_host_virt_addr: u64,
    /// Length in bytes.
    pub(super) size: u64,
    /// Where its content begins in the memory file of the snapshot.
    pub(super) offset: u64,
    /// Bytes of the pages in which faults are answered.
    pub(super) page_size: u64,
    /// The same number, in bytes despite its name: handlers for earlier releases of Firecracker
    /// read it.
    pub(super) page_size_kib: u64,
}

/// Why a page handler serves no more pages.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum HandlerEnd {
    /// Its process has ended.
    Exited,
    /// It has closed the connection before it received the memory.
    Refused,
    /// It has closed the connection, and this host cannot tell whether its process still runs.
    HungUp,
    /// This process cannot watch it.
    Unwatched,
}

impl fmt::Display for HandlerEnd {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Exited => "has ended",
            Self::Refused => "has closed its connection without taking the memory",
            Self::HungUp => "has closed its connection",
            Self::Unwatched => "cannot be watched",
        })
    }
}

/// A connection to a page handler: a process that serves the faults of a guest's memory.
#[derive(Debug)]
pub struct PageHandlerSocket {
    socket: OwnedFd,
    /// The process that listened; `None` if this host cannot watch it.
    process: Option<OwnedFd>,
    path: PathBuf,
}

impl PageHandlerSocket {
    /// Connects to the handler that listens on the unix socket `path`.
    ///
    /// # Errors
    ///
    /// No process listens there, or it does not accept connections for five seconds.
    pub fn connect(path: &Path) -> Result<Self, PageHandlerError> {
        let failed = |cause: Errno| PageHandlerError::new(HandlerStep::Connect)(cause.into());
        let address = SocketAddrUnix::new(path).map_err(failed)?;
        let socket =
            socket_with(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None)
                .map_err(failed)?;
        // Limits both the connect and the send.
        set_socket_timeout(&socket, Timeout::Send, Some(ANSWER_LIMIT)).map_err(failed)?;
        connect(&socket, &address).map_err(failed)?;
        let process = peer_process(socket.as_fd());
        if process.is_none() {
            tracing::info!("the page handler is watched by its connection, not by its process");
        }
        Ok(Self { socket, process, path: path.to_owned() })
    }

    /// Returns the path at which the handler listened.
    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// Hands `mappings` over, whose faults `userfault` reports.
    pub(super) fn send(
        &self,
        userfault: BorrowedFd<'_>,
        mappings: &[HandlerMapping],
    ) -> Result<(), PageHandlerError> {
        let failed = PageHandlerError::new(HandlerStep::Send);
        let text = serde_json::to_vec(mappings).map_err(|e| failed(e.into()))?;
        let descriptors = [userfault];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut ancillary = SendAncillaryBuffer::new(&mut space);
        if !ancillary.push(SendAncillaryMessage::ScmRights(&descriptors)) {
            return Err(failed(io::ErrorKind::InvalidInput.into()));
        }
        let flags = SendFlags::NOSIGNAL;
        let sent = sendmsg(&self.socket, &[IoSlice::new(&text)], &mut ancillary, flags);
        match sent.map_err(|e| failed(e.into()))? {
            all if all == text.len() => Ok(()),
            _ => Err(failed(io::ErrorKind::WriteZero.into())),
        }
    }

    /// Waits until the handler serves no more pages. Returns `None` once `stop` is readable.
    ///
    /// A handler may close its connection: nothing follows the first message. So only the end of
    /// its process is its end, where this host can tell.
    pub(super) fn wait_end(&self, stop: BorrowedFd<'_>) -> io::Result<Option<HandlerEnd>> {
        let process = self.process.as_ref().map_or(stop, AsFd::as_fd);
        let mut socket = self.socket.as_fd();
        loop {
            let mut wait = [
                PollFd::from_borrowed_fd(stop, PollFlags::IN),
                PollFd::from_borrowed_fd(process, PollFlags::IN),
                // The end of a connection is always reported.
                PollFd::from_borrowed_fd(socket, PollFlags::empty()),
            ];
            match poll(&mut wait, None) {
                Err(Errno::INTR) => continue,
                polled => polled?,
            };
            let [stopped, exited, hung_up] = wait.map(|fd| !fd.revents().is_empty());
            if stopped {
                return Ok(None);
            }
            if exited {
                return Ok(Some(HandlerEnd::Exited));
            }
            if hung_up {
                // The kernel reports a reset if the peer leaves bytes unread.
                if socket_error(&self.socket)?.is_err() {
                    return Ok(Some(HandlerEnd::Refused));
                }
                if self.process.is_none() {
                    return Ok(Some(HandlerEnd::HungUp));
                }
                tracing::debug!("the page handler has closed its connection");
                socket = stop;
            }
        }
    }
}

/// Returns the process that listened where `socket` is connected to. `None` if the kernel cannot
/// tell (before 6.5), or if that process has ended: then another one serves the connection.
fn peer_process(socket: BorrowedFd<'_>) -> Option<OwnedFd> {
    let mut fd: libc::c_int = -1;
    let mut len = size_of::<libc::c_int>() as libc::socklen_t;
    // SAFETY: the kernel writes at most `len` bytes to `fd`, which are ours.
    let got = unsafe {
        libc::getsockopt(
            socket.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_PEERPIDFD,
            (&raw mut fd).cast(),
            &raw mut len,
        )
    };
    if got != 0 || fd < 0 {
        return None;
    }
    // SAFETY: the kernel has just returned it, and no other code has it.
    let process = unsafe { OwnedFd::from_raw_fd(fd) };
    let mut now = [PollFd::new(&process, PollFlags::IN)];
    let has_ended = poll(&mut now, Some(&Timespec::default())).is_ok_and(|ended| ended > 0);
    (!has_ended).then_some(process)
}
