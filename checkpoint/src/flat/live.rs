//! Takes a snapshot of a guest that runs: memory goes into the memory file while the guest runs,
//! and the pause is that of a checkpoint.
//!
//! ```text
//! this thread   copy; copy again what changed   PAUSE: save, drain, copy   write ... sync, publish
//! guest         runs ........................                              runs ...............
//! ```

use std::time::{Duration, Instant};

use driftline_dirty_tracker::{DirtySet, FrameRun, PAGE_SIZE, Subscription};
use driftline_format::is_zero;
use driftline_guest::{PAGE_BYTES, Section};
use driftline_store::{MemoryFileLayout, PauseGate, StoreError, StoreFile};

use super::error::SnapshotError;
use super::memory_output::{MemoryExtent, MemoryOutput, SnapshotMemory};
use super::new_file::UnfinishedFile;
use super::request::{SnapshotReport, SnapshotRequest};
use super::writeback::Writeback;
use crate::copy_planner::CopyPlanner;
use crate::disk_copy::DiskCopy;
use crate::epoch_copy::{EpochCopier, EpochCopy};
use crate::epoch_drives::{EpochDrives, drives_of};
use crate::epoch_output::EpochOutput;
use crate::guest::Checkpointable;
use crate::live_copy::LiveCopy;
use crate::pause::Epoch;
use crate::report::{EpochFailure, EpochStep, FailedStep, step};
use crate::staging::{Staging, StagingLimits};

/// As [`create_snapshot`](super::create_snapshot), of a guest that may run. It is paused only for
/// as long as for a checkpoint: see [`Checkpointer::take`](crate::Checkpointer::take). The snapshot
/// is the guest in that pause. Needs 64 MiB of memory, or up to 1 GiB if the guest writes more than
/// that during one copy of what has changed; never more than the guest has.
///
/// # Errors
///
/// As for `create_snapshot`, but the guest runs again if it ran. An earlier snapshot whose memory
/// file is changed in place is lost as well if the guest ends meanwhile, or its pause or the save
/// of its state fails. A guest with a drive that it can write to is refused: the drive would be of
/// a later moment than the snapshot.
pub fn create_live_snapshot(
    guest: &dyn Checkpointable,
    changes: Option<&mut Subscription>,
    request: &SnapshotRequest,
) -> Result<SnapshotReport, SnapshotError> {
    live_snapshot(guest, changes, request, CopyPlanner::default())
}

pub(super) fn live_snapshot(
    guest: &dyn Checkpointable,
    changes: Option<&mut Subscription>,
    request: &SnapshotRequest,
    planner: CopyPlanner,
) -> Result<SnapshotReport, SnapshotError> {
    let since = Instant::now();
    let span = tracing::info_span!("snapshot", kind = ?request.kind, live = true);
    let _entered = span.enter();
    request.check_names()?;
    if let Some(drive) = drives_of(guest).into_iter().next() {
        return Err(SnapshotError::LiveDrive(drive.id));
    }
    let (layout, tracked) = (MemoryFileLayout::new(guest.layout()), changes.is_some());
    let mut own = None;
    let subscription = match changes {
        Some(changes) => changes,
        None => own.insert(guest.subscribe("snapshot")?),
    };
    let mut new_state = UnfinishedFile::new(&request.state)?;
    let mut writer = LiveMemory {
        guest,
        layout: &layout,
        request,
        tracked,
        new_state: &new_state,
        subscription,
        planner,
        changed: Vec::new(),
        state_bytes: 0,
        pause: Duration::ZERO,
    };
    let output = MemoryOutput { request, layout: &layout, tracked, new_state: &new_state };
    let written = output.write(&mut writer)?;
    let LiveMemory { changed, state_bytes, pause, .. } = writer;
    new_state.publish()?;
    changed.into_iter().for_each(DirtySet::commit);
    let pause_us = pause.as_micros() as u64;
    tracing::info!(pause_us, "the guest was paused");
    Ok(SnapshotReport { pause_us, ..written.report(since, &layout, state_bytes) })
}

/// The memory of a running guest on its way into a file.
struct LiveMemory<'l> {
    guest: &'l dyn Checkpointable,
    layout: &'l MemoryFileLayout,
    request: &'l SnapshotRequest,
    tracked: bool,
    new_state: &'l UnfinishedFile<'l>,
    subscription: &'l mut Subscription,
    planner: CopyPlanner,
    /// What went into the file: committed once that is durable, or else given back.
    changed: Vec<DirtySet>,
    state_bytes: u64,
    pause: Duration,
}

impl SnapshotMemory for LiveMemory<'_> {
    fn prepare(&mut self, extent: MemoryExtent) -> Result<(), SnapshotError> {
        // Fetches all memory that another process still has: a guest that runs may write any of it
        // until the pause. A copy of all memory fetches it first.
        if extent == MemoryExtent::Changes {
            self.guest.resident()?;
        }
        Ok(())
    }

    fn has_state(&self) -> bool {
        false
    }

    fn write(&mut self, extent: MemoryExtent, file: &dyn StoreFile) -> Result<u64, SnapshotError> {
        let mut to = FlatOutput::new(file, self.request, self.layout);
        self.copy(extent, &mut to)?;
        let FlatOutput { frames, sections, .. } = to;
        self.state_bytes =
            self.request.write_state(self.guest, self.tracked, sections, self.new_state)?;
        Ok(frames)
    }
}

impl LiveMemory<'_> {
    /// Copies memory, and the state of one moment.
    fn copy(&mut self, extent: MemoryExtent, to: &mut FlatOutput<'_>) -> Result<(), FailedStep> {
        let (all, limits) = (self.guest.layout().frames() * PAGE_SIZE, StagingLimits::default());
        let limits = StagingLimits { most_bytes: limits.most_bytes.min(all), ..limits };
        let staging = &mut Staging::new(limits);
        let last = step(EpochStep::CopyLive, || self.copy_running(extent, staging, to))?;
        // About as much is to be copied in the pause if nothing can be copied after it.
        staging.grow_to(last);
        let taken = match self.pause(staging, to) {
            Err(failed) => {
                if !self.planner.failed(failed.step, &failed.cause) {
                    return Err(failed);
                }
                // Write protection has failed. What was copied with it is dirty again.
                to.sections.clear();
                let changes = MemoryExtent::Changes;
                let last = step(EpochStep::CopyLive, || self.copy_running(changes, staging, to))?;
                staging.grow_to(last);
                self.pause(staging, to)?
            }
            Ok(taken) => taken,
        };
        staging.check_room(taken.staged);
        self.changed.extend(taken.changed);
        self.pause = taken.pause;
        Ok(())
    }

    /// Copies memory while the guest runs. Returns the number of frames that were copied last.
    fn copy_running(
        &mut self,
        extent: MemoryExtent,
        staging: &mut Staging,
        to: &mut FlatOutput<'_>,
    ) -> Result<u64, EpochFailure> {
        let (guest, policy) = (self.guest, &self.planner.policy);
        let mut before = None;
        if extent == MemoryExtent::All {
            // What changed before is in the copy of all memory.
            guest.collect()?;
            before = Some(self.subscription.drain());
        }
        let subscription = &mut *self.subscription;
        let mut live = LiveCopy { guest, policy, subscription, staging, file: to };
        let passes = match extent {
            MemoryExtent::Changes => live.catch_up(u64::MAX)?,
            MemoryExtent::All => live.copy_all()?,
        };
        let last = passes.last().map_or(0, DirtySet::frames);
        self.changed.extend(passes.into_iter().chain(before));
        Ok(last)
    }

    /// Pauses the guest, and copies the rest.
    fn pause(
        &mut self,
        staging: &mut Staging,
        to: &mut FlatOutput<'_>,
    ) -> Result<EpochCopy, FailedStep> {
        let Self { guest, subscription, .. } = self;
        let guest = *guest;
        let CopyPlanner { policy, protection, times, .. } = &mut self.planner;
        let (policy, pause_gate) = (&*policy, &PauseGate::default());
        let drives = &mut EpochDrives(Vec::new());
        let disks = DiskCopy::new(drives, policy, true);
        let protection = protection.next(policy, guest);
        let epoch = Epoch { guest, policy, pause_gate, subscription, disks, file: to };
        EpochCopier { epoch, protection, times, staging }.run()
    }
}

/// A memory file, and the state that goes with it.
pub(super) struct FlatOutput<'o> {
    file: &'o dyn StoreFile,
    writeback: Writeback<'o>,
    request: &'o SnapshotRequest,
    layout: &'o MemoryFileLayout,
    /// Number of frames written.
    pub(super) frames: u64,
    sections: Vec<Section>,
}

impl<'o> FlatOutput<'o> {
    pub(super) fn new(
        file: &'o dyn StoreFile,
        request: &'o SnapshotRequest,
        layout: &'o MemoryFileLayout,
    ) -> Self {
        let (writeback, sections) = (Writeback::new(file), Vec::new());
        Self { file, writeback, request, layout, frames: 0, sections }
    }

    /// Writes whole frames to `offset`, and begins their writeback when there are enough.
    fn put(&mut self, contents: &[u8], offset: u64) -> Result<(), StoreError> {
        let written = self.file.write_all_at(contents, offset);
        written.map_err(|e| self.request.memory.io("writing", e))?;
        let frames = contents.len() as u64 / PAGE_SIZE;
        self.frames += frames;
        self.writeback.wrote(offset, frames);
        Ok(())
    }
}

impl EpochOutput for FlatOutput<'_> {
    fn write(
        &mut self,
        runs: &mut dyn Iterator<Item = FrameRun>,
        mut contents: &[u8],
        forget_zeros: bool,
    ) -> Result<(), StoreError> {
        let layout = self.layout;
        for (part, offset) in runs.flat_map(|run| layout.parts(run)) {
            let (now, later) = contents.split_at(part.bytes() as usize);
            contents = later;
            if !forget_zeros {
                self.put(now, offset)?;
                continue;
            }
            // Skipped frames are holes.
            let mut at = 0;
            let frames: Vec<bool> = now.chunks(PAGE_BYTES).map(is_zero).collect();
            for same in frames.chunk_by(|a, b| a == b) {
                let bytes = same.len() * PAGE_BYTES;
                if !same[0] {
                    self.put(&now[at..at + bytes], offset + at as u64)?;
                }
                at += bytes;
            }
        }
        Ok(())
    }

    fn zeros(&mut self, run: FrameRun) -> Result<(), StoreError> {
        let frames =
            |(part, offset): (FrameRun, u64)| (0..part.count).map(move |n| offset + n * PAGE_SIZE);
        let layout = self.layout;
        layout.parts(run).flat_map(frames).try_for_each(|offset| self.put(&[0; PAGE_BYTES], offset))
    }

    fn section(&mut self, section: &Section) -> Result<(), StoreError> {
        self.sections.push(section.clone());
        Ok(())
    }
}

impl From<FailedStep> for SnapshotError {
    fn from(failed: FailedStep) -> Self {
        match failed.cause {
            EpochFailure::Store(cause) => Self::File(cause),
            EpochFailure::Guest(cause) => Self::Guest(cause),
            cause => Self::Live { step: failed.step, cause },
        }
    }
}
