//! The chain that the next epoch goes on with: what it builds on, and whether that is still there.

use dirty_tracker::Subscription;

use crate::store::{ParentLink, Store, StoreError, peek};

/// A chain being written by one checkpointer.
pub(crate) struct Chain {
    pub(crate) subscription: Subscription,
    /// The full epoch and the last; none until the full one is durable.
    ends: Option<(ParentLink, ParentLink)>,
}

impl Chain {
    /// A chain that begins with a full epoch.
    pub(crate) fn new(subscription: Subscription) -> Self {
        Self { subscription, ends: None }
    }

    /// What the next epoch builds on.
    pub(crate) fn parent(&self) -> Option<ParentLink> {
        self.ends.map(|(_, last)| last)
    }

    /// Notes an epoch that is durable.
    pub(crate) fn append(&mut self, link: ParentLink) {
        let first = self.ends.map_or(link, |(first, _)| first);
        self.ends = Some((first, link));
    }

    /// Why no further epoch may build on this chain. Looks at both its ends, a few small reads.
    pub(crate) fn cannot_go_on(&self, store: &Store) -> Option<String> {
        let (first, last) = self.ends?;
        [first, last].into_iter().find_map(|link| match peek(store, link.epoch) {
            Ok((_, found)) if found.link == link => None,
            Ok(_) => Some(format!("epoch {} is not the one that was written", link.epoch)),
            Err(e @ StoreError::Io { .. }) => Some(format!("its parent cannot be read: {e}")),
            Err(e) => Some(e.to_string()),
        })
    }
}
