//! Stores with damage: damage that needs no repair, and the result of repair.

use std::collections::{BTreeMap, BTreeSet};

use driftline_checkpoint::Checkpointer;
use driftline_guest::testing::{image, repeats};
use driftline_store::testing::{DiskOp, MemoryDisk, Survives};
use driftline_store::{Store, StoreError};
use proptest::prelude::*;

use crate::common::stored::{
    FRAMES, StoreFixture, begins, numbers, open, repair, restored, stored, with_bad_sector, write,
};

#[test]
fn damage_of_dropped_epochs_forbids_no_new_ones() {
    let StoreFixture { disk, guest, taken, .. } = stored(&[3, 3, 4], 3);
    let log = disk.contents("log-1").unwrap();
    let begins = begins(&log);
    assert_eq!((begins.len(), taken.len()), (10, 3));
    // The last process's full epoch begins at `begins[6]`; no kept epoch needs what is before it.
    for sector in 1..begins[6] {
        for lost in [false, true] {
            let disk = with_bad_sector(&disk, sector, lost);
            assert_eq!(numbers(&disk), [8, 9, 10], "sector {sector}");
            open(&disk, false).verify(|_, _| ()).unwrap();
            write(&guest, 1, sector as u8);
            let mut checkpointer = Checkpointer::new(guest.clone(), open(&disk, true)).unwrap();
            let epoch = checkpointer.take().unwrap().epoch;
            assert_eq!(restored(&disk, epoch), image(&guest), "sector {sector}");
            for (epoch, memory) in &taken {
                assert!(restored(&disk, *epoch) == *memory, "epoch {epoch}, sector {sector}");
            }
            assert!(disk.contents("log-1").is_err(), "the log was rewritten without it");
        }
    }
}

#[test]
fn damaged_epoch_is_named_with_the_repair_command() {
    let StoreFixture { disk, guest, .. } = stored(&[3, 3, 4], 3);
    let log = disk.contents("log-1").unwrap();
    let begins = begins(&log);
    // Epoch 7 is dropped, but holds all of memory that the later epochs build on.
    for sector in begins[6]..log.len() / 512 {
        let disk = with_bad_sector(&disk, sector, false);
        let refused = Checkpointer::new(guest.clone(), open(&disk, true));
        let refused = refused.map(|mut c| c.take().map(drop).err());
        let message = match refused {
            Ok(Some(e)) => e.to_string(),
            Ok(None) => panic!("sector {sector} is damaged, and a checkpoint was taken"),
            Err(e) => e.to_string(),
        };
        let nth = begins.partition_point(|begin| *begin <= sector);
        let begin_is_sound = sector > begins[nth - 1] + 2;
        assert!(message.contains("driftline store repair /memory-disk"), "{message}");
        if begin_is_sound {
            assert!(message.contains(&format!("checkpoint {nth} is damaged")), "{message}");
        }
    }
}

const FILES: [&str; 3] = ["manifest", "log-1", "pages-1"];

/// The bytes that a checkpoint needs: sectors of the log, slots of the page file.
struct CheckpointBytes {
    log: Vec<std::ops::Range<usize>>,
    slots: Vec<usize>,
}

/// Returns what each kept checkpoint needs.
fn needs(stored: &StoreFixture) -> BTreeMap<u64, CheckpointBytes> {
    let log = stored.disk.contents("log-1").unwrap();
    let mut ends = begins(&log);
    ends.push(log.len() / 512);
    let whole = |nth: u64| {
        let at = ends[nth as usize - 1] * 512 + 24 + 8;
        log[at..at + 8] == [0; 8]
    };
    let sectors = |nth: u64| ends[nth as usize - 1]..ends[nth as usize];
    let base = |epoch: u64| (1..=epoch).rev().find(|nth| whole(*nth)).unwrap();
    let log_of = |epoch: u64| (base(epoch)..=epoch).map(sectors).collect();
    let mut needs: BTreeMap<u64, CheckpointBytes> = stored
        .taken
        .keys()
        .map(|epoch| (*epoch, CheckpointBytes { log: log_of(*epoch), slots: Vec::new() }))
        .collect();
    let pages = stored.disk.contents("pages-1").unwrap();
    for slot in 1..pages.len() / 4096 {
        let disk = stored.disk.copy();
        let mut bent = pages.clone();
        bent[slot * 4096] ^= 1;
        disk.put("pages-1", bent);
        for found in open(&disk, false).survey().unwrap().checkpoints {
            if found.damage.is_some() {
                needs.get_mut(&found.epoch.unwrap()).unwrap().slots.push(slot);
            }
        }
    }
    needs
}

/// Returns the checkpoints of which no byte has changed.
fn intact(
    stored: &StoreFixture,
    needs: &BTreeMap<u64, CheckpointBytes>,
    disk: &MemoryDisk,
) -> Vec<u64> {
    let [log, pages] = ["log-1", "pages-1"].map(|name| {
        let was = stored.disk.contents(name).unwrap();
        let now = disk.contents(name).unwrap_or_default();
        move |from: usize, to: usize| now.get(from..to) == was.get(from..to)
    });
    let is_intact = |needs: &CheckpointBytes| {
        needs.log.iter().all(|range| log(range.start * 512, range.end * 512))
            && needs.slots.iter().all(|slot| pages(slot * 4096, (slot + 1) * 4096))
    };
    needs.iter().filter(|(_, needs)| is_intact(needs)).map(|(epoch, _)| *epoch).collect()
}

/// Checks that all of `intact` restores, that nothing is silently wrong, and that the store is
/// usable.
fn check_repaired(stored: &StoreFixture, disk: &MemoryDisk, intact: &[u64]) {
    let listed = numbers(disk);
    assert!(intact.iter().all(|epoch| listed.contains(epoch)), "{intact:?}, listed {listed:?}");
    let check = || {
        for epoch in &listed {
            assert!(restored(disk, *epoch) == stored.all[epoch], "epoch {epoch} of {listed:?}");
        }
    };
    check();
    assert!(open(disk, false).survey().unwrap().is_sound());
    assert!(!repair(disk).unwrap().repaired, "once is enough");
    for byte in [200, 201] {
        write(&stored.guest, u64::from(byte) % FRAMES, byte);
        let mut checkpointer = Checkpointer::new(stored.guest.clone(), open(disk, true)).unwrap();
        let epoch = checkpointer.take().unwrap().epoch;
        assert_eq!(restored(disk, epoch), image(&stored.guest));
    }
    check();
}

#[derive(Clone, Debug)]
enum Harm {
    Flip(prop::sample::Index, u8),
    Zero(prop::sample::Index),
    Noise(prop::sample::Index, u8),
    Cut(prop::sample::Index),
    Removed,
}

fn harm() -> impl Strategy<Value = (usize, Harm)> {
    use prop::sample::Index;
    let harm = prop_oneof![
        6 => (any::<Index>(), 0u8..8).prop_map(|(at, bit)| Harm::Flip(at, bit)),
        3 => any::<Index>().prop_map(Harm::Zero),
        2 => (any::<Index>(), any::<u8>()).prop_map(|(at, byte)| Harm::Noise(at, byte)),
        1 => any::<Index>().prop_map(Harm::Cut),
        1 => Just(Harm::Removed),
    ];
    (prop_oneof![1 => Just(0usize), 3 => Just(1), 3 => Just(2)], harm)
}

fn do_harm(disk: &MemoryDisk, file: usize, harm: &Harm) {
    use driftline_store::Backend;
    let name = FILES[file];
    let Ok(mut bytes) = disk.contents(name) else { return };
    let sector = |at: &prop::sample::Index, len: usize| {
        let at = at.index(len.max(1)) / 512 * 512;
        at..(at + 512).min(len)
    };
    let len = bytes.len();
    match harm {
        Harm::Flip(at, bit) if len > 0 => bytes[at.index(len)] ^= 1 << bit,
        Harm::Flip(..) => {}
        Harm::Zero(at) => bytes[sector(at, len)].fill(0),
        Harm::Noise(at, byte) => bytes[sector(at, len)].fill(*byte),
        Harm::Cut(at) => bytes.truncate(at.index(len.max(1))),
        Harm::Removed => {
            disk.remove(name).unwrap();
            disk.sync_dir().unwrap();
            return;
        }
    }
    disk.put(name, bytes);
}

thread_local! {
    static BOTH: (StoreFixture, BTreeMap<u64, CheckpointBytes>) = {
        let stored = stored(&[3, 4, 4], 6);
        let needs = needs(&stored);
        (stored, needs)
    };
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(repeats(75, 600)))]
    #[test]
    fn repair_keeps_all_that_is_intact(harms in prop::collection::vec(harm(), 1..5)) {
        BOTH.with(|(stored, needs)| {
            let disk = stored.disk.copy();
            harms.iter().for_each(|(file, harm)| do_harm(&disk, *file, harm));
            let before: Vec<Vec<u8>> = FILES.iter().filter_map(|f| disk.contents(f).ok()).collect();
            let intact = intact(stored, needs, &disk);
            let header = |name: &str| {
                let disks = [&stored.disk, &disk];
                let [was, now] = disks.map(|disk| disk.contents(name).unwrap_or_default());
                now.get(..64) == was.get(..64)
            };
            let known = header("manifest") || header("log-1") || header("pages-1");
            match repair(&disk) {
                Ok(report) => {
                    // Removed files are still there under other names.
                    for bytes in before {
                        let is_kept =
                            |name: &String| disk.contents(name).unwrap().starts_with(&bytes);
                        assert!(disk.names().iter().any(is_kept), "{report:?}");
                    }
                    check_repaired(stored, &disk, &intact);
                }
                Err(StoreError::NothingSound { .. }) => assert!(intact.is_empty()),
                Err(e) => assert!(!known || disk.contents("log-1").is_err(), "{e}"),
            }
        });
    }
}

#[test]
fn damaged_state_costs_its_checkpoint_alone() {
    let stored = stored(&[6], 6);
    let log = stored.disk.contents("log-1").unwrap();
    let begins = begins(&log);
    // The guest's state is the long part of these epochs: the last sectors of the third epoch,
    // without its end.
    let mut alone = 0;
    for sector in begins[2] + 1..begins[3] {
        let disk = with_bad_sector(&stored.disk, sector, false);
        let survey = open(&disk, false).survey().unwrap();
        assert_eq!(survey.checkpoints.len(), 6, "{survey:?}");
        if survey.sound == 5 {
            alone += 1;
            assert_eq!(survey.verdict(), "5 of 6 checkpoints are sound; the latest sound one is 6");
            repair(&disk).unwrap();
            assert_eq!(numbers(&disk), [1, 2, 4, 5, 6]);
            check_repaired(&stored, &disk, &[1, 2, 4, 5, 6]);
        } else {
            assert_eq!(survey.verdict(), "2 of 6 checkpoints are sound; the latest sound one is 2");
        }
    }
    assert!(alone > 0, "none of {} sectors", begins[3] - begins[2]);
}

/// File systems where files have one name only, and quarantined files that cannot all be read.
#[test]
fn files_without_links_are_renamed() {
    let stored = stored(&[3, 4, 4], 6);
    let needs = needs(&stored);
    for errno in [libc::EPERM, libc::EOPNOTSUPP, libc::ENOSYS] {
        let disk = with_bad_sector(&stored.disk, needs[&7].log[0].start + 1, false);
        disk.put("manifest", b"noise".to_vec());
        let before: Vec<Vec<u8>> = FILES.map(|name| disk.contents(name).unwrap()).into();
        let slot = needs[&8].slots[0] as u64;
        disk.fail_reads("pages-1", slot * 4096..slot * 4096 + 4096, 0).unwrap();
        disk.fail(DiskOp::Link, errno, 0);
        let report = repair(&disk).unwrap();
        disk.heal();
        let quarantined = FILES.map(|name| format!("damaged-1.{name}"));
        assert_eq!(
            BTreeSet::from_iter(report.quarantined),
            BTreeSet::from_iter(quarantined.clone())
        );
        let after: Vec<Vec<u8>> = quarantined.map(|name| disk.contents(&name).unwrap()).into();
        assert!(before == after);
        assert!(FILES[1..].iter().all(|name| disk.contents(name).is_err()));
        let sound = numbers(&disk);
        check_repaired(&stored, &disk, &sound);
    }
}

#[test]
fn killed_repair_loses_nothing() {
    std::thread::scope(|scope| {
        scope.spawn(|| kill_at_any_sync(true));
        scope.spawn(|| kill_at_any_sync(false));
    });
}

fn kill_at_any_sync(links: bool) {
    let stored = stored(&[3, 4, 4], 6);
    let needs = needs(&stored);
    let begins = begins(&stored.disk.contents("log-1").unwrap());
    let damages =
        [(true, true, true), (true, false, false), (false, true, false), (false, false, true)];
    // Without links the short form has only the first.
    let kinds = if links { damages.len() } else { repeats(1, damages.len()) };
    for (of_page, of_log, of_manifest) in damages.into_iter().take(kinds) {
        let damaged = stored.disk.copy();
        if of_page {
            let mut pages = damaged.contents("pages-1").unwrap();
            pages[needs[&8].slots[0] * 4096] ^= 1;
            damaged.put("pages-1", pages);
        }
        if of_log {
            damaged.put(
                "log-1",
                with_bad_sector(&damaged, begins[9], false).contents("log-1").unwrap(),
            );
        }
        if of_manifest {
            damaged.put("manifest", Vec::new());
        }
        let intact = intact(&stored, &needs, &damaged);
        assert!(!intact.is_empty());
        let stops = repair_killed_at_each_sync(&stored, &damaged, &intact, links);
        assert!(stops >= 3, "{stops} syncs");
    }
}

/// Repairs copies of `damaged`, each with a crash at another sync, and repairs what remains. The
/// checkpoints in `intact` are there, and so is each file as it was. Returns the number of syncs.
fn repair_killed_at_each_sync(
    stored: &StoreFixture,
    damaged: &MemoryDisk,
    intact: &[u64],
    links: bool,
) -> u64 {
    let was = FILES.map(|name| damaged.contents(name).unwrap());
    for stop in 0.. {
        let disk = damaged.copy();
        disk.stop_at_sync(disk.syncs() + stop);
        if !links {
            disk.fail(DiskOp::Link, libc::EPERM, 0);
        }
        let repaired = repair(&disk);
        // The last sync only removes old names, and a repair has succeeded without it.
        assert!(repaired.is_ok() || disk.is_stopped());
        let torn = (0..repeats(1, 8)).map(|seed| Survives::Torn(seed + 100 * stop));
        for how in [Survives::Nothing, Survives::Everything].into_iter().chain(torn) {
            for writer_first in [false, true] {
                let after = disk.crash(how);
                if writer_first {
                    // A writer removes files that nothing names.
                    let _ = Store::with_backend(Box::new(after.clone()), true);
                }
                if !links {
                    after.fail(DiskOp::Link, libc::EPERM, 0);
                }
                let at = format!("at sync {stop}, {how:?}");
                check_second_repair(&after, &was, &at);
                check_repaired(stored, &after, intact);
                let lists = after.names().into_iter().filter(|n| n.ends_with(".names"));
                assert_eq!(lists.count(), 0, "{at}");
            }
        }
        if !disk.is_stopped() {
            return stop;
        }
    }
    unreachable!()
}

/// Repairs what a killed repair has left. The files that `was` lists are kept, under any name.
fn check_second_repair(after: &MemoryDisk, was: &[Vec<u8>], at: &str) {
    let report = repair(after).unwrap();
    let now = after.names();
    assert!(report.quarantined.iter().all(|name| now.contains(name)), "{report:?}");
    let files: Vec<_> = now.iter().map(|n| after.contents(n).unwrap()).collect();
    for (name, was) in FILES.iter().zip(was) {
        let is_kept = files.iter().any(|now| now.starts_with(was));
        assert!(is_kept, "{name} is not kept {at}: {now:?}");
    }
}

#[test]
fn full_disk_leaves_a_damaged_store_unchanged() {
    for links in [true, false] {
        refuse_on_a_full_disk(links);
    }
}

fn refuse_on_a_full_disk(links: bool) {
    let stored = stored(&[3, 4, 4], 6);
    let damaged =
        with_bad_sector(&stored.disk, begins(&stored.disk.contents("log-1").unwrap())[9], true);
    let before: Vec<_> =
        damaged.names().into_iter().map(|n| (damaged.contents(&n).unwrap(), n)).collect();
    let ops = [DiskOp::Create, DiskOp::Write, DiskOp::Sync, DiskOp::SyncDir, DiskOp::Rename];
    for op in ops.into_iter().chain(links.then_some(DiskOp::Link)) {
        let mut refused = 0;
        loop {
            let disk = damaged.copy();
            if !links {
                disk.fail(DiskOp::Link, libc::EPERM, 0);
            }
            disk.fail(op, libc::ENOSPC, refused);
            let Err(e) = repair(&disk) else { break };
            assert!(e.to_string().contains("No space left"), "{e}");
            let now: Vec<_> =
                disk.names().into_iter().map(|n| (disk.contents(&n).unwrap(), n)).collect();
            // Unchanged, unless it is unknown whether the new manifest is durable.
            let is_new =
                disk.contents("manifest").unwrap() != stored.disk.contents("manifest").unwrap();
            assert!(now == before || is_new && op == DiskOp::SyncDir, "{op:?} {refused}");
            refused += 1;
        }
        assert!(refused > 0, "{op:?} does not happen");
    }
}

#[test]
fn lost_manifest_is_rebuilt() {
    let stored = stored(&[6], 6);
    let disk = stored.disk.copy();
    assert!(!repair(&disk).unwrap().repaired, "a sound store stays as it is");
    disk.put("manifest", b"noise".to_vec());
    let report = repair(&disk).unwrap();
    assert!(report.repaired && report.survey.sound == 6);
    assert_eq!(report.quarantined, ["damaged-1.manifest"]);
    assert_eq!(disk.contents("damaged-1.manifest").unwrap(), b"noise");
    check_repaired(&stored, &disk, &[1, 2, 3, 4, 5, 6]);
}

#[test]
fn a_directory_without_a_store_is_not_touched() {
    let disk = MemoryDisk::default();
    disk.put("notes.txt", b"x".to_vec());
    let e = repair(&disk).unwrap_err().to_string();
    assert_eq!(e, "/memory-disk is not a Driftline store (no manifest)");
    assert_eq!(disk.names(), ["notes.txt"]);
}

#[test]
fn unused_new_log_is_removed() {
    // A rename that fails, and a rename that was done but reports an error.
    for op in [DiskOp::Rename, DiskOp::Renamed] {
        let stored = stored(&[3, 4], 6);
        let disk = &stored.disk;
        disk.fail(op, libc::EIO, 0);
        open(disk, true).compact().unwrap_err();
        disk.heal();
        let names = disk.names();
        let files: Vec<&str> = names
            .iter()
            .map(String::as_str)
            .filter(|n| n.starts_with("log") || n.starts_with("pages"))
            .collect();
        match op {
            DiskOp::Rename => assert_eq!(files, ["log-1", "pages-1"]),
            _ => assert_eq!(files, ["log-1", "log-2", "pages-1", "pages-2"]),
        }
        for (epoch, memory) in &stored.taken {
            assert!(restored(disk, *epoch) == *memory);
        }
        check_repaired(&stored, disk, &numbers(disk));
    }
}

/// Damage in an epoch that was never finished stops readers and writers, too.
#[test]
fn damaged_torn_epoch_is_repaired_or_refused() {
    let stored = stored(&[3], 3);
    let log = stored.disk.contents("log-1").unwrap();
    let begins = begins(&log);
    for epoch in 0..3 {
        let end = begins.get(epoch + 1).map_or(log.len(), |begin| begin * 512);
        for cut in (begins[epoch] * 512 + 256..end).step_by(256) {
            for bent in [begins[epoch] * 512 + 40, (begins[epoch] + 1) * 512 + 40] {
                let (disk, mut bytes) = (stored.disk.copy(), log[..cut].to_vec());
                let Some(byte) = bytes.get_mut(bent) else { continue };
                *byte ^= 1;
                disk.put("log-1", bytes);
                match repair(&disk) {
                    Ok(_) => check_repaired(&stored, &disk, &[1, 2, 3][..epoch]),
                    Err(e) => assert!(epoch == 0, "cut at {cut}, bent at {bent}: {e}"),
                }
            }
        }
    }
}
