//! The host's side: the unix socket at which programs request connections, and the sockets to which
//! the guest's connections lead. The protocol is Firecracker's.

use std::ffi::OsString;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};

use rustix::net::{AddressFamily, RecvFlags, SocketAddrUnix, SocketFlags, SocketType};

use crate::config::OpenedSocket;
use crate::devices::opener::{DropOnOpener, Opener};
use crate::exit::SocketFile;
use crate::socket::{ListeningSocket, SocketError};

/// Most bytes of a greeting; "CONNECT 4294967295\n" is shorter.
const MAX_GREETING_BYTES: usize = 32;

/// Reason why a vsock's unix socket cannot be used, or its connections cannot continue.
#[derive(Debug, thiserror::Error)]
pub enum VsockError {
    /// The unix socket cannot be used.
    #[error("the vsock's unix socket: {0}")]
    Socket(#[from] SocketError),
    /// The connections cannot move to another process together with the guest.
    #[error("the vsock's connections cannot continue in another process: {0}")]
    HandOver(#[source] io::Error),
}

impl VsockError {
    pub(super) fn system(path: &Path, cause: io::Error) -> Self {
        SocketError::System { path: path.to_owned(), cause }.into()
    }

    /// Returns whether another process listens on the socket, or is about to.
    pub(super) fn is_in_use(&self) -> bool {
        matches!(self, Self::Socket(SocketError::InUse(_) | SocketError::Contended(_)))
    }
}

/// Socket at which programs of the host request connections. Dropping it removes its file, if it
/// was bound here.
#[derive(Debug)]
pub(super) struct VsockListener {
    listener: UnixListener,
    socket: Option<DropOnOpener<ListeningSocket>>,
}

impl VsockListener {
    /// Binds the socket. Its file `stays` when this is dropped, or is removed.
    pub(super) fn open(path: &Path, stays: bool, opener: &Opener) -> Result<Self, VsockError> {
        let system = |cause| SocketError::System { path: path.to_owned(), cause };
        let name = path.to_owned();
        let bind = move || {
            let bound = ListeningSocket::bind(&name);
            if stays { bound.inspect(ListeningSocket::keep_file) } else { bound }
        };
        let socket = opener.run(bind).map_err(system)??;
        let listener = socket.listener().map_err(system)?;
        Ok(Self { listener, socket: Some(opener.drop_here(socket)) })
    }

    /// Returns the socket of another process of this host. Its file stays when this is dropped.
    pub(super) fn of_other_process(listener: OwnedFd, opener: &Opener) -> Result<Self, VsockError> {
        let adopt = move || {
            let socket = ListeningSocket::adopt(listener, None)?;
            let listener = socket.listener().map_err(SocketError::NotAListener)?;
            Ok::<_, SocketError>((socket, listener))
        };
        let adopted = opener.run(adopt).map_err(SocketError::NotAListener)?;
        let (socket, listener) = adopted?;
        Ok(Self { listener, socket: Some(opener.drop_here(socket)) })
    }

    /// Leaves the socket's file to another process; returns it, if it was to be removed here.
    pub(super) fn leave_file(&self) -> Option<SocketFile> {
        let socket = self.socket.as_ref()?.get()?;
        let file = socket.file();
        socket.keep_file();
        file
    }

    /// Removes `file`, which is this socket's, when this is dropped.
    pub(super) fn own_file(&self, file: Option<SocketFile>) {
        if let Some((socket, file)) = self.socket.as_ref().and_then(DropOnOpener::get).zip(file) {
            socket.own_file(file);
        }
    }

    /// Returns the socket that was bound earlier.
    pub(super) fn of_opened(opened: &OpenedSocket) -> io::Result<Self> {
        Ok(Self { listener: opened.listener()?, socket: None })
    }

    pub(super) fn listener(&self) -> &UnixListener {
        &self.listener
    }

    /// Accepts the next program, if one waits.
    ///
    /// # Errors
    ///
    /// Fails if the system has no room for one more.
    pub(super) fn accept(&self) -> io::Result<Option<UnixStream>> {
        loop {
            return match self.listener.accept() {
                Ok((stream, _)) => {
                    stream.set_nonblocking(true)?;
                    Ok(Some(stream))
                }
                Err(e) => match e.kind() {
                    io::ErrorKind::WouldBlock => Ok(None),
                    io::ErrorKind::Interrupted | io::ErrorKind::ConnectionAborted => continue,
                    _ => Err(e),
                },
            };
        }
    }
}

/// State of a program's greeting.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Greeting {
    /// A request for this port of the guest.
    Connect(u32),
    /// The line is not complete yet.
    Unfinished,
    /// Anything else, or the program has closed the stream.
    Wrong,
}

/// Reads a program's greeting from `stream`, and no byte after it.
pub(super) fn greeting(stream: &UnixStream) -> Greeting {
    let mut bytes = [0; MAX_GREETING_BYTES];
    let len = match rustix::net::recv(stream, &mut bytes[..], RecvFlags::PEEK) {
        Ok((len, _)) if len > 0 => len,
        Err(rustix::io::Errno::AGAIN | rustix::io::Errno::INTR) => return Greeting::Unfinished,
        _ => return Greeting::Wrong,
    };
    let Some(line) = bytes[..len].iter().position(|b| *b == b'\n') else {
        return if len < MAX_GREETING_BYTES { Greeting::Unfinished } else { Greeting::Wrong };
    };
    let port = std::str::from_utf8(&bytes[..line]).ok().and_then(parse);
    let mut rest = &mut bytes[..=line];
    while !rest.is_empty() {
        // All of it was readable just before, and nothing else reads the stream.
        match rustix::net::recv(stream, &mut *rest, RecvFlags::empty()) {
            Ok((len, _)) if len > 0 => rest = &mut rest[len..],
            _ => return Greeting::Wrong,
        }
    }
    port.map_or(Greeting::Wrong, Greeting::Connect)
}

fn parse(line: &str) -> Option<u32> {
    let (word, port) = line.strip_suffix('\r').unwrap_or(line).split_once(' ')?;
    if !word.eq_ignore_ascii_case("connect") { None } else { port.trim().parse().ok() }
}

/// Connects to the program that listens for the guest at `port`. Does not block.
pub(super) fn connect(uds: &Path, port: u32, opener: &Opener) -> io::Result<UnixStream> {
    let address = SocketAddrUnix::new(path_of(uds, port))?;
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    opener.run(move || {
        let fd = rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
        rustix::net::connect(&fd, &address)?;
        Ok(fd.into())
    })?
}

fn path_of(uds: &Path, port: u32) -> PathBuf {
    let mut path = OsString::from(uds);
    path.push(format!("_{port}"));
    path.into()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{Read, Write};

    #[test]
    fn greeting_is_read_up_to_its_end() {
        let read_from = |bytes: &[u8]| {
            let (mut program, ours) = UnixStream::pair().unwrap();
            ours.set_nonblocking(true).unwrap();
            program.write_all(bytes).unwrap();
            (greeting(&ours), program, ours)
        };
        let (connect, _program, mut ours) = read_from(b"CONNECT 52\nfirst words");
        assert_eq!(connect, Greeting::Connect(52));
        let mut rest = [0; 20];
        let len = ours.read(&mut rest).unwrap();
        assert_eq!(&rest[..len], b"first words");
        assert_eq!(read_from(b"connect 4294967295\r\n").0, Greeting::Connect(u32::MAX));
        assert_eq!(read_from(b"").0, Greeting::Unfinished);
        assert_eq!(read_from(b"CONN").0, Greeting::Unfinished);
        for wrong in [&b"\n"[..], b"CONNECT\n", b"CONNECT 4294967296\n", b"HELLO 3\n", &[b'x'; 40]]
        {
            assert_eq!(read_from(wrong).0, Greeting::Wrong, "{wrong:?}");
        }
        let (_, program, ours) = read_from(b"");
        drop(program);
        assert_eq!(greeting(&ours), Greeting::Wrong, "gone");
    }
}
