//! The working set: the frames that a guest accessed first in its last lazy restore. The next lazy
//! restore reads these first. It is a small file beside the epochs, and only a hint: nothing
//! depends on it, it is not synced, and a damaged one is reported and ignored.

use std::collections::HashSet;
use std::io;

use driftline_dirty_tracker::{FrameRun, Gfn, Layout};
use driftline_format::{
    FormatError, HEADER_LEN, Header, MAGIC_WORKING_SET, RECORD_HEAD_LEN, RecordHead, layout_hash,
};
use driftline_guest::VmId;
use zerocopy::IntoBytes;
use zerocopy::little_endian::U64;

use crate::backend::Backend;
use crate::damage::{Damage, in_range};
use crate::names::{WORKING_SET, WORKING_SET_NEW};
use crate::records::{all_zero, table};
use crate::store::Store;

/// Tag of the record: runs of frames, in the order in which they were accessed.
const TAG_WORKING_SET: u16 = 0x8040;
/// Maximum number of runs: 1 MiB.
const MAX_WORKING_SET_RUNS: usize = 1 << 16;
/// A run of frames: the first frame, and the number of frames.
type RawWorkingSetRun = [U64; 2];
/// Maximum length of the file, in bytes.
const MAX_BYTES: usize = HEADER_LEN
    + RECORD_HEAD_LEN
    + size_of::<U64>()
    + MAX_WORKING_SET_RUNS * size_of::<RawWorkingSetRun>();

/// The file with the working set of a guest.
#[derive(Debug)]
pub(crate) struct WorkingSetFile {
    /// A handle of its own, which has no lock.
    backend: Box<dyn Backend>,
    vm_id: VmId,
    epoch: u64,
    layout: u32,
    /// Runs that an earlier restore has recorded.
    runs: Vec<FrameRun>,
}

impl WorkingSetFile {
    /// Returns the working set that `store` has for a guest with this memory; empty if it cannot be
    /// used.
    pub(crate) fn open(
        store: &Store,
        vm_id: VmId,
        epoch: u64,
        layout: &Layout,
    ) -> io::Result<Self> {
        let backend = store.backend().reopen()?;
        let runs = match read(&*backend, vm_id, layout) {
            Ok(runs) => runs,
            Err(WorkingSetError::Io(e)) => {
                tracing::debug!("the working set is not known: {e}");
                Vec::new()
            }
            Err(WorkingSetError::Damaged(why)) => {
                let file = store.path(WORKING_SET);
                tracing::warn!("ignoring {}: {why}", file.display());
                Vec::new()
            }
        };
        Ok(Self { backend, vm_id, epoch, layout: layout_hash(layout), runs })
    }

    /// Returns the runs that an earlier restore has recorded.
    pub(crate) fn runs(&self) -> &[FrameRun] {
        &self.runs
    }

    /// Records `faulted` for the next restore, after the runs that were recorded before. Those were
    /// prefetched in this restore, so the guest waited for the runs that follow. Records nothing in
    /// a directory that cannot be written to.
    pub(crate) fn record(&self, faulted: &[FrameRun]) {
        if faulted.is_empty() {
            return;
        }
        let mut seen = HashSet::new();
        let all = self.runs.iter().chain(faulted);
        let runs: Vec<FrameRun> =
            all.filter(|run| seen.insert(run.start)).copied().take(MAX_WORKING_SET_RUNS).collect();
        match self.write(&runs) {
            Ok(()) => tracing::debug!(runs = runs.len(), "recorded the working set"),
            Err(e) => tracing::debug!("the working set is not recorded: {e}"),
        }
    }

    fn write(&self, runs: &[FrameRun]) -> io::Result<()> {
        let mut payload = (runs.len() as u64).to_le_bytes().to_vec();
        for run in runs {
            let raw: RawWorkingSetRun = [run.start.0.into(), run.count.into()];
            payload.extend_from_slice(raw.as_bytes());
        }
        let head = RecordHead {
            tag: TAG_WORKING_SET,
            must_understand: true,
            instance: 0,
            length: payload.len() as u32,
            payload_crc: crc32c::crc32c(&payload),
            sequence: 0,
        };
        let mut bytes = Vec::with_capacity(MAX_BYTES);
        Header::new(MAGIC_WORKING_SET, self.vm_id, self.epoch, self.layout).write_to(&mut bytes)?;
        bytes.extend_from_slice(&head.to_bytes());
        bytes.extend_from_slice(&payload);
        // The name is unique: several guests may be restored at the same time.
        let new = format!("{WORKING_SET_NEW}{}", uuid::Uuid::new_v4());
        let written = self.backend.create(&new).and_then(|file| {
            file.write_all_at(&bytes, 0)?;
            self.backend.rename(&new, WORKING_SET)
        });
        if written.is_err() {
            // The file may not exist.
            let _ = self.backend.remove(&new);
        }
        written
    }
}

/// Reason why no working set can be used.
enum WorkingSetError {
    Io(io::Error),
    Damaged(Damage),
}

impl From<Damage> for WorkingSetError {
    fn from(damage: Damage) -> Self {
        Self::Damaged(damage)
    }
}

impl From<FormatError> for WorkingSetError {
    fn from(e: FormatError) -> Self {
        Self::Damaged(e.into())
    }
}

/// Reads the working set; empty if none was recorded.
fn read(
    backend: &dyn Backend,
    vm_id: VmId,
    layout: &Layout,
) -> Result<Vec<FrameRun>, WorkingSetError> {
    let file = match backend.open(WORKING_SET) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        other => other.map_err(WorkingSetError::Io)?,
    };
    // Reads one byte more than the maximum: a longer file is not a working set.
    let len = file.len().map_err(WorkingSetError::Io)?.min(MAX_BYTES as u64 + 1);
    let mut bytes = vec![0; len as usize];
    file.read_exact_at(&mut bytes, 0).map_err(WorkingSetError::Io)?;
    decode(&bytes, vm_id, layout)
}

fn decode(bytes: &[u8], vm_id: VmId, layout: &Layout) -> Result<Vec<FrameRun>, WorkingSetError> {
    let front = HEADER_LEN + RECORD_HEAD_LEN;
    let Some((front, payload)) = bytes.split_at_checked(front) else {
        let (length, wanted) = (bytes.len() as u64, front as u64);
        return Err(Damage::EndsEarly { length, wanted }.into());
    };
    let header = Header::read_from(front, MAGIC_WORKING_SET)?;
    if header.vm_id() != vm_id {
        return Err(Damage::OtherVm { found: header.vm_id(), expected: vm_id }.into());
    }
    let head = RecordHead::read_from(&front[HEADER_LEN..], 0)?;
    if head.tag != TAG_WORKING_SET {
        return Err(Damage::Misplaced { tag: head.tag }.into());
    }
    let fields = [
        ("the hash of the memory layout", header.layout_hash().into(), layout_hash(layout).into()),
        ("the length of the record", u64::from(head.length), payload.len() as u64),
    ];
    if let Some((what, found, expected)) = fields.into_iter().find(|(_, a, b)| a != b) {
        return Err(Damage::Mismatch { what, found, expected }.into());
    }
    head.check(payload)?;
    let (raw, rest) = table::<RawWorkingSetRun>(payload)?;
    let all = raw.iter().map(|[start, count]| {
        let run = FrameRun { start: Gfn(start.get()), count: count.get() };
        if layout.contains(run) { Ok(run) } else { Err(Damage::Outside { object: 0, run }.into()) }
    });
    in_range("the number of runs", raw.len() as u64, 1, MAX_WORKING_SET_RUNS as u64)?;
    all_zero([("the number of bytes after the runs", rest.len() as u64)])?;
    all.collect()
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use driftline_dirty_tracker::{Slot, SlotId};

    use super::*;

    fn run(start: u64, count: u64) -> FrameRun {
        FrameRun { start: Gfn(start), count }
    }

    fn layout(frames: u64) -> Layout {
        Layout::new([Slot { id: SlotId(0), base: Gfn(0), frames }]).unwrap()
    }

    struct WorkingSetDir {
        dir: tempfile::TempDir,
        vm_id: VmId,
    }

    impl WorkingSetDir {
        fn new() -> Self {
            Self { dir: tempfile::tempdir().unwrap(), vm_id: VmId::random() }
        }

        fn open(&self) -> WorkingSetFile {
            let store = Store::open(self.dir.path()).unwrap();
            WorkingSetFile::open(&store, self.vm_id, 3, &layout(1 << 20)).unwrap()
        }

        fn file(&self) -> std::path::PathBuf {
            self.dir.path().join(WORKING_SET)
        }
    }

    #[test]
    fn recorded_runs_keep_their_order() {
        let place = WorkingSetDir::new();
        assert!(place.open().runs().is_empty());
        place.open().record(&[run(9, 1), run(5, 1), run(700, 3)]);
        assert_eq!(place.open().runs(), [run(9, 1), run(5, 1), run(700, 3)]);
        place.open().record(&[]);
        assert_eq!(place.open().runs().len(), 3, "nothing new");
        place.open().record(&[run(6, 1), run(5, 1)]);
        assert_eq!(place.open().runs(), [run(9, 1), run(5, 1), run(700, 3), run(6, 1)]);
        let names: Vec<_> = std::fs::read_dir(place.dir.path()).unwrap().collect();
        assert_eq!(names.len(), 1, "{names:?}");
    }

    #[test]
    fn last_of_two_records_wins() {
        let place = WorkingSetDir::new();
        let (one, other) = (place.open(), place.open());
        one.record(&[run(1, 1)]);
        other.record(&[run(2, 1)]);
        assert_eq!(place.open().runs(), [run(2, 1)]);
    }

    #[test]
    fn recorded_runs_are_bounded() {
        let place = WorkingSetDir::new();
        let many: Vec<FrameRun> =
            (0..MAX_WORKING_SET_RUNS as u64 + 9).rev().map(|n| run(n, 1)).collect();
        place.open().record(&many);
        assert_eq!(place.open().runs(), &many[..MAX_WORKING_SET_RUNS]);
        assert_eq!(std::fs::metadata(place.file()).unwrap().len(), MAX_BYTES as u64);
        place.open().record(&[run(0, 1)]);
        assert_eq!(place.open().runs(), &many[..MAX_WORKING_SET_RUNS]);
    }

    #[test]
    fn damaged_record_is_ignored() {
        let place = WorkingSetDir::new();
        place.open().record(&[run(9, 1), run(5, 2)]);
        let sound = std::fs::read(place.file()).unwrap();
        for at in 0..sound.len() {
            let mut bent = sound.clone();
            bent[at] ^= 1 << (at % 8);
            std::fs::write(place.file(), bent).unwrap();
            // A checksum also covers the number of the epoch.
            assert!(place.open().runs().is_empty(), "byte {at}");
            std::fs::write(place.file(), &sound[..at]).unwrap();
            assert!(place.open().runs().is_empty(), "cut to {at}");
        }
        for more in [1, 16, 2 << 20] {
            let mut grown = sound.clone();
            grown.resize(sound.len() + more, 0);
            std::fs::write(place.file(), grown).unwrap();
            assert!(place.open().runs().is_empty(), "{more} more");
        }
        std::fs::write(place.file(), &sound).unwrap();
        assert_eq!(place.open().runs().len(), 2, "the repaired file is used");

        let store = Store::open(place.dir.path()).unwrap();
        let other = WorkingSetFile::open(&store, VmId::random(), 3, &layout(1 << 20)).unwrap();
        assert!(other.runs().is_empty(), "another guest's");
        let smaller = WorkingSetFile::open(&store, place.vm_id, 3, &layout(1 << 19)).unwrap();
        assert!(smaller.runs().is_empty(), "of another memory");
        for beyond in [run(1 << 20, 1), run((1 << 20) - 1, 2), run(7, u64::MAX), run(7, 0)] {
            place.open().write(&[run(1, 1), beyond]).unwrap();
            assert!(place.open().runs().is_empty(), "{beyond:?}");
        }
        // The next record replaces the damaged file.
        place.open().record(&[run(4, 1)]);
        assert_eq!(place.open().runs(), [run(4, 1)]);
    }

    #[test]
    fn unwritable_directory_records_nothing() {
        let place = WorkingSetDir::new();
        let working_set = place.open();
        place.dir.close().unwrap();
        working_set.record(&[run(1, 1)]);
    }
}
