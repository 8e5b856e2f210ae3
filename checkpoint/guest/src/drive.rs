//! Drives as whoever copies them sees them: at the host that has the guest, and where a copy is
//! being made.
//!
//! A drive is counted in blocks of [`PAGE_SIZE`] bytes, as if they were the frames of one memory
//! slot from 0 on. Its last block may reach over its end; what lies behind that reads as zeros, and
//! is not written.

use std::fmt;
use std::fs::File;
use std::io;
use std::sync::Arc;

use driftline_dirty_tracker::{NoMemory, PAGE_SIZE, Subscription};

use crate::copy_before_write::Keeper;

/// What is known of a drive before any of it is copied.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct DriveHead {
    /// The name by which its guest's configuration knows it.
    pub id: String,
    /// Its size.
    pub bytes: u64,
    /// The guest cannot write to it.
    pub readonly: bool,
}

impl DriveHead {
    /// Its blocks, the last one perhaps a part.
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

/// A drive of a guest that is here, to be copied while the guest uses it.
///
/// The device marks a write when it is done and before the guest is told so. So whoever subscribes
/// first, then reads what is in the drive, and from then on reads what an epoch holds *after* it
/// was drained, misses none: a write that was done before the drain is in the epoch and in what is
/// read; one that is still under way is in the next epoch, whatever part of it was read. With the
/// guest paused its devices stand, so nothing is under way.
pub trait GuestDrive: Send + Sync {
    /// Which one it is.
    fn head(&self) -> DriveHead;

    /// Begins to follow writes, by blocks; `None` for a drive that its guest cannot write to. Costs
    /// a bit of memory for each block until it is dropped.
    ///
    /// # Errors
    /// There is no address space for that.
    fn subscribe(&self, name: &str) -> Result<Option<Subscription>, NoMemory>;

    /// Its content, for reading: an open file of the caller's own, at least as long as the drive.
    fn open(&self) -> io::Result<File>;

    /// What keeps its blocks as they are while the guest writes on, so that they are copied behind
    /// its back. `None`, the default, where that cannot be had: then it can be in no epoch.
    fn keeper(&self) -> Option<Arc<Keeper>> {
        None
    }
}

/// A drive that is being filled, for a guest that is to come: one in the making, which reads as
/// zeros at first, or, at a restore, the guest's own, whatever is in it. What was made for it goes
/// when this is dropped, unless it is [kept](Self::keep); what was there before stays, written over
/// or not. Offsets and lengths lie in the drive.
pub trait DriveCopy: Send + Sync {
    /// Writes `bytes` at `offset`.
    fn write(&self, offset: u64, bytes: &[u8]) -> io::Result<()>;

    /// Makes `len` bytes from `offset` read as zeros.
    fn zero(&self, offset: u64, len: u64) -> io::Result<()>;

    /// Returns when what was written before will survive a crash of the host. Another thread may
    /// write meanwhile.
    fn make_durable(&self) -> io::Result<()>;

    /// Lets the guest have it: what kept others from it is given up, so that
    /// [`Guest::acquire`](crate::Guest::acquire) can take it.
    fn yield_to_guest(&self) -> io::Result<()>;

    /// It is the guest's drive from now on.
    fn keep(&self);
}
