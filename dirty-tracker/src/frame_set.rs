//! A set of frames as runs: ascending, disjoint, and never touching.
//!
//! For sets of few runs with many frames: a guest's memory map, frames that are still to be fetched
//! or sent, frames that have arrived. The frames that vCPUs write are scattered and belong in a
//! [`Tree`](crate::Tree), which many threads can mark and whose cost does not depend on how the
//! frames are distributed.
//!
//! [`FrameSet::insert_all`] inserts in one pass: it grows only where room ends, and continues from
//! there. This was proposed on linux-mm for `memblock_add_range()` ("delayed allocation",
//! <https://mail.spinics.net/lists/linux-mm/msg422526.html>). The kernel makes two passes: the
//! first counts what an insertion needs, then the array grows, and the second pass inserts. The
//! proposal inserts one range at a time, splits it where it overlaps existing ranges, and joins the
//! parts afterwards. Here an entire list is inserted, and joined as it is written. `cargo bench -p
//! driftline-dirty-tracker -- frameset` measures both.

use std::fmt;
use std::iter::Copied;
use std::ops::Range;
use std::slice::Iter;

use crate::{FrameRun, Gfn};

/// A set of frames as ascending, disjoint runs with at least one frame between them.
///
/// Two sets of the same frames have the same runs, so they are equal. [`FrameRun::end`] defines
/// where a run ends: a run that would pass frame 2^64 - 1 ends there. An empty run contains no
/// frame.
///
/// Let *n* be the number of runs in the set. A look-up takes O(log *n*) steps. Inserting or
/// removing a run takes the same, and one move of the runs after it. A run takes 16 bytes.
///
/// ```
/// use driftline_dirty_tracker::{FrameRun, FrameSet, Gfn};
///
/// let run = |start, count| FrameRun { start: Gfn(start), count };
/// let mut missing: FrameSet = [run(0, 160), run(256, 1024)].into_iter().collect();
/// assert_eq!(missing.remove(run(100, 200)), 60 + 44); // some of it is not in the set
/// assert_eq!(missing.insert(run(90, 20)), 10);
/// assert_eq!(missing.to_string(), "gfn 0x0..0x6e, gfn 0x12c..0x500");
/// assert!(missing.contains(Gfn(109)) && !missing.contains(Gfn(110)));
/// assert_eq!(missing.gaps(run(0, 512)).collect::<Vec<_>>(), [run(110, 190)]);
/// assert_eq!(missing.take_first(64), Some(run(0, 64)));
/// assert_eq!((missing.len(), missing.frames()), (2, 46 + 980));
/// ```
#[derive(Clone, Default)]
pub struct FrameSet {
    /// The set is `runs[taken..]`. Runs taken from the front are removed later, many at a time, so
    /// that taking a run does not move the rest.
    runs: Vec<FrameRun>,
    taken: usize,
    frames: u64,
}

/// Returns the frame after a run of the set. It cannot overflow: such runs are cut before they are
/// stored.
const fn end(run: FrameRun) -> u64 {
    run.start.0 + run.count
}

const fn between(start: u64, end: u64) -> FrameRun {
    FrameRun { start: Gfn(start), count: end - start }
}

/// Returns how many of the ascending `runs` end before `frame` with a gap of at least one frame:
/// they neither overlap nor touch a run that starts there. Costs O(log of the result), because it
/// probes at doubling distances.
fn leading(runs: &[FrameRun], frame: u64) -> usize {
    let (mut low, mut step) = (0, 1);
    while runs.get(low + step - 1).is_some_and(|r| end(*r) < frame) {
        low += step;
        step *= 2;
    }
    let high = (low + step - 1).min(runs.len());
    low + runs[low..high].partition_point(|r| end(*r) < frame)
}

impl FrameSet {
    /// Creates an empty set. Allocates nothing.
    pub const fn new() -> Self {
        Self { runs: Vec::new(), taken: 0, frames: 0 }
    }

    /// Creates an empty set with room for `runs` runs: 16 bytes each, allocated now.
    pub fn with_capacity(runs: usize) -> Self {
        Self { runs: Vec::with_capacity(runs), ..Self::new() }
    }

    /// Returns the number of runs. O(1).
    pub fn len(&self) -> usize {
        self.as_slice().len()
    }

    /// Returns the number of frames. O(1).
    pub const fn frames(&self) -> u64 {
        self.frames
    }

    /// Returns whether the set is empty. O(1).
    pub const fn is_empty(&self) -> bool {
        self.frames == 0
    }

    /// Removes all frames and keeps the allocation. O(1).
    pub fn clear(&mut self) {
        self.runs.clear();
        (self.taken, self.frames) = (0, 0);
    }

    /// Returns the runs, ascending. O(1).
    ///
    /// ```
    /// # use driftline_dirty_tracker::{FrameRun, FrameSet, Gfn};
    /// let run = |start, count| FrameRun { start: Gfn(start), count };
    /// let mut set = FrameSet::with_capacity(2);
    /// set.extend([run(8, 8), run(0, 4), run(4, 1)]);
    /// assert_eq!(set.as_slice(), [run(0, 5), run(8, 8)]);
    /// assert!(set.iter().eq(&set) && set.first() == Some(run(0, 5)));
    /// set.clear();
    /// assert!(set.is_empty() && set == FrameSet::new());
    /// ```
    pub fn as_slice(&self) -> &[FrameRun] {
        &self.runs[self.taken..]
    }

    /// Iterates over the runs of [`as_slice`](Self::as_slice), ascending.
    pub fn iter(&self) -> Copied<Iter<'_, FrameRun>> {
        self.as_slice().iter().copied()
    }

    /// Returns the lowest run; `None` if the set is empty. O(1).
    pub fn first(&self) -> Option<FrameRun> {
        self.as_slice().first().copied()
    }

    /// Returns whether `gfn` is in the set. O(log *n*), like all queries.
    pub fn contains(&self, gfn: Gfn) -> bool {
        self.after(gfn.0).next().is_some_and(|r| r.start <= gfn)
    }

    /// Returns whether every frame of `run` is in the set; true for an empty run.
    ///
    /// ```
    /// # use driftline_dirty_tracker::{FrameRun, FrameSet, Gfn};
    /// let run = |start, count| FrameRun { start: Gfn(start), count };
    /// let set = FrameSet::from_iter([run(10, 10)]);
    /// assert!(set.contains_run(run(12, 8)) && !set.contains_run(run(12, 9)));
    /// assert!(set.intersects(run(19, 100)) && !set.intersects(run(20, 100)));
    /// assert_eq!(set.within(run(0, 15)).collect::<Vec<_>>(), [run(10, 5)]);
    /// ```
    pub fn contains_run(&self, run: FrameRun) -> bool {
        let inside = |r: FrameRun| r.start <= run.start && run.end().0 <= end(r);
        run.start == run.end() || self.after(run.start.0).next().is_some_and(inside)
    }

    /// Returns whether any frame of `run` is in the set.
    pub fn intersects(&self, run: FrameRun) -> bool {
        self.within(run).next().is_some()
    }

    /// Returns the frames of `run` that are in the set, as ascending runs: the intersection.
    pub fn within(&self, run: FrameRun) -> impl Iterator<Item = FrameRun> {
        let (low, high) = (run.start.0, run.end().0);
        self.after(low)
            .take_while(move |r| r.start.0 < high)
            .map(move |r| between(r.start.0.max(low), end(r).min(high)))
            .filter(|r| r.count > 0)
    }

    /// Returns the frames of `run` that are not in the set, as ascending runs: the complement
    /// within `run`.
    ///
    /// ```
    /// # use driftline_dirty_tracker::{FrameRun, FrameSet, Gfn};
    /// let run = |start, count| FrameRun { start: Gfn(start), count };
    /// let arrived: FrameSet = [run(4, 2), run(8, 1)].into_iter().collect();
    /// let missing: Vec<_> = arrived.gaps(run(5, 10)).collect();
    /// assert_eq!(missing, [run(6, 2), run(9, 6)]);
    /// ```
    pub fn gaps(&self, run: FrameRun) -> impl Iterator<Item = FrameRun> {
        let (mut at, high) = (run.start.0, run.end().0);
        let mut present = self.within(run);
        std::iter::from_fn(move || {
            while at < high {
                let next = present.next().unwrap_or(between(high, high));
                let gap = between(at, next.start.0);
                at = end(next);
                if gap.count > 0 {
                    return Some(gap);
                }
            }
            None
        })
    }

    /// Adds the frames of `run`. Returns how many of them were not in the set.
    ///
    /// Finds the position, joins runs that overlap or touch, and moves the later runs once if the
    /// number of runs changed. A run after all others costs O(1).
    pub fn insert(&mut self, run: FrameRun) -> u64 {
        let (mut low, mut high) = (run.start.0, run.end().0);
        if low == high {
            return 0;
        }
        let at = match self.runs[self.taken..].last() {
            Some(last) if end(*last) >= low => {
                self.taken + self.as_slice().partition_point(|r| end(*r) < low)
            }
            _ => self.runs.len(),
        };
        let (mut past, mut present) = (at, 0);
        while let Some(r) = self.runs.get(past).filter(|r| r.start.0 <= high) {
            (low, high) = (low.min(r.start.0), high.max(end(*r)));
            present += r.count;
            past += 1;
        }
        let added = high - low - present;
        if added > 0 {
            self.replace(at..past, &[between(low, high)]);
        }
        self.frames += added;
        added
    }

    /// Adds the frames of all `runs`, which may overlap. Returns how many were not in the set.
    ///
    /// Passes once over the list and the part of the set that it reaches. Runs are joined in place.
    /// Where there is no room for another run, the rest of the set is moved once, by as much as the
    /// rest of the list may need, and the pass continues from there. A list that does not ascend by
    /// first frame is copied and sorted first.
    ///
    /// ```
    /// # use driftline_dirty_tracker::{FrameRun, FrameSet, Gfn};
    /// let run = |start, count| FrameRun { start: Gfn(start), count };
    /// let mut set: FrameSet = [run(0, 10), run(20, 10), run(40, 10)].into_iter().collect();
    /// assert_eq!(set.insert_all(&[run(5, 10), run(30, 10), run(60, 1)]), 5 + 10 + 1);
    /// assert_eq!(set.as_slice(), [run(0, 15), run(20, 30), run(60, 1)]);
    /// ```
    pub fn insert_all(&mut self, runs: &[FrameRun]) -> u64 {
        let before = self.frames;
        if runs.is_sorted_by_key(|r| r.start) {
            self.merge(runs.iter().copied());
        } else if let Some(order) = short_order(runs) {
            self.merge(order.iter().map(|key| runs[(key & PLACES) as usize]));
        } else {
            let mut sorted = runs.to_vec();
            sorted.sort_unstable_by_key(|r| r.start);
            self.merge(sorted.into_iter());
        }
        self.frames - before
    }

    /// Adds the runs of `left`, ascending by start. Runs before `write` are final. Runs from `read`
    /// on have not been looked at. Between the two is room.
    fn merge(&mut self, mut left: impl ExactSizeIterator<Item = FrameRun>) {
        let (mut write, mut read) = (self.taken, self.taken);
        // A local variable, not behind `self`: a tenth fewer instructions.
        let mut runs = std::mem::take(&mut self.runs);
        let mut next = left.next();
        while let Some(run) = next {
            next = left.next();
            let (mut low, mut high) = (run.start.0, run.end().0);
            if low == high {
                continue;
            }
            let before = leading(&runs[read..], low);
            if write < read {
                runs.copy_within(read..read + before, write);
            }
            (write, read) = (write + before, read + before);
            let mut present = 0;
            loop {
                if let Some(r) = runs.get(read).filter(|r| r.start.0 <= high) {
                    (low, high) = (low.min(r.start.0), high.max(end(*r)));
                    present += r.count;
                    read += 1;
                } else if let Some(r) = next.filter(|r| r.start.0 <= high) {
                    high = high.max(r.end().0);
                    next = left.next();
                } else {
                    break;
                }
            }
            self.frames += high - low - present;
            if write == read {
                // There is no room. Each run of the rest of the list needs at most one place, so
                // this happens once.
                let (old, more) = (runs.len(), 1 + usize::from(next.is_some()) + left.len());
                runs.resize(old + more, between(0, 0));
                runs.copy_within(read..old, read + more);
                read += more;
            }
            runs[write] = between(low, high);
            write += 1;
        }
        runs.drain(write..read);
        self.runs = runs;
    }

    /// Removes the frames of `run`. Returns how many of them were in the set.
    ///
    /// Takes one pass, and one move of the later runs if the number of runs changed.
    pub fn remove(&mut self, run: FrameRun) -> u64 {
        let (low, high) = (run.start.0, run.end().0);
        if low == high {
            return 0;
        }
        let at = self.runs.len() - self.after(low).len();
        let overlapping = self.runs[at..].iter().take_while(|r| r.start.0 < high);
        let (past, present) = overlapping.fold((at, 0), |(n, sum), r| (n + 1, sum + r.count));
        let (Some(first), Some(last)) = (self.runs[at..past].first(), self.runs[at..past].last())
        else {
            return 0;
        };
        let head = between(first.start.0, low.max(first.start.0));
        let tail = between(high.min(end(*last)), end(*last));
        let removed = present - head.count - tail.count;
        match (head.count > 0, tail.count > 0) {
            (true, true) => self.replace(at..past, &[head, tail]),
            (true, false) => self.replace(at..past, &[head]),
            (false, true) => self.replace(at..past, &[tail]),
            (false, false) => self.replace(at..past, &[]),
        }
        self.frames -= removed;
        removed
    }

    /// Removes and returns the lowest run, but at most `max` frames of it; `None` if the set is
    /// empty. A `max` of 0 counts as 1. O(1) amortized over taking all runs.
    ///
    /// ```
    /// # use driftline_dirty_tracker::{FrameRun, FrameSet, Gfn};
    /// let mut to_send = FrameSet::from_iter([FrameRun { start: Gfn(0), count: 300 }]);
    /// let mut messages = Vec::new();
    /// while let Some(run) = to_send.take_first(128) {
    ///     messages.push(run.count);
    /// }
    /// assert_eq!(messages, [128, 128, 44]);
    /// ```
    pub fn take_first(&mut self, max: u64) -> Option<FrameRun> {
        let first = self.runs.get_mut(self.taken)?;
        let run = FrameRun { start: first.start, count: first.count.min(max.max(1)) };
        *first = between(end(run), end(*first));
        self.frames -= run.count;
        if first.count == 0 {
            self.taken += 1;
            // Fewer runs are moved than were taken before, so a run costs O(1) amortized.
            if self.taken > self.runs.len() / 2 {
                self.runs.drain(..self.taken);
                self.taken = 0;
            }
        }
        Some(run)
    }

    /// Returns the runs that end after `frame`.
    fn after(&self, frame: u64) -> Copied<Iter<'_, FrameRun>> {
        let runs = self.as_slice();
        runs[runs.partition_point(|r| end(*r) <= frame)..].iter().copied()
    }

    /// Replaces the runs at `old` by `new`, which may be longer by at most one run.
    fn replace(&mut self, old: Range<usize>, new: &[FrameRun]) {
        let common = old.len().min(new.len());
        let at = old.start + common;
        self.runs[old.start..at].copy_from_slice(&new[..common]);
        match new.get(common) {
            Some(run) => self.runs.insert(at, *run),
            None => drop(self.runs.drain(at..old.end)),
        }
    }
}

/// Mask of the low bits of a key, which hold a position in the list.
const PLACES: u64 = (1 << 12) - 1;

/// Returns the order of a short list by first frame, as keys whose low bits are positions in the
/// list: single words are sorted in half the time of runs. `None` if the list is long or its frames
/// are too high.
fn short_order(runs: &[FrameRun]) -> Option<Vec<u64>> {
    let far = u64::MAX >> PLACES.count_ones();
    if runs.len() as u64 > PLACES + 1 || runs.iter().any(|r| r.start.0 > far) {
        return None;
    }
    let keys = runs.iter().zip(0..).map(|(run, place)| run.start.0 << PLACES.count_ones() | place);
    let mut keys: Vec<u64> = keys.collect();
    keys.sort_unstable();
    Some(keys)
}

impl PartialEq for FrameSet {
    fn eq(&self, other: &Self) -> bool {
        self.as_slice() == other.as_slice()
    }
}

impl Eq for FrameSet {}

impl Extend<FrameRun> for FrameSet {
    /// Collects the runs, then inserts them with [`insert_all`](Self::insert_all).
    fn extend<I: IntoIterator<Item = FrameRun>>(&mut self, runs: I) {
        self.insert_all(&Vec::from_iter(runs));
    }
}

impl FromIterator<FrameRun> for FrameSet {
    fn from_iter<I: IntoIterator<Item = FrameRun>>(runs: I) -> Self {
        let mut set = Self::new();
        set.extend(runs);
        set
    }
}

impl<'s> IntoIterator for &'s FrameSet {
    type Item = FrameRun;
    type IntoIter = Copied<Iter<'s, FrameRun>>;

    fn into_iter(self) -> Self::IntoIter {
        self.iter()
    }
}

impl fmt::Display for FrameSet {
    /// Writes all runs, separated by commas.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (i, run) in self.iter().enumerate() {
            let comma = if i == 0 { "" } else { ", " };
            write!(f, "{comma}{run}")?;
        }
        Ok(())
    }
}

impl fmt::Debug for FrameSet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{{{self}}}")
    }
}
