//! The interface between a store and its disk. It is a trait so that tests can lose power at any
//! sync; this file also has the implementation over a directory.

use std::fmt;
use std::fs::{self, File, OpenOptions, TryLockError};
use std::io::{self, Read, Seek, Write};
use std::num::NonZeroU64;
use std::ops::Range;
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Once;

use driftline_dirty_tracker::{FrameRun, PAGE_SIZE};
use driftline_format::durable::{create_dir, sync_dir};
pub use driftline_format::range_lock::RangeLock;
use driftline_format::{range_lock, range_write};
use driftline_guest::GuestRam;
use parking_lot::Mutex;
use rustix::fs::{Advice, FallocateFlags, OFlags, fadvise, fallocate};
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

/// A backend over the files of a directory.
#[derive(Debug)]
pub struct DirBackend {
    dir: PathBuf,
    direct: bool,
    /// Open lock file, which holds the flock.
    lock: Mutex<Option<File>>,
}

impl DirBackend {
    /// Opens the directory `dir`, which must exist.
    ///
    /// # Errors
    ///
    /// `dir` does not exist or is not a directory.
    pub fn open(dir: &Path) -> io::Result<Self> {
        if !fs::metadata(dir)?.is_dir() {
            return Err(io::ErrorKind::NotADirectory.into());
        }
        Ok(Self { dir: dir.to_owned(), direct: false, lock: Mutex::new(None) })
    }

    /// Opens the directory `dir`; creates it, durably and level by level, if it does not exist.
    ///
    /// # Errors
    ///
    /// `dir` cannot be created, or is not a directory.
    pub fn create_or_open(dir: &Path) -> io::Result<Self> {
        create_dir(dir)?;
        Self::open(dir)
    }

    /// Writes whole pages past the host's page cache if they are aligned to pages in memory, too.
    /// That halves their processor time (`cargo bench -p driftline-store --bench writes`), and
    /// does not evict other data from the page cache. Opening a file fails on a file system that
    /// does not support this.
    pub fn direct(mut self) -> Self {
        self.direct = true;
        self
    }

    fn opened(&self, name: &str, options: &OpenOptions) -> io::Result<Box<dyn StoreFile>> {
        let path = self.dir.join(name);
        let file = options.open(&path)?;
        if !self.direct {
            return Ok(Box::new(file));
        }
        let flags = OFlags::DIRECT.bits().cast_signed();
        let direct = OpenOptions::new().write(true).custom_flags(flags).open(&path);
        let direct = direct.map_err(|e| match Errno::from_io_error(&e) {
            Some(Errno::INVAL) => io::Error::new(
                io::ErrorKind::Unsupported,
                "its file system cannot be written to past the page cache (direct I/O)",
            ),
            _ => e,
        })?;
        Ok(Box::new(DirectFile { file, direct }))
    }
}

impl Backend for DirBackend {
    fn location(&self) -> &Path {
        &self.dir
    }

    fn reopen(&self) -> io::Result<Box<dyn Backend>> {
        Ok(Box::new(Self::open(&self.dir)?))
    }

    fn lock(&self) -> Result<(), LockError> {
        let mut options = OpenOptions::new();
        let path = self.dir.join(LOCK_FILE);
        // Not truncated: until this process has the lock, the file has the holder's pid.
        let options = options.read(true).write(true).create(true).truncate(false);
        let mut file = options.open(path).map_err(LockError::Io)?;
        match file.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => {
                let mut text = String::new();
                let pid = file.take(32).read_to_string(&mut text).ok();
                return Err(LockError::Held { pid: pid.and_then(|_| text.trim().parse().ok()) });
            }
            Err(TryLockError::Error(e)) => return Err(LockError::Io(e)),
        }
        let written = file
            .set_len(0)
            .and_then(|()| file.rewind())
            .and_then(|()| writeln!(file, "{}", std::process::id()));
        written.map_err(LockError::Io)?;
        *self.lock.lock() = Some(file);
        Ok(())
    }

    fn is_locked(&self) -> io::Result<bool> {
        let lock = self.lock.lock();
        let Some(file) = &*lock else { return Ok(false) };
        let held = file.metadata()?;
        match fs::metadata(self.dir.join(LOCK_FILE)) {
            Ok(there) => Ok((held.dev(), held.ino()) == (there.dev(), there.ino())),
            Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(false),
            Err(e) => Err(e),
        }
    }

    fn create(&self, name: &str) -> io::Result<Box<dyn StoreFile>> {
        let mut options = OpenOptions::new();
        self.opened(name, options.read(true).write(true).create(true).truncate(true))
    }

    fn create_new(&self, name: &str) -> io::Result<Box<dyn StoreFile>> {
        self.opened(name, OpenOptions::new().read(true).write(true).create_new(true))
    }

    fn open(&self, name: &str) -> io::Result<Box<dyn StoreFile>> {
        Ok(Box::new(File::open(self.dir.join(name))?))
    }

    fn open_for_writing(&self, name: &str) -> io::Result<Box<dyn StoreFile>> {
        self.opened(name, OpenOptions::new().read(true).write(true))
    }

    fn rename(&self, from: &str, to: &str) -> io::Result<()> {
        fs::rename(self.dir.join(from), self.dir.join(to))
    }

    fn link(&self, from: &str, to: &str) -> io::Result<()> {
        fs::hard_link(self.dir.join(from), self.dir.join(to))
    }

    fn remove(&self, name: &str) -> io::Result<()> {
        fs::remove_file(self.dir.join(name))
    }

    fn sync_dir(&self) -> io::Result<()> {
        sync_dir(&self.dir)
    }

    fn list(&self) -> io::Result<Vec<String>> {
        let name = |e: io::Result<fs::DirEntry>| Ok(e?.file_name().to_string_lossy().into_owned());
        fs::read_dir(&self.dir)?.map(name).collect()
    }
}

impl StoreFile for File {
    fn len(&self) -> io::Result<u64> {
        Ok(self.metadata()?.len())
    }

    fn read_exact_at(&self, buf: &mut [u8], offset: u64) -> io::Result<()> {
        FileExt::read_exact_at(self, buf, offset)
    }

    fn will_read(&self, offset: u64, len: u64) {
        // A length of 0 would mean the whole file. Without this hint, the read itself waits.
        let Some(len) = NonZeroU64::new(len) else { return };
        _ = fadvise(self, offset, Some(len), Advice::WillNeed);
    }

    fn write_all_at(&self, bytes: &[u8], offset: u64) -> io::Result<()> {
        FileExt::write_all_at(self, bytes, offset)
    }

    fn write_guest_at(&self, ram: &GuestRam, run: FrameRun, offset: u64) -> io::Result<()> {
        range_write::write_guest_at(self, ram, run, offset)
    }

    fn begin_writeback(&self, offset: u64, len: u64) {
        range_write::begin_writeback(self, offset, len);
    }

    fn allocate(&self, len: u64) -> io::Result<()> {
        let old = StoreFile::len(self)?;
        if len <= old {
            // No system call accepts a length of 0.
            return Ok(());
        }
        loop {
            match fallocate(self, FallocateFlags::empty(), old, len - old) {
                Err(Errno::INTR) => {}
                Err(Errno::OPNOTSUPP | Errno::NOSYS) => return self.set_len(len),
                result => return Ok(result?),
            }
        }
    }

    fn truncate(&self, len: u64) -> io::Result<()> {
        self.set_len(len)
    }

    fn sync(&self) -> io::Result<()> {
        self.sync_data()
    }

    fn lock_range(&self, range: Range<u64>, lock: RangeLock) -> io::Result<bool> {
        range_lock::set(self, range, lock)
    }

    fn identity(&self) -> io::Result<(u64, u64)> {
        let metadata = self.metadata()?;
        Ok((metadata.dev(), metadata.ino()))
    }
}

/// A file opened twice: the second descriptor writes past the page cache, which the kernel keeps
/// coherent.
#[derive(Debug)]
struct DirectFile {
    file: File,
    direct: File,
}

/// Alignment of offset, length and address for direct I/O, in bytes. Some disks need less.
const DIRECT_ALIGN: u64 = PAGE_SIZE;

impl StoreFile for DirectFile {
    fn len(&self) -> io::Result<u64> {
        StoreFile::len(&self.file)
    }

    fn read_exact_at(&self, buf: &mut [u8], offset: u64) -> io::Result<()> {
        StoreFile::read_exact_at(&self.file, buf, offset)
    }

    fn write_all_at(&self, bytes: &[u8], offset: u64) -> io::Result<()> {
        let all = [bytes.as_ptr().addr() as u64, bytes.len() as u64, offset];
        if all.iter().all(|n| n.is_multiple_of(DIRECT_ALIGN)) {
            match StoreFile::write_all_at(&self.direct, bytes, offset) {
                // The disk needs a larger alignment, or the file system reports only now that it
                // has no direct I/O.
                Err(e) if Errno::from_io_error(&e) == Some(Errno::INVAL) => {
                    static WARNED: Once = Once::new();
                    WARNED.call_once(|| {
                        tracing::warn!("direct I/O is refused: writing through the page cache");
                    });
                }
                other => return other,
            }
        }
        StoreFile::write_all_at(&self.file, bytes, offset)
    }

    fn allocate(&self, len: u64) -> io::Result<()> {
        self.file.allocate(len)
    }

    fn truncate(&self, len: u64) -> io::Result<()> {
        self.file.truncate(len)
    }

    fn will_read(&self, offset: u64, len: u64) {
        self.file.will_read(offset, len);
    }

    // Direct writes need it as well: the disk has a cache of its own.
    fn sync(&self) -> io::Result<()> {
        self.file.sync()
    }

    fn lock_range(&self, range: Range<u64>, lock: RangeLock) -> io::Result<bool> {
        self.file.lock_range(range, lock)
    }

    fn identity(&self) -> io::Result<(u64, u64)> {
        self.file.identity()
    }
}
