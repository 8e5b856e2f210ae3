//! Groups of system calls and ioctls from which the filters are built. Families are listed whole
//! where that is harmless, because other C libraries and versions use other members of them.

use syscalls::Sysno::{self, *};

/// Calls of every thread: memory, time, waiting, reading and writing open descriptors, exiting.
#[rustfmt::skip]
pub(super) const EVERY_THREAD: &[Sysno] = &[
    // Descriptors that are already open.
    read, readv, write, writev, close, fstat, poll, ppoll,
    // Memory, except for making it executable.
    munmap, mremap, madvise, brk, membarrier,
    // Waiting, and thread management.
    futex, futex_waitv, futex_wake, futex_wait, futex_requeue, set_robust_list, get_robust_list,
    rseq, sched_yield, sched_getaffinity, getcpu, gettid, getpid,
    // Receiving signals, and the alarm of a handler that ends the process.
    rt_sigprocmask, rt_sigreturn, sigaltstack, restart_syscall, alarm,
    // Time, where the vDSO does not provide it.
    clock_gettime, clock_getres, clock_nanosleep, nanosleep, gettimeofday, time, getrandom,
    getrusage, sysinfo, uname, getuid, geteuid, getgid, getegid, exit, exit_group,
];

/// Calls of every virtio device: waiting for events.
#[rustfmt::skip]
pub(super) const DEVICE: &[Sysno] = &[
    epoll_ctl, epoll_wait, epoll_pwait, epoll_pwait2,
];

/// Calls of a vCPU: the timer that ends its slices.
#[rustfmt::skip]
pub(super) const VCPU: &[Sysno] = &[
    timer_create, timer_settime, timer_delete,
];

/// Calls of the supervisor: the affinity of the vCPUs' threads. Their IDs are not known when the
/// filter is built, so it cannot exclude other threads.
#[rustfmt::skip]
pub(super) const SUPERVISOR: &[Sysno] = &[
    sched_setaffinity,
];

/// Calls of a disk: reading, writing, flushing and allocating, by direct calls or by its io_uring,
/// and dropping its cached pages.
#[rustfmt::skip]
pub(super) const BLOCK: &[Sysno] = &[
    lseek, pread64, pwrite64, fdatasync, fallocate, fadvise64, io_uring_enter,
];

/// Calls of a balloon: freeing space of a memory file, and finding which frames have any.
#[rustfmt::skip]
pub(super) const BALLOON: &[Sysno] = &[
    lseek, pread64, fallocate,
];

/// Calls of a device that has a timer: rate limits, the announcements of a network interface, or a
/// balloon's statistics.
#[rustfmt::skip]
pub(super) const TIMER: &[Sysno] = &[
    timerfd_settime,
];

/// Calls of a socket device: accepting connections, data of streams, and the timer of its timeouts.
#[rustfmt::skip]
pub(super) const VSOCK: &[Sysno] = &[
    accept4, recvfrom, sendto, shutdown, timerfd_settime,
];

/// Calls that only the threads that serve the operator need.
#[rustfmt::skip]
pub(super) const PROCESS: &[Sysno] = &[
    // Files by name. Landlock restricts which ones.
    open, openat, openat2, creat, stat, lstat, newfstatat, statx, access, faccessat, faccessat2,
    readlink, readlinkat, getdents, getdents64, getcwd, mkdir, mkdirat, rmdir, unlink, unlinkat,
    rename, renameat, renameat2, link, linkat, truncate, statfs, fstatfs, fchmod, umask, fcntl,
    syncfs, sendfile, splice, readahead,
    // Data of files and of disks, which these threads open.
    pread64, pwrite64, preadv, pwritev, preadv2, pwritev2, lseek, fsync, fdatasync,
    sync_file_range, fallocate, ftruncate, fadvise64, copy_file_range, flock, dup, dup2, dup3,
    pipe2, io_uring_setup, io_uring_enter, io_uring_register,
    // Sockets.
    bind, listen, connect, accept, accept4, shutdown, sendto, sendmsg, sendmmsg, recvfrom, recvmsg,
    recvmmsg, getsockopt, setsockopt, getsockname, getpeername,
    // Memory.
    memfd_create, msync, mlock, mlock2, munlock, userfaultfd, mbind, set_mempolicy,
    get_mempolicy,
    // Events.
    epoll_create, epoll_create1, epoll_ctl, epoll_wait, epoll_pwait, epoll_pwait2, select,
    pselect6, eventfd, eventfd2, timerfd_create, timerfd_settime, timerfd_gettime, signalfd4, pipe,
    timer_create, timer_settime, timer_delete,
    // Signals and threads.
    rt_sigaction, rt_sigpending, rt_sigtimedwait, rt_sigsuspend, clone3, set_tid_address,
    sched_setaffinity, sched_getparam, sched_getscheduler, sched_getattr, sched_setattr,
    sched_get_priority_max, sched_get_priority_min, getppid, getpgrp, getpgid, getsid, getgroups,
    getresuid, getresgid, getrlimit, getpriority, times, capget,
    // Narrower domains for threads that are started later.
    landlock_create_ruleset, landlock_add_rule, landlock_restrict_self,
];

/// `_IOC_TYPE` of KVM's ioctls. The filters ignore an ioctl's direction and size.
pub(super) const KVMIO: u64 = 0xae;

/// KVM ioctls of a vCPU's thread. `KVM_RUN` comes first because rules are checked in order.
pub(super) const VCPU_IOCTLS: &[u8] = &[
    0x80, // RUN
    0x61, 0x67, 0xa5, // IRQ_LINE, IRQ_LINE_STATUS, SIGNAL_MSI and SET_XSAVE
    0x81, 0x82, 0x83, 0x84, 0xcc, 0xcd, // REGS, SREGS, SREGS2
    0x88, 0x89, 0x8c, 0x8d, 0x8e, 0x8f, // MSRS, FPU, LAPIC
    0x90, 0x91, 0x98, 0x99, 0x9f, 0xa0, // CPUID2, MP_STATE, VCPU_EVENTS
    0xa1, 0xa2, 0xa3, 0xa4, 0xa6, 0xa7, // DEBUGREGS, TSC_KHZ, XSAVE, XCRS
    0xab, 0xac, 0xad, 0xbe, 0xbf, 0xcf, // ONE_REG, KVMCLOCK_CTRL, NESTED_STATE, XSAVE2
    0xe1, 0xe2, 0xe3, 0x03, 0x85, 0x86, // DEVICE_ATTR, CHECK_EXTENSION, TRANSLATE, INTERRUPT
    0x9a, // NMI
];
/// KVM ioctls of serial input: interrupt lines.
#[rustfmt::skip]
pub(super) const LINE_IOCTLS: &[u8] = &[
    0x61, 0x67, // IRQ_LINE, IRQ_LINE_STATUS
];
/// KVM ioctls of the collector: dirty rings, dirty bitmaps, and switching logging of slots.
#[rustfmt::skip]
pub(super) const DIRTY_IOCTLS: &[u8] = &[
    0xc7, 0x42, 0xc0, // RESET_DIRTY_RINGS, GET_DIRTY_LOG, CLEAR_DIRTY_LOG
    0x46, 0x49, // SET_USER_MEMORY_REGION, SET_USER_MEMORY_REGION2
];
/// KVM ioctls of the supervisor: state that belongs to no vCPU, interrupt lines, event descriptors.
#[rustfmt::skip]
pub(super) const VM_IOCTLS: &[u8] = &[
    0x61, 0x67, 0xa5, // IRQ_LINE, IRQ_LINE_STATUS, SIGNAL_MSI
    0x62, 0x63, 0x7b, 0x7c, // GET_IRQCHIP, SET_IRQCHIP, SET_CLOCK, GET_CLOCK
    0x9f, 0xa0, // GET_PIT2, SET_PIT2; of a vCPU they are GET_VCPU_EVENTS, SET_VCPU_EVENTS
    0x03, 0x6a, 0x76, 0x79, // CHECK_EXTENSION, SET_GSI_ROUTING, IRQFD, IOEVENTFD
    0x46, 0x49, // SET_USER_MEMORY_REGION, SET_USER_MEMORY_REGION2
];

/// Ioctls for attaching to a tap: interface, queues, header size, offloads, features.
#[rustfmt::skip]
pub(super) const TUN_IOCTLS: &[u32] = &[
    0x4004_54ca, 0x4004_54d0, 0x4004_54d9, // TUNSETIFF, TUNSETOFFLOAD, TUNSETQUEUE
    0x4004_54d8, 0x4004_54dc, 0x4004_54d4, // TUNSETVNETHDRSZ, TUNSETVNETLE, TUNSETSNDBUF
    0x8004_54cf, 0x8004_54d2, // TUNGETFEATURES, TUNGETIFF
    0x8004_54d7, 0x8004_54d3, // TUNGETVNETHDRSZ, TUNGETSNDBUF
];
/// Ioctls of an attached tap: `TUNSETOFFLOAD`, `TUNSETQUEUE`.
#[rustfmt::skip]
pub(super) const TAP_IOCTLS: &[u32] = &[
    0x4004_54d0, 0x4004_54d9,
];
/// `FIONBIO`, which makes a stream non-blocking.
#[rustfmt::skip]
pub(super) const STREAM_IOCTLS: &[u32] = &[
    0x5421,
];
/// `FIONREAD`, which tells the end of standard input from input that waits.
#[rustfmt::skip]
pub(super) const INPUT_IOCTLS: &[u32] = &[
    0x541b,
];
/// Ioctls of terminals: settings, sizes, the foreground. TIOCSTI and TIOCLINUX are never allowed,
/// because they inject input.
#[rustfmt::skip]
pub(super) const TERMINAL_IOCTLS: &[u32] = &[
    0x5401, 0x5402, 0x5403, 0x5404, // TCGETS, TCSETS, TCSETSW, TCSETSF
    0x540f, 0x5413, 0x5429, // TIOCGPGRP, TIOCGWINSZ, TIOCGSID
    0x802c_542a, 0x402c_542b, 0x402c_542c, 0x402c_542d, // TCGETS2, TCSETS2, TCSETSW2, TCSETSF2
];
/// Ioctls of any descriptor: non-blocking, close on exec, number of readable bytes.
#[rustfmt::skip]
pub(super) const PLAIN_IOCTLS: &[u32] = &[
    0x5421, 0x5450, 0x5451, 0x541b, // FIONBIO, FIONCLEX, FIOCLEX, FIONREAD
];
/// Ioctls of interfaces: name, index, address, flags, MTU.
#[rustfmt::skip]
pub(super) const INTERFACE_IOCTLS: &[u32] = &[
    0x8910, 0x8913, 0x8914, // SIOCGIFNAME, SIOCGIFFLAGS, SIOCSIFFLAGS
    0x8921, 0x8927, 0x8933, // SIOCGIFMTU, SIOCGIFHWADDR, SIOCGIFINDEX
];
/// `PAGEMAP_SCAN`.
#[rustfmt::skip]
pub(super) const PAGEMAP_IOCTLS: &[u32] = &[
    0xc060_6610,
];
/// Ioctls of the collector on its open userfaultfd: `UFFDIO_REGISTER`, `UFFDIO_UNREGISTER`,
/// `UFFDIO_WRITEPROTECT`.
#[rustfmt::skip]
pub(super) const WATCH_IOCTLS: &[u32] = &[
    0xc020_aa00, 0x8010_aa01, 0xc018_aa06,
];
/// `_IOC_TYPE` of userfaultfd's ioctls.
pub(super) const UFFDIO: u64 = 0xaa;

/// Commands of `fcntl` that every thread may use: descriptor flags and duplicates.
#[rustfmt::skip]
pub(super) const DESCRIPTOR_COMMANDS: &[i32] = &[
    libc::F_GETFD, libc::F_SETFD, libc::F_GETFL, libc::F_SETFL, libc::F_DUPFD_CLOEXEC,
];
