//! Why a guest cannot be restored.

use std::io;

use driftline_guest::{DriveHead, GuestError, PageSourceError};
use driftline_store::StoreError;
use vm_memory::GuestMemoryError;

/// A guest that could not be restored. Nothing runs.
#[derive(Debug, thiserror::Error)]
pub enum RestoreError {
    /// The store is damaged or does not have the epoch.
    #[error("{0}")]
    Store(#[from] StoreError),
    /// The guest could not be built, or refused its state.
    #[error("checkpoint {epoch} cannot be restored: {cause}")]
    Guest {
        /// The epoch.
        epoch: u64,
        /// The guest's reason.
        #[source]
        cause: GuestError,
    },
    /// A frame that the guest needs cannot be read.
    #[error("checkpoint {epoch} cannot be restored: {cause}")]
    Lost {
        /// The epoch.
        epoch: u64,
        /// What is wrong with the frame.
        #[source]
        cause: PageSourceError,
    },
    /// The epoch's configuration yields a different memory layout than the stored one.
    #[error(
        "checkpoint {epoch} cannot be restored: its configuration makes a guest with memory layout \
         {built:#010x}, its memory has layout {stored:#010x}"
    )]
    Layout {
        /// The epoch.
        epoch: u64,
        /// Hash of the layout that the factory built.
        built: u32,
        /// Hash of the stored layout.
        stored: u32,
    },
    /// The guest does not have a drive of the epoch. No drive was overwritten.
    #[error("checkpoint {epoch} cannot be restored: the guest does not have its drive {number}")]
    MissingDrive {
        /// The epoch.
        epoch: u64,
        /// Number of the drive, from 1 on.
        number: u16,
    },
    /// The drives are partly overwritten. All their stored blocks had been read and found sound
    /// before that.
    #[error(
        "checkpoint {epoch} cannot be restored: {cause}; its disks ({}) are partly \
         overwritten: run no guest from them until a checkpoint, this or another, has been \
         restored to them",
        disks.join(", ")
    )]
    Drives {
        /// The epoch.
        epoch: u64,
        /// The reason.
        #[source]
        cause: DriveRestoreError,
        /// Names of the drives.
        disks: Vec<String>,
    },
    /// The guest's memory could not be written.
    #[error("checkpoint {epoch} cannot be restored: writing the guest's memory failed: {cause}")]
    Memory {
        /// The epoch.
        epoch: u64,
        /// The error of the guest's memory.
        #[source]
        cause: GuestMemoryError,
    },
}

/// Why drives are only partly restored.
#[derive(Debug, thiserror::Error)]
pub enum DriveRestoreError {
    /// Stored blocks cannot be read.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// A stored block is of a drive that the guest does not have.
    #[error("the guest has no drive {0} of the checkpoint")]
    NoDrive(u16),
    /// The guest does not have a drive of the checkpoint.
    #[error("{0} is missing")]
    Missing(DriveHead),
    /// Writing content failed.
    #[error("writing {head} failed: {cause}")]
    Write {
        /// The drive.
        head: DriveHead,
        /// The error of the operating system.
        #[source]
        cause: io::Error,
    },
    /// Writing zeros failed.
    #[error("writing zeros to {head} failed: {cause}")]
    Zero {
        /// The drive.
        head: DriveHead,
        /// The error of the operating system.
        #[source]
        cause: io::Error,
    },
    /// A sync failed.
    #[error("making {head} durable failed: {cause}")]
    MakeDurable {
        /// The drive.
        head: DriveHead,
        /// The error of the operating system.
        #[source]
        cause: io::Error,
    },
    /// The guest cannot have the drive.
    #[error("handing {head} over to the guest failed: {cause}")]
    YieldToGuest {
        /// The drive.
        head: DriveHead,
        /// The error of the operating system.
        #[source]
        cause: io::Error,
    },
}
