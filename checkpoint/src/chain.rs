//! The chain that the next epoch goes on with: who follows the guest's writes, and what the next epoch builds on.

use dirty_tracker::Subscription;

/// A chain being written by one checkpointer.
pub(crate) struct Chain {
    pub(crate) subscription: Subscription,
    /// The last epoch that is durable; none until the full one is.
    pub(crate) last: Option<u64>,
}

impl Chain {
    /// A chain that begins with a full epoch.
    pub(crate) fn new(subscription: Subscription) -> Self {
        Self { subscription, last: None }
    }
}
