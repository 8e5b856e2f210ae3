//! Connections from this side to a peer.

use std::io;
use std::net::{SocketAddr, TcpStream, ToSocketAddrs};
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::mpsc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use rustix::io::{Errno, retry_on_intr};
use rustix::net::SocketAddrUnix;
use socket2::{Domain, Type};

use super::address::Address;
use super::policy;
use super::socket::Socket;
use super::stop::StopFlag;
use super::wait::{self, SLICE, cancelled, unanswered};

/// Upper bound on abandoned threads. A thread ends soon after its timeout, unless the look-up of a
/// name takes longer.
const MAX_ABANDONED: usize = 16;

/// The abandoned threads of this process.
static ABANDONED: AbandonedThreads = AbandonedThreads(Mutex::new(Vec::new()));

/// Limits of a new connection.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ConnectLimits {
    /// Upper bound on connecting.
    pub(crate) timeout: Duration,
    /// Longest time without progress of the peer, later.
    pub(crate) progress_timeout: Duration,
    /// Whether only loopback addresses are tried.
    pub(crate) only_here: bool,
}

/// Connecting threads for which this side no longer waits.
struct AbandonedThreads(Mutex<Vec<JoinHandle<()>>>);

impl AbandonedThreads {
    /// Fails while [`MAX_ABANDONED`] threads have not ended, so that repeated attempts cannot make
    /// threads accumulate.
    fn admit_another(&self) -> io::Result<()> {
        let mut threads = self.0.lock();
        threads.retain(|thread| !thread.is_finished());
        match threads.len() {
            ..MAX_ABANDONED => Ok(()),
            count => {
                let why = format!(
                    "{count} earlier attempts to connect have not ended: check that the names of \
                     hosts are resolved, and try again"
                );
                Err(io::Error::other(why))
            }
        }
    }

    fn add(&self, thread: JoinHandle<()>) {
        self.0.lock().push(thread);
    }
}

/// Connects to `peer`, trying each address of a host's name.
pub(super) fn connect(
    peer: &Address,
    limits: ConnectLimits,
    stop: &StopFlag,
) -> io::Result<Socket> {
    // A thread that connects to a unix socket ends by its timeout.
    if matches!(peer, Address::Tcp(_)) {
        ABANDONED.admit_another()?;
    }
    let (sender, result) = mpsc::channel();
    let (peer, timeout) = (peer.clone(), limits.timeout);
    // On a separate thread, because name look-ups and connects cannot be interrupted. If this side
    // stops waiting, the thread closes its connection and ends once its call returns.
    let thread = std::thread::Builder::new().name("migrate-connect".into()).spawn(move || {
        let _ = sender.send(connect_here(&peer, limits));
    })?;
    let give_up = Instant::now() + timeout + SLICE;
    let ended = || io::Error::other("the connecting thread ended early");
    let answer = wait::answer(&result, ended, || {
        if stop.is_cancelled() {
            return Err(cancelled());
        }
        match Instant::now() > give_up {
            true => Err(unanswered(timeout)),
            false => Ok(()),
        }
    });
    if answer.is_err() {
        ABANDONED.add(thread);
    }
    answer?
}

fn connect_here(peer: &Address, limits: ConnectLimits) -> io::Result<Socket> {
    match peer {
        Address::Tcp(name) => connect_any(name, limits)?.try_into(),
        Address::Unix(path) => Socket::new(connect_unix(path, limits.timeout)?),
        Address::Descriptor(_) => Err(io::Error::new(
            io::ErrorKind::Unsupported,
            "only a receiver takes over a descriptor; connect to a socket with unix:PATH",
        )),
    }
}

fn connect_unix(path: &Path, timeout: Duration) -> io::Result<OwnedFd> {
    let socket = socket2::Socket::new(Domain::UNIX, Type::STREAM, None)?;
    // The kernel waits this long for room in the listener's backlog; for zero, without a limit.
    socket.set_write_timeout(Some(timeout.max(SLICE)))?;
    let address = SocketAddrUnix::new(path)?;
    match retry_on_intr(|| rustix::net::connect(&socket, &address)) {
        Ok(()) => Ok(socket.into()),
        Err(Errno::AGAIN) => Err(unanswered(timeout)),
        Err(e) => Err(e.into()),
    }
}

fn connect_any(name: &str, limits: ConnectLimits) -> io::Result<TcpStream> {
    let mut last = io::Error::new(io::ErrorKind::NotFound, "the name has no address");
    let addresses: Vec<SocketAddr> = name.to_socket_addrs()?.collect();
    for address in &addresses {
        if limits.only_here
            && let Err(e) = policy::stays_here(*address)
        {
            last = e.into();
            continue;
        }
        match TcpStream::connect_timeout(address, limits.timeout / addresses.len() as u32) {
            Ok(stream) => return Ok(stream),
            Err(e) => last = e,
        }
    }
    Err(last)
}

#[cfg(test)]
mod tests {
    use socket2::SockAddr;

    use super::*;

    #[test]
    fn full_backlog_ends_a_connect() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("socket");
        let listener = socket2::Socket::new(Domain::UNIX, Type::STREAM, None).unwrap();
        listener.bind(&SockAddr::unix(&path).unwrap()).unwrap();
        // Nothing accepts these connections.
        listener.listen(0).unwrap();
        let limits = ConnectLimits { timeout: SLICE, progress_timeout: SLICE, only_here: true };
        let peer = Address::Unix(path);
        let mut queued = Vec::new();
        let error = loop {
            match connect_here(&peer, limits) {
                Ok(socket) => queued.push(socket),
                Err(e) => break e,
            }
        };
        assert_eq!(error.kind(), io::ErrorKind::TimedOut, "{error}");
        assert!(error.to_string().contains("the peer did not answer for"), "{error}");
    }

    #[test]
    fn abandoned_threads_are_bounded() {
        let threads = AbandonedThreads(Mutex::new(Vec::new()));
        let (release, released) = mpsc::channel::<()>();
        let released = std::sync::Arc::new(Mutex::new(released));
        for _ in 0..MAX_ABANDONED {
            threads.admit_another().unwrap();
            let released = released.clone();
            threads.add(std::thread::spawn(move || {
                let _ = released.lock().recv();
            }));
        }
        let error = threads.admit_another().unwrap_err().to_string();
        assert!(error.contains("16 earlier attempts to connect have not ended"), "{error}");
        drop(release);
        while threads.admit_another().is_err() {
            std::thread::yield_now();
        }
    }
}
