//! A store in which one file has arbitrary bytes: it is refused or restored, and nothing panics.

use driftline_checkpoint::{Checkpointer, RestoreError, restore};
use driftline_guest::testing::{MemoryConfig, MemoryGuest, MemoryGuestFactory};
use driftline_guest::{Clock, VmId};
use driftline_store::testing::MemoryDisk;
use driftline_store::{Store, StoreError};

/// Returns the golden store with the file `name` replaced by `bytes`.
pub fn store_with(name: &str, bytes: &[u8]) -> MemoryDisk {
    let disk = MemoryDisk::default();
    disk.put("manifest", include_bytes!("../../../tests/golden/v1/manifest").to_vec());
    disk.put("log-2", include_bytes!("../../../tests/golden/v1/log-2").to_vec());
    disk.put("pages-2", include_bytes!("../../../tests/golden/v1/pages-2").to_vec());
    disk.put(name, bytes.to_vec());
    disk
}

/// Reads the store and writes to it, neither of which may panic. Checks that a store that verifies
/// can be restored, unless the guest refuses it.
pub fn check(disk: MemoryDisk) {
    let Ok(store) = Store::with_backend(Box::new(disk.clone()), false) else { return };
    let verified = store.verify(|_, _| ());
    let restored = restore(&store, None, &MemoryGuestFactory::default(), Clock::Continue);
    match (&verified, &restored) {
        (Ok(report), Err(RestoreError::Store(e))) => {
            assert!(
                report.epochs == 0 && matches!(e, StoreError::NoEpoch { .. }),
                "verified, but {e}"
            );
        }
        // The damage may be in an older epoch.
        _ => {}
    }
    let vm_id = store.epochs().ok().and_then(|epochs| epochs.last().map(|e| e.vm_id));
    let Ok(guest) = MemoryGuest::new(vm_id.unwrap_or_else(VmId::random), MemoryConfig::still())
    else {
        return;
    };
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
