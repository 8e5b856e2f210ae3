//! Interrupted restores, and damaged stores.

use super::*;
use driftline_guest::GuestContents;

#[test]
fn interrupted_restore_names_the_drives_and_repeats() {
    let (disk, guest) = (MemoryDisk::default(), guest());
    guest.disks()[0].write(0, &[1; 10 * BLOCK]).unwrap();
    guest.disks()[1].write(0, &[2; BLOCK]).unwrap();
    Checkpointer::new(guest.clone(), on(&disk, true)).unwrap().take().unwrap();
    let (store, factory) = (on(&disk, false), elsewhere());
    factory.disks[1].fail_writes_after(0);
    let said = restore(&store, None, &factory, Clock::Continue).unwrap_err().to_string();
    assert!(
        said.starts_with(
            "checkpoint 1 cannot be restored: writing disk \"two\" (28672 bytes) failed"
        ),
        "{said}"
    );
    assert!(
        said.contains("its disks (\"one\", \"two\") are partly overwritten")
            && said.contains("run no guest from them until"),
        "{said}"
    );
    factory.disks[1].fail_writes_after(u64::MAX);
    restore(&store, None, &factory, Clock::Continue).unwrap();
    assert!(contents(&factory.disks) == contents(guest.disks()));
    // Drives of another size are refused and unchanged.
    for bytes in [SIZES[1] - 512, SIZES[1] + 512] {
        let mut factory = elsewhere();
        factory.disks[1] = TestDisk::new("two", bytes).unwrap();
        let was = contents(&factory.disks);
        let said = restore(&store, None, &factory, Clock::Continue).unwrap_err().to_string();
        assert!(said.contains("disk \"two\" (28672 bytes)"), "{said}");
        assert!(contents(&factory.disks) == was);
    }
    // Drives are also unchanged if something else in the epoch is damaged.
    let pages = disk.contents("pages-1").unwrap();
    disk.put("pages-1", pages[..4096 * 3].to_vec());
    let factory = elsewhere();
    let was = contents(&factory.disks);
    let said = restore(&store, None, &factory, Clock::Continue).unwrap_err().to_string();
    assert!(said.contains("pages-1 is truncated: it ends at byte 12288"), "{said}");
    assert!(contents(&factory.disks) == was);
}

/// Whichever block is damaged, no drive is overwritten.
#[test]
fn damaged_block_overwrites_no_drive() {
    let (disk, guest) = (MemoryDisk::default(), guest());
    guest.disks()[0].write(0, &[1; 10 * BLOCK]).unwrap();
    guest.disks()[1].write(0, &[2; 3 * BLOCK]).unwrap();
    guest.ram().write_slice(&[3; 4096], GuestAddress(0)).unwrap();
    Checkpointer::new(guest.clone(), on(&disk, true)).unwrap().take().unwrap();
    let sound = disk.contents("pages-1").unwrap();
    let stored = |page: &[u8]| matches!(page[0], 1 | 2) && page.iter().all(|b| *b == page[0]);
    let slots: Vec<usize> =
        (0..sound.len() / BLOCK).filter(|n| stored(&sound[n * BLOCK..][..BLOCK])).collect();
    assert_eq!(slots.len(), 13);
    for (n, slot) in slots.iter().enumerate() {
        let mut pages = sound.clone();
        pages[slot * BLOCK + 77] ^= 4;
        disk.put("pages-1", pages);
        let (store, factory) = (on(&disk, false), elsewhere());
        let was = contents(&factory.disks);
        let e = match n % 2 {
            0 => restore(&store, None, &factory, Clock::Continue).map(drop).unwrap_err(),
            _ => restore_lazily(&store, None, &factory, Clock::Continue).map(drop).unwrap_err(),
        };
        assert!(matches!(e, RestoreError::Store(_)), "{e}");
        let said = e.to_string();
        assert!(said.contains("block 0x") && said.contains(" fails its checksum"), "{said}");
        assert!(contents(&factory.disks) == was, "{said}");
    }
    disk.put("pages-1", sound);
    assert!(restored(&disk, 1, false) == contents(guest.disks()));
}
