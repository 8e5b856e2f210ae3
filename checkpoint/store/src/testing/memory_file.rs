//! An open file of a disk in memory.

use std::io;
use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::{Mutex, MutexGuard};
use rustix::io::Errno;

use crate::backend::{RangeLock, StoreFile};
use crate::testing::disk_state::{DiskOp, DiskState};

/// Upper bound on the time for which a sync waits. It is far above what a test needs: only a test
/// that has failed reaches it.
const STALL_LIMIT: Duration = Duration::from_secs(120);

/// An open file.
#[derive(Debug)]
pub(super) struct MemoryFile {
    pub(super) disk: Arc<Mutex<DiskState>>,
    pub(super) inode: usize,
    /// Number of this open file among all files opened.
    pub(super) number: u64,
}

impl MemoryFile {
    fn lock(&self) -> MutexGuard<'_, DiskState> {
        self.disk.lock()
    }

    fn changed(&self) -> u64 {
        self.lock().files[self.inode].changed()
    }
}

impl StoreFile for MemoryFile {
    fn len(&self) -> io::Result<u64> {
        Ok(self.lock().files[self.inode].bytes.len() as u64)
    }

    fn read_exact_at(&self, buf: &mut [u8], offset: u64) -> io::Result<()> {
        let mut disk = self.lock();
        disk.check(Some(DiskOp::Read))?;
        disk.check_read(self.inode, offset..offset + buf.len() as u64)?;
        let bytes = &disk.files[self.inode].bytes;
        let from = usize::try_from(offset).unwrap_or(usize::MAX);
        let there = bytes.get(from..from.saturating_add(buf.len()));
        buf.copy_from_slice(there.ok_or(io::ErrorKind::UnexpectedEof)?);
        Ok(())
    }

    fn write_all_at(&self, bytes: &[u8], offset: u64) -> io::Result<()> {
        let takes = self.lock().write_takes;
        std::thread::sleep(takes);
        let mut disk = self.lock();
        disk.check(Some(DiskOp::Write))?;
        disk.files[self.inode].write(bytes, offset as usize);
        Ok(())
    }

    /// Allocates as ext4 does: a full disk leaves the file with half of the requested space.
    fn allocate(&self, len: u64) -> io::Result<()> {
        let mut disk = self.lock();
        let checked = disk.check(Some(DiskOp::Allocate));
        let stopped = disk.stopped;
        let inode = &mut disk.files[self.inode];
        let more = (len as usize).saturating_sub(inode.bytes.len());
        let full =
            |e: &io::Error| matches!(Errno::from_io_error(e), Some(Errno::NOSPC | Errno::DQUOT));
        let got = match &checked {
            Ok(()) => more,
            Err(e) if full(e) && !stopped => more / 2 / 4096 * 4096,
            Err(_) => 0,
        };
        if got > 0 {
            inode.set_len(inode.bytes.len() + got);
        }
        checked
    }

    fn truncate(&self, len: u64) -> io::Result<()> {
        let mut disk = self.lock();
        disk.check(Some(DiskOp::Truncate))?;
        disk.files[self.inode].set_len(len as usize);
        Ok(())
    }

    /// Syncs what was written before the sync began; if it fails, that is lost. A disk that has
    /// stopped may have it or not.
    fn sync(&self) -> io::Result<()> {
        let changed = self.changed();
        std::thread::sleep(self.lock().sync_takes);
        let named = |disk: &DiskState, name: &String| disk.names.get(name) == Some(&self.inode);
        let stalled = |disk: &DiskState| {
            disk.stalled || disk.stalled_file.as_ref().is_some_and(|name| named(disk, name))
        };
        let since = Instant::now();
        while stalled(&self.lock()) {
            if since.elapsed() >= STALL_LIMIT {
                return Err(Errno::TIMEDOUT.into());
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        let mut disk = self.lock();
        let synced = disk.check(Some(DiskOp::Sync)).and_then(|()| disk.sync());
        if synced.is_ok() || !disk.stopped {
            disk.files[self.inode].end_sync(changed, synced.is_ok());
        }
        synced
    }

    fn lock_range(&self, range: Range<u64>, lock: RangeLock) -> io::Result<bool> {
        let mut disk = self.lock();
        disk.check(Some(DiskOp::Lock))?;
        Ok(disk.files[self.inode].lock_range(self.number, range, lock))
    }

    fn identity(&self) -> io::Result<(u64, u64)> {
        Ok((0, self.inode as u64))
    }
}

impl Drop for MemoryFile {
    fn drop(&mut self) {
        let number = self.number;
        self.lock().files[self.inode].unlock_all(number);
    }
}
