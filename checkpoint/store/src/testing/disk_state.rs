//! The state of a disk in memory: its files and names, and the failures that a test has requested.

use std::collections::BTreeMap;
use std::io;
use std::ops::Range;
use std::time::Duration;

use rustix::io::Errno;

use crate::testing::inode::Inode;

/// An operation of the disk that a test can make fail.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum DiskOp {
    /// `Backend::create` and `Backend::create_new`
    Create,
    /// `StoreFile::write_all_at`
    Write,
    /// `StoreFile::sync`
    Sync,
    /// `Backend::rename`
    Rename,
    /// `Backend::rename`, which fails although it has taken effect
    Renamed,
    /// `Backend::link`
    Link,
    /// `Backend::sync_dir`
    SyncDir,
    /// `StoreFile::read_exact_at`
    Read,
    /// `StoreFile::allocate`
    Allocate,
    /// `StoreFile::truncate`
    Truncate,
    /// `StoreFile::lock_range`
    Lock,
}

#[derive(Debug, Default)]
pub(super) struct DiskState {
    pub(super) names: BTreeMap<String, usize>,
    pub(super) synced_names: BTreeMap<String, usize>,
    /// Changes of names since the last sync of the directory.
    pub(super) renamed: Vec<NameChange>,
    pub(super) files: Vec<Inode>,
    pub(super) syncs: u64,
    pub(super) stop_at: Option<u64>,
    pub(super) stopped: bool,
    pub(super) faults: Vec<DiskFault>,
    pub(super) bad: Vec<UnreadableRange>,
    /// Number of reads that a bad range has failed.
    pub(super) bad_reads: u64,
    /// Number of files opened so far.
    pub(super) opened: u64,
    /// Whether syncs of all files wait.
    pub(super) stalled: bool,
    /// Name of the file whose syncs wait.
    pub(super) stalled_file: Option<String>,
    /// Duration of each sync.
    pub(super) sync_takes: Duration,
    /// Duration of each write.
    pub(super) write_takes: Duration,
    /// Whether the store's lock was taken away.
    pub(super) lock_is_lost: bool,
}

#[derive(Clone, Debug)]
pub(super) enum NameChange {
    Set(String, usize),
    Rename(String, String),
    Remove(String),
}

#[derive(Clone, Copy, Debug)]
pub(super) struct DiskFault {
    pub(super) op: DiskOp,
    /// Error number; `None`: the thread panics, once.
    pub(super) errno: Option<i32>,
    /// Number of calls that still succeed.
    pub(super) after: u32,
}

/// Bytes of a file that cannot be read.
#[derive(Clone, Debug)]
pub(super) struct UnreadableRange {
    pub(super) inode: usize,
    pub(super) range: Range<u64>,
    /// Number of reads of any of them that still succeed.
    pub(super) after: u32,
}

pub(super) fn apply(names: &mut BTreeMap<String, usize>, op: &NameChange) {
    match op {
        NameChange::Set(name, inode) => {
            names.insert(name.clone(), *inode);
        }
        NameChange::Rename(from, to) => {
            if let Some(inode) = names.remove(from) {
                names.insert(to.clone(), inode);
            }
        }
        NameChange::Remove(name) => {
            names.remove(name);
        }
    }
}

impl DiskState {
    #[allow(clippy::panic, reason = "tests")]
    pub(super) fn check(&mut self, op: Option<DiskOp>) -> io::Result<()> {
        if self.stopped {
            return Err(Errno::IO.into());
        }
        match self.faults.iter_mut().find(|fault| Some(fault.op) == op) {
            Some(DiskFault { op, errno: None, after: 0 }) => {
                let op = *op;
                self.faults.retain(|fault| fault.op != op);
                panic!("the test has {op:?} panic");
            }
            Some(DiskFault { errno: Some(errno), after: 0, .. }) => {
                Err(io::Error::from_raw_os_error(*errno))
            }
            Some(fault) => {
                fault.after -= 1;
                Ok(())
            }
            None => Ok(()),
        }
    }

    pub(super) fn check_read(&mut self, inode: usize, read: Range<u64>) -> io::Result<()> {
        let hit = |bad: &&mut UnreadableRange| {
            bad.inode == inode && bad.range.start < read.end && read.start < bad.range.end
        };
        match self.bad.iter_mut().find(hit) {
            None => Ok(()),
            Some(bad) if bad.after > 0 => {
                bad.after -= 1;
                Ok(())
            }
            Some(_) => {
                self.bad_reads += 1;
                Err(Errno::IO.into())
            }
        }
    }

    /// Counts a sync, and fails from the sync on at which the disk stops.
    pub(super) fn sync(&mut self) -> io::Result<()> {
        self.stopped |= self.stop_at == Some(self.syncs);
        self.syncs += 1;
        self.check(None)
    }

    pub(super) fn rename(&mut self, op: NameChange) {
        apply(&mut self.names, &op);
        self.renamed.push(op);
    }

    pub(super) fn find(&self, name: &str) -> io::Result<usize> {
        self.names.get(name).copied().ok_or_else(|| io::ErrorKind::NotFound.into())
    }
}
