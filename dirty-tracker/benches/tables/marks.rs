//! Marks of one page through vm-memory's `Bitmap`, as a device's write makes them: the bitmap is
//! sliced, then marked. `AtomicBitmap` is the reference, measured in the same run.

use std::hint::black_box;
use std::num::NonZeroUsize;
use std::sync::Arc;
use std::time::{Duration, Instant};

use criterion::Criterion;
use driftline_dirty_tracker::{Gfn, Layout, Slot, SlotId, Subscription, TrackedBitmap, Tracker};
use vm_memory::bitmap::{AtomicBitmap, Bitmap};

use crate::note;

const FRAMES: usize = 1 << 20;
const PAGE: usize = 4096;
/// Marks between two drains.
const MARKS: usize = 4096;
const ROUNDS: usize = 200;

/// Which page the `i`-th mark of a round marks.
type MarkPattern = (&'static str, fn(usize) -> usize);

const PATTERNS: [MarkPattern; 4] = [
    ("the same page", |_| 77),
    ("three pages in turn, as of a queue and its buffer", |i| [77, 300, 9000][i % 3]),
    ("consecutive pages", |i| i),
    ("a page in every word of 64", |i| i * 64 % FRAMES),
];

/// Marks one page, through a slice as a device has it.
fn mark(bitmap: &impl Bitmap, page: usize) {
    let slice = bitmap.slice_at(page * PAGE);
    slice.mark_dirty(black_box(64), black_box(8));
}

/// Times the marks of a round. `clear` empties the bitmap afterwards and is not timed.
fn round(bitmap: &impl Bitmap, page: fn(usize) -> usize, clear: impl FnOnce()) -> Duration {
    let start = Instant::now();
    for i in 0..MARKS {
        mark(bitmap, page(i));
    }
    let spent = start.elapsed();
    clear();
    spent
}

pub fn marks(_: &mut Criterion) {
    let layout = Layout::new([Slot { id: SlotId(0), base: Gfn(0), frames: FRAMES as u64 }]);
    let layout = Arc::new(layout.expect("a layout"));
    let [unwatched, watched, twice] = [(); 3].map(|()| Arc::new(Tracker::new(layout.clone())));
    let subscribe = |tracker: &Arc<Tracker>| tracker.subscribe("bench").expect("address space");
    let mut one = subscribe(&watched);
    let mut two = [subscribe(&twice), subscribe(&twice)];
    let [none, single, double] =
        [&unwatched, &watched, &twice].map(|t| TrackedBitmap::new(t.clone(), Gfn(0)));
    let atomic = AtomicBitmap::new(FRAMES * PAGE, NonZeroUsize::new(PAGE).expect("not zero"));
    let drain = |subscription: &mut Subscription| subscription.drain().commit();
    for (row, page) in PATTERNS {
        // All in turn, so that they see the same machine.
        for _ in 0..ROUNDS {
            let base = round(&atomic, page, || atomic.reset()).as_secs_f64();
            let cell = |column: &str, spent: Duration| {
                let table = "marking one page, ns";
                note(table, row, column, spent.as_nanos() as f64 / MARKS as f64);
                if column != "AtomicBitmap" {
                    let ratio = format!("{column}, of AtomicBitmap");
                    note(table, row, &ratio, spent.as_secs_f64() / base);
                }
            };
            cell("AtomicBitmap", Duration::from_secs_f64(base));
            cell("no subscriber", round(&none, page, || ()));
            cell("1 subscriber", round(&single, page, || drain(&mut one)));
            cell("2 subscribers", round(&double, page, || two.iter_mut().for_each(drain)));
        }
    }
}
