//! Rivals of [`FrameSet`]: sets of ranges that insert in two passes, and one of another crate.
//!
//! `Memblock` is Linux's `memblock_add_range()` (mm/memblock.c), region by region, without flags
//! and NUMA nodes, so that a region has 16 bytes like a `FrameRun`:
//! - a pass over the regions counts the pieces of the new range that none of them covers;
//! - the array doubles until they fit;
//! - a second pass, from the first region on, inserts each piece at its position and moves the
//!   regions after it up by one;
//! - a pass over the regions joins neighbours and moves the regions after them down by one each
//!   time.
//!
//! `SHORTCUT` adds two later changes of the kernel: no count where twice the regions and one would
//! fit ("memblock: avoid some repeat when add new range"), and joining only where a piece was
//! inserted ("memblock: Avoid useless checks in memblock_merge_regions()"). `SEARCH` adds a change
//! that the kernel does not have: both passes begin at the first region that the range reaches,
//! found by binary search. This is the best case of two passes; only the second pass itself remains
//! to be saved.

use driftline_dirty_tracker::{FrameRun, FrameSet};
use rangemap::RangeSet;

/// A set that takes a list of ranges.
pub trait Ranges: Clone {
    /// Creates the set with the ranges of `set`.
    fn of(set: &FrameSet) -> Self;
    /// Adds all ranges of `list`.
    fn add_all(&mut self, list: &[FrameRun]);
    /// Returns its ranges, as (first, past the last).
    fn contents(&self) -> Vec<(u64, u64)>;
}

/// [`FrameSet::insert_all`].
#[derive(Clone)]
pub struct InsertAll(FrameSet);

impl Ranges for InsertAll {
    fn of(set: &FrameSet) -> Self {
        Self(set.clone())
    }

    fn add_all(&mut self, list: &[FrameRun]) {
        self.0.insert_all(list);
    }

    fn contents(&self) -> Vec<(u64, u64)> {
        self.0.iter().map(|r| (r.start.0, r.end().0)).collect()
    }
}

/// [`FrameSet::insert`] for each range.
#[derive(Clone)]
pub struct InsertEach(FrameSet);

impl Ranges for InsertEach {
    fn of(set: &FrameSet) -> Self {
        Self(set.clone())
    }

    fn add_all(&mut self, list: &[FrameRun]) {
        list.iter().for_each(|run| {
            self.0.insert(*run);
        });
    }

    fn contents(&self) -> Vec<(u64, u64)> {
        self.0.iter().map(|r| (r.start.0, r.end().0)).collect()
    }
}

#[derive(Clone, Copy)]
struct MemblockRegion {
    base: u64,
    size: u64,
}

impl MemblockRegion {
    const fn end(self) -> u64 {
        self.base + self.size
    }
}

/// The kernel's set; see the module.
pub struct Memblock<const SHORTCUT: bool, const SEARCH: bool> {
    /// Its capacity is exactly `max`.
    regions: Vec<MemblockRegion>,
    max: usize,
}

impl<const SHORTCUT: bool, const SEARCH: bool> Clone for Memblock<SHORTCUT, SEARCH> {
    fn clone(&self) -> Self {
        let mut regions = Vec::with_capacity(self.max);
        regions.extend_from_slice(&self.regions);
        Self { regions, max: self.max }
    }
}

impl<const SHORTCUT: bool, const SEARCH: bool> Memblock<SHORTCUT, SEARCH> {
    fn add(&mut self, run: FrameRun) {
        let (start, end) = (run.start.0, run.end().0);
        if start == end {
            return;
        }
        if self.regions.is_empty() {
            self.regions.push(MemblockRegion { base: start, size: end - start });
            return;
        }
        let from = if SEARCH { self.regions.partition_point(|r| r.end() <= start) } else { 0 };
        if !(SHORTCUT && self.regions.len() * 2 < self.max) {
            let needed = self.count(from, start, end);
            if needed == 0 {
                return;
            }
            while self.regions.len() + needed > self.max {
                self.double();
            }
        }
        if let Some((first, past)) = self.insert(from, start, end) {
            if SHORTCUT { self.merge(first, past) } else { self.merge(0, self.regions.len()) }
        }
    }

    fn count(&self, from: usize, mut base: u64, end: u64) -> usize {
        let mut needed = 0;
        for r in &self.regions[from..] {
            if r.base >= end {
                break;
            }
            if r.end() <= base {
                continue;
            }
            needed += usize::from(r.base > base);
            base = r.end().min(end);
        }
        needed + usize::from(base < end)
    }

    fn double(&mut self) {
        self.max *= 2;
        self.regions.reserve_exact(self.max - self.regions.len());
    }

    /// Returns the range of new regions: the first, and one past the last.
    fn insert(&mut self, from: usize, mut base: u64, end: u64) -> Option<(usize, usize)> {
        let (mut at, mut new) = (from, None);
        while let Some(r) = self.regions.get(at).copied() {
            if r.base >= end {
                break;
            }
            if r.end() > base {
                if r.base > base {
                    self.regions.insert(at, MemblockRegion { base, size: r.base - base });
                    new = Some((new.map_or(at, |(first, _)| first), at + 1));
                    at += 1;
                }
                base = r.end().min(end);
            }
            at += 1;
        }
        if base < end {
            self.regions.insert(at, MemblockRegion { base, size: end - base });
            new = Some((new.map_or(at, |(first, _)| first), at + 1));
        }
        new
    }

    /// Joins neighbours from the region before `first` to the one at `past`.
    fn merge(&mut self, first: usize, mut past: usize) {
        let mut at = first.saturating_sub(1);
        past = past.min(self.regions.len() - 1);
        while at < past {
            if self.regions[at].end() == self.regions[at + 1].base {
                self.regions[at].size += self.regions[at + 1].size;
                self.regions.remove(at + 1);
                past -= 1;
            } else {
                at += 1;
            }
        }
    }
}

impl<const SHORTCUT: bool, const SEARCH: bool> Ranges for Memblock<SHORTCUT, SEARCH> {
    fn of(set: &FrameSet) -> Self {
        // The kernel's array begins with 128 regions.
        let max = set.len().next_power_of_two().max(128);
        let mut regions = Vec::with_capacity(max);
        regions.extend(set.iter().map(|r| MemblockRegion { base: r.start.0, size: r.count }));
        Self { regions, max }
    }

    fn add_all(&mut self, list: &[FrameRun]) {
        list.iter().for_each(|run| self.add(*run));
    }

    fn contents(&self) -> Vec<(u64, u64)> {
        self.regions.iter().map(|r| (r.base, r.end())).collect()
    }
}

/// A B-tree of ranges.
impl Ranges for RangeSet<u64> {
    fn of(set: &FrameSet) -> Self {
        set.iter().map(|r| r.start.0..r.end().0).collect()
    }

    fn add_all(&mut self, list: &[FrameRun]) {
        list.iter().for_each(|run| self.insert(run.start.0..run.end().0));
    }

    fn contents(&self) -> Vec<(u64, u64)> {
        self.iter().map(|r| (r.start, r.end)).collect()
    }
}
