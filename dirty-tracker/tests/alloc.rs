//! In the steady state harvest -> absorb -> drain -> commit allocates nothing: a counting allocator
//! says so. One test, alone in its process, since the count is global.
//!
//! `cargo test -p dirty-tracker --test alloc`
#![cfg(not(any(driftline_loom, driftline_shuttle)))]
#![allow(clippy::unwrap_used, reason = "tests")]

#[allow(dead_code, reason = "only the rings are needed here")]
mod kernel;

use std::alloc::{GlobalAlloc, Layout as Memory, System};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use dirty_tracker::{Gfn, Harvester, Layout, Slot, SlotId, Tracker};
use kernel::KernelRing;

struct Counting;

static ALLOCATIONS: AtomicU64 = AtomicU64::new(0);

// SAFETY: every call goes to the system's allocator unchanged.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Memory) -> *mut u8 {
        ALLOCATIONS.fetch_add(1, Ordering::Relaxed);
        // SAFETY: the caller keeps `alloc`'s contract.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Memory) {
        // SAFETY: the caller keeps `dealloc`'s contract.
        unsafe { System.dealloc(at, layout) }
    }

    unsafe fn realloc(&self, at: *mut u8, layout: Memory, size: usize) -> *mut u8 {
        ALLOCATIONS.fetch_add(1, Ordering::Relaxed);
        // SAFETY: the caller keeps `realloc`'s contract.
        unsafe { System.realloc(at, layout, size) }
    }
}

#[global_allocator]
static GLOBAL: Counting = Counting;

#[test]
#[cfg_attr(miri, ignore = "counts allocations, which takes miri minutes")]
fn harvest_absorb_drain_commit_allocates_nothing() {
    const SIZE: usize = if cfg!(miri) { 128 } else { 1024 };
    const PUSHES: u64 = SIZE as u64 * 7 / 8;
    let slot = Slot { id: SlotId(0), base: Gfn(0), frames: 1 << 20 };
    let tracker = Arc::new(Tracker::new(Layout::new([slot]).unwrap()));
    let mut subscriptions = [tracker.subscribe("checkpoint"), tracker.subscribe("migration")];
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
        let absorbed = harvest.reprotected(count).absorb(&tracker);
        assert_eq!(absorbed.frames, 2 * PUSHES);
        for subscription in &mut subscriptions {
            let epoch = subscription.drain();
            assert!(epoch.frames() > PUSHES);
            if n.is_multiple_of(3) { epoch.give_back() } else { epoch.commit() }
        }
        subscriptions.iter_mut().for_each(|s| s.drain().commit());
    };
    // The first epochs size the buffers.
    (0..if cfg!(miri) { 3 } else { 8 }).for_each(&mut round);
    let before = ALLOCATIONS.load(Ordering::Relaxed);
    (8..if cfg!(miri) { 10 } else { 40 }).for_each(&mut round);
    assert_eq!(ALLOCATIONS.load(Ordering::Relaxed) - before, 0, "allocations in the steady state");
}
