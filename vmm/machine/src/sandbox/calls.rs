//! The words of the filters: groups of system calls and ioctls. Families are listed whole where
//! that is harmless: other C libraries and other versions make other members of them.

use syscalls::Sysno::{self, *};

/// Memory, time, waiting, reading and writing what is open, ending.
#[rustfmt::skip]
pub(super) const EVERY_THREAD: &[Sysno] = &[
    // What is open already.
    read, readv, write, writev, close, fstat, poll, ppoll,
    // Memory, but for what makes code.
    munmap, mremap, madvise, brk, membarrier,
    // Waiting, and being a thread.
    futex, futex_waitv, futex_wake, futex_wait, futex_requeue, set_robust_list, get_robust_list,
    rseq, sched_yield, sched_getaffinity, getcpu, gettid, getpid,
    // Signals that come.
    rt_sigprocmask, rt_sigreturn, sigaltstack, restart_syscall,
    // Time, where the kernel's page does not tell it.
    clock_gettime, clock_getres, clock_nanosleep, nanosleep, gettimeofday, time, getrandom,
    getrusage, sysinfo, uname, getuid, geteuid, getgid, getegid, exit, exit_group,
];

/// Of every virtio device: waiting for events.
#[rustfmt::skip]
pub(super) const DEVICE: &[Sysno] = &[
    epoll_ctl, epoll_wait, epoll_pwait, epoll_pwait2,
];

/// Of a vCPU: the timer that ends its slices.
#[rustfmt::skip]
pub(super) const VCPU: &[Sysno] = &[
    timer_create, timer_settime, timer_delete,
];

/// Of a disk: its data, durable data and space, by itself or by the io_uring that it has; and what
/// is cached of it.
#[rustfmt::skip]
pub(super) const BLOCK: &[Sysno] = &[
    lseek, pread64, pwrite64, fdatasync, fallocate, fadvise64, io_uring_enter,
];

/// Of a balloon: the space of a memory file, and which frames have any.
#[rustfmt::skip]
pub(super) const BALLOON: &[Sysno] = &[
    lseek, pread64, fallocate,
];

/// Of a network interface: when it announces itself again.
#[rustfmt::skip]
pub(super) const NET: &[Sysno] = &[
    timerfd_settime,
];

/// Of a socket device: callers of a socket that listens, data of streams, and how long it waits.
#[rustfmt::skip]
pub(super) const VSOCK: &[Sysno] = &[
    accept4, recvfrom, sendto, shutdown, timerfd_settime,
];

/// What nobody needs but those who answer the operator.
#[rustfmt::skip]
pub(super) const PROCESS: &[Sysno] = &[
    // Files by name: landlock says which.
    open, openat, openat2, creat, stat, lstat, newfstatat, statx, access, faccessat, faccessat2,
    readlink, readlinkat, getdents, getdents64, getcwd, mkdir, mkdirat, rmdir, unlink, unlinkat,
    rename, renameat, renameat2, link, linkat, truncate, statfs, fstatfs, fchmod, umask, fcntl,
    syncfs, sendfile, splice, readahead,
    // Data of files, and disks, which are opened here.
    pread64, pwrite64, preadv, pwritev, preadv2, pwritev2, lseek, fsync, fdatasync,
    sync_file_range, fallocate, ftruncate, fadvise64, copy_file_range, flock, dup, dup3, pipe2,
    io_uring_setup, io_uring_enter, io_uring_register,
    // Sockets.
    connect, accept, accept4, shutdown, sendto, sendmsg, sendmmsg, recvfrom, recvmsg, recvmmsg,
    getsockopt, setsockopt, getsockname, getpeername,
    // Memory.
    memfd_create, mincore, msync, mlock, mlock2, munlock, userfaultfd, mbind, set_mempolicy, get_mempolicy,
    // Events.
    epoll_create, epoll_create1, epoll_ctl, epoll_wait, epoll_pwait, epoll_pwait2, select,
    pselect6, eventfd, eventfd2, timerfd_create, timerfd_settime, timerfd_gettime, signalfd4, pipe,
    timer_create, timer_settime, timer_delete,
    dup2, bind, listen,
    // Signals and threads.
    rt_sigaction, rt_sigpending, rt_sigtimedwait, rt_sigsuspend, clone3, set_tid_address,
    sched_setaffinity, sched_getparam, sched_getscheduler, sched_getattr, sched_setattr,
    sched_get_priority_max,
    sched_get_priority_min, getppid, getpgrp, getpgid, getsid, getgroups, getresuid, getresgid,
    getrlimit, getpriority, times, capget,
    // Narrower domains for the threads to come.
    landlock_create_ruleset, landlock_add_rule, landlock_restrict_self,
];

/// `_IOC_TYPE` of KVM's ioctls; they are compared without direction and size.
pub(super) const KVMIO: u64 = 0xae;

/// Of a vCPU's thread. `KVM_RUN` first: rules are looked at in order.
pub(super) const VCPU_IOCTLS: &[u8] = &[
    0x80, // RUN
    0x61, 0x67, 0xa5, // IRQ_LINE, IRQ_LINE_STATUS, SIGNAL_MSI and SET_XSAVE
    0x81, 0x82, 0x83, 0x84, 0xcc, 0xcd, // REGS, SREGS, SREGS2
    0x88, 0x89, 0x8c, 0x8d, 0x8e, 0x8f, // MSRS, FPU, LAPIC
    0x90, 0x91, 0x98, 0x99, 0x9f, 0xa0, // CPUID2, MP_STATE, VCPU_EVENTS
    0xa1, 0xa2, 0xa3, 0xa4, 0xa6, 0xa7, // DEBUGREGS, TSC_KHZ, XSAVE, XCRS
    0xab, 0xac, 0xad, 0xbe, 0xbf, 0xcf, // ONE_REG, KVMCLOCK_CTRL, NESTED_STATE, XSAVE2
    0xe1, 0xe2, 0xe3, 0x03, 0x85, 0x86, // DEVICE_ATTR, CHECK_EXTENSION, TRANSLATE, INTERRUPT
];
/// Of serial input: interrupt lines.
#[rustfmt::skip]
pub(super) const LINE_IOCTLS: &[u8] = &[
    0x61, 0x67,
];
/// Of the collector: dirty rings and bitmaps, and the logging of slots.
#[rustfmt::skip]
pub(super) const DIRTY_IOCTLS: &[u8] = &[
    0xc7, 0x42, 0xc0, 0x46, 0x49,
];
/// Of the supervisor: the state that belongs to no vCPU, interrupt lines, event descriptors.
#[rustfmt::skip]
pub(super) const VM_IOCTLS: &[u8] =
    &[
    0x61, 0x67, 0xa5, 0x62, 0x63, 0x7b, 0x7c, 0x9f, 0xa0, 0x03, 0x6a, 0x76, 0x79, 0x46, 0x49,
];

/// Of a tap when it is attached to: interface, queues, header size, offloads, features.
#[rustfmt::skip]
pub(super) const TUN_IOCTLS: &[u32] = &[
    0x4004_54ca, 0x4004_54d0, 0x4004_54d9, 0x4004_54d8, 0x4004_54dc, 0x4004_54d4, 0x8004_54cf,
    0x8004_54d2, 0x8004_54d7, 0x8004_54d3,
];
/// Of a tap that is attached to: `TUNSETOFFLOAD`, `TUNSETQUEUE`.
#[rustfmt::skip]
pub(super) const TAP_IOCTLS: &[u32] = &[
    0x4004_54d0, 0x4004_54d9,
];
/// `FIONBIO`: of a stream, not to wait for it.
#[rustfmt::skip]
pub(super) const STREAM_IOCTLS: &[u32] = &[
    0x5421,
];
/// Of terminals: settings, sizes, the foreground. Never TIOCSTI or TIOCLINUX, which type into them.
#[rustfmt::skip]
pub(super) const TERMINAL_IOCTLS: &[u32] = &[
    0x5401, 0x5402, 0x5403, 0x5404, 0x540f, 0x5413, 0x5429, 0x802c_542a, 0x402c_542b, 0x402c_542c,
    0x402c_542d,
];
/// Of any descriptor: non-blocking, close on exec, bytes that wait.
#[rustfmt::skip]
pub(super) const PLAIN_IOCTLS: &[u32] = &[
    0x5421, 0x5450, 0x5451, 0x541b,
];
/// Of interfaces: name, index, address, flags, MTU.
#[rustfmt::skip]
pub(super) const INTERFACE_IOCTLS: &[u32] = &[
    0x8910, 0x8913, 0x8914, 0x8921, 0x8927, 0x8933,
];
/// `PAGEMAP_SCAN`.
#[rustfmt::skip]
pub(super) const PAGEMAP_IOCTLS: &[u32] = &[
    0xc060_6610,
];
/// Of the collector, over a descriptor that it has: `UFFDIO_REGISTER`, `UFFDIO_UNREGISTER`,
/// `UFFDIO_WRITEPROTECT`.
#[rustfmt::skip]
pub(super) const WATCH_IOCTLS: &[u32] = &[
    0xc020_aa00, 0x8010_aa01, 0xc018_aa06,
];
/// `_IOC_TYPE` of userfaultfd's.
pub(super) const UFFDIO: u64 = 0xaa;

/// Commands of `fcntl` that every thread may give: flags, duplicates.
#[rustfmt::skip]
pub(super) const DESCRIPTOR_COMMANDS: &[i32] =
    &[
    libc::F_GETFD, libc::F_SETFD, libc::F_GETFL, libc::F_SETFL, libc::F_DUPFD_CLOEXEC,
];
