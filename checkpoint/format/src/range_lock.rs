//! Locks on a range of a file's bytes, by open file description. A lock belongs to the open file
//! and not to the process: closing the file releases it, for whatever reason it is closed.
//!
//! This module makes the system call itself, because `rustix` only has the locks of a process.

use std::fs::File;
use std::io;
use std::ops::{Bound, RangeBounds};
use std::os::fd::AsRawFd;

use rustix::io::Errno;

/// State of a lock on a range of a file.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum RangeLock {
    /// Other open files can share the range, and none can lock it alone. The file may be open for
    /// reading only.
    Shared,
    /// No other open file has a lock on any part of the range.
    Exclusive,
    /// No lock.
    Free,
}

/// Sets the open file's lock on the bytes of `range`, replacing the one that it had there, without
/// waiting. Returns `false` if another open file's lock is in conflict. The bytes need not exist.
///
/// ```
/// use driftline_format::range_lock::{RangeLock, is_locked, set};
/// let file = tempfile::NamedTempFile::new()?;
/// let (one, other) = (file.reopen()?, file.reopen()?);
/// assert!(set(&one, 0..10, RangeLock::Exclusive)?);
/// assert!(!set(&other, 9.., RangeLock::Shared)?);
/// assert!(set(&other, 10.., RangeLock::Exclusive)?);
/// assert!(is_locked(&other, .., RangeLock::Shared)?);
/// # Ok::<(), std::io::Error>(())
/// ```
///
/// # Errors
///
/// The range is empty or lies above the largest offset of a file, or the system call failed.
pub fn set(file: &File, range: impl RangeBounds<u64>, lock: RangeLock) -> io::Result<bool> {
    match call(file, libc::F_OFD_SETLK, range, lock) {
        Ok(_) => Ok(true),
        Err(Errno::AGAIN | Errno::ACCESS) => Ok(false),
        Err(e) => Err(e.into()),
    }
}

/// Returns whether another open file has a lock that is in conflict with `lock` on `range`.
///
/// # Errors
///
/// Those of [`set`].
pub fn is_locked(file: &File, range: impl RangeBounds<u64>, lock: RangeLock) -> io::Result<bool> {
    let found = call(file, libc::F_OFD_GETLK, range, lock)?;
    Ok(found.l_type != libc::F_UNLCK as libc::c_short)
}

#[allow(unsafe_code)]
fn call(
    file: &File,
    command: libc::c_int,
    range: impl RangeBounds<u64>,
    lock: RangeLock,
) -> Result<libc::flock, Errno> {
    let kind = match lock {
        RangeLock::Shared => libc::F_RDLCK,
        RangeLock::Exclusive => libc::F_WRLCK,
        RangeLock::Free => libc::F_UNLCK,
    };
    let (start, len) = start_and_len(range)?;
    let mut lock = libc::flock {
        l_type: kind as libc::c_short,
        l_whence: libc::SEEK_SET as libc::c_short,
        l_start: start,
        l_len: len,
        // The kernel requires zero here for locks of this kind.
        l_pid: 0,
    };
    // SAFETY: the descriptor is open as long as `file` is, and the kernel reads and writes `lock`
    // alone, during the call.
    let result = unsafe { libc::fcntl(file.as_raw_fd(), command, &raw mut lock) };
    if result == 0 { Ok(lock) } else { Err(last_error()) }
}

fn last_error() -> Errno {
    Errno::from_io_error(&io::Error::last_os_error()).unwrap_or(Errno::IO)
}

/// Returns the range as the kernel expects it: a length of 0 means all bytes from the start on.
fn start_and_len(range: impl RangeBounds<u64>) -> Result<(i64, i64), Errno> {
    let number = |n: u64| i64::try_from(n).map_err(|_| Errno::OVERFLOW);
    let start = match range.start_bound() {
        Bound::Included(start) => *start,
        Bound::Excluded(before) => before.checked_add(1).ok_or(Errno::OVERFLOW)?,
        Bound::Unbounded => 0,
    };
    let end = match range.end_bound() {
        Bound::Included(last) => last.checked_add(1).ok_or(Errno::OVERFLOW)?,
        Bound::Excluded(end) => *end,
        Bound::Unbounded => return Ok((number(start)?, 0)),
    };
    match end.checked_sub(start) {
        None | Some(0) => Err(Errno::INVAL),
        Some(len) => Ok((number(start)?, number(len)?)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_are_starts_and_lengths() {
        assert_eq!(start_and_len(..), Ok((0, 0)));
        assert_eq!(start_and_len(7..), Ok((7, 0)));
        assert_eq!(start_and_len(7..9), Ok((7, 2)));
        assert_eq!(start_and_len(7..=7), Ok((7, 1)));
        assert_eq!(start_and_len((Bound::Excluded(7), Bound::Unbounded)), Ok((8, 0)));
        // A length of 0 would lock everything from there on.
        assert_eq!(start_and_len(7..7), Err(Errno::INVAL));
        assert_eq!(start_and_len((Bound::Included(8), Bound::Excluded(7))), Err(Errno::INVAL));
        assert_eq!(start_and_len(1 << 63..), Err(Errno::OVERFLOW));
        assert_eq!(start_and_len(0..=u64::MAX), Err(Errno::OVERFLOW));
    }

    #[test]
    fn one_file_alone_or_several_share() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let [a, b, c] = [0; 3].map(|_| file.reopen().unwrap());
        assert!(set(&a, 3..4, RangeLock::Shared).unwrap());
        assert!(set(&b, 3..4, RangeLock::Shared).unwrap());
        assert!(!set(&c, .., RangeLock::Exclusive).unwrap());
        assert!(!is_locked(&c, .., RangeLock::Shared).unwrap());
        assert!(is_locked(&c, .., RangeLock::Exclusive).unwrap());
        assert!(!is_locked(&c, 4.., RangeLock::Exclusive).unwrap());
        assert!(set(&a, .., RangeLock::Free).unwrap());
        drop(b);
        assert!(set(&c, .., RangeLock::Exclusive).unwrap());
        assert!(set(&c, .., RangeLock::Exclusive).unwrap(), "again, by its owner");
        assert!(is_locked(&a, 3..4, RangeLock::Shared).unwrap());
    }
}
