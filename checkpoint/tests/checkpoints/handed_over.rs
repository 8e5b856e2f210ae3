//! An epoch fails if another process has taken over the memory that it reads.

use std::sync::Arc;
use std::time::Duration;

use driftline_checkpoint::{CheckpointError, Checkpointer, StagingLimits, restore};
use driftline_dirty_tracker::Gfn;
use driftline_guest::testing::{MemoryConfig, MemoryGuest, MemoryGuestFactory};
use driftline_guest::{Clock, GuestContents, Lifecycle, MemoryRight, SharedGuest};
use driftline_store::Store;
use driftline_store::testing::MemoryDisk;

/// Returns the right of a process to which the guest is offered.
fn offer(guest: &Arc<MemoryGuest>) -> MemoryRight {
    let claim = guest.memory_right().offer().unwrap();
    SharedGuest::new(Vec::new(), claim).right().unwrap()
}

/// The guest is taken while the epoch is copied: the slow store delays the copy.
#[test]
fn epoch_whose_memory_is_taken_meanwhile_fails() {
    let guest = MemoryGuest::start(MemoryConfig::still()).unwrap();
    let disk = MemoryDisk::default();
    let store = Store::with_backend(Box::new(disk.clone()), true).unwrap();
    let limits = StagingLimits { first_bytes: 16 * 4096, most_bytes: 16 * 4096 };
    let mut checkpointer = Checkpointer::with_staging(guest.clone(), store, limits).unwrap();
    checkpointer.background_copy_from(1);
    checkpointer.take().unwrap();
    (0..200).for_each(|gfn| guest.write(Gfn(gfn), &[1; 8]).unwrap());
    let other = offer(&guest);
    disk.slow_writes(Duration::from_millis(100));
    let taken = std::thread::scope(|scope| {
        let epoch = scope.spawn(|| checkpointer.take());
        // Far less than the store takes for all pieces.
        std::thread::sleep(Duration::from_millis(60));
        let was_done = epoch.is_finished();
        other.take().unwrap();
        (!was_done).then(|| epoch.join().unwrap())
    });
    disk.slow_writes(Duration::ZERO);
    let refused = taken.expect("the store is slow").unwrap_err().to_string();
    assert!(refused.contains("another process has taken"), "{refused}");
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
