//! One connection with limits: every wait ends at a limit or at a stop request.
//!
//! Reads and writes wait in slices of [`SLICE`](super::wait::SLICE). Between two slices the link
//! checks its stop flag and its limits: `progress_timeout`, the longest time without progress, and
//! an absolute deadline.

mod descriptors;

use std::io::{self, IoSlice, Read, Write};
use std::net::Shutdown;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use socket2::SockRef;
use vm_memory::VolatileSlice;
use vm_memory::bitmap::BitmapSlice;

use super::address::Address;
use super::channels::ChannelGroup;
use super::connect::{self, ConnectLimits};
use super::socket::{PeerGroup, Socket, outside, waits};
use super::stop::StopFlag;
use super::stream::Stream;
use super::tls::{PeerName, TlsError, TlsSession};
use super::wait::{cancelled, timed_out};

/// Upper bound on closing a connection: sending the reason, and waiting until the peer reads it.
const CLOSING_LIMIT: Duration = Duration::from_secs(2);

/// A connection with limits.
#[derive(Debug)]
pub(crate) struct Link {
    stream: Stream,
    /// Whether a write has failed after the peer may have received a part of it.
    is_torn: bool,
    stop: Arc<StopFlag>,
    progress_timeout: Duration,
    deadline: Option<Instant>,
    group: Option<Arc<ChannelGroup>>,
}

impl Link {
    /// Wraps a connection. `progress_timeout` is the longest time without progress of the peer.
    pub(crate) fn new(socket: Socket, progress_timeout: Duration, stop: Arc<StopFlag>) -> Self {
        let stream = Stream::plain(socket);
        Self { stream, is_torn: false, stop, progress_timeout, deadline: None, group: None }
    }

    /// Connects to `peer`, trying each address of a host's name.
    pub(crate) fn connect(
        peer: &Address,
        limits: ConnectLimits,
        stop: Arc<StopFlag>,
    ) -> io::Result<Self> {
        let socket = connect::connect(peer, limits, &stop)?;
        Ok(Self::new(socket, limits.progress_timeout, stop))
    }

    /// Sets the absolute deadline of later operations; `None` leaves only the progress timeout.
    pub(crate) fn set_deadline(&mut self, deadline: Option<Instant>) {
        self.deadline = deadline;
    }

    /// Closes the connection immediately, in both directions; bytes in flight may still arrive.
    pub(crate) fn close(&self) {
        let _ = self.stream.shutdown(Shutdown::Both);
    }

    /// Sets the stop flag to check.
    pub(crate) fn set_stop(&mut self, stop: Arc<StopFlag>) {
        self.stop = stop;
    }

    /// Puts this connection into a group. Progress on any connection restarts the progress timeouts
    /// of all, and they stop together.
    pub(crate) fn set_group(&mut self, group: Option<Arc<ChannelGroup>>) {
        self.group = group;
    }

    /// Returns another handle that can close the connection.
    pub(crate) fn closer(&self) -> io::Result<Closer> {
        self.stream.try_clone().map(Closer)
    }

    /// Whether a wait would end immediately, because of a stop request, a halted group, or the
    /// deadline.
    pub(crate) fn is_over(&self) -> bool {
        self.stop.is_cancelled()
            || self.group.as_ref().is_some_and(|group| group.is_halted())
            || self.deadline.is_some_and(|deadline| Instant::now() >= deadline)
    }

    /// Returns the longest time without progress of the peer.
    pub(crate) fn progress_timeout(&self) -> Duration {
        self.progress_timeout
    }

    /// Sets the longest time without progress of the peer.
    pub(crate) fn set_progress_timeout(&mut self, progress_timeout: Duration) {
        self.progress_timeout = progress_timeout;
    }

    /// Returns the peer, for logs.
    pub(crate) fn peer(&self) -> String {
        self.stream.peer()
    }

    /// Whether the connection does not leave this host.
    pub(crate) fn stays_here(&self) -> bool {
        self.stream.stays_here()
    }

    /// Returns the group in which the peer's connections are counted.
    pub(crate) fn peer_group(&self) -> PeerGroup {
        self.stream.peer_group()
    }

    /// Whether bytes, or the end of the connection, can be read. Does not block.
    pub(crate) fn has_incoming(&mut self) -> bool {
        self.stream.has_incoming()
    }

    /// Delays small writes of a TCP connection until they are released.
    pub(crate) fn set_cork(&self, corked: bool) {
        self.stream.set_cork(corked);
    }

    /// Begins to close: ignores stop requests, and sets a deadline after [`CLOSING_LIMIT`].
    pub(crate) fn begin_closing(&mut self) {
        self.stop = Arc::default();
        self.group = None;
        self.set_cork(false);
        self.deadline = Some(Instant::now() + CLOSING_LIMIT);
    }

    /// Ends the writing half, and discards incoming bytes until the peer closes as well or the
    /// deadline passes. Closing with unread bytes would reset the connection, and the peer could
    /// lose the reason.
    pub(crate) fn hang_up(&mut self) {
        self.stream.end_session();
        // Also writes the alert of a failed handshake.
        let _ = self.write_pending();
        if self.stream.shutdown(Shutdown::Write).is_err() {
            return;
        }
        let mut sink = vec![0; 64 << 10];
        while self.deadline.is_some_and(|d| Instant::now() < d)
            && matches!(self.wait_until("sent", |s| s.discard(&mut sink)), Ok(1..))
        {}
    }

    /// Writes all of `buf` without a packet of its own, because more bytes follow immediately. Sets
    /// `torn` after the first byte.
    pub(crate) fn write_all_more(&mut self, mut buf: &[u8], torn: &mut bool) -> io::Result<()> {
        while !buf.is_empty() {
            let sent = self.wait_until("accepted", |s| s.write_more(buf))?;
            *torn = true;
            buf = buf.get(sent..).unwrap_or_default();
        }
        Ok(())
    }

    /// Writes guest memory, without copying it first unless this process encrypts it.
    pub(crate) fn write_all_volatile<B: BitmapSlice>(
        &mut self,
        slice: &VolatileSlice<'_, B>,
    ) -> io::Result<()> {
        let mut done = 0;
        while done < slice.len() {
            let rest = slice.offset(done).map_err(outside)?;
            done += match self.wait_until("accepted", |s| s.write_volatile(&rest))? {
                0 => return Err(closed()),
                n => n,
            };
        }
        self.write_pending()
    }

    /// Writes what a session has accepted and not written yet.
    fn write_pending(&mut self) -> io::Result<()> {
        if !self.stream.is_pending() {
            return Ok(());
        }
        let written = self.wait_until("accepted", |s| s.write_pending());
        self.is_torn |= written.is_err();
        written
    }

    /// Whether a record of a session was sent in part, so that the peer cannot read later ones.
    pub(crate) fn is_torn(&self) -> bool {
        self.is_torn
    }

    /// Begins a TLS session, and waits for the end of its handshake. Then the session is offloaded
    /// to the kernel, if that is possible.
    pub(crate) fn secure(&mut self, session: TlsSession) -> io::Result<()> {
        self.stream.set_tls(Some(session));
        self.wait_until("sent", |s| s.handshake())?;
        Ok(self.stream.offload()?)
    }

    /// Logs whether the kernel or this process encrypts, if there is a session.
    pub(crate) fn log_encryption(&self) {
        if let Some(by_kernel) = self.stream.is_kernel_tls() {
            let by = if by_kernel { "the kernel" } else { "this process" };
            tracing::debug!(by, "TLS records are encrypted and decrypted");
        }
    }

    /// Makes new keys for the session, if there is one that has sent many records, so that none are
    /// due soon.
    pub(crate) fn refresh_keys(&mut self) -> io::Result<()> {
        self.wait_until("accepted", |s| s.refresh_keys())?;
        self.write_pending()
    }

    /// Drops the session, to tell a peer that does not use TLS about it.
    pub(crate) fn drop_session(&mut self) {
        self.stream.set_tls(None);
    }

    /// Fails unless the peer's certificate has one of these names, if there are some.
    pub(crate) fn check_peer(&self, allowed: &[PeerName]) -> Result<(), TlsError> {
        self.stream.check_peer(allowed)
    }

    /// Reads from the stream into guest memory, without a buffer in between unless this process
    /// decrypts.
    pub(crate) fn read_exact_volatile<B: BitmapSlice>(
        &mut self,
        slice: &VolatileSlice<'_, B>,
    ) -> io::Result<()> {
        let mut done = 0;
        while done < slice.len() {
            let mut rest = slice.offset(done).map_err(outside)?;
            done += match self.wait_until("sent", |s| s.read_volatile(&mut rest))? {
                0 => return Err(closed()),
                n => n,
            };
        }
        Ok(())
    }

    /// Repeats `attempt` until it does not block, or a limit or a stop request ends the wait.
    fn wait_until<T>(
        &mut self,
        verb: &'static str,
        mut attempt: impl FnMut(&mut Stream) -> io::Result<T>,
    ) -> io::Result<T> {
        let begun = Instant::now();
        let mut limit = begun + self.progress_timeout;
        let mut seen = self.group.as_ref().map_or(0, |group| group.progress());
        loop {
            if self.stop.is_cancelled() {
                return Err(cancelled());
            }
            if self.group.as_ref().is_some_and(|group| group.is_halted()) {
                return Err(halted());
            }
            // The deadline is checked before the attempt, because a slow peer always makes
            // progress.
            if self.deadline.is_some_and(|d| Instant::now() >= d) {
                return Err(timed_out(verb, begun.elapsed()));
            }
            match attempt(&mut self.stream) {
                Err(e) if waits(&e) => {}
                done => {
                    if let Some(group) = &self.group {
                        group.note_progress();
                    }
                    return done;
                }
            }
            if Instant::now() < limit {
                continue;
            }
            match self.group.as_ref().map(|group| group.progress()) {
                Some(progress) if progress != seen => {
                    (seen, limit) = (progress, Instant::now() + self.progress_timeout);
                }
                _ => return Err(timed_out(verb, begun.elapsed())),
            }
        }
    }
}

/// Closes a connection that another thread reads.
#[derive(Debug)]
pub(crate) struct Closer(OwnedFd);

impl Closer {
    /// Closes the connection immediately, in both directions, which ends the reader's wait.
    pub(crate) fn close(&self) {
        let _ = SockRef::from(&self.0).shutdown(Shutdown::Both);
    }
}

/// Returns the error of a wait that another connection's end has ended.
pub(crate) fn halted() -> io::Error {
    io::Error::other("another connection of this migration has ended")
}

fn closed() -> io::Error {
    io::Error::new(io::ErrorKind::UnexpectedEof, "the peer closed the connection")
}

impl Read for Link {
    /// Never returns 0 for a buffer that is not empty: the end of the stream is an error, because
    /// every reader knows how much it needs.
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        match self.wait_until("sent", |s| s.read(buf))? {
            0 if !buf.is_empty() => Err(closed()),
            n => Ok(n),
        }
    }
}

impl Write for Link {
    fn write(&mut self, buf: &[u8]) -> io::Result<usize> {
        self.write_vectored(&[IoSlice::new(buf)])
    }

    fn write_vectored(&mut self, bufs: &[IoSlice<'_>]) -> io::Result<usize> {
        let written = self.wait_until("accepted", |s| s.write_vectored(bufs))?;
        self.write_pending()?;
        match written {
            0 if bufs.iter().any(|b| !b.is_empty()) => Err(closed()),
            n => Ok(n),
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
