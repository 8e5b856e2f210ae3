//! Where the frames and the state of an epoch go: into a store, or into the files of a snapshot.

use driftline_dirty_tracker::FrameRun;
use driftline_guest::Section;
use driftline_store::{EpochWriter, StoreError};

/// Takes the frames and the state of an epoch.
pub(crate) trait EpochOutput {
    /// Writes frames: `contents` holds their contents, in the order of `runs`. They replace what
    /// was written for the same frames before. With `forget_zeros`, which is for frames that cannot
    /// have had another content before, frames of zeros need not be written.
    fn write(
        &mut self,
        runs: &mut dyn Iterator<Item = FrameRun>,
        contents: &[u8],
        forget_zeros: bool,
    ) -> Result<(), StoreError>;

    /// Writes any number of frames of zeros.
    fn zeros(&mut self, run: FrameRun) -> Result<(), StoreError>;

    /// Adds a state section.
    fn section(&mut self, section: &Section) -> Result<(), StoreError>;
}

impl dyn EpochOutput + '_ {
    /// [Writes](EpochOutput::write) the frames of any iterator.
    pub(crate) fn frames(
        &mut self,
        mut runs: impl Iterator<Item = FrameRun>,
        contents: &[u8],
        forget_zeros: bool,
    ) -> Result<(), StoreError> {
        self.write(&mut runs, contents, forget_zeros)
    }
}

impl EpochOutput for EpochWriter {
    fn write(
        &mut self,
        runs: &mut dyn Iterator<Item = FrameRun>,
        contents: &[u8],
        forget_zeros: bool,
    ) -> Result<(), StoreError> {
        self.frames(runs, contents, forget_zeros)
    }

    fn zeros(&mut self, run: FrameRun) -> Result<(), StoreError> {
        Self::zeros(self, run);
        Ok(())
    }

    fn section(&mut self, section: &Section) -> Result<(), StoreError> {
        Self::section(self, section)
    }
}
