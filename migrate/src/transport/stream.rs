//! The bytes of a connection: its socket, with or without TLS.

use std::io::{self, IoSlice, Read, Write};
use std::net::Shutdown;
use std::os::fd::OwnedFd;

use vm_memory::VolatileSlice;
use vm_memory::bitmap::BitmapSlice;

use super::socket::{PeerGroup, Socket};
use super::tls::{KernelSession, Offload, PeerName, TlsError, TlsSession};

/// A connection's bytes. Every call waits at most [`SLICE`](super::wait::SLICE). After an error for
/// which [`waits`](super::socket::waits) is true, the caller repeats the call, which continues.
#[derive(Debug)]
pub(super) struct Stream {
    socket: Socket,
    tls: Tls,
}

/// What protects the bytes.
#[derive(Debug)]
enum Tls {
    None,
    /// A session of this process.
    Process(Box<TlsSession>),
    /// A session of the kernel.
    Kernel(Box<KernelSession>),
}

impl Stream {
    pub(super) fn plain(socket: Socket) -> Self {
        Self { socket, tls: Tls::None }
    }

    /// Sets the session, whose handshake is next, or removes it.
    pub(super) fn set_tls(&mut self, session: Option<TlsSession>) {
        self.tls = session.map_or(Tls::None, |session| Tls::Process(Box::new(session)));
    }

    /// Performs the handshake, if there is a session.
    pub(super) fn handshake(&mut self) -> io::Result<()> {
        match &mut self.tls {
            Tls::Process(tls) => tls.handshake(&mut self.socket),
            Tls::None | Tls::Kernel(_) => Ok(()),
        }
    }

    /// Offloads the session to the kernel if that is possible. The handshake must have ended.
    pub(super) fn offload(&mut self) -> Result<(), TlsError> {
        self.tls = match std::mem::replace(&mut self.tls, Tls::None) {
            Tls::Process(tls) => match tls.offload(&self.socket) {
                Ok(Offload::Done(tls)) => Tls::Kernel(tls),
                Ok(Offload::Impossible(tls)) => Tls::Process(tls),
                Err(e) => {
                    // There is no session any more, so nothing may follow in clear text.
                    let _ = self.socket.shutdown(Shutdown::Both);
                    return Err(e);
                }
            },
            tls => tls,
        };
        Ok(())
    }

    /// Whether the kernel has the session; `None` without TLS.
    pub(super) fn is_kernel_tls(&self) -> Option<bool> {
        match &self.tls {
            Tls::None => None,
            Tls::Process(_) => Some(false),
            Tls::Kernel(_) => Some(true),
        }
    }

    /// Fails unless the peer's certificate has one of these names.
    pub(super) fn check_peer(&self, allowed: &[PeerName]) -> Result<(), TlsError> {
        match &self.tls {
            Tls::Process(tls) if !allowed.is_empty() => tls.check_peer(allowed),
            Tls::Kernel(tls) if !allowed.is_empty() => tls.check_peer(allowed),
            _ => Ok(()),
        }
    }

    /// Returns the socket, unless a session protects its bytes.
    pub(super) fn plain_socket(&self) -> Option<&Socket> {
        matches!(self.tls, Tls::None).then_some(&self.socket)
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
            Tls::None => self.socket.has_incoming(),
            Tls::Process(tls) => tls.has_incoming(&mut self.socket),
            Tls::Kernel(tls) => tls.has_incoming(&self.socket),
        }
    }

    /// Delays small writes of a TCP connection until they are released.
    pub(super) fn set_cork(&self, corked: bool) {
        self.socket.set_cork(corked);
    }

    /// Whether bytes that were accepted wait to be written.
    pub(super) fn is_pending(&self) -> bool {
        match &self.tls {
            Tls::None => false,
            Tls::Process(tls) => tls.is_pending(),
            Tls::Kernel(tls) => tls.is_pending(),
        }
    }

    /// Writes the bytes that wait.
    pub(super) fn write_pending(&mut self) -> io::Result<()> {
        match &mut self.tls {
            Tls::None => Ok(()),
            Tls::Process(tls) => tls.flush(&mut self.socket),
            Tls::Kernel(tls) => tls.flush(&self.socket),
        }
    }

    /// Makes new keys for the session, if there is one that has sent many records; their
    /// announcement may wait to be written. Fails if nothing may be sent by the kernel any more.
    pub(super) fn refresh_keys(&mut self) -> io::Result<()> {
        match &mut self.tls {
            Tls::None => Ok(()),
            Tls::Process(tls) => Ok(tls.refresh_keys()?),
            Tls::Kernel(tls) => tls.check_keys(),
        }
    }

    /// Ends the session, if there is one; its last message waits to be written.
    pub(super) fn end_session(&mut self) {
        match &mut self.tls {
            Tls::None => {}
            Tls::Process(tls) => tls.end(),
            Tls::Kernel(tls) => tls.end(),
        }
    }

    /// Ends one direction of the connection, or both.
    pub(super) fn shutdown(&self, how: Shutdown) -> io::Result<()> {
        self.socket.shutdown(how)
    }

    /// Reads and discards bytes of the connection. This process does not decrypt them.
    pub(super) fn discard(&mut self, sink: &mut [u8]) -> io::Result<usize> {
        match &mut self.tls {
            Tls::None | Tls::Process(_) => self.socket.read(sink),
            Tls::Kernel(tls) => tls.discard(&mut self.socket, sink),
        }
    }

    /// Writes without a packet of its own, because more bytes follow immediately.
    pub(super) fn write_more(&mut self, bytes: &[u8]) -> io::Result<usize> {
        match &mut self.tls {
            Tls::None => self.socket.write_more(bytes),
            Tls::Process(tls) => {
                tls.make_room(&mut self.socket)?;
                Ok(tls.encrypt([bytes].into_iter())?)
            }
            Tls::Kernel(tls) => tls.write_more(&self.socket, bytes),
        }
    }

    /// Writes several parts.
    pub(super) fn write_vectored(&mut self, bufs: &[IoSlice<'_>]) -> io::Result<usize> {
        match &mut self.tls {
            Tls::None => self.socket.write_vectored(bufs),
            Tls::Process(tls) => {
                tls.make_room(&mut self.socket)?;
                Ok(tls.encrypt(bufs.iter().map(|part| &**part))?)
            }
            Tls::Kernel(tls) => tls.write(&mut self.socket, |socket| socket.write_vectored(bufs)),
        }
    }

    /// Writes guest memory.
    pub(super) fn write_volatile<B: BitmapSlice>(
        &mut self,
        slice: &VolatileSlice<'_, B>,
    ) -> io::Result<usize> {
        match &mut self.tls {
            Tls::None => self.socket.write_volatile(slice),
            Tls::Process(tls) => {
                tls.make_room(&mut self.socket)?;
                tls.encrypt_volatile(slice)
            }
            Tls::Kernel(tls) => tls.write(&mut self.socket, |socket| socket.write_volatile(slice)),
        }
    }

    /// Reads into guest memory.
    pub(super) fn read_volatile<B: BitmapSlice>(
        &mut self,
        slice: &mut VolatileSlice<'_, B>,
    ) -> io::Result<usize> {
        match &mut self.tls {
            Tls::None => self.socket.read_volatile(slice),
            Tls::Process(tls) => tls.read_volatile(&mut self.socket, slice),
            Tls::Kernel(tls) => tls.read(&mut self.socket, |socket| socket.read_volatile(slice)),
        }
    }

    /// Reads bytes.
    pub(super) fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        match &mut self.tls {
            Tls::None => self.socket.read(buf),
            Tls::Process(tls) => tls.read(&mut self.socket, buf),
            Tls::Kernel(_) if buf.is_empty() => Ok(0),
            Tls::Kernel(tls) => tls.read(&mut self.socket, |socket| socket.read(buf)),
        }
    }
}
