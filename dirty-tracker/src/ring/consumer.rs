//! The consumer side of one KVM dirty ring: takes entries in order, turns DIRTY into RESET, and
//! recovers from overruns.
//!
//! The ring has `size` entries, a power of two, in memory shared with the kernel. Three actors work
//! on it:
//!
//! - *Publish*: the kernel writes slot and offset, then stores DIRTY with release ordering.
//! - *Harvest*: the consumer loads DIRTY with acquire ordering, copies slot and offset, and stores
//!   RESET with release ordering.
//! - *Walk*: the kernel's `KVM_RESET_DIRTY_RINGS` visits RESET entries from its own index on,
//!   write-protects their frames and makes the entries clean, up to the first entry that is not
//!   RESET.
//!
//! All of them proceed strictly in ring order, by three free-running indices:
//!
//! ```text
//! walked <= next <= published      walked: the kernel's reset index, which the consumer derives
//!   RESET ^  DIRTY ^  clean        next: the consumer's    published: the kernel's, not readable
//! ```
//!
//! # Overruns (I6)
//! The kernel stops a vCPU while a reserve of entries is left, so `published - walked` does not
//! reach `size`. But the kernel does not refuse a push either: it overwrites the oldest entry,
//! RESET or DIRTY, and continues. This has four consequences:
//!
//! - *Fence*. The consumer never takes the last entry before the ring comes round to `walked`. If
//!   that entry is dirty, the ring was overrun. An entry that stays dirty stops the walk at `next`,
//!   whatever the kernel wrote meanwhile, so `walked` stays known.
//! - *Overwritten marks*. A DIRTY entry between `walked` and `next` replaced a RESET one and stops
//!   the walk. The next harvest marks it again (see `WalkUncertainty`). Its frame is covered by
//!   "all memory".
//! - *Hole*. Entries that were taken one lap early are clean when `next` reaches them, and the
//!   kernel continues beyond them. The walk needs them to be RESET. They are marked once a later
//!   entry is published.
//! - *Laps*. With `published` a lap or more ahead, the kernel regards the ring as full and does not
//!   run the vCPU, so no later entry is ever published. Two `KVM_EXIT_DIRTY_RING_FULL` that began
//!   after the ring was seen empty prove this state. The consumer then steps over a quarter of the
//!   ring. The kernel's soft limit is never below a quarter (a reserve of 64 in at least 256
//!   entries, or of 576 with Intel's PML in at least 1,024), so a step cannot pass `published`,
//!   which would stop the vCPU for good.
//!
//! Source: `virt/kvm/dirty_ring.c` and Documentation/virt/kvm/api.rst, KVM_CAP_DIRTY_LOG_RING.

use super::entry::{ENTRY_DIRTY, ENTRY_RESET, RingEntry, RingFull};
use super::list::{DirtyFrame, DirtyList};
use crate::sync::Ordering;

/// The result of one harvest of one ring.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct RingHarvest {
    /// Number of entries that are RESET and not yet walked by the kernel, including those of
    /// earlier harvests. The next reprotect must report the same number.
    pub(super) entries: u32,
    /// Whether the ring was overrun (I6): entries were overwritten before they were harvested.
    pub(super) overrun: bool,
    /// Whether the list was too small for all published entries. The rest stays in the ring.
    pub(super) list_full: bool,
}

/// Whether the position of the kernel's walk is certain.
///
/// Entries before `next` that are dirty again were either overwritten before the walk, or walked
/// and published anew; in the second case the ring is overrun as well. Nothing is taken until a
/// probe tells the two apart: it marks entries RESET so that a walk that begins among them ends at
/// a known place.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
enum WalkUncertainty {
    #[default]
    None,
    /// The `marked` entries before `next` are RESET; the walk may be somewhere among them.
    Before,
    /// The entry at `next` is RESET; the walk may have passed it.
    At,
}

/// The consumer's position in one ring. It must live as long as the ring, because the kernel does
/// not disclose its own index later.
#[derive(Debug, Default)]
pub(super) struct RingConsumer {
    /// Free-running index of the next entry to take.
    next: u32,
    /// `next - walked`: entries that are RESET and not yet walked by the kernel, at most
    /// `size - 1`.
    marked: u32,
    /// After an overrun: number of entries to take in order before the consumer stops looking for
    /// holes.
    probation: u32,
    uncertainty: WalkUncertainty,
    full: RingFull,
    /// Count of full exits at a moment since which the ring is empty and completely walked.
    quiet_since: Option<u32>,
}

impl RingConsumer {
    /// Returns the handle by which the ring's vCPU reports a full ring. Costs a reference count.
    pub(super) fn full(&self) -> RingFull {
        self.full.clone()
    }

    /// Moves published entries from `ring` to `list`, in order, until an entry is not published or
    /// the list is full. Costs a few loads and one store for each entry. Allocates nothing.
    ///
    /// `ring` must be the entire ring, and the same one in every call; its length is a power of two
    /// of at least 4. For any other slice the call returns `overrun` and does not touch the
    /// entries.
    pub(super) fn harvest(&mut self, ring: &[RingEntry], list: &mut DirtyList) -> RingHarvest {
        let size = match u32::try_from(ring.len()) {
            Ok(size) if size >= 4 && size.is_power_of_two() => size,
            _ => return RingHarvest { overrun: true, ..RingHarvest::default() },
        };
        // The count is read before any entry. Entries that were published before these exits are
        // visible below.
        let exits = self.full.exits();
        let mut overrun = self.locate_walk(ring);
        let mut list_full = false;
        while self.uncertainty == WalkUncertainty::None {
            // The last entry before the walk is the fence: if it is dirty, the ring was overrun.
            if self.marked == size - 1 {
                break;
            }
            let entry = self.entry(ring, 0);
            if !entry.is_dirty() {
                if self.probation > 0 && self.step_over_hole(ring) {
                    continue;
                }
                break;
            }
            list_full = list.is_full();
            if list_full {
                break;
            }
            list.push(DirtyFrame {
                slot: entry.slot.load(Ordering::Relaxed),
                offset: entry.offset.load(Ordering::Relaxed),
            });
            entry.mark_reset();
            self.advance(1);
            self.probation = self.probation.saturating_sub(1);
        }
        overrun |= self.entry(ring, size - 1 - self.marked).is_dirty();
        if self.marked > 0 || list_full || self.uncertainty != WalkUncertainty::None {
            self.quiet_since = None;
        } else if exits.wrapping_sub(*self.quiet_since.get_or_insert(exits)) >= 2 {
            // One exit may have begun before the ring was empty. The exit after it cannot.
            overrun |= self.probation == 0;
            self.probation = size.saturating_mul(2);
            self.step_quarter(ring, size);
            self.quiet_since = None;
        }
        if overrun {
            self.probation = size.saturating_mul(2);
        }
        let entries = if self.uncertainty == WalkUncertainty::At { 1 } else { self.marked };
        RingHarvest { entries, overrun, list_full }
    }

    /// Records that the kernel has walked all marked entries.
    pub(super) fn walked_all(&mut self) {
        if self.marked > 0 && self.uncertainty == WalkUncertainty::None {
            self.marked = 0;
            self.quiet_since = Some(self.full.exits());
        }
    }

    /// Determines from the entries how far the kernel has walked since the last harvest. Costs one
    /// load if it walked all of them. Returns whether the ring was overrun in between.
    fn locate_walk(&mut self, ring: &[RingEntry]) -> bool {
        if self.uncertainty == WalkUncertainty::At {
            let walked = self.entry(ring, 0).flags.load(Ordering::Acquire) == 0;
            if walked {
                self.next = self.next.wrapping_add(1);
                self.marked = 0;
            }
            self.unmark_ahead(ring);
            self.mark_before(ring, ENTRY_RESET);
            self.uncertainty = if walked { WalkUncertainty::None } else { WalkUncertainty::Before };
            return true;
        }
        let flags = |back: u32| self.before(ring, back).flags.load(Ordering::Acquire);
        let left = (1..=self.marked).take_while(|b| flags(*b) & ENTRY_RESET != 0).count() as u32;
        if left < self.marked && flags(left + 1) & ENTRY_DIRTY != 0 {
            // The walk is in order, so it has passed every clean entry.
            self.marked = (1..=self.marked).take_while(|b| flags(*b) != 0).count() as u32;
            self.unmark_ahead(ring);
            self.mark_before(ring, ENTRY_RESET);
            self.uncertainty = WalkUncertainty::Before;
        } else if left < self.marked || self.uncertainty == WalkUncertainty::None {
            self.marked = left;
            if self.uncertainty == WalkUncertainty::Before {
                self.unmark_ahead(ring);
                self.uncertainty = WalkUncertainty::None;
            }
        } else {
            self.mark_before(ring, ENTRY_DIRTY);
            self.entry(ring, 0).mark_reset();
            self.uncertainty = WalkUncertainty::At;
        }
        self.uncertainty != WalkUncertainty::None
    }

    /// Makes entries dirty again that a probe marked after the walk had passed them: they were
    /// published anew.
    fn unmark_ahead(&self, ring: &[RingEntry]) {
        for entry in (0..ring.len() as u32 - self.marked).map(|i| self.entry(ring, i)) {
            if entry.flags.load(Ordering::Acquire) & ENTRY_RESET != 0 {
                entry.flags.store(ENTRY_DIRTY, Ordering::Release);
            }
        }
    }

    fn mark_before(&self, ring: &[RingEntry], flags: u32) {
        for back in 1..=self.marked {
            self.before(ring, back).flags.store(flags, Ordering::Release);
        }
    }

    /// If a later entry is published, marks the clean entries before it RESET and returns true.
    fn step_over_hole(&mut self, ring: &[RingEntry]) -> bool {
        let dirty = |&i: &u32| self.entry(ring, i).is_dirty();
        let Some(mut hole) = (0..ring.len() as u32 - self.marked).find(dirty) else { return false };
        // The kernel publishes in order. An entry that is still clean after a later one was seen
        // dirty is not about to be published.
        while let Some(earlier) = (0..hole).find(dirty) {
            hole = earlier;
        }
        self.mark_clean(ring, hole);
        true
    }

    fn step_quarter(&mut self, ring: &[RingEntry], size: u32) {
        match (0..size).find(|&i| self.entry(ring, i).is_dirty()) {
            None => self.mark_clean(ring, size / 4),
            Some(_) => {
                self.step_over_hole(ring);
            }
        }
    }

    /// Marks up to `count` clean entries RESET. Stops at an entry that the kernel publishes
    /// meanwhile.
    fn mark_clean(&mut self, ring: &[RingEntry], count: u32) {
        let done = (0..count).take_while(|&i| self.entry(ring, i).mark_clean_reset()).count();
        self.advance(done as u32);
    }

    fn advance(&mut self, count: u32) {
        self.next = self.next.wrapping_add(count);
        self.marked += count;
    }

    fn before<'r>(&self, ring: &'r [RingEntry], back: u32) -> &'r RingEntry {
        &ring[self.next.wrapping_sub(back) as usize & (ring.len() - 1)]
    }

    fn entry<'r>(&self, ring: &'r [RingEntry], ahead: u32) -> &'r RingEntry {
        &ring[self.next.wrapping_add(ahead) as usize & (ring.len() - 1)]
    }
}
