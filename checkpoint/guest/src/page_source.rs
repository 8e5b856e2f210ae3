//! Page sources of lazy restores: frames of a stored guest that its memory does not have yet. The
//! guest runs; a fault fetches its frame, and the others are fetched in the background.

use std::error::Error;
use std::fmt;
use std::time::Duration;

use driftline_dirty_tracker::{FrameRun, FrameSet};

/// Frames still to be fetched, and their source. Only one thread reads.
pub trait PageSource: Send {
    /// Returns the checkpoint of these frames.
    fn epoch(&self) -> u64;

    /// Returns the frames that have content. All other frames of the guest are zeros.
    fn frames(&self) -> &FrameSet;

    /// Returns the working set: frames to prefetch while no fault waits, because the guest accessed
    /// them first after its last restore. A hint; may name frames without content, or none at all.
    fn working_set(&self) -> &[FrameRun];

    /// Records that all frames have arrived. `faulted` lists the frames that faulted, in order:
    /// they should be prefetched first the next time.
    fn finish(&mut self, faulted: &[FrameRun]);

    /// Reads the contents of `run`, which is within [`frames`](Self::frames), into `contents` of
    /// the same length. Checks them: an error names what is damaged.
    ///
    /// # Errors
    ///
    /// A frame is damaged or cannot be read. `contents` is then undefined.
    fn read(&mut self, run: FrameRun, contents: &mut [u8]) -> Result<(), PageSourceError>;
}

/// Why frames cannot be read. Displays the cause unchanged.
#[derive(Debug)]
pub struct PageSourceError(Box<dyn Error + Send + Sync>);

impl PageSourceError {
    /// Creates an error with this cause.
    pub fn new(cause: impl Into<Box<dyn Error + Send + Sync>>) -> Self {
        Self(cause.into())
    }

    /// Returns the cause, if it is an `E`.
    ///
    /// # Errors
    ///
    /// Returns the error itself if the cause is of another type.
    pub fn downcast<E: Error + 'static>(self) -> Result<E, Self> {
        self.0.downcast().map(|cause| *cause).map_err(Self)
    }
}

impl fmt::Display for PageSourceError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl Error for PageSourceError {
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        self.0.source()
    }
}

/// Progress of a lazy restore.
#[derive(Clone, Debug, Default)]
pub struct LazyRestoreProgress {
    /// Frames still to be fetched.
    pub left: u64,
    /// Frames that have arrived, including those that faulted.
    pub fetched: u64,
    /// How many of these arrived by prefetch of the working set, before they faulted.
    pub prefetched: u64,
    /// Frames that faulted, in order.
    pub faulted: Vec<FrameRun>,
    /// Why a frame cannot be read: the guest has ended, or is about to.
    pub lost: Option<String>,
    /// Duration, once all frames have arrived.
    pub time: Option<Duration>,
}
