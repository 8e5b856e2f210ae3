//! Owns the file of a unix socket at which this process listens, the API's and the socket device's: who
//! may connect to it, what is done about one that is already there, and its removal.
//!
//! A starter holds a lock of the socket's directory while it looks at the socket that is there, removes it, binds its
//! own and listens. So it takes no other starter's socket, which refuses connections until its owner listens, for
//! one that a dead process left behind. Nothing here waits for the process behind a socket.

use std::fs;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::fs::{FlockOperation, Mode, OFlags, flock};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};

use crate::exit::{self, SocketFile};
use crate::sandbox::hint;

/// Connections that may wait to be accepted.
const BACKLOG: i32 = 16;
/// Upper bound on waiting for the directory's lock, which others hold for microseconds.
const LOCK_LIMIT: Duration = Duration::from_secs(2);
/// Interval at which the lock is tried.
const LOCK_RETRY: Duration = Duration::from_millis(1);

/// A listening socket, whose file is removed when this is dropped.
#[derive(Debug)]
pub struct ListeningSocket {
    listener: UnixListener,
    file: SocketFile,
}

/// Why there is no socket.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SocketError {
    /// Another process answers there.
    #[error(
        "{} is in use: another process listens there; stop that one, or name another path",
        .0.display()
    )]
    InUse(PathBuf),
    /// Another process does not finish starting.
    #[error(
        "cannot listen on {}: another process has locked its directory for {limit:?} \
         (`lslocks` and `fuser -v` tell which); stop that one, or name a path in another directory",
        path.display()
    )]
    Locked {
        /// The socket's path.
        path: PathBuf,
        /// How long the lock was waited for.
        limit: Duration,
    },
    /// Something else has that name.
    #[error("cannot listen on {}: it exists and is not a socket", .0.display())]
    NotASocket(PathBuf),
    /// The system refused.
    #[error("cannot listen on {}: {cause}{}", path.display(), hint(path, cause))]
    System {
        /// The socket's path.
        path: PathBuf,
        /// The system's answer.
        cause: io::Error,
    },
}

impl ListeningSocket {
    /// Listens on `path`, only for this user. A socket that a dead process left behind is replaced.
    pub fn bind(path: &Path) -> Result<Self, SocketError> {
        let system = |cause| SocketError::System { path: path.to_owned(), cause };
        let _lock = lock(path)?;
        let listener = match listen(path) {
            Err(e) if e.kind() == io::ErrorKind::AddrInUse => {
                remove_stale(path)?;
                listen(path)
            }
            other => other,
        };
        let listener = listener.map_err(system)?;
        listener.set_nonblocking(true).map_err(system)?;
        let metadata = fs::symlink_metadata(path).map_err(system)?;
        // Absolute, because it is removed by whatever thread ends the process.
        let absolute = std::path::absolute(path).map_err(system)?;
        let file = SocketFile { path: absolute, identity: (metadata.dev(), metadata.ino()) };
        exit::add(file.clone());
        Ok(Self { listener, file })
    }

    /// The listener, for whoever accepts; it does not block.
    pub(crate) fn listener(&self) -> io::Result<UnixListener> {
        self.listener.try_clone()
    }
}

impl Drop for ListeningSocket {
    fn drop(&mut self) {
        exit::forget(&self.file);
        if let Err(e) = self.file.remove() {
            tracing::warn!("cannot remove {}: {e}", self.file.path.display());
        }
    }
}

fn listen(path: &Path) -> io::Result<UnixListener> {
    let address = SocketAddrUnix::new(path)?;
    let flags = SocketFlags::CLOEXEC;
    let fd = rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    // The file gets the socket's mode when it is bound, so nobody else can ever connect.
    rustix::fs::fchmod(&fd, Mode::RUSR | Mode::WUSR)?;
    rustix::net::bind(&fd, &address)?;
    rustix::net::listen(&fd, BACKLOG)?;
    Ok(fd.into())
}

/// Locks the directory of `path`. `None` where it cannot be locked: not all file systems can, and it may be
/// unreadable. Then two processes that start at once may both replace what a dead one left behind.
fn lock(path: &Path) -> Result<Option<OwnedFd>, SocketError> {
    let parent = path.parent().filter(|parent| !parent.as_os_str().is_empty());
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let opened = rustix::fs::open(parent.unwrap_or(Path::new(".")), flags, Mode::empty());
    let since = Instant::now();
    let locked = opened.and_then(|dir| {
        loop {
            match flock(&dir, FlockOperation::NonBlockingLockExclusive) {
                Ok(()) => return Ok(dir),
                Err(Errno::WOULDBLOCK) if since.elapsed() < LOCK_LIMIT => {
                    std::thread::sleep(LOCK_RETRY);
                }
                Err(Errno::INTR) => {}
                Err(e) => return Err(e),
            }
        }
    });
    match locked {
        Ok(dir) => Ok(Some(dir)),
        Err(Errno::WOULDBLOCK) => {
            Err(SocketError::Locked { path: path.to_owned(), limit: LOCK_LIMIT })
        }
        Err(e) => {
            tracing::debug!("the directory of {} cannot be locked: {e}", path.display());
            Ok(None)
        }
    }
}

/// Whether a process listens at `path`. Does not wait for that process, which may be stopped.
fn is_listened_at(path: &Path) -> io::Result<bool> {
    let address = SocketAddrUnix::new(path)?;
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let fd = rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    match rustix::net::connect(&fd, &address) {
        // As many wait to be accepted as may, or it is a socket of another type.
        Ok(()) | Err(Errno::AGAIN | Errno::PROTOTYPE) => Ok(true),
        Err(Errno::CONNREFUSED) => Ok(false),
        Err(e) => Err(e.into()),
    }
}

/// Removes the socket at `path` if nobody listens there.
fn remove_stale(path: &Path) -> Result<(), SocketError> {
    let system = |cause| SocketError::System { path: path.to_owned(), cause };
    if !fs::symlink_metadata(path).map_err(system)?.file_type().is_socket() {
        return Err(SocketError::NotASocket(path.to_owned()));
    }
    if is_listened_at(path).map_err(system)? {
        return Err(SocketError::InUse(path.to_owned()));
    }
    tracing::info!("replacing {}: its process is gone", path.display());
    fs::remove_file(path).map_err(system)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;
    use std::os::unix::net::UnixStream;
    use std::sync::{Barrier, mpsc};

    #[test]
    fn the_file_is_private_and_goes_with_the_socket() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("api");
        let socket = ListeningSocket::bind(&path).unwrap();
        let mode = fs::symlink_metadata(&path).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600);
        drop(socket);
        assert!(!path.exists());
    }

    #[test]
    fn a_live_socket_is_refused_and_a_dead_one_replaced() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("api");
        let first = ListeningSocket::bind(&path).unwrap();
        let e = ListeningSocket::bind(&path).unwrap_err();
        assert!(matches!(e, SocketError::InUse(_)), "{e}");
        drop(first);
        drop(UnixListener::bind(&path).unwrap());
        assert!(path.exists(), "std leaves the file behind, as a killed process does");
        let second = ListeningSocket::bind(&path).unwrap();
        drop(second);
        fs::write(&path, "precious").unwrap();
        let e = ListeningSocket::bind(&path).unwrap_err();
        assert!(matches!(e, SocketError::NotASocket(_)), "{e}");
        assert_eq!(fs::read_to_string(&path).unwrap(), "precious");
    }

    #[test]
    fn listener_with_full_backlog_is_in_use() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("api");
        let _listener = listen(&path).unwrap();
        let address = SocketAddrUnix::new(&path).unwrap();
        let mut waiting = Vec::new();
        loop {
            let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
            let fd = rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None);
            let fd = fd.unwrap();
            match rustix::net::connect(&fd, &address) {
                Ok(()) => waiting.push(fd),
                Err(e) => break assert_eq!(e, Errno::AGAIN),
            }
        }
        let (to, bound) = mpsc::channel();
        std::thread::spawn(move || to.send(ListeningSocket::bind(&path)));
        let bound = bound.recv_timeout(Duration::from_secs(60)).expect("bind hangs");
        let e = bound.unwrap_err();
        assert!(matches!(e, SocketError::InUse(_)), "{e}");
        assert!(e.to_string().ends_with("; stop that one, or name another path"), "{e}");
    }

    #[test]
    fn of_starters_at_once_one_gets_the_socket() {
        const STARTERS: usize = 3;
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("api");
        for round in 0..200 {
            drop(UnixListener::bind(&path).unwrap());
            let all = Barrier::new(STARTERS);
            let bound: Vec<_> = std::thread::scope(|scope| {
                let start = || {
                    all.wait();
                    ListeningSocket::bind(&path)
                };
                let starters: Vec<_> = (0..STARTERS).map(|_| scope.spawn(start)).collect();
                starters.into_iter().map(|starter| starter.join().unwrap()).collect()
            });
            let (owners, refused): (Vec<_>, Vec<_>) = bound.into_iter().partition(Result::is_ok);
            assert_eq!(owners.len(), 1, "round {round}: {owners:?} {refused:?}");
            for e in refused.into_iter().map(Result::unwrap_err) {
                assert!(matches!(e, SocketError::InUse(_)), "round {round}: {e}");
            }
            let owner = owners.into_iter().next().unwrap().unwrap();
            UnixStream::connect(&path).unwrap();
            owner.listener().unwrap().accept().unwrap();
            drop(owner);
            assert!(!path.exists());
        }
    }

    #[test]
    fn directory_that_stays_locked_is_an_error() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("api");
        let lock = lock(&path).unwrap().unwrap();
        let e = ListeningSocket::bind(&path).unwrap_err();
        assert!(e.to_string().contains("another process has locked its directory for 2s"), "{e}");
        drop(lock);
        ListeningSocket::bind(&path).unwrap();
    }

    #[test]
    fn socket_of_a_successor_is_left_alone() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("api");
        let first = ListeningSocket::bind(&path).unwrap();
        fs::remove_file(&path).unwrap();
        let second = ListeningSocket::bind(&path).unwrap();
        drop(first);
        UnixStream::connect(&path).unwrap();
        drop(second);
        assert!(!path.exists());
    }

    #[test]
    fn a_path_that_is_too_long_is_a_sentence() {
        let e = ListeningSocket::bind(&PathBuf::from("x".repeat(300))).unwrap_err();
        assert!(e.to_string().starts_with("cannot listen on xxx"), "{e}");
    }
}
