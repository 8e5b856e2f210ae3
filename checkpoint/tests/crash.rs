//! Losing power at any sync, and disks that refuse: what was said to be durable is there.
#![allow(clippy::unwrap_used)]

use std::collections::BTreeMap;
use std::sync::Arc;

use checkpoint::testing::{
    DiskOp, MemoryConfig, MemoryDisk, MemoryGuest, MemoryGuestFactory, Op, Survives,
};
use checkpoint::{Checkpointer, Clock, Guest, RunState, StagingLimits, Store, VmId, restore};
use dirty_tracker::PAGE_SIZE;
use proptest::prelude::*;
use vm_memory::{Bytes, GuestAddress};

const EPOCHS: u64 = 5;

/// All of a guest's memory, slot after slot.
fn image(guest: &MemoryGuest) -> Vec<u8> {
    let mut image = Vec::new();
    for slot in guest.layout().slots() {
        let mut bytes = vec![0; slot.run().bytes() as usize];
        guest.ram().read_slice(&mut bytes, GuestAddress(slot.base.gpa())).unwrap();
        image.extend(bytes);
    }
    image
}

fn still() -> Arc<MemoryGuest> {
    let mut config = MemoryConfig::still();
    (config.slots[0].frames, config.slots[1].frames) = (20, 30);
    MemoryGuest::new(VmId::random(), config).unwrap()
}

/// Fills the `n`-th of the guest's 50 frames with `byte`, but for its first, which is `salt`.
fn write(guest: &MemoryGuest, n: u64, byte: u8, salt: u8) {
    let gpa = if n < 20 { n } else { 0x400 + n - 20 } * PAGE_SIZE;
    let mut page = [byte; PAGE_SIZE as usize];
    page[0] = salt;
    guest.ram().write_slice(&page, GuestAddress(gpa)).unwrap();
}

fn restored(disk: &MemoryDisk, epoch: Option<u64>) -> (u64, Vec<u8>) {
    let store = Store::with_backend(Box::new(disk.clone()), false).unwrap();
    let factory = MemoryGuestFactory::default();
    let (guest, report) = restore(&store, epoch, &factory, Clock::Continue).unwrap();
    (report.epoch, image(&guest))
}

fn checkpointer(guest: &Arc<MemoryGuest>, disk: &MemoryDisk) -> Checkpointer {
    let store = Store::with_backend(Box::new(disk.clone()), true).unwrap();
    let limits = StagingLimits { first_bytes: 4 * PAGE_SIZE, most_bytes: 8 * PAGE_SIZE };
    Checkpointer::with_staging(guest.clone(), store, limits).unwrap()
}

/// Memory at each epoch's pause, and whether the epoch was said to be durable.
type Taken = BTreeMap<u64, (Vec<u8>, bool)>;

/// Takes epochs, also after the disk has stopped.
fn run(disk: &MemoryDisk) -> (Arc<MemoryGuest>, Taken) {
    let guest = still();
    let mut epochs = BTreeMap::new();
    let mut checkpointer = checkpointer(&guest, disk);
    for round in 0..EPOCHS {
        for i in 0..6 + round {
            let n = (round * 17 + i * 7) % 50;
            write(&guest, n, if i % 3 == 0 { 0 } else { round as u8 + 1 }, 0);
        }
        let now = image(&guest);
        match checkpointer.take() {
            Ok(report) => epochs.insert(report.epoch, (now, true)),
            Err(e) => epochs.insert(e.epoch, (now, false)),
        };
    }
    (guest, epochs)
}

#[test]
fn whatever_sync_is_the_last_every_durable_epoch_restores_bit_for_bit() {
    let mut stop = 0;
    loop {
        let disk = MemoryDisk::default();
        disk.stop_at_sync(stop);
        let (guest, epochs) = run(&disk);
        let torn = (0..12).map(|seed| Survives::Torn(seed + stop * 100));
        for survives in [Survives::Nothing, Survives::Everything].into_iter().chain(torn) {
            let after = disk.crash(survives);
            let durable = epochs.iter().filter(|(_, (_, durable))| *durable);
            let mut last = 0;
            for (&epoch, (memory, _)) in durable {
                assert_eq!(restored(&after, Some(epoch)), (epoch, memory.clone()), "{survives:?}");
                last = epoch;
            }
            // What is under an epoch's name is complete, whether it was said to be durable or not.
            let store = Store::with_backend(Box::new(after.clone()), false).unwrap();
            store.verify(|_, _| ()).unwrap();
            if let Some(latest) = store.epochs().unwrap().last() {
                assert!(latest.epoch >= last);
                let (epoch, memory) = restored(&after, None);
                assert!(epoch == latest.epoch && memory == epochs[&epoch].0);
            } else {
                assert_eq!(last, 0);
            }
            // And the store is good for more.
            let report = checkpointer(&guest, &after).take().unwrap();
            assert_eq!(restored(&after, None), (report.epoch, image(&guest)));
        }
        if !disk.is_stopped() {
            break;
        }
        stop += 1;
    }
    assert_eq!(stop, 2 * EPOCHS, "one sync of the file and one of the directory an epoch");
}

#[test]
fn a_disk_that_refuses_costs_an_epoch_and_no_frame() {
    let refusals = [
        (DiskOp::Create, libc::EROFS),
        (DiskOp::Write, libc::ENOSPC),
        (DiskOp::Sync, libc::EIO),
        (DiskOp::Rename, libc::ENOSPC),
        (DiskOp::SyncDir, libc::EIO),
    ];
    for (op, errno) in refusals {
        for full in [true, false] {
            for after in 0..2 {
                let (disk, guest) = (MemoryDisk::default(), still());
                guest.resume().unwrap();
                let mut checkpointer = checkpointer(&guest, &disk);
                (0..30).for_each(|n| write(&guest, n, 1, 9));
                if !full {
                    checkpointer.take().unwrap();
                }
                (20..50).for_each(|n| write(&guest, n, 2, 9));
                disk.fail(op, errno, after);
                for _ in 0..3 {
                    if let Err(e) = checkpointer.take() {
                        assert_eq!(e.guest, RunState::Running, "{e}");
                        let reason = std::io::Error::from_raw_os_error(errno).to_string();
                        assert!(e.to_string().contains(&reason), "{e}");
                    }
                    write(&guest, 49, 3, after as u8);
                }
                disk.heal();
                let report = checkpointer.take().unwrap();
                assert_eq!(restored(&disk, None), (report.epoch, image(&guest)), "{op:?}");
                let store = Store::with_backend(Box::new(disk.clone()), false).unwrap();
                assert!(store.verify(|_, _| ()).unwrap().unfinished.is_empty());
            }
        }
    }
}

#[test]
fn a_read_error_is_no_damage() {
    let (disk, guest) = (MemoryDisk::default(), still());
    checkpointer(&guest, &disk).take().unwrap();
    disk.fail(DiskOp::Read, libc::EIO, 5);
    let store = Store::with_backend(Box::new(disk), false).unwrap();
    let factory = MemoryGuestFactory::default();
    let e = restore(&store, None, &factory, Clock::Continue).unwrap_err().to_string();
    let expected = "reading /memory-disk/epoch-00000000000000000001.dl failed: Input/output error";
    assert!(e.starts_with(expected), "{e}");
}

#[test]
fn a_read_error_does_not_let_another_guest_in() {
    let (disk, guest, other) = (MemoryDisk::default(), still(), still());
    checkpointer(&guest, &disk).take().unwrap();
    let refused = || {
        let store = Store::with_backend(Box::new(disk.clone()), true).unwrap();
        Checkpointer::new(other.clone(), store).unwrap_err().to_string()
    };
    disk.fail(DiskOp::Read, libc::EIO, 0);
    assert!(refused().contains("Input/output error"), "{}", refused());
    disk.heal();
    assert!(refused().contains("holds epochs of VM"), "{}", refused());
    // What is damaged says nothing; what is older than it still does.
    disk.put("epoch-00000000000000000002.dl", b"noise".to_vec());
    assert!(refused().contains("holds epochs of VM"), "{}", refused());
    checkpointer(&guest, &disk).take().unwrap();
}

#[derive(Clone, Debug)]
enum Act {
    Write(u64, u8),
    Epoch,
    /// An epoch whose disk operation, or guest operation, fails.
    DiskFails(DiskOp, u32),
    GuestFails(Op),
    /// Another process takes over.
    Restart,
    /// Power is lost; the guest lives on (a test's privilege) with a new process.
    Crash(u64),
}

fn act() -> impl Strategy<Value = Act> {
    let disk_op = prop::sample::select(vec![
        DiskOp::Create,
        DiskOp::Write,
        DiskOp::Sync,
        DiskOp::Rename,
        DiskOp::SyncDir,
    ]);
    let guest_op = prop::sample::select(vec![Op::Pause, Op::Collect, Op::Save, Op::Resume]);
    prop_oneof![
        12 => (0u64..50, 0u8..4).prop_map(|(n, byte)| Act::Write(n, byte)),
        4 => Just(Act::Epoch),
        1 => (disk_op, 0u32..3).prop_map(|(op, after)| Act::DiskFails(op, after)),
        1 => guest_op.prop_map(Act::GuestFails),
        1 => Just(Act::Restart),
        1 => (0u64..1000).prop_map(Act::Crash),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]
    #[test]
    fn any_epoch_is_memory_as_it_was_at_its_pause(acts in prop::collection::vec(act(), 1..80)) {
        let (mut disk, guest) = (MemoryDisk::default(), still());
        let mut checkpointer_now = checkpointer(&guest, &disk);
        let mut durable: BTreeMap<u64, Vec<u8>> = BTreeMap::new();
        for act in acts {
            match act {
                Act::Write(n, byte) => write(&guest, n, byte, byte),
                Act::Restart => checkpointer_now = checkpointer(&guest, &disk),
                Act::Crash(seed) => {
                    disk = disk.crash(Survives::Torn(seed));
                    checkpointer_now = checkpointer(&guest, &disk);
                }
                Act::Epoch | Act::DiskFails(..) | Act::GuestFails(_) => {
                    guest.resume().unwrap();
                    match act {
                        Act::DiskFails(op, after) => disk.fail(op, libc::EIO, after),
                        Act::GuestFails(op) => guest.faults().fail_next(op, 1),
                        _ => {}
                    }
                    let now = image(&guest);
                    if let Ok(report) = checkpointer_now.take() {
                        durable.insert(report.epoch, now);
                    }
                    disk.heal();
                    [Op::Pause, Op::Collect, Op::Save, Op::Resume]
                        .iter()
                        .for_each(|&op| guest.faults().fail_next(op, 0));
                }
            }
        }
        for (epoch, memory) in &durable {
            prop_assert_eq!(&restored(&disk, Some(*epoch)).1, memory);
        }
        if let Some((last, memory)) = durable.last_key_value() {
            let (latest, found) = restored(&disk, None);
            prop_assert!(latest >= *last);
            if latest == *last {
                prop_assert_eq!(&found, memory);
            }
        }
    }
}

#[test]
fn a_chain_ends_after_a_thousand_epochs() {
    let (disk, guest) = (MemoryDisk::default(), still());
    let mut checkpointer = checkpointer(&guest, &disk);
    for n in 0..1001 {
        write(&guest, n % 50, n as u8, 1);
        checkpointer.take().unwrap();
    }
    let store = Store::with_backend(Box::new(disk.clone()), false).unwrap();
    let full = |i: &checkpoint::EpochInfo| i.full.then_some(i.epoch);
    let full: Vec<u64> = store.epochs().unwrap().iter().filter_map(full).collect();
    assert_eq!(full, [1, 1001]);
    assert_eq!(restored(&disk, None), (1001, image(&guest)));
}
