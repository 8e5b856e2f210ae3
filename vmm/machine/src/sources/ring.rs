//! `dirty-ring`: KVM's per-vCPU dirty rings.

use std::sync::Arc;
use std::time::Instant;

use driftline_dirty_tracker::{
    Collected, DirtySource, Harvester, Inserted, Readable, RingFull, SourceError, Tracker,
    TrackingMode,
};

use super::{lap, set_logging};
use crate::kvm::{KvmVm, RingMap};

/// The rings of a VM and our place in each of them.
#[derive(Debug)]
pub struct RingSource {
    vm: Arc<KvmVm>,
    rings: Vec<RingMap>,
    harvester: Harvester,
    logging: bool,
}

impl RingSource {
    /// Over the rings of all vCPUs, in their order; nothing is caught yet.
    pub fn new(vm: Arc<KvmVm>, rings: Vec<RingMap>) -> Self {
        let entries = rings.iter().map(|r| r.entries().len()).max().unwrap_or(0);
        let harvester = Harvester::new(rings.len(), entries);
        Self { vm, rings, harvester, logging: false }
    }

    /// Where each vCPU, in their order, reports that it found its ring full.
    pub fn ring_full_reports(&self) -> Vec<Option<RingFull>> {
        (0..self.rings.len()).map(|vcpu| self.harvester.ring_full(vcpu)).collect()
    }

    fn set_logging(&mut self, on: bool) -> Result<(), SourceError> {
        set_logging(&self.vm, on)?;
        self.logging = on;
        Ok(())
    }

    /// Harvest, reprotect, `insert`: the order that the types enforce.
    pub(super) fn collect_by(
        &mut self,
        insert: impl FnOnce(Readable<'_>) -> Inserted,
    ) -> Result<Collected, SourceError> {
        let mut at = Instant::now();
        let harvest = self.harvester.harvest(self.rings.iter().map(RingMap::entries));
        let harvest_ns = lap(&mut at);
        let expected = harvest.entries();
        let count = if expected == 0 { Ok(0) } else { self.vm.reset_dirty_rings() };
        let count = count.map_err(|cause| SourceError { what: "KVM_RESET_DIRTY_RINGS", cause })?;
        let mut readable = harvest.reprotected(count);
        if !readable.is_trusted() {
            if self.logging {
                tracing::warn!(
                    overruns = readable.overruns(),
                    harvested = expected,
                    reprotected = count,
                    "a dirty ring lost entries: all memory counts as dirty for this epoch"
                );
                // What was lost is still writable: only switching logging anew protects it.
                set_logging(&self.vm, false)?;
                set_logging(&self.vm, true)?;
            }
            // While logging is off this holds too: switching it on is what protects all memory.
            readable = readable.all_reprotected();
        }
        let reprotect_ns = lap(&mut at);
        let overruns = u64::from(readable.overruns());
        let absorbed = insert(readable);
        if absorbed.foreign > 0 {
            tracing::warn!("{} dirty pages are in no memory slot", absorbed.foreign);
        }
        Ok(Collected {
            frames: absorbed.frames,
            overruns,
            marked_all: absorbed.marked_all,
            harvest_ns,
            reprotect_ns,
            insert_ns: lap(&mut at),
        })
    }

    /// Empties the rings for the benefit of vCPUs that wait for room; the frames are nobody's.
    fn discard(&mut self) -> Result<(), SourceError> {
        let nobody = Tracker::new(self.vm.memory().layout().clone());
        self.collect_by(|frames| frames.insert_into(&nobody)).map(drop)
    }
}

impl DirtySource for RingSource {
    fn mode(&self) -> TrackingMode {
        TrackingMode::DirtyRing
    }

    fn start(&mut self) -> Result<(), SourceError> {
        // A stop may have failed half-way, and only a slot that goes from off to on is protected.
        self.set_logging(false)?;
        self.discard()?;
        self.set_logging(true)
    }

    fn stop(&mut self) -> Result<(), SourceError> {
        self.set_logging(false)?;
        self.discard()
    }

    fn collect(&mut self, tracker: &Tracker) -> Result<Collected, SourceError> {
        self.collect_by(|frames| frames.insert_into(tracker))
    }

    fn dirtied(&self) -> &[u64] {
        self.harvester.dirtied()
    }

    fn harvested(&self) -> &[u64] {
        self.harvester.harvested()
    }
}
