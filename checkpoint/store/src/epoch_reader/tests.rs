//! The limits of a record of frames. The writer stays far below them, so the records here come from
//! its encoder directly.
#![allow(clippy::unwrap_used)]

use std::time::Duration;

use driftline_dirty_tracker::{Gfn, Slot, SlotId};
use driftline_format::{FormatError, layout_hash};
use driftline_guest::{LineId, VmId};

use super::*;
use crate::backend::Backend;
use crate::epoch_encoder::{EpochEncoder, begin_log};
use crate::pause_gate::PauseGate;
use crate::records::{MAX_RECORD_FRAMES, MAX_RUNS};
use crate::testing::MemoryDisk;
use crate::unreadable::UnreadableUnits;

const LOG: &str = "log-1";

/// Returns `count` runs of these many frames each, with gaps between them.
fn runs(count: usize, frames: usize) -> Vec<StoredRun> {
    let run = |n: usize| {
        let (start, slot) = (Gfn((n * (frames + 1)) as u64), 1 + (n * frames) as u32);
        StoredRun { frames: FrameRun { start, count: frames as u64 }, slot }
    };
    (0..count).map(run).collect()
}

fn frames_of(runs: &[StoredRun]) -> u64 {
    runs.iter().map(|run| run.frames.count).sum()
}

/// Writes a log of one epoch, which has one record of frames.
fn write(disk: &MemoryDisk, runs: &[StoredRun], crcs: &[u32]) -> LogPosition {
    write_counting(disk, runs, crcs, frames_of(runs))
}

/// Writes a log as [`write`] does, with `frames` as the number of frames at the end.
fn write_counting(disk: &MemoryDisk, runs: &[StoredRun], crcs: &[u32], frames: u64) -> LogPosition {
    let slot = Slot { id: SlotId(0), base: Gfn(0), frames: 1 << 20 };
    let layout = Layout::new([slot]).unwrap();
    let front = Front {
        epoch: 1,
        parent: None,
        created_unix_ms: 0,
        line: LineId::random(),
        layout: layout_hash(&layout),
        rebased: false,
        drives: false,
    };
    let file = disk.create_new(LOG).unwrap();
    let place = begin_log(&*file, VmId::random(), 1).unwrap();
    let mut encoder = EpochEncoder::new(&*file, place);
    encoder.front(front, &layout, b"settings", &[]).unwrap();
    encoder.frames(runs, crcs).unwrap();
    let bytes = frames_of(runs) * PAGE_SIZE + encoder.bytes_if_ended();
    // The encoder fills in the number of records and the digest.
    let commit =
        Commit { epoch: 1, oldest: 1, frames, zero_frames: 0, bytes, records: 0, digest: 0 };
    encoder.commit(commit).unwrap();
    place
}

/// Returns the sectors of the log on `disk`.
fn sectors(disk: &MemoryDisk) -> Sectors {
    let unreadable = UnreadableUnits::new(Duration::from_secs(1), false);
    let file = disk.open(LOG).unwrap();
    Sectors::new(file, LOG.into(), PauseGate::default(), unreadable).unwrap()
}

/// Checks that a reader returns all of a record of these runs.
fn check_read(runs: &[StoredRun]) {
    let crcs: Vec<u32> = (0..frames_of(runs) as u32).map(|n| n.wrapping_mul(0x9e37_79b9)).collect();
    let disk = MemoryDisk::default();
    let place = write(&disk, runs, &crcs);
    let mut sectors = sectors(&disk);
    let mut reader = EpochReader::open(&mut sectors, place).unwrap();
    match reader.next().unwrap() {
        Some(Record::Frames(found, sums)) => assert!(found == runs && sums == crcs),
        other => panic!("not the frames: {other:?}"),
    }
    assert!(reader.next().unwrap().is_none(), "the end matches the totals");
}

/// Returns why a reader refuses a record of these runs, and the size of its buffer for payloads.
fn refusal(runs: &[StoredRun]) -> (Damage, usize) {
    let disk = MemoryDisk::default();
    let place = write(&disk, runs, &vec![7; frames_of(runs) as usize]);
    let mut sectors = sectors(&disk);
    let mut reader = EpochReader::open(&mut sectors, place).unwrap();
    let refused = match reader.next() {
        Err(e) => StoreError::from(e),
        Ok(record) => panic!("it is read: {record:?}"),
    };
    match refused {
        StoreError::Damaged { damage, .. } => (damage, reader.cursor.payload.capacity()),
        other => panic!("{other}"),
    }
}

#[test]
fn damage_is_named_where_its_record_begins() {
    // The records before the COMMIT fill a sector: EPOCH, LAYOUT, CONFIGURATION, FRAMES.
    const FRAMES: usize = 77;
    assert_eq!((24 + 48) + (24 + 24) + (24 + 8) + (24 + 8 + 16 + 4 * FRAMES), DATA);
    let disk = MemoryDisk::default();
    let place = write_counting(&disk, &runs(1, FRAMES), &[7; FRAMES], FRAMES as u64 + 1);
    let mut sectors = sectors(&disk);
    let mut reader = EpochReader::open(&mut sectors, place).unwrap();
    reader.next().unwrap();
    match reader.next().map(drop).map_err(StoreError::from) {
        Err(StoreError::Damaged { offset, damage: Damage::Mismatch { what, .. }, .. }) => {
            assert_eq!((what, offset), ("the number of pages", 2 * SECTOR as u64));
        }
        other => panic!("{other:?}"),
    }
}

#[test]
fn end_is_read_past_unread_records() {
    let disk = MemoryDisk::default();
    let place = write(&disk, &runs(3, 2), &[7; 6]);
    let mut sectors = sectors(&disk);
    let mut reader = EpochReader::open(&mut sectors, place).unwrap();
    let (commit, next) = reader.read_end().unwrap();
    assert_eq!((commit.frames, next.sequence), (6, commit.records));
    assert_eq!(reader.read_end().unwrap().0, commit, "a second time");
    assert!(reader.next().unwrap().is_none());
}

#[test]
fn largest_record_of_frames_is_read() {
    check_read(&runs(MAX_RUNS, MAX_RECORD_FRAMES / MAX_RUNS));
    check_read(&runs(1, MAX_RECORD_FRAMES));
}

#[test]
fn longer_record_is_refused_before_its_allocation() {
    let mut longer = runs(MAX_RUNS, MAX_RECORD_FRAMES / MAX_RUNS);
    longer[MAX_RUNS - 1].frames.count += 1;
    let (damage, buffer) = refusal(&longer);
    let most = limit(TAG_FRAMES);
    let Damage::Format(FormatError::TooLong { tag: TAG_FRAMES, length, limit }) = damage else {
        panic!("{damage}");
    };
    assert_eq!((length, limit), (most + 4, most));
    assert!(buffer < 4096, "{buffer} bytes are reserved");
}

#[test]
fn exceeded_limit_of_state_is_named() {
    let refusal = |sections, bytes| check_sections(sections, bytes).unwrap_err().to_string();
    check_sections(4096, 64 << 20).unwrap();
    let many = "the number of state sections is 4097 and should be between 1 and 4096";
    assert_eq!(refusal(4097, 9), many);
    let large = "the size of all state sections is 67108865 and should be between 0 and 67108864";
    assert_eq!(refusal(9, (64 << 20) + 1), large);
}

#[test]
fn short_record_of_too_much_is_refused() {
    let cases = [
        (runs(1, MAX_RECORD_FRAMES + 1), "the number of pages in a record", MAX_RECORD_FRAMES),
        (runs(MAX_RUNS + 1, 1), "the number of runs in a record", MAX_RUNS),
    ];
    for (runs, name, most) in cases {
        match refusal(&runs).0 {
            Damage::OutOfRange { what, found, min: 1, max } => {
                assert_eq!((what, found, max), (name, most as u64 + 1, most as u64));
            }
            other => panic!("{name}: {other}"),
        }
    }
}
