//! The interface between a store and its disk. It is a trait so that tests can lose power at any
//! sync; `dir_backend.rs` has the implementation over a directory.

use std::fmt;
use std::io;
use std::ops::Range;
use std::path::Path;

use driftline_dirty_tracker::FrameRun;
pub use driftline_format::range_lock::RangeLock;
use driftline_guest::GuestRam;
use rustix::io::Errno;
use vm_memory::{Bytes, GuestAddress};

/// Name of the lock file in a store's directory.
pub const LOCK_FILE: &str = "lock";

/// Why a store could not be locked for writing.
#[derive(Debug)]
pub enum LockError {
    /// Another process, or another handle in this one, has the lock.
    Held {
        /// The holder's process id, if it could be read.
        pid: Option<u32>,
    },
    /// The lock operation itself failed.
    Io(io::Error),
}

/// A flat set of named files on something that keeps what was synced.
///
/// A backend must promise that:
///
/// - the bytes of a file survive a crash once [`StoreFile::sync`] has returned;
/// - a name (created, renamed or removed) survives once [`sync_dir`](Self::sync_dir) has returned;
/// - a rename replaces its target atomically;
/// - of 512 bytes that are written in one call, at a multiple of 512, all survive a crash or none.
///
/// The store relies on nothing else: bytes and names that were not synced may survive or not, in
/// parts and in any order.
pub trait Backend: fmt::Debug + Send + Sync {
    /// Returns the location, for messages.
    fn location(&self) -> &Path;

    /// Returns another backend for the same files, without a lock.
    ///
    /// # Errors
    ///
    /// The files cannot be opened once more.
    fn reopen(&self) -> io::Result<Box<dyn Backend>>;

    /// Excludes other writers until this backend is dropped.
    ///
    /// # Errors
    ///
    /// [`LockError::Held`] if another writer has the lock.
    fn lock(&self) -> Result<(), LockError>;

    /// Returns whether other writers would meet this lock. They would not if the lock file, or the
    /// directory, was removed or replaced.
    ///
    /// # Errors
    ///
    /// The system's error.
    fn is_locked(&self) -> io::Result<bool>;

    /// Creates an empty file, or truncates an existing one, for reading and writing.
    ///
    /// # Errors
    ///
    /// The file cannot be created.
    fn create(&self, name: &str) -> io::Result<Box<dyn StoreFile>>;

    /// Creates an empty file, for reading and writing.
    ///
    /// # Errors
    ///
    /// `AlreadyExists` if the name is in use; or the file cannot be created.
    fn create_new(&self, name: &str) -> io::Result<Box<dyn StoreFile>>;

    /// Opens a file for reading.
    ///
    /// # Errors
    ///
    /// The file does not exist or cannot be opened.
    fn open(&self, name: &str) -> io::Result<Box<dyn StoreFile>>;

    /// Opens a file for reading and writing.
    ///
    /// # Errors
    ///
    /// The file does not exist or cannot be opened.
    fn open_for_writing(&self, name: &str) -> io::Result<Box<dyn StoreFile>>;

    /// Renames a file, replacing a file that has the new name.
    ///
    /// # Errors
    ///
    /// The file does not exist or cannot be renamed. The rename may have taken effect all the same.
    fn rename(&self, from: &str, to: &str) -> io::Result<()>;

    /// Gives a file a second name that is not in use: its bytes stay for as long as it has either
    /// name. The name is not durable before [`sync_dir`](Self::sync_dir).
    ///
    /// # Errors
    ///
    /// The new name is in use, or the system refuses: with EPERM, EOPNOTSUPP or ENOSYS where files
    /// have one name only.
    fn link(&self, from: &str, to: &str) -> io::Result<()>;

    /// Removes a file.
    ///
    /// # Errors
    ///
    /// The file does not exist or cannot be removed.
    fn remove(&self, name: &str) -> io::Result<()>;

    /// Makes all names durable.
    ///
    /// # Errors
    ///
    /// Changes of names since the last success may not survive a crash.
    fn sync_dir(&self) -> io::Result<()>;

    /// Returns all names, in no particular order.
    ///
    /// # Errors
    ///
    /// The system's error.
    fn list(&self) -> io::Result<Vec<String>>;
}

/// One open file.
pub trait StoreFile: fmt::Debug + Send + Sync {
    /// Returns the file's length in bytes.
    ///
    /// # Errors
    ///
    /// The system's error.
    fn len(&self) -> io::Result<u64>;

    /// Returns whether the file is empty.
    ///
    /// # Errors
    ///
    /// The system's error.
    fn is_empty(&self) -> io::Result<bool> {
        Ok(self.len()? == 0)
    }

    /// Fills `buf` from byte `offset` on.
    ///
    /// # Errors
    ///
    /// `UnexpectedEof` if the file is shorter; or the bytes cannot be read.
    fn read_exact_at(&self, buf: &mut [u8], offset: u64) -> io::Result<()>;

    /// Hints that `len` bytes from byte `offset` on will be read soon. The default does nothing,
    /// for backends that gain nothing from it.
    fn will_read(&self, offset: u64, len: u64) {
        let _ = (offset, len);
    }

    /// Writes all of `bytes` at `offset`, growing the file if need be.
    ///
    /// # Errors
    ///
    /// The write failed; some of the bytes may be written.
    fn write_all_at(&self, bytes: &[u8], offset: u64) -> io::Result<()>;

    /// Writes the frames of `run` at `offset`, growing the file if need be. The default copies them
    /// first, 1 MiB at a time.
    ///
    /// # Errors
    ///
    /// A frame is not in guest memory, or the write failed; some of the frames may be written.
    fn write_guest_at(&self, ram: &GuestRam, run: FrameRun, offset: u64) -> io::Result<()> {
        let mut bytes = Vec::new();
        let mut at = offset;
        for piece in run.chunks(256) {
            bytes.resize(piece.bytes() as usize, 0);
            let read = ram.read_slice(&mut bytes, GuestAddress(piece.start.gpa()));
            read.map_err(io::Error::other)?;
            self.write_all_at(&bytes, at)?;
            at += piece.bytes();
        }
        Ok(())
    }

    /// Hints that `len` bytes from byte `offset` on will not be written again before a sync. The
    /// default does nothing, for backends that gain nothing from it.
    fn begin_writeback(&self, offset: u64, len: u64) {
        let _ = (offset, len);
    }

    /// Grows the file to `len` bytes, unless it is longer. Reserves the space for the new bytes if
    /// the file system can do so; they read as zeros. After an error, the file may be longer than
    /// before, with space for the additional bytes.
    ///
    /// # Errors
    ///
    /// No space, or the system refuses.
    fn allocate(&self, len: u64) -> io::Result<()>;

    /// Sets the file's length to `len` bytes. New bytes read as zeros and have no space.
    ///
    /// # Errors
    ///
    /// The system refuses.
    fn truncate(&self, len: u64) -> io::Result<()>;

    /// Makes the file's bytes and length durable.
    ///
    /// # Errors
    ///
    /// The bytes written since the last success count as lost.
    fn sync(&self) -> io::Result<()>;

    /// Sets this open file's lock on bytes `range`, replacing the one that it had there. Returns
    /// `false` if another open file's lock is in conflict; does not wait. Closing the file releases
    /// the lock. The bytes need not exist.
    ///
    /// # Errors
    ///
    /// The system's error; a conflict is not an error.
    fn lock_range(&self, range: Range<u64>, lock: RangeLock) -> io::Result<bool>;

    /// Returns a value that is unique to the file: a new file with the same name has another one.
    ///
    /// # Errors
    ///
    /// The system's error.
    fn identity(&self) -> io::Result<(u64, u64)>;
}

/// Returns whether a read failed because the disk cannot read the bytes. Any other error comes from
/// the system, and does not tell what is on the disk.
pub(super) fn is_media_error(e: &io::Error) -> bool {
    let errno = Errno::from_io_error(e);
    matches!(errno, Some(Errno::IO | Errno::BADMSG | Errno::UCLEAN | Errno::NODATA | Errno::ILSEQ))
}

/// Returns whether a link failed because the file system allows one name only, for all files or for
/// this one.
pub(super) fn has_no_links(e: &io::Error) -> bool {
    matches!(Errno::from_io_error(e), Some(Errno::PERM | Errno::OPNOTSUPP | Errno::NOSYS))
}
