//! A store written by version 2, kept for ever: what it holds must still restore.
#![allow(clippy::unwrap_used)]

use std::path::{Path, PathBuf};
use std::time::Duration;

use checkpoint::testing::{MemoryConfig, MemoryGuest, MemoryGuestFactory};
use checkpoint::{Checkpointer, Clock, Guest, Store, restore};
use dirty_tracker::{Gfn, Slot, SlotId};

fn golden() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/v2")
}

#[test]
fn the_store_of_version_2_restores() {
    let store = Store::open(&golden()).unwrap();
    let report = store.verify(|_, _| ()).unwrap();
    assert_eq!((report.epochs, report.foreign, report.unfinished), (3, vec![], vec![]));
    let infos = store.epochs().unwrap();
    let parents: Vec<Option<u64>> = infos.iter().map(|i| i.parent).collect();
    assert_eq!(
        parents,
        [Some(1), Some(2), None],
        "the first was dropped, and there are two chains"
    );
    assert!(infos.iter().any(|i| i.zero_frames > 0), "zero frames are in it too");
    let mut writes = 0;
    for info in infos {
        let factory = MemoryGuestFactory::default();
        let (guest, _) = restore(&store, Some(info.epoch), &factory, Clock::Continue).unwrap();
        guest.verify().unwrap();
        assert!(guest.writes() > writes);
        writes = guest.writes();
    }
}

/// Run by hand when a new version is released, into a new directory.
#[test]
#[ignore = "writes the golden store"]
fn write_the_golden_store() {
    let dir = golden();
    std::fs::create_dir_all(&dir).unwrap();
    let slots = vec![
        Slot { id: SlotId(0), base: Gfn(0), frames: 6 },
        Slot { id: SlotId(1), base: Gfn(0x100), frames: 20 },
    ];
    let config = MemoryConfig { slots, writers: 2, working_set: 3, writes_per_s: 400, seed: 6 };
    let guest = MemoryGuest::start(config).unwrap();
    for epochs in [3, 1] {
        let store = Store::create_or_open(&dir).unwrap();
        let mut checkpointer = Checkpointer::new(guest.clone(), store).unwrap();
        checkpointer.keep(Some(3));
        for _ in 0..epochs {
            guest.resume().unwrap();
            std::thread::sleep(Duration::from_millis(25));
            guest.pause().unwrap();
            checkpointer.take().unwrap();
        }
    }
    // Without what a growing file has beyond its last frame.
    Store::create_or_open(&dir).unwrap().compact().unwrap();
    std::fs::remove_file(dir.join(checkpoint::LOCK_FILE)).unwrap();
    let size: u64 =
        std::fs::read_dir(&dir).unwrap().map(|f| f.unwrap().metadata().unwrap().len()).sum();
    assert!(size < 100 << 10, "{size} bytes");
    guest.stop("done");
}
