//! A connected stream socket, whatever its family.

use std::io::{self, IoSlice, Read, Write};
use std::mem::MaybeUninit;
use std::net::{IpAddr, Shutdown, SocketAddr, TcpStream};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::AddressFamily;
use rustix::net::sockopt::socket_domain;
use socket2::{SockRef, TcpKeepalive};
use vm_memory::bitmap::BitmapSlice;
use vm_memory::{ReadVolatile, VolatileMemoryError, VolatileSlice, WriteVolatile};

use super::policy;
use super::wait::SLICE;

/// Idle time after which the kernel probes the peer of a TCP connection.
const KEEPALIVE: Duration = Duration::from_secs(5);

/// A connected stream socket. Its reads and writes wait at most [`SLICE`], or not at all.
#[derive(Debug)]
pub(crate) struct Socket {
    fd: OwnedFd,
    is_tcp: bool,
}

/// Key by which the connections of one peer are counted.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum PeerGroup {
    /// An IP address.
    Host(IpAddr),
    /// A unix socket, which the users of this host share, or a peer without an address.
    Local,
}

impl Socket {
    /// Takes a connected stream socket, and sets its options.
    pub(crate) fn new(fd: OwnedFd) -> io::Result<Self> {
        let is_tcp = matches!(socket_domain(&fd)?, AddressFamily::INET | AddressFamily::INET6);
        let socket = SockRef::from(&fd);
        socket.set_nonblocking(false)?;
        socket.set_read_timeout(Some(SLICE))?;
        socket.set_write_timeout(Some(SLICE))?;
        if is_tcp {
            socket.set_tcp_nodelay(true)?;
            let probe = TcpKeepalive::new().with_time(KEEPALIVE).with_interval(KEEPALIVE);
            socket.set_tcp_keepalive(&probe)?;
        }
        Ok(Self { fd, is_tcp })
    }

    /// Returns the two ends of a connection within this process.
    #[cfg(test)]
    pub(crate) fn pair() -> io::Result<(Self, Self)> {
        let (one, other) = std::os::unix::net::UnixStream::pair()?;
        Ok((Self::new(one.into())?, Self::new(other.into())?))
    }

    /// Returns another handle of the connection.
    pub(super) fn try_clone(&self) -> io::Result<OwnedFd> {
        self.fd.try_clone()
    }

    /// Returns the peer, for logs.
    pub(super) fn peer(&self) -> String {
        match self.peer_address() {
            Some(address) => address.to_string(),
            None if self.is_tcp => "an unknown peer".to_owned(),
            None => "a process of this host".to_owned(),
        }
    }

    /// Returns the group in which the peer's connections are counted.
    pub(super) fn peer_group(&self) -> PeerGroup {
        self.peer_address().map_or(PeerGroup::Local, |address| PeerGroup::Host(address.ip()))
    }

    /// Whether the connection does not leave this host.
    pub(super) fn stays_here(&self) -> bool {
        !self.is_tcp || self.peer_address().is_some_and(|peer| policy::stays_here(peer).is_ok())
    }

    fn peer_address(&self) -> Option<SocketAddr> {
        SockRef::from(&self.fd).peer_addr().ok()?.as_socket()
    }

    /// Whether this is a TCP connection.
    pub(super) fn is_tcp(&self) -> bool {
        self.is_tcp
    }

    /// Whether bytes, or the end of the connection, can be read. Does not block.
    pub(super) fn has_incoming(&self) -> bool {
        let mut byte = [MaybeUninit::uninit()];
        let flags = libc::MSG_PEEK | libc::MSG_DONTWAIT;
        let peeked = SockRef::from(&self.fd).recv_with_flags(&mut byte, flags);
        peeked.map_or_else(|e| !waits(&e), |_| true)
    }

    /// Lets reads and writes fail with `WouldBlock` instead of waiting.
    pub(super) fn set_nonblocking(&self) -> io::Result<()> {
        SockRef::from(&self.fd).set_nonblocking(true)
    }

    /// Waits for one of `events`, a failure or the end of the connection, for at most [`SLICE`].
    /// Fails with `WouldBlock` without one.
    pub(super) fn await_events(&self, events: PollFlags) -> io::Result<()> {
        match self.is_ready(events, SLICE) {
            true => Ok(()),
            false => Err(io::ErrorKind::WouldBlock.into()),
        }
    }

    /// Whether one of `events`, a failure or the end of the connection comes within `limit`. A
    /// failure to wait counts as one of them.
    pub(super) fn is_ready(&self, events: PollFlags, limit: Duration) -> bool {
        let limit = Timespec::try_from(limit).ok();
        let mut polled = [PollFd::new(&self.fd, events)];
        !matches!(poll(&mut polled, limit.as_ref()), Ok(0) | Err(Errno::INTR))
    }

    /// Delays small writes of a TCP connection, for at most 200 ms, until they are released. A
    /// failure only costs additional packets.
    pub(super) fn set_cork(&self, corked: bool) {
        if self.is_tcp {
            let _ = SockRef::from(&self.fd).set_tcp_cork(corked);
        }
    }

    /// Writes without a packet of its own, because more bytes follow immediately.
    pub(super) fn write_more(&self, bytes: &[u8]) -> io::Result<usize> {
        SockRef::from(&self.fd).send_with_flags(bytes, libc::MSG_MORE | libc::MSG_NOSIGNAL)
    }

    /// Ends one direction of the connection, or both.
    pub(super) fn shutdown(&self, how: Shutdown) -> io::Result<()> {
        SockRef::from(&self.fd).shutdown(how)
    }

    /// Writes guest memory without copying it first.
    pub(super) fn write_volatile<B: BitmapSlice>(
        &mut self,
        slice: &VolatileSlice<'_, B>,
    ) -> io::Result<usize> {
        self.fd.write_volatile(slice).map_err(outside)
    }

    /// Reads into guest memory without a buffer in between.
    pub(super) fn read_volatile<B: BitmapSlice>(
        &mut self,
        slice: &mut VolatileSlice<'_, B>,
    ) -> io::Result<usize> {
        self.fd.read_volatile(slice).map_err(outside)
    }
}

impl Read for Socket {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        (&*SockRef::from(&self.fd)).read(buf)
    }
}

impl Write for Socket {
    fn write(&mut self, buf: &[u8]) -> io::Result<usize> {
        (&*SockRef::from(&self.fd)).write(buf)
    }

    fn write_vectored(&mut self, bufs: &[IoSlice<'_>]) -> io::Result<usize> {
        (&*SockRef::from(&self.fd)).write_vectored(bufs)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl AsFd for Socket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

impl TryFrom<TcpStream> for Socket {
    type Error = io::Error;

    fn try_from(stream: TcpStream) -> io::Result<Self> {
        Self::new(stream.into())
    }
}

/// Whether a read or write would block, or was interrupted.
pub(super) fn waits(e: &io::Error) -> bool {
    use io::ErrorKind::{Interrupted, TimedOut, WouldBlock};
    matches!(e.kind(), WouldBlock | TimedOut | Interrupted)
}

/// Returns the error of an access to guest memory.
pub(super) fn outside(e: VolatileMemoryError) -> io::Error {
    match e {
        VolatileMemoryError::IOError(e) => e,
        e => io::Error::other(e),
    }
}
