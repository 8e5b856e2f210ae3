//! The socket at which a receiver waits for connections.

use std::fmt;
use std::io;
use std::net::{SocketAddr, TcpListener};
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::os::unix::net::UnixListener;

use parking_lot::Mutex;
use rustix::net::sockopt::{socket_acceptconn, socket_type};
use rustix::net::{SocketType, getpeername};
use socket2::SockRef;

use super::policy::{self, UnprotectedAddress};
use super::wait::SLICE;

/// A listening socket, or one connection in its place.
#[derive(Debug)]
pub struct Listener {
    source: ConnectionSource,
    address: String,
    /// The TCP address that this process has bound.
    bound: Option<SocketAddr>,
}

#[derive(Debug)]
enum ConnectionSource {
    Listening(OwnedFd),
    /// A connection that was inherited. There is never another one.
    Single(Mutex<Option<OwnedFd>>),
}

/// A descriptor at which no migration can arrive.
#[derive(Debug, thiserror::Error)]
pub enum DescriptorError {
    /// It is not a stream socket.
    #[error("descriptor {number} is not a stream socket; pass a TCP or unix socket")]
    NotAStream {
        /// Its number.
        number: RawFd,
    },
    /// The socket neither listens nor is connected.
    #[error(
        "descriptor {number} is a socket that neither listens nor is connected; pass one that does"
    )]
    Unconnected {
        /// Its number.
        number: RawFd,
    },
}

impl Listener {
    /// Listens on a TCP address, `HOST:PORT`. Port 0 selects a free port.
    ///
    /// # Errors
    ///
    /// If the host is not this one, or the port is taken.
    pub fn bind(address: &str) -> io::Result<Self> {
        let listener = TcpListener::bind(address)?;
        let bound = listener.local_addr()?;
        let (source, address) =
            (ConnectionSource::Listening(listener.into()), format!("tcp:{bound}"));
        Ok(Self { source, address, bound: Some(bound) })
    }

    /// Takes a unix socket that listens. `path` is its name.
    pub fn unix(listener: UnixListener, path: &std::path::Path) -> Self {
        let address = format!("unix:{}", path.display());
        Self { source: ConnectionSource::Listening(listener.into()), address, bound: None }
    }

    /// Takes a stream socket that this process was started with: one that listens, or a connection,
    /// over which one source can send.
    ///
    /// # Errors
    ///
    /// See [`DescriptorError`].
    pub fn inherited(fd: OwnedFd) -> Result<Self, DescriptorError> {
        let number = fd.as_raw_fd();
        if !socket_type(&fd).is_ok_and(|kind| kind == SocketType::STREAM) {
            return Err(DescriptorError::NotAStream { number });
        }
        let source = match socket_acceptconn(&fd) {
            Ok(true) => ConnectionSource::Listening(fd),
            _ if getpeername(&fd).is_ok() => ConnectionSource::Single(Mutex::new(Some(fd))),
            _ => return Err(DescriptorError::Unconnected { number }),
        };
        Ok(Self { source, address: format!("fd:{number}"), bound: None })
    }

    /// Returns the address on which it listens, as in the command line.
    pub fn address(&self) -> &str {
        &self.address
    }

    /// Fails if connections from other hosts can arrive at it. An inherited socket is the decision
    /// of the process that passed it.
    ///
    /// # Errors
    ///
    /// [`UnprotectedAddress`] has the address.
    pub fn check_stays_here(&self) -> Result<(), UnprotectedAddress> {
        match self.bound {
            Some(address) => policy::stays_here(address),
            None => Ok(()),
        }
    }

    /// Whether it is a connection, after which no other one arrives.
    pub(crate) fn is_single(&self) -> bool {
        matches!(self.source, ConnectionSource::Single(_))
    }

    /// Prepares the socket for [`accept`](Self::accept).
    pub(crate) fn prepare(&self) -> io::Result<()> {
        let ConnectionSource::Listening(fd) = &self.source else { return Ok(()) };
        let socket = SockRef::from(fd);
        socket.set_nonblocking(false)?;
        // accept(2) obeys the receive timeout, so the thread checks its stop flag every slice.
        socket.set_read_timeout(Some(SLICE))
    }

    /// Waits for the next connection, at most [`SLICE`].
    pub(crate) fn accept(&self) -> io::Result<OwnedFd> {
        match &self.source {
            ConnectionSource::Listening(fd) => {
                let (socket, _) = SockRef::from(fd).accept()?;
                Ok(socket.into())
            }
            ConnectionSource::Single(connection) => match connection.lock().take() {
                Some(connection) => Ok(connection),
                None => Err(io::ErrorKind::NotConnected.into()),
            },
        }
    }
}

impl fmt::Display for Listener {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.address)
    }
}
