//! Work that precedes the end of the process by a fatal signal. The handler of `fatal_signals`
//! waits for it, and cannot do it: it may neither allocate nor take a lock.

use std::io;

use libc::c_int;

use crate::sandbox::{self, Class};
use crate::{fatal_signals, signals};

/// Starts a thread that calls `work` with the signal once one ends the process. The thread may do
/// what a thread that writes the log may do. A process has at most one, and has none unless
/// `fatal_signals` is installed.
///
/// # Errors
///
/// The thread cannot be started, or there is one already.
pub fn start(work: impl FnOnce(c_int) + Send + 'static) -> io::Result<()> {
    if !fatal_signals::is_installed() {
        return Ok(());
    }
    fatal_signals::expect_last_work()?;
    let thread = sandbox::spawn(Class::Log, "last-work", move || {
        // The handler must run on another thread: it waits for this one.
        signals::block_all();
        if let Some(signal) = fatal_signals::await_fatal() {
            work(signal);
            fatal_signals::finish_last_work();
        }
    })?;
    // It ends with the process.
    drop(thread);
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::process::{Command, Output};
    use std::sync::atomic::{AtomicI32, AtomicU32, Ordering};
    use std::thread;
    use std::time::{Duration, Instant};

    use rustix::net::{AddressFamily, SocketType, socket};
    use vmm_sys_util::signal::{register_signal_handler, unblock_signal};

    use super::*;
    use crate::sandbox::SandboxOptions;

    /// Environment variable that says what the work of a copy of this test binary does, and which
    /// class of threads makes a forbidden call: `<work>:<class>`.
    const WORK: &str = "DRIFTLINE_LAST_WORK";
    /// Exit code of the copies.
    const CODE: i32 = 148;

    /// Ends a copy of this test binary by a forbidden call. Returns how long that took, too.
    fn ended(work: &str, class: Class) -> (Output, Duration) {
        let mut copy = Command::new(std::env::current_exe().unwrap());
        copy.args(["--exact", "last_work::tests::child", "--nocapture", "--test-threads=1"]);
        let begun = Instant::now();
        let out = copy.env(WORK, format!("{work}:{class:?}")).output().unwrap();
        (out, begun.elapsed())
    }

    /// The thread to be interrupted; 0 until there is one.
    static INTERRUPTED: AtomicI32 = AtomicI32::new(0);
    /// Number of signals sent to that thread.
    static SENT: AtomicU32 = AtomicU32::new(0);

    /// Sends signals to that thread until the process ends, as a vCPU's thread receives kicks.
    fn interrupt_repeatedly() {
        extern "C" fn nothing(_: c_int, _: *mut libc::siginfo_t, _: *mut libc::c_void) {}
        register_signal_handler(libc::SIGUSR2, nothing).unwrap();
        thread::spawn(|| {
            loop {
                thread::sleep(Duration::from_millis(5));
                let to = libc::c_long::from(INTERRUPTED.load(Ordering::SeqCst));
                if to != 0 {
                    let process = libc::c_long::from(std::process::id());
                    // SAFETY: takes numbers; the handler of the signal does nothing.
                    let sent =
                        unsafe { libc::syscall(libc::SYS_tgkill, process, to, libc::SIGUSR2) };
                    assert_eq!(sent, 0);
                    SENT.fetch_add(1, Ordering::SeqCst);
                }
            }
        });
    }

    /// Ends by a forbidden call, if the environment asks for it.
    #[test]
    fn child() {
        let Ok(selected) = std::env::var(WORK) else { return };
        let (work, class) = selected.split_once(':').unwrap();
        let class = Class::ALL.into_iter().find(|c| format!("{c:?}") == class).unwrap();
        let (is_stuck, is_interrupted) = (work == "stuck", work == "interrupted");
        if is_interrupted {
            interrupt_repeatedly();
        }
        fatal_signals::install("a-1", &[(libc::SIGSYS, CODE as u8)]).unwrap();
        // The thread of the test stays as it is.
        let process = thread::spawn(move || {
            let options = SandboxOptions { seccomp: true, ..SandboxOptions::default() };
            sandbox::start(&options).unwrap();
            start(move |signal| {
                // Otherwise the work may precede the first signal.
                while is_interrupted && SENT.load(Ordering::SeqCst) < 3 {
                    thread::sleep(Duration::from_millis(5));
                }
                // As if the interrupted thread had a lock.
                if is_stuck {
                    loop {
                        thread::park();
                    }
                }
                println!("\nafter signal {signal}");
            })
            .unwrap();
            assert!(start(|_| ()).is_err(), "a process has one");
            let forbidden = move || {
                if is_interrupted {
                    unblock_signal(libc::SIGUSR2).unwrap();
                    INTERRUPTED.store(rustix::thread::gettid().as_raw_pid(), Ordering::SeqCst);
                }
                drop(socket(AddressFamily::INET, SocketType::STREAM, None));
            };
            sandbox::spawn(class, "forbidden", forbidden).unwrap().join().unwrap();
        });
        process.join().unwrap();
    }

    #[test]
    fn work_precedes_the_end_by_any_thread() {
        for class in Class::ALL {
            let (out, _) = ended("done", class);
            let stdout = String::from_utf8_lossy(&out.stdout);
            assert_eq!(out.status.code(), Some(CODE), "{class:?}: {stdout}");
            let line = format!("\nafter signal {}\n", libc::SIGSYS);
            assert!(stdout.contains(&line), "{class:?}: {stdout}");
        }
    }

    #[test]
    fn signals_do_not_end_the_wait_for_it() {
        let (out, _) = ended("interrupted", Class::Vcpu);
        let stdout = String::from_utf8_lossy(&out.stdout);
        assert_eq!(out.status.code(), Some(CODE), "{stdout}");
        assert!(stdout.contains(&format!("\nafter signal {}\n", libc::SIGSYS)), "{stdout}");
    }

    #[test]
    fn stuck_work_delays_the_end_by_its_limit() {
        let (out, took) = ended("stuck", Class::Block);
        assert_eq!(out.status.code(), Some(CODE), "{}", String::from_utf8_lossy(&out.stdout));
        assert!(took >= Duration::from_secs(1), "the process did not wait for it: {took:?}");
        assert!(took < Duration::from_secs(30), "the process waited for too long: {took:?}");
    }
}
