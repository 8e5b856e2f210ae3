//! The memory file of a snapshot: which file is written, and how it gets its name.

use std::time::{Duration, Instant};

use driftline_store::{MemoryFileLayout, RangeLock, StoreFile};

use super::error::SnapshotError;
use super::new_file::{UnfinishedFile, WithdrawnFile};
use super::request::{SnapshotKind, SnapshotReport, SnapshotRequest};

/// Which frames a memory file receives.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum MemoryExtent {
    /// Those that changed since the last snapshot.
    Changes,
    /// All that have memory.
    All,
}

/// Writes a guest's memory.
pub(super) trait SnapshotMemory {
    /// Makes sure that the frames of `extent` can be read. No file has been changed yet.
    fn prepare(&mut self, extent: MemoryExtent) -> Result<(), SnapshotError>;

    /// Returns whether the state file has its content before memory is written.
    fn has_state(&self) -> bool;

    /// Writes these frames to their places, and nothing else, so that the rest of a new file is a
    /// hole. Returns how many. When this returns, the state file has its content, too.
    fn write(&mut self, extent: MemoryExtent, file: &dyn StoreFile) -> Result<u64, SnapshotError>;
}

/// A memory file that is complete and durable, as the state file is.
pub(super) struct WrittenMemory<'o> {
    pub(super) frames: u64,
    pub(super) merged: bool,
    pub(super) write: Duration,
    pub(super) sync: Duration,
    /// The state file that went with the file before.
    pub(super) earlier: WithdrawnFile<'o>,
}

impl WrittenMemory<'_> {
    /// Returns the report of a paused guest's snapshot that began at `since` and has its names.
    /// Removes the state file of an earlier one.
    pub(super) fn report(
        self,
        since: Instant,
        layout: &MemoryFileLayout,
        state_bytes: u64,
    ) -> SnapshotReport {
        let Self { frames, merged, write, sync, earlier } = self;
        drop(earlier);
        let ms = |time: Duration| time.as_secs_f64() * 1e3;
        let report = SnapshotReport {
            memory_bytes: layout.bytes(),
            frames,
            merged,
            state_bytes,
            pause_us: 0,
            write_ms: ms(write),
            sync_ms: ms(sync),
            time_ms: ms(since.elapsed()),
        };
        tracing::info!(frames, merged, ms = report.time_ms, "taken");
        report
    }
}

/// The files of a snapshot.
pub(super) struct MemoryOutput<'o, 'f> {
    pub(super) request: &'o SnapshotRequest,
    pub(super) layout: &'f MemoryFileLayout,
    /// Whether the guest's writes are tracked for snapshots.
    pub(super) tracked: bool,
    pub(super) new_state: &'f UnfinishedFile<'o>,
}

impl<'o> MemoryOutput<'o, '_> {
    /// Writes memory by `writer`: to the file that exists, if the request is for changes and that
    /// file can be changed, or else to a new one.
    pub(super) fn write(
        &self,
        writer: &mut dyn SnapshotMemory,
    ) -> Result<WrittenMemory<'o>, SnapshotError> {
        let SnapshotRequest { kind, memory, backing, since_boot, .. } = self.request;
        if !self.tracked || *kind == SnapshotKind::Full {
            return self.replace(MemoryExtent::All, writer);
        }
        if *since_boot {
            // The changes are all memory that the guest has. An existing file is another guest's.
            return self.replace(MemoryExtent::Changes, writer);
        }
        let Some(file) = memory.open()? else {
            return self.replace(MemoryExtent::Changes, writer);
        };
        let length = file.len().map_err(|e| memory.io("reading", e))?;
        let identity = file.identity().map_err(|e| memory.io("reading", e))?;
        if length != self.layout.bytes() {
            self.replace(MemoryExtent::Changes, writer)
        } else if Some(identity) == *backing {
            // All memory is what the backing file and the changes are together.
            self.replace(MemoryExtent::All, writer)
        } else {
            self.merge(&*file, writer)
        }
    }

    /// Writes the changes over `file`, which no guest may be loaded from. From the first write on,
    /// a state file at the new one's name does not go with the memory file any more.
    fn merge(
        &self,
        file: &dyn StoreFile,
        writer: &mut dyn SnapshotMemory,
    ) -> Result<WrittenMemory<'o>, SnapshotError> {
        match file.lock_range(0..self.layout.bytes(), RangeLock::Exclusive) {
            Ok(true) => {}
            Ok(false) => return Err(SnapshotError::InUse(self.request.memory.path())),
            Err(e) => {
                let path = self.request.memory.path();
                tracing::warn!(
                    "{} is not locked, so guests that are loaded from it are not detected: {e}",
                    path.display()
                );
            }
        }
        // Before anything is withdrawn: it may fail.
        writer.prepare(MemoryExtent::Changes)?;
        if writer.has_state() {
            self.new_state.sync()?;
        }
        let earlier = WithdrawnFile::new(&self.request.state)?;
        let (frames, write) = self.fill(MemoryExtent::Changes, writer, file)?;
        let sync = self.sync(file)?;
        Ok(WrittenMemory { frames, merged: true, write, sync, earlier })
    }

    /// Writes the frames of `extent` to a new file that replaces the one before.
    fn replace(
        &self,
        extent: MemoryExtent,
        writer: &mut dyn SnapshotMemory,
    ) -> Result<WrittenMemory<'o>, SnapshotError> {
        let SnapshotRequest { memory, state, .. } = self.request;
        writer.prepare(extent)?;
        let mut new = UnfinishedFile::new(memory)?;
        new.file.truncate(self.layout.bytes()).map_err(|e| memory.io("growing", e))?;
        let (frames, write) = self.fill(extent, writer, &*new.file)?;
        let sync = self.sync(&*new.file)?;
        // The new memory file is never beside an earlier snapshot's state file.
        let earlier = WithdrawnFile::new(state)?;
        match new.publish() {
            Ok(()) => Ok(WrittenMemory { frames, merged: false, write, sync, earlier }),
            Err(e) => {
                if new.is_unpublished() {
                    earlier.put_back();
                }
                Err(e.into())
            }
        }
    }

    /// Writes the frames. Returns their number and the time that it took.
    fn fill(
        &self,
        extent: MemoryExtent,
        writer: &mut dyn SnapshotMemory,
        file: &dyn StoreFile,
    ) -> Result<(u64, Duration), SnapshotError> {
        let since = Instant::now();
        Ok((writer.write(extent, file)?, since.elapsed()))
    }

    /// Makes both files durable: the state after memory, so that one commit of the file system's
    /// journal may have both. Returns the time that it took.
    fn sync(&self, file: &dyn StoreFile) -> Result<Duration, SnapshotError> {
        let since = Instant::now();
        file.sync().map_err(|e| self.request.memory.io("syncing", e))?;
        self.new_state.sync()?;
        Ok(since.elapsed())
    }
}
