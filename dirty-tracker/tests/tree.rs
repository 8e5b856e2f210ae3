//! Laws of a tree under sequences of operations, against a plain set, a roaring bitmap and a flat
//! bitmap.
//!
//! `cargo test -p driftline-dirty-tracker --test tree`
#![cfg(not(any(driftline_loom, driftline_shuttle)))]
#![allow(clippy::unwrap_used, reason = "tests")]

use std::collections::BTreeSet;

use driftline_dirty_tracker::{FrameRun, Gfn, Layout, Slices, Slot, SlotId, Tree};
use proptest::prelude::*;
use roaring::RoaringTreemap;

fn config(cases: u32) -> ProptestConfig {
    let cases = if cfg!(miri) { 2 } else { cases };
    ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(cases) }
}

/// Maximal number of operations and marks of a case; miri takes up to a second for each.
const MOST: usize = if cfg!(miri) { 30 } else { 60 };
const MARKS: usize = if cfg!(miri) { 12 } else { 200 };

/// Two slots that touch, the first of which ends inside a word, and one far away.
const SLOTS: [(u64, u64); 3] = [(0, 4_100), (4_100, 20_000), (1 << 33, 130)];

fn layout() -> Layout {
    let slot = |(id, (base, frames))| Slot { id: SlotId(id), base: Gfn(base), frames };
    Layout::new((0..).zip(SLOTS).map(slot)).unwrap()
}

/// A frame of some slot, occasionally of none.
fn frame() -> impl Strategy<Value = u64> {
    prop_oneof![
        4 => 0..200u64,
        4 => 4_000..4_300u64,
        2 => 0..24_100u64,
        2 => (1u64 << 33)..(1 << 33) + 130,
        1 => 24_100..24_200u64,
    ]
}

#[derive(Debug, Clone)]
enum Op {
    Mark { owned: bool, frame: u64, count: u64 },
    Set(u64),
    Test(u64),
    Next { from: u64, run: bool },
    Drain { owned: bool, frames: bool },
    Slices(usize),
    Look,
    Clear,
}

fn op() -> impl Strategy<Value = Op> {
    let count = prop_oneof![3 => Just(1u64), 2 => 1..200u64, 1 => 1..5_000u64];
    prop_oneof![
        8 => (any::<bool>(), frame(), count)
            .prop_map(|(owned, frame, count)| Op::Mark { owned, frame, count }),
        3 => frame().prop_map(Op::Set),
        2 => frame().prop_map(Op::Test),
        3 => (frame(), any::<bool>()).prop_map(|(from, run)| Op::Next { from, run }),
        2 => (any::<bool>(), any::<bool>()).prop_map(|(owned, frames)| Op::Drain { owned, frames }),
        1 => (1..300usize).prop_map(Op::Slices),
        1 => Just(Op::Look),
        1 => Just(Op::Clear),
    ]
}

fn is_memory(frame: u64) -> bool {
    SLOTS.iter().any(|(base, frames)| (*base..base + frames).contains(&frame))
}

/// Maximal runs within slots.
fn runs(set: &BTreeSet<u64>) -> Vec<FrameRun> {
    let mut runs: Vec<FrameRun> = Vec::new();
    for frame in set {
        match runs.last_mut() {
            Some(last) if last.end().0 == *frame && *frame != 4_100 => last.count += 1,
            _ => runs.push(FrameRun { start: Gfn(*frame), count: 1 }),
        }
    }
    runs
}

proptest! {
    #![proptest_config(config(400))]

    #[test]
    fn every_operation_sequence_matches_a_plain_set(ops in prop::collection::vec(op(), 1..MOST)) {
        let layout = layout();
        let mut tree = Tree::new(&layout).unwrap();
        let mut set: BTreeSet<u64> = BTreeSet::new();
        for op in ops {
            match op {
                Op::Mark { owned, frame, count } => {
                    let run = FrameRun { start: Gfn(frame), count };
                    let done = if owned { tree.mark_mut(&layout, run) } else { tree.mark(&layout, run) };
                    prop_assert_eq!(done.is_ok(), layout.contains(run));
                    if done.is_ok() {
                        set.extend(frame..frame + count);
                    }
                }
                Op::Set(frame) => match tree.cursor(&layout).set(Gfn(frame)) {
                    Ok(new) => prop_assert_eq!(new, set.insert(frame)),
                    Err(_) => prop_assert!(!is_memory(frame)),
                },
                Op::Test(frame) => match tree.cursor(&layout).test(Gfn(frame)) {
                    Ok(there) => prop_assert_eq!(there, set.contains(&frame)),
                    Err(_) => prop_assert!(!is_memory(frame)),
                },
                Op::Next { from, run } => {
                    let mut cursor = tree.cursor(&layout);
                    cursor.seek(Gfn(from));
                    let rest = set.split_off(&from);
                    // Twice: the second call continues where the first ended.
                    if run {
                        let expected: Vec<FrameRun> = runs(&rest).into_iter().take(2).collect();
                        let found: Vec<FrameRun> = (0..2).map_while(|_| cursor.next_run()).collect();
                        prop_assert_eq!(found, expected);
                    } else {
                        let expected: Vec<Gfn> = rest.iter().take(2).map(|f| Gfn(*f)).collect();
                        let found: Vec<Gfn> = (0..2).map_while(|_| cursor.next_frame()).collect();
                        prop_assert_eq!(found, expected);
                    }
                    set.extend(rest);
                }
                Op::Drain { owned, frames: true } => {
                    let mut frames = Vec::new();
                    match owned {
                        true => tree.drain_frames_mut(&layout, &mut frames),
                        false => tree.drain_frames(&layout, &mut frames),
                    }
                    prop_assert!(frames.into_iter().map(|f| f.0).eq(std::mem::take(&mut set)));
                }
                Op::Drain { owned, frames: false } => {
                    let mut found = Vec::new();
                    let count = match owned {
                        true => tree.drain_mut(&layout, &mut found),
                        false => tree.drain(&layout, &mut found),
                    };
                    prop_assert_eq!(count, set.len() as u64);
                    prop_assert_eq!(found, runs(&std::mem::take(&mut set)));
                }
                Op::Slices(words) => {
                    let (mut at, mut found, mut frames) = (Slices::default(), Vec::new(), 0);
                    loop {
                        let slice = tree.drain_slice(&layout, &mut at, words, &mut found);
                        prop_assert!(slice <= 64 * words as u64, "no more than asked for");
                        frames += slice;
                        if at.is_over() {
                            break;
                        }
                    }
                    prop_assert_eq!(frames, set.len() as u64);
                    let found: Vec<u64> =
                        found.iter().flat_map(|r| r.start.0..r.end().0).collect();
                    prop_assert!(found.into_iter().eq(std::mem::take(&mut set)), "ascending");
                }
                Op::Look => {
                    prop_assert_eq!(tree.runs(&layout).collect::<Vec<_>>(), runs(&set));
                    prop_assert!(tree.frames(&layout).map(|f| f.0).eq(set.iter().copied()));
                }
                Op::Clear => {
                    tree.clear();
                    set.clear();
                }
            }
            prop_assert_eq!(tree.check(), Ok(()));
        }
        prop_assert_eq!(tree.runs(&layout).collect::<Vec<_>>(), runs(&set));
    }

    #[test]
    fn drain_equals_roaring_and_flat_bitmaps(marks in prop::collection::vec((0..20_000u64, 1..300u64), 0..MARKS)) {
        let layout = layout();
        let tree = Tree::new(&layout).unwrap();
        let mut roaring = RoaringTreemap::new();
        let mut flat = vec![0u64; 20_000 / 64 + 1];
        for (offset, count) in marks {
            let count = count.min(20_000 - offset);
            tree.mark(&layout, FrameRun { start: Gfn(4_100 + offset), count }).unwrap();
            roaring.insert_range(4_100 + offset..4_100 + offset + count);
            (offset..offset + count).for_each(|o| flat[o as usize / 64] |= 1 << (o % 64));
        }
        let mut frames = Vec::new();
        tree.drain_frames(&layout, &mut frames);
        prop_assert!(frames.iter().map(|f| f.0).eq(roaring.iter()));
        let flat = (0..20_000).filter(|o| flat[*o as usize / 64] >> (o % 64) & 1 == 1);
        prop_assert!(frames.into_iter().map(|f| f.0 - 4_100).eq(flat));
    }
}

/// Inserts behind, at and before the position of a drain in slices.
#[test]
fn mark_during_slices_is_drained_then_or_later() {
    let layout = layout();
    let tree = Tree::new(&layout).unwrap();
    let mark = |frame| tree.mark(&layout, FrameRun { start: Gfn(frame), count: 1 }).unwrap();
    [0, 1_000, 10_000, 20_000].into_iter().for_each(mark);
    let (mut at, mut runs) = (Slices::default(), Vec::new());
    assert_eq!(tree.drain_slice(&layout, &mut at, 2, &mut runs), 2);
    [1, 999, 15_000].into_iter().for_each(mark);
    assert_eq!(tree.drain_slice(&layout, &mut at, 100, &mut runs), 3);
    assert!(at.is_over());
    assert_eq!(tree.drain(&layout, &mut runs), 2, "the marks behind the position");
    let starts: Vec<u64> = runs.iter().map(|r| r.start.0).collect();
    assert_eq!(starts, [0, 1_000, 10_000, 15_000, 20_000, 1, 999]);
}

/// More than four billion frames between marks of one slot.
#[test]
#[cfg_attr(miri, ignore = "a smaller slot shows nothing, and miri backs all 1.6 GB of this one")]
fn marks_beyond_32_bits_apart_are_drained() {
    let frames = 3 << 32;
    let layout = Layout::new([Slot { id: SlotId(0), base: Gfn(7), frames }]).unwrap();
    let mut tree = Tree::new(&layout).unwrap();
    let marks = [0, 5, u64::from(u32::MAX), 1 << 32, (1 << 33) + 77, frames - 2]
        .map(|offset| FrameRun { start: Gfn(7 + offset), count: 1 });
    let expected = [(0, 1), (5, 1), (u64::from(u32::MAX), 2), ((1 << 33) + 77, 1), (frames - 2, 1)]
        .map(|(offset, count)| FrameRun { start: Gfn(7 + offset), count });
    for owned in [false, true] {
        marks.iter().for_each(|run| tree.mark(&layout, *run).unwrap());
        if owned {
            // The only owner of a tree does not use its list of words.
            tree.mark_mut(&layout, marks[0]).unwrap();
        }
        let mut runs = Vec::new();
        match owned {
            true => tree.drain_mut(&layout, &mut runs),
            false => tree.drain(&layout, &mut runs),
        };
        assert_eq!(runs, expected);
    }
    let mut list = Vec::new();
    marks.iter().for_each(|run| tree.mark_mut(&layout, *run).unwrap());
    tree.drain_frames_mut(&layout, &mut list);
    assert!(list.into_iter().eq(marks.iter().map(|m| m.start)));
}

#[test]
#[should_panic(expected = "leaf words of this layout")]
fn layout_of_another_size_panics() {
    let other = Layout::new([Slot { id: SlotId(0), base: Gfn(5000), frames: 100 }]).unwrap();
    Tree::new(&layout()).unwrap().drain(&other, &mut Vec::new());
}
