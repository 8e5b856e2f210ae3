//! Parts of a store that its disk cannot read.

use std::time::Duration;

use driftline_checkpoint::Checkpointer;
use driftline_guest::testing::image;
use driftline_store::StoreError;
use driftline_store::testing::MemoryDisk;

use crate::common::stored::{StoreFixture, begins, numbers, open, repair, restored, stored};

#[test]
fn unreadable_sector_of_dropped_checkpoints_forbids_nothing() {
    let StoreFixture { disk, guest, taken, .. } = stored(&[3, 4], 2);
    let begins = begins(&disk.contents("log-1").unwrap());
    let unreadable = |sector: usize| {
        let disk = disk.copy();
        let at = sector as u64 * 512;
        disk.fail_reads("log-1", at..at + 512, 0).unwrap();
        disk
    };
    let dropped = unreadable(begins[1]);
    assert!(taken.iter().all(|(epoch, memory)| restored(&dropped, *epoch) == *memory));
    // The search bisects; it does not try each sector before the bad one.
    assert!(dropped.failed_reads() < 100, "{} reads failed", dropped.failed_reads());
    let mut checkpointer = Checkpointer::new(guest.clone(), open(&dropped, true)).unwrap();
    let epoch = checkpointer.take().unwrap().epoch;
    assert_eq!(restored(&dropped, epoch), image(&guest));
    // In a kept epoch this is damage, and the message names the repair command.
    let kept = unreadable(begins[6]);
    let e = Checkpointer::new(guest, open(&kept, true)).unwrap_err().to_string();
    assert!(e.contains("cannot be read") && e.contains("store repair /memory-disk"), "{e}");
}

/// A failing disk takes seconds for each read that fails.
#[test]
fn long_unreadable_stretch_costs_few_reads() {
    let StoreFixture { disk, all, .. } = stored(&[3, 80], 90);
    let begins = begins(&disk.contents("log-1").unwrap());
    let survey = |name: &str, from: u64| {
        let disk = disk.copy();
        let len = disk.contents(name).unwrap().len() as u64;
        disk.fail_reads(name, from..len, 0).unwrap();
        let mut store = open(&disk, false);
        store.set_failed_read_limit(Duration::ZERO);
        let survey = store.survey().unwrap();
        assert!(survey.checkpoints.iter().any(|c| c.damage.is_some()), "{survey:?}");
        (survey, disk)
    };
    let from = begins[3] as u64 * 512;
    let (found, disk_of_log) = survey("log-1", from);
    assert_eq!((found.sound, found.latest_sound), (3, Some(3)), "{found:?}");
    let sectors = (disk.contents("log-1").unwrap().len() as u64 - from) / 512;
    let failed = disk_of_log.failed_reads();
    assert!(sectors > 100 && failed < 250, "{failed} reads of {sectors} sectors failed");
    repair(&disk_of_log).unwrap();
    assert_eq!(restored(&disk_of_log, 3), all[&3]);
    let (found, disk_of_pages) = survey("pages-1", 4 * 4096);
    assert_eq!(found.sound, 1, "{found:?}");
    let slots = disk.contents("pages-1").unwrap().len() / 4096;
    let failed = disk_of_pages.failed_reads();
    assert!(slots > 150 && failed < 100, "{failed} reads of {slots} slots failed");
}

/// An unreadable part costs what damage of the same bytes costs, wherever a search step lands.
#[test]
fn scattered_unreadable_parts_cost_no_sound_checkpoint() {
    let StoreFixture { disk, all, .. } = stored(&[3, 80], 90);
    let begins = begins(&disk.contents("log-1").unwrap());
    for (name, unit, first) in [("log-1", 512, begins[8]), ("pages-1", 4096, 20)] {
        let (unreadable, bent) = (disk.copy(), disk.copy());
        let mut bytes = disk.contents(name).unwrap();
        for n in (first..first + 16).chain([31, 63, 127].map(|distance| first + distance)) {
            let at = n * unit;
            if at >= bytes.len() {
                break;
            }
            bytes[at..at + unit].iter_mut().for_each(|byte| *byte ^= 4);
            unreadable.fail_reads(name, at as u64..(at + unit) as u64, 0).unwrap();
        }
        bent.put(name, bytes);
        let sound = |disk: &MemoryDisk| {
            let survey = open(disk, false).survey().unwrap();
            let sound = survey.checkpoints.iter().filter(|c| c.damage.is_none());
            sound.filter_map(|c| c.epoch).collect::<Vec<u64>>()
        };
        let expected = sound(&bent);
        assert!(!expected.is_empty() && expected.len() < all.len(), "{expected:?}");
        assert_eq!(sound(&unreadable), expected, "{name}");
        repair(&unreadable).unwrap();
        assert_eq!(numbers(&unreadable), expected);
        assert!(expected.iter().all(|epoch| restored(&unreadable, *epoch) == all[epoch]));
    }
}

/// A log that is damaged where no kept checkpoint needs it.
#[test]
fn reader_out_of_time_reports_the_disk_error() {
    let StoreFixture { disk, .. } = stored(&[3, 4], 2);
    let at = begins(&disk.contents("log-1").unwrap())[1] as u64 * 512;
    disk.fail_reads("log-1", at..at + 512, 0).unwrap();
    let mut store = open(&disk, false);
    assert_eq!(store.epochs().unwrap().len(), 2);
    store.set_failed_read_limit(Duration::ZERO);
    let e = store.epochs().unwrap_err();
    assert!(e.is_damage() && matches!(e, StoreError::Unreadable { .. }), "{e}");
    assert_eq!(store.survey().unwrap().sound, 2);
}
