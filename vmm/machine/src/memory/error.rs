//! Errors of guest memory.

use std::fmt;
use std::io;
use std::num::TryFromIntError;
use std::path::PathBuf;
use std::time::Duration;

use driftline_dirty_tracker::{FrameRun, Gfn, LayoutError};
use driftline_guest::{GuestError, SharedMemoryError};
use vm_memory::GuestRegionCollectionError;
use vm_memory::mmap::MmapRegionError;

/// The reason why guest memory cannot be set up or accessed.
#[derive(Debug, thiserror::Error)]
pub enum MemoryError {
    /// The size is outside the supported range, or not a whole number of pages.
    #[error("guest memory of {0} bytes is not a whole number of pages between 16 MiB and 16 TiB")]
    Size(u64),
    /// The host does not have this much memory.
    #[error("{} of guest memory does not fit (--mem): {cause}", gib(*bytes))]
    DoesNotFit {
        /// Requested size, in bytes.
        bytes: u64,
        /// What does not fit.
        #[source]
        cause: MisfitCause,
    },
    /// The file with the first contents has fewer bytes than guest memory.
    #[error(
        "the file of guest memory has {found} bytes, and the guest has {bytes} bytes of memory"
    )]
    FileTooShort {
        /// Size of guest memory, in bytes.
        bytes: u64,
        /// Size of the file, in bytes.
        found: u64,
    },
    /// The system refuses an operation on the file with the first contents.
    #[error("the file of guest memory cannot be read: {0}")]
    File(io::Error),
    /// The size is not a whole number of the pool's huge pages.
    #[error("guest memory of {0} bytes is not a whole number of huge pages of 2 MiB")]
    NotHuge(u64),
    /// The pool has too few huge pages.
    #[error(
        "guest memory needs {needed} huge pages of 2 MiB, and this host has {free} free: \
         reserve more (sysctl vm.nr_hugepages), or use --hugepages thp"
    )]
    PoolTooSmall {
        /// Huge pages that the guest needs.
        needed: u64,
        /// Huge pages that are neither in use nor reserved.
        free: u64,
    },
    /// The host's kernel has no `MADV_POPULATE_WRITE`.
    #[error("this host's kernel cannot prefault memory (Linux 5.14 can): leave --prefault out")]
    NoPrefault,
    /// The threads that share the work on a large guest's memory cannot be started.
    #[error("no thread can be started for guest memory: {0}")]
    Pool(io::Error),
    /// There is no memory backing of this name.
    #[error("unknown memory backing \"{name}\": use anon or memfd")]
    UnknownBacking {
        /// The name, as it was given.
        name: String,
    },
    /// There are no huge pages of this name.
    #[error("unknown kind of huge pages \"{name}\": use thp, hugetlbfs or none")]
    UnknownHugePages {
        /// The name, as it was given.
        name: String,
    },
    /// A page of a restored guest cannot be fetched.
    #[error("{0}")]
    Lost(String),
    /// A page of a restored guest has not been fetched in time.
    #[error("page {:#x} has not arrived within {limit:?}: its storage hangs", frame.0)]
    NotFetched {
        /// The page.
        frame: Gfn,
        /// Limit of the wait.
        limit: Duration,
    },
    /// The memory cannot be handed over to its page handler.
    #[error(transparent)]
    Handler(#[from] PageHandlerError),
    /// A page handler does not serve a page.
    #[error(transparent)]
    NotServed(#[from] FrameError),
    /// The memory of another guest cannot be used.
    #[error("the memory that was handed over cannot be used: {0}")]
    Shared(#[from] SharedMemoryError),
    /// The layout is invalid. Only a programming error leads here.
    #[error(transparent)]
    Layout(#[from] LayoutError),
}

impl MemoryError {
    /// Returns the conversion of a cause for which memory of `bytes` bytes does not fit.
    pub(super) fn does_not_fit<E: Into<MisfitCause>>(bytes: u64) -> impl Fn(E) -> Self {
        move |cause| Self::DoesNotFit { bytes, cause: cause.into() }
    }

    /// Returns whether another host might have enough memory, or a kernel that allows it.
    pub(crate) fn host_lacks(&self) -> bool {
        matches!(
            self,
            Self::DoesNotFit { .. } | Self::PoolTooSmall { .. } | Self::NoPrefault | Self::Pool(_)
        )
    }
}

/// The reason why guest memory of a valid size does not fit into this host.
#[derive(Debug, thiserror::Error)]
pub enum MisfitCause {
    /// The host has less memory.
    #[error("this host has {} of memory and swap", gib(*bytes))]
    Host {
        /// Memory and swap of the host, in bytes.
        bytes: u64,
    },
    /// A slot is longer than an address space.
    #[error(transparent)]
    Length(#[from] TryFromIntError),
    /// The kernel does not map a slot.
    #[error(transparent)]
    Map(#[from] MmapRegionError),
    /// The kernel refuses advice on a mapping, or has no memory for it.
    #[error(transparent)]
    System(#[from] io::Error),
    /// A slot ends past the last address.
    #[error("its end overflows")]
    End,
    /// The slots do not form one memory.
    #[error(transparent)]
    Slots(#[from] GuestRegionCollectionError),
}

/// A step of handing guest memory over to a page handler.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum HandlerStep {
    /// Opening a userfaultfd.
    Open,
    /// Registering the memory with it.
    Register,
    /// Connecting to the handler.
    Connect,
    /// Sending it the userfaultfd.
    Send,
}

impl fmt::Display for HandlerStep {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Open => "opening a userfaultfd",
            Self::Register => "registering guest memory with userfaultfd",
            Self::Connect => "connecting to the page handler",
            Self::Send => "sending guest memory to the page handler",
        })
    }
}

/// Guest memory cannot be handed over to a page handler.
#[derive(Debug, thiserror::Error)]
#[error("{step} failed: {cause}")]
pub struct PageHandlerError {
    /// The step that failed.
    pub step: HandlerStep,
    /// The system's error.
    #[source]
    pub cause: io::Error,
}

impl PageHandlerError {
    /// Returns the conversion of an error of `step`.
    pub(super) fn new(step: HandlerStep) -> impl Fn(io::Error) -> Self {
        move |cause| Self { step, cause }
    }
}

/// Why frames of guest memory cannot be listed, placed, fetched or protected.
#[derive(Debug, thiserror::Error)]
pub enum FrameError {
    /// The system refused an operation.
    #[error("{what} failed: {cause}")]
    System {
        /// The operation.
        what: &'static str,
        /// The system's error.
        #[source]
        cause: io::Error,
    },
    /// The operation is not possible while frames are still being fetched.
    #[error("the lazy restore of the guest has not finished: try again later")]
    RestoreUnfinished {
        /// The operation.
        what: &'static str,
    },
    /// The memory is in no file, or in one that gets no writes.
    #[error("it is private to this process: start the guest with --memory-backing memfd")]
    PrivateMemory,
    /// Unprotecting all frames failed earlier.
    #[error("unprotecting all frames failed earlier")]
    UnprotectFailed,
    /// The memory is being restored lazily, or was.
    #[error("this memory has a lazy restore already")]
    SecondRestore,
    /// The page handler of the memory serves no more pages. The text says why.
    #[error("{0}")]
    HandlerLost(String),
    /// The page handler of the memory does not answer.
    #[error(
        "the page handler at {} has not served the {} KiB from page {:#x} on within {limit:?}",
        handler.display(),
        piece.bytes() >> 10,
        piece.start.0
    )]
    HandlerSilent {
        /// The socket of the handler.
        handler: PathBuf,
        /// The pages.
        piece: FrameRun,
        /// Limit of the wait.
        limit: Duration,
    },
}

impl FrameError {
    /// Returns the conversion of an error of the operation `what`.
    pub(super) fn system(what: &'static str) -> impl Fn(io::Error) -> Self {
        move |cause| Self::System { what, cause }
    }
}

impl From<FrameError> for GuestError {
    fn from(e: FrameError) -> Self {
        let what = match &e {
            FrameError::System { what, .. } | FrameError::RestoreUnfinished { what } => what,
            FrameError::UnprotectFailed => "protecting frames",
            FrameError::SecondRestore => "starting a lazy restore",
            FrameError::PrivateMemory => "handing over guest memory",
            FrameError::HandlerLost(_) | FrameError::HandlerSilent { .. } => "fetching frames",
        };
        match e {
            FrameError::System { cause, .. } => Self::System { what, cause: cause.into() },
            e => Self::System { what, cause: e.into() },
        }
    }
}

/// Formats a number of bytes for users.
pub(super) fn gib(bytes: u64) -> String {
    match bytes {
        _ if bytes < 1 << 30 => format!("{} MiB", bytes >> 20),
        _ if bytes.is_multiple_of(1 << 30) => format!("{} GiB", bytes >> 30),
        _ => format!("{:.1} GiB", bytes as f64 / f64::from(1 << 30)),
    }
}
