//! The two kinds of sockets that the server listens on.

use std::io::{self, IoSlice};
use std::os::fd::{AsFd, BorrowedFd};
use std::task::{Context, Poll};

use tokio::net::{TcpListener, TcpStream, UnixListener, UnixStream};

/// A listening socket.
#[derive(Debug)]
pub(super) enum ServerSocket {
    /// The API's.
    Unix(UnixListener),
    /// The socket of `/metrics` alone.
    Tcp(TcpListener),
}

impl ServerSocket {
    pub(super) async fn accept(&self) -> io::Result<ServerStream> {
        match self {
            Self::Unix(listener) => Ok(ServerStream::Unix(listener.accept().await?.0)),
            Self::Tcp(listener) => Ok(ServerStream::Tcp(listener.accept().await?.0)),
        }
    }
}

/// An accepted connection.
#[derive(Debug)]
pub(super) enum ServerStream {
    Unix(UnixStream),
    Tcp(TcpStream),
}

impl ServerStream {
    pub(super) fn poll_read_ready(&self, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self {
            Self::Unix(stream) => stream.poll_read_ready(context),
            Self::Tcp(stream) => stream.poll_read_ready(context),
        }
    }

    pub(super) fn poll_write_ready(&self, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self {
            Self::Unix(stream) => stream.poll_write_ready(context),
            Self::Tcp(stream) => stream.poll_write_ready(context),
        }
    }

    pub(super) fn try_read(&self, buf: &mut [u8]) -> io::Result<usize> {
        match self {
            Self::Unix(stream) => stream.try_read(buf),
            Self::Tcp(stream) => stream.try_read(buf),
        }
    }

    pub(super) fn try_write(&self, buf: &[u8]) -> io::Result<usize> {
        match self {
            Self::Unix(stream) => stream.try_write(buf),
            Self::Tcp(stream) => stream.try_write(buf),
        }
    }

    pub(super) fn try_write_vectored(&self, bufs: &[IoSlice<'_>]) -> io::Result<usize> {
        match self {
            Self::Unix(stream) => stream.try_write_vectored(bufs),
            Self::Tcp(stream) => stream.try_write_vectored(bufs),
        }
    }
}

impl AsFd for ServerStream {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match self {
            Self::Unix(stream) => stream.as_fd(),
            Self::Tcp(stream) => stream.as_fd(),
        }
    }
}
