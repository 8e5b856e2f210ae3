//! Parts that both modes of KVM's dirty bitmap share: a buffer for a slot's bitmap, reading a
//! bitmap, and switching logging on and off.

use std::sync::Arc;

use driftline_dirty_tracker::Slot;

use super::logging::set_logging;
use super::source::SourceError;
use crate::kvm::KvmVm;

/// Access to the dirty bitmaps of a VM's slots.
#[derive(Debug)]
pub(super) struct SlotBitmaps {
    vm: Arc<KvmVm>,
    /// Buffer of the size of the largest slot's bitmap, reused for all slots.
    buffer: Vec<u64>,
}

impl SlotBitmaps {
    /// Returns the log of all slots of `vm`, with logging still off.
    pub(super) fn new(vm: Arc<KvmVm>) -> Self {
        let words = vm.memory().layout().slots().map(|s| s.frames.div_ceil(64)).max();
        let buffer = vec![0; words.unwrap_or(0) as usize];
        Self { vm, buffer }
    }

    pub(super) fn vm(&self) -> &Arc<KvmVm> {
        &self.vm
    }

    /// Starts logging in all slots. A slot that was logging already is switched off first.
    pub(super) fn start(&self) -> Result<(), SourceError> {
        if self.vm.take_early_logging() {
            return Ok(());
        }
        // A previous stop may have failed half-way. KVM write-protects a slot, or sets all its
        // bits, only when its logging changes from off to on.
        self.stop()?;
        set_logging(&self.vm, true)
    }

    /// Stops logging in all slots.
    pub(super) fn stop(&self) -> Result<(), SourceError> {
        set_logging(&self.vm, false)
    }

    /// Returns the part of the buffer that `slot`'s bitmap takes. It still has its previous
    /// content.
    pub(super) fn room(&mut self, slot: &Slot) -> &mut [u64] {
        &mut self.buffer[..slot.frames.div_ceil(64) as usize]
    }

    /// Reads `slot`'s current bitmap from KVM. The tracking mode determines whether this also
    /// write-protects the frames.
    pub(super) fn read(&mut self, slot: &Slot) -> Result<&mut [u64], SourceError> {
        let vm = self.vm.clone();
        let bitmap = self.room(slot);
        vm.get_dirty_log(slot.id, bitmap)
            .map_err(|cause| SourceError { what: "KVM_GET_DIRTY_LOG", cause })?;
        Ok(bitmap)
    }
}
