//! Writes the frames of one epoch to free slots of the page file, while the guest runs. The log
//! contains nothing of the epoch until it is committed.

use std::fmt;
use std::sync::Arc;
use std::time::SystemTime;

use driftline_dirty_tracker::{FrameRun, Gfn, Layout};
use driftline_format::{FormatError, MAX_SECTION, MAX_SECTIONS, MAX_STATE, is_zero, layout_hash};
use driftline_guest::{DriveHead, GuestIdentity, PAGE_BYTES, Section, SectionTag};

use crate::alloc::SlotRun;
use crate::error::StoreError;
use crate::extents::Entries;
use crate::page_file::PageFile;
use crate::records::{Front, TAG_STORE, limit};

/// Number of frames for which slots are taken in one call: 1 MiB.
const SLOT_BATCH: usize = 256;

/// An epoch that is being written. Dropping it frees its slots.
pub struct EpochWriter {
    pages: Arc<PageFile>,
    front: Front,
    layout: Layout,
    config: Vec<u8>,
    drives: Vec<DriveHead>,
    sections: Vec<Section>,
    state_bytes: u64,
    /// Frames of the epoch; the last entry for a frame wins.
    entries: Entries,
    /// Frames without slots yet: the number, and the offset of the frame's content in the given
    /// contents.
    pending: Vec<(Gfn, usize)>,
    done: bool,
}

impl fmt::Debug for EpochWriter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("EpochWriter").field("front", &self.front).finish_non_exhaustive()
    }
}

/// An epoch all of whose frames are in the page file; nothing of it is durable yet. Dropping it
/// frees its slots.
pub struct WrittenEpoch(EpochWriter);

impl EpochWriter {
    /// Begins an epoch of `guest` with these drives; an epoch without a parent is full.
    ///
    /// # Errors
    ///
    /// [`StoreError::State`] if the guest's configuration is too long to be stored.
    pub fn new(
        pages: Arc<PageFile>,
        epoch: u64,
        guest: &dyn GuestIdentity,
        parent: Option<u64>,
        drives: Vec<DriveHead>,
    ) -> Result<Self, StoreError> {
        let layout = guest.layout().clone();
        let front = Front {
            epoch,
            parent,
            created_unix_ms: unix_ms(),
            line: guest.line().own,
            layout: layout_hash(&layout),
            rebased: false,
            drives: !drives.is_empty(),
        };
        let config = guest.config();
        let state_bytes = config.len() as u64;
        let new = Self {
            pages,
            front,
            layout,
            config,
            drives,
            sections: Vec::new(),
            state_bytes,
            entries: Entries::default(),
            pending: Vec::new(),
            done: false,
        };
        // No reader would accept a longer configuration.
        let tag = SectionTag::CONFIG.0;
        match new.config.len() {
            length if length > limit(tag) as usize => Err(new.refused(too_long(tag, length))),
            _ => Ok(new),
        }
    }

    fn refused(&self, cause: FormatError) -> StoreError {
        StoreError::State { epoch: self.front.epoch, cause }
    }

    /// Writes frames of memory or of drives: `contents` holds their contents, in the order of
    /// `runs`. They replace what was written for the same frames before. Frames of zeros take no
    /// slots. With `forget_zeros`, which is for frames that cannot have had another content before,
    /// they are not even noted.
    ///
    /// # Errors
    ///
    /// No slots are left, or the page file cannot be written.
    pub fn frames(
        &mut self,
        runs: impl Iterator<Item = FrameRun>,
        contents: &[u8],
        forget_zeros: bool,
    ) -> Result<(), StoreError> {
        for (gfn, at) in runs.flat_map(FrameRun::frames).zip((0..).step_by(PAGE_BYTES)) {
            if !is_zero(&contents[at..at + PAGE_BYTES]) {
                self.pending.push((gfn, at));
                if self.pending.len() == SLOT_BATCH {
                    self.flush(contents)?;
                }
            } else if !forget_zeros {
                self.entries.zeros(FrameRun { start: gfn, count: 1 });
            }
        }
        self.flush(contents)
    }

    /// Notes any number of frames of zeros, as contents that the epoch records.
    pub fn zeros(&mut self, run: FrameRun) {
        self.entries.zeros(run);
    }

    fn flush(&mut self, contents: &[u8]) -> Result<(), StoreError> {
        let mut pending = std::mem::take(&mut self.pending);
        let written = self.place(&pending, contents);
        pending.clear();
        self.pending = pending;
        written
    }

    /// Takes slots for `pending` and fills them.
    fn place(&mut self, mut pending: &[(Gfn, usize)], contents: &[u8]) -> Result<(), StoreError> {
        while !pending.is_empty() {
            let SlotRun { start, count } = self.pages.take(pending.len() as u32)?;
            let (now, later) = pending.split_at(count as usize);
            // Entries are noted before the write, so that the slots are freed if it fails.
            for ((gfn, at), slot) in now.iter().zip(start..) {
                self.entries.push(*gfn, slot, crc32c::crc32c(&contents[*at..*at + PAGE_BYTES]));
            }
            let mut slot = start;
            // Adjacent contents are written in one call.
            for piece in now.chunk_by(|(_, a), (_, b)| a + PAGE_BYTES == *b) {
                let from = piece[0].1;
                self.pages.write(slot, &contents[from..from + piece.len() * PAGE_BYTES])?;
                slot += piece.len() as u32;
            }
            pending = later;
        }
        Ok(())
    }

    /// Adds a state section.
    ///
    /// # Errors
    ///
    /// [`StoreError::SectionTag`] if the tag is not allowed; [`StoreError::State`] if the limits of
    /// sections are exceeded.
    pub fn section(&mut self, section: &Section) -> Result<(), StoreError> {
        let (tag, length) = (section.tag.0, section.bytes.len());
        // The configuration is stored elsewhere, and must not be among the sections.
        if tag >= TAG_STORE || tag <= SectionTag::CONFIG.0 {
            return Err(StoreError::SectionTag { tag });
        }
        if length > limit(tag) as usize {
            return Err(self.refused(too_long(tag, length)));
        }
        // The configuration counts as a section.
        let (found, limit) = (self.sections.len() + 2, MAX_SECTIONS);
        if found > limit as usize {
            return Err(self.refused(FormatError::TooManySections { found, limit }));
        }
        let (length, limit) = (self.state_bytes + length as u64, MAX_STATE);
        if length > limit {
            return Err(self.refused(FormatError::FileTooLong { length, limit }));
        }
        self.state_bytes = length;
        self.sections.push(section.clone());
        Ok(())
    }

    /// Ends the writing: for each frame the last content counts, and the slots of the others are
    /// freed.
    pub fn finish(mut self) -> WrittenEpoch {
        // In a full epoch, zeros need not be recorded.
        let old = self.entries.keep_latest(self.front.parent.is_none());
        self.pages.give_back(&old);
        WrittenEpoch(self)
    }
}

impl Drop for EpochWriter {
    fn drop(&mut self) {
        if !self.done {
            self.pages.give_back(&self.entries.slots());
        }
    }
}

impl WrittenEpoch {
    pub(crate) fn front(&self) -> Front {
        self.0.front
    }

    pub(crate) fn layout(&self) -> &Layout {
        &self.0.layout
    }

    pub(crate) fn config(&self) -> &[u8] {
        &self.0.config
    }

    pub(crate) fn drives(&self) -> &[DriveHead] {
        &self.0.drives
    }

    pub(crate) fn sections(&self) -> &[Section] {
        &self.0.sections
    }

    /// Returns the entries, ascending, each frame once.
    pub(crate) fn entries(&self) -> &Entries {
        &self.0.entries
    }

    /// Keeps the slots: a durable epoch needs them.
    pub(crate) fn keep_slots(mut self) {
        self.0.done = true;
    }

    /// Returns the slots, which may be a durable epoch's. The caller frees them when it knows that
    /// they are not.
    pub(crate) fn take_slots(mut self) -> Vec<SlotRun> {
        self.0.done = true;
        self.0.entries.slots()
    }
}

fn too_long(tag: u16, length: usize) -> FormatError {
    let length = u32::try_from(length).unwrap_or(u32::MAX);
    FormatError::TooLong { tag, length, limit: limit(tag).min(MAX_SECTION) }
}

/// Returns the time in milliseconds since 1970 by the host's clock.
pub fn unix_ms() -> u64 {
    let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
    since.map_or(0, |d| d.as_millis() as u64)
}

#[allow(clippy::unwrap_used)]
#[cfg(all(test, feature = "testing"))]
mod tests {
    use driftline_guest::VmId;
    use driftline_guest::testing::{MemoryConfig, MemoryGuest};

    use super::*;
    use crate::committer::Committer;
    use crate::store::Store;
    use crate::testing::MemoryDisk;

    #[test]
    fn refused_section_is_named_by_its_reason() {
        let guest = MemoryGuest::new(VmId::random(), MemoryConfig::still()).unwrap();
        let store = Store::with_backend(Box::new(MemoryDisk::default()), true).unwrap();
        let committer = Committer::create(&Arc::new(store), &*guest).unwrap();
        let refusal = |tag, length, count| {
            let pages = committer.pages().clone();
            let mut writer = EpochWriter::new(pages, 1, &*guest, None, Vec::new()).unwrap();
            let section = Section::new(SectionTag(tag), 0, vec![0; length]);
            (0..count).find_map(|_| writer.section(&section).err()).unwrap().to_string()
        };
        for tag in [0, 1, TAG_STORE] {
            let why = refusal(tag, 1, 1);
            assert!(why.ends_with(&format!("no section may have the tag {tag:#06x}")), "{why}");
        }
        for (length, count, expected) in [
            ((4 << 20) + 1, 1, "a record of tag 2 claims 4194305 bytes, more than the 4194304"),
            (0, 4096, "it has 4097 state sections, more than the 4096 allowed"),
            (4 << 20, 17, "bytes, more than the 67108864 allowed"),
        ] {
            let why = refusal(2, length, count);
            assert!(why.contains(expected), "{why}");
        }
    }
}
