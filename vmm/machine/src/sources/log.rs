//! What both modes of KVM's dirty bitmap have: room for the bitmap of a slot, reading it, and the
//! switch of logging.

use std::sync::Arc;

use driftline_dirty_tracker::{Slot, SourceError};

use super::set_logging;
use crate::kvm::KvmVm;

/// The bitmaps of a VM's slots.
#[derive(Debug)]
pub(super) struct DirtyLog {
    vm: Arc<KvmVm>,
    /// Room for the largest slot's bitmap, reused for all.
    buffer: Vec<u64>,
}

impl DirtyLog {
    /// Of all slots; nothing is logged yet.
    pub(super) fn new(vm: Arc<KvmVm>) -> Self {
        let words = vm.memory().layout().slots().map(|s| s.frames.div_ceil(64)).max();
        let buffer = vec![0; words.unwrap_or(0) as usize];
        Self { vm, buffer }
    }

    pub(super) fn vm(&self) -> &Arc<KvmVm> {
        &self.vm
    }

    /// Logging begins, in all slots anew.
    pub(super) fn start(&self) -> Result<(), SourceError> {
        // A stop may have failed half-way, and only a slot that goes from off to on is protected,
        // or has all bits set.
        self.stop()?;
        set_logging(&self.vm, true)
    }

    /// Logging ends, in all slots.
    pub(super) fn stop(&self) -> Result<(), SourceError> {
        set_logging(&self.vm, false)
    }

    /// The part of the buffer that a slot's bitmap takes, with whatever was in it last.
    pub(super) fn room(&mut self, slot: &Slot) -> &mut [u64] {
        &mut self.buffer[..slot.frames.div_ceil(64) as usize]
    }

    /// A slot's bitmap, as KVM has it now. Whether that reprotects is the mode's.
    pub(super) fn read(&mut self, slot: &Slot) -> Result<&mut [u64], SourceError> {
        let vm = self.vm.clone();
        let bitmap = self.room(slot);
        vm.get_dirty_log(slot.id, bitmap)
            .map_err(|cause| SourceError { what: "KVM_GET_DIRTY_LOG", cause })?;
        Ok(bitmap)
    }
}
