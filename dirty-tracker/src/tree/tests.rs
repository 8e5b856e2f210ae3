//! The drains of every SIMD level against plain sets, with distances so small that trees exceed
//! them.

use std::collections::BTreeSet;

use super::simd::{self, SimdLevel};
use super::sink::{FrameWriter, Stages, WordSink};
use super::{Tree, word_list, words};
use crate::sync::Ordering::SeqCst;
use crate::{FrameRun, Gfn, Layout, Slot, SlotId};

/// A generator with the same numbers in every run (SplitMix64, Steele and others, 2014).
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
    // Few words under miri, since each check loads them all. Enough to exceed segment and list.
    let (large, last) = if cfg!(miri) { (20_001, 300) } else { (300_001, 70_000) };
    Layout::new([slot(0, 5, 1000), slot(1, 1005, large), slot(2, 1 << 39, last)]).unwrap()
}

/// `count` runs at random positions, of up to `longest` frames.
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

/// The maximal runs of a set; none crosses the end of a slot.
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
fn every_simd_level_drains_exactly_the_marked_frames() {
    let layout = layout();
    let mut random = Random(1);
    let shapes: &[(u64, u64)] = if cfg!(miri) {
        &[(3, 1), (20, 70)]
    } else {
        &[(1, 1), (30, 1), (300, 3), (5_000, 1), (60_000, 1), (400_000, 1), (20, 9_000), (900, 130)]
    };
    for simd in SimdLevel::all() {
        let mut tree = Tree::new(layout.clone()).unwrap();
        tree.simd = simd;
        for &(count, longest) in shapes {
            for way in 0..6 {
                let marks = runs(&layout, &mut random, count, longest);
                let set: BTreeSet<Gfn> = marks.iter().flat_map(|r| r.frames()).collect();
                for mark in marks {
                    match way < 3 {
                        true => tree.mark(mark).unwrap(),
                        false => tree.exclusive().mark(mark).unwrap(),
                    }
                }
                assert_eq!(tree.missing_summary(), None, "{simd:?}");
                let (mut found, mut frames) = (Vec::<FrameRun>::new(), Vec::<Gfn>::new());
                let count = match way {
                    0 => tree.drain_into(&mut found),
                    1 => tree.exclusive().drain_into(&mut found),
                    2 | 4 => tree.drain_into(&mut frames),
                    3 => tree.drain_into(&mut found),
                    _ => tree.exclusive().drain_into(&mut frames),
                };
                assert_eq!(count, set.len() as u64, "{simd:?} way {way}");
                match way {
                    2 | 4 | 5 => assert!(frames.into_iter().eq(set), "{simd:?} way {way}"),
                    _ => assert!(found == joined(&layout, &set), "{simd:?} way {way}"),
                }
                assert_eq!(tree.drain().len(), 0, "{simd:?} way {way}");
                assert_eq!(tree.iter().next(), None, "{simd:?} way {way}");
                assert_eq!(tree.count(), 0, "{simd:?} way {way}");
            }
        }
    }
}

#[test]
fn spurious_summaries_of_lists_are_bounded() {
    // Far more leaf words than lists may leave behind.
    let frames = 4 * 64 * word_list::MAX_SPURIOUS as u64;
    let layout = Layout::new([Slot { id: SlotId(0), base: Gfn(0), frames }]).unwrap();
    let tree = Tree::new(layout.clone()).unwrap();
    let above = tree.levels[1];
    let summaries = |tree: &Tree| {
        let words = &tree.words[above.0..above.0 + above.1];
        words.iter().map(|w| w.load(SeqCst).count_ones() as usize).sum::<usize>()
    };
    let mark = |word: u64| {
        tree.mark(FrameRun { start: Gfn(word * 64), count: 1 }).unwrap();
    };
    let rounds = if cfg!(miri) { 10 } else { 300 };
    let mut most = 0;
    for round in 0..rounds {
        (0..200).for_each(|word| mark(round * 200 + word));
        assert_eq!(tree.drain_into(&mut Vec::<FrameRun>::new()), 200);
        most = most.max(summaries(&tree));
    }
    assert!(most >= 200, "lists do not leave summaries set: {most}");
    assert!(most <= word_list::MAX_SPURIOUS + word_list::CAPACITY, "no walk in between: {most}");
    // More words than a list holds: a walk, which leaves no summaries.
    let many = if cfg!(miri) { 300 } else { 1000 };
    (0..many).for_each(mark);
    assert_eq!(tree.drain_into(&mut Vec::<FrameRun>::new()), many);
    assert_eq!(summaries(&tree), 0);
}

/// Leaf words that are all full, at every index.
struct FullWords;

impl words::Words for FullWords {
    fn take(&mut self, _: usize) -> u64 {
        u64::MAX
    }

    fn prefetch(&self, _: impl simd::Simd, _: usize) {}
}

struct HighestWords<'a>(FrameWriter<'a>);

impl simd::SimdJob for HighestWords<'_> {
    #[inline(always)]
    fn run<K: simd::Simd>(mut self, simd: K) {
        let offsets: Vec<u32> = (u32::MAX - 20..=u32::MAX).collect();
        self.0.take(simd, &mut FullWords, 0, &offsets);
        self.0.finish(simd);
    }
}

#[test]
fn full_words_at_the_reach_limit_are_complete() {
    let slot = Slot { id: SlotId(0), base: Gfn(3), frames: 1 << 39 };
    let layout = Layout::new([slot]).unwrap();
    for simd in SimdLevel::all() {
        let (mut list, mut stages) = (Vec::new(), Stages::new());
        simd.run(HighestWords(FrameWriter::new(&layout, &mut list, &mut stages)));
        let first = 3 + u64::from(u32::MAX - 20) * 64;
        assert!(list.into_iter().eq((first..first + 21 * 64).map(Gfn)), "{simd:?}");
    }
}
