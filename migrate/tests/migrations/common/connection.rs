//! A connection of either kind whose reads keep the descriptors that come with bytes, so that a
//! proxy can pass them on.

use std::io::{self, IoSlice, IoSliceMut, Read, Write};
use std::mem::MaybeUninit;
use std::net::{Shutdown, SocketAddr};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;

use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags,
};
use socket2::{Domain, SockAddr, Socket, Type};

/// Descriptors that one message may carry; more than a destination accepts.
const MOST: usize = 64;
const SPACE: usize = rustix::cmsg_space!(ScmRights(MOST));

/// A connected socket.
pub struct ProxyConnection {
    socket: Socket,
    /// Descriptors that came with the bytes read so far.
    received: Vec<OwnedFd>,
}

impl ProxyConnection {
    pub fn new(socket: Socket) -> Self {
        Self { socket, received: Vec::new() }
    }

    /// Connects to `unix:PATH`, or to `HOST:PORT`.
    pub fn to(address: &str) -> io::Result<Self> {
        let (domain, to) = parse(address)?;
        let socket = Socket::new(domain, Type::STREAM, None)?;
        socket.connect(&to)?;
        Ok(Self::new(socket))
    }

    pub fn try_clone(&self) -> io::Result<Self> {
        self.socket.try_clone().map(Self::new)
    }

    pub fn shutdown(&self, how: Shutdown) {
        let _ = self.socket.shutdown(how);
    }

    /// Makes small writes of a TCP connection leave at once.
    pub fn set_nodelay(&self) {
        let _ = self.socket.set_tcp_nodelay(true);
    }

    /// Returns the descriptors that have come since the last call.
    pub fn take_descriptors(&mut self) -> Vec<OwnedFd> {
        std::mem::take(&mut self.received)
    }

    /// Writes `bytes`, the last of which carries `descriptors`.
    pub fn write_with(&mut self, bytes: &[u8], descriptors: &[OwnedFd]) -> io::Result<()> {
        let (last, others) = match bytes.split_last() {
            Some(split) if !descriptors.is_empty() => split,
            _ => return self.write_all(bytes),
        };
        self.write_all(others)?;
        let descriptors: Vec<BorrowedFd<'_>> = descriptors.iter().map(AsFd::as_fd).collect();
        let mut space = [MaybeUninit::uninit(); SPACE];
        let mut control = SendAncillaryBuffer::new(&mut space);
        assert!(control.push(SendAncillaryMessage::ScmRights(&descriptors)));
        let byte = [IoSlice::new(std::slice::from_ref(last))];
        rustix::net::sendmsg(&self.socket, &byte, &mut control, SendFlags::NOSIGNAL)?;
        Ok(())
    }
}

impl Read for ProxyConnection {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        let mut space = [MaybeUninit::uninit(); SPACE];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let into = &mut [IoSliceMut::new(buf)];
        let flags = RecvFlags::CMSG_CLOEXEC;
        let received = rustix::net::recvmsg(&self.socket, into, &mut control, flags)?;
        for message in control.drain() {
            if let RecvAncillaryMessage::ScmRights(descriptors) = message {
                self.received.extend(descriptors);
            }
        }
        Ok(received.bytes)
    }
}

impl Write for ProxyConnection {
    fn write(&mut self, buf: &[u8]) -> io::Result<usize> {
        self.socket.send_with_flags(buf, libc::MSG_NOSIGNAL)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// A listening socket, of the kind of another one.
pub struct ProxyListener {
    socket: Socket,
    pub address: String,
    /// Has the unix socket.
    _dir: Option<tempfile::TempDir>,
}

impl ProxyListener {
    /// Listens at a new address of the kind of `like`, without blocking.
    pub fn like(like: &str) -> Self {
        let (dir, address) = match like.strip_prefix("unix:") {
            None => (None, "127.0.0.1:0".to_owned()),
            Some(_) => {
                let dir = tempfile::tempdir().unwrap();
                let address = format!("unix:{}", dir.path().join("proxy").display());
                (Some(dir), address)
            }
        };
        let (domain, at) = parse(&address).unwrap();
        let socket = Socket::new(domain, Type::STREAM, None).unwrap();
        socket.bind(&at).unwrap();
        socket.listen(16).unwrap();
        socket.set_nonblocking(true).unwrap();
        let bound = socket.local_addr().unwrap().as_socket();
        let address = bound.map_or(address, |bound| bound.to_string());
        Self { socket, address, _dir: dir }
    }

    pub fn accept(&self) -> Option<ProxyConnection> {
        let (socket, _) = self.socket.accept().ok()?;
        socket.set_nonblocking(false).unwrap();
        Some(ProxyConnection::new(socket))
    }
}

fn parse(address: &str) -> io::Result<(Domain, SockAddr)> {
    match address.strip_prefix("unix:") {
        Some(path) => Ok((Domain::UNIX, SockAddr::unix(Path::new(path))?)),
        None => {
            let address: SocketAddr = address.parse().map_err(io::Error::other)?;
            Ok((Domain::for_address(address), address.into()))
        }
    }
}
