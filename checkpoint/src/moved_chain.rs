//! A chain whose guest moves to another process, which continues the chain.
//!
//! ```text
//! the guest's process                         the next process
//!                                             FollowedWrites::begin: the guest does not run yet
//! Checkpointer::run ends, nothing in flight
//! the guest moves -------------------------->  its writes are followed here
//! Checkpointer::into_moved --- MovedChain --> Checkpointer::continue_moved
//! ```

use driftline_dirty_tracker::FrameRun;
use serde::{Deserialize, Serialize};

use crate::chain::EpochChain;
use crate::epoch_drives::drives_of;
use crate::guest::Checkpointable;
use crate::report::EpochFailure;

/// What the checkpointer of the next process has to know. See the module for the order.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct MovedChain {
    /// The number of the next epoch. A number that was tried is not used again.
    pub(crate) next: u64,
    /// `None` if the next epoch is a full one.
    pub(crate) dirty: Option<DirtySince>,
}

/// What has changed since an epoch.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub(crate) struct DirtySince {
    pub(crate) epoch: u64,
    pub(crate) memory: Vec<FrameRun>,
    pub(crate) drives: Vec<DirtyDrive>,
}

/// What has changed of a drive.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub(crate) struct DirtyDrive {
    pub(crate) id: String,
    pub(crate) bytes: u64,
    pub(crate) blocks: Vec<FrameRun>,
}

/// Follows the writes of a guest that has not run in this process yet, for a chain that another
/// process began.
pub struct FollowedWrites(pub(crate) EpochChain);

impl FollowedWrites {
    /// Begins to follow the writes of `guest`, which is paused, and with `with_drives` those to its
    /// drives.
    ///
    /// # Errors
    ///
    /// They cannot be tracked.
    pub fn begin(guest: &dyn Checkpointable, with_drives: bool) -> Result<Self, EpochFailure> {
        let drives = if with_drives { drives_of(guest) } else { Vec::new() };
        EpochChain::begin(guest, &drives).map(Self).map_err(|failed| failed.cause)
    }
}
