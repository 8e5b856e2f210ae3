//! A restore that fails while it fills the guest's memory.

use std::sync::{Arc, Mutex};

use driftline_checkpoint::{Checkpointer, RestoreError, restore};
use driftline_guest::testing::{MemoryConfig, MemoryGuest, MemoryGuestFactory, Op};
use driftline_guest::{
    Clock, DriveHead, GuestError, GuestFactory, GuestWithCopies, Lifecycle, Origin, RunState,
    SharedGuest, VmId,
};
use driftline_store::Store;

/// Keeps the guests that it builds, so that a test can see how they ended.
#[derive(Default)]
struct RecordingFactory {
    inner: MemoryGuestFactory,
    built: Mutex<Vec<Arc<MemoryGuest>>>,
}

impl GuestFactory for RecordingFactory {
    type Guest = MemoryGuest;

    fn create_with_copies(
        &self,
        vm_id: VmId,
        config: &[u8],
        drives: &[DriveHead],
    ) -> Result<GuestWithCopies<MemoryGuest>, GuestError> {
        self.inner.create_with_copies(vm_id, config, drives)
    }

    fn create_on(
        &self,
        vm_id: VmId,
        config: &[u8],
        shared: &SharedGuest,
    ) -> Result<Arc<MemoryGuest>, GuestError> {
        self.inner.create_on(vm_id, config, shared)
    }

    fn create_with_drives(
        &self,
        from: &Origin,
        config: &[u8],
        drives: &[DriveHead],
    ) -> Result<GuestWithCopies<MemoryGuest>, GuestError> {
        let built = self.inner.create_with_drives(from, config, drives)?;
        self.built.lock().unwrap().push(built.0.clone());
        Ok(built)
    }
}

#[test]
fn failed_memory_load_stops_the_guest() {
    let dir = tempfile::tempdir().unwrap();
    let store = Store::create_or_open(dir.path()).unwrap();
    let guest = MemoryGuest::start(MemoryConfig::small()).unwrap();
    // Something to load.
    guest.wait_for_writes(100);
    let epoch = Checkpointer::new(guest, store).unwrap().take().unwrap().epoch;
    let store = Store::open(dir.path()).unwrap();
    let factory = RecordingFactory::default();
    factory.inner.faults.fail_next(Op::LoadMemory, 1);
    let failed = restore(&store, None, &factory, Clock::Continue).unwrap_err();
    let said = failed.to_string();
    assert!(matches!(failed, RestoreError::Guest { epoch: of, .. } if of == epoch), "{said}");
    let cause = std::error::Error::source(&failed).map(ToString::to_string).unwrap_or_default();
    assert!((said + &cause).contains("filling memory"), "{cause}");
    let (copy, _) = restore(&store, None, &factory, Clock::Continue).unwrap();
    copy.verify().unwrap();
    let ended: Vec<_> = factory.built.lock().unwrap().iter().map(|g| g.run_state()).collect();
    assert_eq!(ended[0], RunState::Stopped);
    assert_eq!(ended.len(), 2);
    assert_ne!(ended[1], RunState::Stopped);
}
