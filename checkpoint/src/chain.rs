//! The chain that the next epoch goes on with: who follows the guest's writes, and what the next epoch builds on.

use dirty_tracker::Subscription;

use crate::followed::Followed;

/// A chain being written by one checkpointer.
pub(crate) struct Chain {
    pub(crate) subscription: Subscription,
    /// The drives that its epochs have.
    pub(crate) drives: Vec<Followed>,
    /// The last epoch that is durable; none until the full one is.
    pub(crate) last: Option<u64>,
}

impl Chain {
    /// A chain that begins with a full epoch.
    pub(crate) fn new(subscription: Subscription, drives: Vec<Followed>) -> Self {
        Self { subscription, drives, last: None }
    }
}
