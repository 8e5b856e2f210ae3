//! Wraps the kernel's userfaultfd. A thread that writes to a protected page, or touches a missing
//! page, waits in the kernel, and the reader of the descriptor receives the fault.
//!
//! This module makes the few system calls itself, because the crate that wraps them (`userfaultfd`)
//! needs libclang at build time and knows the kernel's features only up to 5.13.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, FromRawFd, OwnedFd};
use std::time::Duration;

use driftline_dirty_tracker::PAGE_SIZE;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::mm::{UserfaultfdFlags, userfaultfd};
use vmm_sys_util::ioctl::{ioctl_with_mut_ref, ioctl_with_val};
use vmm_sys_util::{ioctl_io_nr, ioctl_ior_nr, ioctl_iowr_nr};

/// `struct uffdio_api`.
#[repr(C)]
struct UffdioApi {
    api: u64,
    features: u64,
    ioctls: u64,
}

/// `struct uffdio_range`.
#[repr(C)]
struct UffdioRange {
    start: u64,
    len: u64,
}

/// `struct uffdio_register`.
#[repr(C)]
struct UffdioRegister {
    range: UffdioRange,
    mode: u64,
    ioctls: u64,
}

/// `struct uffdio_writeprotect`.
#[repr(C)]
struct UffdioWriteprotect {
    range: UffdioRange,
    mode: u64,
}

/// `struct uffdio_copy`.
#[repr(C)]
struct UffdioCopy {
    to: u64,
    from: u64,
    len: u64,
    mode: u64,
    copied: i64,
}

/// `struct uffdio_zeropage` and `struct uffdio_poison`.
#[repr(C)]
struct UffdioFill {
    range: UffdioRange,
    mode: u64,
    filled: i64,
}

const UFFD: u32 = 0xaa;
ioctl_io_nr!(USERFAULTFD_IOC_NEW, UFFD, 0x00);
ioctl_iowr_nr!(UFFDIO_API, UFFD, 0x3f, UffdioApi);
ioctl_iowr_nr!(UFFDIO_REGISTER, UFFD, 0x00, UffdioRegister);
ioctl_ior_nr!(UFFDIO_UNREGISTER, UFFD, 0x01, UffdioRange);
ioctl_ior_nr!(UFFDIO_WAKE, UFFD, 0x02, UffdioRange);
ioctl_iowr_nr!(UFFDIO_COPY, UFFD, 0x03, UffdioCopy);
ioctl_iowr_nr!(UFFDIO_ZEROPAGE, UFFD, 0x04, UffdioFill);
ioctl_iowr_nr!(UFFDIO_POISON, UFFD, 0x08, UffdioFill);
ioctl_iowr_nr!(UFFDIO_WRITEPROTECT, UFFD, 0x06, UffdioWriteprotect);

/// `UFFD_API`, the version.
const API: u64 = 0xaa;
/// Fault messages tell write protection faults from others (5.7).
const FEATURE_PAGEFAULT_FLAG_WP: u64 = 1 << 0;
/// The reader of the descriptor receives an event for memory that is discarded (4.11). The discard
/// waits until it is read.
const FEATURE_EVENT_REMOVE: u64 = 1 << 3;
/// Memory files can be write-protected (5.19).
const FEATURE_WP_HUGETLBFS_SHMEM: u64 = 1 << 12;
/// Pages that were never written can be write-protected (6.4).
const FEATURE_WP_UNPOPULATED: u64 = 1 << 13;

/// Missing pages of memory files raise faults (4.11).
const FEATURE_MISSING_SHMEM: u64 = 1 << 5;
/// Pages can be poisoned (6.6).
const FEATURE_POISON: u64 = 1 << 14;

/// Write protection is asynchronous: the kernel lets the write continue and records it in the page
/// table (6.7).
const FEATURE_WP_ASYNC: u64 = 1 << 15;

const REGISTER_MODE_MISSING: u64 = 1 << 0;
const REGISTER_MODE_WP: u64 = 1 << 1;
const WRITEPROTECT_MODE_WP: u64 = 1 << 0;
const EVENT_PAGEFAULT: u8 = 0x12;

/// Size of `struct uffd_msg` in bytes, and the offset of a fault's address in it.
const MESSAGE: usize = 32;
const ADDRESS: usize = 16;
/// Fault messages that one read takes.
const MESSAGES: usize = 32;

/// A userfaultfd descriptor. It covers no memory until memory is registered.
#[derive(Debug)]
pub(crate) struct Userfault(OwnedFd);

impl Userfault {
    /// Opens a descriptor for write protection.
    ///
    /// # Errors
    ///
    /// The host does not let this process have one, or its kernel is older than 6.4.
    pub(crate) fn open() -> io::Result<Self> {
        Self::with(FEATURE_PAGEFAULT_FLAG_WP | FEATURE_WP_HUGETLBFS_SHMEM | FEATURE_WP_UNPOPULATED)
    }

    /// Behaves like [`open`](Self::open), for faults on missing pages. Needs kernel 6.6.
    pub(crate) fn open_for_missing() -> io::Result<Self> {
        Self::with(FEATURE_MISSING_SHMEM | FEATURE_POISON)
    }

    /// Behaves like [`open`](Self::open), for filling missing pages without reading faults. Needs
    /// kernel 4.11.
    pub(crate) fn open_for_filling() -> io::Result<Self> {
        Self::with(FEATURE_MISSING_SHMEM)
    }

    /// Behaves like [`open`](Self::open), for a page handler: another process that reads and
    /// answers faults on missing pages, with the features that Firecracker asks for. Needs kernel
    /// 4.11.
    pub(crate) fn open_for_handler() -> io::Result<Self> {
        Self::with(FEATURE_EVENT_REMOVE)
    }

    /// Behaves like [`open`](Self::open), for asynchronous protection: a write does not wait but
    /// removes the protection, which a scan then finds. Needs kernel 6.7.
    pub(crate) fn open_async() -> io::Result<Self> {
        Self::with(FEATURE_WP_ASYNC | FEATURE_WP_HUGETLBFS_SHMEM | FEATURE_WP_UNPOPULATED)
    }

    /// Returns the descriptor that another process has opened.
    #[cfg(test)]
    pub(super) fn received(fd: OwnedFd) -> Self {
        Self(fd)
    }

    fn with(features: u64) -> io::Result<Self> {
        let fd = Self::by_system_call().or_else(|_| Self::by_device())?;
        let mut api = UffdioApi { api: API, features, ioctls: 0 };
        // SAFETY: the kernel reads and writes the structure, which has the layout that it expects
        // and is ours.
        check(unsafe { ioctl_with_mut_ref(&fd, UFFDIO_API(), &mut api) })?;
        Ok(Self(fd))
    }

    /// Opens a descriptor by system call. This works for root, and for every user if
    /// `vm.unprivileged_userfaultfd` is set. The flags include faults in kernel mode, because KVM
    /// and devices write to guest memory too.
    fn by_system_call() -> io::Result<OwnedFd> {
        let flags = UserfaultfdFlags::CLOEXEC | UserfaultfdFlags::NONBLOCK;
        // SAFETY: the descriptor does nothing to memory before memory is registered with it.
        Ok(unsafe { userfaultfd(flags) }?)
    }

    /// Opens a descriptor through the device, for users to whom the administrator has given it.
    fn by_device() -> io::Result<OwnedFd> {
        let device = File::options().read(true).write(true).open("/dev/userfaultfd")?;
        let flags = (libc::O_CLOEXEC | libc::O_NONBLOCK) as libc::c_ulong;
        // SAFETY: the ioctl takes flags and returns a descriptor.
        let fd = unsafe { ioctl_with_val(&device, USERFAULTFD_IOC_NEW(), flags) };
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: the kernel has just returned it, and no other code has it.
        Ok(unsafe { OwnedFd::from_raw_fd(fd) })
    }

    /// Registers `len` bytes at `start`, whole pages of a mapping, for write protection. A mapping
    /// can be registered with one descriptor at a time. Closing the descriptor unregisters it.
    pub(crate) fn register(&self, start: u64, len: u64) -> io::Result<()> {
        self.register_for(start, len, REGISTER_MODE_WP)
    }

    /// Registers `len` bytes at `start`, whole pages of a mapping, for missing faults: a thread
    /// that touches a missing page waits from now on.
    pub(crate) fn register_missing(&self, start: u64, len: u64) -> io::Result<()> {
        self.register_for(start, len, REGISTER_MODE_MISSING)
    }

    fn register_for(&self, start: u64, len: u64, mode: u64) -> io::Result<()> {
        let range = UffdioRange { start, len };
        let mut register = UffdioRegister { range, mode, ioctls: 0 };
        // SAFETY: the kernel reads and writes the structure. What it does with the memory changes
        // no content; the caller serves the threads that wait for a page.
        check(unsafe { ioctl_with_mut_ref(&self.0, UFFDIO_REGISTER(), &mut register) })
    }

    /// Unregisters the range and removes all protection in it. A thread that waits for a missing
    /// page continues, with zeros. One that waits for a protected page does not: see
    /// [`wake`](Self::wake).
    pub(crate) fn unregister(&self, start: u64, len: u64) -> io::Result<()> {
        let mut range = UffdioRange { start, len };
        // SAFETY: as for `register`.
        check(unsafe { ioctl_with_mut_ref(&self.0, UFFDIO_UNREGISTER(), &mut range) })
    }

    /// Wakes the threads that wait in this range. They retry their access, and wait again if the
    /// page is still protected.
    pub(crate) fn wake(&self, start: u64, len: u64) -> io::Result<()> {
        let mut range = UffdioRange { start, len };
        // SAFETY: the kernel reads the structure, and does nothing with the memory.
        check(unsafe { ioctl_with_mut_ref(&self.0, UFFDIO_WAKE(), &mut range) })
    }

    /// Write-protects `len` bytes at `start`. Writes to them wait, or remove the protection if it
    /// is asynchronous.
    pub(crate) fn protect(&self, start: u64, len: u64) -> io::Result<()> {
        self.write_protect(start, len, WRITEPROTECT_MODE_WP)
    }

    /// Removes the protection and wakes the threads that wait to write there.
    pub(crate) fn unprotect(&self, start: u64, len: u64) -> io::Result<()> {
        self.write_protect(start, len, 0)
    }

    fn write_protect(&self, start: u64, len: u64, mode: u64) -> io::Result<()> {
        loop {
            let mut protect = UffdioWriteprotect { range: UffdioRange { start, len }, mode };
            // SAFETY: the kernel reads the structure. Protection changes no content; a concurrent
            // writer waits.
            let done = unsafe { ioctl_with_mut_ref(&self.0, UFFDIO_WRITEPROTECT(), &mut protect) };
            match check(done) {
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => std::thread::yield_now(),
                other => return other,
            }
        }
    }

    /// Copies `contents`, whole pages, to `start` and wakes the threads that wait for them. Fails
    /// if a page is present there.
    pub(crate) fn copy(&self, start: u64, contents: &[u8]) -> io::Result<()> {
        self.fill(start, contents.len() as u64, None, |done, to, len| {
            let from = contents.as_ptr() as u64 + done;
            let mut copy = UffdioCopy { to, from, len, mode: 0, copied: 0 };
            // SAFETY: the kernel reads `len` bytes of `contents` from offset `done`, and puts them
            // only where memory is registered with the descriptor and no page is present.
            let r = unsafe { ioctl_with_mut_ref(&self.0, UFFDIO_COPY(), &mut copy) };
            (check(r), copy.copied)
        })
    }

    /// Behaves like [`copy`](Self::copy), with zeros. A page that is present stays as it is.
    pub(crate) fn zero(&self, start: u64, len: u64) -> io::Result<()> {
        self.fill(start, len, Some(PAGE_SIZE), |_, start, len| {
            let mut fill = UffdioFill { range: UffdioRange { start, len }, mode: 0, filled: 0 };
            // SAFETY: the kernel reads and writes the structure, and puts zeros where no page is.
            let r = unsafe { ioctl_with_mut_ref(&self.0, UFFDIO_ZEROPAGE(), &mut fill) };
            (check(r), fill.filled)
        })
    }

    /// Marks missing pages of `page` bytes as poisoned. A thread that touches one gets the error
    /// that broken memory gives. The kernel refuses while a discard waits until its message is
    /// read: then this reads and ignores all messages.
    pub(crate) fn poison(&self, start: u64, len: u64, page: u64) -> io::Result<()> {
        self.fill(start, len, Some(page), |_, start, len| {
            let mut fill = UffdioFill { range: UffdioRange { start, len }, mode: 0, filled: 0 };
            // SAFETY: as for `zero`; a reference can exist only to pages that are present, and none
            // is.
            let r = unsafe { ioctl_with_mut_ref(&self.0, UFFDIO_POISON(), &mut fill) };
            let refused = |e: &io::Error| e.kind() == io::ErrorKind::WouldBlock;
            match check(r) {
                Err(e) if refused(&e) => (self.drop_messages().and(Err(e)), fill.filled),
                done => (done, fill.filled),
            }
        })
    }

    /// Calls `step` with the bytes done, the address to continue at and the bytes left, until none
    /// are left. Skips pages of `skipped` bytes that are present; without it, such a page is an
    /// error.
    fn fill(
        &self,
        start: u64,
        len: u64,
        skipped: Option<u64>,
        step: impl Fn(u64, u64, u64) -> (io::Result<()>, i64),
    ) -> io::Result<()> {
        let mut done = 0;
        while done < len {
            let (result, filled) = step(done, start + done, len - done);
            // Positive: bytes done, perhaps not all. Negative: an error code.
            done += u64::try_from(filled).unwrap_or(0).min(len - done);
            match result {
                Err(e) if e.raw_os_error() == Some(libc::EEXIST) => {
                    let page = skipped.ok_or(e)?;
                    self.wake(start + done, page)?;
                    done += page;
                }
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => std::thread::yield_now(),
                other => other?,
            }
        }
        Ok(())
    }

    /// Reads all messages. A discard of a page that waits until its message is read continues.
    pub(crate) fn drop_messages(&self) -> io::Result<()> {
        let mut messages = [0u8; MESSAGE * MESSAGES];
        loop {
            match rustix::io::read(self.0.as_fd(), &mut messages[..]) {
                Ok(0) | Err(rustix::io::Errno::AGAIN) => return Ok(()),
                Ok(_) | Err(rustix::io::Errno::INTR) => {}
                Err(e) => return Err(e.into()),
            }
        }
    }

    /// Adds to `faults` the addresses at which threads have begun to wait, up to [`MESSAGES`] a
    /// call. Waits up to `limit` for the first.
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

impl AsFd for Userfault {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

fn check(returned: libc::c_int) -> io::Result<()> {
    if returned >= 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}
