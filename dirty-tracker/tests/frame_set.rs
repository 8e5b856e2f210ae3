//! Laws of [`FrameSet`], each against a plain set of frame numbers.
//!
//! `cargo test -p driftline-dirty-tracker --test frame_set`
#![cfg(not(any(driftline_loom, driftline_shuttle)))]
#![allow(clippy::unwrap_used, reason = "tests")]

use std::collections::BTreeSet;

use driftline_dirty_tracker::{FrameRun, FrameSet, Gfn};
use proptest::prelude::*;

/// Upper bound of all frames of a test; small, so that runs meet, nest, touch and interleave.
const FRAMES: u64 = 160;

/// Maximal number of operations of a case; miri takes a second for each.
const MOST: usize = if cfg!(miri) { 12 } else { 60 };

type PlainSet = BTreeSet<u64>;

fn config() -> ProptestConfig {
    let cases = if cfg!(miri) { 5 } else { 500 };
    ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(cases) }
}

fn run() -> impl Strategy<Value = FrameRun> {
    let count = prop_oneof![4 => 0..6u64, 2 => 6..40u64, 1 => 40..FRAMES];
    (0..FRAMES, count)
        .prop_map(|(start, count)| FrameRun { start: Gfn(start), count: count.min(FRAMES - start) })
}

fn runs() -> impl Strategy<Value = Vec<FrameRun>> {
    prop::collection::vec(run(), 0..if cfg!(miri) { 8 } else { 40 })
}

/// A set after insertions, removals and removals from its front.
fn set() -> impl Strategy<Value = FrameSet> {
    (runs(), prop::collection::vec(run(), 0..8), 0..5u64).prop_map(|(add, remove, take)| {
        let mut set: FrameSet = add.into_iter().collect();
        for run in remove {
            set.remove(run);
        }
        for max in 0..take {
            set.take_first(max * 3);
        }
        set
    })
}

#[derive(Clone, Debug)]
enum SetOp {
    Insert(FrameRun),
    InsertAll(Vec<FrameRun>),
    Remove(FrameRun),
    TakeFirst(u64),
    Clear,
}

fn op() -> impl Strategy<Value = SetOp> {
    prop_oneof![
        6 => run().prop_map(SetOp::Insert),
        2 => runs().prop_map(SetOp::InsertAll),
        2 => runs().prop_map(|mut runs| { runs.sort(); SetOp::InsertAll(runs) }),
        6 => run().prop_map(SetOp::Remove),
        4 => (0..50u64).prop_map(SetOp::TakeFirst),
        1 => Just(SetOp::Clear),
    ]
}

fn numbers(run: FrameRun) -> impl Iterator<Item = u64> {
    run.frames().map(|gfn| gfn.0)
}

fn model(runs: impl IntoIterator<Item = FrameRun>) -> PlainSet {
    runs.into_iter().flat_map(numbers).collect()
}

/// The maximal runs of a plain set.
fn runs_of(model: &PlainSet) -> Vec<FrameRun> {
    let mut runs: Vec<FrameRun> = Vec::new();
    for &frame in model {
        match runs.last_mut().filter(|r| r.end().0 == frame) {
            Some(last) => last.count += 1,
            None => runs.push(FrameRun { start: Gfn(frame), count: 1 }),
        }
    }
    runs
}

fn inserted(set: &FrameSet, run: FrameRun) -> FrameSet {
    let mut set = set.clone();
    set.insert(run);
    set
}

fn removed(set: &FrameSet, run: FrameRun) -> FrameSet {
    let mut set = set.clone();
    set.remove(run);
    set
}

fn union(a: &FrameSet, b: &FrameSet) -> FrameSet {
    let mut set = a.clone();
    set.insert_all(b.as_slice());
    set
}

fn complement(set: &FrameSet, within: FrameRun) -> FrameSet {
    set.gaps(within).collect()
}

const ALL: FrameRun = FrameRun { start: Gfn(0), count: FRAMES };

proptest! {
    #![proptest_config(config())]

    #[test]
    fn every_operation_matches_a_plain_set(
        ops in prop::collection::vec(op(), 0..MOST),
    ) {
        let (mut set, mut plain) = (FrameSet::new(), PlainSet::new());
        for op in ops {
            let before = plain.len() as u64;
            match &op {
                SetOp::Insert(run) => {
                    plain.extend(numbers(*run));
                    prop_assert_eq!(set.insert(*run), plain.len() as u64 - before);
                }
                SetOp::InsertAll(runs) => {
                    plain.extend(runs.iter().copied().flat_map(numbers));
                    prop_assert_eq!(set.insert_all(runs), plain.len() as u64 - before);
                }
                SetOp::Remove(run) => {
                    plain.retain(|f| !(run.start.0..run.end().0).contains(f));
                    prop_assert_eq!(set.remove(*run), before - plain.len() as u64);
                }
                SetOp::TakeFirst(max) => {
                    let first = runs_of(&plain).first().copied();
                    let part = first.and_then(|r| r.chunks(*max).next());
                    prop_assert_eq!(set.take_first(*max), part);
                    part.into_iter().flat_map(numbers).for_each(|f| assert!(plain.remove(&f)));
                }
                SetOp::Clear => {
                    plain.clear();
                    set.clear();
                }
            }
            let runs = runs_of(&plain);
            prop_assert_eq!(set.as_slice(), &runs[..], "after {:?}", op);
            prop_assert_eq!(set.frames(), plain.len() as u64);
            prop_assert_eq!((set.len(), set.is_empty()), (runs.len(), runs.is_empty()));
            prop_assert_eq!(set.first(), runs.first().copied());
            prop_assert_eq!((&set).into_iter().collect::<Vec<_>>(), runs);
        }
    }

    #[test]
    fn queries_match_a_plain_set(set in set(), run in run()) {
        let plain = model(&set);
        for frame in 0..=FRAMES {
            prop_assert_eq!(set.contains(Gfn(frame)), plain.contains(&frame));
        }
        let queried = model([run]);
        prop_assert_eq!(set.contains_run(run), queried.is_subset(&plain));
        prop_assert_eq!(set.intersects(run), !queried.is_disjoint(&plain));
        prop_assert_eq!(set.within(run).collect::<Vec<_>>(), runs_of(&(&queried & &plain)));
        prop_assert_eq!(set.gaps(run).collect::<Vec<_>>(), runs_of(&(&queried - &plain)));
    }

    #[test]
    fn insertion_commutes(set in set(), a in run(), b in run()) {
        prop_assert_eq!(inserted(&inserted(&set, a), b), inserted(&inserted(&set, b), a));
    }

    #[test]
    fn insertion_and_removal_are_idempotent(set in set(), run in run()) {
        let mut with = inserted(&set, run);
        prop_assert!(with.contains_run(run));
        prop_assert_eq!(with.insert(run), 0);
        prop_assert_eq!(&with, &inserted(&set, run));
        let mut without = removed(&set, run);
        prop_assert!(!without.intersects(run));
        prop_assert_eq!(without.remove(run), 0);
        prop_assert_eq!(without, removed(&set, run));
    }

    #[test]
    fn inserting_then_removing_is_removing(set in set(), run in run()) {
        prop_assert_eq!(removed(&inserted(&set, run), run), removed(&set, run));
        prop_assert_eq!(inserted(&removed(&set, run), run), inserted(&set, run));
    }

    #[test]
    fn inserting_a_list_equals_inserting_its_runs(set in set(), list in runs()) {
        let (mut together, mut one_by_one) = (set.clone(), set);
        let added: u64 = list.iter().map(|run| one_by_one.insert(*run)).sum();
        prop_assert_eq!(together.insert_all(&list), added);
        prop_assert_eq!(&together, &one_by_one);
        prop_assert_eq!(together.frames(), one_by_one.frames());
        together.extend(list);
        prop_assert_eq!(together, one_by_one);
    }

    #[test]
    fn union_is_commutative_associative_and_idempotent(a in set(), b in set(), c in set()) {
        prop_assert_eq!(union(&a, &b), union(&b, &a));
        prop_assert_eq!(union(&union(&a, &b), &c), union(&a, &union(&b, &c)));
        prop_assert_eq!(union(&a, &a), a.clone());
        prop_assert_eq!(union(&a, &FrameSet::new()), a);
    }

    #[test]
    fn double_complement_is_the_intersection(set in set(), run in run()) {
        let twice = complement(&complement(&set, run), run);
        prop_assert_eq!(&twice, &set.within(run).collect());
        prop_assert_eq!(complement(&complement(&set, ALL), ALL), set);
    }

    #[test]
    fn intersection_and_gaps_make_up_the_run(set in set(), run in run()) {
        let inside: FrameSet = set.within(run).collect();
        let gaps = complement(&set, run);
        prop_assert!(inside.iter().all(|r| !gaps.intersects(r)));
        prop_assert_eq!(inside.frames() + gaps.frames(), run.count);
        prop_assert_eq!(union(&inside, &gaps), [run].into_iter().collect());
    }

    #[test]
    fn removal_is_intersection_with_the_complement(set in set(), run in run()) {
        let outside = complement(&[run].into_iter().collect(), ALL);
        let remaining: FrameSet =
            outside.iter().flat_map(|r| set.within(r).collect::<Vec<_>>()).collect();
        prop_assert_eq!(removed(&set, run), remaining);
    }

    #[test]
    fn take_first_returns_each_frame_once_ascending(set in set(), max in 0..50u64) {
        let (mut left, mut taken) = (set.clone(), Vec::new());
        while let Some(run) = left.take_first(max) {
            prop_assert!((1..=max.max(1)).contains(&run.count));
            taken.extend(numbers(run));
            prop_assert_eq!(left.frames() + taken.len() as u64, set.frames());
        }
        prop_assert!(left.is_empty() && left == FrameSet::new());
        prop_assert!(taken.is_sorted());
        prop_assert_eq!(taken, model(&set).into_iter().collect::<Vec<_>>());
    }

    #[test]
    fn equal_frames_make_equal_sets(set in set()) {
        let mut again = FrameSet::with_capacity(3);
        for frame in model(&set).into_iter().rev() {
            prop_assert_eq!(again.insert(FrameRun { start: Gfn(frame), count: 1 }), 1);
        }
        prop_assert_eq!(format!("{again:?}"), format!("{set:?}"));
        prop_assert_eq!(again, set);
    }

    /// The end follows [`FrameRun::end`]. Frames at the upper end of the numbers behave like the
    /// others.
    #[test]
    fn run_past_the_last_frame_ends_there(
        back in 0..20u64, count in 0..40u64, cut in 0..20u64, more in any::<u64>(),
    ) {
        let run = FrameRun { start: Gfn(u64::MAX - back), count };
        let inside = count.min(back);
        let mut set = FrameSet::new();
        prop_assert_eq!(set.insert_all(&[run, run]), inside);
        prop_assert_eq!(set.insert(run), 0);
        prop_assert!(set.contains_run(run) && set.gaps(run).next().is_none());
        prop_assert_eq!(set.intersects(run), inside > 0);
        let all = FrameRun { start: Gfn(0), count: u64::MAX };
        prop_assert_eq!(set.gaps(all).map(|r| r.count).sum::<u64>(), u64::MAX - inside);
        let tail = FrameRun { start: Gfn(u64::MAX - cut), count: u64::MAX - more };
        let shared = (run.end().min(tail.end()).0).saturating_sub(run.start.max(tail.start).0);
        prop_assert_eq!(set.remove(tail), shared);
        prop_assert_eq!(set.insert(all), u64::MAX - (inside - shared));
        prop_assert_eq!(set.as_slice(), [all]);
    }
}

/// Unordered lists are sorted in one of two ways, by their length and by their highest frame.
#[test]
fn long_lists_and_high_frames_insert_equally() {
    let run = |start, count| FrameRun { start: Gfn(start), count };
    let scattered = |n: u64, by: u64| -> Vec<FrameRun> {
        (0..n).map(|i| run((i * 7919 % n) * by, 1 + i % 9)).collect()
    };
    for list in
        [scattered(4096, 6), scattered(4097, 6), scattered(100, 1 << 57), scattered(64, 1 << 45)]
    {
        let mut together = FrameSet::new();
        together.insert(run(50, 100));
        let mut one_by_one = together.clone();
        let added: u64 = list.iter().map(|run| one_by_one.insert(*run)).sum();
        assert_eq!(together.insert_all(&list), added);
        assert_eq!(together, one_by_one, "{} runs", list.len());
    }
}
