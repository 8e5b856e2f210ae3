//! Sequences of writes and snapshots: each memory file, rebased if need be, is the guest's memory,
//! and a diff has data exactly where the guest wrote.

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::io;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::Path;

use driftline_dirty_tracker::Subscription;
use driftline_guest::testing::{MemoryGuest, image, repeats};
use driftline_guest::{DirtyLog, PAGE_BYTES};
use proptest::prelude::*;
use rustix::fs::{SeekFrom, seek};
use rustix::io::Errno;

use super::{fill, request, snapshot_of, still};
use crate::flat::{SnapshotFile, SnapshotKind, SnapshotReport, SnapshotRequest, open_snapshot};

#[derive(Clone, Debug)]
enum Step {
    /// Writes to this number of pages from the first one on.
    Write(u64, u64, u8),
    Full,
    /// Into the file of the last snapshot.
    Merge,
    /// Into a new file, which is then rebased on that file.
    Rebase,
}

/// Returns the ranges of a file that are not holes.
fn extents(file: &File) -> io::Result<Vec<(u64, u64)>> {
    let (mut found, mut at) = (Vec::new(), 0);
    loop {
        let from = match seek(file, SeekFrom::Data(at)) {
            Err(Errno::NXIO) => return Ok(found),
            other => other?,
        };
        at = seek(file, SeekFrom::Hole(from))?;
        found.push((from, at));
    }
}

/// Returns the pages of a file that are not holes.
fn pages_with_data(path: &Path) -> BTreeSet<u64> {
    let file = File::open(path).unwrap();
    let pages = |(from, to): (u64, u64)| from / PAGE_BYTES as u64..to.div_ceil(PAGE_BYTES as u64);
    extents(&file).unwrap().into_iter().flat_map(pages).collect()
}

/// Copies what is in `diff` over `base`, as `snapshot-editor edit-memory rebase` does.
fn rebase(base: &Path, diff: &Path) {
    let (base, diff) = (File::options().write(true).open(base).unwrap(), File::open(diff).unwrap());
    for (from, to) in extents(&diff).unwrap() {
        let mut bytes = vec![0; (to - from) as usize];
        diff.read_exact_at(&mut bytes, from).unwrap();
        base.write_all_at(&bytes, from).unwrap();
    }
}

struct Run {
    guest: std::sync::Arc<MemoryGuest>,
    /// Whether snapshots are taken as of a guest that runs.
    live: bool,
    changes: Option<Subscription>,
    dir: tempfile::TempDir,
    /// Pages written since the last snapshot; without tracking, pages that are not zeros.
    written: BTreeSet<u64>,
}

impl Run {
    fn take(&mut self, kind: SnapshotKind, memory: &str) -> SnapshotReport {
        let memory = SnapshotFile::at(&self.dir.path().join(memory)).unwrap();
        let request = SnapshotRequest { memory, ..request(self.dir.path(), kind) };
        snapshot_of(&self.guest, self.live, self.changes.as_mut(), &request).unwrap()
    }

    /// Returns the pages that a diff must have.
    fn changed(&self) -> BTreeSet<u64> {
        if self.changes.is_some() { self.written.clone() } else { not_zero(&self.guest) }
    }

    fn step(&mut self, step: &Step, number: usize) {
        let base = self.dir.path().join("memory");
        match *step {
            Step::Write(from, count, byte) => {
                // A page of zeros is as one that was given back to the host.
                let byte = if self.changes.is_some() { byte } else { byte | 1 };
                for n in from..(from + count).min(FRAMES) {
                    fill(&self.guest, n, byte);
                    self.written.insert(n);
                }
                return;
            }
            Step::Full => {
                let report = self.take(SnapshotKind::Full, "memory");
                assert!(!report.merged);
                assert_eq!(pages_with_data(&base), not_zero(&self.guest), "holes where untouched");
            }
            Step::Merge => {
                let merges = base.exists() && self.changes.is_some();
                let report = self.take(SnapshotKind::Diff, "memory");
                assert_eq!((report.merged, report.frames), (merges, self.changed().len() as u64));
            }
            Step::Rebase => {
                let diff = format!("diff-{number}");
                let report = self.take(SnapshotKind::Diff, &diff);
                assert_eq!(report.frames, self.changed().len() as u64);
                let diff = self.dir.path().join(diff);
                assert_eq!(pages_with_data(&diff), self.changed(), "holes where pages are clean");
                assert_eq!(fs::metadata(&diff).unwrap().size(), FRAMES * PAGE_BYTES as u64);
                match base.exists() {
                    true => rebase(&base, &diff),
                    false => fs::rename(&diff, &base).unwrap(),
                }
            }
        }
        self.written.clear();
        let memory = image(&self.guest);
        assert!(fs::read(&base).unwrap() == memory, "step {number}, {step:?}");
        let opened = open_snapshot(&self.dir.path().join("state"), &base).unwrap();
        assert_eq!(opened.state.tracked, self.changes.is_some());
        assert_eq!(opened.layout.bytes(), memory.len() as u64);
    }
}

const SLOTS: [u64; 2] = [90, 60];
const FRAMES: u64 = SLOTS[0] + SLOTS[1];

fn not_zero(guest: &MemoryGuest) -> BTreeSet<u64> {
    let memory = image(guest);
    let pages = memory.chunks(PAGE_BYTES).zip(0..);
    pages.filter(|(page, _)| page.iter().any(|b| *b != 0)).map(|(_, n)| n).collect()
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let write = (0..FRAMES, 1..40u64, prop_oneof![Just(0), any::<u8>()]);
    let step = prop_oneof![
        6 => write.prop_map(|(from, count, byte)| Step::Write(from, count, byte)),
        1 => Just(Step::Full),
        2 => Just(Step::Merge),
        2 => Just(Step::Rebase),
    ];
    prop::collection::vec(step, 1..16)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(repeats(24, 500)))]

    #[test]
    fn memory_file_equals_memory_after_any_sequence(
        steps in steps(),
        (tracked, live) in any::<(bool, bool)>(),
    ) {
        let guest = still(SLOTS);
        let changes = tracked.then(|| guest.subscribe("snapshots").unwrap());
        let dir = tempfile::tempdir().unwrap();
        let mut run = Run { guest, live, changes, dir, written: BTreeSet::new() };
        for (number, step) in steps.iter().enumerate() {
            run.step(step, number);
        }
        let left = fs::read_dir(run.dir.path()).unwrap();
        let unfinished = |entry: io::Result<fs::DirEntry>| {
            entry.unwrap().file_name().to_string_lossy().contains("tmp")
        };
        prop_assert!(!left.into_iter().any(unfinished));
    }
}
