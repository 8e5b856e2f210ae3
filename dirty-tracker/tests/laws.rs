//! Laws of the tree, the layout, the tracker and its dirty sets, each against a plain set of
//! frames.
//!
//! `cargo test -p driftline-dirty-tracker --test laws`
#![cfg(not(any(driftline_loom, driftline_shuttle)))]
#![allow(clippy::unwrap_used, reason = "tests")]

use std::collections::BTreeSet;
use std::sync::Arc;

use driftline_dirty_tracker::{
    DirtySet, FrameRun, Gfn, Layout, LayoutError, OutOfSlot, PageSize, RelayoutError, Slot, SlotId,
    Subscription, Tracker, Tree,
};
use proptest::prelude::*;
use proptest::sample::Index;

fn config() -> ProptestConfig {
    cases(if cfg!(miri) { 3 } else { 150 })
}

/// Returns the settings of `cases` cases; of ten times as many with `DRIFTLINE_FULL=1`.
fn cases(cases: u32) -> ProptestConfig {
    let is_full = std::env::var("DRIFTLINE_FULL").is_ok_and(|full| full == "1");
    let cases = if is_full { 10 * cases } else { cases };
    ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(cases) }
}

/// Slots of odd lengths, some touching, some far apart: one to four levels of tree.
fn layout() -> impl Strategy<Value = Layout> {
    let frames = prop_oneof![1..200u64, 4000..4200u64, Just(64), Just(300_000)];
    let frames = if cfg!(miri) { (1..300u64).boxed() } else { frames.boxed() };
    let slot = (0..3u64, frames);
    prop::collection::vec(slot, 1..5).prop_map(|parts| {
        let mut base = 0;
        let slots: Vec<Slot> = (0..)
            .zip(parts)
            .map(|(id, (gap, frames))| {
                base += gap * 1000;
                let slot = Slot { id: SlotId(7 - id), base: Gfn(base), frames };
                base += frames;
                slot
            })
            .collect();
        Layout::new(slots).unwrap()
    })
}

/// A run inside one slot of a layout, chosen by two numbers; clustered, so that runs meet.
fn pick(layout: &Layout, slot: Index, at: Index, count: u64) -> FrameRun {
    let slot = layout.slots().nth(slot.index(layout.slots().len())).unwrap();
    let offset = at.index(slot.frames.min(1 << 13) as usize) as u64;
    FrameRun { start: Gfn(slot.base.0 + offset), count: count.clamp(1, slot.frames - offset) }
}

fn picks(n: usize) -> impl Strategy<Value = Vec<(Index, Index, u64)>> {
    let count = prop_oneof![3 => Just(1u64), 2 => 1..70u64, 1 => 1..10_000u64];
    let n = if cfg!(miri) { n / 3 } else { n };
    prop::collection::vec((any::<Index>(), any::<Index>(), count), 0..n)
}

fn set(runs: impl IntoIterator<Item = FrameRun>) -> BTreeSet<Gfn> {
    runs.into_iter().flat_map(|r| r.frames().collect::<Vec<_>>()).collect()
}

fn frames(dirty: &DirtySet) -> BTreeSet<Gfn> {
    set(dirty.runs())
}

/// The set of frames in the legacy bitmaps of all slots.
fn leaves(subscription: &Subscription) -> BTreeSet<Gfn> {
    let mut out = BTreeSet::new();
    for slot in subscription.layout().slots() {
        let bitmap = subscription.bitmap(slot.id).unwrap();
        assert_eq!(bitmap.len() as u64, slot.frames.div_ceil(64));
        for (w, bits) in (0..).zip(bitmap) {
            let set = (0..64).filter(|b| bits >> b & 1 == 1);
            out.extend(set.map(|b| Gfn(slot.base.0 + 64 * w + b)));
        }
    }
    out
}

/// I1: the summaries lead to every leaf that is not zero.
fn assert_summarized(subscription: &Subscription) {
    assert_eq!(subscription.count(), leaves(subscription).len() as u64);
}

fn tracker(layout: &Layout) -> (Arc<Tracker>, Subscription) {
    let tracker = Arc::new(Tracker::new(layout.clone()));
    let subscription = tracker.subscribe("laws").unwrap();
    (tracker, subscription)
}

proptest! {
    // Fewer, because a case marks and reads up to 1.2 million frames.
    #![proptest_config(cases(if cfg!(miri) { 3 } else { 30 }))]

    #[test]
    fn mark_all_marks_every_frame_of_every_slot(layout in layout()) {
        let (tracker, mut subscription) = tracker(&layout);
        tracker.mark_all();
        assert_summarized(&subscription);
        let dirty = subscription.drain();
        prop_assert_eq!(dirty.frames(), layout.frames());
        let slots: Vec<FrameRun> = layout.slots().map(|s| s.run()).collect();
        prop_assert_eq!(dirty.runs().collect::<Vec<_>>(), slots);
    }
}

proptest! {
    #![proptest_config(config())]

    #[test]
    fn drain_returns_exactly_what_was_marked(layout in layout(), picks in picks(30)) {
        let (tracker, mut subscription) = tracker(&layout);
        let mut model = BTreeSet::new();
        for (slot, at, count) in picks {
            let run = pick(&layout, slot, at, count);
            tracker.mark(run).unwrap();
            model.extend(run.frames());
            assert_summarized(&subscription);
        }
        let dirty = subscription.drain();
        prop_assert_eq!(dirty.frames(), model.len() as u64);
        prop_assert_eq!(frames(&dirty), model);
        dirty.commit();
        assert_summarized(&subscription);
        prop_assert!(subscription.drain().is_empty());
    }

    #[test]
    fn runs_are_ascending_maximal_and_within_slots(layout in layout(), picks in picks(30)) {
        let (tracker, mut subscription) = tracker(&layout);
        for (slot, at, count) in picks {
            tracker.mark(pick(&layout, slot, at, count)).unwrap();
        }
        let dirty = subscription.drain();
        let runs: Vec<FrameRun> = dirty.runs().collect();
        for run in &runs {
            prop_assert!(layout.contains(*run), "{} is not inside a slot", run);
        }
        for pair in runs.windows(2) {
            let [slot, next_slot] = [0, 1].map(|i| layout.locate(pair[i].start).unwrap().0);
            let (end, next) = (pair[0].end(), pair[1].start);
            prop_assert!(end < next || slot != next_slot && end == next);
        }
    }

    #[test]
    fn leaves_equal_the_kvm_bitmap(layout in layout(), picks in picks(30)) {
        let (tracker, subscription) = tracker(&layout);
        let mut model = BTreeSet::new();
        for (slot, at, count) in picks {
            let run = pick(&layout, slot, at, count);
            tracker.mark(run).unwrap();
            model.extend(run.frames());
        }
        prop_assert_eq!(leaves(&subscription), model);
    }

    #[test]
    fn marking_a_run_marks_each_frame(layout in layout(), picks in picks(10)) {
        let (by_run, runs) = tracker(&layout);
        let (by_frame, singles) = tracker(&layout);
        for (slot, at, count) in picks {
            let run = pick(&layout, slot, at, count);
            by_run.mark(run).unwrap();
            for gfn in run.frames() {
                let (slot, offset) = layout.locate(gfn).unwrap();
                by_frame.mark_offset(slot, offset).unwrap();
            }
        }
        prop_assert_eq!(leaves(&runs), leaves(&singles));
        prop_assert_eq!(by_run.stats().marked_frames, by_frame.stats().marked_frames);
    }

    #[test]
    fn absorbed_bitmap_equals_the_leaves(layout in layout(), picks in picks(30)) {
        let (from, source) = tracker(&layout);
        let (to, mut sink) = tracker(&layout);
        for (slot, at, count) in picks {
            from.mark(pick(&layout, slot, at, count)).unwrap();
        }
        let mut absorbed = 0;
        for slot in layout.slots() {
            absorbed += to.absorb_bitmap(slot.id, &source.bitmap(slot.id).unwrap()).unwrap();
        }
        assert_summarized(&sink);
        prop_assert_eq!(leaves(&sink), leaves(&source));
        prop_assert_eq!(sink.drain().frames(), absorbed);
    }

    #[test]
    fn bit_past_the_slot_marks_nothing(layout in layout(), past in 0..130u64) {
        let (tracker, mut subscription) = tracker(&layout);
        for slot in layout.slots() {
            let (frames, stray) = (slot.frames, slot.frames + past);
            let mut bitmap = vec![0u64; (stray / 64 + 1) as usize];
            bitmap[0] |= 1;
            bitmap[(stray / 64) as usize] |= 1 << (stray % 64);
            let error = OutOfSlot::PastSlot { slot: slot.id, offset: stray, count: 1, frames };
            prop_assert_eq!(tracker.absorb_bitmap(slot.id, &bitmap), Err(error));
        }
        prop_assert!(subscription.drain().is_empty());
    }

    #[test]
    fn given_back_or_dropped_frames_stay_dirty(
        layout in layout(), before in picks(10), meanwhile in picks(10), drop_it in any::<bool>(),
    ) {
        let (tracker, mut subscription) = tracker(&layout);
        let mark = |picks: Vec<(Index, Index, u64)>| {
            let pick = |(slot, at, count)| pick(&layout, slot, at, count);
            let runs: Vec<FrameRun> = picks.into_iter().map(pick).collect();
            runs.iter().for_each(|r| tracker.mark(*r).unwrap());
            set(runs)
        };
        let first = mark(before);
        let dirty = subscription.drain();
        let second = mark(meanwhile);
        if drop_it { drop(dirty) } else { dirty.give_back() }
        assert_summarized(&subscription);
        prop_assert_eq!(frames(&subscription.drain()), &first | &second);
        // That set was a temporary and was dropped: its frames are still in the tree. Committed
        // frames are not.
        let again = subscription.drain();
        prop_assert_eq!(frames(&again), &first | &second);
        again.commit();
        prop_assert!(subscription.drain().is_empty());
    }

    #[test]
    fn concurrent_dirty_sets_are_independent(
        layout in layout(), picks in picks(20), commits in any::<u32>(),
    ) {
        let (tracker, mut subscription) = tracker(&layout);
        let mut dirty_sets = Vec::new();
        let mut returned = BTreeSet::new();
        for (slot, at, count) in picks {
            tracker.mark(pick(&layout, slot, at, count)).unwrap();
            let dirty = subscription.drain();
            prop_assert_eq!(dirty.number(), dirty_sets.len() as u64);
            dirty_sets.push(dirty);
        }
        for (i, dirty) in dirty_sets.into_iter().enumerate().rev() {
            if commits >> (i % 32) & 1 == 1 {
                dirty.commit();
            } else {
                returned.extend(frames(&dirty));
                drop(dirty);
            }
        }
        prop_assert_eq!(frames(&subscription.drain()), returned);
    }

    #[test]
    fn two_subscribers_are_independent(
        layout in layout(), ops in picks(20), choices in any::<u32>(),
    ) {
        let (tracker, one) = tracker(&layout);
        let mut pair = [one, tracker.subscribe("second").unwrap()];
        let mut models = [BTreeSet::new(), BTreeSet::new()];
        for (i, (slot, at, count)) in ops.into_iter().enumerate() {
            let run = pick(&layout, slot, at, count);
            tracker.mark(run).unwrap();
            models.iter_mut().for_each(|m| m.extend(run.frames()));
            let chosen = (choices >> (i % 32) & 1) as usize;
            let dirty = pair[chosen].drain();
            prop_assert_eq!(frames(&dirty), std::mem::take(&mut models[chosen]));
            dirty.commit();
        }
        drop(pair);
        prop_assert_eq!(tracker.subscribers(), 0);
        prop_assert_eq!(tracker.stats().tree_bytes, 0);
    }

    /// A subscriber keeps what is dirty and exists in both layouts, whatever it drained before, and
    /// a set that is given back afterwards returns what still exists.
    #[test]
    fn relayout_keeps_what_is_dirty(
        layouts in prop::collection::vec(layout(), 2..4),
        steps in prop::collection::vec(picks(8), 4),
        commits in any::<u8>(),
    ) {
        let (tracker, one) = tracker(&layouts[0]);
        let mut pair = [one, tracker.subscribe("second").unwrap()];
        let mut models = [BTreeSet::new(), BTreeSet::new()];
        let mut taken: Vec<(usize, DirtySet)> = Vec::new();
        for (i, picks) in steps.into_iter().enumerate() {
            let now = &layouts[i % layouts.len()];
            tracker.relayout(now.clone()).unwrap();
            prop_assert_eq!(&*tracker.layout(), now);
            let has = |gfn: &Gfn| now.locate(*gfn).is_some();
            models.iter_mut().for_each(|m| m.retain(has));
            for (slot, at, count) in picks {
                let run = pick(now, slot, at, count);
                tracker.mark(run).unwrap();
                models.iter_mut().for_each(|m| m.extend(run.frames()));
            }
            for (subscription, model) in pair.iter().zip(&models) {
                prop_assert_eq!(&leaves(subscription), model);
                assert_summarized(subscription);
            }
            // One of the two drains, and sets of earlier layouts are committed or given back.
            for (owner, set) in taken.drain(..) {
                if commits >> i & 1 == 1 {
                    set.commit();
                } else {
                    models[owner].extend(frames(&set).into_iter().filter(has));
                    set.give_back();
                }
            }
            let set = pair[i % 2].drain();
            prop_assert_eq!(frames(&set), std::mem::take(&mut models[i % 2]));
            prop_assert!(set.runs().all(|run| now.contains(run)));
            taken.push((i % 2, set));
        }
    }

    #[test]
    fn locate_and_contains_agree_with_the_slots(
        layout in layout(), gfn in 0..700_000u64, count in 0..300u64,
    ) {
        let slot = layout.slots().find(|s| s.run().frames().any(|g| g == Gfn(gfn)));
        prop_assert_eq!(layout.locate(Gfn(gfn)), slot.map(|s| (s.id, gfn - s.base.0)));
        let run = FrameRun { start: Gfn(gfn), count };
        let inside = count > 0 && slot.is_some_and(|s| gfn + count <= s.run().end().0);
        prop_assert_eq!(layout.contains(run), inside);
    }

    #[test]
    fn frame_outside_its_slot_is_refused(layout in layout(), past in 0..1000u64) {
        let (tracker, mut subscription) = tracker(&layout);
        for slot in layout.slots() {
            let offset = slot.frames + past;
            let text = tracker.mark_offset(slot.id, offset).unwrap_err().to_string();
            let (at, id) = (format!("{offset:#x}"), format!("slot {}", slot.id.0));
            prop_assert!(text.contains(&at) && text.contains(&id), "{}", text);
            let over = FrameRun { start: slot.base, count: slot.frames + 1 };
            prop_assert_eq!(tracker.mark(over), Err(OutOfSlot::NotInOneSlot { run: over }));
        }
        let unknown = tracker.mark_offset(SlotId(99), past);
        prop_assert_eq!(unknown, Err(OutOfSlot::NoSlot { slot: SlotId(99), offset: past }));
        prop_assert!(!tracker.contains(Gfn(1 << 39)));
        prop_assert!(subscription.drain().is_empty());
    }

    #[test]
    fn chunks_make_up_the_run(start in 0..1000u64, count in 0..500u64, max in 0..70u64) {
        let run = FrameRun { start: Gfn(start), count };
        let chunks: Vec<FrameRun> = run.chunks(max).collect();
        prop_assert!(chunks.iter().all(|c| c.count > 0 && c.count <= max.max(1)));
        prop_assert_eq!(set(chunks), set([run]));
    }
}

proptest! {
    #![proptest_config(config())]

    #[test]
    fn every_kind_of_drain_returns_the_same_set(layout in layout(), picks in picks(30)) {
        let mut trees: Vec<Tree> = (0..4).map(|_| Tree::new(layout.clone()).unwrap()).collect();
        // Twice: a drained tree behaves like a new one.
        for round in 0..2 {
            let mut model = BTreeSet::new();
            for &(slot, at, count) in picks.iter().skip(round) {
                let run = pick(&layout, slot, at, count);
                model.extend(run.frames());
                for (i, tree) in trees.iter_mut().enumerate() {
                    match i % 2 {
                        0 => tree.mark(run).unwrap(),
                        _ => tree.exclusive().mark(run).unwrap(),
                    }
                    prop_assert_eq!(tree.count(), model.len() as u64);
                }
            }
            let (mut shared, mut owned) = (Vec::new(), Vec::new());
            prop_assert_eq!(trees[0].exclusive().drain_into(&mut owned), model.len() as u64);
            prop_assert_eq!(trees[1].drain_into(&mut shared), model.len() as u64);
            prop_assert_eq!(&owned, &shared);
            prop_assert_eq!(&set(owned), &model);
            // The previous content of the list stays.
            let mut frames = vec![Gfn(u64::MAX)];
            trees[2].exclusive().drain_into(&mut frames);
            let mut again = vec![Gfn(u64::MAX)];
            trees[3].drain_into(&mut again);
            prop_assert_eq!(&frames, &again);
            prop_assert_eq!(frames.remove(0), Gfn(u64::MAX));
            prop_assert_eq!(frames, model.into_iter().collect::<Vec<_>>());
        }
    }

    #[test]
    fn run_outside_its_slot_marks_nothing(layout in layout()) {
        let mut tree = Tree::new(layout.clone()).unwrap();
        for slot in layout.slots() {
            let run = FrameRun { start: slot.base, count: slot.frames + 1 };
            prop_assert_eq!(tree.mark(run), Err(OutOfSlot::NotInOneSlot { run }));
            prop_assert_eq!(tree.exclusive().mark(run), Err(OutOfSlot::NotInOneSlot { run }));
        }
        prop_assert!(tree.is_empty());
    }
}

#[test]
fn summaries_cost_at_most_two_percent() {
    let slots = |count: u32, frames: u64| {
        let slot = |id| Slot { id: SlotId(id), base: Gfn(u64::from(id) * frames), frames };
        Layout::new((0..count).map(slot)).unwrap()
    };
    let words = if cfg!(miri) { 4096..4100 } else { 4096..8400 };
    let small = words.map(|words| slots(1, words * 64 - 63));
    // 16 GiB, 4 TiB and 12 TiB, one frame less and one more, and the worst slots: of one frame
    // each.
    let sizes = if cfg!(miri) { vec![1 << 18] } else { vec![1 << 22, 1 << 30, 3 << 30] };
    let large = sizes.iter().flat_map(|size| [size - 1, *size, size + 1]).map(|n| slots(1, n));
    for layout in small.chain(large).chain([slots(4096, 1)]) {
        let leaves = layout.slots().map(|slot| slot.frames.div_ceil(64) * 8).sum::<u64>();
        let all = Tree::new(layout).unwrap().reserved_bytes();
        let summaries = all - leaves;
        assert!(summaries * 100 <= 2 * leaves, "{summaries} bytes over {leaves} bytes of leaves");
        assert!(summaries * 64 >= leaves, "a bit for each word");
    }
}

#[test]
fn relayout_to_another_page_size_is_refused() {
    let slot = Slot { id: SlotId(0), base: Gfn(0), frames: 100 };
    let (tracker, mut subscription) = tracker(&Layout::new([slot]).unwrap());
    tracker.mark(slot.run()).unwrap();
    let other = Layout::with_page_size(PageSize::Kib64, [slot]).unwrap();
    let error = tracker.relayout(other).unwrap_err();
    assert_eq!(error, RelayoutError::PageSize { from: PageSize::Kib4, to: PageSize::Kib64 });
    assert_eq!(
        error.to_string(),
        "a layout of frames of 65536 bytes cannot replace one of frames of 4096 bytes"
    );
    assert_eq!(subscription.drain().frames(), 100, "nothing changed");
}

#[test]
fn overlapping_slots_are_refused_in_any_order() {
    let slot = |id, base, frames| Slot { id: SlotId(id), base: Gfn(base), frames };
    let (a, b) = (slot(0, 100, 50), slot(1, 149, 1));
    assert_eq!(Layout::new([b, a]), Err(LayoutError::Overlap(a, b)));
    assert!(Layout::new([slot(0, 100, 49), b]).is_ok());
}
