//! A disk's file that is created on this host, for a guest whose disks are copied along with it.
//!
//! A file with data in it is never overwritten. The file is removed again unless the guest stays.
//! While it is being filled it is locked for its guest, so that no second guest is copied into it.

use std::fs::{self, File, FileType, OpenOptions};
use std::io;
use std::os::fd::AsFd;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};

use driftline_format::durable::sync_dir;
use driftline_format::range_lock::RangeLock;
use driftline_guest::{DriveCopy, DriveHead, GuestError, VmId};
use driftline_store::open_kind;
use rustix::fs::SeekFrom;

use super::error::{CopyRefusal, DiskError, DiskListDefect};
use super::file::write_zeroes;
use super::file_identity::{is_named, require_name};
use super::lock;
use crate::config::{DiskConfig, MachineConfig, disks};

/// Creates a copy, still to be filled, for each of `drives`, at the path that `config` has for it
/// on this host. The list is hostile input. On an error none of the copies remains.
pub(crate) fn make_copies(
    guest: VmId,
    config: &MachineConfig,
    drives: &[DriveHead],
) -> Result<Vec<Box<dyn DriveCopy>>, GuestError> {
    let mut copies: Vec<Box<dyn DriveCopy>> = Vec::new();
    for (drive, i) in drives.iter().zip(0..) {
        let malformed =
            |defect: DiskListDefect| GuestError::malformed("the list of disks to copy", defect);
        let named = || drive.clone();
        let found = disks(&config.devices).find(|disk| disk.id == drive.id);
        let disk = found.ok_or_else(|| malformed(DiskListDefect::Foreign { drive: named() }))?;
        if (disk.bytes, disk.readonly) != (drive.bytes, drive.readonly) {
            return Err(malformed(DiskListDefect::Differs { drive: named() }));
        }
        if drives[..i].iter().any(|other| other.id == drive.id) {
            return Err(malformed(DiskListDefect::Twice { drive: named() }));
        }
        let made = IncomingDisk::make(disk, guest).map_err(|e| GuestError::System {
            what: "making copies of disks",
            cause: Box::new(e),
        })?;
        copies.push(Box::new(made));
    }
    Ok(copies)
}

/// A file that receives a copy; see the module.
#[derive(Debug)]
struct IncomingDisk {
    file: File,
    path: PathBuf,
    guest: VmId,
    before: PriorContent,
    keep: AtomicBool,
}

/// What was at the path before.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum PriorContent {
    Nothing,
    /// An empty or unwritten file of this many bytes.
    Room(u64),
}

impl IncomingDisk {
    fn make(disk: &DiskConfig, guest: VmId) -> Result<Self, DiskError> {
        Self::prepare(disk, guest).map_err(|cause| {
            let (id, path) = (disk.id.clone(), disk.path.clone());
            DiskError::NoCopy { id, path, cause }
        })
    }

    fn prepare(disk: &DiskConfig, guest: VmId) -> Result<Self, CopyRefusal> {
        let path = &disk.path;
        let failed = CopyRefusal::system;
        let opened = open(path).map_err(failed("creating it"))?;
        let (file, before) = opened.ok_or(CopyRefusal::NotRegular)?;
        // Until it is certain that the file is ours, a drop must leave it as it is.
        let made = Self { file, path: path.clone(), guest, before, keep: AtomicBool::new(true) };
        match lock::wait(path, || lock::set(&made.file, RangeLock::Exclusive, guest)) {
            Ok(true) => {}
            Ok(false) => return Err(CopyRefusal::InUse),
            // The file stays even if it was created here: another build may have locked it by now,
            // and an empty file does no harm.
            Err(e) => return Err(failed("locking it")(e)),
        }
        // Comes after the lock: the previous holder of the lock may have been filling the file.
        if let PriorContent::Room(bytes) = before {
            if has_data(&made.file).map_err(failed("searching it for data"))? {
                return Err(CopyRefusal::HasData);
            }
            if bytes > disk.bytes {
                return Err(CopyRefusal::TooLong { bytes, disk: disk.bytes });
            }
        }
        // The file may have been removed, and another created, since it was opened.
        if !is_named(&made.file, path).map_err(failed("reading its metadata"))? {
            return Err(CopyRefusal::Replaced);
        }
        made.keep.store(false, Ordering::Relaxed);
        made.file.set_len(disk.bytes).map_err(failed("setting its size"))?;
        // Data is not durable in a file whose size or name is not.
        made.file.sync_all().map_err(failed("making its size durable"))?;
        sync_dir(parent(path)).map_err(failed("making its name durable"))?;
        Ok(made)
    }

    fn remove(&self) -> io::Result<()> {
        match self.before {
            PriorContent::Nothing => {
                require_name(&self.file, &self.path)?;
                fs::remove_file(&self.path)?;
                sync_dir(parent(&self.path))
            }
            // The file keeps its allocated storage.
            PriorContent::Room(bytes) => {
                let len = self.file.metadata()?.len();
                if len > 0 {
                    write_zeroes(&self.file, 0, len, false)?;
                }
                self.file.set_len(bytes)
            }
        }
    }
}

impl DriveCopy for IncomingDisk {
    fn write(&self, offset: u64, bytes: &[u8]) -> io::Result<()> {
        self.file.write_all_at(bytes, offset)
    }

    fn zero(&self, offset: u64, len: u64) -> io::Result<()> {
        // Allocated storage that was there before is not given back.
        write_zeroes(&self.file, offset, len, self.before == PriorContent::Nothing)
    }

    fn make_durable(&self) -> io::Result<()> {
        self.file.sync_data()
    }

    fn yield_to_guest(&self) -> io::Result<()> {
        require_name(&self.file, &self.path)?;
        lock::set(&self.file, RangeLock::Free, self.guest).map(drop)
    }

    fn keep(&self) {
        self.keep.store(true, Ordering::Relaxed);
    }
}

impl Drop for IncomingDisk {
    fn drop(&mut self) {
        if self.keep.load(Ordering::Relaxed) {
            return;
        }
        if let Err(e) = self.remove() {
            tracing::warn!("the incomplete copy {} cannot be removed: {e}", self.path.display());
        }
    }
}

/// Opens the file at `path`, or creates it. Returns the file and what was there before; `None` if
/// it is not a regular file.
fn open(path: &Path) -> io::Result<Option<(File, PriorContent)>> {
    let mut options = OpenOptions::new();
    options.read(true).write(true);
    // No other user of this host may read a guest's disk.
    match options.clone().create_new(true).mode(0o600).open(path) {
        Err(e) if e.kind() == io::ErrorKind::AlreadyExists => {}
        made => return made.map(|file| Some((file, PriorContent::Nothing))),
    }
    let Some(file) = open_kind(path, &options, FileType::is_file)? else { return Ok(None) };
    let bytes = file.metadata()?.len();
    Ok(Some((file, PriorContent::Room(bytes))))
}

/// Returns whether anything was ever written to `file`, as far as its file system tells. If it does
/// not tell, a file counts as written if its length is not 0.
fn has_data(file: &File) -> io::Result<bool> {
    match rustix::fs::seek(file.as_fd(), SeekFrom::Data(0)) {
        Ok(_) => Ok(true),
        Err(rustix::io::Errno::NXIO) => Ok(false),
        Err(rustix::io::Errno::INVAL) => Ok(file.metadata()?.len() > 0),
        Err(e) => Err(e.into()),
    }
}

fn parent(path: &Path) -> &Path {
    path.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::MetadataExt;

    use super::*;
    use crate::testing::{disk, fail_locks};

    const BYTES: u64 = 1 << 20;

    fn make(path: &Path, guest: VmId) -> Result<IncomingDisk, DiskError> {
        IncomingDisk::make(&disk("d", path, BYTES), guest)
    }

    #[test]
    fn dropped_copy_is_removed_unless_kept() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("copy");
        let guest = VmId::random();
        let made = make(&path, guest).unwrap();
        made.write(4096, &[7; 8192]).unwrap();
        made.zero(8192, 4096).unwrap();
        assert_eq!(path.metadata().unwrap().mode() & 0o777, 0o600);
        drop(made);
        assert!(!path.exists());
        let made = make(&path, guest).unwrap();
        made.write(4096, &[7; 8192]).unwrap();
        made.zero(8192, 4096).unwrap();
        made.make_durable().unwrap();
        made.keep();
        drop(made);
        let content = fs::read(&path).unwrap();
        assert_eq!(content.len() as u64, BYTES);
        assert!(content[4096..8192].iter().all(|b| *b == 7));
        assert!(content[8192..].iter().chain(&content[..4096]).all(|b| *b == 0));
    }

    #[test]
    fn allocated_storage_is_used_and_data_never_overwritten() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("room");
        let guest = VmId::random();
        for bytes in [0, 4096, BYTES] {
            File::create(&path).unwrap().set_len(bytes).unwrap();
            let made = make(&path, guest).unwrap();
            made.write(0, &[1; 4096]).unwrap();
            drop(made);
            let left = fs::read(&path).unwrap();
            assert_eq!(left, vec![0; bytes as usize], "as it was before");
        }
        let file = File::create(&path).unwrap();
        let flags = rustix::fs::FallocateFlags::empty();
        rustix::fs::fallocate(&file, flags, 0, BYTES).unwrap();
        let room = file.metadata().unwrap().blocks();
        let made = make(&path, guest).unwrap();
        made.write(0, &[1; 8192]).unwrap();
        made.zero(0, BYTES).unwrap();
        assert!(file.metadata().unwrap().blocks() >= room, "it keeps its room");
        drop(made);
        assert!(file.metadata().unwrap().blocks() >= room, "and gets it back");
        assert!(!has_data(&file).unwrap());
        File::create(&path).unwrap().set_len(BYTES + 512).unwrap();
        let error = make(&path, guest).unwrap_err().to_string();
        assert!(
            error.contains("a file of 1049088 bytes, and the disk has only 1048576"),
            "{error}"
        );
        fs::write(&path, "precious").unwrap();
        let error = make(&path, guest).unwrap_err().to_string();
        let why = "disk \"d\" cannot be copied to \"";
        assert!(error.starts_with(why) && error.contains("a file with data in it"), "{error}");
        assert_eq!(fs::read(&path).unwrap(), b"precious");
        assert!(
            make(dir.path(), guest).unwrap_err().to_string().contains("it is not a regular file")
        );
        let none = dir.path().join("none/copy");
        assert!(
            make(&none, guest)
                .unwrap_err()
                .to_string()
                .contains("creating it failed: No such file")
        );
    }

    #[test]
    fn file_that_cannot_be_locked_stays() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("copy");
        let guest = VmId::random();
        let unlocked = || {
            fail_locks().unwrap();
            make(&path, guest).unwrap_err().to_string()
        };
        let error = std::thread::scope(|scope| scope.spawn(unlocked).join().unwrap());
        assert!(error.contains("locking it failed: No locks available"), "{error}");
        assert_eq!(path.metadata().unwrap().len(), 0, "another build may have it");
        make(&path, guest).unwrap().write(0, &[7; 4096]).unwrap();
        assert_eq!(path.metadata().unwrap().len(), 0, "as it was before");
    }

    #[test]
    fn one_guest_at_a_time_fills_a_file() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("copy");
        let (one, other) = (VmId::random(), VmId::random());
        let made = make(&path, one).unwrap();
        for guest in [one, other] {
            let error = make(&path, guest).unwrap_err().to_string();
            assert!(error.contains("it is in use by another"), "{error}");
        }
        assert!(path.exists());
        made.yield_to_guest().unwrap();
        let guests = File::options().read(true).write(true).open(&path).unwrap();
        assert!(lock::set(&guests, RangeLock::Exclusive, one).unwrap());
        drop(made);
        assert!(!path.exists());
    }
}
