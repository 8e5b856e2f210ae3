//! The identity of a guest, and the shape of its machine.

use driftline_dirty_tracker::Layout;

use crate::delegate::Delegate;
use crate::lineage::Line;
use crate::vm_id::VmId;

/// Says which guest this is, and the shape of its machine.
pub trait GuestIdentity: Send + Sync {
    /// Returns the guest's identity.
    fn vm_id(&self) -> VmId;

    /// Returns the guest's line. It decides which checkpoints of a store the guest's own may
    /// follow, and moves with the guest.
    fn line(&self) -> Line;

    /// Returns what a [`GuestFactory`](crate::GuestFactory) needs to build the same machine
    /// elsewhere: opaque, versioned by the implementation, a few hundred bytes.
    fn config(&self) -> Vec<u8>;

    /// Returns the guest's memory slots.
    fn layout(&self) -> &Layout;
}

impl<T: Delegate<dyn GuestIdentity>> GuestIdentity for T {
    fn vm_id(&self) -> VmId {
        self.delegate().vm_id()
    }

    fn line(&self) -> Line {
        self.delegate().line()
    }

    fn config(&self) -> Vec<u8> {
        self.delegate().config()
    }

    fn layout(&self) -> &Layout {
        self.delegate().layout()
    }
}
