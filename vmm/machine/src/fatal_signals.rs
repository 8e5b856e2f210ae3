//! Signals that end the process with an exit code and a line in the log, as Firecracker's do. A
//! process that has not called [`install`] is killed by them.
//!
//! The handler makes only async-signal-safe calls, and its wait is bounded. A pipe or a terminal
//! that has no room does not get the line. `poll` cannot tell whether the storage of a regular file
//! answers, so an alarm precedes its write: after a second, SIGALRM kills the process instead.
//!
//! Work that allocates or takes locks, such as a line of metrics, is done by a thread of its own
//! (`last_work`). The handler wakes it, and waits for it for a second at most: the interrupted
//! thread may hold what the work needs. Then the process ends without it.

use std::ffi::CStr;
use std::fmt::Write;
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicI32, Ordering};
use std::time::{Duration, Instant};

use libc::{c_int, c_void, siginfo_t};
use rustix::event::{EventfdFlags, eventfd};
use rustix::fs::{FileType, fstat};

use crate::local_time::utc_offset;
use crate::stack_text::StackText;
use crate::terminal;

/// Exit code for a signal of another origin than expected.
const UNEXPECTED: c_int = 2;
/// `si_code` of a signal that a seccomp filter raised.
pub(crate) const SYS_SECCOMP: c_int = 1;
/// Limit on writing to a regular file, in seconds.
const FILE_LIMIT_S: libc::c_uint = 1;

/// Kernel layout of `siginfo_t` for `SIGSYS`. The first three fields are those of all signals.
#[repr(C)]
pub(crate) struct SigsysInfo {
    signo: c_int,
    errno: c_int,
    pub(crate) code: c_int,
    call_address: *const c_void,
    pub(crate) syscall: c_int,
    arch: u32,
}
const _: () = assert!(size_of::<SigsysInfo>() <= size_of::<siginfo_t>());

impl SigsysInfo {
    /// Returns the number of the system call that a filter forbade.
    pub(crate) fn forbidden(&self) -> Option<c_int> {
        (self.signo == libc::SIGSYS && self.code == SYS_SECCOMP).then_some(self.syscall)
    }
}

/// The exit codes of the signals.
pub type FatalCodes = &'static [(c_int, u8)];

/// What the handler needs.
struct FatalSignals {
    codes: FatalCodes,
    /// Id of the instance, for the line.
    id: String,
    /// Difference of the host's time zone to UTC, in seconds.
    utc_offset: i64,
    /// A descriptor of the log's destination. It stays open: [`log_to`] replaces the file that it
    /// refers to.
    log: OwnedFd,
    /// Whether that is a regular file.
    is_file: AtomicBool,
    /// Whether the line is written.
    is_logged: AtomicBool,
}

static FATAL: OnceLock<FatalSignals> = OnceLock::new();

/// Limit on waiting for the last work.
const LAST_WORK_LIMIT: Duration = Duration::from_secs(1);

/// The means by which the handler and the thread of the last work notify each other.
struct LastWork {
    /// The first signal of the process; 0 until then.
    signal: AtomicI32,
    /// An eventfd that the handler writes to, and the thread reads.
    begin: OwnedFd,
    /// An eventfd that the thread writes to. It stays readable, for all threads in the handler.
    done: OwnedFd,
}

static LAST_WORK: OnceLock<LastWork> = OnceLock::new();

/// Installs the handler for the signals of `codes`. The sandbox replaces that of SIGSYS if it
/// filters system calls. The line names the instance `id`, and goes to stdout until [`log_to`] is
/// called. Main calls this once.
///
/// # Errors
///
/// The system's error.
pub fn install(id: &str, codes: FatalCodes) -> io::Result<()> {
    // SAFETY: duplicates a descriptor; the result is checked.
    let log = unsafe { libc::fcntl(libc::STDOUT_FILENO, libc::F_DUPFD_CLOEXEC, 3) };
    if log < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the call has succeeded, so this is a new descriptor.
    let log = unsafe { OwnedFd::from_raw_fd(log) };
    let fatal = FatalSignals {
        codes,
        id: id.to_owned(),
        utc_offset: utc_offset(),
        is_file: AtomicBool::new(is_regular(log.as_fd())?),
        log,
        is_logged: AtomicBool::new(true),
    };
    let _ = FATAL.set(fatal);
    // The parent process may have set this process to ignore the alarm of a write.
    // SAFETY: no other code of this process uses this signal.
    unsafe { libc::signal(libc::SIGALRM, libc::SIG_DFL) };
    for &(signal, _) in codes {
        // SAFETY: all of sigaction may be zero: no flags, no signals blocked, no handler.
        let mut action: libc::sigaction = unsafe { MaybeUninit::zeroed().assume_init() };
        let handler: extern "C" fn(c_int, *mut siginfo_t, *mut c_void) = on_fatal;
        action.sa_sigaction = handler as usize;
        // The handler cannot run on a stack that has overflowed.
        action.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK;
        // SAFETY: sigfillset initializes the set.
        unsafe { libc::sigfillset(&raw mut action.sa_mask) };
        // SAFETY: the handler makes only async-signal-safe calls; the old action is not requested.
        if unsafe { libc::sigaction(signal, &raw const action, std::ptr::null_mut()) } != 0 {
            return Err(io::Error::last_os_error());
        }
    }
    Ok(())
}

/// Sends the line to `log`. Does nothing in a process without the handler.
///
/// # Errors
///
/// The system's error. The earlier destination stays.
pub fn log_to(log: BorrowedFd<'_>) -> io::Result<()> {
    let Some(fatal) = FATAL.get() else { return Ok(()) };
    let is_file = is_regular(log)?;
    // Counts as a file meanwhile: an alarm for a pipe does no harm, but a file without an alarm
    // would have no time limit.
    let was_file = fatal.is_file.swap(true, Ordering::SeqCst);
    let (from, to) = (log.as_raw_fd(), fatal.log.as_raw_fd());
    // The handler can use its descriptor at any time, so it is replaced in one step.
    // SAFETY: both are open, and the second one is used by the handler only.
    let is_replaced = unsafe { libc::dup3(from, to, libc::O_CLOEXEC) } >= 0;
    let result = if is_replaced { Ok(()) } else { Err(io::Error::last_os_error()) };
    fatal.is_file.store(if is_replaced { is_file } else { was_file }, Ordering::SeqCst);
    result
}

/// Sets whether the line is written.
pub fn set_logged(is_logged: bool) {
    if let Some(fatal) = FATAL.get() {
        fatal.is_logged.store(is_logged, Ordering::Relaxed);
    }
}

/// Lets the handler wait for the last work of the process. The calling process has a thread that
/// calls [`await_fatal`], does the work, and calls [`finish_last_work`].
///
/// # Errors
///
/// There are too many descriptors, or there is such a thread already.
pub(crate) fn expect_last_work() -> io::Result<()> {
    let event = || eventfd(0, EventfdFlags::CLOEXEC);
    let work = LastWork { signal: AtomicI32::new(0), begin: event()?, done: event()? };
    LAST_WORK.set(work).map_err(|_| io::ErrorKind::AlreadyExists.into())
}

/// Waits for a signal that ends the process, and returns it. Returns `None` if the wait fails.
pub(crate) fn await_fatal() -> Option<c_int> {
    let work = LAST_WORK.get()?;
    let mut count = [0; 8];
    while let Err(e) = rustix::io::read(&work.begin, &mut count) {
        if e != rustix::io::Errno::INTR {
            return None;
        }
    }
    Some(work.signal.load(Ordering::SeqCst))
}

/// Lets the handler end the process.
pub(crate) fn finish_last_work() {
    if let Some(work) = LAST_WORK.get() {
        // If it fails, the handler's limit ends the wait.
        let _ = rustix::io::write(&work.done, &1u64.to_ne_bytes());
    }
}

impl LastWork {
    /// Has the thread do the work, and waits until it has, also if signals interrupt the wait.
    /// Makes only async-signal-safe calls.
    fn run(&self, signal: c_int) {
        let _ = self.signal.compare_exchange(0, signal, Ordering::SeqCst, Ordering::SeqCst);
        write_if_ready(self.begin.as_raw_fd(), &1u64.to_ne_bytes());
        let mut done = libc::pollfd { fd: self.done.as_raw_fd(), events: libc::POLLIN, revents: 0 };
        let end = Instant::now() + LAST_WORK_LIMIT;
        loop {
            let left = end.saturating_duration_since(Instant::now()).as_millis();
            // SAFETY: one pollfd, and a wait that ends.
            let polled = unsafe { libc::poll(&raw mut done, 1, left as c_int) };
            if polled >= 0 || io::Error::last_os_error().kind() != io::ErrorKind::Interrupted {
                return;
            }
        }
    }
}

fn is_regular(file: BorrowedFd<'_>) -> io::Result<bool> {
    Ok(FileType::from_raw_mode(fstat(file)?.st_mode).is_file())
}

/// Returns whether the process has the handler.
pub(crate) fn is_installed() -> bool {
    FATAL.get().is_some()
}

/// Returns whether the handler ends the process on `signal`.
pub(crate) fn handles(signal: c_int) -> bool {
    FATAL.get().is_some_and(|fatal| fatal.code(signal).is_some())
}

/// Ends the process as the handler does for `signal` with this `si_code`. The log names a
/// `forbidden` system call by its number. Returns only if the signal is not handled.
pub(crate) fn end(signal: c_int, si_code: c_int, forbidden: Option<c_int>) {
    let Some(fatal) = FATAL.get() else { return };
    let Some(code) = fatal.code(signal) else { return };
    fatal.log_line(format_args!(
        "Shutting down VM after intercepting signal {signal}, code {si_code}."
    ));
    let code = match forbidden {
        Some(call) => {
            fatal.log_line(format_args!(
                "Shutting down VM after intercepting a bad syscall ({call})."
            ));
            code
        }
        // Another process has sent it.
        None if signal == libc::SIGSYS => UNEXPECTED,
        None => code,
    };
    if let Some(work) = LAST_WORK.get() {
        // The lines are written.
        // SAFETY: a call without pointers.
        unsafe { libc::alarm(0) };
        work.run(signal);
    }
    // A failure cannot be reported any more.
    let _ = terminal::restore();
    // SAFETY: ends the process, without touching its memory.
    unsafe { libc::_exit(code) };
}

extern "C" fn on_fatal(signal: c_int, info: *mut siginfo_t, _: *mut c_void) {
    // SAFETY: the kernel gives a handler with SA_SIGINFO a whole siginfo_t, laid out like this.
    let info = unsafe { &*info.cast::<SigsysInfo>() };
    end(signal, info.code, info.forbidden());
}

impl FatalSignals {
    fn code(&self, signal: c_int) -> Option<c_int> {
        self.codes.iter().find(|(other, _)| *other == signal).map(|(_, code)| (*code).into())
    }

    /// Writes a line in the form of Firecracker's log, if its destination takes it.
    fn log_line(&self, message: std::fmt::Arguments<'_>) {
        if !self.is_logged.load(Ordering::Relaxed) {
            return;
        }
        let mut now = libc::timespec { tv_sec: 0, tv_nsec: 0 };
        // SAFETY: the kernel writes the time there.
        unsafe { libc::clock_gettime(libc::CLOCK_REALTIME, &raw mut now) };
        let mut name = [0u8; 16];
        // SAFETY: the kernel writes at most 16 bytes there, a terminated string.
        unsafe { libc::prctl(libc::PR_GET_NAME, name.as_mut_ptr()) };
        let name = CStr::from_bytes_until_nul(&name).ok().and_then(|name| name.to_str().ok());
        // The name of the main thread is that of the program.
        // SAFETY: a call without arguments.
        let own_thread = unsafe { libc::syscall(libc::SYS_gettid) };
        // SAFETY: as above.
        let is_main = own_thread == libc::c_long::from(unsafe { libc::getpid() });
        let thread = if is_main { "main" } else { name.unwrap_or("-") };
        let mut line = StackText::<512>::new();
        // Writing to this text does not fail.
        let _ = write_time(&mut line, now.tv_sec + self.utc_offset, now.tv_nsec);
        let _ = writeln!(line, " [{}:{thread}] {message}", self.id);
        if self.is_file.load(Ordering::SeqCst) {
            kill_after_limit();
        }
        write_if_ready(self.log.as_raw_fd(), line.as_bytes());
    }
}

/// Writes to a descriptor if `poll` reports room. For a regular file it always does.
pub(crate) fn write_if_ready(fd: c_int, bytes: &[u8]) {
    let mut poll = libc::pollfd { fd, events: libc::POLLOUT, revents: 0 };
    // SAFETY: one pollfd, and no waiting.
    let is_ready = unsafe { libc::poll(&raw mut poll, 1, 0) } == 1;
    if is_ready && poll.revents & libc::POLLOUT != 0 {
        // SAFETY: the bytes are initialized.
        unsafe { libc::write(fd, bytes.as_ptr().cast(), bytes.len()) };
    }
}

/// Lets SIGALRM kill the process if it has not ended after the limit of a write.
fn kill_after_limit() {
    // SAFETY: an empty set may be zero.
    let mut set: libc::sigset_t = unsafe { MaybeUninit::zeroed().assume_init() };
    // SAFETY: the set is initialized, and this is the number of a signal.
    unsafe { libc::sigaddset(&raw mut set, libc::SIGALRM) };
    // All threads of this process block SIGALRM, and it stays blocked in the handler.
    // SAFETY: the set is initialized; the old one is not requested.
    unsafe { libc::pthread_sigmask(libc::SIG_UNBLOCK, &raw const set, std::ptr::null_mut()) };
    // SAFETY: a call without pointers, whose signal has its default action.
    unsafe { libc::alarm(FILE_LIMIT_S) };
}

/// Writes a time, in seconds since 1970 and nanoseconds, as `2026-11-24T18:19:40.000000001`.
fn write_time(to: &mut impl Write, seconds: i64, nanoseconds: i64) -> std::fmt::Result {
    let (mut day, second) = (seconds.div_euclid(86_400), seconds.rem_euclid(86_400));
    let is_leap = |year: i64| year % 4 == 0 && (year % 100 != 0 || year % 400 == 0);
    let mut year = 1970;
    while day >= 365 + i64::from(is_leap(year)) {
        day -= 365 + i64::from(is_leap(year));
        year += 1;
    }
    let mut month = 0;
    let days = [31, 28 + i64::from(is_leap(year)), 31, 30, 31, 30, 31, 31, 30, 31, 30, 31];
    for length in days {
        if day < length {
            break;
        }
        day -= length;
        month += 1;
    }
    let (hour, minute, second) = (second / 3600, second / 60 % 60, second % 60);
    write!(
        to,
        "{year}-{:02}-{:02}T{hour:02}:{minute:02}:{second:02}.{nanoseconds:09}",
        month + 1,
        day + 1
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_those_of_the_calendar() {
        let shown = |seconds| {
            let mut text = String::new();
            write_time(&mut text, seconds, 7).unwrap();
            text
        };
        assert_eq!(shown(0), "1970-01-01T00:00:00.000000007");
        // 29 February 2024, the last second of 2026, 1 March of a year of 365 days.
        assert_eq!(shown(1_709_210_096), "2024-02-29T12:34:56.000000007");
        assert_eq!(shown(1_798_761_599), "2026-12-31T23:59:59.000000007");
        assert_eq!(shown(1_772_323_200), "2026-03-01T00:00:00.000000007");
    }

    #[test]
    fn offset_is_that_of_the_formatted_time() {
        let now = std::time::SystemTime::now();
        let since = now.duration_since(std::time::UNIX_EPOCH).unwrap();
        let mut text = String::new();
        let seconds = since.as_secs().cast_signed() + utc_offset();
        write_time(&mut text, seconds, since.subsec_nanos().into()).unwrap();
        assert_eq!(text, crate::local_time_ns(now));
    }
}
