//! Owns the file of a unix socket at which this process listens, the API's and the socket device's:
//! who may connect to it, what is done about one that is already there, and its removal.
//!
//! A starter holds a lock of the socket's directory while it looks at the socket that is there,
//! removes it, binds its own and listens. So it takes no other starter's socket, which refuses
//! connections until its owner listens, for one that a dead process left behind. Any user who may
//! read the directory can hold that lock for ever, so it is waited for only [`LOCK_LIMIT`]. Without
//! it two starters cannot both have the socket either: a socket gets its name only when its owner
//! listens; a stale one is given another name first, looked at again, and put back if its process
//! listens by then; and an owner looks after a while whether the file under the name is still its
//! own. Nothing here waits for the process behind a socket.

use std::fs;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use rustix::fs::{FlockOperation, Mode, OFlags, flock};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};

use crate::exit::{self, SocketFile};
use crate::sandbox::hint;

/// Connections that may wait to be accepted.
const BACKLOG: i32 = 16;
/// Upper bound on waiting for the directory's lock, which starters hold for microseconds.
const LOCK_LIMIT: Duration = Duration::from_secs(1);
/// Interval at which the lock is tried.
const LOCK_RETRY: Duration = Duration::from_millis(1);
/// How long a starter without the lock waits for others that have taken its socket for a stale one.
const SETTLE: Duration = Duration::from_millis(50);
/// Most starters that may get in the way of one.
const TRIES: u32 = 16;

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
    /// Other processes begin to listen there and end, one after the other.
    #[error(
        "cannot listen on {}: other processes take that name again and again; stop them, or name another path",
        .0.display()
    )]
    Contended(PathBuf),
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
        Self::bind_within(path, LOCK_LIMIT)
    }

    /// As [`bind`](Self::bind), with another bound on waiting for the directory's lock.
    fn bind_within(path: &Path, limit: Duration) -> Result<Self, SocketError> {
        let system = |cause| SocketError::System { path: path.to_owned(), cause };
        let lock = lock(path, limit);
        for _ in 0..TRIES {
            let bound = match lock {
                Some(_) => listen(path),
                None => listen_unlocked(path),
            };
            let (listener, identity) = match bound {
                Ok(bound) => bound,
                Err(e) if e.kind() == io::ErrorKind::AddrInUse => {
                    remove_stale(path)?;
                    continue;
                }
                Err(e) => return Err(system(e)),
            };
            if lock.is_none() {
                std::thread::sleep(SETTLE);
            }
            if identity_of(path).map_err(system)? != Some(identity) {
                continue;
            }
            listener.set_nonblocking(true).map_err(system)?;
            // Absolute, because it is removed by whatever thread ends the process.
            let file = SocketFile { path: std::path::absolute(path).map_err(system)?, identity };
            exit::add(file.clone());
            return Ok(Self { listener, file });
        }
        Err(SocketError::Contended(path.to_owned()))
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

/// Device and inode of the file at `path`, if there is one.
fn identity_of(path: &Path) -> io::Result<Option<(u64, u64)>> {
    match fs::symlink_metadata(path) {
        Ok(metadata) => Ok(Some((metadata.dev(), metadata.ino()))),
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(e) => Err(e),
    }
}

/// Listens at `path`; also the identity of the socket's file.
fn listen(path: &Path) -> io::Result<(UnixListener, (u64, u64))> {
    let address = SocketAddrUnix::new(path)?;
    let flags = SocketFlags::CLOEXEC;
    let fd = rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    // The file gets the socket's mode when it is bound, so nobody else can ever connect.
    rustix::fs::fchmod(&fd, Mode::RUSR | Mode::WUSR)?;
    rustix::net::bind(&fd, &address)?;
    // Another starter may have taken it for a stale one, and removed it.
    let identity = identity_of(path)?.ok_or(io::ErrorKind::AddrInUse)?;
    rustix::net::listen(&fd, BACKLOG)?;
    Ok((fd.into(), identity))
}

/// As [`listen`], but the socket has its name only once it listens, so that nobody takes it for a
/// stale one.
fn listen_unlocked(path: &Path) -> io::Result<(UnixListener, (u64, u64))> {
    let aside = aside_of(path);
    if SocketAddrUnix::new(&aside).is_err() {
        return listen(path);
    }
    let bound = listen(&aside)?;
    let named = fs::hard_link(&aside, path).map_err(|e| match e.kind() {
        io::ErrorKind::AlreadyExists => io::ErrorKind::AddrInUse.into(),
        _ => e,
    });
    fs::remove_file(&aside)?;
    named.map(|()| bound)
}

/// Locks the directory of `path`. `None` where it cannot be locked: another process keeps the lock,
/// not all file systems can, and the directory may be unreadable.
fn lock(path: &Path, limit: Duration) -> Option<OwnedFd> {
    let parent = path.parent().filter(|parent| !parent.as_os_str().is_empty());
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let opened = rustix::fs::open(parent.unwrap_or(Path::new(".")), flags, Mode::empty());
    let since = Instant::now();
    let locked = opened.and_then(|dir| {
        loop {
            match flock(&dir, FlockOperation::NonBlockingLockExclusive) {
                Ok(()) => return Ok(dir),
                Err(Errno::WOULDBLOCK) if since.elapsed() < limit => {
                    std::thread::sleep(LOCK_RETRY);
                }
                Err(Errno::INTR) => {}
                Err(e) => return Err(e),
            }
        }
    });
    if let Err(Errno::WOULDBLOCK) = locked {
        tracing::warn!(
            "another process keeps the directory of {} locked (`lslocks` tells which): listening there \
             without the lock",
            path.display()
        );
    }
    locked.inspect_err(|e| tracing::debug!("no lock for {}: {e}", path.display())).ok()
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

/// Removes the socket at `path` if nobody listens there. One that is gone already was removed by
/// its owner.
fn remove_stale(path: &Path) -> Result<(), SocketError> {
    let unless_gone = |e: io::Error| match e.kind() {
        io::ErrorKind::NotFound => Ok(()),
        _ => Err(SocketError::System { path: path.to_owned(), cause: e }),
    };
    match fs::symlink_metadata(path) {
        Ok(metadata) if !metadata.file_type().is_socket() => {
            return Err(SocketError::NotASocket(path.to_owned()));
        }
        Ok(_) => {}
        Err(e) => return unless_gone(e),
    }
    match is_listened_at(path) {
        Ok(true) => return Err(SocketError::InUse(path.to_owned())),
        Ok(false) => {}
        Err(e) => return unless_gone(e),
    }
    // Another starter may have replaced it since.
    let aside = aside_of(path);
    if let Err(e) = fs::rename(path, &aside) {
        return unless_gone(e);
    }
    // What cannot be connected to there, because that name is too long, was stale a moment ago.
    if is_listened_at(&aside).unwrap_or(false) {
        put_back(&aside, path);
        return Err(SocketError::InUse(path.to_owned()));
    }
    tracing::info!("replacing {}: its process is gone", path.display());
    fs::remove_file(&aside).or_else(unless_gone)
}

/// A name beside `path` that nothing else has.
fn aside_of(path: &Path) -> PathBuf {
    static COUNT: AtomicU32 = AtomicU32::new(0);
    let (pid, count) = (std::process::id(), COUNT.fetch_add(1, Ordering::Relaxed));
    path.with_file_name(format!(".sock-{pid}-{count}"))
}

/// Gives a socket at which a process listens its name back.
fn put_back(aside: &Path, path: &Path) {
    let put = match fs::hard_link(aside, path) {
        Ok(()) => fs::remove_file(aside),
        // Its owner has begun anew.
        Err(e)
            if e.kind() == io::ErrorKind::AlreadyExists
                && !is_listened_at(aside).unwrap_or(false) =>
        {
            fs::remove_file(aside)
        }
        // Another starter has taken the name while it was free, and finds that out.
        Err(_) => fs::rename(aside, path),
    };
    if let Err(e) = put {
        tracing::warn!("{} cannot be named {} again: {e}", aside.display(), path.display());
    }
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

    /// So many start at once beside a dead one's socket, in each round.
    fn start_at_once(path: &Path, starters: usize, rounds: u32, limit: Duration) {
        for round in 0..rounds {
            drop(UnixListener::bind(path).unwrap());
            let all = Barrier::new(starters);
            let bound: Vec<_> = std::thread::scope(|scope| {
                let start = || {
                    all.wait();
                    ListeningSocket::bind_within(path, limit)
                };
                let starters: Vec<_> = (0..starters).map(|_| scope.spawn(start)).collect();
                starters.into_iter().map(|starter| starter.join().unwrap()).collect()
            });
            let (owners, refused): (Vec<_>, Vec<_>) = bound.into_iter().partition(Result::is_ok);
            assert_eq!(owners.len(), 1, "round {round}: {owners:?} {refused:?}");
            for e in refused.into_iter().map(Result::unwrap_err) {
                assert!(matches!(e, SocketError::InUse(_)), "round {round}: {e}");
            }
            let owner = owners.into_iter().next().unwrap().unwrap();
            UnixStream::connect(path).unwrap();
            owner.listener().unwrap().accept().unwrap();
            drop(owner);
            let left = fs::read_dir(path.parent().unwrap()).unwrap().count();
            assert_eq!(left, 0, "round {round}");
        }
    }

    #[test]
    fn of_starters_at_once_one_gets_the_socket() {
        let dir = tempfile::tempdir().unwrap();
        start_at_once(&dir.path().join("api"), 3, 200, Duration::from_secs(60));
    }

    #[test]
    fn locked_directory_forbids_no_socket() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("api");
        // As any user does who may read the directory.
        let lock = lock(&path, LOCK_LIMIT).unwrap();
        let socket = ListeningSocket::bind(&path).unwrap();
        let e = ListeningSocket::bind_within(&path, Duration::ZERO).unwrap_err();
        assert!(matches!(e, SocketError::InUse(_)), "{e}");
        drop(socket);
        start_at_once(&path, 2, 50, Duration::ZERO);
        drop(lock);
    }

    #[test]
    fn socket_that_came_to_life_gets_its_name_back() {
        let dir = tempfile::tempdir().unwrap();
        let (path, aside) = (dir.path().join("api"), dir.path().join("aside"));
        let listener = UnixListener::bind(&aside).unwrap();
        put_back(&aside, &path);
        UnixStream::connect(&path).unwrap();
        assert!(!aside.exists());
        // Its owner listens at another one by then.
        fs::rename(&path, &aside).unwrap();
        drop(listener);
        let listener = UnixListener::bind(&path).unwrap();
        put_back(&aside, &path);
        UnixStream::connect(&path).unwrap();
        assert!(!aside.exists());
        drop(listener);
    }

    #[test]
    fn socket_that_its_owner_removes_is_stale() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("api");
        let stop = AtomicU32::new(0);
        std::thread::scope(|scope| {
            // An owner that ends, again and again.
            scope.spawn(|| {
                while stop.load(Ordering::Relaxed) == 0 {
                    if let Ok(listener) = UnixListener::bind(&path) {
                        drop(listener);
                        // Or another starter has.
                        let _ = fs::remove_file(&path);
                    }
                }
            });
            let bound: Vec<_> = (0..2000).map(|_| ListeningSocket::bind(&path).map(drop)).collect();
            stop.store(1, Ordering::Relaxed);
            for e in bound.into_iter().filter_map(Result::err) {
                let known = matches!(e, SocketError::InUse(_) | SocketError::Contended(_));
                assert!(known, "{e}");
            }
        });
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
