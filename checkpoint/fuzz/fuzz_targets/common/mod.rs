//! A store one of whose files is arbitrary bytes: refused or restored, never a panic.

use driftline_store::testing::MemoryDisk;
use driftline_guest::testing::{MemoryConfig, MemoryGuest, MemoryGuestFactory};
use driftline_checkpoint::{Checkpointer, RestoreError, restore};
use driftline_store::{Store, StoreError};
use driftline_guest::{Clock, VmId};

/// The golden store, but for one file.
pub fn store_with(name: &str, bytes: &[u8]) -> MemoryDisk {
    let disk = MemoryDisk::default();
    disk.put("manifest", include_bytes!("../../../tests/golden/v2/manifest").to_vec());
    disk.put("log-2", include_bytes!("../../../tests/golden/v2/log-2").to_vec());
    disk.put("pages-2", include_bytes!("../../../tests/golden/v2/pages-2").to_vec());
    disk.put(name, bytes.to_vec());
    disk
}

/// Whoever reads it, and whoever would write to it, survives. What verifies restores, but for what
/// the guest says to it.
pub fn check(disk: MemoryDisk) {
    let Ok(store) = Store::with_backend(Box::new(disk.clone()), false) else { return };
    let verified = store.verify(|_, _| ());
    let restored = restore(&store, None, &MemoryGuestFactory::default(), Clock::Continue);
    match (&verified, &restored) {
        (Ok(report), Err(RestoreError::Store(e))) => {
            assert!(report.epochs == 0 && matches!(e, StoreError::NoEpoch { .. }), "verified, but {e}");
        }
        // Damage may be an older epoch's.
        _ => {}
    }
    let vm_id = store.epochs().ok().and_then(|epochs| epochs.last().map(|e| e.vm_id));
    let Ok(guest) = MemoryGuest::new(vm_id.unwrap_or_else(VmId::random), MemoryConfig::still()) else { return };
    let Ok(store) = Store::with_backend(Box::new(disk.clone()), true) else { return };
    let _ = store.compact();
    let Ok(mut checkpointer) = Checkpointer::new(guest, store) else { return };
    checkpointer.keep(Some(2));
    checkpointer.log_bound(1);
    if let Ok(report) = checkpointer.take() {
        let factory = MemoryGuestFactory::default();
        restore(checkpointer.store(), Some(report.epoch), &factory, Clock::Continue).unwrap();
    }
}
