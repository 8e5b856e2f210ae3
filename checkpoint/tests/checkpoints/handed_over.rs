//! What is read of memory that another process has taken over is of no use.

use std::sync::Arc;

use driftline_checkpoint::{CheckpointError, Checkpointer, restore};
use driftline_guest::testing::{MemoryConfig, MemoryGuest, MemoryGuestFactory};
use driftline_guest::{Clock, GuestContents, Lifecycle, MemoryRight, SharedMemory};
use driftline_store::Store;
use driftline_store::testing::MemoryDisk;

/// Returns the right of a process to which the guest is offered.
fn offer(guest: &Arc<MemoryGuest>) -> MemoryRight {
    let claim = guest.memory_right().offer().unwrap();
    SharedMemory::new(Vec::new(), claim).right().unwrap()
}

#[test]
fn epoch_of_taken_memory_is_not_stored() {
    // Copied in the pause, and after it.
    for background_copy_from in [u64::MAX, 1] {
        let guest = MemoryGuest::start(MemoryConfig::small()).unwrap();
        let store = Store::with_backend(Box::new(MemoryDisk::default()), true).unwrap();
        let mut checkpointer = Checkpointer::new(guest.clone(), store).unwrap();
        checkpointer.background_copy_from(background_copy_from);
        checkpointer.take().unwrap();
        let other = offer(&guest);
        // An offer changes nothing.
        let last = checkpointer.take().unwrap().epoch;
        other.take().unwrap();
        for _ in 0..2 {
            let refused: CheckpointError = checkpointer.take().unwrap_err();
            assert!(refused.to_string().contains("another process has taken"), "{refused}");
        }
        let stored = checkpointer.store().epochs().unwrap();
        assert_eq!(stored.last().unwrap().epoch, last);
        // What was not stored is in the next epoch.
        other.give_back();
        checkpointer.take().unwrap();
        guest.pause().unwrap();
        let factory = MemoryGuestFactory::default();
        let (copy, _) = restore(checkpointer.store(), None, &factory, Clock::Continue).unwrap();
        copy.verify().unwrap();
    }
}
