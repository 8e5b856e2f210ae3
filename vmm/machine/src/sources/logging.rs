//! Switches KVM's dirty logging.

use super::source::SourceError;
use crate::kvm::KvmVm;

/// Switches KVM's dirty logging on or off in all slots.
pub(super) fn set_logging(vm: &KvmVm, on: bool) -> Result<(), SourceError> {
    let set = vm.set_dirty_logging(on);
    set.map_err(|cause| SourceError { what: "KVM_SET_USER_MEMORY_REGION", cause })
}
