//! Runs sequences of operations against plain sets of frames: on a tracker with two subscribers,
//! and on a single tree.
//!
//! Long: `cargo +nightly fuzz run operations` in `dirty-tracker/`. Short, without cargo-fuzz:
//! `cd dirty-tracker/fuzz && cargo +nightly run --release --bin operations -- -max_total_time=20`
#![no_main]

use std::collections::BTreeSet;
use std::sync::Arc;

use arbitrary::Arbitrary;
use driftline_dirty_tracker::{
    DirtySet, FrameRun, Gfn, Layout, OutOfSlot, Slot, SlotId, Subscription, Tracker, Tree,
};
use libfuzzer_sys::fuzz_target;

/// A tree of three levels: slots that touch, a slot that ends inside a word, and one under a second
/// summary.
const LARGE: &[(u32, u64, u64)] = &[(3, 0, 100), (1, 100, 64), (0, 4096, 9001), (9, 0xff00, 1)];
/// A tree of one word.
const SMALL: &[(u32, u64, u64)] = &[(0, 7, 50)];

type FrameModel = BTreeSet<u64>;

#[derive(Arbitrary, Debug)]
struct TrackerInput {
    small: bool,
    tracker: Vec<TrackerOp>,
    tree: Vec<TreeOp>,
}

#[derive(Arbitrary, Clone, Copy, Debug)]
struct GuestRun {
    start: u16,
    count: u16,
}

#[derive(Arbitrary, Debug)]
struct Bitmap {
    slot: u8,
    words: Vec<u64>,
}

#[derive(Arbitrary, Debug)]
enum TrackerOp {
    Mark(GuestRun),
    Offset { slot: u8, offset: u16 },
    Bitmap(Bitmap),
    All,
    Drain { second: bool },
    Relayout { cut: u16 },
    Finish { which: u8, commit: bool },
}

#[derive(Arbitrary, Debug)]
enum TreeOp {
    Mark(GuestRun),
    MarkExclusive(GuestRun),
    Absorb(Bitmap),
    Contains(Vec<u16>),
    Drain(DrainKind),
}

#[derive(Arbitrary, Debug)]
enum DrainKind {
    Runs,
    RunsExclusive,
    Frames,
    FramesExclusive,
    Clear,
}

/// The slots, with plain arithmetic as the model.
struct GuestModel(Vec<Slot>);

impl GuestModel {
    fn new(small: bool) -> Self {
        let slot = |&(id, base, frames)| Slot { id: SlotId(id), base: Gfn(base), frames };
        Self(if small { SMALL } else { LARGE }.iter().map(slot).collect())
    }

    /// Ends the guest's memory at `cut`. Its slots get other numbers.
    fn cut(&self, cut: u64) -> Option<Self> {
        let shorter = |slot: &Slot| {
            let frames = slot.frames.min(cut.saturating_sub(slot.base.0));
            (frames > 0).then(|| Slot { id: SlotId(slot.id.0 ^ (cut as u32 & 2)), frames, ..*slot })
        };
        let slots: Vec<Slot> = self.0.iter().filter_map(shorter).collect();
        (!slots.is_empty()).then_some(Self(slots))
    }

    fn layout(&self) -> Layout {
        Layout::new(self.0.iter().copied()).expect("a layout")
    }

    fn slot_of(&self, frame: u64) -> Option<&Slot> {
        self.0.iter().find(|s| (s.base.0..s.run().end().0).contains(&frame))
    }

    fn slot(&self, id: u8) -> Option<&Slot> {
        self.0.iter().find(|s| s.id.0 == u32::from(id))
    }

    /// Returns the run, and its frames if they belong to this guest.
    fn run(&self, run: GuestRun) -> (FrameRun, Option<std::ops::Range<u64>>) {
        let (start, count) = (u64::from(run.start), u64::from(run.count));
        let inside = self.slot_of(start).is_some_and(|s| start + count <= s.run().end().0);
        let frames = (inside || count == 0).then_some(start..start + count);
        (FrameRun { start: Gfn(start), count }, frames)
    }

    /// Returns a bitmap's slot and bits, if it has no bits for other frames.
    fn bits(&self, bitmap: &Bitmap) -> Option<(&Slot, Vec<u64>)> {
        let slot = self.slot(bitmap.slot)?;
        let bits = bits(&bitmap.words);
        let inside = bits.iter().all(|bit| *bit < slot.frames);
        inside.then(|| (slot, bits.into_iter().map(|bit| slot.base.0 + bit).collect()))
    }

    /// Returns the maximal runs within slots.
    fn runs(&self, model: &FrameModel) -> Vec<FrameRun> {
        let mut runs: Vec<FrameRun> = Vec::new();
        for &frame in model {
            match runs.last_mut() {
                Some(last) if last.end().0 == frame && !self.is_first(frame) => last.count += 1,
                _ => runs.push(FrameRun { start: Gfn(frame), count: 1 }),
            }
        }
        runs
    }

    fn is_first(&self, frame: u64) -> bool {
        self.0.iter().any(|s| s.base.0 == frame)
    }
}

fn bits(words: &[u64]) -> Vec<u64> {
    let set = |(w, bits): (u64, &u64)| {
        let bits = *bits;
        (0..64).filter(move |b| bits >> b & 1 == 1).map(move |b| 64 * w + b)
    };
    (0..).zip(words).flat_map(set).collect()
}

fn frames(runs: impl IntoIterator<Item = FrameRun>) -> Vec<u64> {
    runs.into_iter().flat_map(|r| r.start.0..r.end().0).collect()
}

/// A subscriber and the frames that it has not drained.
struct SubscriberModel {
    subscription: Subscription,
    model: FrameModel,
}

impl SubscriberModel {
    /// I1, and no frame too many or too few.
    fn check(&self, guest: &GuestModel) {
        assert_eq!(self.subscription.count(), self.model.len() as u64);
        assert_eq!(self.subscription.is_empty(), self.model.is_empty());
        for slot in &guest.0 {
            let bitmap = self.subscription.bitmap(slot.id).expect("a slot");
            let expected = bits(&bitmap).into_iter().map(|bit| slot.base.0 + bit);
            assert!(expected.eq(self.model.range(slot.base.0..slot.run().end().0).copied()));
        }
    }
}

/// A tracker with two subscribers, and the dirty sets that they have not finished.
struct TrackerModel<'g> {
    whole: &'g GuestModel,
    /// The part of `whole` that is the current layout.
    guest: GuestModel,
    tracker: Arc<Tracker>,
    subscribers: [SubscriberModel; 2],
    dirty_sets: Vec<(usize, DirtySet)>,
}

impl<'g> TrackerModel<'g> {
    fn new(whole: &'g GuestModel) -> Self {
        let guest = whole.cut(u64::MAX).expect("slots");
        let tracker = Arc::new(Tracker::new(guest.layout()));
        let subscribers = ["one", "two"].map(|name| SubscriberModel {
            subscription: tracker.subscribe(name).expect("address space for a small tree"),
            model: FrameModel::new(),
        });
        Self { whole, guest, tracker, subscribers, dirty_sets: Vec::new() }
    }

    fn run(&mut self, op: TrackerOp) {
        let marked = self.perform(op);
        for subscriber in &mut self.subscribers {
            subscriber.model.extend(&marked);
            subscriber.check(&self.guest);
        }
    }

    /// Returns the frames that `op` marks.
    fn perform(&mut self, op: TrackerOp) -> Vec<u64> {
        let Self { guest, tracker, .. } = self;
        match op {
            TrackerOp::Mark(run) => {
                let (run, inside) = guest.run(run);
                assert_eq!(tracker.mark(run).is_ok(), inside.is_some());
                return inside.into_iter().flatten().collect();
            }
            TrackerOp::Offset { slot, offset } => {
                let offset = u64::from(offset);
                let inside = guest.slot(slot).filter(|s| offset < s.frames);
                let done = tracker.mark_offset(SlotId(slot.into()), offset);
                assert_eq!(done.is_ok(), inside.is_some());
                return inside.map(|s| s.base.0 + offset).into_iter().collect();
            }
            TrackerOp::Bitmap(bitmap) => {
                let inside = guest.bits(&bitmap).map(|(_, bits)| bits);
                let done = tracker.absorb_bitmap(SlotId(bitmap.slot.into()), &bitmap.words);
                assert_eq!(done.ok(), inside.as_ref().map(|bits| bits.len() as u64));
                return inside.into_iter().flatten().collect();
            }
            TrackerOp::All => {
                tracker.mark_all();
                return frames(guest.0.iter().map(|slot| slot.run()));
            }
            TrackerOp::Drain { second } => self.drain(usize::from(second)),
            TrackerOp::Relayout { cut } => self.relayout(cut.into()),
            TrackerOp::Finish { which, commit } => self.finish(which.into(), commit),
        }
        Vec::new()
    }

    fn drain(&mut self, which: usize) {
        let SubscriberModel { subscription, model } = &mut self.subscribers[which];
        let dirty = subscription.drain();
        assert_eq!(dirty.frames(), model.len() as u64);
        assert_eq!(dirty.runs().collect::<Vec<_>>(), self.guest.runs(&std::mem::take(model)));
        self.dirty_sets.push((which, dirty));
    }

    fn relayout(&mut self, cut: u64) {
        let Some(other) = self.whole.cut(cut) else { return };
        self.tracker.relayout(other.layout()).expect("address space for small trees");
        self.guest = other;
        for SubscriberModel { model, .. } in &mut self.subscribers {
            model.retain(|frame| self.guest.slot_of(*frame).is_some());
        }
    }

    /// Commits a dirty set, or gives it back, if there is one.
    fn finish(&mut self, which: usize, commit: bool) {
        if self.dirty_sets.is_empty() {
            return;
        }
        let (owner, dirty) = self.dirty_sets.swap_remove(which % self.dirty_sets.len());
        if commit {
            dirty.commit();
            return;
        }
        let exists = |frame: &u64| self.guest.slot_of(*frame).is_some();
        let given_back = frames(dirty.runs()).into_iter().filter(exists);
        self.subscribers[owner].model.extend(given_back);
        drop(dirty);
    }
}

fn run_tracker(whole: &GuestModel, ops: Vec<TrackerOp>) {
    let mut model = TrackerModel::new(whole);
    ops.into_iter().for_each(|op| model.run(op));
}

/// A tree and its expected frames.
struct TreeModel<'g> {
    guest: &'g GuestModel,
    tree: Tree,
    model: FrameModel,
}

impl TreeModel<'_> {
    fn run(&mut self, op: TreeOp) {
        let Self { guest, tree, model } = self;
        match op {
            TreeOp::Mark(run) => mark(guest, run, model, |run| tree.mark(run)),
            TreeOp::MarkExclusive(run) => {
                mark(guest, run, model, |run| tree.exclusive().mark(run));
            }
            TreeOp::Absorb(bitmap) => {
                let done = tree.absorb_bitmap(SlotId(bitmap.slot.into()), &bitmap.words);
                match guest.bits(&bitmap) {
                    None => assert!(done.is_err()),
                    Some((_, bits)) => {
                        assert_eq!(done, Ok(bits.len() as u64));
                        model.extend(bits);
                    }
                }
            }
            TreeOp::Contains(frames) => {
                let mut cursor = tree.cursor();
                for frame in frames.into_iter().map(u64::from) {
                    assert_eq!(cursor.contains(Gfn(frame)), model.contains(&frame));
                    assert_eq!(tree.contains(Gfn(frame)), model.contains(&frame));
                }
            }
            TreeOp::Drain(how) => self.drain(how),
        }
    }

    fn drain(&mut self, how: DrainKind) {
        let Self { guest, tree, model } = self;
        let model = std::mem::take(model);
        let (mut runs, mut list): (Vec<FrameRun>, Vec<Gfn>) = (Vec::new(), Vec::new());
        let count = match how {
            DrainKind::Runs => tree.drain_into(&mut runs),
            DrainKind::RunsExclusive => tree.exclusive().drain_into(&mut runs),
            DrainKind::Frames => tree.drain_into(&mut list),
            DrainKind::FramesExclusive => tree.exclusive().drain_into(&mut list),
            DrainKind::Clear => return tree.clear(),
        };
        assert_eq!(count, model.len() as u64);
        match how {
            DrainKind::Runs | DrainKind::RunsExclusive => assert_eq!(runs, guest.runs(&model)),
            _ => assert!(list.into_iter().map(|gfn| gfn.0).eq(model)),
        }
    }

    fn check(&self) {
        let Self { guest, tree, model } = self;
        assert_eq!((tree.count(), tree.is_empty()), (model.len() as u64, model.is_empty()), "I1");
        for slot in &guest.0 {
            let words: Vec<u64> = tree.bitmap(slot.id).expect("a slot").collect();
            let expected = bits(&words).into_iter().map(|bit| slot.base.0 + bit);
            assert!(expected.eq(model.range(slot.base.0..slot.run().end().0).copied()));
        }
        assert_eq!(tree.iter().collect::<Vec<_>>(), guest.runs(model));
    }
}

fn mark(
    guest: &GuestModel,
    run: GuestRun,
    model: &mut FrameModel,
    mark: impl FnOnce(FrameRun) -> Result<(), OutOfSlot>,
) {
    let (run, inside) = guest.run(run);
    assert_eq!(mark(run).is_ok(), inside.is_some());
    model.extend(inside.into_iter().flatten());
}

fuzz_target!(|input: TrackerInput| {
    let guest = GuestModel::new(input.small);
    run_tracker(&guest, input.tracker);
    let tree = Tree::new(guest.layout()).expect("address space for a small tree");
    let mut tree_model = TreeModel { guest: &guest, tree, model: FrameModel::new() };
    for op in input.tree {
        tree_model.run(op);
        tree_model.check();
    }
});
