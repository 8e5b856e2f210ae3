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
    Cursor, DirtySet, FrameRun, Gfn, Layout, OutOfSlot, RunLists, Slices, Slot, SlotId,
    Subscription, Tracker, Tree,
};
use libfuzzer_sys::fuzz_target;

/// A tree of three levels: slots that touch, a slot that ends inside a word, and one under a second
/// summary.
const LARGE: &[(u32, u64, u64)] = &[(3, 0, 100), (1, 100, 64), (0, 4096, 9001), (9, 0xff00, 1)];
/// A tree of one word.
const SMALL: &[(u32, u64, u64)] = &[(0, 7, 50)];

type Model = BTreeSet<u64>;

#[derive(Arbitrary, Debug)]
struct Input {
    small: bool,
    tracker: Vec<Op>,
    tree: Vec<TreeOp>,
}

#[derive(Arbitrary, Clone, Copy, Debug)]
struct Run {
    start: u16,
    count: u16,
}

#[derive(Arbitrary, Debug)]
struct Bitmap {
    slot: u8,
    words: Vec<u64>,
}

#[derive(Arbitrary, Debug)]
enum Op {
    Mark(Run),
    Offset { slot: u8, offset: u16 },
    Bitmap(Bitmap),
    All,
    Drain { who: bool },
    Slice { who: bool, words: u8 },
    Settle { which: u8, commit: bool },
}

#[derive(Arbitrary, Debug)]
enum TreeOp {
    Mark(Run),
    MarkMut(Run),
    Absorb(Bitmap),
    AbsorbMut(Bitmap),
    Adopt(Bitmap),
    Write(Bitmap),
    Cursor(Vec<Look>),
    Drain(Drain),
    Share(u8),
    Rebuild,
}

#[derive(Arbitrary, Debug)]
enum Look {
    Test(u16),
    Set(u16),
    Seek(u16),
    NextFrame,
    NextRun,
    Mark(Run),
}

#[derive(Arbitrary, Debug)]
enum Drain {
    Runs,
    RunsMut,
    Frames,
    FramesMut,
    Slices { words: u8 },
    Parallel,
    Clear,
}

/// The slots, with plain arithmetic as the model.
struct Guest(Vec<Slot>);

impl Guest {
    fn new(small: bool) -> Self {
        let slot = |&(id, base, frames)| Slot { id: SlotId(id), base: Gfn(base), frames };
        Self(if small { SMALL } else { LARGE }.iter().map(slot).collect())
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
    fn run(&self, run: Run) -> (FrameRun, Option<std::ops::Range<u64>>) {
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
    fn runs(&self, model: &Model) -> Vec<FrameRun> {
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

/// A subscriber, the frames that it has not drained, and those of them that were marked before its
/// round of slices began.
struct Subscriber {
    subscription: Subscription,
    model: Model,
    due: Option<Model>,
}

fn on_a_tracker(guest: &Guest, ops: Vec<Op>) {
    let tracker = Arc::new(Tracker::new(guest.layout()));
    let mut subscribers = ["one", "two"].map(|name| Subscriber {
        subscription: tracker.subscribe(name).expect("address space for a small tree"),
        model: Model::new(),
        due: None,
    });
    let mut epochs: Vec<(usize, DirtySet)> = Vec::new();
    for op in ops {
        let mut marked: Vec<u64> = Vec::new();
        match op {
            Op::Mark(run) => {
                let (run, inside) = guest.run(run);
                assert_eq!(tracker.mark(run).is_ok(), inside.is_some());
                marked.extend(inside.into_iter().flatten());
            }
            Op::Offset { slot, offset } => {
                let offset = u64::from(offset);
                let inside = guest.slot(slot).filter(|s| offset < s.frames);
                let done = tracker.mark_offset(SlotId(slot.into()), offset);
                assert_eq!(done.is_ok(), inside.is_some());
                marked.extend(inside.map(|s| s.base.0 + offset));
            }
            Op::Bitmap(bitmap) => {
                let inside = guest.bits(&bitmap).map(|(_, bits)| bits);
                let done = tracker.absorb_bitmap(SlotId(bitmap.slot.into()), &bitmap.words);
                assert_eq!(done.ok(), inside.as_ref().map(|bits| bits.len() as u64));
                marked.extend(inside.into_iter().flatten());
            }
            Op::All => {
                tracker.mark_all();
                marked.extend(frames(guest.0.iter().map(|slot| slot.run())));
            }
            Op::Drain { who } => {
                let Subscriber { subscription, model, due } = &mut subscribers[usize::from(who)];
                let epoch = subscription.drain();
                assert_eq!(epoch.frames(), model.len() as u64);
                assert_eq!(epoch.runs().collect::<Vec<_>>(), guest.runs(&std::mem::take(model)));
                due.iter_mut().for_each(Model::clear);
                epochs.push((usize::from(who), epoch));
            }
            Op::Slice { who, words } => {
                let Subscriber { subscription, model, due } = &mut subscribers[usize::from(who)];
                let due_now = due.get_or_insert_with(|| model.clone());
                let (epoch, was_last) = subscription.drain_slice(words.into());
                let drained = frames(epoch.runs());
                assert_eq!(epoch.frames(), drained.len() as u64);
                assert!(drained.len() <= 64 * usize::from(words.max(1)));
                for frame in &drained {
                    assert!(
                        model.remove(frame),
                        "a frame is drained once, and only if it was marked"
                    );
                    due_now.remove(frame);
                }
                if was_last {
                    assert!(due_now.is_empty(), "every frame marked before the round was drained");
                    *due = None;
                }
                epochs.push((usize::from(who), epoch));
            }
            Op::Settle { which, commit } if !epochs.is_empty() => {
                let (who, epoch) = epochs.swap_remove(usize::from(which) % epochs.len());
                if commit {
                    epoch.commit();
                } else {
                    subscribers[who].model.extend(frames(epoch.runs()));
                    drop(epoch);
                }
            }
            Op::Settle { .. } => {}
        }
        for Subscriber { subscription, model, .. } in &mut subscribers {
            model.extend(&marked);
            subscription.check().expect("I1");
        }
    }
}

/// A tree and its expected frames.
struct Alone<'g> {
    guest: &'g Guest,
    layout: Layout,
    tree: Tree,
    model: Model,
    lists: RunLists,
}

impl Alone<'_> {
    fn run(&mut self, op: TreeOp) {
        let Self { guest, layout, tree, model, .. } = self;
        match op {
            TreeOp::Mark(run) => mark(guest, run, model, |run| tree.mark(layout, run)),
            TreeOp::MarkMut(run) => mark(guest, run, model, |run| tree.mark_mut(layout, run)),
            TreeOp::Absorb(bitmap) => {
                let done = tree.absorb_bitmap(layout, SlotId(bitmap.slot.into()), &bitmap.words);
                self.bitmap(bitmap, done, false);
            }
            TreeOp::AbsorbMut(bitmap) => {
                let slot = SlotId(bitmap.slot.into());
                let done = tree.absorb_bitmap_mut(layout, slot, &bitmap.words);
                self.bitmap(bitmap, done, false);
            }
            TreeOp::Adopt(bitmap) => {
                let done = tree.adopt_bitmap(layout, SlotId(bitmap.slot.into()), &bitmap.words);
                self.bitmap(bitmap, done, true);
            }
            TreeOp::Write(bitmap) => self.write(bitmap),
            TreeOp::Cursor(looks) => {
                let mut cursor = (tree.cursor(layout), 0);
                looks.into_iter().for_each(|l| look(guest, layout, tree, model, &mut cursor, l));
            }
            TreeOp::Drain(how) => self.drain(how),
            TreeOp::Share(words) => tree.set_grain(words.into()),
            TreeOp::Rebuild => tree.rebuild(),
        }
    }

    /// Applies an absorbed or adopted bitmap to the model.
    fn bitmap(&mut self, bitmap: Bitmap, done: Result<u64, OutOfSlot>, adopted: bool) {
        let Some((slot, bits)) = self.guest.bits(&bitmap) else {
            assert!(done.is_err());
            return;
        };
        assert_eq!(done, Ok(bits.len() as u64));
        if adopted {
            let slot = slot.run();
            self.model.retain(|frame| !(slot.start.0..slot.end().0).contains(frame));
        }
        self.model.extend(bits);
    }

    /// Writes the leaves in place; only the last word has room for bits past the slot's end.
    fn write(&mut self, mut bitmap: Bitmap) {
        let slot = SlotId(bitmap.slot.into());
        let words = self.guest.slot(bitmap.slot).map_or(0, |s| s.frames.div_ceil(64) as usize);
        bitmap.words.resize(words, 0);
        let write = |leaves: &mut [u64]| leaves.copy_from_slice(&bitmap.words);
        let done = self.tree.write_leaves(&self.layout, slot, write);
        let strays = self.guest.slot(bitmap.slot).is_some() && self.guest.bits(&bitmap).is_none();
        if strays {
            assert!(matches!(done, Err(OutOfSlot::PastSlot { .. })));
            let past = self.guest.slot(bitmap.slot).map_or(0, |s| s.frames & 63);
            *bitmap.words.last_mut().expect("the word with the strays") &= (1 << past) - 1;
        }
        let frames = bits(&bitmap.words).len() as u64;
        self.bitmap(bitmap, if strays { Ok(frames) } else { done.map(|()| frames) }, true);
    }

    fn drain(&mut self, how: Drain) {
        let Self { guest, layout, tree, model, lists } = self;
        let model = std::mem::take(model);
        let (mut runs, mut list) = (Vec::new(), Vec::new());
        let count = match how {
            Drain::Runs => tree.drain(layout, &mut runs),
            Drain::RunsMut => tree.drain_mut(layout, &mut runs),
            Drain::Parallel => {
                let count = tree.drain_parallel(layout, lists);
                runs.extend(lists.iter());
                count
            }
            Drain::Frames => {
                tree.drain_frames(layout, &mut list);
                assert!(list.into_iter().map(|gfn| gfn.0).eq(model));
                return;
            }
            Drain::FramesMut => {
                tree.drain_frames_mut(layout, &mut list);
                assert!(list.into_iter().map(|gfn| gfn.0).eq(model));
                return;
            }
            Drain::Slices { words } => {
                let mut at = Slices::default();
                loop {
                    let slice = tree.drain_slice(layout, &mut at, words.into(), &mut runs);
                    assert!(slice <= 64 * u64::from(words.max(1)));
                    if at.is_over() {
                        break;
                    }
                }
                assert!(frames(runs).into_iter().eq(model));
                return;
            }
            Drain::Clear => return tree.clear(),
        };
        assert_eq!(count, model.len() as u64);
        assert_eq!(runs, guest.runs(&model));
    }

    fn check(&mut self) {
        let Self { guest, layout, tree, model, .. } = self;
        tree.check().expect("I1");
        assert_eq!(tree.count(), model.len() as u64);
        for slot in &guest.0 {
            let words = tree.bitmap(layout, slot.id).expect("a slot");
            let there = bits(words).into_iter().map(|bit| slot.base.0 + bit);
            assert!(there.eq(model.range(slot.base.0..slot.run().end().0).copied()));
        }
        assert_eq!(tree.runs(layout).collect::<Vec<_>>(), guest.runs(model));
        assert!(tree.frames(layout).map(|gfn| gfn.0).eq(model.iter().copied()));
    }
}

fn mark(
    guest: &Guest,
    run: Run,
    model: &mut Model,
    mark: impl FnOnce(FrameRun) -> Result<(), OutOfSlot>,
) {
    let (run, inside) = guest.run(run);
    assert_eq!(mark(run).is_ok(), inside.is_some());
    model.extend(inside.into_iter().flatten());
}

/// Reads through a cursor at some frame while marks continue.
fn look<'t>(
    guest: &Guest,
    layout: &'t Layout,
    tree: &'t Tree,
    model: &mut Model,
    (cursor, at): &mut (Cursor<'t>, u64),
    look: Look,
) {
    let next = model.range(*at..).next().copied();
    match look {
        Look::Test(frame) => {
            let there = guest.slot_of(frame.into()).map(|_| model.contains(&frame.into()));
            assert_eq!(cursor.test(Gfn(frame.into())).ok(), there);
        }
        Look::Set(frame) => {
            let new = guest.slot_of(frame.into()).map(|_| model.insert(frame.into()));
            assert_eq!(cursor.set(Gfn(frame.into())).ok(), new);
        }
        Look::Seek(frame) => {
            cursor.seek(Gfn(frame.into()));
            *at = frame.into();
        }
        Look::NextFrame => {
            assert_eq!(cursor.next_frame(), next.map(Gfn));
            *at = next.map_or(*at, |frame| frame + 1);
        }
        Look::NextRun => {
            let rest: Model = model.range(*at..).copied().collect();
            let first = guest.runs(&rest).first().copied();
            assert_eq!(cursor.next_run(), first);
            *at = first.map_or(*at, |run| run.end().0);
        }
        Look::Mark(run) => mark(guest, run, model, |run| tree.mark(layout, run)),
    }
}

fuzz_target!(|input: Input| {
    let guest = Guest::new(input.small);
    on_a_tracker(&guest, input.tracker);
    let layout = guest.layout();
    let (tree, lists) = (Tree::new(&layout).unwrap(), RunLists::default());
    let mut alone = Alone { guest: &guest, layout, tree, model: Model::new(), lists };
    for op in input.tree {
        alone.run(op);
        alone.check();
    }
});
