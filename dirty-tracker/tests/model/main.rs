//! Runs the real code under model checkers, which try the orders in which threads can run.
//!
//! ```text
//! cd dirty-tracker
//! RUSTFLAGS="--cfg driftline_shuttle" cargo test --target-dir ../target/shuttle --test model
//! RUSTFLAGS="--cfg driftline_loom"    cargo test --target-dir ../target/loom    --test model
//! MIRIFLAGS=-Zmiri-many-seeds=0..16   cargo +nightly miri test --test model
//! ```
//!
//! Each command runs for seconds. Shuttle tries random orders of the tree's operations and of rings
//! that are overrun while they are harvested. The tree's operations are sequentially consistent, as
//! shuttle's atomics are. `MODEL_ITERATIONS=1000000` searches longer. Loom tries all orders, and
//! all values that acquire, release and fences allow, of one ring's consumer and producer, and of a
//! frame that is written, marked, drained and read. Miri samples executions of the latter. Without
//! a checker this file is empty.
#![allow(clippy::unwrap_used, reason = "tests")]

#[cfg(any(driftline_loom, miri))]
mod memory;

/// The kernel's side of a ring, as in `virt/kvm/dirty_ring.c`.
#[cfg(any(driftline_loom, driftline_shuttle))]
mod producer {
    use std::sync::atomic::Ordering;

    use driftline_dirty_tracker::ring::{ENTRY_DIRTY, ENTRY_RESET, RingEntry};

    pub fn push(ring: &[RingEntry], published: u32, frame: u64) {
        let entry = &ring[published as usize & (ring.len() - 1)];
        entry.slot.store(0, Ordering::Relaxed);
        entry.offset.store(frame, Ordering::Relaxed);
        entry.flags.store(ENTRY_DIRTY, Ordering::Release);
    }

    /// Walks RESET entries from `walked` on and returns how many. The kernel loads, then stores; a
    /// push past the ring's end between the two would be overwritten without a trace, so this
    /// simulation excludes it.
    pub fn reset(ring: &[RingEntry], walked: u32) -> u32 {
        let clean = |count: &u32| {
            let flags = &ring[(walked + count) as usize & (ring.len() - 1)].flags;
            flags.compare_exchange(ENTRY_RESET, 0, Ordering::AcqRel, Ordering::Acquire).is_ok()
        };
        (0..).take_while(clean).count() as u32
    }
}

#[cfg(driftline_loom)]
mod loom_ring {
    use std::sync::Arc;

    use driftline_dirty_tracker::ring::{Harvester, RingEntry};
    use driftline_dirty_tracker::{Gfn, Layout, Slot, SlotId, Tracker};
    use loom::thread;

    use super::producer::{push, reset};

    #[test]
    fn published_entries_are_harvested_whole_and_in_order() {
        loom::model(|| {
            let ring: Arc<Vec<RingEntry>> =
                Arc::new((0..4).map(|_| RingEntry::default()).collect());
            let slot = Slot { id: SlotId(0), base: Gfn(0), frames: 64 };
            let tracker = Arc::new(Tracker::new(Layout::new([slot]).unwrap()));
            let mut harvester = Harvester::new(1, 4);
            let kernel = {
                let ring = ring.clone();
                thread::spawn(move || (0..3).for_each(|i| push(&ring, i, 10 + u64::from(i))))
            };
            let mut walked = 0;
            let mut frames = 0;
            let mut collect = || {
                let harvest = harvester.harvest([ring.as_slice()]);
                let count = reset(&ring, walked);
                walked += count;
                let readable = harvest.reprotected(count);
                assert!(readable.is_trusted());
                let absorbed = readable.insert_into(&tracker);
                assert_eq!(absorbed.foreign, 0, "an entry was read before it was complete");
                frames += absorbed.frames;
            };
            collect();
            kernel.join().unwrap();
            collect();
            assert_eq!((walked, frames), (3, 3));
        });
    }
}

#[cfg(driftline_shuttle)]
mod shuttle_orders {
    use std::collections::BTreeSet;
    use std::sync::Arc;

    use driftline_dirty_tracker::ring::{Harvester, RingEntry};
    use driftline_dirty_tracker::{
        DirtySet, FrameRun, Gfn, Layout, Slot, SlotId, Subscription, Tracker, Tree,
    };
    use shuttle::sync::atomic::{AtomicU32, Ordering};
    use shuttle::thread;

    use super::producer::{push, reset};

    fn check(test: impl Fn() + Send + Sync + 'static + Copy) {
        let given = std::env::var("MODEL_ITERATIONS").ok().and_then(|n| n.parse().ok());
        let iterations = given.unwrap_or(2_000);
        shuttle::check_random(test, iterations);
        shuttle::check_pct(test, iterations, 3);
    }

    fn layout(frames: u64) -> Layout {
        Layout::new([Slot { id: SlotId(0), base: Gfn(0), frames }]).unwrap()
    }

    /// I1: the summaries lead to every leaf that is not zero.
    fn assert_summarized(tree: &Tree) {
        let leaves = tree.bitmap(SlotId(0)).unwrap().map(|bits| u64::from(bits.count_ones()));
        assert_eq!(tree.count(), leaves.sum::<u64>());
    }

    fn tracker(frames: u64) -> Arc<Tracker> {
        Arc::new(Tracker::new(layout(frames)))
    }

    /// Two inserters and a drainer on a tree of three levels: neighbours in a word, the same frame
    /// twice, and words under one summary and under different ones.
    #[test]
    fn insert_is_drained_or_stays_in_the_tree() {
        check(|| {
            let tracker = tracker(64 * 64 * 3);
            let mut subscription = tracker.subscribe("model").unwrap();
            let inserters = [[0, 1, 64], [1, 4096, 0]].map(|frames: [u64; 3]| {
                let tracker = tracker.clone();
                thread::spawn(move || {
                    for frame in frames {
                        tracker.mark_offset(SlotId(0), frame).unwrap();
                    }
                })
            });
            let mut drained = BTreeSet::new();
            for _ in 0..2 {
                let dirty = subscription.drain();
                drained.extend(dirty.runs().flat_map(|r| r.start.0..r.end().0));
                dirty.commit();
            }
            inserters.into_iter().for_each(|t| t.join().unwrap());
            assert_drained_whole(&mut subscription);
            drained.extend(subscription.drain().runs().flat_map(|r| r.start.0..r.end().0));
            assert_eq!(drained, BTreeSet::from([0, 1, 64, 4096]));
        });
    }

    /// An insert that returned before a drain began is in that drain, even if the other thread is
    /// inserting the same frame and has not reached the summaries.
    #[test]
    fn drain_has_every_insert_before_it() {
        check(|| {
            let tracker = tracker(64 * 64 * 3);
            let mut subscription = tracker.subscribe("model").unwrap();
            let done = Arc::new(AtomicU32::new(0));
            let bit = |frame: u64| 1 << (frame % 61);
            let inserters = [[64, 4096], [64, 4097]].map(|frames: [u64; 2]| {
                let (tracker, done) = (tracker.clone(), done.clone());
                thread::spawn(move || {
                    for frame in frames {
                        tracker.mark_offset(SlotId(0), frame).unwrap();
                        done.fetch_or(bit(frame), Ordering::SeqCst);
                    }
                })
            });
            let mut drained = 0;
            for _ in 0..2 {
                let before = done.load(Ordering::SeqCst);
                let dirty = subscription.drain();
                dirty.runs().flat_map(|r| r.start.0..r.end().0).for_each(|f| drained |= bit(f));
                dirty.commit();
                assert_eq!(
                    before & !drained,
                    0,
                    "an insert returned before the drain and is missing"
                );
            }
            inserters.into_iter().for_each(|t| t.join().unwrap());
            assert_drained_whole(&mut subscription);
        });
    }

    /// Runs over many words, and a set that is given back, against a drain.
    #[test]
    fn ranges_and_returned_sets_are_never_lost() {
        check(|| {
            let tracker = tracker(64 * 64 * 2);
            let mut subscription = tracker.subscribe("model").unwrap();
            tracker.mark(FrameRun { start: Gfn(60), count: 10 }).unwrap();
            let first = subscription.drain();
            let other = tracker.clone();
            let inserter = thread::spawn(move || {
                other.mark(FrameRun { start: Gfn(4000), count: 200 }).unwrap();
            });
            let giver = thread::spawn(move || first.give_back());
            let mut drained = 0;
            let dirty = subscription.drain();
            drained += dirty.frames();
            dirty.commit();
            inserter.join().unwrap();
            giver.join().unwrap();
            assert_drained_whole(&mut subscription);
            assert_eq!(drained + subscription.drain().frames(), 210);
        });
    }

    /// A bitmap absorbed by two threads, and a thread that marks, against drains by two threads. A
    /// drain has every frame inserted before it, each frame is in one drain, and I1 holds.
    #[test]
    fn concurrent_bitmaps_marks_and_drains_lose_nothing() {
        check(|| {
            let tracker = tracker(64 * 64 * 2);
            let mut subscription = tracker.subscribe("model").unwrap();
            // Frames below both summaries, and on no list: two threads work from the first drain
            // on.
            let mut bitmap = vec![0; 65];
            (bitmap[0], bitmap[64]) = (2, 1);
            tracker.absorb_bitmap(SlotId(0), &bitmap).unwrap();
            let absorber = {
                let tracker = tracker.clone();
                thread::spawn(move || {
                    let mut bitmap = vec![0; 128];
                    (bitmap[0], bitmap[64]) = (4, 2);
                    tracker.absorb_bitmap(SlotId(0), &bitmap).unwrap()
                })
            };
            let marker = {
                let tracker = tracker.clone();
                thread::spawn(move || {
                    [3, 64, 64 * 64 + 2].map(|start| {
                        tracker.mark(FrameRun { start: Gfn(start), count: 1 }).unwrap();
                    })
                })
            };
            let mut drained: Vec<u64> = Vec::new();
            let mut drain = || {
                let dirty = subscription.drain();
                drained.extend(frames(&dirty));
                dirty.commit();
                drained.clone()
            };
            let first = drain();
            assert!(first.contains(&1) && first.contains(&4096), "lost: {first:?}");
            assert_eq!(absorber.join().unwrap(), 2);
            drain();
            marker.join().unwrap();
            let mut all = drain();
            all.sort_unstable();
            assert_eq!(all, [1, 2, 3, 64, 4096, 4097, 4098]);
        });
    }

    /// The layout changes twice while threads mark frames, absorb a bitmap and drain. What exists
    /// all the time is never lost, and every mark before a drain is in it. The bitmap has a frame
    /// that its slot loses meanwhile to another slot; a bitmap that comes later is refused.
    #[test]
    fn relayout_beside_marks_and_drains_loses_nothing() {
        check(|| {
            let slot = |id, base, frames| Slot { id: SlotId(id), base: Gfn(base), frames };
            let tracker = tracker(64 * 3);
            let mut subscription = tracker.subscribe("model").unwrap();
            tracker.mark(FrameRun { start: Gfn(5), count: 1 }).unwrap();
            let done = Arc::new(AtomicU32::new(0));
            let marker = {
                let (tracker, done) = (tracker.clone(), done.clone());
                thread::spawn(move || {
                    for (bit, frame) in [1, 70, 140].into_iter().enumerate() {
                        tracker.mark(FrameRun { start: Gfn(frame), count: 1 }).unwrap();
                        done.fetch_or(1 << bit, Ordering::SeqCst);
                    }
                    tracker.absorb_bitmap(SlotId(0), &[1 << 9, 0, 1]).is_ok()
                })
            };
            let changer = {
                let tracker = tracker.clone();
                thread::spawn(move || {
                    // The second slot begins inside a word of the first.
                    let split = [slot(0, 0, 100), slot(1, 100, 64 * 3 - 100), slot(2, 4096, 64)];
                    tracker.relayout(Layout::new(split).unwrap()).unwrap();
                    tracker.relayout(layout(64 * 3)).unwrap();
                })
            };
            let mut drained = BTreeSet::new();
            for round in 0..2 {
                let before = done.load(Ordering::SeqCst);
                let dirty = subscription.drain();
                drained.extend(frames(&dirty));
                for (bit, frame) in [1, 70, 140].into_iter().enumerate() {
                    assert!(
                        before >> bit & 1 == 0 || drained.contains(&frame),
                        "{frame} is missing"
                    );
                }
                match round {
                    0 => dirty.give_back(),
                    _ => dirty.commit(),
                }
            }
            let absorbed = marker.join().unwrap();
            changer.join().unwrap();
            drained.extend(frames(&subscription.drain()));
            let mut expected = BTreeSet::from([1, 5, 70, 140]);
            if absorbed {
                expected.extend([9, 128]);
            }
            assert_eq!(drained, expected);
        });
    }

    fn frames(dirty: &DirtySet) -> Vec<u64> {
        dirty.runs().flat_map(|r| r.start.0..r.end().0).collect()
    }

    /// I1: a drain finds every leaf that is not zero.
    fn assert_drained_whole(subscription: &mut Subscription) {
        let leaves = subscription.bitmap(SlotId(0)).unwrap();
        let ones = leaves.iter().map(|bits| u64::from(bits.count_ones())).sum::<u64>();
        assert_eq!(subscription.count(), ones);
    }

    /// A vCPU writes past its ring's end while the ring is harvested and walked. Every frame is
    /// marked, the walk never passes the published entries, and the vCPU runs again in the end.
    #[test]
    fn overrun_during_a_harvest_loses_nothing() {
        check(|| {
            const SIZE: u32 = 4;
            const SOFT_LIMIT: u32 = 3;
            const WRITES: u32 = 11;
            let ring: Arc<Vec<RingEntry>> =
                Arc::new((0..SIZE).map(|_| RingEntry::default()).collect());
            let tracker = tracker(64);
            let subscription = tracker.subscribe("model").unwrap();
            let mut harvester = Harvester::new(1, SIZE as usize);
            let published = Arc::new(AtomicU32::new(0));
            let kernel = {
                let (ring, published) = (ring.clone(), published.clone());
                thread::spawn(move || {
                    for i in 0..WRITES {
                        push(&ring, i, u64::from(i));
                        published.store(i + 1, Ordering::SeqCst);
                    }
                })
            };
            let full = harvester.ring_full(0).unwrap();
            let mut walked = 0;
            let mut collect = || {
                let harvest = harvester.harvest([ring.as_slice()]);
                let count = reset(&ring, walked);
                walked += count;
                let mut readable = harvest.reprotected(count);
                if !readable.is_trusted() {
                    readable = readable.all_reprotected();
                }
                let absorbed = readable.insert_into(&tracker);
                (walked, absorbed)
            };
            for _ in 0..3 {
                collect();
            }
            kernel.join().unwrap();
            collect();
            for frame in 0..u64::from(WRITES) {
                assert!(subscription.contains(Gfn(frame)), "frame {frame} was lost");
            }
            // The vCPU retries until it may run. From then on every frame is marked in time.
            let mut published = WRITES;
            for frame in 20..40 {
                let room = |walked| published - walked < SOFT_LIMIT;
                collect_until(published, room, || collect().0, || full.report());
                push(&ring, published, frame);
                published += 1;
                collect();
                assert!(subscription.contains(Gfn(frame)), "frame {frame} was lost");
            }
            let (walked, last) = collect();
            assert_eq!(walked, published);
            assert!(!last.marked_all);
        });
    }

    /// Collects until the vCPU has `room` in its ring, and reports a full ring until then.
    /// `collect` returns the number of entries walked so far.
    fn collect_until(
        published: u32,
        room: impl Fn(u32) -> bool,
        mut collect: impl FnMut() -> u32,
        report: impl Fn(),
    ) {
        for tries in 0.. {
            let walked = collect();
            assert!(walked <= published, "the walk passed the published entries");
            if room(walked) {
                break;
            }
            assert!(tries < 100, "the vCPU never runs again: {walked} of {published}");
            report();
        }
    }

    /// Two drainers and two inserters. Every inserted frame is drained or still in the tree, whose
    /// summaries are right.
    fn two_drainers(runs: bool) {
        let tree = Arc::new(Tree::new(layout(64 * 64 * 3)).unwrap());
        if runs {
            tree.mark(FrameRun { start: Gfn(60), count: 64 * 6 }).unwrap();
        }
        let inserters = [[1, 64, 4096, 65], [64, 8200, 1, 66]].map(|frames: [u64; 4]| {
            let tree = tree.clone();
            thread::spawn(move || {
                for start in frames.map(Gfn) {
                    tree.mark(FrameRun { start, count: 1 }).unwrap();
                }
            })
        });
        let drainers = [(); 2].map(|()| {
            let tree = tree.clone();
            thread::spawn(move || tree.drain().chain(tree.drain()).collect::<Vec<_>>())
        });
        inserters.into_iter().for_each(|t| t.join().unwrap());
        let mut all: Vec<FrameRun> = drainers.into_iter().flat_map(|t| t.join().unwrap()).collect();
        assert_summarized(&tree);
        tree.drain_into(&mut all);
        let drained: BTreeSet<u64> = all.into_iter().flat_map(|r| r.start.0..r.end().0).collect();
        let mut expected = BTreeSet::from([1, 64, 65, 66, 4096, 8200]);
        if runs {
            expected.extend(60..60 + 64 * 6);
        }
        assert_eq!(drained, expected);
    }

    #[test]
    fn two_concurrent_drains_lose_nothing() {
        check(|| two_drainers(false));
        check(|| two_drainers(true));
    }
}
