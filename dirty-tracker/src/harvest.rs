//! Harvest -> reprotect -> insert, with types that make any other order impossible (I2, I3).

use crate::list::DirtyList;
use crate::ring::{RingConsumer, RingEntry};
use crate::{SlotId, Tracker};

/// The consumer sides of all rings of a VM, and each vCPU's dirty list.
#[derive(Debug)]
pub struct Harvester {
    vcpus: Vec<(RingConsumer, DirtyList)>,
}

impl Harvester {
    /// For `vcpus` rings of `ring_entries` entries each; allocates everything it will ever use.
    pub fn new(vcpus: usize, ring_entries: usize) -> Self {
        let one = || (RingConsumer::new(), DirtyList::with_capacity(ring_entries));
        Self { vcpus: (0..vcpus).map(|_| one()).collect() }
    }

    /// Takes every published entry of every ring. `rings` are all rings, in vCPU order.
    ///
    /// Frames of an earlier harvest whose reprotect failed are still in the lists and are part of
    /// what this returns.
    pub fn harvest<'r>(&mut self, rings: impl IntoIterator<Item = &'r [RingEntry]>) -> Harvest<'_> {
        let (mut entries, mut overruns) = (0, 0);
        for ((consumer, list), ring) in self.vcpus.iter_mut().zip(rings) {
            let taken = consumer.harvest(ring, list);
            entries += taken.entries;
            overruns += u32::from(taken.overrun);
        }
        Harvest { lists: self, entries, overruns }
    }
}

/// Entries taken from the rings and not yet reprotected: shows no frames (I3). Dropping it keeps
/// the frames for the next harvest (I4).
#[derive(Debug)]
#[must_use = "harvested frames are written again unnoticed until they are reprotected"]
pub struct Harvest<'h> {
    lists: &'h mut Harvester,
    entries: u32,
    overruns: u32,
}

impl<'h> Harvest<'h> {
    /// Entries newly marked RESET; what the kernel must report to have reprotected.
    pub fn entries(&self) -> u32 {
        self.entries
    }

    /// Rings that were found overrun (I6).
    pub fn overruns(&self) -> u32 {
        self.overruns
    }

    /// States that the kernel has reprotected `count` entries. A count that differs from the
    /// harvest, like an overrun, means that tracking cannot be trusted for this epoch: the result
    /// then marks all memory (I6).
    pub fn reprotected(self, count: u32) -> Readable<'h> {
        let trusted = self.overruns == 0 && count == self.entries;
        Readable { lists: self.lists, overruns: self.overruns, trusted }
    }
}

/// Reprotected frames: their content may be read, so they may enter the trees.
#[derive(Debug)]
#[must_use = "these frames are lost to nobody only once they are in the trees"]
pub struct Readable<'h> {
    lists: &'h mut Harvester,
    overruns: u32,
    trusted: bool,
}

/// What an insert into the trees did.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Absorbed {
    /// Frames handed to the trees.
    pub frames: u64,
    /// Frames that lie in no slot of the layout: counted and never followed.
    pub foreign: u64,
    /// All memory was marked because the rings could not be trusted (I6).
    pub marked_all: bool,
}

impl Readable<'_> {
    /// Whether ring overruns or a miscounted reprotect make the frames an incomplete answer. The
    /// caller must then reprotect *all* memory before [`absorb`](Self::absorb): frames whose
    /// entries were overwritten are still writable.
    pub fn is_trusted(&self) -> bool {
        self.trusted
    }

    /// Rings that were found overrun.
    pub fn overruns(&self) -> u32 {
        self.overruns
    }

    /// Inserts the frames into every subscriber's tree and empties the lists (I2).
    pub fn absorb(self, tracker: &Tracker) -> Absorbed {
        let mut out = Absorbed::default();
        for (_, list) in &mut self.lists.vcpus {
            for frame in list.frames() {
                // The high half is KVM's address space number; the guest's memory is the same in all.
                match tracker.mark_offset(SlotId(frame.slot & 0xffff), frame.offset) {
                    Ok(()) => out.frames += 1,
                    Err(_) => out.foreign += 1,
                }
            }
            list.clear();
        }
        if !self.trusted {
            tracker.mark_all();
            out.marked_all = true;
        }
        out
    }
}
