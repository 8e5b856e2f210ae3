//! An epoch's memory as a file for other programs.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;

use driftline_dirty_tracker::{FrameRun, Gfn, Layout, PAGE_SIZE};
use driftline_guest::{Section, VmId};
use serde::Serialize;

use crate::error::StoreError;
use crate::frame_map::{Cell, FrameMap};
use crate::read::{Sink, fetch};
use crate::store::Store;

/// What an export has written.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
pub struct ExportReport {
    /// The epoch.
    pub epoch: u64,
    /// Whose it is.
    pub vm_id: VmId,
    /// Length of the file, holes included.
    pub bytes: u64,
    /// Frames in it that are not zeros, blocks of drives in an archive included; the others are
    /// holes, and not in an archive at all.
    pub frames: u64,
    /// Drives that the epoch has and the file has not.
    pub drives: u32,
}

/// Where in a file frame `gfn` goes, and those that follow it in its memory slot; nowhere if it is
/// none of the guest's.
pub type Place = Box<dyn Fn(u64) -> Option<u64> + Sync>;

/// Puts frames to where they go.
struct Placed<'f> {
    file: &'f File,
    path: &'f Path,
    place: Place,
}

impl Placed<'_> {
    fn io(&self, what: &'static str, cause: io::Error) -> StoreError {
        StoreError::Io { what, path: self.path.to_owned(), cause }
    }
}

impl Sink for Placed<'_> {
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
    /// Writes the memory of `epoch`, or of the latest, to `file`, an empty one: each byte at its
    /// guest physical address, with holes where it is zero. Drives are left out, which the report
    /// says. `path` is for messages. All that is read is checked; after an error the file is of no
    /// use. Durable when it returns.
    pub fn export_raw(
        &self,
        epoch: Option<u64>,
        file: &File,
        path: &Path,
    ) -> Result<ExportReport, StoreError> {
        self.export_with(epoch, file, path, |layout, _| {
            // A layout has a slot.
            let end = layout.slots().last().map_or(0, |slot| slot.run().end().0);
            file.set_len(end.saturating_mul(PAGE_SIZE))?;
            Ok(Box::new(|gfn| gfn.checked_mul(PAGE_SIZE)))
        })
    }

    /// As [`export_raw`](Self::export_raw), in a form that `begin` decides on: it is told the
    /// guest's memory slots and its state, writes whatever is no memory, gives the file its length,
    /// and says where frames go; slots that follow one another are to do so in the file.
    pub fn export_with(
        &self,
        epoch: Option<u64>,
        file: &File,
        path: &Path,
        begin: impl FnOnce(&Layout, &[Section]) -> io::Result<Place>,
    ) -> Result<ExportReport, StoreError> {
        let io = |what, cause| StoreError::Io { what, path: path.to_owned(), cause };
        let mut pinned = self.pin(epoch)?;
        let mut map = FrameMap::default();
        let sections = pinned.read_map(&mut map)?.sections;
        let info = pinned.log.groups[pinned.index].info;
        let machine = pinned.read_machine()?;
        let place = begin(&machine.layout, &sections).map_err(|e| io("beginning", e))?;
        let mut frames: Vec<(Gfn, Cell)> = map.iter().collect();
        fetch(&pinned.pages, info.epoch, &mut frames, &Placed { file, path, place })?;
        file.sync_all().map_err(|e| io("syncing", e))?;
        let bytes = file.metadata().map_err(|e| io("looking at", e))?.len();
        Ok(ExportReport {
            epoch: info.epoch,
            vm_id: info.vm_id,
            bytes,
            frames: frames.len() as u64,
            // There are 256 at most.
            drives: machine.drives.len() as u32,
        })
    }
}
