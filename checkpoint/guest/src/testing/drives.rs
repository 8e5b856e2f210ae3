//! A drive of a [`MemoryGuest`](super::MemoryGuest): a file in memory that a test writes to as a
//! device would.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::SeqCst};

use driftline_dirty_tracker::{FrameRun, Gfn, NoMemory, Subscription, Tracker};
use parking_lot::{Condvar, Mutex, MutexGuard};
use rustix::fs::{FallocateFlags, MemfdFlags, fallocate, memfd_create};

use crate::blocks::block_layout;
use crate::copy_before_write::CopyBeforeWrite;
use crate::drive::{DriveCopy, DriveHead, GuestDrive};

/// A drive that exists until its last owner drops it.
#[derive(Debug)]
pub struct TestDisk {
    head: DriveHead,
    file: File,
    tracker: Arc<Tracker>,
    copy_before_write: Arc<CopyBeforeWrite>,
    /// Whether its guest is paused: no write is in progress, and none begins.
    paused: Mutex<bool>,
    resumed: Condvar,
    unreadable: AtomicBool,
    exchanged: AtomicBool,
    writes_left: AtomicU64,
}

impl TestDisk {
    /// Creates a drive of `bytes` zeros.
    ///
    /// # Errors
    ///
    /// The size is 0 or more than 4 PiB, or the host refuses the file.
    pub fn new(id: &str, bytes: u64) -> io::Result<Arc<Self>> {
        Self::with_head(DriveHead { id: id.to_owned(), bytes, readonly: false })
    }

    /// Creates a drive of `bytes` zeros that the guest cannot write to.
    ///
    /// # Errors
    ///
    /// As for [`new`](Self::new).
    pub fn read_only(id: &str, bytes: u64) -> io::Result<Arc<Self>> {
        Self::with_head(DriveHead { id: id.to_owned(), bytes, readonly: true })
    }

    fn with_head(head: DriveHead) -> io::Result<Arc<Self>> {
        let DriveHead { id, bytes, .. } = &head;
        let (id, bytes) = (id.as_str(), *bytes);
        let file = File::from(memfd_create(id, MemfdFlags::CLOEXEC)?);
        file.set_len(bytes)?;
        let tracker = Arc::new(Tracker::new(block_layout(bytes).map_err(io::Error::other)?));
        let (copy_before_write, paused, resumed) = Default::default();
        let (unreadable, exchanged) = Default::default();
        let writes_left = AtomicU64::new(u64::MAX);
        Ok(Arc::new(Self {
            head,
            file,
            tracker,
            copy_before_write,
            paused,
            resumed,
            unreadable,
            exchanged,
            writes_left,
        }))
    }

    fn lock_paused(&self) -> MutexGuard<'_, bool> {
        self.paused.lock()
    }

    pub(super) fn set_paused(&self, paused: bool) {
        self.copy_before_write.set_pausing(paused);
        *self.lock_paused() = paused;
        self.resumed.notify_all();
    }

    /// Changes the drive as a device does: saves, writes, marks. Waits while the guest is paused.
    fn change(
        &self,
        offset: u64,
        bytes: u64,
        how: impl FnOnce(&File) -> io::Result<()>,
    ) -> io::Result<()> {
        let mut in_progress = self.lock_paused();
        self.resumed.wait_while(&mut in_progress, |paused| *paused);
        self.copy_before_write.before_write(offset, bytes);
        let changed = how(&self.file);
        let (start, last) = (Gfn::containing(offset), Gfn::containing(offset + bytes - 1));
        let marked = self.tracker.mark(FrameRun { start, count: last.0 - start.0 + 1 });
        marked.map_err(io::Error::other)?;
        changed
    }

    /// Writes `bytes`, which must not be empty.
    ///
    /// # Errors
    ///
    /// The write failed, or lies outside the drive.
    pub fn write(&self, offset: u64, bytes: &[u8]) -> io::Result<()> {
        self.change(offset, bytes.len() as u64, |file| file.write_all_at(bytes, offset))
    }

    /// Makes `len` bytes zeros, which take no room.
    ///
    /// # Errors
    ///
    /// The host refuses, or the range lies outside the drive.
    pub fn discard(&self, offset: u64, len: u64) -> io::Result<()> {
        let how = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        self.change(offset, len, |file| Ok(fallocate(file, how, offset, len)?))
    }

    /// Returns its whole content.
    ///
    /// # Errors
    ///
    /// The file cannot be read.
    pub fn contents(&self) -> io::Result<Vec<u8>> {
        let mut contents = vec![0; self.head.bytes as usize];
        self.file.read_exact_at(&mut contents, 0)?;
        Ok(contents)
    }

    /// Reads from `offset` on, as much as `to` has room for.
    ///
    /// # Errors
    ///
    /// The file cannot be read, or is shorter.
    pub fn read(&self, offset: u64, to: &mut [u8]) -> io::Result<()> {
        self.file.read_exact_at(to, offset)
    }

    /// Sets whether reads through files opened from now on fail with EIO.
    pub fn fail_reads(&self, fail: bool) {
        self.unreadable.store(fail, SeqCst);
    }

    /// Makes it fail to open, as a drive whose file was replaced.
    pub fn exchange(&self) {
        self.exchanged.store(true, SeqCst);
    }

    /// Truncates its file to `bytes` without the guest noticing: bytes beyond cannot be read.
    /// Truncating it to its size again restores that part as zeros.
    ///
    /// # Errors
    ///
    /// The host refuses.
    pub fn truncate(&self, bytes: u64) -> io::Result<()> {
        self.file.set_len(bytes)
    }

    /// Makes the writes of a restore fail after the first `writes`.
    pub fn fail_writes_after(&self, writes: u64) {
        self.writes_left.store(writes, SeqCst);
    }

    /// Makes its guest release it, as for another host, or take it again.
    pub fn set_released(&self, released: bool) {
        match released {
            true => self.copy_before_write.release(),
            false => self.copy_before_write.acquire(),
        }
    }

    /// Returns its properties.
    pub fn head(&self) -> &DriveHead {
        &self.head
    }
}

/// A test's drive as a guest presents it, and as a restore fills it.
pub(super) struct TestDiskHandle(pub(super) Arc<TestDisk>);

impl GuestDrive for TestDiskHandle {
    fn head(&self) -> DriveHead {
        self.0.head.clone()
    }

    fn subscribe(&self, name: &str) -> Result<Option<Subscription>, NoMemory> {
        (!self.0.head.readonly).then(|| self.0.tracker.subscribe(name)).transpose()
    }

    fn open(&self) -> io::Result<File> {
        if self.0.exchanged.load(SeqCst) {
            return Err(io::Error::other("it has another file"));
        }
        match self.0.unreadable.load(SeqCst) {
            // Nothing is mapped at address 0.
            true => File::open("/proc/self/mem"),
            false => File::open(format!("/proc/self/fd/{}", self.0.file.as_raw_fd())),
        }
    }

    fn copy_before_write(&self) -> Option<Arc<CopyBeforeWrite>> {
        Some(self.0.copy_before_write.clone())
    }
}

impl DriveCopy for TestDiskHandle {
    fn write(&self, offset: u64, bytes: &[u8]) -> io::Result<()> {
        let left = |left: u64| left.checked_sub(1);
        if self.0.writes_left.fetch_update(SeqCst, SeqCst, left).is_err() {
            return Err(io::Error::from_raw_os_error(libc::EIO));
        }
        self.0.file.write_all_at(bytes, offset)
    }

    fn zero(&self, offset: u64, len: u64) -> io::Result<()> {
        let how = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        Ok(fallocate(&self.0.file, how, offset, len)?)
    }

    fn make_durable(&self) -> io::Result<()> {
        self.0.file.sync_data()
    }

    fn yield_to_guest(&self) -> io::Result<()> {
        Ok(())
    }

    fn keep(&self) {}
}
