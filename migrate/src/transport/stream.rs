//! The bytes of a connection: its socket, with or without TLS.

use std::io::{self, IoSlice, Read, Write};
use std::net::Shutdown;
use std::os::fd::OwnedFd;

use vm_memory::VolatileSlice;
use vm_memory::bitmap::BitmapSlice;

use super::socket::{PeerGroup, Socket};
use super::tls::{PeerName, TlsError, TlsSession};

/// A connection's bytes. Every call waits at most [`SLICE`](super::wait::SLICE). After an error for
/// which [`waits`](super::socket::waits) is true, the caller repeats the call, which continues.
#[derive(Debug)]
pub(super) struct Stream {
    socket: Socket,
    tls: Option<Box<TlsSession>>,
}

impl Stream {
    pub(super) fn plain(socket: Socket) -> Self {
        Self { socket, tls: None }
    }

    /// Sets the session, whose handshake is next, or removes it.
    pub(super) fn set_tls(&mut self, session: Option<TlsSession>) {
        self.tls = session.map(Box::new);
    }

    /// Performs the handshake, if there is a session.
    pub(super) fn handshake(&mut self) -> io::Result<()> {
        match &mut self.tls {
            Some(tls) => tls.handshake(&mut self.socket),
            None => Ok(()),
        }
    }

    /// Fails unless the peer's certificate has one of these names.
    pub(super) fn check_peer(&self, allowed: &[PeerName]) -> Result<(), TlsError> {
        match &self.tls {
            Some(tls) if !allowed.is_empty() => tls.check_peer(allowed),
            _ => Ok(()),
        }
    }

    /// Returns the socket, unless a session protects its bytes.
    pub(super) fn plain_socket(&self) -> Option<&Socket> {
        self.tls.is_none().then_some(&self.socket)
    }

    /// Returns another handle of the connection.
    pub(super) fn try_clone(&self) -> io::Result<OwnedFd> {
        self.socket.try_clone()
    }

    /// Returns the peer, for logs.
    pub(super) fn peer(&self) -> String {
        self.socket.peer()
    }

    /// Whether the connection does not leave this host.
    pub(super) fn stays_here(&self) -> bool {
        self.socket.stays_here()
    }

    /// Returns the group in which the peer's connections are counted.
    pub(super) fn peer_group(&self) -> PeerGroup {
        self.socket.peer_group()
    }

    /// Whether bytes, a failure, or the end of the connection can be read. Does not block.
    pub(super) fn has_incoming(&mut self) -> bool {
        match &mut self.tls {
            Some(tls) => tls.has_incoming(&mut self.socket),
            None => self.socket.has_incoming(),
        }
    }

    /// Delays small writes of a TCP connection until they are released.
    pub(super) fn set_cork(&self, corked: bool) {
        self.socket.set_cork(corked);
    }

    /// Whether bytes that were accepted wait to be written.
    pub(super) fn is_pending(&self) -> bool {
        self.tls.as_ref().is_some_and(|tls| tls.is_pending())
    }

    /// Writes the bytes that wait.
    pub(super) fn write_pending(&mut self) -> io::Result<()> {
        match &mut self.tls {
            Some(tls) => tls.flush(&mut self.socket),
            None => Ok(()),
        }
    }

    /// Makes new keys for the session, if there is one; their announcement waits to be written.
    pub(super) fn refresh_keys(&mut self) -> Result<(), TlsError> {
        self.tls.as_mut().map_or(Ok(()), |tls| tls.refresh_keys())
    }

    /// Ends the session, if there is one; its last message waits to be written.
    pub(super) fn end_session(&mut self) {
        if let Some(tls) = &mut self.tls {
            tls.end();
        }
    }

    /// Ends one direction of the connection, or both.
    pub(super) fn shutdown(&self, how: Shutdown) -> io::Result<()> {
        self.socket.shutdown(how)
    }

    /// Reads and discards bytes of the connection, without decrypting them.
    pub(super) fn discard(&mut self, sink: &mut [u8]) -> io::Result<usize> {
        self.socket.read(sink)
    }

    /// Writes without a packet of its own, because more bytes follow immediately.
    pub(super) fn write_more(&mut self, bytes: &[u8]) -> io::Result<usize> {
        match &mut self.tls {
            Some(tls) => {
                tls.make_room(&mut self.socket)?;
                Ok(tls.encrypt([bytes].into_iter())?)
            }
            None => self.socket.write_more(bytes),
        }
    }

    /// Writes several parts.
    pub(super) fn write_vectored(&mut self, bufs: &[IoSlice<'_>]) -> io::Result<usize> {
        match &mut self.tls {
            Some(tls) => {
                tls.make_room(&mut self.socket)?;
                Ok(tls.encrypt(bufs.iter().map(|part| &**part))?)
            }
            None => self.socket.write_vectored(bufs),
        }
    }

    /// Writes guest memory.
    pub(super) fn write_volatile<B: BitmapSlice>(
        &mut self,
        slice: &VolatileSlice<'_, B>,
    ) -> io::Result<usize> {
        match &mut self.tls {
            Some(tls) => {
                tls.make_room(&mut self.socket)?;
                tls.encrypt_volatile(slice)
            }
            None => self.socket.write_volatile(slice),
        }
    }

    /// Reads into guest memory.
    pub(super) fn read_volatile<B: BitmapSlice>(
        &mut self,
        slice: &mut VolatileSlice<'_, B>,
    ) -> io::Result<usize> {
        match &mut self.tls {
            Some(tls) => tls.read_volatile(&mut self.socket, slice),
            None => self.socket.read_volatile(slice),
        }
    }

    /// Reads bytes.
    pub(super) fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        match &mut self.tls {
            Some(tls) => tls.read(&mut self.socket, buf),
            None => self.socket.read(buf),
        }
    }
}
