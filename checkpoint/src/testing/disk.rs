//! A disk in memory that forgets what was not synced, and fails on request.

use std::collections::BTreeMap;
use std::io;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use super::pages::mix;
use crate::{Backend, LockError, RangeLock, StoreFile};

/// The unit in which a write may tear.
const SECTOR: usize = 512;

/// What survives a crash of what was not synced. What was synced always does.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Survives {
    /// Nothing.
    Nothing,
    /// Everything: all of it had got to the disk by itself.
    Everything,
    /// Each sector or not, and the first few of the changes of names, as this seed decides.
    Torn(u64),
    /// So many sectors that were written first, file by file, and all changes of names.
    First(u64),
}

/// An operation of the disk that a test can make fail.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum DiskOp {
    /// `Backend::create`
    Create,
    /// `StoreFile::write_all_at`
    Write,
    /// `StoreFile::sync`
    Sync,
    /// `Backend::rename`
    Rename,
    /// `Backend::sync_dir`
    SyncDir,
    /// `StoreFile::read_exact_at`
    Read,
    /// `StoreFile::allocate`
    Allocate,
    /// `StoreFile::cut`
    Cut,
    /// `StoreFile::lock_range`
    Lock,
}

/// A [`Backend`] for tests. Clones are the same disk. Does not exclude a second writer.
#[derive(Clone, Debug)]
pub struct MemoryDisk {
    disk: Arc<Mutex<Disk>>,
    location: PathBuf,
}

#[derive(Debug, Default)]
struct Disk {
    names: BTreeMap<String, usize>,
    synced_names: BTreeMap<String, usize>,
    /// Changes of names since the last sync of the directory.
    renamed: Vec<NameOp>,
    files: Vec<Inode>,
    syncs: u64,
    stop_at: Option<u64>,
    stopped: bool,
    fault: Option<Fault>,
    /// Files opened so far.
    opened: u64,
    /// Syncs of files wait until this is over.
    held: bool,
    /// How long each takes.
    sync_takes: Duration,
}

#[derive(Clone, Debug)]
enum NameOp {
    Set(String, usize),
    Rename(String, String),
    Remove(String),
}

#[derive(Clone, Debug, Default)]
struct Inode {
    bytes: Vec<u8>,
    synced: Vec<u8>,
    /// What was done since the last sync.
    changes: Vec<Change>,
    locks: Vec<Locked>,
}

#[derive(Clone, Debug)]
enum Change {
    /// Of so many bytes at an offset: these.
    Write(usize, Vec<u8>),
    /// It got this length.
    Len(usize),
}

/// A lock on bytes, by the number of the open file that has it.
#[derive(Clone, Debug)]
struct Locked {
    by: u64,
    range: Range<u64>,
    alone: bool,
}

impl Inode {
    fn of(bytes: Vec<u8>) -> Self {
        Self { synced: bytes.clone(), bytes, ..Self::default() }
    }

    /// What a crash leaves of it; `keep` says how many of so many do.
    fn after_crash(&self, keep: &mut impl FnMut(u64) -> u64) -> Vec<u8> {
        let mut bytes = self.synced.clone();
        for change in &self.changes {
            match change {
                Change::Len(len) if keep(1) == 1 => bytes.resize(*len, 0),
                Change::Len(_) => {}
                Change::Write(offset, written) => {
                    for (n, sector) in written.chunks(SECTOR).enumerate() {
                        let from = offset + n * SECTOR;
                        if keep(1) == 1 {
                            let to = from + sector.len();
                            bytes.resize(bytes.len().max(to), 0);
                            bytes[from..to].copy_from_slice(sector);
                        }
                    }
                }
            }
        }
        bytes
    }

    /// Sectors written, and lengths set, since the last sync.
    fn unsynced(&self) -> u64 {
        let count = |change: &Change| match change {
            Change::Write(_, written) => written.len().div_ceil(SECTOR) as u64,
            Change::Len(_) => 1,
        };
        self.changes.iter().map(count).sum()
    }
}

#[derive(Clone, Copy, Debug)]
struct Fault {
    op: DiskOp,
    errno: i32,
    /// Calls that still succeed.
    after: u32,
}

fn apply(names: &mut BTreeMap<String, usize>, op: &NameOp) {
    match op {
        NameOp::Set(name, inode) => {
            names.insert(name.clone(), *inode);
        }
        NameOp::Rename(from, to) => {
            if let Some(inode) = names.remove(from) {
                names.insert(to.clone(), inode);
            }
        }
        NameOp::Remove(name) => {
            names.remove(name);
        }
    }
}

impl Disk {
    fn check(&mut self, op: Option<DiskOp>) -> io::Result<()> {
        if self.stopped {
            return Err(io::Error::from_raw_os_error(libc::EIO));
        }
        match &mut self.fault {
            Some(f) if Some(f.op) == op => {
                if f.after == 0 {
                    return Err(io::Error::from_raw_os_error(f.errno));
                }
                f.after -= 1;
                Ok(())
            }
            _ => Ok(()),
        }
    }

    /// Counts a sync and fails from the one on at which the disk stops.
    fn sync(&mut self) -> io::Result<()> {
        self.stopped |= self.stop_at == Some(self.syncs);
        self.syncs += 1;
        self.check(None)
    }

    fn rename(&mut self, op: NameOp) {
        apply(&mut self.names, &op);
        self.renamed.push(op);
    }

    fn find(&self, name: &str) -> io::Result<usize> {
        self.names.get(name).copied().ok_or_else(|| io::ErrorKind::NotFound.into())
    }
}

impl Default for MemoryDisk {
    fn default() -> Self {
        Self { disk: Arc::default(), location: PathBuf::from("/memory-disk") }
    }
}

impl MemoryDisk {
    fn lock(&self) -> MutexGuard<'_, Disk> {
        self.disk.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The sync number `n` (of files and directory, counted together from 0) and every operation
    /// after it fail, and none of them has an effect that a crash would keep.
    pub fn stop_at_sync(&self, n: u64) {
        self.lock().stop_at = Some(n);
    }

    /// Whether the disk has stopped.
    pub fn is_stopped(&self) -> bool {
        self.lock().stopped
    }

    /// After `after` more successes `op` fails with `errno`, until [`heal`](Self::heal).
    pub fn fail(&self, op: DiskOp, errno: i32, after: u32) {
        self.lock().fault = Some(Fault { op, errno, after });
    }

    /// Syncs of files wait, until it is called with `false`.
    pub fn hold_syncs(&self, held: bool) {
        self.lock().held = held;
    }

    /// Each sync of a file takes so long.
    pub fn slow_syncs(&self, each: Duration) {
        self.lock().sync_takes = each;
    }

    /// Nothing fails any more.
    pub fn heal(&self) {
        let mut disk = self.lock();
        (disk.fault, disk.stop_at, disk.stopped) = (None, None, false);
    }

    /// Another disk, with what would be found on this one after a crash now.
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
        let mut after = Disk { names: disk.synced_names.clone(), ..Disk::default() };
        let kept_names = match survives {
            Survives::First(_) => disk.renamed.len(),
            _ => keep(disk.renamed.len() as u64) as usize,
        };
        disk.renamed[..kept_names].iter().for_each(|op| apply(&mut after.names, op));
        after.synced_names = after.names.clone();
        for inode in &disk.files {
            after.files.push(Inode::of(inode.after_crash(&mut keep)));
        }
        Self { disk: Arc::new(Mutex::new(after)), location: self.location.clone() }
    }

    /// Sectors that were written, and lengths set, since their files were last synced.
    pub fn unsynced_sectors(&self) -> u64 {
        self.lock().files.iter().map(Inode::unsynced).sum()
    }

    /// All names of files.
    pub fn names(&self) -> Vec<String> {
        self.lock().names.keys().cloned().collect()
    }

    /// A file's bytes.
    pub fn contents(&self, name: &str) -> io::Result<Vec<u8>> {
        let disk = self.lock();
        Ok(disk.files[disk.find(name)?].bytes.clone())
    }

    /// Replaces a file's bytes, or makes the file; durable at once.
    pub fn put(&self, name: &str, bytes: Vec<u8>) {
        let mut disk = self.lock();
        let inode = disk.files.len();
        disk.files.push(Inode::of(bytes));
        disk.names.insert(name.to_owned(), inode);
        disk.synced_names.insert(name.to_owned(), inode);
    }
}

impl MemoryDisk {
    fn file(&self, disk: &mut Disk, inode: usize) -> Box<dyn StoreFile> {
        disk.opened += 1;
        Box::new(MemoryFile { disk: self.disk.clone(), inode, number: disk.opened })
    }
}

impl Backend for MemoryDisk {
    fn location(&self) -> &Path {
        &self.location
    }

    fn lock(&self) -> Result<(), LockError> {
        Ok(())
    }

    fn is_locked(&self) -> io::Result<bool> {
        Ok(true)
    }

    fn create(&self, name: &str) -> io::Result<Box<dyn StoreFile>> {
        let mut disk = MemoryDisk::lock(self);
        disk.check(Some(DiskOp::Create))?;
        let inode = disk.files.len();
        disk.files.push(Inode::default());
        disk.rename(NameOp::Set(name.to_owned(), inode));
        Ok(self.file(&mut disk, inode))
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
        disk.rename(NameOp::Rename(from.to_owned(), to.to_owned()));
        Ok(())
    }

    fn remove(&self, name: &str) -> io::Result<()> {
        let mut disk = MemoryDisk::lock(self);
        disk.check(None)?;
        disk.find(name)?;
        disk.rename(NameOp::Remove(name.to_owned()));
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

/// An open file of a [`MemoryDisk`].
#[derive(Debug)]
struct MemoryFile {
    disk: Arc<Mutex<Disk>>,
    inode: usize,
    /// Of all files opened.
    number: u64,
}

impl MemoryFile {
    fn lock(&self) -> MutexGuard<'_, Disk> {
        self.disk.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn set_len(&self, op: DiskOp, len: u64) -> io::Result<()> {
        let mut disk = self.lock();
        disk.check(Some(op))?;
        let inode = &mut disk.files[self.inode];
        inode.bytes.resize(len as usize, 0);
        inode.changes.push(Change::Len(len as usize));
        Ok(())
    }
}

impl StoreFile for MemoryFile {
    fn len(&self) -> io::Result<u64> {
        Ok(self.lock().files[self.inode].bytes.len() as u64)
    }

    fn read_exact_at(&self, buf: &mut [u8], offset: u64) -> io::Result<()> {
        let mut disk = self.lock();
        disk.check(Some(DiskOp::Read))?;
        let bytes = &disk.files[self.inode].bytes;
        let from = usize::try_from(offset).unwrap_or(usize::MAX);
        let there = bytes.get(from..from.saturating_add(buf.len()));
        buf.copy_from_slice(there.ok_or(io::ErrorKind::UnexpectedEof)?);
        Ok(())
    }

    fn write_all_at(&self, bytes: &[u8], offset: u64) -> io::Result<()> {
        let mut disk = self.lock();
        disk.check(Some(DiskOp::Write))?;
        let inode = &mut disk.files[self.inode];
        let (from, to) = (offset as usize, offset as usize + bytes.len());
        inode.bytes.resize(inode.bytes.len().max(to), 0);
        inode.bytes[from..to].copy_from_slice(bytes);
        inode.changes.push(Change::Write(from, bytes.to_vec()));
        Ok(())
    }

    fn allocate(&self, len: u64) -> io::Result<()> {
        self.set_len(DiskOp::Allocate, len)
    }

    fn cut(&self, len: u64) -> io::Result<()> {
        self.set_len(DiskOp::Cut, len)
    }

    fn sync(&self) -> io::Result<()> {
        std::thread::sleep(self.lock().sync_takes);
        while self.lock().held {
            std::thread::sleep(Duration::from_millis(1));
        }
        let mut disk = self.lock();
        disk.check(Some(DiskOp::Sync))?;
        disk.sync()?;
        let inode = &mut disk.files[self.inode];
        for change in std::mem::take(&mut inode.changes) {
            match change {
                Change::Len(len) => inode.synced.resize(len, 0),
                Change::Write(from, written) => {
                    let to = from + written.len();
                    inode.synced.resize(inode.synced.len().max(to), 0);
                    inode.synced[from..to].copy_from_slice(&written);
                }
            }
        }
        Ok(())
    }

    fn lock_range(&self, range: Range<u64>, lock: RangeLock) -> io::Result<bool> {
        let mut disk = self.lock();
        disk.check(Some(DiskOp::Lock))?;
        let locks = &mut disk.files[self.inode].locks;
        let overlaps = |l: &Locked| l.range.start < range.end && range.start < l.range.end;
        let alone = lock == RangeLock::Alone;
        if lock == RangeLock::Free {
            // Whole ranges are all that is let go of at once.
            locks.retain(|l| l.by != self.number || !overlaps(l));
            return Ok(true);
        }
        if locks.iter().any(|l| l.by != self.number && overlaps(l) && (alone || l.alone)) {
            return Ok(false);
        }
        locks.push(Locked { by: self.number, range, alone });
        Ok(true)
    }

    fn identity(&self) -> io::Result<(u64, u64)> {
        Ok((0, self.inode as u64))
    }
}

impl Drop for MemoryFile {
    fn drop(&mut self) {
        let number = self.number;
        self.lock().files[self.inode].locks.retain(|l| l.by != number);
    }
}
