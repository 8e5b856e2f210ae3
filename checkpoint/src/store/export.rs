//! An epoch's memory as a flat file.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;

use dirty_tracker::{FrameRun, Gfn, PAGE_SIZE};
use serde::Serialize;

use super::{Cell, FrameMap, Pinned, Sink, Store, StoreError, fetch};
use crate::VmId;

/// What an export has written.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
pub struct ExportReport {
    /// The epoch.
    pub epoch: u64,
    /// Whose it is.
    pub vm_id: VmId,
    /// Length of the file: the end of the guest's memory.
    pub bytes: u64,
    /// Frames in it that are not zeros; the others are holes.
    pub frames: u64,
}

/// Puts frames to where the guest has them.
struct Flat<'f> {
    file: &'f File,
    path: &'f Path,
}

impl Flat<'_> {
    fn io(&self, what: &'static str, cause: io::Error) -> StoreError {
        StoreError::Io { what, path: self.path.to_owned(), cause }
    }
}

impl Sink for Flat<'_> {
    type Error = StoreError;

    fn frames(&self, run: FrameRun, contents: &[u8]) -> Result<(), StoreError> {
        self.file.write_all_at(contents, run.start.gpa()).map_err(|e| self.io("writing", e))
    }
}

impl Store {
    /// Writes the memory of `epoch`, or of the latest, to `file`, an empty one: each byte at its guest physical address, with
    /// holes where it is zero. `path` is for messages. All that is read is checked; after an error the file is of no use.
    /// Durable when it returns.
    pub fn export_raw(
        &self,
        epoch: Option<u64>,
        file: &File,
        path: &Path,
    ) -> Result<ExportReport, StoreError> {
        let mut pinned = self.pin(epoch)?;
        let mut map = FrameMap::default();
        pinned.read_map(&mut map)?;
        let Pinned { log, pages, index } = &mut pinned;
        let info = log.groups[*index].info;
        let layout = log.group(*index)?.layout.clone();
        let flat = Flat { file, path };
        // A layout has a slot.
        let end = layout.slots().last().map_or(0, |slot| slot.run().end().0);
        let bytes = end.saturating_mul(PAGE_SIZE);
        file.set_len(bytes).map_err(|e| flat.io("making room in", e))?;
        let mut frames: Vec<(Gfn, Cell)> = map.iter().collect();
        fetch(pages, info.epoch, &mut frames, &flat)?;
        file.sync_all().map_err(|e| flat.io("syncing", e))?;
        Ok(ExportReport {
            epoch: info.epoch,
            vm_id: info.vm_id,
            bytes,
            frames: frames.len() as u64,
        })
    }
}
