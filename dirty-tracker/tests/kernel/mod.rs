//! A simulated kernel with the rules of `virt/kvm/dirty_ring.c`: which entries it publishes, when
//! it stops a vCPU, how its reset walks, and how it overwrites a ring past its end.
//!
//! Its guest memory is one generation number for each frame. A write to a protected frame is
//! published. A write to any other frame is silent, so that a lost entry becomes a lost change.

use std::cell::{Cell, RefCell};
use std::sync::atomic::Ordering;

use driftline_dirty_tracker::ring::{ENTRY_DIRTY, ENTRY_RESET, RingEntry, RingFull};

/// One vCPU's ring from the kernel's side.
pub struct KernelRing {
    pub entries: Vec<RingEntry>,
    pub published: Cell<u32>,
    pub walked: Cell<u32>,
    soft_limit: u32,
    /// Whether there was a full exit that has not been reported to the VMM.
    pub unreported: Cell<bool>,
}

impl KernelRing {
    pub fn new(size: usize, reserve: usize, start: u32) -> Self {
        Self {
            entries: (0..size).map(|_| RingEntry::default()).collect(),
            published: Cell::new(start),
            walked: Cell::new(start),
            soft_limit: (size - reserve) as u32,
            unreported: Cell::new(false),
        }
    }

    fn at(&self, index: u32) -> &RingEntry {
        &self.entries[index as usize & (self.entries.len() - 1)]
    }

    pub fn used(&self) -> u32 {
        self.published.get().wrapping_sub(self.walked.get())
    }

    pub fn is_soft_full(&self) -> bool {
        self.used() >= self.soft_limit
    }

    /// Publishes an entry even if the ring is full: the kernel only warns.
    pub fn push(&self, slot: u32, offset: u64) {
        let entry = self.at(self.published.get());
        entry.slot.store(slot, Ordering::Relaxed);
        entry.offset.store(offset, Ordering::Relaxed);
        entry.flags.store(ENTRY_DIRTY, Ordering::Release);
        self.published.set(self.published.get().wrapping_add(1));
    }

    /// Walks RESET entries, at most `limit` (a signal), and calls `protect` for each frame. After a
    /// signal the last counted frame is not protected.
    pub fn reset(&self, limit: u32, protect: &mut dyn FnMut(u32, u64)) -> u32 {
        let mut count = 0;
        loop {
            let entry = self.at(self.walked.get());
            if count == limit || entry.flags.load(Ordering::Acquire) & ENTRY_RESET == 0 {
                return count;
            }
            let (slot, offset) =
                (entry.slot.load(Ordering::Relaxed), entry.offset.load(Ordering::Relaxed));
            entry.flags.store(0, Ordering::Release);
            self.walked.set(self.walked.get().wrapping_add(1));
            assert!(self.used() <= u32::MAX / 2, "the walk passed the published entries");
            count += 1;
            if count < limit {
                protect(slot, offset);
            }
        }
    }
}

/// The kernel's side of a guest: its rings, its memory, and which frames can be written without a
/// fault.
pub struct Kernel {
    pub rings: Vec<KernelRing>,
    pub memory: RefCell<Vec<u64>>,
    writable: RefCell<Vec<bool>>,
    clock: Cell<u64>,
}

impl Kernel {
    /// Creates a guest with `vcpus` rings of `size` entries and a reserve of `reserve`, all memory
    /// protected.
    pub fn new(vcpus: usize, size: usize, reserve: usize, frames: usize) -> Self {
        Self {
            rings: (0..vcpus).map(|_| KernelRing::new(size, reserve, 0)).collect(),
            memory: RefCell::new(vec![0; frames]),
            writable: RefCell::new(vec![false; frames]),
            clock: Cell::new(0),
        }
    }

    /// KVM_RUN: the vCPU writes `frames` until its ring reaches the soft limit. An emulated batch
    /// checks the limit only at its start. Returns the number of frames written; 0 is an exit
    /// because of the full ring.
    pub fn run(&self, vcpu: usize, frames: &[u64], emulated: bool, full: &RingFull) -> usize {
        let ring = &self.rings[vcpu];
        if ring.unreported.take() {
            full.report();
        }
        if ring.is_soft_full() {
            ring.unreported.set(true);
            return 0;
        }
        for (i, &frame) in frames.iter().enumerate() {
            if i > 0 && !emulated && ring.is_soft_full() {
                return i;
            }
            self.clock.set(self.clock.get() + 1);
            self.memory.borrow_mut()[frame as usize] = self.clock.get();
            let was_writable =
                std::mem::replace(&mut self.writable.borrow_mut()[frame as usize], true);
            if !was_writable {
                ring.push(0, frame);
            }
        }
        frames.len()
    }

    /// Reports a full exit to the VMM, if there is an unreported one.
    pub fn report(&self, vcpu: usize, full: &RingFull) {
        if self.rings[vcpu].unreported.take() {
            full.report();
        }
    }

    /// KVM_RESET_DIRTY_RINGS, stopped by a signal after `limit` entries.
    pub fn reset_dirty_rings(&self, limit: u32) -> u32 {
        let mut writable = self.writable.borrow_mut();
        let mut count = 0;
        for ring in &self.rings {
            count += ring.reset(limit - count, &mut |_, offset| writable[offset as usize] = false);
        }
        count
    }

    /// Clears the logging flag of every slot and sets it again.
    pub fn protect_all(&self) {
        self.writable.borrow_mut().fill(false);
    }
}
