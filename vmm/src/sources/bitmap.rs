//! `dirty-bitmap`: KVM's dirty bitmap of each slot, which reading reprotects.

use std::sync::Arc;
use std::time::Instant;

use dirty_tracker::{
    Collected, DirtySource, OutOfSlot, SlotId, SourceError, Tracker, TrackingMode,
};

use super::lap;
use crate::kvm::KvmVm;

/// The bitmaps of a VM's slots.
#[derive(Debug)]
pub struct BitmapSource {
    vm: Arc<KvmVm>,
    /// Room for the largest slot's bitmap, reused for all.
    buffer: Vec<u64>,
}

impl BitmapSource {
    /// Over all slots; nothing is caught yet.
    pub fn new(vm: Arc<KvmVm>) -> Self {
        let words = vm.memory().layout().slots().map(|s| s.frames.div_ceil(64)).max();
        let buffer = vec![0; words.unwrap_or(0) as usize];
        Self { vm, buffer }
    }

    fn set_logging(&self, on: bool) -> Result<(), SourceError> {
        let set = self.vm.set_dirty_logging(on);
        set.map_err(|cause| SourceError { what: "KVM_SET_USER_MEMORY_REGION", cause })
    }
}

impl DirtySource for BitmapSource {
    fn mode(&self) -> TrackingMode {
        TrackingMode::DirtyBitmap
    }

    fn start(&mut self) -> Result<(), SourceError> {
        // A stop may have failed half-way, and only a slot that goes from off to on is protected.
        self.set_logging(false)?;
        self.set_logging(true)
    }

    fn stop(&mut self) -> Result<(), SourceError> {
        self.set_logging(false)
    }

    fn collect(&mut self, tracker: &Tracker) -> Result<Collected, SourceError> {
        self.collect_by(|slot, bitmap| {
            tracker.absorb_bitmap(slot, bitmap).inspect_err(|_| tracker.mark_all())
        })
    }
}

impl BitmapSource {
    /// Each slot's bitmap to `insert`, which answers with its frames, or marks all memory and says why.
    pub(super) fn collect_by(
        &mut self,
        mut insert: impl FnMut(SlotId, &[u64]) -> Result<u64, OutOfSlot>,
    ) -> Result<Collected, SourceError> {
        let mut out = Collected::default();
        let vm = self.vm.clone();
        for slot in vm.memory().layout().slots() {
            let mut at = Instant::now();
            let bitmap = &mut self.buffer[..slot.frames.div_ceil(64) as usize];
            vm.get_dirty_log(slot.id, bitmap)
                .map_err(|cause| SourceError { what: "KVM_GET_DIRTY_LOG", cause })?;
            // One call reads and reprotects; the time of both is the time of the second.
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
