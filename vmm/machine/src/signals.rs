//! Signals of this process and its threads.

use std::mem::MaybeUninit;
use std::ptr;

use libc::{SIGHUP, SIGINT, SIGTERM, c_int};
use vmm_sys_util::signal::create_sigset;

use crate::fatal_signals;

/// Blocks all signals of the process in the calling thread, except those that a thread causes
/// itself (a fault, a forbidden system call). Other threads take the blocked signals. The reasons:
/// `KVM_RESET_DIRTY_RINGS` stops early at a signal and counts frames that it has not protected, and
/// a handler may do more than the thread is allowed to.
pub(crate) fn block() {
    let mut set = all();
    // Without a handler, SIGXFSZ would kill the process for a write that fails anyway.
    let size = fatal_signals::handles(libc::SIGXFSZ).then_some(libc::SIGXFSZ);
    let own = [libc::SIGSYS, libc::SIGSEGV, libc::SIGBUS, libc::SIGILL, libc::SIGFPE];
    for own in own.into_iter().chain(size) {
        // SAFETY: the set is initialized, and these are numbers of signals.
        unsafe { libc::sigdelset(&raw mut set, own) };
    }
    change_mask(libc::SIG_SETMASK, &set);
}

/// Blocks all signals in the calling thread. What it causes itself then kills the process.
pub(crate) fn block_all() {
    change_mask(libc::SIG_SETMASK, &all());
}

fn all() -> libc::sigset_t {
    let mut set = MaybeUninit::<libc::sigset_t>::uninit();
    // SAFETY: sigfillset initializes the set that it is given.
    unsafe { libc::sigfillset(set.as_mut_ptr()) };
    // SAFETY: it is initialized.
    unsafe { set.assume_init() }
}

/// Blocks the signals that end the process in the calling thread and in the threads that it starts.
/// The kernel delivers a signal to the main thread if that thread does not block it, even while the
/// thread waits for a disk that never answers. No other thread would then receive the signal.
pub fn block_termination() {
    match create_sigset(&[SIGINT, SIGTERM, SIGHUP]) {
        Ok(set) => change_mask(libc::SIG_BLOCK, &set),
        Err(e) => tracing::warn!("signals cannot be blocked: {e}"),
    }
}

/// Ends the process by `signal`, which one of its threads may have handled until now. The parent
/// sees a process that was killed by it.
pub fn end_by(signal: c_int) -> ! {
    // A stuck thread may still have the terminal. A failure cannot be reported any more.
    let _ = crate::terminal::restore();
    // SAFETY: the default action of a signal needs no handler.
    unsafe { libc::signal(signal, libc::SIG_DFL) };
    if let Ok(set) = create_sigset(&[signal]) {
        change_mask(libc::SIG_UNBLOCK, &set);
    }
    // As `raise` does with glibc. With musl it uses `tkill`, which the filters of system calls do
    // not allow.
    let (process, thread) = (std::process::id(), rustix::thread::gettid().as_raw_nonzero());
    // SAFETY: no thread of this process depends on what it interrupts.
    unsafe { libc::syscall(libc::SYS_tgkill, process, thread.get(), signal) };
    // Reached if the default action of the signal does not end the process.
    std::process::exit(1)
}

fn change_mask(how: c_int, set: &libc::sigset_t) {
    // SAFETY: the set is initialized, and the previous mask is not requested.
    unsafe { libc::pthread_sigmask(how, set, ptr::null_mut()) };
}

/// Returns whether the process ignores SIGHUP, as one that `nohup` has started does.
pub fn ignores_hang_up() -> bool {
    let mut action = MaybeUninit::<libc::sigaction>::zeroed();
    // SAFETY: with a null new action the kernel only writes the current one to `action`.
    let result = unsafe { libc::sigaction(SIGHUP, ptr::null(), action.as_mut_ptr()) };
    // SAFETY: an all-zero value is valid, and the kernel writes it if the call succeeded.
    result == 0 && unsafe { action.assume_init() }.sa_sigaction == libc::SIG_IGN
}
