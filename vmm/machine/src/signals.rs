//! Signal masks of threads.

/// Blocks all signals of the process in the calling thread, except those that a thread causes
/// itself (a fault, a forbidden system call). Other threads take the blocked signals. The reasons:
/// `KVM_RESET_DIRTY_RINGS` stops early at a signal and counts frames that it has not protected, and
/// a handler may do more than the thread is allowed to.
pub(crate) fn block() {
    let mut set = std::mem::MaybeUninit::<libc::sigset_t>::uninit();
    // SAFETY: sigfillset initializes the set that it is given.
    unsafe { libc::sigfillset(set.as_mut_ptr()) };
    // SAFETY: it is initialized.
    let mut set = unsafe { set.assume_init() };
    for own in [libc::SIGSYS, libc::SIGSEGV, libc::SIGBUS, libc::SIGILL, libc::SIGFPE] {
        // SAFETY: the set is initialized, and these are numbers of signals.
        unsafe { libc::sigdelset(&raw mut set, own) };
    }
    // SAFETY: the set is initialized, and the previous mask is not asked for.
    unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, &raw const set, std::ptr::null_mut()) };
}
