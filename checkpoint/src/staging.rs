//! The staging area: preallocated memory that holds frames between the pause and the disk.

use driftline_dirty_tracker::{FrameRun, Gfn, PAGE_SIZE};
use driftline_guest::GuestRam;
use vm_memory::{Bytes, GuestAddress, GuestMemoryError};
use zerocopy::{FromBytes, FromZeros, Immutable, IntoBytes, KnownLayout};

/// Aligned for direct I/O.
#[derive(Clone, FromBytes, IntoBytes, Immutable, KnownLayout, Debug)]
#[repr(C, align(4096))]
struct StagingPage([u8; PAGE_SIZE as usize]);

/// Limits of the memory that a checkpointer uses for copies of frames.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct StagingLimits {
    /// Bytes reserved at the start.
    pub first_bytes: u64,
    /// Upper bound on the area, in bytes. The area grows between epochs, to what the last epoch
    /// would have needed.
    pub most_bytes: u64,
}

impl Default for StagingLimits {
    /// 64 MiB, growing to 1 GiB.
    fn default() -> Self {
        Self { first_bytes: 64 << 20, most_bytes: 1 << 30 }
    }
}

/// Preallocated memory, already resident, that is reused for each epoch.
#[derive(Debug)]
pub(crate) struct Staging {
    pages: Vec<StagingPage>,
    /// Bytes.
    most: usize,
}

impl Staging {
    /// Allocates `limits.first_bytes`, or less if the host has less: at least one frame.
    pub(crate) fn new(limits: StagingLimits) -> Self {
        let mut staging = Self { pages: Vec::new(), most: whole_frames(limits.most_bytes) };
        let mut want = whole_frames(limits.first_bytes).min(staging.most);
        while !staging.reserve(want) && want > PAGE_SIZE as usize {
            want = whole_frames(want as u64 / 2);
        }
        staging
    }

    /// Returns the number of frames that fit into the area together.
    pub(crate) fn frames(&self) -> u64 {
        self.pages.len() as u64
    }

    /// Warns if an epoch needed room for `frames` frames, and there is less.
    pub(crate) fn check_room(&self, frames: u64) {
        let room = self.frames();
        if frames > room {
            tracing::warn!(frames, room, "pages were written to the disk during the pause");
        }
    }

    /// Makes room for an epoch of `frames` frames, as far as the limit and the host allow. Must not
    /// be called in the pause.
    pub(crate) fn grow_to(&mut self, frames: u64) {
        let want = frames.saturating_mul(PAGE_SIZE).checked_next_power_of_two();
        let want = want.map_or(self.most, whole_frames).min(self.most);
        let have = self.bytes().len();
        if want > have && !self.reserve(want) {
            tracing::warn!(want, have, "no memory for a larger staging area");
        }
    }

    /// Copies `runs` to the position after `at` frames; they must fit.
    pub(crate) fn copy_to(
        &mut self,
        at: u64,
        ram: &GuestRam,
        runs: impl Iterator<Item = FrameRun>,
    ) -> Result<(), GuestMemoryError> {
        copy(&mut self.pages.as_mut_bytes()[(at * PAGE_SIZE) as usize..], ram, runs)?;
        Ok(())
    }

    /// Copies `runs`, which must fit, and returns the copy.
    pub(crate) fn copy(
        &mut self,
        ram: &GuestRam,
        runs: impl Iterator<Item = FrameRun>,
    ) -> Result<&[u8], GuestMemoryError> {
        let used = copy(self.pages.as_mut_bytes(), ram, runs)?;
        Ok(&self.bytes()[..used])
    }

    /// Splits the area after `frames` frames; it must have that many.
    pub(crate) fn split(&mut self, frames: u64) -> (&mut [u8], &mut [u8]) {
        self.pages.as_mut_bytes().split_at_mut((frames * PAGE_SIZE) as usize)
    }

    /// Returns `frames` frames from the position after `at` frames.
    pub(crate) fn from(&self, at: u64, frames: u64) -> &[u8] {
        &self.bytes()[(at * PAGE_SIZE) as usize..((at + frames) * PAGE_SIZE) as usize]
    }

    fn bytes(&self) -> &[u8] {
        self.pages.as_bytes()
    }

    /// Reserves `bytes`; if that fails, the previous size, or else one frame. The content is lost.
    /// Returns whether `bytes` were reserved.
    fn reserve(&mut self, bytes: usize) -> bool {
        let wanted = bytes / PAGE_SIZE as usize;
        let had = self.pages.len();
        // Freed first: both areas together would exceed the limit.
        self.pages = Vec::new();
        for count in [wanted, had] {
            if count > 0 && self.pages.try_reserve_exact(count).is_ok() {
                self.pages.resize(count, StagingPage::new_zeroed());
                // Zeroed memory may not be resident yet; a write to each page populates it.
                self.pages.iter_mut().for_each(|page| page.0[0] = 1);
                return count == wanted;
            }
        }
        // Without room for one frame, a copy would silently copy nothing.
        self.pages.push(StagingPage::new_zeroed());
        false
    }
}

/// Copies `runs` to the beginning of `bytes`, where they must fit. Returns the number of bytes
/// copied.
pub(crate) fn copy(
    bytes: &mut [u8],
    ram: &GuestRam,
    runs: impl Iterator<Item = FrameRun>,
) -> Result<usize, GuestMemoryError> {
    let mut used = 0;
    for run in runs {
        let end = used + run.bytes() as usize;
        ram.read_slice(&mut bytes[used..end], GuestAddress(run.start.gpa()))?;
        used = end;
    }
    Ok(used)
}

/// Rounds down to whole frames, but to at least one.
fn whole_frames(bytes: u64) -> usize {
    let bytes = usize::try_from(bytes).unwrap_or(usize::MAX);
    (bytes / PAGE_SIZE as usize).max(1) * PAGE_SIZE as usize
}

/// Returns the part of `runs` that begins after `skip` frames and has at most `take` frames.
pub(crate) fn window(
    runs: impl Iterator<Item = FrameRun>,
    mut skip: u64,
    mut take: u64,
) -> impl Iterator<Item = FrameRun> {
    runs.filter_map(move |run| {
        let skipped = skip.min(run.count);
        skip -= skipped;
        let count = take.min(run.count - skipped);
        take -= count;
        let start = Gfn(run.start.0 + skipped);
        (count > 0).then_some(FrameRun { start, count })
    })
}

/// Splits runs into consecutive groups of at most `frames` frames each. A lazy iterator, because a
/// drive may have many.
pub(crate) fn batches(runs: &[FrameRun], frames: u64) -> impl Iterator<Item = Vec<FrameRun>> {
    let mut pieces = runs.iter().copied();
    let mut rest: Option<FrameRun> = None;
    std::iter::from_fn(move || {
        let (mut group, mut room) = (Vec::new(), frames);
        while room > 0 {
            let Some(run) = rest.take().or_else(|| pieces.next()) else { break };
            let count = run.count.min(room);
            group.push(FrameRun { start: run.start, count });
            room -= count;
            let left = FrameRun { start: Gfn(run.start.0 + count), count: run.count - count };
            rest = (left.count > 0).then_some(left);
        }
        (!group.is_empty()).then_some(group)
    })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn windows_laid_end_to_end_are_the_whole(
            lengths in prop::collection::vec((1u64..20, 0u64..5), 0..20),
            size in 1u64..30,
        ) {
            let mut at = 0;
            let mut runs = Vec::new();
            for (count, gap) in lengths {
                runs.push(FrameRun { start: Gfn(at + gap), count });
                at += gap + count;
            }
            let all: Vec<Gfn> = runs.iter().flat_map(|r| r.frames()).collect();
            let mut seen = Vec::new();
            while seen.len() < all.len() {
                let part = window(runs.iter().copied(), seen.len() as u64, size);
                let frames: Vec<Gfn> = part.flat_map(FrameRun::frames).collect();
                prop_assert!(!frames.is_empty() && frames.len() as u64 <= size);
                seen.extend(frames);
            }
            prop_assert_eq!(seen, all);
        }

        #[test]
        fn batches_are_full_and_complete(
            runs in prop::collection::vec((1u64..5, 1u64..40), 0..20),
            most in 1u64..30,
        ) {
            let mut at = 0;
            let mut all = Vec::new();
            for (gap, count) in runs {
                all.push(FrameRun { start: Gfn(at + gap), count });
                at += gap + count;
            }
            let groups: Vec<Vec<FrameRun>> = batches(&all, most).collect();
            let frames =
                |runs: &[FrameRun]| runs.iter().flat_map(|r| r.frames()).collect::<Vec<_>>();
            prop_assert_eq!(frames(&groups.concat()), frames(&all));
            for (n, group) in groups.iter().enumerate() {
                let count = frames(group).len() as u64;
                prop_assert!(count == most || (n + 1 == groups.len() && count < most));
            }
        }
    }

    #[test]
    fn staging_grows_within_its_limits() {
        let limits = StagingLimits { first_bytes: 3 * PAGE_SIZE + 5, most_bytes: 20 * PAGE_SIZE };
        let mut staging = Staging::new(limits);
        assert_eq!(staging.frames(), 3);
        staging.grow_to(2);
        assert_eq!(staging.frames(), 3);
        staging.grow_to(9);
        assert_eq!(staging.frames(), 16);
        staging.grow_to(u64::MAX);
        assert_eq!(staging.frames(), 20);
        assert_eq!(staging.bytes().as_ptr().addr() % PAGE_SIZE as usize, 0, "for direct I/O");
        assert_eq!(Staging::new(StagingLimits { first_bytes: 0, most_bytes: 0 }).frames(), 1);
    }

    #[test]
    fn refused_growth_leaves_room_to_copy() {
        // More than any host can reserve.
        let limits = StagingLimits { first_bytes: 3 * PAGE_SIZE, most_bytes: 1 << 60 };
        let mut staging = Staging::new(limits);
        staging.grow_to(u64::MAX);
        assert_eq!(staging.frames(), 3);
        staging.pages = Vec::new();
        assert!(!staging.reserve(1 << 60));
        assert_eq!(staging.frames(), 1);
    }
}
