//! The allocator of a page file's slots: a bitmap, a few hints for each block of it, and a tree
//! over the hints.
//!
//! ```text
//! tree      largest hint of each half, quarter, ... of the blocks    finds leftmost block for n
//! hints     free slots, first free, longest run, free at both ends   one set for each 4,096 slots
//! bitmap    one bit a slot, set if the slot is used                  the authority
//! ```
//!
//! The design is that of the percpu allocator's bitmap (Dennis Zhou, Linux 4.14, "percpu: replace
//! area map allocator with bitmap"): metadata blocks of hints over a bitmap. An allocation updates
//! the hints; a free updates them only as far as that costs nothing. In this allocator, a hint
//! never exceeds the true value. A block whose hints may be below it is *stale*. All stale blocks
//! are scanned before a request is refused or gets less than it asked for. So an answer is exact,
//! and the cost of freeing does not depend on its order. Unlike in the percpu allocator, a run may
//! cross from one block into the next, the owner of a run remembers its length, and a tree finds
//! blocks, since a page file may have millions of them.

mod bits;
mod block;
mod tree;

use std::fmt;

use bits::Bits;
use block::{BLOCK, Block};
use tree::MaxTree;

/// Longest run that is handed out, in slots.
pub(crate) const MAX_RUN: u32 = BLOCK;

/// A run of consecutive slots.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct SlotRun {
    /// Number of the first slot.
    pub start: u32,
    /// Number of slots.
    pub count: u32,
}

impl SlotRun {
    /// Returns one past the last slot.
    pub const fn end(self) -> u64 {
        self.start as u64 + self.count as u64
    }
}

impl fmt::Display for SlotRun {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "slots {}..{}", self.start, self.end())
    }
}

/// A run cannot be freed or marked. Nothing has changed.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum SlotError {
    /// The run exceeds the file's slots.
    #[error("{run} are not all there: the file has {total} slots")]
    Outside {
        /// The run.
        run: SlotRun,
        /// Number of slots in the file.
        total: u32,
    },
    /// A slot of the run is free already.
    #[error("{run} cannot be freed: slot {slot} is free already")]
    Free {
        /// The run.
        run: SlotRun,
        /// First slot of the run that is free.
        slot: u32,
    },
    /// A slot of the run is used already.
    #[error("{run} cannot be marked as used: slot {slot} is used already")]
    Used {
        /// The run.
        run: SlotRun,
        /// First slot of the run that is used.
        slot: u32,
    },
}

/// The free and the used slots of one file.
///
/// Allocating and freeing take O(log blocks) steps and read a block or two of 512 bytes each. Scans
/// of stale blocks come on top: at most one for each run that was freed or taken. Takes one bit for
/// each slot, and some hundredths of a bit for the hints.
///
/// ```
/// use driftline_store::SlotRun;
/// use driftline_store::testing::Slots;
/// let mut slots = Slots::new(10_000);
/// let run = slots.allocate(64, 1).expect("all are free");
/// assert_eq!(run, SlotRun { start: 0, count: 64 });
/// assert_eq!(slots.allocate(4096, 512), Some(SlotRun { start: 512, count: 4096 }));
/// slots.free(run)?;
/// let error = slots.free(run).unwrap_err().to_string();
/// assert_eq!(error, "slots 0..64 cannot be freed: slot 0 is free already");
/// # Ok::<(), driftline_store::SlotError>(())
/// ```
#[derive(Clone, Debug)]
pub struct Slots {
    bits: Bits,
    blocks: Vec<Block>,
    /// For each block, the longest run that is known to begin in it.
    fits: MaxTree,
    /// Blocks whose hints may be below the true values, each once.
    stale: Vec<u32>,
    free: u64,
    total: u32,
}

impl Slots {
    /// Returns `total` slots, all of them free.
    pub fn new(total: u32) -> Self {
        let mut slots = Self {
            bits: Bits::default(),
            blocks: Vec::new(),
            fits: MaxTree::default(),
            stale: Vec::new(),
            free: 0,
            total: 0,
        };
        slots.grow_to(total);
        slots
    }

    /// Returns the number of slots.
    pub fn total(&self) -> u32 {
        self.total
    }

    /// Returns the number of free slots.
    #[cfg(test)]
    pub(crate) fn free_slots(&self) -> u64 {
        self.free
    }

    /// Returns whether `slot` is used; a slot outside the file counts as used.
    #[cfg(test)]
    pub(crate) fn is_used(&self, slot: u32) -> bool {
        slot >= self.total || self.bits.is_used(slot)
    }

    /// Returns one more than the highest used slot; 0 if none is used. Scans from the end.
    #[cfg(test)]
    pub(crate) fn used_end(&self) -> u32 {
        self.bits.last_used(0, u64::from(self.total)).map_or(0, |slot| slot + 1)
    }

    /// Grows the file to `total` slots, the new ones free. A lower number changes nothing.
    pub fn grow_to(&mut self, total: u32) {
        let old = self.total;
        if total <= old {
            return;
        }
        self.bits.grow(old, total);
        self.blocks.resize_with(total.div_ceil(BLOCK) as usize, Block::default);
        self.fits.grow(self.blocks.len());
        self.total = total;
        self.free += u64::from(total - old);
        for b in old / BLOCK..total.div_ceil(BLOCK) {
            self.refresh(b);
        }
    }

    /// Takes the lowest known run of `count` slots, 1 to [`MAX_RUN`], that begins at a multiple of
    /// `align`, a power of two up to [`MAX_RUN`]. Returns `None` if there is no such run, or if
    /// these numbers are out of bounds.
    pub fn allocate(&mut self, count: u32, align: u32) -> Option<SlotRun> {
        if !(1..=MAX_RUN).contains(&count) || !align.is_power_of_two() || align > MAX_RUN {
            return None;
        }
        let found = match self.find(count, align) {
            None if !self.stale.is_empty() => {
                self.refresh_stale();
                self.find(count, align)
            }
            found => found,
        };
        let run = SlotRun { start: found?, count };
        self.take(run);
        Some(run)
    }

    /// Takes `count` slots, or the longest run if none has that many. Returns `None` if no slot is
    /// free, or `count` is 0.
    pub fn allocate_up_to(&mut self, count: u32) -> Option<SlotRun> {
        let count = count.min(MAX_RUN);
        if let Some(run) = self.allocate(count, 1) {
            return Some(run);
        }
        // No block is stale now, so the hints know the longest run.
        self.allocate(count.min(self.fits.max()), 1)
    }

    /// Marks slots as used, all of which must be free.
    ///
    /// # Errors
    ///
    /// A slot is used already, or does not exist. Nothing has changed then.
    pub fn mark(&mut self, run: SlotRun) -> Result<(), SlotError> {
        self.check(run)?;
        match self.bits.first_used(run.start.into(), run.end()) {
            Some(slot) => Err(SlotError::Used { run, slot }),
            None => {
                self.take(run);
                Ok(())
            }
        }
    }

    /// Frees slots, all of which must be used: a run that was taken, a part of one, or several
    /// adjacent runs.
    ///
    /// # Errors
    ///
    /// A slot is free already, or does not exist. Nothing has changed then.
    pub fn free(&mut self, run: SlotRun) -> Result<(), SlotError> {
        self.check(run)?;
        if let Some(slot) = self.bits.first_free(run.start.into(), run.end()) {
            return Err(SlotError::Free { run, slot });
        }
        self.bits.clear(run.start.into(), run.end());
        self.free += u64::from(run.count);
        for (b, from, to) in in_blocks(run) {
            let whole = self.slots_of(b);
            let Some(block) = self.blocks.get_mut(b as usize) else { continue };
            block.note_freed(from, to, whole);
            if !block.stale && !block.is_all_free(whole) {
                block.stale = true;
                self.stale.push(b);
            }
            self.set_fit(b);
        }
        Ok(())
    }

    fn check(&self, run: SlotRun) -> Result<(), SlotError> {
        if run.end() > u64::from(self.total) {
            return Err(SlotError::Outside { run, total: self.total });
        }
        Ok(())
    }

    /// Returns a free run, the leftmost one that the hints know.
    fn find(&self, count: u32, align: u32) -> Option<u32> {
        // A run of this length contains an aligned one, wherever it begins.
        let surely = count + align - 1;
        if let Some(b) = self.fits.first_at_least(surely, 0) {
            // The hint avoids a search through many gaps that are too short.
            let known = self.blocks.get(b as usize).filter(|_| align > 1);
            if let Some(at) = known.and_then(|block| block.longest_of(surely)) {
                return Some((b * BLOCK + at).next_multiple_of(align));
            }
            // If the run continues in the next block, its aligned part may begin there.
            let found = self.find_in(b, count, align);
            if let Some(start) = found.or_else(|| self.find_in(b + 1, count, align)) {
                return Some(start);
            }
        }
        if align == 1 {
            return None;
        }
        let mut from = 0;
        while let Some(b) = self.fits.first_at_least(count, from) {
            if let Some(start) = self.find_in(b, count, align) {
                return Some(start);
            }
            from = b + 1;
        }
        None
    }

    fn find_in(&self, b: u32, count: u32, align: u32) -> Option<u32> {
        let first = self.blocks.get(b as usize)?.first_free;
        let from = u64::from(b) * u64::from(BLOCK) + u64::from(first);
        let to = (u64::from(b) + 1) * u64::from(BLOCK);
        self.bits.find_run(from, to.min(self.total.into()), self.total.into(), count, align)
    }

    /// Marks free slots as used, and updates the hints.
    fn take(&mut self, run: SlotRun) {
        self.bits.set(run.start.into(), run.end());
        self.free -= u64::from(run.count);
        for (b, from, to) in in_blocks(run) {
            let whole = self.slots_of(b);
            let Some(block) = self.blocks.get_mut(b as usize) else { continue };
            let exact = block.note_taken(from, to, whole);
            if !exact && !block.stale {
                block.stale = true;
                self.stale.push(b);
            }
            self.set_fit(b);
        }
    }

    /// Returns the number of slots of block `b`: the last block may have fewer than the others.
    fn slots_of(&self, b: u32) -> u32 {
        (self.total - b * BLOCK).min(BLOCK)
    }

    /// Scans a block and makes its hints exact.
    fn refresh(&mut self, b: u32) {
        let whole = self.slots_of(b);
        let from = u64::from(b) * u64::from(BLOCK);
        if let Some(block) = self.blocks.get_mut(b as usize) {
            *block = Block::of(&self.bits, from, whole);
        }
        self.set_fit(b);
    }

    fn refresh_stale(&mut self) {
        let mut stale = std::mem::take(&mut self.stale);
        stale.iter().for_each(|&b| self.refresh(b));
        stale.clear();
        self.stale = stale;
    }

    /// Updates the tree with the longest runs that begin in block `b` and in the one before it.
    fn set_fit(&mut self, b: u32) {
        let b = b as usize;
        let prefix = |b: usize| self.blocks.get(b).map_or(0, |block| block.prefix);
        let fit = |b: usize| {
            let block = self.blocks.get(b)?;
            // No run crosses into the next block if the last slot of this one is used.
            let across = if block.suffix > 0 { block.suffix + prefix(b + 1) } else { 0 };
            Some(block.longest.max(block.prefix).max(across))
        };
        let (here, before) = (fit(b), b.checked_sub(1).and_then(fit));
        if let Some(fit) = here {
            self.fits.set(b, fit);
        }
        if let (Some(fit), true) = (before, b > 0) {
            self.fits.set(b - 1, fit);
        }
    }
}

/// Returns the parts of a run in each block: the block, and the part's first slot and end in it.
fn in_blocks(run: SlotRun) -> impl Iterator<Item = (u32, u32, u32)> {
    let (start, end) = (u64::from(run.start), run.end());
    let block = u64::from(BLOCK);
    (start / block..end.div_ceil(block)).map(move |b| {
        let from = start.max(b * block) - b * block;
        let to = end.min((b + 1) * block) - b * block;
        (b as u32, from as u32, to as u32)
    })
}

#[cfg(test)]
mod tests;
