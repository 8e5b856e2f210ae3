//! Writes an epoch's memory to a file for other programs.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;

use driftline_dirty_tracker::{FrameRun, Gfn, Layout, PAGE_SIZE};
use driftline_guest::{Section, VmId};
use serde::Serialize;

use crate::error::StoreError;
use crate::frame_map::{FrameLocation, FrameMap};
use crate::read::{Sink, fetch};
use crate::store::Store;

/// Result of an export.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
pub struct ExportReport {
    /// Number of the epoch.
    #[serde(rename = "checkpoint")]
    pub epoch: u64,
    /// Guest whose epoch it is.
    pub vm_id: VmId,
    /// Length of the file in bytes, including holes.
    pub bytes: u64,
    /// Number of frames in the file that are not zeros; in an archive, that includes blocks of
    /// drives. The other frames are holes, and an archive does not have them at all.
    pub frames: u64,
    /// Number of drives that the epoch has and the file lacks.
    pub drives: u32,
}

/// Returns the offset in a file of frame `gfn`, and of the frames that follow it in its memory
/// slot; `None` if the guest does not have the frame.
pub type OffsetOfFrame = Box<dyn Fn(u64) -> Option<u64> + Sync>;

/// A sink that writes frames to their places.
struct ExportSink<'f> {
    file: &'f File,
    path: &'f Path,
    place: OffsetOfFrame,
}

impl ExportSink<'_> {
    fn io(&self, what: &'static str, cause: io::Error) -> StoreError {
        StoreError::Io { what, path: self.path.to_owned(), cause }
    }
}

impl Sink for ExportSink<'_> {
    type Error = StoreError;

    fn frames(&self, run: FrameRun, contents: &[u8]) -> Result<(), StoreError> {
        let Some(at) = (self.place)(run.start.0) else {
            let why = format!("page {:#x} is not in guest memory", run.start.0);
            return Err(self.io("writing", io::Error::other(why)));
        };
        self.file.write_all_at(contents, at).map_err(|e| self.io("writing", e))
    }
}

impl Store {
    /// Writes the memory of `epoch`, or of the latest, to `file`, which must be empty: each byte at
    /// its guest physical address, with holes for zeros. Drives are skipped, and the report has
    /// their number. `path` is for messages. Everything that is read is checked. The file is
    /// durable when this returns; after an error its content is undefined.
    ///
    /// # Errors
    ///
    /// [`StoreError::NoEpoch`] if the epoch is not there; damage; or the system's errors.
    pub fn export_raw(
        &self,
        epoch: Option<u64>,
        file: &File,
        path: &Path,
    ) -> Result<ExportReport, StoreError> {
        self.export_with(epoch, file, path, |layout, _| {
            // A layout has at least one slot.
            let end = layout.slots().last().map_or(0, |slot| slot.run().end().0);
            file.set_len(end.saturating_mul(PAGE_SIZE))?;
            Ok(Box::new(|gfn| gfn.checked_mul(PAGE_SIZE)))
        })
    }

    /// Exports like [`export_raw`](Self::export_raw), in a format that `begin` defines. `begin`
    /// receives the guest's memory slots and its state, writes everything that is not memory, sets
    /// the file's length, and returns the places of frames. Memory slots that are adjacent must be
    /// adjacent in the file, too.
    ///
    /// # Errors
    ///
    /// As [`export_raw`](Self::export_raw), or the error of `begin`.
    pub fn export_with(
        &self,
        epoch: Option<u64>,
        file: &File,
        path: &Path,
        begin: impl FnOnce(&Layout, &[Section]) -> io::Result<OffsetOfFrame>,
    ) -> Result<ExportReport, StoreError> {
        let io = |what, cause| StoreError::Io { what, path: path.to_owned(), cause };
        let mut pinned = self.pin(epoch)?;
        let mut map = FrameMap::default();
        let sections = pinned.read_map(&mut map)?.sections;
        let info = pinned.log.epochs[pinned.index].info;
        let machine = pinned.read_machine()?;
        let place = begin(&machine.layout, &sections).map_err(|e| io("beginning", e))?;
        let mut frames: Vec<(Gfn, FrameLocation)> = map.iter().collect();
        fetch(&pinned.pages, info.epoch, &mut frames, &ExportSink { file, path, place })?;
        file.sync_all().map_err(|e| io("syncing", e))?;
        let bytes = file.metadata().map_err(|e| io("checking", e))?.len();
        Ok(ExportReport {
            epoch: info.epoch,
            vm_id: info.vm_id,
            bytes,
            frames: frames.len() as u64,
            // An epoch has at most 256 drives.
            drives: machine.drives.len() as u32,
        })
    }
}
