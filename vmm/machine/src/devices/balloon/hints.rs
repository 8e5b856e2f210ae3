//! One run of hints: frames that the guest does not use at the moment.
//!
//! ```text
//! device   command = id ------------------------------------------------- command = DONE
//! driver        takes free frames;  id, frames, frames, .., STOP          gives them back
//! ```
//!
//! A hint says that the content of a frame was unused at some moment after the command was given. A
//! run serves one of two uses:
//!
//! - A copy of all memory skips the frames. The guest may take a frame back and write to it at any
//!   time, even before the device reads the hint, so nothing is discarded. The thread that copies
//!   has tracked writes since before the command, so a frame that was written since then is in the
//!   next epoch. The copy therefore lacks only the content of frames that were free and not written
//!   since, which nothing needs.
//! - The operator wants the frames' memory. They are discarded when the device reads the hint, as
//!   in Firecracker. This relies on the driver: it must not write to a frame before the run is
//!   done. Linux keeps that rule unless memory becomes scarce during the run.
//!
//! The operator's run goes first: a copy that begins meanwhile gets no hints.

use std::sync::mpsc::Sender;

use driftline_dirty_tracker::{FrameRun, FrameSet};

/// Ends the hints when sent by the driver. As a command it means that hints were never wanted.
pub(super) const STOP: u32 = 0;
/// Command that says that no hinting is in progress: the driver may take its frames back.
pub(super) const DONE: u32 = 1;
/// Most runs of frames that are kept for a copy. Frames of further hints are copied like any
/// others.
const MAX_RUNS: usize = 65_536;

/// What a run of hints is for.
#[derive(Debug)]
pub(super) enum HintUse {
    /// A copy skips the frames.
    Copy(CopyHints),
    /// The frames are discarded. If `acknowledge`, the run is done as soon as the driver has no
    /// more hints.
    Discard { acknowledge: bool },
}

/// Hints for a copy.
#[derive(Debug)]
pub(super) struct CopyHints {
    free: FrameSet,
    reply: Sender<FrameSet>,
}

impl CopyHints {
    pub(super) fn new(reply: Sender<FrameSet>) -> Self {
        Self { free: FrameSet::new(), reply }
    }

    /// Adds hinted frames.
    pub(super) fn add(&mut self, frames: FrameRun) {
        if self.free.len() < MAX_RUNS {
            self.free.insert(frames);
        }
    }

    /// Sends the frames so far to the requester.
    pub(super) fn answer(self) {
        // The requester may have ended meanwhile.
        let _ = self.reply.send(self.free);
    }
}

#[derive(Debug)]
struct HintRun {
    command: u32,
    /// Whether the driver has said that the following hints belong to this run.
    begun: bool,
    hint_use: HintUse,
}

/// The run of hints in progress, if there is one. See the module documentation.
#[derive(Debug, Default)]
pub(super) struct Hints {
    run: Option<HintRun>,
}

impl Hints {
    /// Starts the run of `command`. The caller has ended the one before.
    pub(super) fn begin(&mut self, command: u32, hint_use: HintUse) {
        self.run = Some(HintRun { command, begun: false, hint_use });
    }

    /// Returns whether hints are discarded at the moment.
    pub(super) fn is_discarding(&self) -> bool {
        matches!(&self.run, Some(HintRun { hint_use: HintUse::Discard { .. }, .. }))
    }

    /// Handles the start of the driver's hints for command `id`, which may be an old command.
    pub(super) fn driver_begins(&mut self, id: u32) {
        if let Some(run) = &mut self.run {
            run.begun = id == run.command;
        }
    }

    /// Handles the end of the driver's hints, which may be those of an earlier run. Returns what
    /// the run was for if it is done.
    pub(super) fn driver_ends(&mut self) -> Option<HintUse> {
        let run = self.run.as_mut().filter(|run| run.begun)?;
        run.begun = false;
        match run.hint_use {
            HintUse::Discard { acknowledge: false } => None,
            _ => self.end(),
        }
    }

    /// Returns what the driver's hints are for at the moment; `None` if they belong to no run.
    pub(super) fn current(&mut self) -> Option<&mut HintUse> {
        self.run.as_mut().filter(|run| run.begun).map(|run| &mut run.hint_use)
    }

    /// Ends the run. Returns what it was for, if there is one.
    pub(super) fn end(&mut self) -> Option<HintUse> {
        self.run.take().map(|run| run.hint_use)
    }
}
