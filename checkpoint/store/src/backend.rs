//! What a store needs of a disk, as a trait so that tests can lose power at any sync, and the
//! implementation over a directory.

use std::fmt;
use std::fs::{self, File, OpenOptions, TryLockError};
use std::io::{self, Read, Seek, Write};
use std::ops::Range;
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, Once};

use driftline_dirty_tracker::PAGE_SIZE;
use driftline_format::durable::{create_dir, sync_dir};
use nix::errno::Errno;
use nix::fcntl::{FallocateFlags, FcntlArg, PosixFadviseAdvice, fallocate, fcntl, posix_fadvise};
use nix::libc;

/// Name of the lock file in a store's directory.
pub const LOCK_FILE: &str = "lock";

/// Why a store could not be locked for writing.
#[derive(Debug)]
pub enum LockError {
    /// Another process, or another handle in this one, writes to it.
    Held {
        /// The holder's process id, if it could be read.
        pid: Option<u32>,
    },
    /// The lock itself failed.
    Io(io::Error),
}

/// A flat set of named files on something that keeps what was synced.
///
/// What it must promise: bytes of a file survive a crash once [`StoreFile::sync`] has returned; a
/// name (created, renamed or removed) once [`sync_dir`](Self::sync_dir) has returned; a rename
/// replaces atomically; of 512 bytes at a multiple of 512 all survive a crash that were written at
/// once, or none. Nothing else is relied upon: what was not synced may survive or not, names too,
/// in parts and in any order.
pub trait Backend: fmt::Debug + Send + Sync {
    /// Where it is, for messages.
    fn location(&self) -> &Path;

    /// Another one for the same files, without a lock.
    fn again(&self) -> io::Result<Box<dyn Backend>>;

    /// Excludes other writers until this backend is dropped.
    fn lock(&self) -> Result<(), LockError>;

    /// Whether the lock is still the one that other writers would meet: not if it, or the
    /// directory, was removed or replaced.
    fn is_locked(&self) -> io::Result<bool>;

    /// Creates an empty file, or empties an existing one; for reading and writing.
    fn create(&self, name: &str) -> io::Result<Box<dyn StoreFile>>;

    /// Creates an empty file, for reading and writing; `AlreadyExists` if one has that name.
    fn create_new(&self, name: &str) -> io::Result<Box<dyn StoreFile>>;

    /// Opens a file for reading.
    fn open(&self, name: &str) -> io::Result<Box<dyn StoreFile>>;

    /// Opens a file for reading and writing.
    fn open_for_writing(&self, name: &str) -> io::Result<Box<dyn StoreFile>>;

    /// Gives a file another name, replacing what had it.
    fn rename(&self, from: &str, to: &str) -> io::Result<()>;

    /// Gives a file a second name, which nothing has: its bytes stay for as long as either is
    /// there. Not durable before [`sync_dir`](Self::sync_dir). EPERM, EOPNOTSUPP or ENOSYS where
    /// files have one name only.
    fn link(&self, from: &str, to: &str) -> io::Result<()>;

    /// Removes a file.
    fn remove(&self, name: &str) -> io::Result<()>;

    /// Makes all names durable.
    fn sync_dir(&self) -> io::Result<()>;

    /// All names, in no order.
    fn list(&self) -> io::Result<Vec<String>>;
}

/// How a range of a file is locked.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum RangeLock {
    /// Others can share it, and none can have it alone. A file that is open for reading will do.
    Shared,
    /// Nobody else has a lock on any of it.
    Alone,
    /// Not at all.
    Free,
}

/// One open file.
pub trait StoreFile: fmt::Debug + Send + Sync {
    /// Its length in bytes.
    fn len(&self) -> io::Result<u64>;

    /// Whether it has no bytes.
    fn is_empty(&self) -> io::Result<bool> {
        Ok(self.len()? == 0)
    }

    /// Fills `buf` from byte `offset` on; `UnexpectedEof` where the file is shorter.
    fn read_exact_at(&self, buf: &mut [u8], offset: u64) -> io::Result<()>;

    /// `len` bytes from byte `offset` on are about to be read. A hint; does nothing, the default,
    /// where there is nothing to be gained.
    fn will_read(&self, offset: u64, len: u64) {
        let _ = (offset, len);
    }

    /// Writes all of `bytes` at `offset`, growing the file if need be.
    fn write_all_at(&self, bytes: &[u8], offset: u64) -> io::Result<()>;

    /// Makes the file `len` bytes long, unless it is longer, and has the space for what is new
    /// where the file system can say so beforehand. That reads as zeros. After an error the file
    /// may be longer than it was, with space for that.
    fn allocate(&self, len: u64) -> io::Result<()>;

    /// Cuts off what lies behind byte `len`.
    fn cut(&self, len: u64) -> io::Result<()>;

    /// Makes its bytes and length durable. After an error what was written since the last time
    /// counts as lost.
    fn sync(&self) -> io::Result<()>;

    /// Sets this open file's lock on bytes `range`, in place of what it had there; whether no other
    /// open file's stands against it. Does not wait. The lock goes with the open file; the bytes
    /// need not exist.
    fn lock_range(&self, range: Range<u64>, lock: RangeLock) -> io::Result<bool>;

    /// What tells the file from all others there are: another one under the same name has another.
    fn identity(&self) -> io::Result<(u64, u64)>;
}

/// Whether a read failed because the disk does not give its bytes back. Any other error is the
/// system's, and says nothing of what is on the disk.
pub(super) fn is_media_error(e: &io::Error) -> bool {
    let errno = e.raw_os_error();
    matches!(errno, Some(libc::EIO | libc::EBADMSG | libc::EUCLEAN | libc::ENODATA | libc::EILSEQ))
}

/// Whether a link failed because the file system gives a file one name only, or this one.
pub(super) fn has_no_links(e: &io::Error) -> bool {
    matches!(e.raw_os_error(), Some(libc::EPERM | libc::EOPNOTSUPP | libc::ENOSYS))
}

/// Files in a directory.
#[derive(Debug)]
pub struct DirBackend {
    dir: PathBuf,
    direct: bool,
    /// Keeps the flock.
    lock: Mutex<Option<File>>,
}

impl DirBackend {
    /// The directory `dir`, which must exist.
    pub fn open(dir: &Path) -> io::Result<Self> {
        if !fs::metadata(dir)?.is_dir() {
            return Err(io::ErrorKind::NotADirectory.into());
        }
        Ok(Self { dir: dir.to_owned(), direct: false, lock: Mutex::new(None) })
    }

    /// The directory `dir`, made durable level by level where it does not exist yet.
    pub fn create_or_open(dir: &Path) -> io::Result<Self> {
        create_dir(dir)?;
        Self::open(dir)
    }

    /// Has whole pages written past the host's page cache, if they lie at whole pages in memory,
    /// too: half of the processor's time for them
    /// (`cargo bench -p driftline-checkpoint --bench writes`), and what others have in that cache
    /// stays there. Files are refused on a file system that cannot do so.
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
        let direct = OpenOptions::new().write(true).custom_flags(libc::O_DIRECT).open(&path);
        let direct = direct.map_err(|e| match e.raw_os_error() {
            Some(libc::EINVAL) => io::Error::new(
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

    fn again(&self) -> io::Result<Box<dyn Backend>> {
        Ok(Box::new(Self::open(&self.dir)?))
    }

    fn lock(&self) -> Result<(), LockError> {
        let mut options = OpenOptions::new();
        let path = self.dir.join(LOCK_FILE);
        // Not truncated: until the lock is ours the holder's pid stands in it.
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
        *self.lock.lock().unwrap_or_else(std::sync::PoisonError::into_inner) = Some(file);
        Ok(())
    }

    fn is_locked(&self) -> io::Result<bool> {
        let lock = self.lock.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
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
        let (Ok(offset), Ok(len)) = (i64::try_from(offset), i64::try_from(len)) else { return };
        // Where it cannot be had, reading waits.
        _ = posix_fadvise(self, offset, len, PosixFadviseAdvice::POSIX_FADV_WILLNEED);
    }

    fn write_all_at(&self, bytes: &[u8], offset: u64) -> io::Result<()> {
        FileExt::write_all_at(self, bytes, offset)
    }

    fn allocate(&self, len: u64) -> io::Result<()> {
        let old = StoreFile::len(self)?;
        if len <= old {
            // No system call takes that for an answer.
            return Ok(());
        }
        let more = i64::try_from(len.saturating_sub(old)).map_err(|_| Errno::EFBIG)?;
        let from = i64::try_from(old).map_err(|_| Errno::EFBIG)?;
        loop {
            match fallocate(self, FallocateFlags::empty(), from, more) {
                Err(Errno::EINTR) => {}
                Err(Errno::EOPNOTSUPP | Errno::ENOSYS) => return self.set_len(len),
                result => return Ok(result?),
            }
        }
    }

    fn cut(&self, len: u64) -> io::Result<()> {
        self.set_len(len)
    }

    fn sync(&self) -> io::Result<()> {
        self.sync_data()
    }

    fn lock_range(&self, range: Range<u64>, lock: RangeLock) -> io::Result<bool> {
        let number = |n: u64| i64::try_from(n).map_err(|_| Errno::EOVERFLOW);
        let kind = match lock {
            RangeLock::Shared => libc::F_RDLCK,
            RangeLock::Alone => libc::F_WRLCK,
            RangeLock::Free => libc::F_UNLCK,
        };
        let lock = libc::flock {
            l_type: kind as libc::c_short,
            l_whence: libc::SEEK_SET as libc::c_short,
            l_start: number(range.start)?,
            // 0 would be all that follow.
            l_len: number(range.end.saturating_sub(range.start).max(1))?,
            l_pid: 0,
        };
        match fcntl(self, FcntlArg::F_OFD_SETLK(&lock)) {
            Ok(_) => Ok(true),
            Err(Errno::EAGAIN | Errno::EACCES) => Ok(false),
            Err(e) => Err(e.into()),
        }
    }

    fn identity(&self) -> io::Result<(u64, u64)> {
        let metadata = self.metadata()?;
        Ok((metadata.dev(), metadata.ino()))
    }
}

/// A file opened twice: the second time for what goes past the page cache, which the kernel keeps
/// in step.
#[derive(Debug)]
struct DirectFile {
    file: File,
    direct: File,
}

/// What direct I/O needs of an offset, a length and an address. Some disks need less.
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
                // A disk that needs more than this, or a file system that says so only now.
                Err(e) if e.raw_os_error() == Some(libc::EINVAL) => {
                    static SAID: Once = Once::new();
                    SAID.call_once(|| {
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

    fn cut(&self, len: u64) -> io::Result<()> {
        self.file.cut(len)
    }

    // Also of what went past the page cache: the disk has a cache of its own.
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
