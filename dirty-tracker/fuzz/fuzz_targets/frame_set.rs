//! Runs sequences of operations on a set of frames, against a plain set.
//!
//! `cd dirty-tracker/fuzz && cargo +nightly run --release --bin frame_set -- -max_total_time=20`
#![no_main]

use std::collections::BTreeSet;

use arbitrary::Arbitrary;
use driftline_dirty_tracker::{FrameRun, FrameSet, Gfn};
use libfuzzer_sys::fuzz_target;

#[derive(Arbitrary, Clone, Copy, Debug)]
struct SetRun {
    start: u8,
    count: u8,
}

impl SetRun {
    fn frames(self) -> std::ops::Range<u64> {
        self.start.into()..u64::from(self.start) + u64::from(self.count)
    }
}

impl From<SetRun> for FrameRun {
    fn from(run: SetRun) -> Self {
        Self { start: Gfn(run.start.into()), count: run.count.into() }
    }
}

#[derive(Arbitrary, Debug)]
enum FuzzSetOp {
    Insert(SetRun),
    InsertAll(Vec<SetRun>),
    Remove(SetRun),
    TakeFirst { max: u8 },
    Query(SetRun),
}

fuzz_target!(|ops: Vec<FuzzSetOp>| {
    let (mut set, mut model) = (FrameSet::new(), BTreeSet::<u64>::new());
    for op in ops {
        let before = model.len() as u64;
        match op {
            FuzzSetOp::Insert(run) => {
                model.extend(run.frames());
                assert_eq!(set.insert(run.into()), model.len() as u64 - before);
            }
            FuzzSetOp::InsertAll(runs) => {
                model.extend(runs.iter().flat_map(|run| run.frames()));
                let runs: Vec<FrameRun> = runs.into_iter().map(Into::into).collect();
                assert_eq!(set.insert_all(&runs), model.len() as u64 - before);
            }
            FuzzSetOp::Remove(run) => {
                model.retain(|frame| !run.frames().contains(frame));
                assert_eq!(set.remove(run.into()), before - model.len() as u64);
            }
            FuzzSetOp::TakeFirst { max } => match set.take_first(max.into()) {
                None => assert!(model.is_empty()),
                Some(run) => {
                    assert!((1..=u64::from(max).max(1)).contains(&run.count));
                    assert_eq!(model.first(), Some(&run.start.0));
                    assert!(run.frames().all(|gfn| model.remove(&gfn.0)));
                }
            },
            FuzzSetOp::Query(run) => {
                let all = run.frames().all(|frame| model.contains(&frame));
                assert_eq!(set.contains_run(run.into()), all);
                let inside = run.frames().filter(|frame| model.contains(frame));
                let parts = set.within(run.into()).flat_map(FrameRun::frames).map(|gfn| gfn.0);
                assert!(parts.eq(inside));
                let outside = run.frames().filter(|frame| !model.contains(frame));
                let gaps = set.gaps(run.into()).flat_map(FrameRun::frames).map(|gfn| gfn.0);
                assert!(gaps.eq(outside));
            }
        }
        assert!(set.as_slice().windows(2).all(|pair| pair[0].end() < pair[1].start));
        assert!(set.iter().flat_map(FrameRun::frames).map(|gfn| gfn.0).eq(model.iter().copied()));
        assert_eq!(set.frames(), model.len() as u64);
    }
});
