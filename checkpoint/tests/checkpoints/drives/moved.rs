//! A chain that another process continues.

use super::*;
use driftline_checkpoint::MovedChain;
use driftline_guest::GuestContents;

fn write(guest: &MemoryGuest, gfn: u64, byte: u8) {
    guest.ram().write_slice(&[byte; 8], GuestAddress(gfn * PAGE_SIZE)).unwrap();
    guest.disks()[1].write(gfn % 7 * PAGE_SIZE, &[byte; 8]).unwrap();
}

/// Returns what `moved` says after its way to another process.
fn sent(moved: &MovedChain) -> MovedChain {
    serde_json::from_str(&serde_json::to_string(moved).unwrap()).unwrap()
}

#[test]
fn moved_chain_has_what_either_process_wrote() {
    let (disk, guest) = (MemoryDisk::default(), guest());
    let mut checkpointer = Checkpointer::new(guest.clone(), on(&disk, true)).unwrap();
    checkpointer.take().unwrap();
    for turn in 0..3 {
        write(&guest, 10 + turn, 1);
        let writes = FollowedWrites::begin(&*guest, true).unwrap();
        write(&guest, 20 + turn, 2);
        let moved = checkpointer.into_moved();
        write(&guest, 30 + turn, 3);
        checkpointer = Checkpointer::new(guest.clone(), on(&disk, true)).unwrap();
        checkpointer.continue_moved(Some(writes), sent(&moved));
        let report = checkpointer.take().unwrap();
        assert_eq!((report.frames, report.disk_blocks), (3, 3));
    }
    let epochs = on(&disk, false).epochs().unwrap();
    assert_eq!(epochs.iter().filter(|epoch| epoch.full).count(), 1);
    let factory = elsewhere();
    let store = on(&disk, false);
    let (copy, _) = restore(&store, None, &factory, Clock::Continue).unwrap();
    for gfn in (0..3).flat_map(|turn| [10, 20, 30].map(|gfn| gfn + turn)) {
        let read = |guest: &MemoryGuest| {
            let mut bytes = [0; 8];
            guest.ram().read_slice(&mut bytes, GuestAddress(gfn * PAGE_SIZE)).unwrap();
            bytes
        };
        assert_eq!(read(&copy), read(&guest), "frame {gfn}");
    }
    assert!(contents(&factory.disks) == contents(guest.disks()));
}

/// Returns whether the next epoch is full if the chain of `guest` continues so.
fn is_full(with_drives: Option<bool>, between: impl Fn(&MemoryDisk, &Arc<MemoryGuest>)) -> bool {
    let (disk, guest) = (MemoryDisk::default(), guest());
    let mut checkpointer = Checkpointer::new(guest.clone(), on(&disk, true)).unwrap();
    checkpointer.take().unwrap();
    let writes = with_drives.map(|with| FollowedWrites::begin(&*guest, with).unwrap());
    let moved = checkpointer.into_moved();
    between(&disk, &guest);
    let mut next = Checkpointer::new(guest.clone(), on(&disk, true)).unwrap();
    next.continue_moved(writes, moved);
    let epoch = next.take().unwrap().epoch;
    let epochs = on(&disk, false).epochs().unwrap();
    epochs.iter().any(|info| info.epoch == epoch && info.full)
}

#[test]
fn chain_that_cannot_continue_begins_again() {
    assert!(!is_full(Some(true), |_, _| ()));
    assert!(is_full(None, |_, _| ()), "nothing was followed");
    assert!(is_full(Some(false), |_, _| ()), "the drives were not followed");
    let takes_another = |disk: &MemoryDisk, guest: &Arc<MemoryGuest>| {
        Checkpointer::new(guest.clone(), on(disk, true)).unwrap().take().unwrap();
    };
    assert!(is_full(Some(true), takes_another), "the store has another epoch");
}
