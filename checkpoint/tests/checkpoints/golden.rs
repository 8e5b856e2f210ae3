//! Stores, archives and snapshots written by version 1, kept for ever: their content must still
//! restore.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use driftline_checkpoint::{
    Checkpointer, OpenSnapshot, SnapshotFile, SnapshotKind, SnapshotRequest, create_snapshot,
    open_snapshot, restore, restore_archive,
};
use driftline_dirty_tracker::{Gfn, Slot, SlotId};
use driftline_guest::testing::{MemoryConfig, MemoryGuest, MemoryGuestFactory, TestDisk};
use driftline_guest::{
    Clock, DirtyLog, GuestContents, GuestFactory, GuestIdentity, HandOver, Lifecycle, Stateful,
    VmId,
};
use driftline_store::{Archive, Store};
use vm_memory::{Bytes, GuestAddress};

fn golden() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/v1")
}

#[test]
fn the_store_of_version_1_restores() {
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

/// Names and sizes of the drives in the store with drives.
const DRIVES: [(&str, u64); 2] = [("disk0", 20 * 4096 + 512), ("data", 4 * 4096)];

fn drives() -> Vec<Arc<TestDisk>> {
    DRIVES.iter().map(|(id, bytes)| TestDisk::new(id, *bytes).unwrap()).collect()
}

/// Fills the drives with their content in epoch `n`.
fn fill(drives: &[Arc<TestDisk>], n: u8) {
    drives[0].write(u64::from(n) * 2048, &[n; 6000]).unwrap();
    drives[0].write(20 * 4096, &[n | 0x40; 512]).unwrap();
    drives[1].discard(0, 8192).unwrap();
    drives[1].write(u64::from(n % 4) * 4096, &[n | 0x80; 4096]).unwrap();
}

fn contents(drives: &[Arc<TestDisk>]) -> Vec<Vec<u8>> {
    drives.iter().map(|drive| drive.contents().unwrap()).collect()
}

#[test]
fn the_store_of_version_1_with_drives_restores() {
    let store = Store::open(&golden().with_file_name("v1-drives")).unwrap();
    store.verify(|_, _| ()).unwrap();
    let infos = store.epochs().unwrap();
    let numbers: Vec<u64> = infos.iter().map(|info| info.epoch).collect();
    assert_eq!(numbers, [3, 4, 5], "those before were dropped");
    let then = drives();
    for n in 1..=5 {
        fill(&then, n);
        let Some(info) = infos.iter().find(|info| info.epoch == u64::from(n)) else { continue };
        assert_eq!(info.drives, 2);
        let disks = drives();
        disks[0].write(0, &[0xee; 20 * 4096]).unwrap();
        let factory = MemoryGuestFactory { disks, ..Default::default() };
        let (guest, report) = restore(&store, Some(info.epoch), &factory, Clock::Continue).unwrap();
        guest.verify().unwrap();
        assert_eq!(report.drives, 2);
        assert!(contents(&factory.disks) == contents(&then), "{n}");
    }
}

/// Path of the archive of that store's last epoch.
fn golden_archive() -> std::path::PathBuf {
    golden().with_file_name("archive-v1").join("drives")
}

#[test]
fn the_archive_of_version_1_with_drives_restores() {
    let archive = Archive::open(&golden_archive()).unwrap();
    assert_eq!((archive.info().epoch, archive.info().drives), (5, 2));
    archive.verify().unwrap();
    let then = drives();
    (1..=5).for_each(|n| fill(&then, n));
    let disks = drives();
    disks[0].write(0, &[0xee; 20 * 4096]).unwrap();
    let factory = MemoryGuestFactory { disks, ..Default::default() };
    let (guest, report) = restore_archive(&archive, &factory, Clock::Continue).unwrap();
    guest.verify().unwrap();
    assert_eq!((report.drives, report.frames + report.disk_blocks), (2, archive.info().frames));
    assert!(contents(&factory.disks) == contents(&then));
}

/// Path of the directory of a snapshot's two files.
fn golden_snapshot() -> PathBuf {
    golden().with_file_name("snapshot-v1")
}

#[test]
fn the_snapshot_of_version_1_loads() {
    let dir = golden_snapshot();
    let opened = open_snapshot(&dir.join("state"), &dir.join("memory")).unwrap();
    let OpenSnapshot { state, layout, .. } = opened;
    assert!(state.tracked);
    let guest = MemoryGuestFactory::default().create(state.vm_id, &state.config).unwrap();
    assert_eq!(*guest.layout(), state.layout);
    let memory = std::fs::read(dir.join("memory")).unwrap();
    for place in layout.slots() {
        let (at, run) = (place.offset as usize, place.slot.run());
        let bytes = &memory[at..at + run.bytes() as usize];
        guest.ram().write_slice(bytes, GuestAddress(run.start.gpa())).unwrap();
    }
    guest.restore_state(&state.sections, Clock::Continue).unwrap();
    guest.verify().unwrap();
    assert!(guest.writes() > 0);
}

/// As [`write_the_golden_store`].
#[test]
#[ignore = "writes a golden snapshot"]
fn write_the_golden_snapshot() {
    let dir = golden_snapshot();
    std::fs::create_dir_all(&dir).unwrap();
    let slots = vec![
        Slot { id: SlotId(0), base: Gfn(0), frames: 2 },
        Slot { id: SlotId(1), base: Gfn(0x100), frames: 3 },
    ];
    let config = MemoryConfig { slots, writers: 2, working_set: 3, writes_per_s: 400, seed: 6 };
    let guest = MemoryGuest::new(VmId::random(), config).unwrap();
    let mut changes = guest.subscribe("snapshots").unwrap();
    guest.acquire().unwrap();
    guest.resume().unwrap();
    std::thread::sleep(Duration::from_millis(25));
    guest.pause().unwrap();
    let at = |name: &str| SnapshotFile::at(&dir.join(name)).unwrap();
    let kind = SnapshotKind::Diff;
    let request = SnapshotRequest {
        kind,
        memory: at("memory"),
        state: at("state"),
        backing: None,
        since_boot: false,
        extra: Vec::new(),
    };
    create_snapshot(&*guest, Some(&mut changes), &request).unwrap();
    guest.stop("done");
}

/// As [`write_the_golden_store`].
#[test]
#[ignore = "writes a golden archive"]
fn write_the_golden_archive_with_drives() {
    let store = Store::open(&golden().with_file_name("v1-drives")).unwrap();
    let file = std::fs::File::create(golden_archive()).unwrap();
    store.export_archive(None, &file, &golden_archive()).unwrap();
}

/// As [`write_the_golden_store`].
#[test]
#[ignore = "writes a golden store"]
fn write_the_golden_store_with_drives() {
    let dir = golden().with_file_name("v1-drives");
    std::fs::create_dir_all(&dir).unwrap();
    let slots = vec![Slot { id: SlotId(0), base: Gfn(0), frames: 6 }];
    let config = MemoryConfig { slots, writers: 0, working_set: 0, writes_per_s: 1, seed: 6 };
    let guest = MemoryGuest::with_disks(VmId::random(), config, drives()).unwrap();
    let store = Store::create_or_open(&dir).unwrap();
    let mut checkpointer = Checkpointer::new(guest.clone(), store).unwrap();
    checkpointer.keep(Some(3));
    for n in 1..=5 {
        fill(guest.disks(), n);
        checkpointer.take().unwrap();
    }
    drop(checkpointer);
    // Drops the space that a growing file has beyond its last frame.
    Store::create_or_open(&dir).unwrap().compact().unwrap();
    std::fs::remove_file(dir.join(driftline_store::LOCK_FILE)).unwrap();
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
    // Drops the space that a growing file has beyond its last frame.
    Store::create_or_open(&dir).unwrap().compact().unwrap();
    std::fs::remove_file(dir.join(driftline_store::LOCK_FILE)).unwrap();
    let size: u64 =
        std::fs::read_dir(&dir).unwrap().map(|f| f.unwrap().metadata().unwrap().len()).sum();
    assert!(size < 100 << 10, "{size} bytes");
    guest.stop("done");
}
