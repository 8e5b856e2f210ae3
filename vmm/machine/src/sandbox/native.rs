//! Functions that only the C library offers: the handler that reports a forbidden system call, and
//! a setting of its allocator. This is the unsafe code of the sandbox.

use std::ffi::CStr;
use std::fmt::Write;
use std::io;
use std::mem::MaybeUninit;

use libc::{c_int, c_void, siginfo_t};
use syscalls::Sysno;

use crate::fatal_signals::{self, SigsysInfo};
use crate::stack_text::StackText;

/// Installs the handler that reports a forbidden system call: one line on standard error that names
/// the call, then the end of the process.
pub(super) fn report_violations() -> io::Result<()> {
    // SAFETY: all of sigaction may be zero: no flags, no signals blocked, no handler.
    let mut action: libc::sigaction = unsafe { MaybeUninit::zeroed().assume_init() };
    let handler: extern "C" fn(c_int, *mut siginfo_t, *mut c_void) = on_violation;
    action.sa_sigaction = handler as usize;
    action.sa_flags = libc::SA_SIGINFO;
    // SAFETY: the handler makes only async-signal-safe calls, and the old action is not requested.
    let ret = unsafe { libc::sigaction(libc::SIGSYS, &action, std::ptr::null_mut()) };
    if ret == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

extern "C" fn on_violation(_: c_int, info: *mut siginfo_t, context: *mut c_void) {
    // SAFETY: the kernel gives a handler with SA_SIGINFO a whole siginfo_t, laid out like this.
    let info = unsafe { &*info.cast::<SigsysInfo>() };
    let forbidden = info.forbidden();
    if let Some(call) = forbidden {
        report(call, context.cast());
    }
    // Ends a process that has an exit code for this.
    fatal_signals::end(libc::SIGSYS, info.code, forbidden);
    // Every filter allows this call. A failure cannot be reported any more.
    let _ = crate::terminal::restore();
    // SIGSYS is blocked in its handler, so this call, which no filter allows, ends the process by
    // that signal.
    // SAFETY: a call without arguments, of a number that no kernel has given a meaning.
    unsafe { libc::syscall(libc::SYS_afs_syscall) };
    // Reached without a filter, after a SIGSYS from elsewhere.
    // SAFETY: ends the process, without touching its memory.
    unsafe { libc::_exit(128 + libc::SIGSYS) };
}

/// Writes one line about the call. It neither allocates nor takes a lock, because the thread may
/// have been interrupted while it does either.
fn report(number: c_int, context: *const libc::ucontext_t) {
    let mut name = [0u8; 16];
    // SAFETY: the kernel writes at most 16 bytes there, a terminated string.
    unsafe { libc::prctl(libc::PR_GET_NAME, name.as_mut_ptr()) };
    let thread = CStr::from_bytes_until_nul(&name).ok().and_then(|n| n.to_str().ok());
    let thread = thread.unwrap_or("?");
    let call = usize::try_from(number).ok().and_then(Sysno::new);
    let call_name = call.map_or("unknown", |c| c.name());
    let mut line = StackText::<320>::new();
    let _ = write!(line, "driftline: thread {thread} made system call {number} ({call_name}");
    if call == Some(Sysno::ioctl) && !context.is_null() {
        // SAFETY: the kernel gives a handler the whole context of the thread.
        let request = unsafe { (*context).uc_mcontext.gregs[libc::REG_RSI as usize] };
        let _ = write!(line, " of request {:#x}", request as u32);
    }
    let _ = writeln!(
        line,
        "), which it never should: the process ends here (SIGSYS). Either the guest has broken out \
         of its devices, or the filter is too narrow for this host; --no-seccomp runs without"
    );
    fatal_signals::write_if_ready(libc::STDERR_FILENO, line.as_bytes());
}

/// Makes all threads allocate from one arena. With several arenas the GNU C library opens files: to
/// count processors when a thread starts, and on any thread that first returns memory. Threads of
/// this process allocate little, or large blocks that are mappings of their own.
pub(super) fn use_one_arena() {
    #[cfg(target_env = "gnu")]
    {
        // SAFETY: mallopt sets a number; a refusal changes nothing.
        unsafe { libc::mallopt(libc::M_ARENA_MAX, 1) };
    }
}

/// Makes a raw system call. The tests of the filters use it for forbidden calls.
#[cfg(test)]
pub(super) fn call(number: Sysno, arguments: [i64; 3]) -> io::Result<i64> {
    let [a, b, c] = arguments;
    // SAFETY: the tests pass no pointers except null.
    let ret = unsafe { libc::syscall(number.id().into(), a, b, c) };
    if ret < 0 { Err(io::Error::last_os_error()) } else { Ok(ret) }
}
