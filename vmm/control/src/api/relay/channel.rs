//! Sends and receives connections. The receiver trusts nothing that arrives.

use std::fs::File;
use std::io::{self, Write};
use std::net::TcpStream as StdTcpStream;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixStream as StdUnixStream;
use std::time::Duration;

use rustix::fs::{MemfdFlags, fcntl_get_seals, memfd_create};
use rustix::net::sockopt::{socket_acceptconn, socket_domain, socket_protocol, socket_type};
use rustix::net::{AddressFamily, SocketType, ipproto};
use tokio::io::Interest;
use tokio::net::{TcpStream, UnixStream};
use tokio::time::timeout;

use crate::api::transport::ServerStream;
use crate::descriptors::{self, ReceivedDescriptors};

/// Limit for the receiver to take one connection.
const SEND_LIMIT: Duration = Duration::from_secs(if cfg!(test) { 1 } else { 5 });

/// The sending end of the channel.
#[derive(Debug)]
pub(in crate::api) struct RelaySender {
    channel: UnixStream,
}

impl RelaySender {
    /// Creates a sender. Must be called on the control thread.
    pub(in crate::api) fn new(channel: StdUnixStream) -> io::Result<Self> {
        channel.set_nonblocking(true)?;
        Ok(Self { channel: UnixStream::from_std(channel)? })
    }

    /// Sends `connection` and the `bytes` that were read from it and not answered. If the future is
    /// dropped before it returns, nothing was sent.
    pub(in crate::api) async fn send(
        &self,
        connection: BorrowedFd<'_>,
        bytes: &[u8],
    ) -> io::Result<()> {
        let bytes = if bytes.is_empty() { None } else { Some(memory_file(bytes)?) };
        let descriptors: Vec<BorrowedFd<'_>> =
            [connection].into_iter().chain(bytes.iter().map(AsFd::as_fd)).collect();
        let send = self
            .channel
            .async_io(Interest::WRITABLE, || descriptors::send(&self.channel, &descriptors));
        timeout(SEND_LIMIT, send).await.unwrap_or_else(|_| Err(io::ErrorKind::TimedOut.into()))
    }
}

/// Returns a memory file with `bytes`.
fn memory_file(bytes: &[u8]) -> io::Result<File> {
    let mut file = File::from(memfd_create("driftline-request", MemfdFlags::CLOEXEC)?);
    file.write_all(bytes)?;
    Ok(file)
}

/// A connection that another process has sent.
#[derive(Debug)]
pub(in crate::api) struct RelayedConnection {
    pub(in crate::api) stream: ServerStream,
    /// Bytes that were read from the connection already.
    pub(in crate::api) bytes: Vec<u8>,
}

/// The receiving end of the channel.
#[derive(Debug)]
pub(in crate::api) struct RelayReceiver {
    channel: UnixStream,
    max_bytes: usize,
}

impl RelayReceiver {
    /// Creates a receiver of connections with at most `max_bytes` bytes each. Must be called on the
    /// control thread.
    pub(in crate::api) fn new(channel: StdUnixStream, max_bytes: usize) -> io::Result<Self> {
        channel.set_nonblocking(true)?;
        Ok(Self { channel: UnixStream::from_std(channel)?, max_bytes })
    }

    /// Receives a connection, or returns `None` at the end of the channel. What is not a connection
    /// is dropped. If the future is dropped before it returns, nothing was received.
    pub(in crate::api) async fn receive(&self) -> Option<RelayedConnection> {
        loop {
            let received =
                self.channel.async_io(Interest::READABLE, || descriptors::receive(&self.channel));
            let descriptors = match received.await {
                Ok(Some(descriptors)) => descriptors,
                Ok(None) => return None,
                Err(e) => {
                    tracing::debug!("no more connections arrive from the previous process: {e}");
                    return None;
                }
            };
            match connection_of(descriptors, self.max_bytes) {
                Ok(connection) => return Some(connection),
                Err(e) => tracing::debug!("dropped what another process sent: {e}"),
            }
        }
    }
}

/// The reason why what came with a byte is dropped.
#[derive(Debug, thiserror::Error)]
enum RelayError {
    #[error("{0} descriptors came with a byte instead of 1 or 2")]
    Count(usize),
    #[error("there were too many descriptors, or this process may not have more")]
    Truncated,
    #[error("the first descriptor is not a connection of a unix or TCP socket")]
    NotAConnection,
    #[error("the second descriptor is not a memory file")]
    NotMemory,
    #[error("{bytes} bytes came with a connection, and {max} is the maximum")]
    TooLong { bytes: u64, max: usize },
    #[error(transparent)]
    System(#[from] io::Error),
}

fn connection_of(
    received: ReceivedDescriptors,
    max_bytes: usize,
) -> Result<RelayedConnection, RelayError> {
    let ReceivedDescriptors { all, truncated } = received;
    if truncated {
        return Err(RelayError::Truncated);
    }
    let count = all.len();
    let mut all = all.into_iter();
    let (stream, bytes) = match (all.next(), all.next(), all.next()) {
        (Some(stream), bytes, None) => (stream, bytes),
        _ => return Err(RelayError::Count(count)),
    };
    let stream = connected_stream(stream)?;
    let bytes = bytes.map_or(Ok(Vec::new()), |file| contents_of(file, max_bytes))?;
    Ok(RelayedConnection { stream, bytes })
}

/// Returns the stream of a descriptor, which must be a connection.
fn connected_stream(stream: OwnedFd) -> Result<ServerStream, RelayError> {
    let kind = || {
        rustix::io::Result::Ok((
            socket_domain(&stream)?,
            socket_type(&stream)?,
            socket_acceptconn(&stream)?,
            socket_protocol(&stream)?,
        ))
    };
    match kind() {
        Ok((AddressFamily::UNIX, SocketType::STREAM, false, None)) => {
            let stream = StdUnixStream::from(stream);
            stream.set_nonblocking(true)?;
            Ok(ServerStream::Unix(UnixStream::from_std(stream)?))
        }
        Ok((
            AddressFamily::INET | AddressFamily::INET6,
            SocketType::STREAM,
            false,
            Some(ipproto::TCP),
        )) => {
            let stream = StdTcpStream::from(stream);
            stream.set_nonblocking(true)?;
            Ok(ServerStream::Tcp(TcpStream::from_std(stream)?))
        }
        _ => Err(RelayError::NotAConnection),
    }
}

/// Returns what a memory file contains. Reading any other file may block.
fn contents_of(file: OwnedFd, max: usize) -> Result<Vec<u8>, RelayError> {
    // Only memory has seals.
    fcntl_get_seals(&file).map_err(|_| RelayError::NotMemory)?;
    let file = File::from(file);
    let bytes = file.metadata()?.len();
    let length = usize::try_from(bytes).ok().filter(|length| *length <= max);
    let mut contents = vec![0; length.ok_or(RelayError::TooLong { bytes, max })?];
    file.read_exact_at(&mut contents, 0)?;
    Ok(contents)
}
