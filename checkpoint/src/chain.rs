//! The chain that the next epoch goes on with: who follows the guest's writes, and what the next
//! epoch builds on.

use std::time::Instant;

use driftline_dirty_tracker::Subscription;

use crate::disk_copy::Followed;

/// A chain being written by one checkpointer.
pub(crate) struct Chain {
    pub(crate) subscription: Subscription,
    /// The drives that its epochs have.
    pub(crate) drives: Vec<Followed>,
    /// When the guest went on with nothing changed, about.
    pub(crate) since: Instant,
    /// The last epoch that is durable; none until the full one is.
    pub(crate) last: Option<u64>,
}

impl Chain {
    /// A chain that begins with a full epoch.
    pub(crate) fn new(subscription: Subscription, drives: Vec<Followed>) -> Self {
        Self { subscription, drives, since: Instant::now(), last: None }
    }
}
