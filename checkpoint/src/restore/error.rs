//! Why a guest cannot be restored.

use std::error::Error;

use driftline_guest::GuestError;
use driftline_store::StoreError;
use vm_memory::GuestMemoryError;

/// A guest that could not be restored. Nothing runs.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
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
        cause: Box<dyn Error + Send + Sync>,
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
        cause: Box<dyn Error + Send + Sync>,
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
