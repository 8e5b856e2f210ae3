//! Frames of a stored guest that its memory does not have yet: the guest runs, and they come when
//! they are touched, or behind it.

use std::error::Error;
use std::fmt;
use std::time::Duration;

use driftline_dirty_tracker::{FrameRun, FrameSet};

/// What is still to come, and where from. One thread reads.
pub trait Backlog: Send {
    /// The checkpoint that they are of.
    fn epoch(&self) -> u64;

    /// Frames that have content. All others of the guest are zeros.
    fn frames(&self) -> &FrameSet;

    /// Frames to fetch first while nobody waits for one: those that the guest touched first when it
    /// was restored the last time. A hint; may name frames that have no content, or none at all.
    fn first(&self) -> &[FrameRun];

    /// All have come. `touched` were touched before they had, in that order: they should come first
    /// the next time.
    fn finish(&mut self, touched: &[FrameRun]);

    /// Puts the contents of `run`, all of it part of [`frames`](Self::frames), into `contents`,
    /// which is as long. They are checked: an error names what is damaged.
    fn read(&mut self, run: FrameRun, contents: &mut [u8]) -> Result<(), PageSourceError>;
}

/// Why frames cannot be read. Displays the cause unchanged.
#[derive(Debug)]
pub struct PageSourceError(Box<dyn Error + Send + Sync>);

impl PageSourceError {
    /// An error with this cause.
    pub fn new(cause: impl Into<Box<dyn Error + Send + Sync>>) -> Self {
        Self(cause.into())
    }

    /// Returns the cause, if it is an `E`.
    ///
    /// # Errors
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

/// How far the fetching is.
#[derive(Clone, Debug, Default)]
pub struct Fetching {
    /// Frames that are still to come.
    pub left: u64,
    /// Frames that have come, those that somebody waited for included.
    pub fetched: u64,
    /// Of those, how many came because they were touched first the last time, before anybody waited
    /// for them.
    pub foreseen: u64,
    /// Frames that were touched before they had come, in the order in which that was.
    pub touched: Vec<FrameRun>,
    /// Why a frame cannot be had: the guest has ended, or is about to.
    pub lost: Option<String>,
    /// How long it took, once all are there.
    pub time: Option<Duration>,
}
