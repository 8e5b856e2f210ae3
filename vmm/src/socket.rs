//! Owns the file of a unix socket at which this process listens, the API's and the socket device's: who
//! may connect to it, what is done about one that is already there, and its removal.

use std::fs;
use std::io;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};

use rustix::fs::Mode;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};

use crate::exit::{self, SocketFile};
use crate::sandbox::hint;

/// Connections that may wait to be accepted.
const BACKLOG: i32 = 16;

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
    #[error("{} is in use: another process listens there", .0.display())]
    InUse(PathBuf),
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

/// Removes the socket at `path` if nobody listens there.
fn remove_stale(path: &Path) -> Result<(), SocketError> {
    let system = |cause| SocketError::System { path: path.to_owned(), cause };
    if !fs::symlink_metadata(path).map_err(system)?.file_type().is_socket() {
        return Err(SocketError::NotASocket(path.to_owned()));
    }
    match UnixStream::connect(path) {
        Ok(_) => Err(SocketError::InUse(path.to_owned())),
        Err(e) if e.kind() == io::ErrorKind::ConnectionRefused => {
            tracing::info!("replacing {}: its process is gone", path.display());
            fs::remove_file(path).map_err(system)
        }
        Err(e) => Err(system(e)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

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
    fn a_path_that_is_too_long_is_a_sentence() {
        let e = ListeningSocket::bind(&PathBuf::from("x".repeat(300))).unwrap_err();
        assert!(e.to_string().starts_with("cannot listen on xxx"), "{e}");
    }
}
