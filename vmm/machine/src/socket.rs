//! Owns the file of a unix socket at which this process listens, the API's and the socket device's:
//! who may connect to it, what is done about one that is already there, and its removal.
//!
//! Starters take no lock, which strangers could hold, and wait for no process behind a socket:
//!
//! 1. A socket is bound under a private name and listens. Only then it gets its name, if that is
//!    free: `renameat2` with `RENAME_NOREPLACE`. So a socket that refuses connections is a dead
//!    process's, and it never listens again.
//! 2. The name of a live socket is removed by its owner alone, before it stops listening. Its inode
//!    has its number as long as the socket is open, so the owner knows its file.
//! 3. The name of a dead socket is removed only by the holder of the claim to it: a socket that
//!    listens under the name `.replacing-INODE`, which it got in the same way. The holder keeps the
//!    dead inode open, so no other file has its number. If the name leads to that inode once the
//!    claim is held, it does so until the holder removes it: nobody else may.
//!
//! So a starter removes no other file than the one it has looked at, however long it is stopped
//! between two steps, and no live socket loses its name. Of starters one has the name, and the
//! others find it in use. The claim of a killed starter is a dead socket, replaced as any other is.
//!
//! A live socket can lose its name in two cases:
//!
//! - on a file system with neither `RENAME_NOREPLACE` nor hard links, if two starters find the name
//!   free at once: the second has it;
//! - in a directory with the sticky bit, where a stranger's file has the claim's name: starters go
//!   without the claim, and of two at once the slower may remove the faster one's socket.
//!
//! The private name of a killed starter stays: a sweep would read directories, which the sandbox
//! forbids, for a file that only a kill within microseconds leaves behind.

use std::ffi::{OsStr, OsString};
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::fs::{AtFlags, FileType, Mode, OFlags, RenameFlags, Stat};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
use rustix::rand::GetRandomFlags;

use crate::exit::{self, SocketFile};
use crate::sandbox::hint;

/// Connections that may wait to be accepted.
const BACKLOG: i32 = 16;
/// Most starters that may get in the way of one, and most waits for one that is stopped.
const TRIES: u32 = 16;
/// Wait for another starter that replaces the same stale socket, which takes microseconds.
const RETRY: Duration = Duration::from_millis(1);
/// Most claims to claims: one for each starter that was killed while it replaced this one socket.
const CLAIMS: u32 = 4;

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
    /// Other processes begin to listen there and end, one after the other, or one has stopped while
    /// it began.
    #[error(
        "cannot listen on {}: other processes take that name again and again; stop them, or name \
         another path",
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
        let system = |cause| SocketError::System { path: path.to_owned(), cause };
        // Longer names can be listened at, but not be connected to.
        SocketAddrUnix::new(path).map_err(|e| system(e.into()))?;
        let name = path.file_name().ok_or_else(|| SocketError::NotASocket(path.to_owned()))?;
        let dir = Dir::of(path).map_err(|e| system(e.into()))?;
        // Absolute, because it is removed by whatever thread ends the process.
        let absolute = std::path::absolute(dir.path.join(name)).map_err(system)?;
        let Named { fd, identity } = dir.take(name, 0)?;
        let file = SocketFile { path: absolute, identity };
        let socket = Self { listener: fd.into(), file };
        exit::add(socket.file.clone());
        socket.listener.set_nonblocking(true).map_err(system)?;
        Ok(socket)
    }

    /// The listener, for whoever accepts; it does not block.
    pub fn listener(&self) -> io::Result<UnixListener> {
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

/// A socket that listens under the name that it was to have.
struct Named {
    fd: OwnedFd,
    identity: (u64, u64),
}

/// A directory in which sockets get their names.
struct Dir {
    fd: OwnedFd,
    path: PathBuf,
}

impl Dir {
    fn of(socket: &Path) -> rustix::io::Result<Self> {
        let path = socket.parent().unwrap_or(Path::new("")).to_owned();
        let opened = if path.as_os_str().is_empty() { Path::new(".") } else { &path };
        // Without the right to read it.
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let fd = rustix::fs::open(opened, flags, Mode::empty())?;
        Ok(Self { fd, path })
    }

    /// Listens under `name`. `claims` is the length of the chain of claims that leads to it.
    fn take(&self, name: &OsStr, claims: u32) -> Result<Named, SocketError> {
        let system = |cause: Errno| self.refused(name, cause);
        let private = self.private_name(name).map_err(system)?;
        let named = self.listen(&private).map_err(system).and_then(|named| {
            self.rename(&private, name, claims)?;
            Ok(named)
        });
        named.inspect_err(|_| {
            // It may not be there, and the error says more than this one's.
            let _ = self.unlink(&private);
        })
    }

    fn listen(&self, private: &OsStr) -> rustix::io::Result<Named> {
        let flags = SocketFlags::CLOEXEC;
        let fd = rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
        // The file gets the socket's mode when it is bound, so nobody else can ever connect.
        rustix::fs::fchmod(&fd, Mode::RUSR | Mode::WUSR)?;
        rustix::net::bind(&fd, &self.address(private)?)?;
        rustix::net::listen(&fd, BACKLOG)?;
        Ok(Named { fd, identity: self.identity(private)? })
    }

    /// Gives the socket `private` its `name`, from which a stale socket is removed.
    fn rename(&self, private: &OsStr, name: &OsStr, claims: u32) -> Result<(), SocketError> {
        for _ in 0..TRIES {
            match self.rename_if_free(private, name) {
                Ok(()) => return Ok(()),
                Err(Errno::EXIST) => self.remove_stale(name, claims)?,
                Err(e) => return Err(self.refused(name, e)),
            }
        }
        Err(SocketError::Contended(self.path.join(name)))
    }

    fn rename_if_free(&self, private: &OsStr, name: &OsStr) -> rustix::io::Result<()> {
        let flags = RenameFlags::NOREPLACE;
        match rustix::fs::renameat_with(&self.fd, private, &self.fd, name, flags) {
            // File systems over a network cannot, but have hard links.
            Err(Errno::INVAL | Errno::NOSYS) => {}
            renamed => return renamed,
        }
        match rustix::fs::linkat(&self.fd, private, &self.fd, name, AtFlags::empty()) {
            Err(Errno::PERM | Errno::NOSYS | Errno::OPNOTSUPP) => {}
            linked => return linked.and_then(|()| self.unlink(private)),
        }
        // Some have neither: there, the second of two that find the name free at once has it.
        match self.identity(name) {
            Ok(_) => Err(Errno::EXIST),
            Err(Errno::NOENT) => rustix::fs::renameat(&self.fd, private, &self.fd, name),
            Err(e) => Err(e),
        }
    }

    /// Removes the socket `name` if nobody listens there. Its file may be another one by now, or
    /// gone: the caller looks again.
    fn remove_stale(&self, name: &OsStr, claims: u32) -> Result<(), SocketError> {
        let system = |cause: Errno| self.refused(name, cause);
        let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        // While it is open, no other file has its number.
        let found = match rustix::fs::openat(&self.fd, name, flags, Mode::empty()) {
            Err(Errno::NOENT) => return Ok(()),
            found => found.map_err(system)?,
        };
        let stat = rustix::fs::fstat(&found).map_err(system)?;
        if FileType::from_raw_mode(stat.st_mode) != FileType::Socket {
            return Err(SocketError::NotASocket(self.path.join(name)));
        }
        match self.is_listened_at(name) {
            Ok(true) => return Err(SocketError::InUse(self.path.join(name))),
            Ok(false) => {}
            Err(Errno::NOENT) => return Ok(()),
            Err(e) => return Err(system(e)),
        }
        let Some(claim) = self.claim(name, &stat, claims + 1)? else { return Ok(()) };
        let removed = match self.identity(name) {
            Ok(identity) if identity == identity_of(&stat) => {
                tracing::info!("replacing {}: its process is gone", self.path.join(name).display());
                self.unlink(name)
            }
            identity => identity.map(|_| ()),
        };
        drop(claim);
        match removed {
            // A foreign program removed its own socket.
            Err(Errno::NOENT) => Ok(()),
            removed => removed.map_err(system),
        }
    }

    /// Takes the right to remove the stale socket `name`. Returns `None` if another starter has it.
    /// Only the first claim of a chain is waited for: waits for claims to claims would multiply.
    fn claim(
        &self,
        name: &OsStr,
        stale: &Stat,
        claims: u32,
    ) -> Result<Option<Claim<'_>>, SocketError> {
        if claims > CLAIMS {
            return Err(SocketError::Contended(self.path.join(name)));
        }
        let claim = OsString::from(format!(".replacing-{}", stale.st_ino));
        match self.take(&claim, claims) {
            Ok(named) => Ok(Some(Claim { dir: self, name: claim, named: Some(named) })),
            // Goes without: nobody who may not remove a socket can forbid it.
            Err(_) if self.is_strangers(&claim, stale) => {
                Ok(Some(Claim { dir: self, name: claim, named: None }))
            }
            Err(SocketError::InUse(_) | SocketError::Contended(_)) if claims == 1 => {
                std::thread::sleep(RETRY);
                Ok(None)
            }
            Err(e) => Err(e),
        }
    }

    /// Whether the file `claim` belongs to a user who may not remove the socket `stale`: in a
    /// directory in which any user makes files, but removes only his own.
    fn is_strangers(&self, claim: &OsStr, stale: &Stat) -> bool {
        let owner = rustix::fs::statat(&self.fd, claim, AtFlags::SYMLINK_NOFOLLOW);
        let (Ok(dir), Ok(claim)) = (rustix::fs::fstat(&self.fd), owner) else { return false };
        let own = rustix::process::geteuid().as_raw();
        Mode::from_raw_mode(dir.st_mode).contains(Mode::SVTX)
            && ![0, own, dir.st_uid, stale.st_uid].contains(&claim.st_uid)
    }

    /// A name that no other file has. It begins with `name` if there is room, so that `ss` finds
    /// the socket by its path: the kernel shows the name under which a socket was bound.
    fn private_name(&self, name: &OsStr) -> rustix::io::Result<OsString> {
        let mut bytes = [0; 8];
        // So few are given whole.
        rustix::rand::getrandom(&mut bytes, GetRandomFlags::empty())?;
        let suffix = format!(".{:016x}", u64::from_ne_bytes(bytes));
        let mut private = name.to_owned();
        private.push(&suffix);
        let fits = SocketAddrUnix::new(self.path.join(&private)).is_ok();
        Ok(if fits { private } else { suffix.into() })
    }

    /// Whether a process listens at `name`. Does not wait for that process, which may be stopped.
    fn is_listened_at(&self, name: &OsStr) -> rustix::io::Result<bool> {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let fd = rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
        match rustix::net::connect(&fd, &self.address(name)?) {
            // As many wait to be accepted as may, or it is a socket of another type.
            Ok(()) | Err(Errno::AGAIN | Errno::PROTOTYPE) => Ok(true),
            Err(Errno::CONNREFUSED) => Ok(false),
            Err(e) => Err(e),
        }
    }

    /// The address of `name`, by way of the directory's descriptor if it is too long.
    fn address(&self, name: &OsStr) -> rustix::io::Result<SocketAddrUnix> {
        SocketAddrUnix::new(self.path.join(name)).or_else(|_| {
            let dir = format!("/proc/self/fd/{}", self.fd.as_raw_fd());
            SocketAddrUnix::new(Path::new(&dir).join(name))
        })
    }

    fn identity(&self, name: &OsStr) -> rustix::io::Result<(u64, u64)> {
        let stat = rustix::fs::statat(&self.fd, name, AtFlags::SYMLINK_NOFOLLOW)?;
        Ok(identity_of(&stat))
    }

    fn unlink(&self, name: &OsStr) -> rustix::io::Result<()> {
        rustix::fs::unlinkat(&self.fd, name, AtFlags::empty())
    }

    fn refused(&self, name: &OsStr, cause: Errno) -> SocketError {
        SocketError::System { path: self.path.join(name), cause: cause.into() }
    }
}

/// The right to remove one stale socket, until this is dropped.
struct Claim<'a> {
    dir: &'a Dir,
    name: OsString,
    /// Listens until its name is gone. `None`: a stranger has that name.
    named: Option<Named>,
}

impl Drop for Claim<'_> {
    fn drop(&mut self) {
        if self.named.is_some()
            && let Err(e) = self.dir.unlink(&self.name)
        {
            tracing::warn!("cannot remove {}: {e}", self.dir.path.join(&self.name).display());
        }
    }
}

/// Device and inode.
fn identity_of(stat: &Stat) -> (u64, u64) {
    (stat.st_dev, stat.st_ino)
}

#[cfg(test)]
mod tests;
