//! The state of a snapshot: all of a paused guest but its memory, in one file. The memory is in a
//! file beside it, at places that follow from the layout.

use std::path::Path;

use driftline_dirty_tracker::Layout;
use driftline_format::{
    FormatError, HEADER_LEN, Header, MAGIC_SNAPSHOT, MAX_SECTIONS, MAX_SLOTS, RECORD_HEAD_LEN,
    layout_hash,
};
use driftline_guest::{Section, SectionTag, VmId};
use zerocopy::{FromBytes, IntoBytes};

use crate::backend::StoreFile;
use crate::damage::Damage;
use crate::error::StoreError;
use crate::memory_layout::MemoryFileLayout;
use crate::record_file::front::{RawSnapshot, SNAPSHOT_LEN, TAG_SNAPSHOT};
use crate::record_file::output::RecordOutput;
use crate::record_file::records::{TAG_END, limit};
use crate::record_file::walk::RecordWalk;
use crate::records::{TAG_LAYOUT, TAG_STORE, all_zero, wrong_size};
use crate::regular_file::open_regular;

/// Maximum length of the file, in bytes.
pub(crate) const MAX_SNAPSHOT_STATE: u64 = 16 << 20;

/// Flag of [`SnapshotState::tracked`].
const TRACKED: u32 = 1;

/// All of a guest but its memory, as it was when a snapshot was taken.
///
/// ```
/// let dir = tempfile::tempdir()?;
/// let path = dir.path().join("state");
/// std::fs::write(&path, "something else")?;
/// let e = driftline_store::SnapshotState::open(&path).unwrap_err().to_string();
/// assert!(e.contains("is truncated: it ends at byte 14"), "{e}");
/// # Ok::<(), std::io::Error>(())
/// ```
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct SnapshotState {
    /// The guest.
    pub vm_id: VmId,
    /// Time at which it was taken, in milliseconds since 1970 by the host's clock.
    pub created_unix_ms: u64,
    /// Whether the guest's writes were tracked for snapshots of what changed.
    pub tracked: bool,
    /// Memory slots of the guest.
    pub layout: Layout,
    /// Configuration of the guest, as `GuestIdentity::config` returned it.
    pub config: Vec<u8>,
    /// State of the guest.
    pub sections: Vec<Section>,
}

impl SnapshotState {
    /// Reads and checks the file at `path`: any truncation and any flipped bit is found. Takes as
    /// much memory as the file has bytes, at most 16 MiB.
    ///
    /// # Errors
    ///
    /// [`StoreError::Damaged`] if the file is damaged, too long, or no snapshot's state; or the
    /// system's error.
    pub fn open(path: &Path) -> Result<Self, StoreError> {
        let io = |cause| StoreError::Io { what: "opening", path: path.to_owned(), cause };
        Self::with_file(&open_regular(path).map_err(io)?, path)
    }

    /// Reads a file like [`open`](Self::open). `path` is for messages.
    ///
    /// # Errors
    ///
    /// As [`open`](Self::open).
    pub fn with_file(file: &dyn StoreFile, path: &Path) -> Result<Self, StoreError> {
        let walk = RecordWalk::new(file, path)?;
        let (length, limit) = (walk.len(), MAX_SNAPSHOT_STATE);
        if length > limit {
            return Err(walk.damaged(FormatError::FileTooLong { length, limit }));
        }
        let (header, mut walk) = walk.header(MAGIC_SNAPSHOT)?;
        let payload = walk.expect(TAG_SNAPSHOT)?;
        let what = "the length of a snapshot's first record";
        let raw = RawSnapshot::read_from_bytes(&payload)
            .map_err(|_| walk.damaged(wrong_size(what, payload.len(), SNAPSHOT_LEN)))?;
        let flags = raw.flags.get();
        all_zero([
            ("the checkpoint's number in the header of a snapshot", header.epoch()),
            ("the undefined part of a snapshot's flags", (flags & !TRACKED).into()),
        ])
        .map_err(|e| walk.damaged(e))?;
        if header.layout_hash() != raw.layout.get() {
            let (found, expected) = (header.layout_hash().into(), raw.layout.get().into());
            let what = "the layout in the header";
            return Err(walk.damaged(Damage::Mismatch { what, found, expected }));
        }
        let (layout, config) = walk.machine(raw.layout.get())?;
        let (found, expected) = (raw.memory_bytes.get(), MemoryFileLayout::new(&layout).bytes());
        if found != expected {
            let what = "the length of the memory file";
            return Err(walk.damaged(Damage::Mismatch { what, found, expected }));
        }
        let (sections, next) = walk.sections(&config)?;
        let Some(end) = next.end else {
            return Err(walk.damaged(Damage::Misplaced { tag: next.head.tag }));
        };
        all_zero([
            ("the checkpoint's number at the end of a snapshot", end.epoch),
            ("the number of pages in a snapshot's state", end.frames),
        ])
        .map_err(|e| walk.damaged(e))?;
        Ok(Self {
            vm_id: header.vm_id(),
            created_unix_ms: raw.created_unix_ms.get(),
            tracked: flags & TRACKED != 0,
            layout,
            config,
            sections,
        })
    }

    /// Returns the version of the format of the file at `path`, which another release may have
    /// written. Checks its header only.
    ///
    /// # Errors
    ///
    /// [`StoreError::Damaged`] if the header is damaged or not that of a snapshot's state; or the
    /// system's error.
    pub fn format_version(path: &Path) -> Result<u16, StoreError> {
        let io = |cause| StoreError::Io { what: "opening", path: path.to_owned(), cause };
        let file = open_regular(path).map_err(io)?;
        let walk = RecordWalk::new(&file, path)?;
        let mut bytes = [0; HEADER_LEN];
        walk.read(0, &mut bytes)?;
        let header = Header::read_any_version(&bytes[..], MAGIC_SNAPSHOT);
        header.map(|header| header.version()).map_err(|e| walk.damaged(e))
    }

    /// Returns the bytes of the file.
    ///
    /// # Errors
    ///
    /// [`StoreError::SnapshotState`] or [`StoreError::SectionTag`] if no reader would accept them.
    pub fn encode(&self) -> Result<Vec<u8>, StoreError> {
        let is_section = |s: &Section| (SectionTag::CONFIG.0 + 1..TAG_STORE).contains(&s.tag.0);
        if let Some(foreign) = self.sections.iter().find(|s| !is_section(s)) {
            return Err(StoreError::SectionTag { tag: foreign.tag.0 });
        }
        let length = self.checked_length().map_err(StoreError::SnapshotState)?;
        let mut bytes = Vec::with_capacity(length as usize);
        let layout = layout_hash(&self.layout);
        let header = Header::new(MAGIC_SNAPSHOT, self.vm_id, 0, layout);
        let raw = RawSnapshot {
            created_unix_ms: self.created_unix_ms.into(),
            memory_bytes: MemoryFileLayout::new(&self.layout).bytes().into(),
            layout: layout.into(),
            flags: (if self.tracked { TRACKED } else { 0 }).into(),
        };
        let written = RecordOutput::new(&mut bytes, &header).and_then(|mut out| {
            out.record(TAG_SNAPSHOT, 0, raw.as_bytes())?;
            out.machine(&self.layout, &self.config)?;
            out.sections(&self.sections)?;
            out.end(0, 0)
        });
        written.map_err(|e| StoreError::SnapshotState(e.into()))?;
        Ok(bytes)
    }

    /// Returns the file's length in bytes, if it and its records keep their limits.
    fn checked_length(&self) -> Result<u64, FormatError> {
        let own = [
            (TAG_SNAPSHOT, SNAPSHOT_LEN),
            (TAG_LAYOUT, self.layout.slots().len() * (limit(TAG_LAYOUT) / MAX_SLOTS) as usize),
            (SectionTag::CONFIG.0, self.config.len()),
            (TAG_END, limit(TAG_END) as usize),
        ];
        let sections = self.sections.iter().map(|s| (s.tag.0, s.bytes.len()));
        let mut length = HEADER_LEN as u64;
        for (tag, bytes) in own.into_iter().chain(sections) {
            length += (RECORD_HEAD_LEN + bytes) as u64;
            if bytes > limit(tag) as usize {
                let length = u32::try_from(bytes).unwrap_or(u32::MAX);
                return Err(FormatError::TooLong { tag, length, limit: limit(tag) });
            }
        }
        let (found, limit) = (self.sections.len(), MAX_SECTIONS - 1);
        if found > limit as usize {
            return Err(FormatError::TooManySections { found, limit });
        }
        if length > MAX_SNAPSHOT_STATE {
            return Err(FormatError::FileTooLong { length, limit: MAX_SNAPSHOT_STATE });
        }
        Ok(length)
    }
}

#[allow(clippy::unwrap_used)]
#[cfg(all(test, feature = "testing"))]
mod tests {
    use driftline_dirty_tracker::{Gfn, Slot, SlotId};

    use super::*;
    use crate::backend::Backend;
    use crate::testing::{MemoryDisk, correct_record_file};

    fn slot(id: u32, base: u64, frames: u64) -> Slot {
        Slot { id: SlotId(id), base: Gfn(base), frames }
    }

    fn section(tag: u16, instance: u16, length: usize) -> Section {
        let (tag, bytes) = (SectionTag(tag), vec![0x5a; length]);
        Section { tag, instance, must_understand: tag.0 < 100, bytes }
    }

    fn small() -> SnapshotState {
        SnapshotState {
            vm_id: VmId::random(),
            created_unix_ms: 1_790_000_000_123,
            tracked: true,
            layout: Layout::new([slot(0, 0, 300), slot(1, 0x400, 724)]).unwrap(),
            config: vec![7; 19],
            sections: vec![
                section(2, 0, 9),
                section(3, 0, 0),
                section(3, 1, 40),
                section(900, 0, 3),
            ],
        }
    }

    fn read(bytes: &[u8]) -> Result<SnapshotState, StoreError> {
        let disk = MemoryDisk::default();
        disk.put("state", bytes.to_vec());
        SnapshotState::with_file(&*disk.open("state").unwrap(), Path::new("/somewhere/state"))
    }

    #[test]
    fn state_round_trips() {
        let empty = SnapshotState { config: vec![], sections: vec![], tracked: false, ..small() };
        for state in [small(), empty] {
            let bytes = state.encode().unwrap();
            assert_eq!(bytes.len() as u64, state.checked_length().unwrap());
            assert_eq!(read(&bytes).unwrap(), state);
            let mut again = bytes.clone();
            correct_record_file(&mut again);
            assert!(again == bytes, "correction changes nothing in a sound file");
        }
    }

    #[test]
    fn flipped_bit_is_refused_with_its_place() {
        let sound = small().encode().unwrap();
        for at in 0..sound.len() {
            for bit in 0..8 {
                let mut bent = sound.clone();
                bent[at] ^= 1 << bit;
                let e = read(&bent).unwrap_err();
                let StoreError::Damaged { file, offset, .. } = &e else { panic!("{e}") };
                assert!(file.ends_with("state") && *offset <= at as u64, "byte {at}: {e}");
            }
        }
    }

    #[test]
    fn truncated_or_grown_state_is_refused() {
        let sound = small().encode().unwrap();
        for len in 0..sound.len() {
            let e = read(&sound[..len]).unwrap_err();
            let StoreError::Damaged { damage: Damage::EndsEarly { length, .. }, .. } = e else {
                panic!("{len}: {e}");
            };
            assert_eq!(length, len as u64);
        }
        for more in [&b"x"[..], &[0; 4096], &sound[HEADER_LEN..]] {
            let e = read(&[&sound[..], more].concat()).unwrap_err().to_string();
            assert!(e.contains("the length of the file is "), "{e}");
        }
        let long = vec![0; MAX_SNAPSHOT_STATE as usize + 1];
        let e = read(&long).unwrap_err().to_string();
        assert!(e.contains("it has 16777217 bytes, more than the 16777216 allowed"), "{e}");
    }

    #[test]
    fn every_field_that_the_format_fixes_is_checked() {
        let sound = small().encode().unwrap();
        let refused = |at: usize, bytes: &[u8], why: &str| {
            let mut bent = sound.clone();
            bent[at..at + bytes.len()].copy_from_slice(bytes);
            correct_record_file(&mut bent);
            let e = read(&bent).unwrap_err().to_string();
            assert!(e.contains(why), "{why}: {e}");
        };
        let front = HEADER_LEN + RECORD_HEAD_LEN;
        let layout = front + SNAPSHOT_LEN;
        refused(0, b"DRIFTARC", "not a Driftline snapshot");
        refused(8, &[2], "format version 2 is not the version 1");
        refused(16, &[1], "it requires feature bits 0x1");
        refused(48, &[1], "the checkpoint's number in the header of a snapshot is 1");
        refused(56, &[!sound[56]], "the layout in the header is ");
        refused(HEADER_LEN, &[0x11], "a record of tag 0x8011 has no place here");
        refused(HEADER_LEN + 4, &[1], "the instance of a record that has none");
        refused(front + 8, &[1], "the length of the memory file is 4194305 and should be 4194304");
        refused(front + 20, &[3], "the undefined part of a snapshot's flags is 2");
        refused(layout + RECORD_HEAD_LEN + 8, &[1], "the hash of the memory layout");
        // Contents of memory, and drives, are in archives only.
        let last = sound.len() - RECORD_HEAD_LEN - 24;
        refused(last, &[0x20], "a record of tag 0x8020 has no place here");
        refused(last, &[0x15], "a record of tag 0x8015 has no place here");
        refused(last + RECORD_HEAD_LEN, &[1], "number at the end of a snapshot is 1");
    }

    #[test]
    fn state_beyond_the_limits_is_not_encoded() {
        let refused = |state: SnapshotState, why: &str| {
            let e = state.encode().unwrap_err().to_string();
            assert!(e.contains(why), "{why}: {e}");
        };
        refused(SnapshotState { config: vec![0; (64 << 10) + 1], ..small() }, "the 65536 allowed");
        let sections = vec![section(3, 0, (4 << 20) + 1)];
        refused(SnapshotState { sections, ..small() }, "the 4194304 allowed");
        let sections = vec![section(3, 0, 4 << 20); 4];
        refused(SnapshotState { sections, ..small() }, "the 16777216 allowed");
        let sections = vec![section(3, 0, 0); 4096];
        refused(SnapshotState { sections, ..small() }, "the 4095 allowed");
        for tag in [0, 1, TAG_STORE] {
            let sections = vec![section(tag, 0, 0)];
            let why = format!("no section may have the tag {tag:#06x}");
            refused(SnapshotState { sections, ..small() }, &why);
        }
    }
}
