//! Guest frame numbers and runs of frames, the two units of this crate.

use std::fmt;

/// The base-2 logarithm of [`PAGE_SIZE`].
pub const PAGE_SHIFT: u32 = 12;
/// Bytes in a frame: 4096, the unit in which KVM tracks writes on x86-64.
pub const PAGE_SIZE: u64 = 1 << PAGE_SHIFT;

/// A guest frame number: a guest physical address divided by [`PAGE_SIZE`].
///
/// ```
/// use driftline_dirty_tracker::Gfn;
/// let gfn = Gfn::containing(0x1234_5678); // bytes
/// assert_eq!(gfn, Gfn(0x12345));
/// assert_eq!(gfn.gpa(), 0x1234_5000); // bytes again
/// assert_eq!(gfn.to_string(), "gfn 0x12345");
/// ```
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[repr(transparent)]
pub struct Gfn(pub u64);

impl Gfn {
    /// Returns the frame that holds the guest physical byte address `gpa`.
    pub const fn containing(gpa: u64) -> Self {
        Self(gpa >> PAGE_SHIFT)
    }

    /// Returns the guest physical byte address of the frame's first byte.
    ///
    /// Frames of a [`Layout`](crate::Layout) never overflow here: their addresses lie below 2^52.
    pub const fn gpa(self) -> u64 {
        self.0 << PAGE_SHIFT
    }
}

impl fmt::Debug for Gfn {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "gfn {:#x}", self.0)
    }
}

impl fmt::Display for Gfn {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(self, f)
    }
}

/// A run of `count` consecutive frames that begins at `start`. A run that enters or leaves a tree
/// lies in one slot. A run that would pass frame 2^64 - 1 ends there.
///
/// ```
/// use driftline_dirty_tracker::{FrameRun, Gfn};
/// let run = FrameRun { start: Gfn(0x10), count: 5 };
/// assert_eq!((run.end(), run.bytes()), (Gfn(0x15), 5 * 4096));
/// assert_eq!(run.frames().last(), Some(Gfn(0x14)));
/// let messages: Vec<String> = run.chunks(4).map(|r| r.to_string()).collect();
/// assert_eq!(messages, ["gfn 0x10..0x14", "gfn 0x14..0x15"]);
/// ```
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct FrameRun {
    /// The first frame.
    pub start: Gfn,
    /// Number of frames; at least one in every run that this crate returns.
    pub count: u64,
}

impl FrameRun {
    /// Returns the frame after the last one.
    pub const fn end(self) -> Gfn {
        Gfn(self.start.0.saturating_add(self.count))
    }

    /// Returns the number of bytes in the run. A run of guest memory never overflows here.
    pub const fn bytes(self) -> u64 {
        self.count << PAGE_SHIFT
    }

    /// Returns the frames of the run, ascending.
    pub fn frames(self) -> impl Iterator<Item = Gfn> {
        (self.start.0..self.end().0).map(Gfn)
    }

    /// Splits the run into runs of at most `max` frames, ascending. A `max` of 0 counts as 1.
    pub fn chunks(self, max: u64) -> impl Iterator<Item = FrameRun> {
        let max = max.max(1);
        let mut at = self.start.0;
        let end = self.end().0;
        std::iter::from_fn(move || {
            if at >= end {
                return None;
            }
            let count = max.min(end - at);
            let run = FrameRun { start: Gfn(at), count };
            at += count;
            Some(run)
        })
    }
}

impl fmt::Display for FrameRun {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "gfn {:#x}..{:#x}", self.start.0, self.end().0)
    }
}
