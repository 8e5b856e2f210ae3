//! The consumer side of one KVM dirty ring: entries in order, DIRTY -> RESET, overruns survived.
//!
//! *Ring*: `size` entries in memory shared with the kernel, `size` a power of two. *Publish*: the
//! kernel writes slot and offset, then DIRTY with a release store. *Harvest*: we read DIRTY with
//! acquire, copy slot and offset, and store RESET with release. *Walk*: the kernel's
//! `KVM_RESET_DIRTY_RINGS` goes over RESET entries from its own index, write-protects their frames
//! and makes the entries clean, up to the first that is not RESET. All go strictly in ring order,
//! by three free-running indices:
//!
//! ```text
//! walked <= next <= published      walked: the kernel's reset index, known to us exactly
//!   RESET ^  DIRTY ^  clean        next: ours          published: the kernel's, never shown
//! ```
//!
//! # Overruns (I6)
//! The kernel stops a vCPU while a reserve is left, so `published - walked` never reaches `size`;
//! but it does not refuse a push either: it overwrites the oldest entry, RESET or DIRTY, and goes
//! on. What follows from that:
//!
//! - *Fence*. We never take the last entry before the ring's end comes round to `walked`. If it is
//!   dirty, the ring was overrun. Left in place it stops the walk at `next` whatever the kernel
//!   wrote meanwhile, so `walked` stays known.
//! - *Overwritten marks*. A DIRTY entry between `walked` and `next` replaced a RESET one and stops
//!   the walk. It is marked again at the next harvest, its frame covered by "all memory" (`Doubt`).
//! - *Hole*. Entries taken one lap early are clean when `next` reaches them, and the kernel goes on
//!   beyond them. The walk needs them RESET: once a later entry is published, they are marked.
//! - *Laps*. With `published` a lap or more ahead the kernel holds the ring full and runs the vCPU
//!   no more, so no later entry ever comes. Two `KVM_EXIT_DIRTY_RING_FULL` that began after the
//!   ring was seen empty prove it; then a quarter of the ring is stepped over. The kernel's soft
//!   limit is never below that (a reserve of 64 in at least 256 entries, of 576 with Intel's PML in
//!   at least 1,024), so a step cannot pass `published`, which would stop the vCPU for good.
//!
//! Source: `virt/kvm/dirty_ring.c` and Documentation/virt/kvm/api.rst, KVM_CAP_DIRTY_LOG_RING.

use crate::list::{DirtyFrame, DirtyList};
use crate::sync::{Arc, AtomicU32, AtomicU64, Ordering};

/// The kernel has published this entry.
pub const ENTRY_DIRTY: u32 = 1 << 0;
/// User space has taken this entry; the kernel may reprotect its frame and reuse it.
pub const ENTRY_RESET: u32 = 1 << 1;

/// `struct kvm_dirty_gfn`, as shared with the kernel: 16 bytes. The mapping of a vCPU's ring
/// (`KVM_DIRTY_LOG_PAGE_OFFSET` pages into its file) is a slice of these.
#[repr(C)]
#[derive(Debug, Default)]
pub struct RingEntry {
    /// 0, [`ENTRY_DIRTY`] or [`ENTRY_RESET`].
    pub flags: AtomicU32,
    /// Address space (high 16 bits) and slot (low 16 bits).
    pub slot: AtomicU32,
    /// The frame's offset in its slot, in frames.
    pub offset: AtomicU64,
}

impl RingEntry {
    // Pairs with the kernel's release store that publishes slot and offset.
    fn is_dirty(&self) -> bool {
        self.flags.load(Ordering::Acquire) & ENTRY_DIRTY != 0
    }

    // Pairs with the kernel's acquire load in the walk.
    fn mark_reset(&self) {
        self.flags.store(ENTRY_RESET, Ordering::Release);
    }

    /// Clean -> RESET, unless the kernel publishes here at this moment.
    fn mark_clean_reset(&self) -> bool {
        let (new, old) = (ENTRY_RESET, 0);
        self.flags.compare_exchange(old, new, Ordering::AcqRel, Ordering::Acquire).is_ok()
    }
}

/// How often a vCPU found its ring full: the vCPU thread reports, the consumer reads. Cloning gives
/// another handle to the same count. Example at
/// [`Harvester::ring_full`](crate::Harvester::ring_full).
#[derive(Debug, Clone, Default)]
pub struct RingFull(Arc<AtomicU32>);

impl RingFull {
    /// States that one more `KVM_RUN` of this vCPU returned `KVM_EXIT_DIRTY_RING_FULL`. To be
    /// called once for each, before the vCPU's next `KVM_RUN`; when the collector gets to it does
    /// not matter. One atomic add.
    pub fn report(&self) {
        self.0.fetch_add(1, Ordering::Release);
    }

    fn exits(&self) -> u32 {
        self.0.load(Ordering::Acquire)
    }
}

/// What one harvest of one ring found.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct RingHarvest {
    /// Entries marked RESET that the kernel has not walked yet, earlier harvests included: the next
    /// reprotect must report as many.
    pub entries: u32,
    /// The ring was overrun (I6): entries were overwritten before anyone saw them.
    pub overrun: bool,
    /// The list had no room for all that was published; the rest waits in the ring.
    pub list_full: bool,
}

/// Whether we know where the kernel's walk is.
///
/// Entries before `next` that are dirty again were either overwritten before the walk, or walked
/// and published anew, and then the ring is overrun as well. Nothing is taken until a probe shows
/// which: entries are marked RESET so that a walk that begins among them ends at a known place.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
enum Doubt {
    #[default]
    None,
    /// The `marked` entries before `next` are RESET, in case the walk is somewhere among them.
    Before,
    /// The entry at `next` is RESET, in case the walk is already there.
    At,
}

/// Our place in one ring. There is one for the life of the ring: its index cannot be asked for
/// later. A [`Harvester`](crate::Harvester) has one for each vCPU; alone it is for a VMM with lists
/// of its own.
///
/// ```
/// # use std::sync::atomic::Ordering::{Acquire, Release};
/// use driftline_dirty_tracker::{DirtyList, ENTRY_DIRTY, ENTRY_RESET, RingConsumer, RingEntry, RingHarvest};
///
/// let ring: Vec<RingEntry> = (0..8).map(|_| RingEntry::default()).collect(); // mapped, in real life
/// let (mut consumer, mut list) = (RingConsumer::new(), DirtyList::with_capacity(ring.len()));
/// ring[0].flags.store(ENTRY_DIRTY, Release); // the kernel: frame 0 of slot 0 was written
/// let taken = consumer.harvest(&ring, &mut list);
/// assert_eq!(taken, RingHarvest { entries: 1, overrun: false, list_full: false });
/// assert_eq!((list.len(), ring[0].flags.load(Acquire)), (1, ENTRY_RESET));
/// consumer.full().report(); // the vCPU's thread has its own handle
/// ```
#[derive(Debug, Default)]
pub struct RingConsumer {
    /// Free-running index of the next entry to take.
    next: u32,
    /// `next - walked`: entries marked RESET and not walked by the kernel, at most `size - 1`.
    marked: u32,
    /// After an overrun: entries still to be taken in order before no hole is looked for any more.
    probation: u32,
    doubt: Doubt,
    full: RingFull,
    /// The full exits counted at some moment since which the ring is empty and wholly walked.
    quiet_since: Option<u32>,
}

impl RingConsumer {
    /// A consumer of a ring that nobody has harvested yet.
    pub fn new() -> Self {
        Self::default()
    }

    /// Where the ring's vCPU reports that it found the ring full. A reference count.
    pub fn full(&self) -> RingFull {
        self.full.clone()
    }

    /// Moves published entries from `ring` to `list`, in order, until one is not published or the
    /// list is full. Costs a few loads and one store an entry; allocates nothing.
    ///
    /// `ring` must be the whole ring, and the same one at every call; its length is a power of two
    /// from 4 on. Anything else is answered with `overrun` and not touched.
    pub fn harvest(&mut self, ring: &[RingEntry], list: &mut DirtyList) -> RingHarvest {
        let size = match u32::try_from(ring.len()) {
            Ok(size) if size >= 4 && size.is_power_of_two() => size,
            _ => return RingHarvest { overrun: true, ..RingHarvest::default() },
        };
        // Before any entry is looked at: what these exits saw published is visible below.
        let exits = self.full.exits();
        let mut overrun = self.settle(ring);
        let mut list_full = false;
        while self.doubt == Doubt::None {
            // The last entry before the walk is the fence: dirty, it says that the ring was
            // overrun.
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
        if self.marked > 0 || list_full || self.doubt != Doubt::None {
            self.quiet_since = None;
        } else if exits.wrapping_sub(*self.quiet_since.get_or_insert(exits)) >= 2 {
            // One exit may have begun before the ring was empty; the one after it has not.
            overrun |= self.probation == 0;
            self.probation = size.saturating_mul(2);
            self.step_quarter(ring, size);
            self.quiet_since = None;
        }
        if overrun {
            self.probation = size.saturating_mul(2);
        }
        let entries = if self.doubt == Doubt::At { 1 } else { self.marked };
        RingHarvest { entries, overrun, list_full }
    }

    /// The kernel has walked all that was marked.
    pub(crate) fn walked_all(&mut self) {
        if self.marked > 0 && self.doubt == Doubt::None {
            self.marked = 0;
            self.quiet_since = Some(self.full.exits());
        }
    }

    /// Finds out from the entries how far the kernel has walked since the last harvest, which costs
    /// one load if it walked all. Says whether the ring was overrun in between.
    fn settle(&mut self, ring: &[RingEntry]) -> bool {
        if self.doubt == Doubt::At {
            let walked = self.entry(ring, 0).flags.load(Ordering::Acquire) == 0;
            if walked {
                self.next = self.next.wrapping_add(1);
                self.marked = 0;
            }
            self.unmark_ahead(ring);
            self.mark_before(ring, ENTRY_RESET);
            self.doubt = if walked { Doubt::None } else { Doubt::Before };
            return true;
        }
        let flags = |back: u32| self.before(ring, back).flags.load(Ordering::Acquire);
        let left = (1..=self.marked).take_while(|b| flags(*b) & ENTRY_RESET != 0).count() as u32;
        if left < self.marked && flags(left + 1) & ENTRY_DIRTY != 0 {
            // The walk is in order: it has passed every clean entry.
            self.marked = (1..=self.marked).take_while(|b| flags(*b) != 0).count() as u32;
            self.unmark_ahead(ring);
            self.mark_before(ring, ENTRY_RESET);
            self.doubt = Doubt::Before;
        } else if left < self.marked || self.doubt == Doubt::None {
            self.marked = left;
            if self.doubt == Doubt::Before {
                self.unmark_ahead(ring);
                self.doubt = Doubt::None;
            }
        } else {
            self.mark_before(ring, ENTRY_DIRTY);
            self.entry(ring, 0).mark_reset();
            self.doubt = Doubt::At;
        }
        self.doubt != Doubt::None
    }

    /// What a probe marked and the walk had already passed was published anew: dirty again.
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

    /// If a later entry is published, marks the clean ones before it RESET and says so.
    fn step_over_hole(&mut self, ring: &[RingEntry]) -> bool {
        let dirty = |&i: &u32| self.entry(ring, i).is_dirty();
        let Some(mut hole) = (0..ring.len() as u32 - self.marked).find(dirty) else { return false };
        // The kernel publishes in order: an entry that is still clean after a later one was seen
        // dirty is no entry about to be published.
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

    /// Marks up to `count` clean entries RESET, up to one that the kernel publishes meanwhile.
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
