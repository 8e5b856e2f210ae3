//! The page source of a lazy restore: reads frames of an epoch one by one as the guest needs them,
//! and checks each.

use driftline_dirty_tracker::{FrameRun, FrameSet, Gfn, PAGE_SIZE};
use driftline_guest::{PAGE_BYTES, PageSource, PageSourceError};

use crate::damage::Damage;
use crate::epoch_info::EpochInfo;
use crate::error::StoreError;
use crate::frame_map::FrameLocation;
use crate::page_file::PageReader;
use crate::pin::{MachineState, Pinned};
use crate::store::Store;
use crate::working_set::WorkingSetFile;

/// Frames of an epoch that are not zeros. The epoch is retained in its store until this is dropped.
#[derive(Debug)]
pub struct LazyFrames {
    pinned: Pinned,
    epoch: u64,
    frames: FrameSet,
    /// Places of the frames, ascending by frame: 16 bytes each.
    locations: Vec<(Gfn, FrameLocation)>,
    /// Working set, which is only a hint; `None` if the store's directory could not be opened once
    /// more.
    working_set: Option<WorkingSetFile>,
}

impl LazyFrames {
    /// Returns the page source of the epoch pinned in `store`, and the state of its machine.
    ///
    /// # Errors
    ///
    /// Damage of the log, or an error of the system.
    pub fn new(mut pinned: Pinned, store: &Store) -> Result<(Self, MachineState), StoreError> {
        let EpochInfo { epoch, vm_id, .. } = pinned.log.epochs[pinned.index].info;
        let layout = pinned.log.epoch(pinned.index)?.layout;
        let working_set = WorkingSetFile::open(store, vm_id, epoch, &layout)
            .inspect_err(|e| tracing::debug!("the working set is not known: {e}"))
            .ok();
        let (locations, mapped) = pinned.read_locations()?;
        let frames: FrameSet = runs_of_locations(&locations).collect();
        Ok((Self { pinned, epoch, frames, locations, working_set }, mapped))
    }

    /// Returns the number of bytes of the log that were read.
    pub fn log_bytes(&self) -> u64 {
        self.pinned.log.bytes()
    }
}

impl PageSource for LazyFrames {
    fn epoch(&self) -> u64 {
        self.epoch
    }

    fn frames(&self) -> &FrameSet {
        &self.frames
    }

    fn working_set(&self) -> &[FrameRun] {
        self.working_set.as_ref().map_or(&[], WorkingSetFile::runs)
    }

    fn finish(&mut self, faulted: &[FrameRun]) {
        if let Some(working_set) = &self.working_set {
            working_set.record(faulted);
        }
    }

    fn read(&mut self, run: FrameRun, contents: &mut [u8]) -> Result<(), PageSourceError> {
        let from = self.locations.partition_point(|(gfn, _)| *gfn < run.start);
        let wanted = self.locations[from..].iter().take_while(|(gfn, _)| *gfn < run.end());
        let wanted: &[(Gfn, FrameLocation)] = &self.locations[from..from + wanted.count()];
        let read = read_frames(&self.pinned.pages, self.epoch, wanted, contents);
        read.map_err(|e| PageSourceError::new(self.pinned.name_origin(e)))
    }
}

/// Returns the frames of `locations`, which are ascending, as runs.
pub(super) fn runs_of_locations(
    locations: &[(Gfn, FrameLocation)],
) -> impl Iterator<Item = FrameRun> {
    let follows = |(a, _): &(Gfn, FrameLocation), (b, _): &(Gfn, FrameLocation)| {
        a.0.checked_add(1) == Some(b.0)
    };
    let runs = locations.chunk_by(follows);
    runs.map(|run| FrameRun { start: run[0].0, count: run.len() as u64 })
}

/// Reads the `wanted` frames of `epoch` into `contents`, in their order, and checks them.
pub(super) fn read_frames(
    pages: &PageReader,
    epoch: u64,
    wanted: &[(Gfn, FrameLocation)],
    contents: &mut [u8],
) -> Result<(), StoreError> {
    let mut rest = contents;
    for together in wanted.chunk_by(|(_, a), (_, b)| a.slot.checked_add(1) == Some(b.slot)) {
        let (bytes, left) = rest.split_at_mut((together.len() * PAGE_BYTES).min(rest.len()));
        rest = left;
        pages.read(together[0].1.slot, bytes)?;
        for ((gfn, location), page) in together.iter().zip(bytes.chunks_exact(PAGE_BYTES)) {
            let found = crc32c::crc32c(page);
            if found != location.crc {
                let damage = Damage::Frame { gfn: *gfn, epoch, found, expected: location.crc };
                let offset = u64::from(location.slot) * PAGE_SIZE;
                return Err(StoreError::Damaged { file: pages.path.clone(), offset, damage });
            }
        }
    }
    Ok(())
}
