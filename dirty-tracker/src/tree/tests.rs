//! Every kernel's drains against plain sets, with a reach so small that trees get past it.

use std::collections::BTreeSet;

use super::*;
use crate::{Slot, SlotId};

/// A generator whose numbers are the same in every run (SplitMix64, Steele and others, 2014).
struct Random(u64);

impl Random {
    fn below(&mut self, bound: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        ((z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb) >> 20) % bound
    }
}

fn layout() -> Layout {
    let slot = |id, base, frames| Slot { id: SlotId(id), base: Gfn(base), frames };
    // Under miri few words: each check looks at them all. Enough for reach and list to be passed.
    let (large, last) = if cfg!(miri) { (20_001, 300) } else { (300_001, 70_000) };
    Layout::new([slot(0, 5, 1000), slot(1, 1005, large), slot(2, 1 << 39, last)]).unwrap()
}

/// Runs at random places: `count` of them, up to `longest` frames.
fn runs(layout: &Layout, random: &mut Random, count: u64, longest: u64) -> Vec<FrameRun> {
    let slots: Vec<&Slot> = layout.slots().collect();
    let mut run = || {
        let slot = slots[random.below(3) as usize];
        let offset = random.below(slot.frames);
        let count = (1 + random.below(longest)).min(slot.frames - offset);
        FrameRun { start: Gfn(slot.base.0 + offset), count }
    };
    (0..count).map(|_| run()).collect()
}

/// The maximal runs of a set, none over the end of a slot.
fn joined(layout: &Layout, set: &BTreeSet<Gfn>) -> Vec<FrameRun> {
    let mut runs: Vec<FrameRun> = Vec::new();
    for gfn in set {
        let begins_slot = layout.slots().any(|s| s.base == *gfn);
        match runs.last_mut() {
            Some(last) if last.end() == *gfn && !begins_slot => last.count += 1,
            _ => runs.push(FrameRun { start: *gfn, count: 1 }),
        }
    }
    runs
}

#[test]
fn every_kernel_drains_what_was_marked_sparse_or_dense_listed_or_walked() {
    let layout = layout();
    let mut random = Random(1);
    let shapes: &[(u64, u64)] = if cfg!(miri) {
        &[(3, 1), (20, 70)]
    } else {
        &[(1, 1), (30, 1), (300, 3), (5_000, 1), (60_000, 1), (400_000, 1), (20, 9_000), (900, 130)]
    };
    for kernel in Choice::all() {
        let mut tree = Tree::new(&layout);
        tree.kernel = kernel;
        for &(count, longest) in shapes {
            for way in 0..6 {
                let marks = runs(&layout, &mut random, count, longest);
                let set: BTreeSet<Gfn> = marks.iter().flat_map(|r| r.frames()).collect();
                for mark in marks {
                    match way < 3 {
                        true => tree.mark(&layout, mark).unwrap(),
                        false => tree.mark_mut(&layout, mark).unwrap(),
                    }
                }
                assert_eq!(tree.check(), Ok(()), "{kernel:?}");
                let (mut found, mut frames) = (Vec::new(), Vec::new());
                let count = match way % 3 {
                    0 => tree.drain(&layout, &mut found),
                    1 => tree.drain_mut(&layout, &mut found),
                    _ if way == 2 => {
                        tree.drain_frames(&layout, &mut frames);
                        frames.len() as u64
                    }
                    _ => {
                        tree.drain_frames_mut(&layout, &mut frames);
                        frames.len() as u64
                    }
                };
                assert_eq!(count, set.len() as u64, "{kernel:?} way {way}");
                match way % 3 {
                    2 => assert!(frames.into_iter().eq(set), "{kernel:?} way {way}"),
                    _ => assert!(found == joined(&layout, &set), "{kernel:?} way {way}"),
                }
                assert_eq!(tree.drain(&layout, &mut Vec::new()), 0, "{kernel:?} way {way}");
                assert_eq!(tree.runs(&layout).next(), None, "{kernel:?} way {way}");
                assert_eq!(tree.count(), 0, "{kernel:?} way {way}");
            }
        }
    }
}

#[test]
fn what_lists_leave_behind_is_bounded_and_swept_by_a_walk() {
    let layout = layout();
    let tree = Tree::new(&layout);
    let summaries = |tree: &Tree| {
        let above = tree.levels[1].0;
        tree.words[above..].iter().map(|w| u64::from(w.load(SeqCst).count_ones())).sum::<u64>()
    };
    let mut most = 0;
    for round in 0..if cfg!(miri) { 60 } else { 20_000 } {
        let start = Gfn(1005 + round * 64 % 300_000);
        tree.mark(&layout, FrameRun { start, count: 1 }).unwrap();
        assert_eq!(tree.drain(&layout, &mut Vec::new()), 1);
        most = most.max(summaries(&tree));
    }
    assert!(most > 50, "lists leave summaries set: {most}");
    // More than a list holds: a walk, which leaves nothing.
    let many = if cfg!(miri) { 300 } else { 1000 };
    (0..many).for_each(|i| {
        let start = Gfn(1005 + i * 64);
        tree.mark(&layout, FrameRun { start, count: 1 }).unwrap();
    });
    assert_eq!(tree.drain(&layout, &mut Vec::new()), many);
    assert_eq!(summaries(&tree), 0);
}
