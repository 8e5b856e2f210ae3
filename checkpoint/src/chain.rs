//! The chain that the next epoch goes on with: what it builds on, and whether that is still there.

use dirty_tracker::Subscription;

use crate::store::{ParentLink, Store, StoreError, peek};

/// A chain's incremental epochs may have this many times the bytes of its full epoch.
const MOST_TIMES_FULL: u64 = 4;
/// Below this many bytes they need no bound: a restore reads them in a moment.
const ALWAYS_FINE: u64 = 64 << 20;
/// Most epochs of a chain.
const MOST_EPOCHS: u64 = 1_000;

/// Epochs that are looked for before each further one: all of a short chain, and of the longest every
/// one within 16 epochs, for some hundred microseconds outside the pause.
const LOOKED_FOR: usize = 64;

/// How long a chain is, and so how long a restore of its last epoch takes.
#[derive(Clone, Copy, Debug, Default)]
struct Extent {
    epochs: u64,
    full_bytes: u64,
    incremental_bytes: u64,
}

impl Extent {
    fn append(&mut self, bytes: u64) {
        match self.epochs {
            0 => self.full_bytes = bytes,
            _ => self.incremental_bytes = self.incremental_bytes.saturating_add(bytes),
        }
        self.epochs += 1;
    }

    fn is_enough(&self) -> bool {
        let most = self.full_bytes.saturating_mul(MOST_TIMES_FULL).max(ALWAYS_FINE);
        self.epochs >= MOST_EPOCHS || self.incremental_bytes > most
    }
}

/// A chain being written by one checkpointer.
pub(crate) struct Chain {
    pub(crate) subscription: Subscription,
    /// The full epoch and the last; none until the full one is durable.
    ends: Option<(ParentLink, ParentLink)>,
    /// All its epochs, ascending; at most [`MOST_EPOCHS`].
    epochs: Vec<u64>,
    /// Where among them the next look begins.
    looked_at: usize,
    extent: Extent,
}

impl Chain {
    /// A chain that begins with a full epoch.
    pub(crate) fn new(subscription: Subscription) -> Self {
        let extent = Extent::default();
        Self { subscription, ends: None, epochs: Vec::new(), looked_at: 0, extent }
    }

    /// What the next epoch builds on.
    pub(crate) fn parent(&self) -> Option<ParentLink> {
        self.ends.map(|(_, last)| last)
    }

    /// Notes an epoch that is durable.
    pub(crate) fn append(&mut self, link: ParentLink, bytes: u64) {
        self.extent.append(bytes);
        self.epochs.push(link.epoch);
        let first = self.ends.map_or(link, |(first, _)| first);
        self.ends = Some((first, link));
    }

    /// Whether the next epoch should begin another chain, so that restores stay short.
    pub(crate) fn is_long_enough(&self) -> bool {
        self.extent.is_enough()
    }

    /// Why no further epoch may build on this chain. Looks into both its ends, a few small reads, and
    /// whether the next [`LOOKED_FOR`] of all its epochs are there, in turn, whatever else the store
    /// holds; `verify` looks into those.
    pub(crate) fn cannot_go_on(&mut self, store: &Store) -> Option<String> {
        let (first, last) = self.ends?;
        let count = self.epochs.len();
        let from = self.looked_at;
        self.looked_at = (from + LOOKED_FOR) % count;
        let in_turn = self.epochs.iter().cycle().skip(from).take(LOOKED_FOR.min(count));
        if let Some(e) = in_turn.copied().find_map(|epoch| store.find(epoch).err()) {
            return Some(e.to_string());
        }
        [first, last].into_iter().find_map(|link| match peek(store, link.epoch) {
            Ok((_, found)) if found.link == link => None,
            Ok(_) => Some(format!("epoch {} is not the one that was written", link.epoch)),
            Err(e @ StoreError::Io { .. }) => Some(format!("its parent cannot be read: {e}")),
            Err(e) => Some(e.to_string()),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn extent(full: u64, incremental: &[u64]) -> Extent {
        let mut extent = Extent::default();
        std::iter::once(&full).chain(incremental).for_each(|&bytes| extent.append(bytes));
        extent
    }

    #[test]
    fn a_chain_is_bounded_by_bytes_and_by_epochs() {
        const MIB: u64 = 1 << 20;
        assert!(!Extent::default().is_enough());
        assert!(!extent(1000 * MIB, &[2000 * MIB, 2000 * MIB]).is_enough());
        assert!(extent(1000 * MIB, &[2000 * MIB, 2000 * MIB, 1]).is_enough());
        assert!(!extent(1, &[32 * MIB, 32 * MIB]).is_enough(), "small chains need no bound");
        assert!(extent(1, &[32 * MIB, 32 * MIB, 1]).is_enough());
        assert!(!extent(1, &[1; 998]).is_enough());
        assert!(extent(1, &[1; 999]).is_enough());
    }
}
