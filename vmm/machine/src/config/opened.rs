//! Files of a guest that are open before its machine is built. When the machine is built, their
//! names may refer to other files.

use std::fs::File;
use std::io::{self, Seek};
use std::os::fd::OwnedFd;
use std::os::unix::net::{UnixDatagram, UnixListener, UnixStream};
use std::sync::Arc;

use crate::socket::ListeningSocket;

/// An open file. Equal to its clones only.
#[derive(Clone, Debug)]
pub struct OpenedFile(Arc<File>);

impl OpenedFile {
    /// Returns the file with its position at the start. An earlier build that failed may have read
    /// from it.
    pub(crate) fn rewound(&self) -> io::Result<File> {
        let mut file = self.0.try_clone()?;
        file.rewind()?;
        Ok(file)
    }

    /// Returns the file.
    pub fn file(&self) -> &File {
        &self.0
    }
}

impl From<File> for OpenedFile {
    fn from(file: File) -> Self {
        Self(Arc::new(file))
    }
}

impl PartialEq for OpenedFile {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

impl Eq for OpenedFile {}

/// Whether the host makes a disk durable when the guest asks for it.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum DiskCache {
    /// It does: the disk offers a flush.
    #[default]
    Writeback,
    /// It does not: the disk offers no flush, and a write is complete once the host's page cache
    /// has it. What the guest writes may be lost with the host.
    Unsafe,
}

/// How a disk's file is read and written.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum DiskEngine {
    /// By io_uring if the host has it, otherwise by blocking system calls.
    #[default]
    Automatic,
    /// By io_uring. A host without it is refused.
    Uring,
    /// By blocking system calls on the disk's thread.
    Blocking,
}

/// A disk whose file is open.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct OpenedDisk {
    /// The disk's name.
    pub id: String,
    /// The file, open for writing unless the disk is read-only.
    pub file: OpenedFile,
    /// Whether the host makes the disk durable.
    pub cache: DiskCache,
    /// How the file is read and written.
    pub engine: DiskEngine,
    /// Whether the file is that of a guest that continues here from another process of this host,
    /// with its lock.
    pub is_handed_over: bool,
}

/// A tap to which this process is attached. The host can give it to no other process until the last
/// clone is dropped.
#[derive(Clone, Debug)]
pub struct OpenedTap {
    /// The interface's name.
    pub id: String,
    /// A file for each queue pair.
    queues: Vec<OpenedFile>,
    /// Sockets that keep other processes of this host from using the tap.
    claims: Arc<[UnixDatagram]>,
    /// Whether the files are those of a guest that continues here from another process of this
    /// host. Frames that wait in them belong to that process until the guest runs here.
    pub(crate) is_handed_over: bool,
}

impl OpenedTap {
    pub(crate) fn new(
        id: &str,
        queues: impl IntoIterator<Item = File>,
        claims: Arc<[UnixDatagram]>,
    ) -> Self {
        let queues = queues.into_iter().map(OpenedFile::from).collect();
        Self { id: id.to_owned(), queues, claims, is_handed_over: false }
    }

    /// Returns the files of the tap's queue pairs, and its claims.
    pub(crate) fn parts(&self) -> io::Result<(Vec<File>, Arc<[UnixDatagram]>)> {
        let queues = self.queues.iter().map(|queue| queue.file().try_clone());
        Ok((queues.collect::<io::Result<_>>()?, self.claims.clone()))
    }
}

impl PartialEq for OpenedTap {
    fn eq(&self, other: &Self) -> bool {
        (&self.id, &self.queues) == (&other.id, &other.queues)
    }
}

impl Eq for OpenedTap {}

/// A listening unix socket whose file is not removed. Equal to its clones only.
#[derive(Clone, Debug)]
pub struct OpenedSocket(Arc<ListeningSocket>);

impl OpenedSocket {
    /// Returns a clone of the listener, which does not block.
    pub(crate) fn listener(&self) -> io::Result<UnixListener> {
        self.0.listener()
    }
}

impl From<ListeningSocket> for OpenedSocket {
    fn from(socket: ListeningSocket) -> Self {
        Self(Arc::new(socket))
    }
}

impl PartialEq for OpenedSocket {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

impl Eq for OpenedSocket {}

/// The files of a vsock of a guest that continues here from another process of this host: its
/// listener, and the socket and the file by which its connections arrive. Equal to its clones only.
#[derive(Clone, Debug)]
pub struct HandedOverVsock(Arc<VsockFiles>);

#[derive(Debug)]
struct VsockFiles {
    listener: OwnedFd,
    channel: UnixStream,
    state: File,
}

impl HandedOverVsock {
    pub(crate) fn new(listener: OwnedFd, channel: OwnedFd, state: File) -> Self {
        Self(Arc::new(VsockFiles { listener, channel: channel.into(), state }))
    }

    /// Returns the listener.
    pub(crate) fn listener(&self) -> &OwnedFd {
        &self.0.listener
    }

    /// Returns the socket over which the connections' streams come.
    pub(crate) fn channel(&self) -> &UnixStream {
        &self.0.channel
    }

    /// Returns the file with the connections' state.
    pub(crate) fn state(&self) -> &File {
        &self.0.state
    }
}

impl PartialEq for HandedOverVsock {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

impl Eq for HandedOverVsock {}

/// The open files of a guest that is built. A file that is not among them is opened by its name.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct OpenedFiles {
    /// The kernel.
    pub kernel: Option<OpenedFile>,
    /// The initial RAM disk.
    pub initrd: Option<OpenedFile>,
    /// The disks.
    pub disks: Vec<OpenedDisk>,
    /// The taps.
    pub taps: Vec<OpenedTap>,
    /// The vsock's socket.
    pub vsock: Option<OpenedSocket>,
    /// The vsock of a guest that continues here from another process of this host.
    pub handed_over_vsock: Option<HandedOverVsock>,
}

impl OpenedFiles {
    /// Returns whether they are those of a guest that continues here from another process of this
    /// host.
    pub(crate) fn are_handed_over(&self) -> bool {
        self.disks.iter().any(|disk| disk.is_handed_over)
            || self.taps.iter().any(|tap| tap.is_handed_over)
            || self.handed_over_vsock.is_some()
    }

    /// Returns the disk named `id`.
    pub(crate) fn disk(&self, id: &str) -> Option<&OpenedDisk> {
        self.disks.iter().find(|disk| disk.id == id)
    }

    /// Returns the tap of the network interface named `id`.
    pub(crate) fn tap(&self, id: &str) -> Option<&OpenedTap> {
        self.taps.iter().find(|tap| tap.id == id)
    }
}
