//! The kernel's userfaultfd: a write to a protected page waits, or whoever touches a page that is
//! not there yet, and whoever reads from the descriptor is told of it.
//!
//! The calls are few and plain; the crate that wraps them (`userfaultfd`) wants libclang when it is
//! built, and knows the kernel's features up to 5.13.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, FromRawFd, OwnedFd};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use vmm_sys_util::ioctl::{ioctl_with_mut_ref, ioctl_with_val};
use vmm_sys_util::{ioctl_io_nr, ioctl_ior_nr, ioctl_iowr_nr};

/// `struct uffdio_api`.
#[repr(C)]
struct Api {
    api: u64,
    features: u64,
    ioctls: u64,
}

/// `struct uffdio_range`.
#[repr(C)]
struct Range {
    start: u64,
    len: u64,
}

/// `struct uffdio_register`.
#[repr(C)]
struct Register {
    range: Range,
    mode: u64,
    ioctls: u64,
}

/// `struct uffdio_writeprotect`.
#[repr(C)]
struct WriteProtect {
    range: Range,
    mode: u64,
}

/// `struct uffdio_copy`.
#[repr(C)]
struct Copy {
    to: u64,
    from: u64,
    len: u64,
    mode: u64,
    copied: i64,
}

/// `struct uffdio_zeropage` and `struct uffdio_poison`.
#[repr(C)]
struct Fill {
    range: Range,
    mode: u64,
    filled: i64,
}

const UFFD: u32 = 0xaa;
ioctl_io_nr!(USERFAULTFD_IOC_NEW, UFFD, 0x00);
ioctl_iowr_nr!(UFFDIO_API, UFFD, 0x3f, Api);
ioctl_iowr_nr!(UFFDIO_REGISTER, UFFD, 0x00, Register);
ioctl_ior_nr!(UFFDIO_UNREGISTER, UFFD, 0x01, Range);
ioctl_ior_nr!(UFFDIO_WAKE, UFFD, 0x02, Range);
ioctl_iowr_nr!(UFFDIO_COPY, UFFD, 0x03, Copy);
ioctl_iowr_nr!(UFFDIO_ZEROPAGE, UFFD, 0x04, Fill);
ioctl_iowr_nr!(UFFDIO_POISON, UFFD, 0x08, Fill);
ioctl_iowr_nr!(UFFDIO_WRITEPROTECT, UFFD, 0x06, WriteProtect);

/// The smallest unit.
const PAGE: u64 = driftline_dirty_tracker::PAGE_SIZE;
/// `UFFD_API`, the version.
const API: u64 = 0xaa;
/// Faults say that they are of write protection (5.7).
const FEATURE_PAGEFAULT_FLAG_WP: u64 = 1 << 0;
/// Memory files can be protected (5.19).
const FEATURE_WP_HUGETLBFS_SHMEM: u64 = 1 << 12;
/// So can pages that were never written (6.4).
const FEATURE_WP_UNPOPULATED: u64 = 1 << 13;

/// Pages of memory files that are not there can be waited for (4.11).
const FEATURE_MISSING_SHMEM: u64 = 1 << 5;
/// Pages can be lost (6.6).
const FEATURE_POISON: u64 = 1 << 14;

/// Nobody waits at a protected page: the kernel lets the write go on and notes it in the page table
/// (6.7).
const FEATURE_WP_ASYNC: u64 = 1 << 15;

const REGISTER_MODE_MISSING: u64 = 1 << 0;
const REGISTER_MODE_WP: u64 = 1 << 1;
const WRITEPROTECT_MODE_WP: u64 = 1 << 0;
const EVENT_PAGEFAULT: u8 = 0x12;

/// `struct uffd_msg`: its size, and where its event and a fault's address are.
const MESSAGE: usize = 32;
const ADDRESS: usize = 16;
/// Faults that are read at once.
const MESSAGES: usize = 32;

/// A descriptor that is told of faults, over no memory at first.
#[derive(Debug)]
pub(crate) struct Userfault(OwnedFd);

impl Userfault {
    /// Opens one. The error is a host that does not let this process have one, or whose kernel is
    /// older than 6.4.
    pub(crate) fn open() -> io::Result<Self> {
        Self::with(FEATURE_PAGEFAULT_FLAG_WP | FEATURE_WP_HUGETLBFS_SHMEM | FEATURE_WP_UNPOPULATED)
    }

    /// As [`open`](Self::open), for pages that are not there yet; the kernel has to be 6.6 or
    /// later.
    pub(crate) fn open_for_missing() -> io::Result<Self> {
        Self::with(FEATURE_MISSING_SHMEM | FEATURE_POISON)
    }

    /// As [`open`](Self::open), for contents of pages that are not there yet, of which nobody is
    /// told; the kernel has to be 4.11 or later.
    pub(crate) fn open_for_filling() -> io::Result<Self> {
        Self::with(FEATURE_MISSING_SHMEM)
    }

    /// As [`open`](Self::open), of which writes do not wait: they take away the protection, and
    /// that is what tells of them. The kernel has to be 6.7 or later.
    pub(crate) fn open_async() -> io::Result<Self> {
        Self::with(FEATURE_WP_ASYNC | FEATURE_WP_HUGETLBFS_SHMEM | FEATURE_WP_UNPOPULATED)
    }

    fn with(features: u64) -> io::Result<Self> {
        let fd = Self::by_system_call().or_else(|_| Self::by_device())?;
        let mut api = Api { api: API, features, ioctls: 0 };
        // SAFETY: the kernel reads and writes the structure, which is as it expects it and ours.
        check(unsafe { ioctl_with_mut_ref(&fd, UFFDIO_API(), &mut api) })?;
        Ok(Self(fd))
    }

    /// For root, and for everyone where `vm.unprivileged_userfaultfd` says so. Faults of the kernel
    /// are to be seen, too: KVM and devices write to guest memory.
    fn by_system_call() -> io::Result<OwnedFd> {
        let flags = libc::O_CLOEXEC | libc::O_NONBLOCK;
        // SAFETY: the call takes flags and returns a descriptor.
        let fd = unsafe { libc::syscall(libc::SYS_userfaultfd, flags) };
        Self::own(i32::try_from(fd).map_err(io::Error::other)?)
    }

    /// For whom the administrator has given the device.
    fn by_device() -> io::Result<OwnedFd> {
        let device = File::options().read(true).write(true).open("/dev/userfaultfd")?;
        let flags = (libc::O_CLOEXEC | libc::O_NONBLOCK) as libc::c_ulong;
        // SAFETY: the ioctl takes flags and returns a descriptor.
        Self::own(unsafe { ioctl_with_val(&device, USERFAULTFD_IOC_NEW(), flags) })
    }

    fn own(fd: i32) -> io::Result<OwnedFd> {
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: the kernel has just made it, and nobody else knows it.
        Ok(unsafe { OwnedFd::from_raw_fd(fd) })
    }

    /// Takes `len` bytes at `start`, whole pages of a mapping: they can be protected from now on.
    /// Each memory has one descriptor at most. Closing the descriptor undoes it.
    pub(crate) fn register(&self, start: u64, len: u64) -> io::Result<()> {
        self.register_for(start, len, REGISTER_MODE_WP)
    }

    /// Takes `len` bytes at `start`, whole pages of a mapping: whoever touches one that is not
    /// there waits from now on.
    pub(crate) fn register_missing(&self, start: u64, len: u64) -> io::Result<()> {
        self.register_for(start, len, REGISTER_MODE_MISSING)
    }

    fn register_for(&self, start: u64, len: u64, mode: u64) -> io::Result<()> {
        let range = Range { start, len };
        let mut register = Register { range, mode, ioctls: 0 };
        // SAFETY: the kernel reads and writes the structure. What it does with the memory changes
        // no content; who waits for a page is served by the one who has asked for this.
        check(unsafe { ioctl_with_mut_ref(&self.0, UFFDIO_REGISTER(), &mut register) })
    }

    /// Gives back what was registered; nothing in it is protected any more. Who waits is not told:
    /// see [`wake`](Self::wake).
    pub(crate) fn unregister(&self, start: u64, len: u64) -> io::Result<()> {
        let mut range = Range { start, len };
        // SAFETY: as for `register`.
        check(unsafe { ioctl_with_mut_ref(&self.0, UFFDIO_UNREGISTER(), &mut range) })
    }

    /// Whoever waits to write there tries again, and waits again if it is protected.
    pub(crate) fn wake(&self, start: u64, len: u64) -> io::Result<()> {
        let mut range = Range { start, len };
        // SAFETY: the kernel reads the structure, and does nothing with the memory.
        check(unsafe { ioctl_with_mut_ref(&self.0, UFFDIO_WAKE(), &mut range) })
    }

    /// From now on writes to `len` bytes at `start` wait, or take the protection away.
    pub(crate) fn protect(&self, start: u64, len: u64) -> io::Result<()> {
        self.write_protect(start, len, WRITEPROTECT_MODE_WP)
    }

    /// Writes to these go on.
    pub(crate) fn release(&self, start: u64, len: u64) -> io::Result<()> {
        self.write_protect(start, len, 0)
    }

    fn write_protect(&self, start: u64, len: u64, mode: u64) -> io::Result<()> {
        loop {
            let mut protect = WriteProtect { range: Range { start, len }, mode };
            // SAFETY: the kernel reads the structure. Protection changes no content; who writes
            // meanwhile waits.
            let done = unsafe { ioctl_with_mut_ref(&self.0, UFFDIO_WRITEPROTECT(), &mut protect) };
            match check(done) {
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => std::thread::yield_now(),
                other => return other,
            }
        }
    }

    /// Puts `contents`, whole pages, at `start`, where no page may be yet: one that is there is an
    /// error. Who waits for them goes on.
    pub(crate) fn copy(&self, start: u64, contents: &[u8]) -> io::Result<()> {
        self.fill(start, contents.len() as u64, false, |done, to, len| {
            let from = contents.as_ptr() as u64 + done;
            let mut copy = Copy { to, from, len, mode: 0, copied: 0 };
            // SAFETY: the kernel reads `len` bytes of `contents` behind `done`, and puts them only
            // where the descriptor was given memory and no page is.
            let r = unsafe { ioctl_with_mut_ref(&self.0, UFFDIO_COPY(), &mut copy) };
            (check(r), copy.copied)
        })
    }

    /// As [`copy`](Self::copy), with zeros; a page that is there stays as it is.
    pub(crate) fn zero(&self, start: u64, len: u64) -> io::Result<()> {
        self.fill(start, len, true, |_, start, len| {
            let mut fill = Fill { range: Range { start, len }, mode: 0, filled: 0 };
            // SAFETY: the kernel reads and writes the structure, and puts zeros where no page is.
            let r = unsafe { ioctl_with_mut_ref(&self.0, UFFDIO_ZEROPAGE(), &mut fill) };
            (check(r), fill.filled)
        })
    }

    /// Whoever touches these pages, which are not there, is told that their content is lost: as by
    /// broken memory.
    pub(crate) fn poison(&self, start: u64, len: u64) -> io::Result<()> {
        self.fill(start, len, true, |_, start, len| {
            let mut fill = Fill { range: Range { start, len }, mode: 0, filled: 0 };
            // SAFETY: as for `zero`; no page is there that anybody could have a reference to.
            let r = unsafe { ioctl_with_mut_ref(&self.0, UFFDIO_POISON(), &mut fill) };
            (check(r), fill.filled)
        })
    }

    /// Passes over pages that are there if they may be. Calls `step` with what is done, where to go
    /// on and how much is left, until nothing is.
    fn fill(
        &self,
        start: u64,
        len: u64,
        may_be_there: bool,
        step: impl Fn(u64, u64, u64) -> (io::Result<()>, i64),
    ) -> io::Result<()> {
        let mut done = 0;
        while done < len {
            let (result, filled) = step(done, start + done, len - done);
            // Positive: so many bytes, perhaps not all. Negative: why not.
            done += u64::try_from(filled).unwrap_or(0).min(len - done);
            match result {
                Err(e) if may_be_there && e.raw_os_error() == Some(libc::EEXIST) => {
                    self.wake(start + done, PAGE)?;
                    done += PAGE;
                }
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => std::thread::yield_now(),
                other => other?,
            }
        }
        Ok(())
    }

    /// Adds to `faults` the addresses at which somebody has begun to wait, some at a time; waits
    /// for one for up to `limit`.
    pub(crate) fn faults(&self, limit: Duration, faults: &mut impl Extend<u64>) -> io::Result<()> {
        if !limit.is_zero() {
            let limit = Timespec::try_from(limit).map_err(io::Error::other)?;
            let mut wait = [PollFd::new(&self.0, PollFlags::IN)];
            match poll(&mut wait, Some(&limit)) {
                Ok(0) | Err(rustix::io::Errno::INTR) => return Ok(()),
                Ok(_) => {}
                Err(e) => return Err(e.into()),
            }
        }
        let mut messages = [0u8; MESSAGE * MESSAGES];
        let read = match rustix::io::read(self.0.as_fd(), &mut messages[..]) {
            Ok(read) => read,
            Err(rustix::io::Errno::AGAIN | rustix::io::Errno::INTR) => 0,
            Err(e) => return Err(e.into()),
        };
        let messages = messages[..read].chunks_exact(MESSAGE);
        faults.extend(messages.filter(|m| m[0] == EVENT_PAGEFAULT).map(|message| {
            let address = std::array::from_fn(|i| message[ADDRESS + i]);
            u64::from_ne_bytes(address)
        }));
        Ok(())
    }
}

fn check(returned: libc::c_int) -> io::Result<()> {
    if returned >= 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}
