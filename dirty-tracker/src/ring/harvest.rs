//! The order harvest, reprotect, insert. The types make any other order impossible (I2, I3).

use super::consumer::RingConsumer;
use super::entry::{RingEntry, RingFull};
use super::list::{DirtyFrame, DirtyList};
use super::parts::SlotParts;
use crate::{SlotId, Tracker};

/// The consumer sides of all rings of a guest, and the dirty list of each vCPU. A harvester must
/// live as long as the rings, because the kernel does not disclose its position in a ring that is
/// in use.
///
/// ```
/// # use driftline_dirty_tracker::{*, ring::*};
/// # use std::sync::atomic::Ordering;
/// # let slot = Slot { id: SlotId(0), base: Gfn(0), frames: 64 };
/// # let tracker = std::sync::Arc::new(Tracker::new(Layout::new([slot])?));
/// # let subscription = tracker.subscribe("doc")?;
/// # let rings = vec![(0..8).map(|_| RingEntry::default()).collect::<Vec<_>>()];
/// # rings[0][0].offset.store(5, Ordering::Relaxed);
/// # rings[0][0].flags.store(ENTRY_DIRTY, Ordering::Release);
/// # let reset_dirty_rings = || Ok::<u32, std::io::Error>(1);
/// # let stop_and_start_logging_of_every_slot = || Ok::<(), std::io::Error>(());
/// let mut harvester = Harvester::new(rings.len(), 8);
/// let harvest = harvester.harvest(rings.iter().map(|r| r.as_slice()));
/// assert_eq!((harvest.entries(), harvest.overruns()), (1, 0));
/// let count = reset_dirty_rings()?; // KVM_RESET_DIRTY_RINGS
/// let mut readable = harvest.reprotected(count);
/// assert_eq!(readable.overruns(), 0);
/// if !readable.is_trusted() {
///     stop_and_start_logging_of_every_slot()?; // KVM_SET_USER_MEMORY_REGION, twice
///     readable = readable.all_reprotected();
/// }
/// let inserted = readable.insert_into(&tracker);
/// assert_eq!(inserted, Inserted { frames: 1, foreign: 0, marked_all: false });
/// assert!(subscription.contains(Gfn(5)));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct Harvester {
    vcpus: Vec<(RingConsumer, DirtyList)>,
    /// Frames per vCPU, see [`dirtied`](Self::dirtied).
    dirtied: Vec<u64>,
    /// Entries per vCPU, see [`harvested`](Self::harvested).
    harvested: Vec<u64>,
    /// Whether entries were lost, or may have been, and all memory has not been reprotected since
    /// (I6).
    distrust: bool,
    /// The parts in which slots are registered with KVM; `None` if each is a KVM slot.
    parts: Option<SlotParts>,
}

impl Harvester {
    /// Creates a harvester for `vcpus` rings of `ring_entries` entries each. This is its only
    /// allocation.
    pub fn new(vcpus: usize, ring_entries: usize) -> Self {
        let one = || (RingConsumer::default(), DirtyList::with_capacity(ring_entries));
        let vcpus: Vec<_> = (0..vcpus).map(|_| one()).collect();
        let none = vec![0; vcpus.len()];
        Self { dirtied: none.clone(), harvested: none, vcpus, distrust: false, parts: None }
    }

    /// Expects ring entries of the KVM slots of `parts`. Call it before the first harvest.
    pub fn with_parts(mut self, parts: SlotParts) -> Self {
        self.parts = Some(parts);
        self
    }

    /// Returns the number of frames that each vCPU has made dirty so far, in the order of the
    /// rings: the frames of its ring that a subscriber did not have marked when they were
    /// [inserted](Readable::insert_into). A frame that two vCPUs write counts for the first one. A
    /// frame that is drained and written again counts again. For a single subscriber the numbers
    /// add up to the frames that it drains, apart from marks by other sources. O(1).
    ///
    /// ```
    /// # use driftline_dirty_tracker::{*, ring::*};
    /// # use std::sync::atomic::Ordering;
    /// # let slot = Slot { id: SlotId(0), base: Gfn(0), frames: 64 };
    /// # let tracker = std::sync::Arc::new(Tracker::new(Layout::new([slot])?));
    /// # let ring = |_| (0..8).map(|_| RingEntry::default()).collect();
    /// # let rings: [Vec<RingEntry>; 2] = std::array::from_fn(ring);
    /// # let mut harvester = Harvester::new(rings.len(), 8);
    /// # let wrote = |vcpu: usize, entry: usize, frame| {
    /// #     rings[vcpu][entry].offset.store(frame, Ordering::Relaxed);
    /// #     rings[vcpu][entry].flags.store(ENTRY_DIRTY, Ordering::Release);
    /// # };
    /// # let collect = |harvester: &mut Harvester| {
    /// #     let harvest = harvester.harvest(rings.iter().map(|r| r.as_slice()));
    /// #     let count = harvest.entries();
    /// #     rings.iter().flatten().for_each(|e| e.flags.store(0, Ordering::Release));
    /// #     harvest.reprotected(count).insert_into(&tracker)
    /// # };
    /// let mut subscription = tracker.subscribe("doc")?;
    /// wrote(0, 0, 5);
    /// wrote(0, 1, 6);
    /// wrote(1, 0, 5); // vCPU 0 wrote it first
    /// assert_eq!(collect(&mut harvester).frames, 3);
    /// assert_eq!(harvester.dirtied(), [2, 0]);
    /// wrote(0, 2, 6); // dirty already
    /// collect(&mut harvester);
    /// assert_eq!((harvester.dirtied(), subscription.drain().frames()), (&[2, 0][..], 2));
    /// // That dirty set was dropped, so it was given back.
    /// assert!(subscription.contains(Gfn(5)) && subscription.contains(Gfn(6)));
    ///
    /// let passive = tracker.subscribe("live view")?;
    /// wrote(0, 3, 5);
    /// collect(&mut harvester);
    /// assert_eq!(harvester.dirtied(), [3, 0]); // new to the passive subscriber
    /// passive.set_passive();
    /// wrote(0, 4, 6);
    /// collect(&mut harvester);
    /// assert_eq!((harvester.dirtied(), passive.contains(Gfn(6))), (&[3, 0][..], true));
    /// wrote(0, 5, 7);
    /// collect(&mut harvester);
    /// assert_eq!((harvester.dirtied(), passive.contains(Gfn(7))), (&[4, 0][..], true));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn dirtied(&self) -> &[u64] {
        &self.dirtied
    }

    /// Returns the number of entries in each ring at the last harvest, in the order of the rings:
    /// those that it took, and those of earlier harvests that are not reprotected yet. O(1).
    ///
    /// ```
    /// # use driftline_dirty_tracker::{*, ring::*};
    /// # use std::sync::atomic::Ordering;
    /// # let ring: Vec<_> = (0..8).map(|_| RingEntry::default()).collect();
    /// # let mut harvester = Harvester::new(1, 8);
    /// ring[0].flags.store(ENTRY_DIRTY, Ordering::Release);
    /// let _ = harvester.harvest([&ring[..]]).reprotected(1);
    /// assert_eq!(harvester.harvested(), [1]);
    /// let _ = harvester.harvest([&ring[..]]).reprotected(0);
    /// assert_eq!(harvester.harvested(), [0]);
    /// ```
    pub fn harvested(&self) -> &[u64] {
        &self.harvested
    }

    /// Returns the handle by which vCPU number `vcpu` (in the order of the rings) reports a full
    /// ring; `None` if there is no such vCPU. Without these reports a ring that is overrun by more
    /// than its length stops its vCPU for good.
    ///
    /// ```
    /// let harvester = driftline_dirty_tracker::ring::Harvester::new(2, 1024);
    /// let full = harvester.ring_full(1).expect("there is a vCPU 1");
    /// std::thread::spawn(move || full.report()); // after KVM_EXIT_DIRTY_RING_FULL
    /// assert!(harvester.ring_full(2).is_none());
    /// ```
    pub fn ring_full(&self, vcpu: usize) -> Option<RingFull> {
        self.vcpus.get(vcpu).map(|(consumer, _)| consumer.full())
    }

    /// Takes every published entry of every ring. `rings` must be all rings, in vCPU order. If
    /// there are more or fewer rings than vCPUs, the harvest is not trusted.
    ///
    /// Frames of an earlier harvest that was dropped are still in the lists and belong to the
    /// result. Costs a few loads and one store for each entry. Allocates nothing.
    pub fn harvest<'r>(&mut self, rings: impl IntoIterator<Item = &'r [RingEntry]>) -> Harvest<'_> {
        let (mut entries, mut overruns) = (0u32, 0);
        let mut rings = rings.into_iter();
        self.harvested.fill(0);
        for ((consumer, list), harvested) in self.vcpus.iter_mut().zip(&mut self.harvested) {
            let Some(ring) = rings.next() else {
                self.distrust = true;
                break;
            };
            let taken = consumer.harvest(ring, list);
            entries = entries.saturating_add(taken.entries);
            *harvested = taken.entries.into();
            overruns += u32::from(taken.overrun);
            // Entries that did not fit stay in their ring, so this harvest alone is incomplete.
            self.distrust |= taken.overrun || taken.list_full;
        }
        self.distrust |= rings.next().is_some();
        Harvest { harvester: self, entries, overruns }
    }
}

/// Entries taken from the rings and not yet reprotected. It shows no frames (I3). Dropping it keeps
/// the frames and the overruns for the next harvest (I4). Example at [`Harvester`].
#[derive(Debug)]
#[must_use = "until they are reprotected, harvested frames can be written unnoticed"]
pub struct Harvest<'h> {
    harvester: &'h mut Harvester,
    entries: u32,
    overruns: u32,
}

impl<'h> Harvest<'h> {
    /// Returns the number of entries that are RESET and not yet walked; the kernel must report the
    /// same number when it has reprotected them. Entries of earlier harvests whose reprotect failed
    /// or stopped early are included. O(1).
    pub fn entries(&self) -> u32 {
        self.entries
    }

    /// Returns the number of rings that this harvest found overrun (I6). O(1).
    pub fn overruns(&self) -> u32 {
        self.overruns
    }

    /// Declares that the kernel has reprotected `count` entries, the result of
    /// `KVM_RESET_DIRTY_RINGS`. If `count` differs from [`entries`](Self::entries), or if a ring
    /// was overrun, tracking cannot be trusted and the result marks all memory (I6).
    ///
    /// Call the ioctl on a thread that blocks signals. A kernel that stops early for a signal
    /// (Linux 6.16 and later) has not protected the last frames that it counted. If the signal came
    /// after the last entry, the count does not show it.
    pub fn reprotected(self, count: u32) -> Readable<'h> {
        if count == self.entries {
            self.harvester.vcpus.iter_mut().for_each(|(consumer, _)| consumer.walked_all());
        } else {
            self.harvester.distrust = true;
        }
        Readable { harvester: self.harvester, overruns: self.overruns, all_reprotected: false }
    }
}

/// Reprotected frames. Their content may be read, so they may enter the trees. Dropping it keeps
/// them for the next harvest (I4). Example at [`Harvester`].
#[derive(Debug)]
#[must_use = "insert the frames, or no subscriber sees them"]
pub struct Readable<'h> {
    harvester: &'h mut Harvester,
    overruns: u32,
    all_reprotected: bool,
}

/// The result of an insert into the trees.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Inserted {
    /// Number of frames inserted; a frame counts as often as it was harvested.
    pub frames: u64,
    /// Number of frames that lie in no slot of the layout. They are counted and not tracked.
    pub foreign: u64,
    /// Whether all memory was marked because the rings could not be trusted (I6).
    pub marked_all: bool,
}

impl Readable<'_> {
    /// Returns whether the frames are complete. They are not after a ring overrun or a miscounted
    /// reprotect, in this harvest or in an earlier one that was dropped. The caller must then
    /// reprotect *all* memory and declare it with [`all_reprotected`](Self::all_reprotected):
    /// frames whose entries were overwritten are still writable.
    pub fn is_trusted(&self) -> bool {
        !self.harvester.distrust
    }

    /// Declares that every frame of every slot has been reprotected since the harvest, by clearing
    /// `KVM_MEM_LOG_DIRTY_PAGES` in every slot and setting it again. Tracking is exact again from
    /// here.
    pub fn all_reprotected(mut self) -> Self {
        self.all_reprotected = true;
        self
    }

    /// Returns the number of rings that were found overrun, see [`Harvest::overruns`].
    pub fn overruns(&self) -> u32 {
        self.overruns
    }

    /// Calls `visit` for each frame, for callers that store frames elsewhere than in a tracker's
    /// trees. `visit` returns whether the frame lies in a slot. If the result has `marked_all`, the
    /// caller must treat all memory as dirty. [`Harvester::dirtied`] counts none of these frames.
    /// Costs one call of `visit` for each frame.
    ///
    /// ```
    /// # use driftline_dirty_tracker::{*, ring::*};
    /// # use std::sync::atomic::Ordering;
    /// # let ring: Vec<_> = (0..8).map(|_| RingEntry::default()).collect();
    /// # ring[0].offset.store(5, Ordering::Relaxed);
    /// # ring[0].flags.store(ENTRY_DIRTY, Ordering::Release);
    /// # let mut harvester = Harvester::new(1, 8);
    /// let mut bitmap = [0u64; 1];
    /// let harvest = harvester.harvest([&ring[..]]);
    /// let count = harvest.entries(); // KVM_RESET_DIRTY_RINGS
    /// let delivered = harvest.reprotected(count).for_each(|slot, offset| {
    ///     bitmap[0] |= 1 << offset;
    ///     slot == SlotId(0)
    /// });
    /// assert_eq!((delivered.frames, delivered.marked_all, bitmap), (1, false, [1 << 5]));
    /// ```
    pub fn for_each(self, mut visit: impl FnMut(SlotId, u64) -> bool) -> Inserted {
        let mut out = Inserted::default();
        let parts = self.harvester.parts;
        for (_, list) in &mut self.harvester.vcpus {
            for frame in list.frames() {
                let (slot, offset) = place(*frame, parts);
                match visit(slot, offset) {
                    true => out.frames += 1,
                    false => out.foreign += 1,
                }
            }
            list.clear();
        }
        if self.harvester.distrust {
            out.marked_all = true;
            self.harvester.distrust = !self.all_reprotected;
        }
        out
    }

    /// Inserts the frames into every subscriber's tree and empties the lists (I2). If the frames
    /// are not trusted, this and every later insert marks all memory, until one is
    /// [`all_reprotected`](Self::all_reprotected).
    ///
    /// Costs one lock for all frames, and one insert in each tree for consecutive frames of one
    /// word. Updates [`Harvester::dirtied`].
    pub fn insert_into(self, tracker: &Tracker) -> Inserted {
        let mut out = Inserted::default();
        let mut marking = tracker.marking();
        let parts = self.harvester.parts;
        for ((_, list), dirtied) in self.harvester.vcpus.iter_mut().zip(&mut self.harvester.dirtied)
        {
            for frame in list.frames() {
                let (slot, offset) = place(*frame, parts);
                match marking.mark_offset(slot, offset) {
                    Ok(()) => out.frames += 1,
                    Err(_) => out.foreign += 1,
                }
            }
            list.clear();
            *dirtied += marking.take_new();
        }
        drop(marking);
        if self.harvester.distrust {
            tracker.mark_all();
            out.marked_all = true;
            self.harvester.distrust = !self.all_reprotected;
        }
        out
    }
}

/// Returns the slot and the offset of `frame` in the layout.
fn place(frame: DirtyFrame, parts: Option<SlotParts>) -> (SlotId, u64) {
    let (slot, offset) = (frame.slot_id(), frame.offset);
    parts.map_or((slot, offset), |parts| parts.locate(slot, offset))
}
