//! Descriptors that the process was started with.

use std::io;
use std::os::fd::{BorrowedFd, FromRawFd, OwnedFd, RawFd};

use rustix::io::{Errno, FdFlags, fcntl_getfd, fcntl_setfd};

/// A number under which the process was given no descriptor.
#[derive(Debug, thiserror::Error)]
#[error("this process was not started with descriptor {number}: {cause}")]
pub struct NotInherited {
    /// The number.
    pub number: RawFd,
    /// Why it cannot be used.
    #[source]
    pub cause: io::Error,
}

/// Takes a descriptor that the process was started with, by its number. Descendants do not get it.
///
/// A descriptor that was taken, or that this process has opened, is refused: those close at exec,
/// and inherited ones do not.
///
/// # Errors
///
/// [`NotInherited`] has the number.
pub fn take(number: RawFd) -> Result<OwnedFd, NotInherited> {
    let refused = |cause| NotInherited { number, cause };
    if number < 0 {
        return Err(refused(Errno::BADF.into()));
    }
    // SAFETY: the number is not -1. If the process has no such descriptor, the calls fail.
    let borrowed = unsafe { BorrowedFd::borrow_raw(number) };
    let flags = fcntl_getfd(borrowed).map_err(|e| refused(e.into()))?;
    if flags.contains(FdFlags::CLOEXEC) {
        let why = "it was opened later, or was taken before";
        return Err(refused(io::Error::new(io::ErrorKind::InvalidInput, why)));
    }
    fcntl_setfd(borrowed, FdFlags::CLOEXEC).map_err(|e| refused(e.into()))?;
    // SAFETY: the descriptor is open and has no owner. All descriptors with an owner close at exec,
    // and this one does so from now on, so that it is not taken twice.
    Ok(unsafe { OwnedFd::from_raw_fd(number) })
}

#[cfg(test)]
mod tests {
    use std::os::fd::IntoRawFd;

    use super::*;

    #[test]
    fn inherited_descriptor_is_taken_once() {
        let (reader, _writer) = std::io::pipe().unwrap();
        let number = OwnedFd::from(reader).into_raw_fd();
        let said = take(number).unwrap_err().to_string();
        assert!(said.ends_with("it was opened later, or was taken before"), "{said}");
        // SAFETY: nothing else owns the descriptor.
        let ours = unsafe { BorrowedFd::borrow_raw(number) };
        fcntl_setfd(ours, FdFlags::empty()).unwrap();
        let taken = take(number).unwrap();
        take(number).unwrap_err();
        drop(taken);
        let said = take(1_000_000).unwrap_err().to_string();
        assert!(said.starts_with("this process was not started with descriptor 1000000"), "{said}");
        take(-1).unwrap_err();
    }
}
