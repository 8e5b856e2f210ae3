//! A disk in memory that loses what was not synced, and fails on request.

use std::io;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use driftline_guest::testing::mix;
use parking_lot::{Mutex, MutexGuard};

use crate::backend::{Backend, LockError, StoreFile};
use crate::testing::disk_state::{
    DiskFault, DiskOp, DiskState, NameChange, UnreadableRange, apply,
};
use crate::testing::inode::Inode;
use crate::testing::memory_file::MemoryFile;

/// What a crash leaves of the changes that were not synced. Synced changes always survive.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Survives {
    /// Nothing.
    Nothing,
    /// Everything: all of it had reached the disk before the crash.
    Everything,
    /// Each sector and each change of a name survives or not, as this seed decides.
    Torn(u64),
    /// This number of the sectors that were written first, file by file, and all changes of names.
    First(u64),
}

/// A [`Backend`] for tests. Clones are the same disk. Does not exclude a second writer.
#[derive(Clone, Debug)]
pub struct MemoryDisk {
    disk: Arc<Mutex<DiskState>>,
    location: PathBuf,
}

impl Default for MemoryDisk {
    fn default() -> Self {
        Self { disk: Arc::default(), location: PathBuf::from("/memory-disk") }
    }
}

impl MemoryDisk {
    fn lock(&self) -> MutexGuard<'_, DiskState> {
        self.disk.lock()
    }

    /// Stops the disk at sync number `n` (of files and directory, counted together from 0). This
    /// sync and every later operation fail, and have no effect that a crash would keep.
    pub fn stop_at_sync(&self, n: u64) {
        self.lock().stop_at = Some(n);
    }

    /// Returns the number of syncs so far, which is the number of the next one.
    pub fn syncs(&self) -> u64 {
        self.lock().syncs
    }

    /// Returns whether the disk has stopped.
    pub fn is_stopped(&self) -> bool {
        self.lock().stopped
    }

    /// Makes `op` fail with `errno` after `after` more successes, until [`heal`](Self::heal).
    pub fn fail(&self, op: DiskOp, errno: i32, after: u32) {
        self.set_fault(DiskFault { op, errno: Some(errno), after });
    }

    /// Makes the thread that does `op` panic, once, after `after` more successes.
    pub fn panic_at(&self, op: DiskOp, after: u32) {
        self.set_fault(DiskFault { op, errno: None, after });
    }

    fn set_fault(&self, fault: DiskFault) {
        let mut disk = self.lock();
        disk.faults.retain(|other| other.op != fault.op);
        disk.faults.push(fault);
    }

    /// Makes reads of any of these bytes of a file fail with EIO, after `after` more successful
    /// ones, until [`heal`](Self::heal).
    ///
    /// # Errors
    ///
    /// There is no such file.
    pub fn fail_reads(&self, name: &str, range: Range<u64>, after: u32) -> io::Result<()> {
        let mut disk = self.lock();
        let inode = disk.find(name)?;
        disk.bad.push(UnreadableRange { inode, range, after });
        Ok(())
    }

    /// Returns the number of reads that [`fail_reads`](Self::fail_reads) has failed.
    pub fn failed_reads(&self) -> u64 {
        self.lock().bad_reads
    }

    /// Makes syncs of files wait, until this is called with `false`. A sync that has waited for two
    /// minutes fails, so that a test that panics meanwhile does not hang.
    pub fn stall_syncs(&self, stalled: bool) {
        let mut disk = self.lock();
        (disk.stalled, disk.stalled_file) = (stalled, None);
    }

    /// Makes syncs of the file with this name wait, until [`stall_syncs`](Self::stall_syncs) is
    /// called with `false`.
    pub fn stall_syncs_of(&self, name: &str) {
        self.lock().stalled_file = Some(name.to_owned());
    }

    /// Sets the duration of each sync of a file.
    pub fn slow_syncs(&self, each: Duration) {
        self.lock().sync_takes = each;
    }

    /// Sets the duration of each write to a file.
    pub fn slow_writes(&self, each: Duration) {
        self.lock().write_takes = each;
    }

    /// Takes the store's lock from its holder; it can be locked again.
    pub fn take_lock_away(&self) {
        self.lock().lock_is_lost = true;
    }

    /// Ends all failures.
    pub fn heal(&self) {
        let mut disk = self.lock();
        disk.faults.clear();
        disk.bad.clear();
        (disk.stop_at, disk.stopped) = (None, false);
    }

    /// Returns another disk, with what a crash at this moment would leave of this one.
    pub fn crash(&self, survives: Survives) -> Self {
        let disk = self.lock();
        let mut coin = match survives {
            Survives::Torn(seed) => mix(seed ^ 0x5eed),
            _ => 0,
        };
        let mut left = match survives {
            Survives::First(sectors) => sectors,
            _ => 0,
        };
        let mut keep = |of: u64| {
            coin = mix(coin.wrapping_add(0x9e37_79b9_7f4a_7c15));
            match survives {
                Survives::Nothing => 0,
                Survives::Everything => of,
                Survives::Torn(_) => coin % (of + 1),
                Survives::First(_) => {
                    let kept = left.min(of);
                    left -= kept;
                    kept
                }
            }
        };
        let mut after = DiskState { names: disk.synced_names.clone(), ..DiskState::default() };
        for op in &disk.renamed {
            if matches!(survives, Survives::First(_)) || keep(1) == 1 {
                apply(&mut after.names, op);
            }
        }
        after.synced_names = after.names.clone();
        for inode in &disk.files {
            after.files.push(Inode::of(inode.after_crash(&mut keep)));
        }
        Self { disk: Arc::new(Mutex::new(after)), location: self.location.clone() }
    }

    /// Returns another disk in the state of this one: a crash of it may lose what a crash of this
    /// one may.
    pub fn copy(&self) -> Self {
        let disk = self.lock();
        let after = DiskState {
            names: disk.names.clone(),
            synced_names: disk.synced_names.clone(),
            renamed: disk.renamed.clone(),
            files: disk.files.clone(),
            syncs: disk.syncs,
            ..DiskState::default()
        };
        Self { disk: Arc::new(Mutex::new(after)), location: self.location.clone() }
    }

    /// Returns the number of sectors written, and of lengths set, since their files were last
    /// synced.
    pub fn unsynced_sectors(&self) -> u64 {
        self.lock().files.iter().map(Inode::unsynced).sum()
    }

    /// Returns the names of all files.
    pub fn names(&self) -> Vec<String> {
        self.lock().names.keys().cloned().collect()
    }

    /// Returns a file's bytes.
    ///
    /// # Errors
    ///
    /// There is no such file.
    pub fn contents(&self, name: &str) -> io::Result<Vec<u8>> {
        let disk = self.lock();
        Ok(disk.files[disk.find(name)?].bytes.clone())
    }

    /// Replaces a file's bytes, or creates the file; durable immediately.
    pub fn put(&self, name: &str, bytes: Vec<u8>) {
        let mut disk = self.lock();
        let inode = disk.files.len();
        disk.files.push(Inode::of(bytes));
        disk.names.insert(name.to_owned(), inode);
        disk.synced_names.insert(name.to_owned(), inode);
    }

    fn file(&self, disk: &mut DiskState, inode: usize) -> Box<dyn StoreFile> {
        disk.opened += 1;
        Box::new(MemoryFile { disk: self.disk.clone(), inode, number: disk.opened })
    }
}

impl Backend for MemoryDisk {
    fn location(&self) -> &Path {
        &self.location
    }

    fn reopen(&self) -> io::Result<Box<dyn Backend>> {
        Ok(Box::new(self.clone()))
    }

    fn lock(&self) -> Result<(), LockError> {
        MemoryDisk::lock(self).lock_is_lost = false;
        Ok(())
    }

    fn is_locked(&self) -> io::Result<bool> {
        Ok(!MemoryDisk::lock(self).lock_is_lost)
    }

    fn create(&self, name: &str) -> io::Result<Box<dyn StoreFile>> {
        let mut disk = MemoryDisk::lock(self);
        disk.check(Some(DiskOp::Create))?;
        let inode = disk.files.len();
        disk.files.push(Inode::default());
        disk.rename(NameChange::Set(name.to_owned(), inode));
        Ok(self.file(&mut disk, inode))
    }

    fn create_new(&self, name: &str) -> io::Result<Box<dyn StoreFile>> {
        if MemoryDisk::lock(self).find(name).is_ok() {
            return Err(io::ErrorKind::AlreadyExists.into());
        }
        self.create(name)
    }

    fn open(&self, name: &str) -> io::Result<Box<dyn StoreFile>> {
        let mut disk = MemoryDisk::lock(self);
        disk.check(None)?;
        let inode = disk.find(name)?;
        Ok(self.file(&mut disk, inode))
    }

    fn open_for_writing(&self, name: &str) -> io::Result<Box<dyn StoreFile>> {
        self.open(name)
    }

    fn rename(&self, from: &str, to: &str) -> io::Result<()> {
        let mut disk = MemoryDisk::lock(self);
        disk.check(Some(DiskOp::Rename))?;
        disk.find(from)?;
        disk.rename(NameChange::Rename(from.to_owned(), to.to_owned()));
        disk.check(Some(DiskOp::Renamed))
    }

    fn link(&self, from: &str, to: &str) -> io::Result<()> {
        let mut disk = MemoryDisk::lock(self);
        disk.check(Some(DiskOp::Link))?;
        let inode = disk.find(from)?;
        disk.rename(NameChange::Set(to.to_owned(), inode));
        Ok(())
    }

    fn remove(&self, name: &str) -> io::Result<()> {
        let mut disk = MemoryDisk::lock(self);
        disk.check(None)?;
        disk.find(name)?;
        disk.rename(NameChange::Remove(name.to_owned()));
        Ok(())
    }

    fn sync_dir(&self) -> io::Result<()> {
        let mut disk = MemoryDisk::lock(self);
        disk.check(Some(DiskOp::SyncDir))?;
        disk.sync()?;
        disk.synced_names = disk.names.clone();
        disk.renamed.clear();
        Ok(())
    }

    fn list(&self) -> io::Result<Vec<String>> {
        let mut disk = MemoryDisk::lock(self);
        disk.check(None)?;
        Ok(disk.names.keys().cloned().collect())
    }
}
