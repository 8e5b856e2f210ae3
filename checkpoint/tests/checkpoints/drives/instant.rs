//! Memory and drives of an epoch have the content of one instant, although the guest writes.

use super::*;
use driftline_guest::testing::repeats;
use driftline_guest::{GuestContents, Lifecycle};

/// The guest repeatedly writes a number to memory, then to `blocks` blocks of its drive. At any
/// instant the drive is at most one number behind.
fn is_of_one_instant(blocks: u64, epochs: u32, background_copy_from: u64) {
    let bytes = 100 * blocks * PAGE_SIZE;
    let numbered = || vec![TestDisk::new("one", bytes).unwrap()];
    let disk = MemoryDisk::default();
    let guest = MemoryGuest::with_disks(VmId::random(), MemoryConfig::still(), numbered()).unwrap();
    guest.resume().unwrap();
    let over = AtomicBool::new(false);
    let place = |n: u64| n * 37 % 100 * blocks * PAGE_SIZE;
    let number = |guest: &MemoryGuest, disk: &TestDisk| {
        let mut memory = [0; 8];
        guest.ram().read_slice(&mut memory[..], GuestAddress(5 * PAGE_SIZE)).unwrap();
        (u64::from_le_bytes(memory), disk.contents().unwrap())
    };
    let (mut taken, mut copied_after) = (Vec::<u64>::new(), 0);
    thread::scope(|scope| {
        let _end = EndWriterOnDrop(&over);
        scope.spawn(|| {
            for n in 1..=u64::MAX {
                if over.load(Ordering::Relaxed) {
                    return;
                }
                guest.write(Gfn(5), &n.to_le_bytes()).unwrap();
                (10..60).for_each(|gfn| guest.write(Gfn(gfn), &n.to_le_bytes()).unwrap());
                // In an order that revisits each place again and again.
                let some = n.to_le_bytes().repeat(blocks as usize * BLOCK / 8);
                guest.disks()[0].write(place(n), &some).unwrap();
            }
        });
        let mut checkpointer = Checkpointer::new(guest.clone(), on(&disk, true)).unwrap();
        checkpointer.background_copy_from(background_copy_from);
        // On a busy host the guest may write nothing in many of them.
        let enough =
            |taken: &Vec<u64>, copied_after| match copied_after > 0 || background_copy_from >= 40 {
                true => taken.len() as u32 >= epochs,
                false => taken.len() as u32 >= 100 * epochs,
            };
        while !enough(&taken, copied_after) {
            thread::sleep(Duration::from_millis(3));
            let report = checkpointer.take().unwrap();
            copied_after += report.copied_after_frames;
            taken.push(report.epoch);
        }
    });
    assert_eq!(
        copied_after > 0,
        background_copy_from < 40,
        "{copied_after} frames copied in the background"
    );
    for epoch in taken {
        let factory = MemoryGuestFactory { disks: numbered(), ..Default::default() };
        let (copy, _) = restore(&on(&disk, false), Some(epoch), &factory, Clock::Continue).unwrap();
        let (memory, drive) = number(&copy, &factory.disks[0]);
        let numbers = drive.chunks_exact(8).map(|n| u64::from_le_bytes(n.try_into().unwrap()));
        let last = numbers.max().unwrap();
        assert!(memory == last || memory == last + 1, "{epoch}: {memory} and {last}");
        for n in last.saturating_sub(99).max(1)..=last {
            let at = place(n) as usize;
            let is = &drive[at..at + blocks as usize * BLOCK];
            let right = is.chunks_exact(8).all(|is| is == n.to_le_bytes());
            assert!(right, "{epoch}: {n} of {last}");
        }
    }
}

#[test]
fn memory_and_drives_are_of_the_same_instant() {
    is_of_one_instant(1, 30, u64::MAX);
}

#[test]
fn background_copy_and_drives_are_of_one_instant() {
    is_of_one_instant(1, 30, 10);
}

#[test]
fn overfull_buffer_keeps_drives_of_one_instant() {
    is_of_one_instant(40, repeats(5, 12), u64::MAX);
    is_of_one_instant(40, repeats(5, 12), 10);
}

/// The store is so slow that a write to the drive waits for too long. That costs one epoch; the
/// next one copies in the pause what has no room.
#[test]
fn slow_store_stalls_the_drive_once() {
    const BLOCKS: u64 = 4000;
    let drive = || vec![TestDisk::new("one", BLOCKS * PAGE_SIZE).unwrap()];
    let disk = MemoryDisk::default();
    let guest = MemoryGuest::with_disks(VmId::random(), MemoryConfig::still(), drive()).unwrap();
    guest.resume().unwrap();
    let mut checkpointer = Checkpointer::new(guest.clone(), on(&disk, true)).unwrap();
    checkpointer.take().unwrap();
    guest.disks()[0].write(0, &vec![1; BLOCKS as usize * BLOCK]).unwrap();
    let over = AtomicBool::new(false);
    let (first, second) = thread::scope(|scope| {
        let _end = EndWriterOnDrop(&over);
        scope.spawn(|| {
            // Never zeros, which take no room in the store.
            for n in (1u8..=255).cycle() {
                if over.load(Ordering::Relaxed) {
                    return;
                }
                // The guest's pause stops this thread here.
                guest.write(Gfn(5), &[n]).unwrap();
                guest.disks()[0].write(0, &vec![n; BLOCKS as usize * BLOCK]).unwrap();
                thread::sleep(Duration::from_millis(10));
            }
        });
        disk.slow_writes(Duration::from_millis(100));
        (checkpointer.take().unwrap_err(), checkpointer.take())
    });
    assert!(matches!(first.cause, EpochFailure::Stalled(_)), "{first}");
    assert!((first.step, first.guest) == (EpochStep::CopyDrives, RunState::Running), "{first}");
    disk.slow_writes(Duration::ZERO);
    let second = second.unwrap();
    assert_eq!(second.disk_blocks, BLOCKS);
    let factory = MemoryGuestFactory { disks: drive(), ..Default::default() };
    let (copy, _) =
        restore(&on(&disk, false), Some(second.epoch), &factory, Clock::Continue).unwrap();
    let (mut memory, drives) = ([0], contents(&factory.disks));
    copy.ram().read_slice(&mut memory[..], GuestAddress(5 * PAGE_SIZE)).unwrap();
    let is = drives[0][0];
    assert!(drives[0].iter().all(|byte| *byte == is), "of one instant");
    assert!(memory[0] == is || memory[0] == is % 255 + 1, "{memory:?} and {is}");
    let report = checkpointer.take().unwrap();
    let factory = MemoryGuestFactory { disks: drive(), ..Default::default() };
    restore(&on(&disk, false), Some(report.epoch), &factory, Clock::Continue).unwrap();
    assert!(contents(&factory.disks) == contents(guest.disks()));
}
