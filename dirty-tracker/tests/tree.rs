//! Laws of a tree under sequences of operations, against a plain set, a roaring bitmap and a flat
//! bitmap.
//!
//! `cargo test -p driftline-dirty-tracker --test tree`
#![cfg(not(any(driftline_loom, driftline_shuttle)))]
#![allow(clippy::unwrap_used, reason = "tests")]

use std::collections::BTreeSet;

use driftline_dirty_tracker::{FrameRun, Gfn, Layout, Slot, SlotId, Tree};
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
enum TreeStep {
    Mark { owned: bool, frame: u64, count: u64 },
    Contains(u64, u64),
    Drain { owned: bool, frames: bool },
    Look,
    Clear,
}

fn op() -> impl Strategy<Value = TreeStep> {
    let count = prop_oneof![3 => Just(1u64), 2 => 1..200u64, 1 => 1..5_000u64];
    prop_oneof![
        8 => (any::<bool>(), frame(), count)
            .prop_map(|(owned, frame, count)| TreeStep::Mark { owned, frame, count }),
        2 => (frame(), frame()).prop_map(|(one, two)| TreeStep::Contains(one, two)),
        2 => (any::<bool>(), any::<bool>())
            .prop_map(|(owned, frames)| TreeStep::Drain { owned, frames }),
        1 => Just(TreeStep::Look),
        1 => Just(TreeStep::Clear),
    ]
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
        let mut tree = Tree::new(layout.clone()).unwrap();
        let mut set: BTreeSet<u64> = BTreeSet::new();
        for op in ops {
            match op {
                TreeStep::Mark { owned, frame, count } => {
                    let run = FrameRun { start: Gfn(frame), count };
                    let done = if owned { tree.exclusive().mark(run) } else { tree.mark(run) };
                    prop_assert_eq!(done.is_ok(), layout.contains(run));
                    if done.is_ok() {
                        set.extend(frame..frame + count);
                    }
                }
                TreeStep::Contains(one, two) => {
                    let mut cursor = tree.cursor();
                    for frame in [one, two, one] {
                        prop_assert_eq!(cursor.contains(Gfn(frame)), set.contains(&frame));
                        prop_assert_eq!(tree.contains(Gfn(frame)), set.contains(&frame));
                    }
                }
                TreeStep::Drain { owned, frames: true } => {
                    let mut frames: Vec<Gfn> = Vec::new();
                    let count = match owned {
                        true => tree.exclusive().drain_into(&mut frames),
                        false => tree.drain_into(&mut frames),
                    };
                    prop_assert_eq!(count, set.len() as u64);
                    prop_assert!(frames.into_iter().map(|f| f.0).eq(std::mem::take(&mut set)));
                }
                TreeStep::Drain { owned, frames: false } => {
                    let mut found: Vec<FrameRun> = Vec::new();
                    let count = match owned {
                        true => tree.exclusive().drain_into(&mut found),
                        false => tree.drain_into(&mut found),
                    };
                    prop_assert_eq!(count, set.len() as u64);
                    prop_assert_eq!(found, runs(&std::mem::take(&mut set)));
                }
                TreeStep::Look => {
                    prop_assert_eq!(tree.iter().collect::<Vec<_>>(), runs(&set));
                    prop_assert_eq!(tree.is_empty(), set.is_empty());
                }
                TreeStep::Clear => {
                    tree.clear();
                    set.clear();
                }
            }
            prop_assert_eq!(tree.count(), set.len() as u64);
        }
        prop_assert_eq!(tree.iter().collect::<Vec<_>>(), runs(&set));
    }

    #[test]
    fn drain_equals_roaring_and_flat_bitmaps(
        marks in prop::collection::vec((0..20_000u64, 1..300u64), 0..MARKS),
    ) {
        let layout = layout();
        let tree = Tree::new(layout.clone()).unwrap();
        let mut roaring = RoaringTreemap::new();
        let mut flat = vec![0u64; 20_000 / 64 + 1];
        for (offset, count) in marks {
            let count = count.min(20_000 - offset);
            tree.mark(FrameRun { start: Gfn(4_100 + offset), count }).unwrap();
            roaring.insert_range(4_100 + offset..4_100 + offset + count);
            (offset..offset + count).for_each(|o| flat[o as usize / 64] |= 1 << (o % 64));
        }
        let mut frames: Vec<Gfn> = Vec::new();
        tree.drain_into(&mut frames);
        prop_assert!(frames.iter().map(|f| f.0).eq(roaring.iter()));
        let flat = (0..20_000).filter(|o| flat[*o as usize / 64] >> (o % 64) & 1 == 1);
        prop_assert!(frames.into_iter().map(|f| f.0 - 4_100).eq(flat));
    }
}

/// More than four billion frames between marks of one slot.
#[test]
#[cfg_attr(miri, ignore = "a smaller slot shows nothing, and miri backs all 1.6 GB of this one")]
fn marks_beyond_32_bits_apart_are_drained() {
    let frames = 3 << 32;
    let layout = Layout::new([Slot { id: SlotId(0), base: Gfn(7), frames }]).unwrap();
    let mut tree = Tree::new(layout.clone()).unwrap();
    let marks = [0, 5, u64::from(u32::MAX), 1 << 32, (1 << 33) + 77, frames - 2]
        .map(|offset| FrameRun { start: Gfn(7 + offset), count: 1 });
    let expected = [(0, 1), (5, 1), (u64::from(u32::MAX), 2), ((1 << 33) + 77, 1), (frames - 2, 1)]
        .map(|(offset, count)| FrameRun { start: Gfn(7 + offset), count });
    for owned in [false, true] {
        marks.iter().for_each(|run| tree.mark(*run).unwrap());
        if owned {
            // The only owner of a tree does not use its list of words.
            tree.exclusive().mark(marks[0]).unwrap();
        }
        let mut runs: Vec<FrameRun> = Vec::new();
        match owned {
            true => tree.exclusive().drain_into(&mut runs),
            false => tree.drain_into(&mut runs),
        };
        assert_eq!(runs, expected);
    }
    let mut list: Vec<Gfn> = Vec::new();
    marks.iter().for_each(|run| tree.exclusive().mark(*run).unwrap());
    tree.exclusive().drain_into(&mut list);
    assert!(list.into_iter().eq(marks.iter().map(|m| m.start)));
}
