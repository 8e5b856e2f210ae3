//! A simulated kernel with the rules of `virt/kvm/dirty_ring.c`: what it publishes, when it stops a
//! vCPU, how its reset walks, and what becomes of a ring that is written past its end.
//!
//! Its guest memory is one generation number a frame; a write to a protected frame is published,
//! a write to any other is silent, which is what makes a lost entry a lost change.

use std::cell::{Cell, RefCell};
use std::sync::atomic::Ordering;

use driftline_dirty_tracker::{ENTRY_DIRTY, ENTRY_RESET, RingEntry, RingFull};

/// One vCPU's ring, seen from the kernel.
pub struct KernelRing {
    pub entries: Vec<RingEntry>,
    pub published: Cell<u32>,
    pub walked: Cell<u32>,
    soft_limit: u32,
    /// A full exit of which the VMM has not yet been told.
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

    /// Publishes an entry, full or not: the kernel only warns.
    pub fn push(&self, slot: u32, offset: u64) {
        let entry = self.at(self.published.get());
        entry.slot.store(slot, Ordering::Relaxed);
        entry.offset.store(offset, Ordering::Relaxed);
        entry.flags.store(ENTRY_DIRTY, Ordering::Release);
        self.published.set(self.published.get().wrapping_add(1));
    }

    /// Walks RESET entries, at most `limit` (a signal); `protect` is called for each frame. A
    /// signal forgets the frame that it was about to protect.
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
            assert!(self.used() <= u32::MAX / 2, "the walk went past what was published");
            count += 1;
            if count < limit {
                protect(slot, offset);
            }
        }
    }
}

/// A VM: its rings, its memory and which frames are written without a fault.
pub struct Kernel {
    pub rings: Vec<KernelRing>,
    pub memory: RefCell<Vec<u64>>,
    writable: RefCell<Vec<bool>>,
    clock: Cell<u64>,
}

impl Kernel {
    /// `vcpus` rings of `size` entries with `reserve` kept back, all memory protected.
    pub fn new(vcpus: usize, size: usize, reserve: usize, frames: usize) -> Self {
        Self {
            rings: (0..vcpus).map(|_| KernelRing::new(size, reserve, 0)).collect(),
            memory: RefCell::new(vec![0; frames]),
            writable: RefCell::new(vec![false; frames]),
            clock: Cell::new(0),
        }
    }

    /// KVM_RUN: the vCPU writes `frames` until its ring is soft-full; an emulated batch looks only
    /// before it begins. Says how many it wrote; 0 is an exit because of the full ring.
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

    /// Tells the VMM of a full exit, if there is one that it does not know of.
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

    /// The logging flag taken from every slot and given back.
    pub fn protect_all(&self) {
        self.writable.borrow_mut().fill(false);
    }
}
