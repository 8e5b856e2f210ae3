//! Restores a guest's drives to an epoch: overwrites them in place, after all blocks have been
//! checked.

use driftline_dirty_tracker::{FrameRun, FrameSet, Gfn};
use driftline_guest::{DriveCopy, DriveHead};
use driftline_store::{Archive, FrameLocation, Pinned, Sink, StoreError, place};

use super::error::{DriveRestoreError, RestoreError};

/// The blocks of an epoch that are not zeros.
pub(crate) enum EpochBlocks<'a> {
    /// Blocks in a store. The epoch is pinned there until this is dropped.
    Stored(Box<Pinned>, Vec<(Gfn, FrameLocation)>),
    /// Blocks in an archive that has been unpacked and checked as a whole.
    Archived(&'a Archive, FrameSet),
}

impl EpochBlocks<'_> {
    /// Reads the blocks of the pinned epoch.
    pub(crate) fn new(mut pinned: Pinned) -> Result<Self, StoreError> {
        let blocks = pinned.read_blocks()?;
        Ok(Self::Stored(Box::new(pinned), blocks))
    }

    /// Returns the number of blocks.
    pub(crate) fn count(&self) -> u64 {
        match self {
            Self::Stored(_, blocks) => blocks.len() as u64,
            Self::Archived(_, blocks) => blocks.frames(),
        }
    }

    /// Returns the blocks of drive `object`, by their numbers in that drive.
    fn of(&self, object: u16) -> FrameSet {
        let here = |run: &FrameRun| place(run.start).0 == object;
        let block = |run: FrameRun| FrameRun { start: place(run.start).1, ..run };
        match self {
            Self::Stored(_, blocks) => {
                let runs = blocks.iter().map(|(start, _)| FrameRun { start: *start, count: 1 });
                runs.filter(here).map(block).collect()
            }
            Self::Archived(_, blocks) => blocks.iter().filter(here).map(block).collect(),
        }
    }

    /// Passes the blocks to `sink`, each checked.
    fn fetch<S: Sink>(&mut self, sink: &S) -> Result<(), S::Error> {
        match self {
            Self::Stored(pinned, blocks) => pinned.fetch(blocks, sink),
            Self::Archived(archive, _) => archive.read(sink, 1),
        }
    }
}

/// The drives of a guest that is being restored; nothing else has them.
pub(crate) struct RestoredDrives<'h> {
    pub(crate) epoch: u64,
    pub(crate) heads: &'h [DriveHead],
    /// In the same order.
    pub(crate) drives: Vec<Box<dyn DriveCopy>>,
}

/// A sink that only checks the stored blocks: no drive has been written at that point.
struct CheckBlocksSink<'r>(&'r RestoredDrives<'r>);

impl Sink for CheckBlocksSink<'_> {
    type Error = RestoreError;

    fn frames(&self, run: FrameRun, _: &[u8]) -> Result<(), RestoreError> {
        let (object, _) = place(run.start);
        self.0.numbered(object).map(drop).ok_or_else(|| self.0.missing(object))
    }
}

impl Sink for RestoredDrives<'_> {
    type Error = DriveRestoreError;

    fn frames(&self, run: FrameRun, contents: &[u8]) -> Result<(), DriveRestoreError> {
        let (object, block) = place(run.start);
        let Some((head, drive)) = self.numbered(object) else {
            return Err(DriveRestoreError::NoDrive(object));
        };
        let (at, len) = within(head, FrameRun { start: block, count: run.count });
        let written = drive.write(at, &contents[..len as usize]);
        written.map_err(|cause| DriveRestoreError::Write { head: head.clone(), cause })
    }
}

/// Returns the part of `run` that lies in the drive: its first byte and its length.
fn within(head: &DriveHead, run: FrameRun) -> (u64, u64) {
    let at = run.start.gpa();
    (at, run.bytes().min(head.bytes.saturating_sub(at)))
}

impl RestoredDrives<'_> {
    fn numbered(&self, object: u16) -> Option<(&DriveHead, &dyn DriveCopy)> {
        let at = usize::from(object).checked_sub(1)?;
        Some((self.heads.get(at)?, &**self.drives.get(at)?))
    }

    fn missing(&self, object: u16) -> RestoreError {
        RestoreError::MissingDrive { epoch: self.epoch, number: object }
    }

    /// Reads all `blocks` and compares their checksums, so that a sound drive is not overwritten
    /// for one that cannot be read.
    fn check(&self, blocks: &mut EpochBlocks<'_>) -> Result<(), RestoreError> {
        for (object, _) in (1..).zip(self.heads) {
            self.numbered(object).ok_or_else(|| self.missing(object))?;
        }
        match blocks {
            EpochBlocks::Stored(..) => blocks.fetch(&CheckBlocksSink(self)),
            // It has already been checked.
            EpochBlocks::Archived(..) => Ok(()),
        }
    }

    /// Writes `blocks` to the drives, and zeros elsewhere. On return the drives are durable and
    /// belong to the guest. Reads the blocks twice: once before anything is written. After any
    /// error other than [`RestoreError::Drives`] the drives are unchanged.
    pub(crate) fn fill(self, mut blocks: EpochBlocks<'_>) -> Result<(), RestoreError> {
        let names: Vec<String> = self.heads.iter().map(|head| format!("\"{}\"", head.id)).collect();
        let epoch = self.epoch;
        self.check(&mut blocks)?;
        tracing::info!(checkpoint = epoch, disks = names.join(", "), "overwriting disks");
        let written = self.write(&mut blocks);
        written.map_err(|cause| RestoreError::Drives { epoch, cause, disks: names })?;
        self.drives.iter().for_each(|drive| drive.keep());
        Ok(())
    }

    fn write(&self, blocks: &mut EpochBlocks<'_>) -> Result<(), DriveRestoreError> {
        for (object, head) in (1..).zip(self.heads) {
            let Some((_, drive)) = self.numbered(object) else {
                return Err(DriveRestoreError::Missing(head.clone()));
            };
            let stored = blocks.of(object);
            for gap in stored.gaps(FrameRun { start: Gfn(0), count: head.blocks() }) {
                let (at, len) = within(head, gap);
                let zeroed = drive.zero(at, len);
                zeroed.map_err(|cause| DriveRestoreError::Zero { head: head.clone(), cause })?;
            }
        }
        blocks.fetch(self)?;
        for (head, drive) in self.heads.iter().zip(&self.drives) {
            let durable = drive.make_durable();
            let head = head.clone();
            durable.map_err(|cause| DriveRestoreError::MakeDurable { head, cause })?;
        }
        // Only after all are durable: until then, nothing else may open any of them.
        for (head, drive) in self.heads.iter().zip(&self.drives) {
            let yielded = drive.yield_to_guest();
            let head = head.clone();
            yielded.map_err(|cause| DriveRestoreError::YieldToGuest { head, cause })?;
        }
        Ok(())
    }
}
