//! A store's files in a directory.

use std::fs::{self, File, OpenOptions, TryLockError};
use std::io::{self, Read, Seek, Write};
use std::num::NonZeroU64;
use std::ops::Range;
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Once;

use driftline_dirty_tracker::{FrameRun, PAGE_SIZE};
use driftline_format::durable::{create_dir, sync_dir};
use driftline_format::{range_lock, range_write};
use driftline_guest::GuestRam;
use parking_lot::Mutex;
use rustix::fs::{Advice, FallocateFlags, OFlags, fadvise, fallocate};
use rustix::io::Errno;

use crate::backend::{Backend, LOCK_FILE, LockError, RangeLock, StoreFile};

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
