//! Laws of bitmaps that are absorbed, and of drains and counts by several threads. Each is compared
//! with a plain set, roaring, or one thread. The grains are tiny, so that small trees are split
//! between threads, too. Without the feature `parallel` one thread does all the work.

#![allow(clippy::unwrap_used, reason = "tests")]

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicUsize, Ordering};

use proptest::prelude::*;
use roaring::RoaringTreemap;

use crate::tree::RunLists;
use crate::{FrameRun, Gfn, Layout, OutOfSlot, Slot, SlotId, Tree};

fn config() -> ProptestConfig {
    let cases = if cfg!(miri) { 1 } else { 200 };
    ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(cases) }
}

/// Slots of odd lengths, some touching: trees of one to four levels.
fn layout() -> impl Strategy<Value = Layout> {
    let frames = prop_oneof![1..200u64, 4000..4200u64, Just(64), Just(4096), Just(300_000)];
    let frames = if cfg!(miri) { (1..300u64).boxed() } else { frames.boxed() };
    let slots = prop::collection::vec((0..2u64, frames), 1..6);
    slots.prop_map(|parts| {
        let mut base = 5;
        let slot = |(id, (gap, frames)): (u32, (u64, u64))| {
            let slot = Slot { id: SlotId(9 - id), base: Gfn(base + gap * 1000), frames };
            base = slot.run().end().0;
            slot
        };
        Layout::new((0..).zip(parts).map(slot)).unwrap()
    })
}

/// A bitmap for each slot of a layout; some are shorter than the slot.
type Bitmaps = Vec<(Slot, Vec<u64>)>;

fn bitmaps(layout: &Layout) -> impl Strategy<Value = Bitmaps> + use<> {
    let word = prop_oneof![
        6 => Just(0),
        2 => any::<u64>(),
        2 => Just(u64::MAX),
        1 => (0..64u32).prop_map(|b| 1 << b),
    ];
    let slots: Vec<_> = layout
        .slots()
        .map(|&slot| {
            let words = slot.frames.div_ceil(64) as usize;
            // Long bitmaps repeat a pattern whose length is not a multiple of a summary.
            let pattern = prop::collection::vec(word.clone(), 0..words.min(100) + 1);
            (pattern, any::<bool>(), any::<prop::sample::Index>()).prop_map(
                move |(pattern, cut, at)| {
                    let mut bitmap: Vec<u64> =
                        pattern.iter().copied().cycle().take(words).collect();
                    if cut {
                        bitmap.truncate(at.index(words));
                    }
                    if bitmap.len() == words && slot.frames % 64 != 0 {
                        bitmap[words - 1] &= (1 << (slot.frames % 64)) - 1;
                    }
                    (slot, bitmap)
                },
            )
        })
        .collect();
    slots
}

/// A layout, two bitmaps for each of its slots, and a grain: trees are cut at the leaves, at level
/// 1, at level 2 or, like most small trees, not at all.
fn cases() -> impl Strategy<Value = (Layout, [Bitmaps; 2], usize)> {
    let grain = prop_oneof![Just(1usize), Just(64), Just(200), Just(4096), Just(32_768)];
    (layout(), grain).prop_flat_map(|(layout, grain)| {
        let bitmaps = [bitmaps(&layout), bitmaps(&layout)];
        (Just(layout), bitmaps, Just(grain))
    })
}

fn tree(layout: &Layout, grain: usize) -> Tree {
    Tree { grain, ..Tree::new(layout.clone()).unwrap() }
}

/// Runs `work` in a pool of more threads than most test hosts have. Not under miri, which reports
/// threads that outlive the test, as those of a pool do.
fn in_pool<R: Send>(work: impl FnOnce() -> R + Send) -> R {
    if cfg!(miri) {
        return work();
    }
    rayon::ThreadPoolBuilder::new().num_threads(4).build().unwrap().install(work)
}

fn set(bitmaps: &[(Slot, Vec<u64>)]) -> BTreeSet<u64> {
    let frames = bitmaps.iter().flat_map(|(slot, bitmap)| {
        let bits = (0..bitmap.len() as u64 * 64)
            .filter(|i| bitmap[(i / 64) as usize] >> (i % 64) & 1 == 1);
        bits.map(|i| slot.base.0 + i)
    });
    frames.collect()
}

fn drained(tree: &Tree) -> Vec<FrameRun> {
    let mut runs: Vec<FrameRun> = Vec::new();
    let frames = tree.drain_into(&mut runs);
    assert_eq!(frames, runs.iter().map(|r| r.count).sum::<u64>());
    runs
}

fn frames(runs: impl IntoIterator<Item = FrameRun>) -> BTreeSet<u64> {
    runs.into_iter().flat_map(|r| r.start.0..r.end().0).collect()
}

proptest! {
    #![proptest_config(config())]

    #[test]
    fn absorbing_equals_marking_each_frame((layout, [first, second], grain) in cases()) {
        in_pool(|| {
            let [absorbed, marked] = [(); 2].map(|()| tree(&layout, grain));
            for (slot, bitmap) in first.iter().chain(&second) {
                let ones = bitmap.iter().map(|w| u64::from(w.count_ones())).sum::<u64>();
                prop_assert_eq!(absorbed.absorb_bitmap(slot.id, bitmap), Ok(ones));
                prop_assert_eq!(absorbed.missing_summary(), None);
            }
            let model: RoaringTreemap = set(&first).into_iter().chain(set(&second)).collect();
            for frame in &model {
                marked.mark(FrameRun { start: Gfn(frame), count: 1 }).unwrap();
            }
            prop_assert_eq!(absorbed.count(), model.len());
            for (slot, _) in &first {
                prop_assert!(absorbed.bitmap(slot.id).unwrap().eq(marked.bitmap(slot.id).unwrap()));
            }
            prop_assert_eq!(drained(&absorbed), drained(&marked));
            Ok(())
        })?;
    }

    #[test]
    fn parallel_drain_equals_sequential_drain((layout, bitmaps, grain) in cases()) {
        in_pool(|| {
            let [many, one] = [(); 2].map(|()| tree(&layout, grain));
            let mut runs = RunLists::default();
            for (slot, bitmap) in bitmaps.iter().flatten() {
                many.absorb_bitmap(slot.id, bitmap).unwrap();
                one.absorb_bitmap(slot.id, bitmap).unwrap();
                // Not every time, so that a drain has frames of several slots, and lists are
                // reused.
                if slot.id.0 % 2 == 0 {
                    let count = many.count();
                    let expected = drained(&one);
                    prop_assert_eq!(many.drain_to_lists(&mut runs), count);
                    prop_assert_eq!((runs.frames(), runs.iter().len()), (count, expected.len()));
                    prop_assert_eq!(runs.iter().collect::<Vec<_>>(), expected);
                    prop_assert_eq!(many.count(), 0);
                }
            }
            Ok(())
        })?;
    }

    #[test]
    fn bits_past_the_slot_are_refused((layout, [bitmaps, _], grain) in cases(), past in 0..130u64) {
        let tree = tree(&layout, grain);
        for (slot, bitmap) in &bitmaps {
            tree.absorb_bitmap(slot.id, bitmap).unwrap();
        }
        for (slot, _) in &bitmaps {
            let (id, frames, bit) = (slot.id, slot.frames, slot.frames + past);
            let named = OutOfSlot::PastSlot { slot: id, offset: bit, count: 1, frames };
            let mut stray = vec![u64::MAX; (slot.frames / 64) as usize];
            stray.resize((bit / 64 + 1) as usize, 0);
            stray[(bit / 64) as usize] |= 1 << (bit % 64);
            prop_assert_eq!(tree.absorb_bitmap(slot.id, &stray), Err(named));
        }
        prop_assert_eq!(frames(drained(&tree)), set(&bitmaps));
    }
}

#[test]
fn error_names_an_unknown_slot() {
    let layout = Layout::new([Slot { id: SlotId(0), base: Gfn(0), frames: 70 }]).unwrap();
    let tree = Tree::new(layout).unwrap();
    let error = OutOfSlot::NoSlot { slot: SlotId(1), offset: 0 };
    assert_eq!(tree.absorb_bitmap(SlotId(1), &[1]), Err(error));
    assert_eq!(tree.bitmap(SlotId(1)).err(), Some(error));
    assert_eq!(tree.count(), 0);
}

/// Number of times that each thread inserts its frames.
const ROUNDS: u32 = if cfg!(miri) { 1 } else { 20 };

/// Two threads mark, one absorbs bitmaps, and several threads drain meanwhile. Every frame is
/// drained at least once, and at most as often as it was inserted.
#[test]
fn parallel_drain_loses_no_concurrent_insert() {
    let slot =
        Slot { id: SlotId(0), base: Gfn(0), frames: if cfg!(miri) { 1_100 } else { 270_001 } };
    let layout = Layout::new([slot]).unwrap();
    let tree = tree(&layout, 64);
    let running = AtomicUsize::new(3);
    let drain_counts = std::thread::scope(|scope| {
        let (tree, running) = (&tree, &running);
        for start in 0..2 {
            scope.spawn(move || {
                for _ in 0..ROUNDS {
                    for frame in (start..slot.frames).step_by(2 + 5 * start as usize) {
                        tree.mark(FrameRun { start: Gfn(frame), count: 1 }).unwrap();
                    }
                }
                running.fetch_sub(1, Ordering::SeqCst);
            });
        }
        scope.spawn(move || {
            let mut bitmap = vec![1 << 33; slot.frames.div_ceil(64) as usize];
            *bitmap.last_mut().unwrap() = 1;
            in_pool(|| {
                for _ in 0..ROUNDS {
                    tree.absorb_bitmap(slot.id, &bitmap).unwrap();
                }
            });
            running.fetch_sub(1, Ordering::SeqCst);
        });
        in_pool(|| drain_while_running(tree, slot, running))
    });
    assert_eq!(tree.missing_summary(), None);
    for (frame, times) in (0..).zip(drain_counts) {
        let insertions = u32::from(frame % 2 == 0)
            + u32::from(frame % 7 == 1)
            + u32::from(
                frame % 64 == 33 && frame < slot.frames / 64 * 64 || frame == slot.frames / 64 * 64,
            );
        let most = insertions * ROUNDS;
        assert!(times >= u32::from(most > 0) && times <= most, "frame {frame}: {times} of {most}");
    }
}

/// Drains until no inserter runs any more, and once more. Returns how often each frame of `slot`
/// was drained. The runs of each drain are ascending and disjoint.
fn drain_while_running(tree: &Tree, slot: Slot, running: &AtomicUsize) -> Vec<u32> {
    let mut drain_counts = vec![0u32; slot.frames as usize];
    let mut lists = RunLists::default();
    loop {
        let last = running.load(Ordering::SeqCst) == 0;
        tree.drain_to_lists(&mut lists);
        let runs: Vec<FrameRun> = lists.iter().collect();
        assert!(runs.windows(2).all(|pair| pair[0].end() < pair[1].start), "{runs:?}");
        let frames = runs.iter().flat_map(|r| r.start.0..r.end().0);
        frames.for_each(|f| drain_counts[f as usize] += 1);
        if last {
            return drain_counts;
        }
    }
}
