//! Locks on a disk's file, by open file description. The host that may run the guest holds the
//! lock.
//!
//! A lock belongs to the open file, not to the process. It ends when the file is closed, for
//! whatever reason. Other VMMs that lock their disks (QEMU among them) use the same kind of
//! lock, so their locks are seen too.
//!
//! ```text
//! 0                                     2^40 + part of the guest's id                    infinity
//! +-------------------------------------+---+-----------------------------------------------+
//! | locked                              |   | locked                                        |
//! +-------------------------------------+---+-----------------------------------------------+
//! ```
//!
//! The byte that is not locked lies far after any data and identifies the guest. On the
//! destination host the disk may still be locked by the host that the guest comes from, but by
//! no other guest.

use std::fs::File;
use std::io;
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use driftline_format::range_lock::{self, RangeLock};
use driftline_guest::VmId;

/// Offset of the bytes that identify guests. The lock protocols of NFS 3 and 4 and of SMB have
/// offsets of 64 bits, so these bytes can be locked on a file server, too.
const HOLDERS: u64 = 1 << 40;

/// Upper bound on waiting for another process's lock. The kernel closes the files of a killed
/// process's io_uring only after the process has ended: some 10 ms later, and later on a busy host.
const WAIT: Duration = Duration::from_secs(1);
/// Time between two tries.
const POLL: Duration = Duration::from_millis(5);

/// Tries until `has_it` returns true, for at most [`WAIT`]. Returns its last answer. `path` is used
/// in the log.
pub(super) fn wait(path: &Path, has_it: impl Fn() -> io::Result<bool>) -> io::Result<bool> {
    if has_it()? {
        return Ok(true);
    }
    tracing::info!("waiting for another process's lock of disk file \"{}\"", path.display());
    let end = Instant::now() + WAIT;
    while Instant::now() < end {
        thread::sleep(POLL);
        if has_it()? {
            return Ok(true);
        }
    }
    Ok(false)
}

/// Sets the lock on all of `file`, for `holder`, without waiting. Returns whether no conflicting
/// lock prevented it.
pub(super) fn set(file: &File, lock: RangeLock, holder: VmId) -> io::Result<bool> {
    if lock == RangeLock::Free {
        return range_lock::set(file, .., lock);
    }
    let unlocked_byte = byte_of(holder);
    let mut locked = range_lock::set(file, ..unlocked_byte, lock);
    if let Ok(true) = locked {
        locked = range_lock::set(file, unlocked_byte + 1.., lock);
    }
    if !matches!(locked, Ok(true)) {
        // One range alone does not make a lock: release it.
        range_lock::set(file, .., RangeLock::Free)?;
    }
    locked
}

/// Returns whether another guest than `holder`, or another program, has a conflicting lock.
pub(super) fn is_locked_by_another(file: &File, lock: RangeLock, holder: VmId) -> io::Result<bool> {
    let byte = byte_of(holder);
    range_lock::is_locked(file, byte..=byte, lock)
}

fn byte_of(holder: VmId) -> u64 {
    let [a, b, c, d, ..] = holder.0.into_bytes();
    HOLDERS + u64::from(u32::from_le_bytes([a, b, c, d]))
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    /// Waits until `is_so`. A process that another test starts inherits the files of this one until
    /// it executes its own program, so a closed file may stay locked for a moment.
    pub(in super::super) fn eventually(mut is_so: impl FnMut() -> bool) {
        let began = Instant::now();
        while !is_so() {
            assert!(began.elapsed() < Duration::from_secs(20), "a closed file holds nothing");
            thread::sleep(Duration::from_millis(1));
        }
    }

    #[test]
    fn one_writer_or_many_readers() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let open = || File::options().read(true).write(true).open(file.path()).unwrap();
        let (a, b, c) = (open(), open(), open());
        // The same holds for one guest on two hosts: it may run on only one of them.
        let (one, other) = (VmId::random(), VmId::random());
        for holder in [one, other] {
            assert!(set(&a, RangeLock::Exclusive, one).unwrap());
            assert!(set(&a, RangeLock::Exclusive, one).unwrap(), "again, by its holder");
            assert!(!set(&b, RangeLock::Exclusive, holder).unwrap());
            assert!(!set(&b, RangeLock::Shared, holder).unwrap());
            assert!(set(&a, RangeLock::Free, one).unwrap());
            assert!(set(&b, RangeLock::Shared, holder).unwrap());
            assert!(set(&c, RangeLock::Shared, one).unwrap());
            assert!(!set(&a, RangeLock::Exclusive, one).unwrap());
            assert!(set(&b, RangeLock::Free, holder).unwrap());
            assert!(set(&c, RangeLock::Free, one).unwrap());
        }
        assert!(set(&b, RangeLock::Exclusive, other).unwrap());
        drop(b);
        eventually(|| set(&a, RangeLock::Exclusive, one).unwrap());
    }

    #[test]
    fn lock_identifies_its_guest() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let open = || File::options().read(true).write(true).open(file.path()).unwrap();
        let (locked, looks) = (open(), open());
        let (one, other) = (VmId::random(), VmId::random());
        let anothers = |lock, holder| is_locked_by_another(&looks, lock, holder).unwrap();
        assert!(!anothers(RangeLock::Exclusive, one), "it is free");
        assert!(set(&locked, RangeLock::Exclusive, one).unwrap());
        assert!(!anothers(RangeLock::Exclusive, one));
        assert!(anothers(RangeLock::Exclusive, other) && anothers(RangeLock::Shared, other));
        assert!(
            set(&locked, RangeLock::Free, one).unwrap()
                && set(&locked, RangeLock::Shared, one).unwrap()
        );
        assert!(anothers(RangeLock::Exclusive, other) && !anothers(RangeLock::Shared, other));
        // A program that knows nothing of guests locks the whole file.
        assert!(range_lock::set(&locked, .., RangeLock::Free).unwrap());
        assert!(range_lock::set(&locked, .., RangeLock::Exclusive).unwrap());
        assert!(anothers(RangeLock::Exclusive, one) && anothers(RangeLock::Shared, other));
    }
}
