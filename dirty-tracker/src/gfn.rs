//! Guest frame numbers and runs of frames, the two units of this crate, and the size of a frame.

use std::fmt;

/// The base-2 logarithm of [`PAGE_SIZE`].
pub const PAGE_SHIFT: u32 = PageSize::Kib4.shift();
/// Bytes in a frame of the default size, 4096: the unit in which KVM tracks writes on x86-64.
pub const PAGE_SIZE: u64 = PageSize::Kib4.bytes();

/// The size of a frame: that of the host's pages, the unit in which KVM tracks writes.
///
/// The tree counts frames and does not depend on their size. A layout has the size, for callers
/// that count bytes, such as `TrackedBitmap`. The methods here are for each size. Those of [`Gfn`]
/// and [`FrameRun`] are for the default size.
///
/// ```
/// use driftline_dirty_tracker::{FrameRun, Gfn, Layout, PageSize, Slot, SlotId};
/// let slot = Slot { id: SlotId(0), base: PageSize::Kib64.gfn(0x4000_0000), frames: 1024 };
/// let layout = Layout::with_page_size(PageSize::Kib64, [slot])?; // 64 MiB on an arm64 host
/// let page = layout.page_size();
/// assert_eq!((page.bytes(), page.gpa(slot.base)), (65_536, 0x4000_0000));
/// assert_eq!(page.run(0x4000_ffff, 2), FrameRun { start: slot.base, count: 2 });
/// # Ok::<(), driftline_dirty_tracker::LayoutError>(())
/// ```
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default)]
pub enum PageSize {
    /// 4 KiB: x86-64, and the usual size of other hosts.
    #[default]
    Kib4,
    /// 16 KiB.
    Kib16,
    /// 64 KiB.
    Kib64,
}

impl PageSize {
    /// Returns the base-2 logarithm of [`bytes`](Self::bytes).
    pub const fn shift(self) -> u32 {
        match self {
            Self::Kib4 => 12,
            Self::Kib16 => 14,
            Self::Kib64 => 16,
        }
    }

    /// Returns the number of bytes in a frame.
    pub const fn bytes(self) -> u64 {
        1 << self.shift()
    }

    /// Returns the frame that holds the guest physical byte address `gpa`.
    pub const fn gfn(self, gpa: u64) -> Gfn {
        Gfn(gpa >> self.shift())
    }

    /// Returns the guest physical byte address of the frame's first byte.
    pub const fn gpa(self, gfn: Gfn) -> u64 {
        gfn.0 << self.shift()
    }

    /// Returns the frames that hold the `len` bytes from `gpa` on. Bytes past address 2^64 - 1 do
    /// not count.
    pub const fn run(self, gpa: u64, len: u64) -> FrameRun {
        let start = self.gfn(gpa);
        if len == 0 {
            return FrameRun { start, count: 0 };
        }
        let last = self.gfn(gpa.saturating_add(len - 1));
        FrameRun { start, count: last.0 - start.0 + 1 }
    }
}

/// A guest frame number: a guest physical address divided by the size of a frame.
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
    /// Returns the frame of 4 KiB that holds the guest physical byte address `gpa`.
    pub const fn containing(gpa: u64) -> Self {
        PageSize::Kib4.gfn(gpa)
    }

    /// Returns the guest physical byte address of the first byte of a frame of 4 KiB.
    ///
    /// Frames of a [`Layout`](crate::Layout) never overflow here: their addresses lie below 2^52.
    pub const fn gpa(self) -> u64 {
        PageSize::Kib4.gpa(self)
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

    /// Returns the number of bytes in the run, whose frames are of 4 KiB. A run of guest memory
    /// never overflows here.
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
