//! Counts allocations with a counting allocator. Harvest, insert, drain and commit allocate nothing
//! in the steady state. A set of frames allocates at most once for a list of runs. The count is per
//! thread, so per test.
//!
//! `cargo test -p driftline-dirty-tracker --test alloc`
#![cfg(not(any(driftline_loom, driftline_shuttle)))]
#![allow(clippy::unwrap_used, reason = "tests")]

#[allow(dead_code, reason = "only the rings are needed here")]
mod kernel;

use std::alloc::{GlobalAlloc, Layout as Memory, System};
use std::cell::Cell;
use std::sync::Arc;

use driftline_dirty_tracker::ring::Harvester;
use driftline_dirty_tracker::{FrameRun, FrameSet, Gfn, Layout, Slot, SlotId, Tracker};
use kernel::KernelRing;

struct CountingAllocator;

thread_local! {
    static ALLOCATIONS: Cell<u64> = const { Cell::new(0) };
}

fn allocations() -> u64 {
    ALLOCATIONS.get()
}

// SAFETY: every call goes to the system's allocator unchanged.
unsafe impl GlobalAlloc for CountingAllocator {
    unsafe fn alloc(&self, layout: Memory) -> *mut u8 {
        ALLOCATIONS.set(ALLOCATIONS.get() + 1);
        // SAFETY: the caller keeps `alloc`'s contract.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Memory) {
        // SAFETY: the caller keeps `dealloc`'s contract.
        unsafe { System.dealloc(at, layout) }
    }

    unsafe fn realloc(&self, at: *mut u8, layout: Memory, size: usize) -> *mut u8 {
        ALLOCATIONS.set(ALLOCATIONS.get() + 1);
        // SAFETY: the caller keeps `realloc`'s contract.
        unsafe { System.realloc(at, layout, size) }
    }
}

#[global_allocator]
static GLOBAL: CountingAllocator = CountingAllocator;

#[test]
#[cfg_attr(miri, ignore = "counts allocations, which takes miri minutes")]
fn harvest_insert_drain_commit_allocates_nothing() {
    const SIZE: usize = 1024;
    const PUSHES: u64 = SIZE as u64 * 7 / 8;
    let slot = Slot { id: SlotId(0), base: Gfn(0), frames: 1 << 20 };
    let tracker = Arc::new(Tracker::new(Layout::new([slot]).unwrap()));
    let mut subscriptions =
        [tracker.subscribe("checkpoint").unwrap(), tracker.subscribe("migration").unwrap()];
    let rings = [KernelRing::new(SIZE, 64, 0), KernelRing::new(SIZE, 64, 0)];
    let mut harvester = Harvester::new(rings.len(), SIZE);

    let mut round = |n: u64| {
        let mut frame = n;
        for ring in &rings {
            for _ in 0..PUSHES {
                frame = frame.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
                ring.push(0, frame >> 44);
            }
        }
        let harvest = harvester.harvest(rings.iter().map(|r| r.entries.as_slice()));
        let count = rings.iter().map(|r| r.reset(u32::MAX, &mut |_, _| ())).sum();
        let inserted = harvest.reprotected(count).insert_into(&tracker);
        assert_eq!(inserted.frames, 2 * PUSHES);
        for subscription in &mut subscriptions {
            let dirty = subscription.drain();
            assert!(dirty.frames() > PUSHES);
            if n.is_multiple_of(3) { dirty.give_back() } else { dirty.commit() }
        }
        subscriptions.iter_mut().for_each(|s| s.drain().commit());
    };
    // The first rounds size the buffers.
    (0..8).for_each(&mut round);
    let before = allocations();
    (8..40).for_each(&mut round);
    assert_eq!(allocations() - before, 0, "allocations in the steady state");
}

#[test]
fn absorbing_and_draining_a_bitmap_allocates_nothing() {
    // Under miri just enough to fill the list of a small epoch.
    let words: u64 = if cfg!(miri) { 1 << 11 } else { 1 << 14 };
    let slot = Slot { id: SlotId(0), base: Gfn(0), frames: 64 * words };
    let tracker = Arc::new(Tracker::new(Layout::new([slot]).unwrap()));
    let mut subscriptions =
        [tracker.subscribe("checkpoint").unwrap(), tracker.subscribe("migration").unwrap()];
    let bitmap: Vec<u64> = (0..words).map(|word| u64::from(word % 7 == 0) << (word % 64)).collect();
    let mut round = || {
        assert!(tracker.absorb_bitmap(SlotId(0), &bitmap).unwrap() > words / 8);
        subscriptions.iter_mut().for_each(|s| s.drain().commit());
    };
    round();
    let before = allocations();
    (0..3).for_each(|_| round());
    assert_eq!(allocations() - before, 0, "allocations in the steady state");
}

#[test]
fn inserting_a_list_allocates_at_most_once() {
    let run = |start, count| FrameRun { start: Gfn(start), count };
    let every = |step: u64, first: u64, count: u64| -> Vec<FrameRun> {
        (0..500).map(|i| run(first + i * step, count)).collect()
    };
    let grown = |set: &FrameSet, list: &[FrameRun]| {
        // A copy has no spare room.
        let mut set = set.clone();
        let before = allocations();
        set.insert_all(list);
        (allocations() - before, set.len())
    };
    let set = FrameSet::from_iter(every(16, 0, 6));
    assert_eq!(grown(&set, &every(16, 9, 4)), (1, 1000), "a new run in each gap");
    assert_eq!(grown(&set, &every(16, 6, 4)), (0, 500), "each touches one run");
    assert_eq!(grown(&set, &every(32, 3, 16)), (0, 500), "half join two, half come after");
    assert_eq!(grown(&set, &[run(3, 100), run(105, 1)]), (0, 495), "the first joins six");
    assert_eq!(grown(&FrameSet::with_capacity(0), &every(2, 0, 1)), (1, 500), "into none");
}
