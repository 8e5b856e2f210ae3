//! The parts of a guest that are copied besides its state: memory and drives.

use driftline_dirty_tracker::{FrameRun, TrackedBitmap};

use crate::delegate::Delegate;
use crate::drive::GuestDrive;
use crate::error::GuestError;
use crate::memory_claim::MemoryRight;
use crate::write_protect::WriteProtection;

/// Guest memory in which writes by the VMM mark the trees.
pub type GuestRam = vm_memory::GuestMemoryMmap<TrackedBitmap>;

/// The memory and the drives of a guest, to be copied.
///
/// Reading [`ram`](Self::ram) while the guest runs gives each frame as it is at some moment. Such a
/// copy is complete only for frames that the dirty log does not report afterwards.
pub trait GuestContents: Send + Sync {
    /// Returns the guest's memory. Writing to it marks the written frames in every subscriber's
    /// tree.
    fn ram(&self) -> &GuestRam;

    /// Returns this process's right to run the guest in its memory. A copy of memory is that of
    /// this guest if [`MemoryRight::check`] succeeds after the copy is complete.
    fn memory_right(&self) -> &MemoryRight;

    /// Returns the runs of frames, ascending, that a copy of all memory must include. Other frames
    /// were never written and read as zeros, or the guest does not need their content: the
    /// implementation may ask a running guest, for a second at most, which of its memory is free.
    /// If the guest writes such a frame after this call, only a caller that
    /// [subscribed](crate::DirtyLog::subscribe) before this call learns of it. The runs may include
    /// frames that are zero. Costs one scan of the host's page tables.
    ///
    /// # Errors
    ///
    /// The host does not say which frames it has memory for, or a process that still has some of
    /// the memory does not serve it.
    fn populated(&self) -> Result<Vec<FrameRun>, GuestError>;

    /// Like [`populated`](Self::populated), but does not ask the guest: returns all frames that the
    /// host has memory for. Other frames read as zeros. Both first fetch all memory that another
    /// process still has.
    ///
    /// # Errors
    ///
    /// The host does not say which frames it has memory for, or that process does not serve them.
    fn resident(&self) -> Result<Vec<FrameRun>, GuestError>;

    /// Waits until `frames` can be read without waiting for another process, which might never
    /// answer. This is for a copy of some frames. A copy of all memory does not need it, because
    /// [`populated`](Self::populated) and [`resident`](Self::resident) fetch all memory.
    ///
    /// # Errors
    ///
    /// The process that has them does not serve them in time.
    fn fetch(&self, frames: &[FrameRun]) -> Result<(), GuestError>;

    /// Returns write protection of frames, with which they are copied while the guest runs. A guest
    /// has one at a time. `None` means unsupported: frames are then copied in the pause. Opening
    /// one costs about as much as a few pauses, so callers keep it for as long as they take epochs.
    /// While nothing is protected, it costs the guest nothing.
    ///
    /// # Errors
    ///
    /// The host refuses, although it supports this.
    fn write_protection(&self) -> Result<Option<Box<dyn WriteProtection>>, GuestError>;

    /// Returns the guest's drives, for copying.
    fn drives(&self) -> Vec<Box<dyn GuestDrive>>;
}

impl<T: Delegate<dyn GuestContents>> GuestContents for T {
    fn ram(&self) -> &GuestRam {
        self.delegate().ram()
    }

    fn memory_right(&self) -> &MemoryRight {
        self.delegate().memory_right()
    }

    fn populated(&self) -> Result<Vec<FrameRun>, GuestError> {
        self.delegate().populated()
    }

    fn resident(&self) -> Result<Vec<FrameRun>, GuestError> {
        self.delegate().resident()
    }

    fn fetch(&self, frames: &[FrameRun]) -> Result<(), GuestError> {
        self.delegate().fetch(frames)
    }

    fn write_protection(&self) -> Result<Option<Box<dyn WriteProtection>>, GuestError> {
        self.delegate().write_protection()
    }

    fn drives(&self) -> Vec<Box<dyn GuestDrive>> {
        self.delegate().drives()
    }
}
