//! A thread writes to a frame and then marks it. Another thread takes the mark and then reads the
//! frame. Either the read sees the write, or the frame is marked again. Otherwise the write is
//! lost.
//!
//! The test accesses the frame with relaxed atomics, so the tree's fences provide all of the order.
//! Loom tries every order of the threads and every value that each load may return. It treats
//! SeqCst loads and stores as acquire and release, so the trees here have one level, whose protocol
//! needs only the fences. Miri samples one execution of its weak memory for each seed, with full
//! SeqCst.

use std::sync::Arc;

use driftline_dirty_tracker::{FrameRun, Gfn, Layout, Slot, SlotId, Subscription, Tracker, Tree};

#[cfg(driftline_loom)]
use loom::{
    sync::atomic::{AtomicU64, Ordering::Relaxed},
    thread,
};
#[cfg(not(driftline_loom))]
use std::{
    sync::atomic::{AtomicU64, Ordering::Relaxed},
    thread,
};

/// The frame that is written and marked.
const FRAME: u64 = 7;
const RUN: FrameRun = FrameRun { start: Gfn(FRAME), count: 1 };

#[cfg(driftline_loom)]
fn explore(test: impl Fn() + Send + Sync + 'static) {
    loom::model(test);
}

/// Executions per seed: executions in which the fence matters are rare.
#[cfg(not(driftline_loom))]
fn explore(test: impl Fn() + Send + Sync + 'static) {
    (0..8).for_each(|_| test());
}

fn layout() -> Layout {
    let frames = if cfg!(driftline_loom) { 64 } else { 64 * 64 * 2 };
    Layout::new([Slot { id: SlotId(0), base: Gfn(0), frames }]).unwrap()
}

/// Marks a frame that is already marked while `drain` takes it. `drain` returns the number of
/// frames it took.
fn no_write_is_lost(mark: fn(&Tree), drain: fn(&Tree) -> u64) {
    for listed in [true, false] {
        explore(move || {
            let tree = Arc::new(Tree::new(layout()).unwrap());
            if listed {
                tree.mark(RUN).unwrap();
            } else {
                // Leaves the list of words incomplete, so the drain walks.
                tree.absorb_bitmap(SlotId(0), &[1 << FRAME]).unwrap();
            }
            let page = Arc::new(AtomicU64::new(0));
            let writer = {
                let (tree, page) = (tree.clone(), page.clone());
                thread::spawn(move || {
                    page.store(1, Relaxed);
                    mark(&tree);
                })
            };
            let taken = drain(&tree);
            let copied = page.load(Relaxed);
            writer.join().unwrap();
            let marked = tree.count() == 1;
            assert!(taken == 1, "the drain missed a frame that was marked before it");
            assert!(
                copied == 1 || marked,
                "the write is neither in the copy nor in the next epoch"
            );
        });
    }
}

fn mark(tree: &Tree) {
    tree.mark(RUN).unwrap();
}

fn drain(tree: &Tree) -> u64 {
    tree.drain_into(&mut Vec::<FrameRun>::new())
}

#[test]
fn drain_reads_what_marks_announced() {
    no_write_is_lost(mark, drain);
}

#[test]
fn frame_drain_reads_what_marks_announced() {
    no_write_is_lost(mark, |tree| tree.drain_into(&mut Vec::<Gfn>::new()));
}

/// Two threads write to the frame and mark it, while a drain takes the mark of either. The frame
/// itself is unmarked before. The bit beside it leaves the list of words incomplete, so marks and
/// drain use the tree alone.
#[test]
fn drain_reads_what_two_marks_announced() {
    explore(|| {
        let tree = Arc::new(Tree::new(layout()).unwrap());
        tree.absorb_bitmap(SlotId(0), &[1 << (FRAME + 1)]).unwrap();
        let pages = [(); 2].map(|()| Arc::new(AtomicU64::new(0)));
        let writers = pages.clone().map(|page| {
            let tree = tree.clone();
            thread::spawn(move || {
                page.store(1, Relaxed);
                mark(&tree);
            })
        });
        drain(&tree);
        let copied = pages.map(|page| page.load(Relaxed));
        writers.into_iter().for_each(|writer| writer.join().unwrap());
        let marked = tree.contains(Gfn(FRAME));
        assert!(copied == [1, 1] || marked, "a write is neither in the copy nor in the next epoch");
    });
}

/// A caller that clears a tree reads all memory next.
#[test]
fn clear_reads_what_marks_announced() {
    no_write_is_lost(mark, |tree| {
        tree.clear();
        1
    });
}

#[test]
fn drain_reads_what_bitmaps_announced() {
    no_write_is_lost(
        |tree| {
            tree.absorb_bitmap(SlotId(0), &[1 << FRAME]).unwrap();
        },
        drain,
    );
}

/// The same through a tracker, whose marks are gathered before they reach a tree. Another thread
/// marks meanwhile: either may find the batch locked, and insert by itself.
#[test]
fn subscriber_reads_what_gathered_marks_announced() {
    explore(|| {
        let tracker = Arc::new(Tracker::new(layout()));
        let mut subscription = tracker.subscribe("model").unwrap();
        tracker.mark(RUN).unwrap();
        let page = Arc::new(AtomicU64::new(0));
        let writer = {
            let (tracker, page) = (tracker.clone(), page.clone());
            thread::spawn(move || {
                page.store(1, Relaxed);
                tracker.mark(RUN).unwrap();
            })
        };
        let frames = |subscription: &mut Subscription| {
            let set = subscription.drain();
            let frames = set.frames();
            set.commit();
            frames
        };
        assert_eq!(frames(&mut subscription), 1);
        let copied = page.load(Relaxed);
        writer.join().unwrap();
        let marked = frames(&mut subscription) == 1;
        assert!(copied == 1 || marked, "the write is neither in the copy nor in the next epoch");
    });
}

#[test]
fn subscriber_reads_what_marks_announced() {
    explore(|| {
        let tracker = Arc::new(Tracker::new(layout()));
        let page = Arc::new(AtomicU64::new(0));
        let writer = {
            let (tracker, page) = (tracker.clone(), page.clone());
            thread::spawn(move || {
                page.store(1, Relaxed);
                tracker.mark(RUN).unwrap();
            })
        };
        let subscription = tracker.subscribe("model").unwrap();
        let copied = page.load(Relaxed);
        writer.join().unwrap();
        let marked = subscription.contains(Gfn(FRAME));
        assert!(copied == 1 || marked, "the write is neither in the first copy nor marked");
    });
}
