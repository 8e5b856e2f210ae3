//! Owns the file of a listening unix socket, the API's or the vsock device's: who may connect to
//! it, what happens to a socket that already exists there, and the removal of the file.
//!
//! A starter is a process that begins to listen. It takes no lock, because a stranger could hold
//! one, and it waits for no process behind a socket:
//!
//! 1. A socket is bound under a private name and listens. Only then does it get its final name, and
//!    only if that name is free: `renameat2` with `RENAME_NOREPLACE`. A socket that refuses
//!    connections therefore belongs to a dead process and never listens again.
//! 2. Only the owner of a live socket removes its name, before it stops listening. The inode number
//!    stays in use while the socket is open, so the owner recognizes its file.
//! 3. Only the holder of the claim to a dead socket removes its name. The claim is a socket that
//!    listens under the name `.replacing-INODE`, which it got in the same way. The holder keeps the
//!    dead inode open, so no other file has its number. If the name refers to that inode once the
//!    claim is held, it does so until the holder removes the name: no other process may remove it.
//!
//! So a starter removes no file other than the one that it has checked, however long it is stopped
//! between two steps, and no live socket loses its name. Of several starters one gets the name; the
//! others find it in use. The claim of a killed starter is a dead socket and is replaced like any
//! other.
//!
//! A live socket can lose its name in two cases:
//!
//! - On a file system with neither `RENAME_NOREPLACE` nor hard links, if two starters find the name
//!   free at the same time: the second one gets it.
//! - In a directory with the sticky bit, if a stranger's file has the claim's name: starters
//!   proceed without the claim, and of two simultaneous ones the slower may remove the faster one's
//!   socket.
//!
//! The private name of a killed starter remains. A sweep would read directories, which the sandbox
//! forbids, for a file that only a kill within microseconds leaves behind.

use std::ffi::{OsStr, OsString};
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::time::Duration;

use parking_lot::Mutex;
use rustix::fs::{AtFlags, FileType, Mode, OFlags, RenameFlags, Stat};
use rustix::io::{Errno, FdFlags};
use rustix::net::sockopt::{socket_acceptconn, socket_domain, socket_type};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
use rustix::rand::GetRandomFlags;

use crate::exit::{self, SocketFile};
use crate::sandbox::permission_hint;

/// Connections that may wait to be accepted. During an upgrade they wait until the guest has
/// changed its process, and a client that finds no room fails.
const BACKLOG: i32 = 128;
/// Maximum conflicts with other starters, and maximum waits for a stopped starter.
const TRIES: u32 = 16;
/// Retry interval while another starter replaces the same stale socket, which takes microseconds.
const RETRY: Duration = Duration::from_millis(1);
/// Maximum length of a chain of claims: one for each starter killed while it replaced this socket.
const CLAIMS: u32 = 4;

/// A listening socket. Dropping it removes its file, unless the file stays.
#[derive(Debug)]
pub struct ListeningSocket {
    listener: UnixListener,
    /// The file to remove, or `None` if it stays.
    file: Mutex<Option<SocketFile>>,
}

/// The reason for which a socket cannot listen.
#[derive(Debug, thiserror::Error)]
pub enum SocketError {
    /// Another process listens there.
    #[error(
        "{} is in use: another process listens there; stop that one, or name another path",
        .0.display()
    )]
    InUse(PathBuf),
    /// Other processes start to listen there and end, one after the other, or a process was stopped
    /// while it started.
    #[error(
        "cannot listen on {}: other processes take that name again and again; stop them, or name \
         another path",
        .0.display()
    )]
    Contended(PathBuf),
    /// A file that is not a socket has that name.
    #[error("cannot listen on {}: it exists and is not a socket", .0.display())]
    NotASocket(PathBuf),
    /// A file has that name, and the caller replaces none.
    #[error(
        "cannot listen on {}: a file has that name; remove it, or name another path",
        .0.display()
    )]
    Exists(PathBuf),
    /// A descriptor from another process is not that of a listener.
    #[error("a descriptor that another process has sent is not a unix socket that listens: {0}")]
    NotAListener(#[source] io::Error),
    /// The system refused an operation.
    #[error("cannot listen on {}: {cause}{}", path.display(), permission_hint(path, cause))]
    System {
        /// The socket's path.
        path: PathBuf,
        /// The system's error.
        #[source]
        cause: io::Error,
    },
}

impl ListeningSocket {
    /// Listens on `path`, for this user only. Replaces the stale socket of a process that has
    /// ended.
    ///
    /// # Errors
    ///
    /// See [`SocketError`].
    pub fn bind(path: &Path) -> Result<Self, SocketError> {
        let system = |cause| SocketError::System { path: path.to_owned(), cause };
        let (dir, name) = dir_and_name(path)?;
        // Absolute, because any thread that ends the process removes the file.
        let absolute = std::path::absolute(dir.path.join(name)).map_err(system)?;
        let NamedSocket { fd, identity } = dir.take(name, 0)?;
        let file = SocketFile { path: absolute, identity };
        let socket = Self { listener: fd.into(), file: Mutex::new(Some(file.clone())) };
        exit::add(file);
        socket.listener.set_nonblocking(true).map_err(system)?;
        Ok(socket)
    }

    /// Listens on `path`, for this user only, if no file has that name. The file stays when the
    /// socket is dropped or the process ends: clients of Firecracker remove it.
    ///
    /// # Errors
    ///
    /// See [`SocketError`].
    pub fn bind_new(path: &Path) -> Result<Self, SocketError> {
        let system = |cause| SocketError::System { path: path.to_owned(), cause };
        let (dir, name) = dir_and_name(path)?;
        let NamedSocket { fd, .. } = dir.take_if_free(name)?;
        let socket = Self { listener: fd.into(), file: Mutex::default() };
        socket.listener.set_nonblocking(true).map_err(system)?;
        Ok(socket)
    }

    /// Takes over a listener of another process, with its `file`: the file is removed when the
    /// socket is dropped or the process ends, if it is still this socket. Without a `file` it
    /// stays. The other process must leave the file by [`keep_file`](Self::keep_file), so this is
    /// for a time at which the other process is certain to end.
    ///
    /// # Errors
    ///
    /// [`SocketError::NotAListener`].
    pub fn adopt(listener: OwnedFd, file: Option<SocketFile>) -> Result<Self, SocketError> {
        let checked = socket_domain(&listener).and_then(|domain| {
            let kind = (domain, socket_type(&listener)?, socket_acceptconn(&listener)?);
            rustix::io::fcntl_setfd(&listener, FdFlags::CLOEXEC)?;
            Ok(kind == (AddressFamily::UNIX, SocketType::STREAM, true))
        });
        let listener = UnixListener::from(listener);
        let ready = match checked {
            Ok(true) => listener.set_nonblocking(true),
            Ok(false) => Err(io::ErrorKind::InvalidInput.into()),
            Err(e) => Err(e.into()),
        };
        ready.map_err(SocketError::NotAListener)?;
        file.iter().cloned().for_each(exit::add);
        Ok(Self { listener, file: Mutex::new(file) })
    }

    /// Makes this the process that clients see behind a socket of another one: `SO_PEERCRED` names
    /// the last process that has called `listen`. Programs that have connected are not affected.
    ///
    /// # Errors
    ///
    /// That of `listen(2)`.
    pub fn listen_here(&self) -> io::Result<()> {
        Ok(rustix::net::listen(&self.listener, BACKLOG)?)
    }

    /// Leaves the socket's file where it is when the socket is dropped or the process ends.
    pub fn keep_file(&self) {
        self.file.lock().take().iter().for_each(exit::forget);
    }

    /// Undoes [`keep_file`](Self::keep_file): `file`, which that left, is removed when the socket
    /// is dropped or the process ends, if it is still this socket.
    pub(crate) fn own_file(&self, file: SocketFile) {
        exit::add(file.clone());
        *self.file.lock() = Some(file);
    }

    /// Returns the file that is removed when the socket is dropped, for a process that takes the
    /// listener over, or `None` if the file stays.
    pub fn file(&self) -> Option<SocketFile> {
        self.file.lock().clone()
    }

    /// Returns a clone of the listener, which does not block.
    ///
    /// # Errors
    ///
    /// The process cannot open another descriptor.
    pub fn listener(&self) -> io::Result<UnixListener> {
        self.listener.try_clone()
    }
}

impl Drop for ListeningSocket {
    fn drop(&mut self) {
        let Some(file) = self.file.get_mut() else { return };
        exit::forget(file);
        if let Err(e) = file.remove() {
            tracing::warn!("cannot remove {}: {e}", file.path.display());
        }
    }
}

/// Returns the directory of a socket and the socket's name in it.
fn dir_and_name(path: &Path) -> Result<(Dir, &OsStr), SocketError> {
    let system = |cause: Errno| SocketError::System { path: path.to_owned(), cause: cause.into() };
    // A process can listen at a longer name, but no client can connect to it.
    SocketAddrUnix::new(path).map_err(system)?;
    let name = path.file_name().ok_or_else(|| SocketError::NotASocket(path.to_owned()))?;
    Ok((Dir::of(path).map_err(system)?, name))
}

/// A socket that listens under its final name.
struct NamedSocket {
    fd: OwnedFd,
    identity: (u64, u64),
}

/// A directory in which sockets are renamed.
struct Dir {
    fd: OwnedFd,
    path: PathBuf,
}

impl Dir {
    fn of(socket: &Path) -> rustix::io::Result<Self> {
        let path = socket.parent().unwrap_or(Path::new("")).to_owned();
        let opened = if path.as_os_str().is_empty() { Path::new(".") } else { &path };
        // O_PATH does not need the right to read the directory.
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let fd = rustix::fs::open(opened, flags, Mode::empty())?;
        Ok(Self { fd, path })
    }

    /// Listens under `name`. `claims` is the number of claims that lead to this call.
    fn take(&self, name: &OsStr, claims: u32) -> Result<NamedSocket, SocketError> {
        self.take_by(name, |private| self.rename(private, name, claims))
    }

    /// Listens under `name` if no file has that name.
    fn take_if_free(&self, name: &OsStr) -> Result<NamedSocket, SocketError> {
        self.take_by(name, |private| {
            self.rename_if_free(private, name).map_err(|e| match e {
                Errno::EXIST => SocketError::Exists(self.path.join(name)),
                e => self.refused(name, e),
            })
        })
    }

    /// Listens under a private name, which `rename` changes to `name`.
    fn take_by(
        &self,
        name: &OsStr,
        rename: impl FnOnce(&OsStr) -> Result<(), SocketError>,
    ) -> Result<NamedSocket, SocketError> {
        let system = |cause: Errno| self.refused(name, cause);
        let private = self.private_name(name).map_err(system)?;
        let named = self.listen(&private).map_err(system).and_then(|named| {
            rename(&private)?;
            Ok(named)
        });
        named.inspect_err(|_| {
            // The file may not exist. The first error is more useful than this one.
            let _ = self.unlink(&private);
        })
    }

    fn listen(&self, private: &OsStr) -> rustix::io::Result<NamedSocket> {
        let flags = SocketFlags::CLOEXEC;
        let fd = rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
        // The file inherits the socket's mode on bind, so no other user can ever connect.
        rustix::fs::fchmod(&fd, Mode::RUSR | Mode::WUSR)?;
        rustix::net::bind(&fd, &self.address(private)?)?;
        rustix::net::listen(&fd, BACKLOG)?;
        Ok(NamedSocket { fd, identity: self.identity(private)? })
    }

    /// Renames the socket `private` to `name`, after removing a stale socket of that name.
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
            // Network file systems do not support the flag, but have hard links.
            Err(Errno::INVAL | Errno::NOSYS) => {}
            renamed => return renamed,
        }
        match rustix::fs::linkat(&self.fd, private, &self.fd, name, AtFlags::empty()) {
            Err(Errno::PERM | Errno::NOSYS | Errno::OPNOTSUPP) => {}
            linked => return linked.and_then(|()| self.unlink(private)),
        }
        // Some file systems have neither. There, of two starters that find the name free at the
        // same time, the second one gets it.
        match self.identity(name) {
            Ok(_) => Err(Errno::EXIST),
            Err(Errno::NOENT) => rustix::fs::renameat(&self.fd, private, &self.fd, name),
            Err(e) => Err(e),
        }
    }

    /// Removes the socket `name` if no process listens there. The file may have been replaced or
    /// removed meanwhile, so the caller tries the name again.
    fn remove_stale(&self, name: &OsStr, claims: u32) -> Result<(), SocketError> {
        let system = |cause: Errno| self.refused(name, cause);
        let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        // While the inode is open, no other file has its number.
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
                tracing::info!(
                    "replacing {}: its process has ended",
                    self.path.join(name).display()
                );
                self.unlink(name)
            }
            identity => identity.map(|_| ()),
        };
        drop(claim);
        match removed {
            // The program that owned the socket removed it itself.
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
            // Proceeds without a claim: a user who may not remove a socket must not block its
            // removal.
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

    /// Returns whether the file `claim` belongs to a user who may not remove the socket `stale`.
    /// This is so in a sticky directory, where any user creates files but removes only their own.
    fn is_strangers(&self, claim: &OsStr, stale: &Stat) -> bool {
        let owner = rustix::fs::statat(&self.fd, claim, AtFlags::SYMLINK_NOFOLLOW);
        let (Ok(dir), Ok(claim)) = (rustix::fs::fstat(&self.fd), owner) else { return false };
        let own = rustix::process::geteuid().as_raw();
        Mode::from_raw_mode(dir.st_mode).contains(Mode::SVTX)
            && ![0, own, dir.st_uid, stale.st_uid].contains(&claim.st_uid)
    }

    /// Returns a unique name. It begins with `name` if there is room, so that `ss` finds the socket
    /// by its path: the kernel shows the name under which a socket was bound.
    fn private_name(&self, name: &OsStr) -> rustix::io::Result<OsString> {
        let mut bytes = [0; 8];
        // A read this short is never partial.
        rustix::rand::getrandom(&mut bytes, GetRandomFlags::empty())?;
        let suffix = format!(".{:016x}", u64::from_ne_bytes(bytes));
        let mut private = name.to_owned();
        private.push(&suffix);
        let fits = SocketAddrUnix::new(self.path.join(&private)).is_ok();
        Ok(if fits { private } else { suffix.into() })
    }

    /// Returns whether a process listens at `name`. Does not wait for that process, which may be
    /// stopped.
    fn is_listened_at(&self, name: &OsStr) -> rustix::io::Result<bool> {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let fd = rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
        match rustix::net::connect(&fd, &self.address(name)?) {
            // AGAIN: the backlog is full. PROTOTYPE: the socket is of another type.
            Ok(()) | Err(Errno::AGAIN | Errno::PROTOTYPE) => Ok(true),
            Err(Errno::CONNREFUSED) => Ok(false),
            Err(e) => Err(e),
        }
    }

    /// Returns the address of `name`, through the directory's descriptor if the path is too long.
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

/// The right to remove one stale socket. Dropping it removes the claim's file.
struct Claim<'a> {
    dir: &'a Dir,
    name: OsString,
    /// Listens until the claim's name is removed. `None`: a stranger's file has that name.
    named: Option<NamedSocket>,
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

/// Returns device and inode number.
fn identity_of(stat: &Stat) -> (u64, u64) {
    (stat.st_dev, stat.st_ino)
}

#[cfg(test)]
mod tests;
