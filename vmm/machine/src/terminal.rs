//! Owns the settings of the terminal that is the guest's console: raw while the guest lives, and as
//! they were before on every way out, [`exit::now`](crate::exit::now) and the handler of SIGSYS
//! included. The unsafe code is two ioctls, which a signal handler may make.

use std::io;
use std::mem::MaybeUninit;
use std::ptr;
use std::sync::atomic::{AtomicPtr, Ordering};

use libc::termios2;

/// `TCGETS2` and `TCSETS2`, the latter at once.
const GET: libc::c_ulong = 0x802c_542a;
pub(crate) const SET: u32 = 0x402c_542b;

/// The settings to restore; null while there are none. What it points to is never freed: a handler
/// may be reading it.
static BEFORE: AtomicPtr<termios2> = AtomicPtr::new(ptr::null_mut());

/// Standard input as a raw terminal; dropping this restores its settings.
#[derive(Debug)]
pub(crate) struct RawTerminal(());

impl RawTerminal {
    /// Makes standard input raw; output is processed as before.
    pub(crate) fn new() -> io::Result<Self> {
        let mut settings = MaybeUninit::<termios2>::uninit();
        // SAFETY: the kernel writes the whole structure there, or fails.
        let got = unsafe { libc::ioctl(libc::STDIN_FILENO, GET, settings.as_mut_ptr()) };
        if got != 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: it is written.
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
        // Our own lines, on the same terminal, end as they always do.
        raw.c_lflag &= !(libc::ECHO | libc::ECHONL | libc::ICANON | libc::ISIG | libc::IEXTEN);
        raw.c_cflag = raw.c_cflag & !(libc::CSIZE | libc::PARENB) | libc::CS8;
        raw.c_cc[libc::VMIN] = 1;
        raw.c_cc[libc::VTIME] = 0;
        // Before the change, so that it is undone wherever the process ends from here on.
        BEFORE.store(Box::into_raw(Box::new(before)), Ordering::Release);
        set(&raw)?;
        Ok(Self(()))
    }
}

impl Drop for RawTerminal {
    fn drop(&mut self) {
        if let Err(e) = restore() {
            tracing::warn!("the terminal's settings cannot be restored: {e}");
        }
    }
}

/// Restores the settings if the terminal is raw. Async-signal-safe.
pub(crate) fn restore() -> io::Result<()> {
    let before = BEFORE.swap(ptr::null_mut(), Ordering::AcqRel);
    if before.is_null() {
        return Ok(());
    }
    // SAFETY: it was made by `Box::into_raw` and is never freed.
    set(unsafe { &*before })
}

fn set(settings: &termios2) -> io::Result<()> {
    // SAFETY: the kernel reads the whole structure.
    let set = unsafe { libc::ioctl(libc::STDIN_FILENO, libc::c_ulong::from(SET), settings) };
    if set == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}
