//! Locks on a disk's file, by open file description: whoever may run the guest holds one.
//!
//! A lock belongs to the open file, not to the process, and is gone with it, however it goes. Other
//! VMMs that lock their disks (QEMU among them) use the same kind, so they are seen too.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;

/// What a lock keeps others from.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Lock {
    /// Writing.
    Shared,
    /// Reading and writing.
    Exclusive,
    /// Nothing: lets go of a lock.
    None,
}

/// Sets the lock on all of `file` without waiting; whether nobody else's stands against it.
pub(super) fn set(file: &File, lock: Lock) -> io::Result<bool> {
    let kind = match lock {
        Lock::Shared => libc::F_RDLCK,
        Lock::Exclusive => libc::F_WRLCK,
        Lock::None => libc::F_UNLCK,
    };
    let range = libc::flock {
        l_type: kind as libc::c_short,
        l_whence: libc::SEEK_SET as libc::c_short,
        l_start: 0,
        l_len: 0,
        // The kernel wants zero here for locks of this kind.
        l_pid: 0,
    };
    // SAFETY: the descriptor is open as long as `file` is, and the kernel only reads `range`.
    let ret = unsafe { libc::fcntl(file.as_raw_fd(), libc::F_OFD_SETLK, &range) };
    if ret == 0 {
        return Ok(true);
    }
    let e = io::Error::last_os_error();
    match e.raw_os_error() {
        Some(libc::EAGAIN | libc::EACCES) => Ok(false),
        _ => Err(e),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_writer_or_many_readers() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let open = || File::options().read(true).write(true).open(file.path()).unwrap();
        let (a, b, c) = (open(), open(), open());
        assert!(set(&a, Lock::Exclusive).unwrap());
        assert!(set(&a, Lock::Exclusive).unwrap(), "again, by whoever has it");
        assert!(!set(&b, Lock::Exclusive).unwrap());
        assert!(!set(&b, Lock::Shared).unwrap());
        assert!(set(&a, Lock::None).unwrap());
        assert!(set(&b, Lock::Shared).unwrap());
        assert!(set(&c, Lock::Shared).unwrap());
        assert!(!set(&a, Lock::Exclusive).unwrap());
        drop((b, c));
        assert!(set(&a, Lock::Exclusive).unwrap(), "a closed file holds nothing");
    }
}
