//! A disk in memory that forgets what was not synced, and fails on request.

use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::pages::mix;
use crate::{Backend, LockError, StoreFile};

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
    /// Writes since the last sync: offset and length in `bytes`.
    written: Vec<(usize, usize)>,
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
        let mut keep = |of: u64| {
            coin = mix(coin.wrapping_add(0x9e37_79b9_7f4a_7c15));
            match survives {
                Survives::Nothing => 0,
                Survives::Everything => of,
                Survives::Torn(_) => coin % (of + 1),
            }
        };
        let mut after = Disk { names: disk.synced_names.clone(), ..Disk::default() };
        let kept_names = keep(disk.renamed.len() as u64) as usize;
        disk.renamed[..kept_names].iter().for_each(|op| apply(&mut after.names, op));
        after.synced_names = after.names.clone();
        for inode in &disk.files {
            let mut bytes = inode.synced.clone();
            for &(offset, len) in &inode.written {
                let sectors = (offset..offset + len).step_by(SECTOR);
                for from in sectors.filter(|_| keep(1) == 1) {
                    let to = (from + SECTOR).min(offset + len);
                    bytes.resize(bytes.len().max(to), 0);
                    bytes[from..to].copy_from_slice(&inode.bytes[from..to]);
                }
            }
            after.files.push(Inode { synced: bytes.clone(), bytes, written: Vec::new() });
        }
        Self { disk: Arc::new(Mutex::new(after)), location: self.location.clone() }
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
        disk.files.push(Inode { synced: bytes.clone(), bytes, written: Vec::new() });
        disk.names.insert(name.to_owned(), inode);
        disk.synced_names.insert(name.to_owned(), inode);
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
        Ok(Box::new(MemoryFile { disk: self.disk.clone(), inode }))
    }

    fn open(&self, name: &str) -> io::Result<Box<dyn StoreFile>> {
        let mut disk = MemoryDisk::lock(self);
        disk.check(None)?;
        let inode = disk.find(name)?;
        Ok(Box::new(MemoryFile { disk: self.disk.clone(), inode }))
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
}

impl MemoryFile {
    fn lock(&self) -> MutexGuard<'_, Disk> {
        self.disk.lock().unwrap_or_else(PoisonError::into_inner)
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
        inode.written.push((from, bytes.len()));
        Ok(())
    }

    fn sync(&self) -> io::Result<()> {
        let mut disk = self.lock();
        disk.check(Some(DiskOp::Sync))?;
        disk.sync()?;
        let inode = &mut disk.files[self.inode];
        inode.synced = inode.bytes.clone();
        inode.written.clear();
        Ok(())
    }
}
