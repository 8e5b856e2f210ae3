//! A write to a frame before its mark is visible to the thread that drains the mark, on the CPU
//! that runs this test: shuttle does not model the guest's memory beside the tree.
//!
//! `cargo test -p driftline-dirty-tracker --test litmus`
#![cfg(not(any(driftline_loom, driftline_shuttle, miri)))]
#![allow(clippy::unwrap_used, reason = "tests")]

mod skip;

use std::hint::spin_loop;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use driftline_dirty_tracker::{FrameRun, Gfn, Layout, Slot, SlotId, Tree};

/// A cache line, and the adjacent one that is prefetched with it.
#[repr(align(128))]
#[derive(Default)]
struct CacheLine(AtomicU64);

impl CacheLine {
    /// Waits for `value`. Fails once the other thread has panicked.
    fn wait_for(&self, value: u64, panicked: &AtomicBool) {
        while self.0.load(Ordering::Acquire) != value {
            assert!(!panicked.load(Ordering::Relaxed), "the other thread has panicked");
            spin_loop();
        }
    }
}

/// Sets the flag if its thread panics, so that the other thread does not wait for ever.
struct PanicFlag<'f>(&'f AtomicBool);

impl Drop for PanicFlag<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.0.store(true, Ordering::Relaxed);
        }
    }
}

/// The mark finds its bit set and changes nothing, while a drain takes the bit and reads the frame.
fn lost_writes(rounds: u64, mark: impl Fn(&Tree, FrameRun) + Sync) -> u64 {
    let layout = Layout::new([Slot { id: SlotId(0), base: Gfn(0), frames: 64 * 8 }]).unwrap();
    let tree = Tree::new(layout).unwrap();
    let run = FrameRun { start: Gfn(7), count: 1 };
    let page: [CacheLine; 16] = Default::default();
    let (ready, go, done) = (CacheLine::default(), CacheLine::default(), CacheLine::default());
    let panicked = AtomicBool::new(false);
    let mut lost = 0;
    std::thread::scope(|scope| {
        let _flag = PanicFlag(&panicked);
        scope.spawn(|| {
            let _flag = PanicFlag(&panicked);
            for round in 1..=rounds {
                ready.wait_for(round, &panicked);
                // Marked before, and too much for the list of a small epoch.
                tree.mark(FrameRun { start: Gfn(0), count: 64 * 8 }).unwrap();
                go.0.store(round, Ordering::Release);
                (0..round % 7).for_each(|_| spin_loop());
                page.iter().for_each(|line| line.0.store(round, Ordering::Relaxed));
                mark(&tree, run);
                done.0.store(round, Ordering::Release);
            }
        });
        let mut runs: Vec<FrameRun> = Vec::new();
        for round in 1..=rounds {
            std::hint::black_box(page.iter().map(|l| l.0.load(Ordering::Relaxed)).sum::<u64>());
            ready.0.store(round, Ordering::Release);
            go.wait_for(round, &panicked);
            (0..round / 7 % 5).for_each(|_| spin_loop());
            runs.clear();
            tree.drain_into(&mut runs);
            let copied = page[15].0.load(Ordering::Relaxed);
            done.wait_for(round, &panicked);
            let taken = !runs.is_empty();
            runs.clear();
            tree.drain_into(&mut runs);
            lost += u64::from(taken && runs.is_empty() && copied < round);
        }
    });
    lost
}

#[test]
fn write_before_a_mark_is_copied_or_remarked() {
    // Spinning threads that share one CPU take too long.
    if std::thread::available_parallelism().is_ok_and(|n| n.get() < 2) {
        let test = "litmus::write_before_a_mark_is_copied_or_remarked";
        skip::skipped(test, "spinning threads need two CPUs");
        return;
    }
    let rounds = 100_000;
    let lost = lost_writes(rounds, |tree, run| tree.mark(run).unwrap());
    assert_eq!(lost, 0, "by marks");
    let lost = lost_writes(rounds, |tree, _| {
        tree.absorb_bitmap(SlotId(0), &[1 << 7]).unwrap();
    });
    assert_eq!(lost, 0, "by bitmaps");
}
