//! Pseudo-terminals. Programs that other tests start do not inherit their descriptors.

use std::ffi::CString;
use std::os::fd::OwnedFd;

use rustix::fs::{Mode, OFlags, open};
use rustix::pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt};

/// A pseudo-terminal.
pub struct Pty {
    /// The user's end: the keyboard and the screen.
    pub master: OwnedFd,
    name: CString,
}

impl Pty {
    pub fn new() -> Self {
        let master =
            openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC).unwrap();
        grantpt(&master).unwrap();
        unlockpt(&master).unwrap();
        let name = ptsname(&master, Vec::new()).unwrap();
        Self { master, name }
    }

    /// Opens the program's end.
    pub fn terminal(&self) -> OwnedFd {
        open(&self.name, OFlags::RDWR | OFlags::NOCTTY | OFlags::CLOEXEC, Mode::empty()).unwrap()
    }
}
