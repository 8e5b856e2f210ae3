//! Hints of a block: what is known of it without reading its bits.

use crate::alloc::bits::Bits;

/// Slots in a block: 16 MiB of a page file, 512 bytes of bitmap.
pub(super) const BLOCK: u32 = 4096;
/// Position of a longest run whose place is unknown; no run can be adjacent to it.
const SOMEWHERE: u32 = 2 * BLOCK;

/// Hints, in slots from the block's start. `free` is exact, and no slot before `first_free` is
/// free. The runs are at least as long as the hints say, and exactly that long unless the block is
/// stale.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Block {
    pub(super) free: u32,
    pub(super) first_free: u32,
    /// Length of the longest run inside the block, and its start.
    pub(super) longest: u32,
    pub(super) longest_at: u32,
    /// Number of free slots at the block's start, and at its end.
    pub(super) prefix: u32,
    pub(super) suffix: u32,
    /// Whether the block is on the list of stale blocks, whose runs may be longer than the hints
    /// say.
    pub(super) stale: bool,
}

impl Block {
    /// Scans the `whole` slots from `from` on.
    pub(super) fn of(bits: &Bits, from: u64, whole: u32) -> Self {
        let mut block = Self { first_free: whole, ..Self::default() };
        let mut run = 0;
        let end_run = |block: &mut Self, run: &mut u32, end: u32| {
            if *run == end {
                block.prefix = end;
            }
            if *run > block.longest {
                (block.longest, block.longest_at) = (*run, end - *run);
            }
            *run = 0;
        };
        for w in 0..whole.div_ceil(64) {
            let slots = (whole - w * 64).min(64);
            let valid = u64::MAX >> (64 - slots);
            let free = !bits.word(from / 64 + u64::from(w)) & valid;
            block.free += free.count_ones();
            if free != 0 && block.first_free == whole {
                block.first_free = w * 64 + free.trailing_zeros();
            }
            if free == valid {
                run += slots;
                continue;
            }
            run += free.trailing_ones();
            end_run(&mut block, &mut run, w * 64 + free.trailing_ones());
            // Slots that are free at the word's end continue in the next word.
            run = (free << (64 - slots)).leading_ones();
            // The runs inside matter only if one could be longer than the longest so far.
            if free.count_ones() > block.longest {
                block.inside(free, w * 64);
            }
        }
        if run == whole {
            block.prefix = whole;
        }
        block.suffix = run;
        if run > block.longest {
            (block.longest, block.longest_at) = (run, whole - run);
        }
        block
    }

    /// Notes the longest run of a word at `at`, if it is longer than the longest so far.
    fn inside(&mut self, mut free: u64, at: u32) {
        while free != 0 {
            let start = free.trailing_zeros();
            let run = (free >> start).trailing_ones();
            if run > self.longest {
                (self.longest, self.longest_at) = (run, at + start);
            }
            // The run has at least one slot, so the shift is below 64.
            free &= !((u64::MAX >> (64 - run)) << start);
            if free.count_ones() <= self.longest {
                return;
            }
        }
    }

    /// Returns the start of the longest run, if it has `count` slots and its start is known.
    pub(super) fn longest_of(&self, count: u32) -> Option<u32> {
        (self.longest >= count && self.longest_at != SOMEWHERE).then_some(self.longest_at)
    }

    pub(super) fn is_all_free(&self, whole: u32) -> bool {
        self.free == whole
    }

    /// Notes that `from..to` has become free, without looking for the runs that it joins.
    pub(super) fn note_freed(&mut self, from: u32, to: u32, whole: u32) {
        let count = to - from;
        self.free += count;
        if self.is_all_free(whole) {
            let stale = self.stale;
            *self = Self {
                free: whole,
                longest: whole,
                prefix: whole,
                suffix: whole,
                ..Self::default()
            };
            self.stale = stale;
            return;
        }
        self.first_free = self.first_free.min(from);
        // The one run that it is known to join: the longest, if that is adjacent.
        let (mut start, mut run) = (from, count);
        if self.longest > 0 && self.longest_at + self.longest == from {
            (start, run) = (self.longest_at, run + self.longest);
        } else if self.longest > 0 && self.longest_at == to {
            run += self.longest;
        }
        if run > self.longest {
            (self.longest, self.longest_at) = (run, start);
        }
        if from <= self.prefix {
            self.prefix = self.prefix.max(to);
        }
        if to >= whole - self.suffix {
            self.suffix = self.suffix.max(whole - from);
        }
    }

    /// Notes that `from..to`, which was free, is taken. Returns whether the hints are still exact
    /// if they were exact before.
    pub(super) fn note_taken(&mut self, from: u32, to: u32, whole: u32) -> bool {
        self.free -= to - from;
        if self.first_free == from {
            self.first_free = to;
        }
        self.prefix = self.prefix.min(from);
        self.suffix = self.suffix.min(whole - to);
        if self.longest_at == SOMEWHERE {
            self.longest = self.free.min(1);
            return false;
        }
        let end = self.longest_at + self.longest;
        if to <= self.longest_at || from >= end {
            return true;
        }
        // The longer part of the rest.
        let (before, after) = (from.saturating_sub(self.longest_at), end.saturating_sub(to));
        if before >= after {
            self.longest = before;
        } else {
            (self.longest, self.longest_at) = (after, to);
        }
        if self.longest == 0 && self.free > 0 {
            (self.longest, self.longest_at) = (1, SOMEWHERE);
            return false;
        }
        // All other runs together are no longer than that.
        self.free - self.longest <= self.longest
    }
}
