//! The trait that each tracking mode implements, and the names of the modes.

use std::fmt;
use std::io;
use std::str::FromStr;

use crate::Tracker;

/// A way to track a guest's writes. It is part of a machine's configuration, because KVM requires
/// the choice of ring or bitmap before the first vCPU exists. Parses from and displays as its name
/// on the command line.
///
/// ```
/// use driftline_dirty_tracker::TrackingMode;
/// assert_eq!("dirty-bitmap".parse(), Ok(TrackingMode::DirtyBitmap));
/// assert_eq!(TrackingMode::default().name(), "dirty-ring");
/// let unknown = "dirty".parse::<TrackingMode>().unwrap_err();
/// assert!(unknown.to_string().starts_with("there is no tracking mode \"dirty\""));
/// assert!(TrackingMode::ALL.iter().all(|mode| mode.to_string().parse() == Ok(*mode)));
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "serde", serde(rename_all = "kebab-case"))]
#[non_exhaustive]
pub enum TrackingMode {
    /// Per-vCPU KVM dirty rings.
    #[default]
    DirtyRing,
    /// `KVM_GET_DIRTY_LOG`.
    DirtyBitmap,
    /// No tracking: the guest supports neither checkpoints nor migration.
    None,
    // Stored configurations identify a mode by its position here, so new modes come last.
    /// `KVM_GET_DIRTY_LOG` that only reads, and `KVM_CLEAR_DIRTY_LOG` for the frames it reports.
    DirtyBitmapManual,
    /// Asynchronous write protection by userfaultfd, and `PAGEMAP_SCAN`: the dirty state in the
    /// host's page tables.
    UserfaultWp,
}

impl TrackingMode {
    /// All modes, for help texts and tests.
    pub const ALL: &[TrackingMode] = &[
        Self::DirtyRing,
        Self::DirtyBitmap,
        Self::DirtyBitmapManual,
        Self::UserfaultWp,
        Self::None,
    ];

    /// Returns the mode's name on the command line.
    pub const fn name(self) -> &'static str {
        match self {
            Self::DirtyRing => "dirty-ring",
            Self::DirtyBitmap => "dirty-bitmap",
            Self::DirtyBitmapManual => "dirty-bitmap-manual",
            Self::UserfaultWp => "userfault-wp",
            Self::None => "none",
        }
    }
}

impl fmt::Display for TrackingMode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// The error for a name that is no tracking mode, with that name.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "there is no tracking mode \"{0}\"; there are dirty-ring, dirty-bitmap, dirty-bitmap-manual, \
     userfault-wp and none"
)]
pub struct UnknownMode(pub String);

impl FromStr for TrackingMode {
    type Err = UnknownMode;

    fn from_str(s: &str) -> Result<Self, UnknownMode> {
        let found = Self::ALL.iter().find(|m| m.name() == s);
        found.copied().ok_or_else(|| UnknownMode(s.to_owned()))
    }
}

/// A source's operation failed. No dirty frame is lost: the source still has it, or reports it
/// later.
///
/// ```
/// let cause = std::io::Error::other("no such slot");
/// let error = driftline_dirty_tracker::SourceError { what: "KVM_GET_DIRTY_LOG of slot 3", cause };
/// assert_eq!(error.to_string(), "KVM_GET_DIRTY_LOG of slot 3 failed: no such slot");
/// ```
#[derive(Debug, thiserror::Error)]
#[error("{what} failed: {cause}")]
pub struct SourceError {
    /// Name of the operation, usually of an ioctl.
    pub what: &'static str,
    /// Error of the system.
    pub cause: io::Error,
}

/// The result of one collection, with the time of each step.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct Collected {
    /// Frames that reached the trees; a frame counts as often as it was collected.
    pub frames: u64,
    /// Rings that were overrun since the last collection (I6).
    pub overruns: u64,
    /// Whether all memory was marked because the source could not be trusted.
    pub marked_all: bool,
    /// Time to move ring entries (or bitmap words) to lists, ns.
    pub harvest_ns: u64,
    /// Time to reprotect, ns.
    pub reprotect_ns: u64,
    /// Time to insert into the trees, ns.
    pub insert_ns: u64,
}

/// A source of dirty frames: finds out which frames a guest wrote.
///
/// One thread owns a source. `start` and `collect` uphold I2 and I3: a frame is reprotected before
/// it reaches `tracker`. Each call costs a few system calls, whose errors it returns.
///
/// ```
/// # use std::{sync::Arc, sync::mpsc::{Receiver, channel}};
/// use driftline_dirty_tracker::{Collected, DirtySource, SourceError, Tracker, TrackingMode};
/// # use driftline_dirty_tracker::{Gfn, FrameRun, Layout, Slot, SlotId};
///
/// /// The writes of a guest that reports them itself.
/// struct Reports(Receiver<FrameRun>);
///
/// impl DirtySource for Reports {
///     fn mode(&self) -> TrackingMode {
///         TrackingMode::None // this source uses none of KVM's modes
///     }
///     fn start(&mut self) -> Result<(), SourceError> {
///         Ok(())
///     }
///     fn stop(&mut self) -> Result<(), SourceError> {
///         Ok(())
///     }
///     fn collect(&mut self, tracker: &Tracker) -> Result<Collected, SourceError> {
///         let mut collected = Collected::default();
///         for run in self.0.try_iter() {
///             if tracker.mark(run).is_err() {
///                 tracker.mark_all(); // the report cannot be trusted
///                 collected.marked_all = true;
///             }
///             collected.frames += run.count;
///         }
///         Ok(collected)
///     }
/// }
/// # let slot = Slot { id: SlotId(0), base: Gfn(0), frames: 64 };
/// # let tracker = Arc::new(Tracker::new(Layout::new([slot])?));
/// # let mut subscription = tracker.subscribe("doc")?;
/// # let (guest, reports) = channel();
/// # let mut source = Reports(reports);
/// source.start()?;
/// guest.send(FrameRun { start: Gfn(3), count: 2 })?;
/// assert_eq!(source.collect(&tracker)?.frames, 2);
/// assert_eq!(subscription.drain().frames(), 2);
/// source.stop()?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub trait DirtySource: Send {
    /// Returns the mode that this source implements. No system call.
    fn mode(&self) -> TrackingMode;

    /// Starts tracking: every write that begins after this call is collected. From here on the
    /// guest pays for the first write to each frame.
    ///
    /// # Errors
    /// Returns an error if a system call fails.
    fn start(&mut self) -> Result<(), SourceError>;

    /// Stops tracking; the guest runs at full speed again. Writes that were not collected are
    /// discarded.
    ///
    /// # Errors
    /// Returns an error if a system call fails.
    fn stop(&mut self) -> Result<(), SourceError>;

    /// Inserts every write since the last collection into all trees of `tracker`. If all vCPUs are
    /// paused, the trees are complete afterwards.
    ///
    /// # Errors
    /// Returns an error if a system call fails. No frame is lost: the next call reports it.
    fn collect(&mut self, tracker: &Tracker) -> Result<Collected, SourceError>;

    /// Returns the number of frames that each vCPU has made dirty so far, see
    /// [`Harvester::dirtied`](crate::Harvester::dirtied). Empty by default, and where the writer of
    /// a frame is unknown. No system call.
    fn dirtied(&self) -> &[u64] {
        &[]
    }

    /// Returns the number of entries that the last collection found in each vCPU's ring, see
    /// [`Harvester::harvested`](crate::Harvester::harvested). Empty by default, and where there are
    /// no rings. No system call.
    fn harvested(&self) -> &[u64] {
        &[]
    }
}
