//! `dirty-ring`: KVM's per-vCPU dirty rings.

use std::sync::Arc;
use std::time::Instant;

use driftline_dirty_tracker::Tracker;
use driftline_dirty_tracker::ring::{Harvester, Inserted, Readable, RingFull};
use driftline_guest::CollectionReport;

use super::lap::lap;
use super::logging::set_logging;
use super::source::{DirtySource, SourceError};
use crate::kvm::{KvmVm, RingMap};
use crate::tracking::TrackingMode;

/// Dirty source that reads the dirty rings of a VM and keeps its position in each.
#[derive(Debug)]
pub struct RingSource {
    vm: Arc<KvmVm>,
    rings: Vec<RingMap>,
    harvester: Harvester,
    logging: bool,
}

impl RingSource {
    /// Returns a source over the rings of all vCPUs, in vCPU order. Logging is off until
    /// [`DirtySource::start`].
    pub fn new(vm: Arc<KvmVm>, rings: Vec<RingMap>) -> Self {
        let entries = rings.iter().map(|r| r.entries().len()).max().unwrap_or(0);
        let harvester = Harvester::new(rings.len(), entries).with_parts(vm.parts());
        Self { vm, rings, harvester, logging: false }
    }

    /// Returns, in vCPU order, the handle by which each vCPU reports a full ring.
    pub fn ring_full_reports(&self) -> Vec<Option<RingFull>> {
        (0..self.rings.len()).map(|vcpu| self.harvester.ring_full(vcpu)).collect()
    }

    fn set_logging(&mut self, on: bool) -> Result<(), SourceError> {
        set_logging(&self.vm, on)?;
        self.logging = on;
        Ok(())
    }

    /// Harvests the rings, write-protects the frames and calls `insert`. The types enforce this
    /// order.
    pub(super) fn collect_by(
        &mut self,
        insert: impl FnOnce(Readable<'_>) -> Inserted,
    ) -> Result<CollectionReport, SourceError> {
        let mut at = Instant::now();
        let harvest = self.harvester.harvest(self.rings.iter().map(RingMap::entries));
        let harvest_ns = lap(&mut at);
        let expected = harvest.entries();
        let count = if expected == 0 { Ok(0) } else { self.vm.reset_dirty_rings() };
        let count = count.map_err(|cause| SourceError { what: "KVM_RESET_DIRTY_RINGS", cause })?;
        let mut readable = harvest.reprotected(count);
        if !readable.is_trusted() {
            // A start that follows must not rely on it.
            let logs_early = self.vm.take_early_logging();
            if self.logging || logs_early {
                tracing::warn!(
                    overruns = readable.overruns(),
                    harvested = expected,
                    reprotected = count,
                    "a dirty ring lost entries: all memory counts as dirty for this epoch"
                );
                // The lost frames are still writable. Only switching logging off and on protects
                // them.
                set_logging(&self.vm, false)?;
                set_logging(&self.vm, true)?;
            }
            // This also holds while logging is off: switching it on will write-protect all memory.
            readable = readable.all_reprotected();
        }
        let reprotect_ns = lap(&mut at);
        let overruns = u64::from(readable.overruns());
        let absorbed = insert(readable);
        if absorbed.foreign > 0 {
            tracing::warn!("{} dirty pages are in no memory slot", absorbed.foreign);
        }
        Ok(CollectionReport {
            frames: absorbed.frames,
            overruns,
            marked_all: absorbed.marked_all,
            harvest_ns,
            reprotect_ns,
            insert_ns: lap(&mut at),
        })
    }

    /// Empties the rings so that vCPUs that wait for room can continue. The frames are dropped.
    fn discard(&mut self) -> Result<(), SourceError> {
        let unread = Tracker::new(self.vm.memory().layout().clone());
        self.collect_by(|frames| frames.insert_into(&unread)).map(drop)
    }
}

impl DirtySource for RingSource {
    fn mode(&self) -> TrackingMode {
        TrackingMode::DirtyRing
    }

    fn start(&mut self) -> Result<(), SourceError> {
        self.rings.iter().for_each(RingMap::populate);
        if self.vm.take_early_logging() {
            self.logging = true;
            return Ok(());
        }
        // A previous stop may have failed half-way. KVM write-protects a slot only when its logging
        // changes from off to on.
        self.set_logging(false)?;
        self.discard()?;
        self.set_logging(true)
    }

    fn stop(&mut self) -> Result<(), SourceError> {
        self.set_logging(false)?;
        self.discard()
    }

    fn collect(&mut self, tracker: &Tracker) -> Result<CollectionReport, SourceError> {
        self.collect_by(|frames| frames.insert_into(tracker))
    }

    fn dirtied(&self) -> &[u64] {
        self.harvester.dirtied()
    }

    fn harvested(&self) -> &[u64] {
        self.harvester.harvested()
    }
}
