//! `dirty-bitmap`: KVM's dirty bitmap of each slot. Reading a bitmap also write-protects its frames
//! again.

use std::sync::Arc;
use std::time::Instant;

use driftline_dirty_tracker::{OutOfSlot, SlotId, Tracker};
use driftline_guest::CollectionReport;

use super::lap::lap;
use super::slot_bitmaps::SlotBitmaps;
use super::source::{DirtySource, SourceError};
use crate::kvm::KvmVm;
use crate::tracking::TrackingMode;

/// Dirty source that reads the dirty bitmaps of all slots of a VM.
#[derive(Debug)]
pub struct BitmapSource {
    log: SlotBitmaps,
}

impl BitmapSource {
    /// Returns a source over all slots of `vm`. Logging is off until [`DirtySource::start`].
    pub fn new(vm: Arc<KvmVm>) -> Self {
        Self { log: SlotBitmaps::new(vm) }
    }
}

impl DirtySource for BitmapSource {
    fn mode(&self) -> TrackingMode {
        TrackingMode::DirtyBitmap
    }

    fn start(&mut self) -> Result<(), SourceError> {
        self.log.start()
    }

    fn stop(&mut self) -> Result<(), SourceError> {
        self.log.stop()
    }

    fn collect(&mut self, tracker: &Tracker) -> Result<CollectionReport, SourceError> {
        let collected = self.collect_by(|slot, bitmap| {
            tracker.absorb_bitmap(slot, bitmap).inspect_err(|_| tracker.mark_all())
        });
        collected.inspect_err(|_| tracker.mark_all())
    }

    fn dirtied(&self) -> &[u64] {
        &[]
    }

    fn harvested(&self) -> &[u64] {
        &[]
    }
}

impl BitmapSource {
    /// Reads each slot's bitmap and passes it to `insert`. `insert` returns the number of frames it
    /// took, or an error after it has marked all memory. After an error the caller must mark all
    /// memory: KVM forgets what it reads.
    pub(super) fn collect_by(
        &mut self,
        mut insert: impl FnMut(SlotId, &[u64]) -> Result<u64, OutOfSlot>,
    ) -> Result<CollectionReport, SourceError> {
        let mut out = CollectionReport::default();
        let vm = self.log.vm().clone();
        for slot in vm.memory().layout().slots() {
            let mut at = Instant::now();
            let bitmap = self.log.read(slot)?;
            // One call reads and write-protects, so the time of both is counted as `reprotect_ns`.
            out.reprotect_ns += lap(&mut at);
            match insert(slot.id, bitmap) {
                Ok(frames) => out.frames += frames,
                Err(e) => {
                    tracing::warn!("the dirty bitmap cannot be trusted, all memory is marked: {e}");
                    out.marked_all = true;
                }
            }
            out.insert_ns += lap(&mut at);
        }
        Ok(out)
    }
}
