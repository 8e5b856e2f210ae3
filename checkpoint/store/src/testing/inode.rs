//! One file of a disk in memory: its current content, its durable content, and the changes in
//! between.

use std::ops::Range;

use crate::backend::RangeLock;

/// Unit in which a write may tear, in bytes.
const SECTOR: usize = 512;

#[derive(Clone, Debug, Default)]
pub(super) struct Inode {
    pub(super) bytes: Vec<u8>,
    /// Durable content.
    synced: Vec<u8>,
    /// Changes since then, except for those that a failed sync has lost.
    changes: Vec<InodeChange>,
    /// Number of changes before those: their sync has ended.
    ended_changes: u64,
    locks: Vec<HeldLock>,
}

#[derive(Clone, Debug)]
enum InodeChange {
    /// A write of these bytes at an offset.
    Write(usize, Vec<u8>),
    /// A change to this length.
    Len(usize),
}

/// A lock on bytes, with the number of the open file that has it.
#[derive(Clone, Debug)]
struct HeldLock {
    by: u64,
    range: Range<u64>,
    alone: bool,
}

impl Inode {
    pub(super) fn of(bytes: Vec<u8>) -> Self {
        Self { synced: bytes.clone(), bytes, ..Self::default() }
    }

    pub(super) fn write(&mut self, bytes: &[u8], offset: usize) {
        let to = offset + bytes.len();
        self.bytes.resize(self.bytes.len().max(to), 0);
        self.bytes[offset..to].copy_from_slice(bytes);
        self.changes.push(InodeChange::Write(offset, bytes.to_vec()));
    }

    pub(super) fn set_len(&mut self, len: usize) {
        self.bytes.resize(len, 0);
        self.changes.push(InodeChange::Len(len));
    }

    /// Returns the number of changes so far: a sync that begins now covers these.
    pub(super) fn changed(&self) -> u64 {
        self.ended_changes + self.changes.len() as u64
    }

    /// Makes the first `changed` changes durable, or loses them if their sync has failed: they stay
    /// readable, and no later sync covers them.
    pub(super) fn end_sync(&mut self, changed: u64, durable: bool) {
        let count = changed.saturating_sub(self.ended_changes) as usize;
        self.ended_changes += count as u64;
        for change in self.changes.drain(..count).filter(|_| durable) {
            match change {
                InodeChange::Len(len) => self.synced.resize(len, 0),
                InodeChange::Write(from, written) => {
                    let to = from + written.len();
                    self.synced.resize(self.synced.len().max(to), 0);
                    self.synced[from..to].copy_from_slice(&written);
                }
            }
        }
    }

    /// Returns what a crash leaves of the file; `keep` returns how many of a number of sectors
    /// survive.
    pub(super) fn after_crash(&self, keep: &mut impl FnMut(u64) -> u64) -> Vec<u8> {
        let mut bytes = self.synced.clone();
        for change in &self.changes {
            match change {
                InodeChange::Len(len) if keep(1) == 1 => bytes.resize(*len, 0),
                InodeChange::Len(_) => {}
                InodeChange::Write(offset, written) => {
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

    /// Returns the number of sectors written, and of lengths set, since the last sync.
    pub(super) fn unsynced(&self) -> u64 {
        let count = |change: &InodeChange| match change {
            InodeChange::Write(_, written) => written.len().div_ceil(SECTOR) as u64,
            InodeChange::Len(_) => 1,
        };
        self.changes.iter().map(count).sum()
    }

    /// Sets the lock of open file `by`, if no other open file's lock is in conflict.
    pub(super) fn lock_range(&mut self, by: u64, range: Range<u64>, lock: RangeLock) -> bool {
        let overlaps = |l: &HeldLock| l.range.start < range.end && range.start < l.range.end;
        let alone = lock == RangeLock::Exclusive;
        let against = |l: &HeldLock| l.by != by && overlaps(l) && (alone || l.alone);
        if lock != RangeLock::Free && self.locks.iter().any(against) {
            return false;
        }
        // The store only unlocks or relocks whole ranges.
        self.locks.retain(|l| l.by != by || !overlaps(l));
        if lock != RangeLock::Free {
            self.locks.push(HeldLock { by, range, alone });
        }
        true
    }

    /// Releases the locks of open file `by`, which is closed.
    pub(super) fn unlock_all(&mut self, by: u64) {
        self.locks.retain(|l| l.by != by);
    }
}
