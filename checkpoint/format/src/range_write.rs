//! Two operations on a range of a file that the standard library does not have: writing guest
//! memory to it, which the guest may change meanwhile, and asking the kernel to begin its
//! writeback.
//!
//! This module makes the system calls itself, because `rustix` writes slices only, which nothing
//! else may change, and does not have `sync_file_range`.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;

use driftline_dirty_tracker::FrameRun;
use driftline_guest::GuestRam;
use vm_memory::{GuestAddress, GuestMemoryBackend};

/// Writes the frames of `run` at `offset` of the file, without a copy in between. A frame that the
/// guest changes meanwhile is written as a mixture of its old and new content.
///
/// # Errors
///
/// A frame is not in guest memory, or the write failed: some of the frames may be written.
pub fn write_guest_at(file: &File, ram: &GuestRam, run: FrameRun, offset: u64) -> io::Result<()> {
    let length = usize::try_from(run.bytes()).map_err(io::Error::other)?;
    let mut to = offset;
    for slice in ram.get_slices(GuestAddress(run.start.gpa()), length) {
        let mut rest = slice.map_err(io::Error::other)?;
        while !rest.is_empty() {
            let guard = rest.ptr_guard();
            let written = pwrite(file, guard.as_ptr(), guard.len(), to);
            let written = match written {
                Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
                Err(e) if e.kind() == io::ErrorKind::Interrupted => continue,
                other => other?,
            };
            to += written as u64;
            rest = rest.offset(written).map_err(io::Error::other)?;
        }
    }
    Ok(())
}

#[allow(unsafe_code)]
fn pwrite(file: &File, bytes: *const u8, length: usize, to: u64) -> io::Result<usize> {
    let to = i64::try_from(to).map_err(io::Error::other)?;
    // SAFETY: the kernel only reads these bytes. It reports an error for those that are not mapped,
    // and the caller's guard keeps guest memory mapped during the call.
    let written = unsafe { libc::pwrite(file.as_raw_fd(), bytes.cast(), length, to) };
    usize::try_from(written).map_err(|_| io::Error::last_os_error())
}

/// Asks the kernel to begin to write `length` bytes of the file from `offset` on to the disk. A
/// hint: nothing is durable before a sync, which also reports the errors of these writes.
#[allow(unsafe_code)]
pub fn begin_writeback(file: &File, offset: u64, length: u64) {
    let (Ok(offset), Ok(length)) = (i64::try_from(offset), i64::try_from(length)) else { return };
    // A length of 0 would mean all of the file.
    if length > 0 {
        let flags = libc::SYNC_FILE_RANGE_WRITE;
        // SAFETY: the call accesses no memory, and the descriptor is open as long as `file` is.
        let _ = unsafe { libc::sync_file_range(file.as_raw_fd(), offset, length, flags) };
    }
}
