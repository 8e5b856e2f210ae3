//! Standard input, the guest's console: it has one owner at a time. If it is a terminal, its
//! settings are raw while the owner lives. Every exit path restores them, including
//! [`exit::now`](crate::exit::now) and the handler of SIGSYS. The unsafe code consists of two
//! ioctls, which a signal handler may make.

use std::io;
use std::mem::MaybeUninit;
use std::ptr;
use std::sync::atomic::{AtomicBool, AtomicPtr, Ordering};

use libc::termios2;

/// `TCGETS2` and `TCSETS2`. The latter takes effect immediately.
const GET: u32 = 0x802c_542a;
pub(crate) const SET: u32 = 0x402c_542b;

/// Whether standard input has an owner.
static OWNED: AtomicBool = AtomicBool::new(false);

/// The settings to restore; null while there are none. The pointee is never freed: a handler may be
/// reading it.
static BEFORE: AtomicPtr<termios2> = AtomicPtr::new(ptr::null_mut());

/// The right to read standard input and to change its settings. A second owner would save the raw
/// settings of the first as those to restore.
#[derive(Debug)]
pub(crate) struct Stdin(());

impl Stdin {
    /// Takes standard input; `None` while another owner has it.
    pub(crate) fn take() -> Option<Self> {
        // Constructed only by the new owner: its drop gives the ownership up.
        (!OWNED.swap(true, Ordering::AcqRel)).then(|| Self(()))
    }

    /// Makes the terminal raw until this value is dropped. Output processing does not change.
    pub(crate) fn make_raw(&mut self) -> io::Result<()> {
        let mut settings = MaybeUninit::<termios2>::uninit();
        // SAFETY: the kernel writes the whole structure there, or fails.
        let got =
            unsafe { libc::ioctl(libc::STDIN_FILENO, GET as libc::Ioctl, settings.as_mut_ptr()) };
        if got != 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: the ioctl has succeeded and has written it.
        let before = unsafe { settings.assume_init() };
        let mut raw = before;
        raw.c_iflag &= !(libc::IGNBRK
            | libc::BRKINT
            | libc::PARMRK
            | libc::ISTRIP
            | libc::INLCR
            | libc::IGNCR
            | libc::ICRNL
            | libc::IXON);
        // Output flags do not change: this process's own lines end as usual.
        raw.c_lflag &= !(libc::ECHO | libc::ECHONL | libc::ICANON | libc::ISIG | libc::IEXTEN);
        raw.c_cflag = raw.c_cflag & !(libc::CSIZE | libc::PARENB) | libc::CS8;
        raw.c_cc[libc::VMIN] = 1;
        raw.c_cc[libc::VTIME] = 0;
        // Stored before the change, so that the change is undone wherever the process ends.
        BEFORE.store(Box::into_raw(Box::new(before)), Ordering::Release);
        set(&raw)
    }

    /// Restores the terminal, and keeps the ownership until the process ends, because a thread may
    /// still read standard input.
    pub(crate) fn abandon(self) {
        restore_or_warn();
        std::mem::forget(self);
    }
}

impl Drop for Stdin {
    fn drop(&mut self) {
        restore_or_warn();
        OWNED.store(false, Ordering::Release);
    }
}

fn restore_or_warn() {
    if let Err(e) = restore() {
        tracing::warn!("the terminal's settings cannot be restored: {e}");
    }
}

/// Restores the settings if the terminal is raw. Async-signal-safe.
pub(crate) fn restore() -> io::Result<()> {
    let before = BEFORE.swap(ptr::null_mut(), Ordering::AcqRel);
    if before.is_null() {
        return Ok(());
    }
    // SAFETY: `Box::into_raw` returned it, and it is never freed.
    set(unsafe { &*before })
}

fn set(settings: &termios2) -> io::Result<()> {
    // SAFETY: the kernel reads the whole structure.
    let set = unsafe { libc::ioctl(libc::STDIN_FILENO, SET as libc::Ioctl, settings) };
    if set == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

#[cfg(test)]
mod tests {
    use rustix::fs::{Mode, OFlags};
    use rustix::pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt};
    use rustix::termios::{LocalModes, tcgetattr};

    use super::*;
    use crate::testing::run_in_child;

    fn is_raw() -> bool {
        let modes = tcgetattr(io::stdin()).unwrap().local_modes;
        !modes.contains(LocalModes::ICANON) && !modes.contains(LocalModes::ECHO)
    }

    /// Runs in its own process, whose standard input is a terminal.
    #[test]
    fn terminal_has_one_owner_at_a_time() {
        const CHILD: &str = "OWNS_A_TERMINAL";
        if std::env::var_os(CHILD).is_none() {
            let master = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY).unwrap();
            grantpt(&master).unwrap();
            unlockpt(&master).unwrap();
            let name = ptsname(&master, Vec::new()).unwrap().into_string().unwrap();
            let flags = OFlags::RDWR | OFlags::NOCTTY;
            let terminal = rustix::fs::open(&name, flags, Mode::empty()).unwrap();
            let test = "terminal::tests::terminal_has_one_owner_at_a_time";
            return run_in_child(test, CHILD, "1", terminal);
        }
        assert!(!is_raw());
        let mut first = Stdin::take().unwrap();
        first.make_raw().unwrap();
        assert!(is_raw());
        if let Some(mut second) = Stdin::take() {
            second.make_raw().unwrap();
            drop(second);
            drop(first);
            panic!("the terminal has two owners, and is left raw: {}", is_raw());
        }
        assert!(is_raw(), "the one that was refused has not restored it");
        drop(first);
        assert!(!is_raw());
        let mut next = Stdin::take().unwrap();
        next.make_raw().unwrap();
        assert!(is_raw());
        drop(next);
        assert!(!is_raw());
    }
}
