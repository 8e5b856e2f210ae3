//! Drives as seen by the code that copies them, on the guest's host and on the host of the copy.
//!
//! A drive is counted in blocks of [`PAGE_SIZE`] bytes, as if they were the frames of one memory
//! slot from 0 on. Its last block may extend beyond its end. Those bytes read as zeros and are not
//! written.

use std::fmt;
use std::fs::File;
use std::io;
use std::sync::Arc;

use driftline_dirty_tracker::{NoMemory, PAGE_SIZE, Subscription};

use crate::copy_before_write::CopyBeforeWrite;

/// Properties of a drive that are known before any of it is copied.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct DriveHead {
    /// Name of the drive in its guest's configuration.
    pub id: String,
    /// Its size, bytes.
    pub bytes: u64,
    /// Whether the guest cannot write to it.
    pub readonly: bool,
}

impl DriveHead {
    /// Returns the number of its blocks; the last one may be partial.
    pub fn blocks(&self) -> u64 {
        self.bytes.div_ceil(PAGE_SIZE)
    }
}

impl fmt::Display for DriveHead {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let what = if self.readonly { ", read-only" } else { "" };
        write!(f, "disk \"{}\" ({} bytes{what})", self.id, self.bytes)
    }
}

/// A drive of a guest on this host, to be copied while the guest uses it.
///
/// The device marks a write after it is done and before it reports completion to the guest. A
/// caller that must not miss a write does three things: it subscribes first, then reads the drive,
/// and from then on reads the blocks of each epoch *after* the drain. A write that was done before
/// the drain is in the epoch and in what is read. A write still in progress is in the next epoch,
/// whatever part of it was read. While the guest is paused its devices are, too, so no write is in
/// progress.
pub trait GuestDrive: Send + Sync {
    /// Returns which drive it is.
    fn head(&self) -> DriveHead;

    /// Begins to track writes by block; `None` for a drive that its guest cannot write to. Costs
    /// one bit of memory per block until it is dropped.
    ///
    /// # Errors
    ///
    /// There is no address space for that.
    fn subscribe(&self, name: &str) -> Result<Option<Subscription>, NoMemory>;

    /// Opens its content for reading: a file of the caller's own, at least as long as the drive.
    ///
    /// # Errors
    ///
    /// The drive cannot be opened.
    fn open(&self) -> io::Result<File>;

    /// Returns the drive's copy-before-write state, with which its blocks are copied while the
    /// guest runs. `None` means unsupported: the drive can then be in no epoch.
    fn copy_before_write(&self) -> Option<Arc<CopyBeforeWrite>>;
}

/// A drive that is being filled for a future guest: a new one, which reads as zeros at first, or,
/// in a restore, the guest's own with its old content. Drop removes a new drive unless it was
/// [kept](Self::keep). An existing drive stays, overwritten or not. Offsets and lengths lie within
/// the drive.
pub trait DriveCopy: Send + Sync {
    /// Writes `bytes` at `offset`.
    ///
    /// # Errors
    ///
    /// The write failed; some of the bytes may be written.
    fn write(&self, offset: u64, bytes: &[u8]) -> io::Result<()>;

    /// Makes `len` bytes from `offset` read as zeros.
    ///
    /// # Errors
    ///
    /// The drive cannot be zeroed; a part may be.
    fn zero(&self, offset: u64, len: u64) -> io::Result<()>;

    /// Returns when everything written before survives a crash of the host. Another thread may
    /// write meanwhile.
    ///
    /// # Errors
    ///
    /// A write could not be made durable: all writes since the last success count as lost.
    fn make_durable(&self) -> io::Result<()>;

    /// Releases the lock that kept others from the drive, so that
    /// [`HandOver::acquire`](crate::HandOver::acquire) can take it.
    ///
    /// # Errors
    ///
    /// The lock cannot be released.
    fn yield_to_guest(&self) -> io::Result<()>;

    /// Makes it the guest's drive, which drop does not remove.
    fn keep(&self);
}
