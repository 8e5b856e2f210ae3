//! A disk's file: opening, measuring, locking, and making it durable.

use std::fs::{File, FileType, OpenOptions};
use std::io::{self, Seek, SeekFrom};
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;

use driftline_format::range_lock::RangeLock;
use driftline_guest::VmId;
use driftline_store::open_kind;
use rustix::fs::{Advice, FallocateFlags, fadvise, fallocate};

use super::error::DiskError;
use super::file_identity::{FileIdentity, identity_of};
use super::flusher::Flusher;
use super::identity;
use super::lock;
use super::request::SECTOR;
use crate::config::{DiskConfig, DiskIdentity, MAX_SERIAL_BYTES, OpenedFile};

/// An open disk.
#[derive(Debug)]
pub(super) struct DiskFile {
    file: File,
    path: PathBuf,
    readonly: bool,
    /// The guest for which the file is locked.
    holder: VmId,
    flusher: Arc<Flusher>,
}

/// Returns `bytes` and `block_bytes` of [`DiskConfig`] for the file at `path`: its size in bytes,
/// which is a multiple of a sector, and the size of its blocks. If the file does not consist of
/// whole blocks, the block size is that of a sector.
///
/// # Errors
///
/// The file cannot be opened, is empty, has a partial sector, or is neither a regular file nor a
/// block device.
pub fn probe(path: &Path, readonly: bool) -> Result<(u64, u32), DiskError> {
    let file = open(path, readonly)?;
    let block = identity::block_bytes(&file);
    match size(&file, path, readonly)? {
        0 => Err(DiskError::Empty { path: path.to_owned() }),
        bytes if bytes.is_multiple_of(block.into()) => Ok((bytes, block)),
        bytes if bytes.is_multiple_of(SECTOR) => Ok((bytes, SECTOR as u32)),
        bytes => Err(DiskError::Partial { path: path.to_owned(), bytes }),
    }
}

/// Returns the size of a disk whose file is open already, in bytes. A part of a sector at its end
/// is not counted.
///
/// # Errors
///
/// The size cannot be read.
pub fn probe_opened(file: &OpenedFile, path: &Path, readonly: bool) -> Result<u64, DiskError> {
    let bytes = size(file.file(), path, readonly)?;
    Ok(bytes - bytes % SECTOR)
}

pub(super) fn open(path: &Path, readonly: bool) -> Result<File, DiskError> {
    let failed = |cause| DiskError::Open { path: path.to_owned(), readonly, cause };
    let options = OpenOptions::new().read(true).write(!readonly).clone();
    let is_disk = |kind: &FileType| kind.is_file() || kind.is_block_device();
    let file = open_kind(path, &options, is_disk).map_err(failed)?;
    file.ok_or_else(|| DiskError::Kind { path: path.to_owned() })
}

/// Returns the size in bytes of a file or of a block device. A block device's metadata has no size,
/// so its end is sought. A regular file is not sought: that may wait for another process's flush of
/// it.
pub(super) fn size(mut file: &File, path: &Path, readonly: bool) -> Result<u64, DiskError> {
    let failed = |cause| DiskError::Open { path: path.to_owned(), readonly, cause };
    let metadata = file.metadata().map_err(failed)?;
    if metadata.is_file() {
        return Ok(metadata.len());
    }
    file.seek(SeekFrom::End(0)).map_err(failed)
}

/// Returns a serial number for a disk that is named by its file alone. It is Firecracker's: the
/// decimal numbers of the device that holds the file, of the device that the file is, and of its
/// inode, in one string.
///
/// # Errors
///
/// The file's metadata cannot be read.
pub fn file_serial(file: &File) -> io::Result<String> {
    let of = file.metadata()?;
    let mut serial = format!("{}{}{}", of.dev(), of.rdev(), of.ino());
    serial.truncate(MAX_SERIAL_BYTES);
    Ok(serial)
}

impl DiskFile {
    /// Opens the file of `disk` for the guest `holder`.
    ///
    /// # Errors
    ///
    /// The file is smaller than the guest knows it, is another disk, is in use by another guest, or
    /// cannot be opened.
    pub(super) fn open(disk: &DiskConfig, holder: VmId) -> Result<Self, DiskError> {
        Self::of(disk, holder, open(&disk.path, disk.readonly)?)
    }

    /// Like [`open`](Self::open), with a file that is open already. The lock on the file is shared
    /// with `opened`: it lasts until both are closed.
    pub(super) fn of_opened(
        disk: &DiskConfig,
        holder: VmId,
        opened: &OpenedFile,
    ) -> Result<Self, DiskError> {
        let DiskConfig { path, readonly, .. } = disk;
        let failed = |cause| DiskError::Open { path: path.clone(), readonly: *readonly, cause };
        Self::of(disk, holder, opened.file().try_clone().map_err(failed)?)
    }

    pub(super) fn of(disk: &DiskConfig, holder: VmId, file: File) -> Result<Self, DiskError> {
        let DiskConfig { id, path, readonly, bytes, .. } = disk;
        let has = size(&file, path, *readonly)?;
        if has < *bytes {
            let (id, path, want) = (id.clone(), path.clone(), *bytes);
            return Err(DiskError::TooSmall { id, path, want, has });
        }
        let flusher = Flusher::new(id, path, &file, *readonly)?;
        let file = Self { file, path: path.clone(), readonly: *readonly, holder, flusher };
        file.wait_for_lock(|| {
            let locked = lock::is_locked_by_another(&file.file, file.kind_of_lock(), holder)?;
            Ok(!locked)
        })?;
        file.require_identity(disk)
    }

    /// Refuses a file that is known to be another disk than the guest's.
    fn require_identity(self, disk: &DiskConfig) -> Result<Self, DiskError> {
        match (&disk.identity, self.disk_identity()) {
            (Some(theirs), Some(ours)) if theirs.differs(&ours) => {
                let (id, path, theirs) = (disk.id.clone(), self.path, theirs.clone());
                Err(DiskError::Another { id, path, theirs, ours })
            }
            _ => Ok(self),
        }
    }

    /// Returns the disk's identity, which is the same on every host.
    pub(super) fn disk_identity(&self) -> Option<DiskIdentity> {
        identity::of(&self.file)
    }

    /// Returns the path by which the file was opened.
    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    pub(super) fn file(&self) -> &File {
        &self.file
    }

    /// Returns the flusher, which makes the file durable while the guest runs.
    pub(super) fn flusher(&self) -> &Arc<Flusher> {
        &self.flusher
    }

    /// Returns the file's identity on this host.
    pub(super) fn identity(&self) -> io::Result<FileIdentity> {
        identity_of(&self.file)
    }

    fn kind_of_lock(&self) -> RangeLock {
        if self.readonly { RangeLock::Shared } else { RangeLock::Exclusive }
    }

    /// Locks the file against all others, or, if it is read-only, against writers.
    pub(super) fn lock(&self) -> Result<(), DiskError> {
        self.wait_for_lock(|| lock::set(&self.file, self.kind_of_lock(), self.holder))
    }

    fn wait_for_lock(&self, has_it: impl Fn() -> io::Result<bool>) -> Result<(), DiskError> {
        match lock::wait(&self.path, has_it) {
            Ok(true) => Ok(()),
            Ok(false) => Err(DiskError::InUse(self.path.clone())),
            Err(e) => Err(self.lock_error("locked")(e)),
        }
    }

    fn lock_error(&self, what: &'static str) -> impl Fn(io::Error) -> DiskError {
        move |cause| DiskError::Lock { path: self.path.clone(), what, cause }
    }

    /// Drops this host's cached pages of the file: another host may have written to it since.
    pub(super) fn drop_page_cache(&self) {
        if let Err(e) = fadvise(&self.file, 0, None, Advice::DontNeed) {
            tracing::warn!(
                "cached pages of \"{}\" cannot be dropped, and another host may have written to \
                 the file: {e}",
                self.path.display()
            );
        }
    }

    /// Makes all writes durable, then releases the lock. The lock is kept while the guest has not
    /// been told of lost data: another host does not know of it.
    ///
    /// The lock is released only once no flush of this host is in progress (I7): a flush that has
    /// begun may write blocks for as long as it lasts, over those of the next host.
    ///
    /// # Errors
    ///
    /// A flush is still in progress at `deadline`. It continues. Its thread keeps the open file and
    /// therefore the lock, even if this disk is dropped meanwhile.
    pub(super) fn flush_and_unlock(self: &Arc<Self>, deadline: Instant) -> Result<(), DiskError> {
        if !self.readonly {
            let begun = Instant::now();
            // A flush that began while the guest ran comes first.
            self.flusher.wait_until_idle(begun, deadline)?;
            let disk = self.clone();
            self.flusher.begin_on_own_file(move || disk.file.sync_data())?;
            self.flusher.wait_until_idle(begun, deadline)?;
            self.flusher.lost().map_or(Ok(()), Err)?;
        }
        self.unlock()
    }

    /// Waits for flushes under way. The system tells only one of the processes that have this open
    /// file that a write was lost, and the guest must be told.
    ///
    /// # Errors
    ///
    /// A flush is still in progress at `deadline`, or data is lost and the guest has not been told.
    pub(super) fn finish_flushes(&self, deadline: Instant) -> Result<(), DiskError> {
        self.flusher.wait_until_idle(Instant::now(), deadline)?;
        self.flusher.lost().map_or(Ok(()), Err)
    }

    /// Releases the lock for a guest that has not run here: there is nothing to make durable.
    pub(super) fn unlock(&self) -> Result<(), DiskError> {
        let unlocked = lock::set(&self.file, RangeLock::Free, self.holder);
        unlocked.map(drop).map_err(self.lock_error("unlocked"))
    }

    /// Returns the storage of `len` bytes from `offset` to the host. This is advice: a file that
    /// does not support it keeps its storage.
    pub(super) fn discard(&self, offset: u64, len: u64) -> io::Result<()> {
        let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        match fallocate(&self.file, flags, offset, len) {
            Err(rustix::io::Errno::OPNOTSUPP) => Ok(()),
            other => Ok(other?),
        }
    }

    /// Makes `len` bytes from `offset` read as zeros. They stay allocated unless `unmap`.
    pub(super) fn write_zeroes(&self, offset: u64, len: u64, unmap: bool) -> io::Result<()> {
        write_zeroes(&self.file, offset, len, unmap)
    }
}

/// See [`DiskFile::write_zeroes`].
pub(super) fn write_zeroes(file: &File, offset: u64, len: u64, unmap: bool) -> io::Result<()> {
    let how = if unmap { FallocateFlags::PUNCH_HOLE } else { FallocateFlags::ZERO_RANGE };
    match fallocate(file, how | FallocateFlags::KEEP_SIZE, offset, len) {
        Err(rustix::io::Errno::OPNOTSUPP) => write_zero_bytes(file, offset, len),
        other => Ok(other?),
    }
}

fn write_zero_bytes(file: &File, mut offset: u64, mut len: u64) -> io::Result<()> {
    use std::os::unix::fs::FileExt;
    static ZEROS: [u8; 64 << 10] = [0; 64 << 10];
    while len > 0 {
        let now = len.min(ZEROS.len() as u64);
        file.write_all_at(&ZEROS[..now as usize], offset)?;
        (offset, len) = (offset + now, len - now);
    }
    Ok(())
}
