//! Where dirty frames come from: the trait that each tracking mode implements.

use std::fmt;
use std::io;
use std::str::FromStr;

use crate::Tracker;

/// A way of tracking a guest's writes. Part of a machine's configuration: KVM fixes ring or bitmap
/// before the first vCPU exists. Reads and shows as its name on the command line.
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
    /// No tracking: neither checkpoints nor migration.
    None,
    // Stored configurations know a mode by its place here: new ones come last.
    /// `KVM_GET_DIRTY_LOG` that reads alone, and `KVM_CLEAR_DIRTY_LOG` for what it found.
    DirtyBitmapManual,
    /// Asynchronous write protection of userfaultfd, and `PAGEMAP_SCAN`: what the host's page
    /// tables know.
    UserfaultWp,
}

impl TrackingMode {
    /// Every mode, for help texts and tests.
    pub const ALL: &[TrackingMode] = &[
        Self::DirtyRing,
        Self::DirtyBitmap,
        Self::DirtyBitmapManual,
        Self::UserfaultWp,
        Self::None,
    ];

    /// The mode's name on the command line.
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

/// A tracking mode that does not exist: what was asked for.
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

/// A source could not do what it was asked; what was dirty before is still known or will be.
///
/// ```
/// let cause = std::io::Error::other("no such slot");
/// let error = driftline_dirty_tracker::SourceError { what: "KVM_GET_DIRTY_LOG of slot 3", cause };
/// assert_eq!(error.to_string(), "KVM_GET_DIRTY_LOG of slot 3 failed: no such slot");
/// ```
#[derive(Debug, thiserror::Error)]
#[error("{what} failed: {cause}")]
pub struct SourceError {
    /// The operation, as its user knows it: an ioctl's name, mostly.
    pub what: &'static str,
    /// The system's answer.
    pub cause: io::Error,
}

/// What one collection did, with the time each step took.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct Collected {
    /// Frames that reached the trees, with repetitions.
    pub frames: u64,
    /// Rings that were overrun since the last collection (I6).
    pub overruns: u64,
    /// All memory was marked because the source could not be trusted.
    pub marked_all: bool,
    /// Ring entries (or bitmap words) to lists, ns.
    pub harvest_ns: u64,
    /// Reprotecting, ns.
    pub reprotect_ns: u64,
    /// Inserting into the trees, ns.
    pub insert_ns: u64,
}

/// A way of learning which frames a guest wrote.
///
/// One thread owns a source. `start` and `collect` uphold I2 and I3: what `collect` delivers has
/// been reprotected before it reaches `tracker`. Each of them costs a few system calls, and errors
/// are theirs.
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
///         TrackingMode::None // none of KVM's
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
///                 tracker.mark_all(); // it cannot be trusted
///                 collected.marked_all = true;
///             }
///             collected.frames += run.count;
///         }
///         Ok(collected)
///     }
/// }
/// # let tracker = Arc::new(Tracker::new(Layout::new([Slot { id: SlotId(0), base: Gfn(0), frames: 64 }])?));
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
    /// The mode it implements. No system call.
    fn mode(&self) -> TrackingMode;

    /// Begins to catch writes: every write that starts after this returns will be collected. From
    /// here on the guest pays for the first write to each frame.
    fn start(&mut self) -> Result<(), SourceError>;

    /// Stops catching writes; the guest runs at full speed again. What was not collected is gone.
    fn stop(&mut self) -> Result<(), SourceError>;

    /// Delivers every write since the last collection to all of `tracker`'s trees. With all vCPUs
    /// stopped the trees are then complete. On an error nothing is lost: the next call has it.
    fn collect(&mut self, tracker: &Tracker) -> Result<Collected, SourceError>;

    /// Frames that each vCPU has made dirty so far, see
    /// [`Harvester::dirtied`](crate::Harvester::dirtied); nothing, the default, where it is not
    /// known whose writes are caught. No system call.
    fn dirtied(&self) -> &[u64] {
        &[]
    }

    /// Entries that the last collection found in each vCPU's ring, see
    /// [`Harvester::harvested`](crate::Harvester::harvested); nothing, the default, where there are
    /// no rings. No system call.
    fn harvested(&self) -> &[u64] {
        &[]
    }
}
