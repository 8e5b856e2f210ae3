//! Locks on a disk's file, by open file description. The host that may run the guest holds the
//! lock.
//!
//! A lock belongs to the open file, not to the process. It is gone as soon as the file is closed,
//! for whatever reason. Other VMMs that lock their disks (QEMU among them) use the same kind of
//! lock, so their locks are seen too.
//!
//! ```text
//! 0                                     2^40 + part of the guest's id                    infinity
//! +-------------------------------------+---+-----------------------------------------------+
//! | locked                              |   | locked                                        |
//! +-------------------------------------+---+-----------------------------------------------+
//! ```
//!
//! The byte that is not locked lies far behind any data and identifies the guest. On the
//! destination host the disk may still be locked by the host that the guest comes from, but by
//! nobody else.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;

use driftline_guest::VmId;

/// Offset of the bytes that identify guests. No lock of a file server ends below it.
const HOLDERS: u64 = 1 << 40;

/// What a lock keeps others from.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Lock {
    /// Writing.
    Shared,
    /// Reading and writing.
    Exclusive,
    /// Nothing: releases a lock.
    None,
}

/// Sets the lock on all of `file`, for `holder`, without waiting. Returns whether no conflicting
/// lock prevented it.
pub(super) fn set(file: &File, lock: Lock, holder: VmId) -> io::Result<bool> {
    if lock == Lock::None {
        return call(file, libc::F_OFD_SETLK, Lock::None, 0, 0).map(|_| true);
    }
    let left_out = byte_of(holder);
    for (start, len) in [(0, left_out), (left_out + 1, 0)] {
        if let Some(refused) = refusal(call(file, libc::F_OFD_SETLK, lock, start, len)) {
            // One range alone does not make a lock: release it.
            call(file, libc::F_OFD_SETLK, Lock::None, 0, 0)?;
            return refused.map(|()| false);
        }
    }
    Ok(true)
}

/// Returns whether another guest than `holder`, or another program, has a conflicting lock.
pub(super) fn is_anothers(file: &File, lock: Lock, holder: VmId) -> io::Result<bool> {
    let found = call(file, libc::F_OFD_GETLK, lock, byte_of(holder), 1)?;
    Ok(found != libc::F_UNLCK)
}

fn byte_of(holder: VmId) -> u64 {
    let [a, b, c, d, ..] = holder.0.into_bytes();
    HOLDERS + u64::from(u32::from_le_bytes([a, b, c, d]))
}

/// Returns `None` if the lock was granted, `Some(Ok(()))` if another lock conflicts, and
/// `Some(Err(_))` on any other error.
fn refusal(result: io::Result<libc::c_int>) -> Option<io::Result<()>> {
    let e = result.err()?;
    match e.raw_os_error() {
        Some(libc::EAGAIN | libc::EACCES) => Some(Ok(())),
        _ => Some(Err(e)),
    }
}

/// Sets or tests a lock on `len` bytes from `start`; a `len` of 0 means all bytes from there on.
/// Returns the kind of lock that was found.
fn call(
    file: &File,
    command: libc::c_int,
    lock: Lock,
    start: u64,
    len: u64,
) -> io::Result<libc::c_int> {
    let kind = match lock {
        Lock::Shared => libc::F_RDLCK,
        Lock::Exclusive => libc::F_WRLCK,
        Lock::None => libc::F_UNLCK,
    };
    let mut range = libc::flock {
        l_type: kind as libc::c_short,
        l_whence: libc::SEEK_SET as libc::c_short,
        l_start: start as libc::off_t,
        l_len: len as libc::off_t,
        // The kernel requires zero here for locks of this kind.
        l_pid: 0,
    };
    // SAFETY: the descriptor is open as long as `file` is, and the kernel reads and writes `range`
    // alone, during the call.
    let ret = unsafe { libc::fcntl(file.as_raw_fd(), command, &mut range) };
    if ret == 0 { Ok(range.l_type.into()) } else { Err(io::Error::last_os_error()) }
}

#[cfg(test)]
pub(super) mod tests {
    use std::time::{Duration, Instant};

    use super::*;

    /// Waits until `is_so`. A process that another test starts inherits the files of this one until
    /// it executes its own program, so a closed file may stay locked for a moment.
    pub(in super::super) fn eventually(mut is_so: impl FnMut() -> bool) {
        let began = Instant::now();
        while !is_so() {
            assert!(began.elapsed() < Duration::from_secs(20), "a closed file holds nothing");
            std::thread::sleep(Duration::from_millis(1));
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
            assert!(set(&a, Lock::Exclusive, one).unwrap());
            assert!(set(&a, Lock::Exclusive, one).unwrap(), "again, by whoever has it");
            assert!(!set(&b, Lock::Exclusive, holder).unwrap());
            assert!(!set(&b, Lock::Shared, holder).unwrap());
            assert!(set(&a, Lock::None, one).unwrap());
            assert!(set(&b, Lock::Shared, holder).unwrap());
            assert!(set(&c, Lock::Shared, one).unwrap());
            assert!(!set(&a, Lock::Exclusive, one).unwrap());
            assert!(set(&b, Lock::None, holder).unwrap());
            assert!(set(&c, Lock::None, one).unwrap());
        }
        assert!(set(&b, Lock::Exclusive, other).unwrap());
        drop(b);
        eventually(|| set(&a, Lock::Exclusive, one).unwrap());
    }

    #[test]
    fn a_lock_is_known_for_its_guests() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let open = || File::options().read(true).write(true).open(file.path()).unwrap();
        let (held, looks) = (open(), open());
        let (one, other) = (VmId::random(), VmId::random());
        let anothers = |lock, holder| is_anothers(&looks, lock, holder).unwrap();
        assert!(!anothers(Lock::Exclusive, one), "nobody has it");
        assert!(set(&held, Lock::Exclusive, one).unwrap());
        assert!(!anothers(Lock::Exclusive, one));
        assert!(anothers(Lock::Exclusive, other) && anothers(Lock::Shared, other));
        assert!(set(&held, Lock::None, one).unwrap() && set(&held, Lock::Shared, one).unwrap());
        assert!(anothers(Lock::Exclusive, other) && !anothers(Lock::Shared, other));
        // A program that knows nothing of guests locks the whole file.
        call(&held, libc::F_OFD_SETLK, Lock::None, 0, 0).unwrap();
        call(&held, libc::F_OFD_SETLK, Lock::Exclusive, 0, 0).unwrap();
        assert!(anothers(Lock::Exclusive, one) && anothers(Lock::Shared, other));
    }
}
