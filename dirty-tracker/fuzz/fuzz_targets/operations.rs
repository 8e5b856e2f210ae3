//! Sequences of operations on a tracker with two subscribers, against plain sets of frames.
//!
//! Long: `cargo +nightly fuzz run operations` in `dirty-tracker/`. Short, without cargo-fuzz:
//! `cd dirty-tracker/fuzz && cargo +nightly run --release --bin operations -- -max_total_time=20`
#![no_main]

use std::collections::BTreeSet;
use std::sync::Arc;

use arbitrary::Arbitrary;
use dirty_tracker::{Epoch, FrameRun, Gfn, Layout, Slot, SlotId, Tracker};
use libfuzzer_sys::fuzz_target;

/// Slots that touch, that end inside a word, and one under a second summary word.
const SLOTS: [(u32, u64, u64); 4] = [(3, 0, 100), (1, 100, 64), (0, 4096, 9001), (9, 0x10_0000, 1)];

#[derive(Arbitrary, Debug)]
enum Op {
    Mark { start: u16, count: u16 },
    Offset { slot: u8, offset: u16 },
    Bitmap { slot: u8, words: Vec<u64> },
    All,
    Drain { who: bool },
    Settle { which: u8, commit: bool },
}

fuzz_target!(|ops: Vec<Op>| {
    let slots = SLOTS.map(|(id, base, frames)| Slot { id: SlotId(id), base: Gfn(base), frames });
    let find = |id: u8| slots.iter().find(|s| s.id.0 == u32::from(id));
    let tracker = Arc::new(Tracker::new(Layout::new(slots).expect("a layout")));
    let mut subscriptions = [tracker.subscribe("one"), tracker.subscribe("two")];
    let mut models = [BTreeSet::new(), BTreeSet::new()];
    let mut epochs: Vec<(usize, Epoch)> = Vec::new();
    for op in ops {
        let mut marked: Vec<u64> = Vec::new();
        match op {
            Op::Mark { start, count } => {
                let (start, count) = (u64::from(start), u64::from(count));
                let inside =
                    slots.iter().any(|s| s.base.0 <= start && start + count <= s.run().end().0);
                let done = tracker.mark(FrameRun { start: Gfn(start), count });
                assert_eq!(done.is_ok(), inside || count == 0);
                if inside {
                    marked.extend(start..start + count);
                }
            }
            Op::Offset { slot, offset } => {
                let offset = u64::from(offset);
                let inside = find(slot).filter(|s| offset < s.frames);
                assert_eq!(
                    tracker.mark_offset(SlotId(slot.into()), offset).is_ok(),
                    inside.is_some()
                );
                marked.extend(inside.map(|s| s.base.0 + offset));
            }
            Op::Bitmap { slot, words } => {
                let bits = (0u64..).zip(&words).flat_map(|(w, bits)| {
                    (0..64).filter(move |b| bits >> b & 1 == 1).map(move |b| 64 * w + b)
                });
                let bits: Vec<u64> = bits.collect();
                let inside = find(slot).filter(|s| bits.iter().all(|b| *b < s.frames));
                let done = tracker.absorb_bitmap(SlotId(slot.into()), &words);
                assert_eq!(done.ok(), inside.map(|_| bits.len() as u64));
                marked.extend(inside.iter().flat_map(|s| bits.iter().map(|b| s.base.0 + b)));
            }
            Op::All => {
                tracker.mark_all();
                marked.extend(slots.iter().flat_map(|s| s.base.0..s.run().end().0));
            }
            Op::Drain { who } => {
                let who = usize::from(who);
                let epoch = subscriptions[who].drain();
                let frames: BTreeSet<u64> =
                    epoch.runs().flat_map(|r| r.start.0..r.end().0).collect();
                assert_eq!(epoch.frames(), frames.len() as u64);
                assert_eq!(frames, std::mem::take(&mut models[who]));
                epochs.push((who, epoch));
            }
            Op::Settle { which, commit } if !epochs.is_empty() => {
                let (who, epoch) = epochs.swap_remove(usize::from(which) % epochs.len());
                if commit {
                    epoch.commit();
                } else {
                    models[who].extend(epoch.runs().flat_map(|r| r.start.0..r.end().0));
                    drop(epoch);
                }
            }
            Op::Settle { .. } => {}
        }
        for (model, subscription) in models.iter_mut().zip(&subscriptions) {
            model.extend(&marked);
            subscription.check().expect("I1");
        }
    }
});
