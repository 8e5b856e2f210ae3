//! Operations on entire trees by one thread and by two: 4 TiB of guest memory, 2^30 frames, 128 MiB
//! of leaves, and drains of smaller guests, which show from what size on two threads are faster.
//!
//! A plain read, write and copy of as many bytes are measured beside them, shared in halves. Where
//! memory itself is not twice as fast with two threads, no operation on it can be. Samples of one
//! and of two threads alternate, so that both see the same machine.

use std::hint::black_box;
use std::sync::Arc;
use std::time::Instant;

use criterion::Criterion;
use driftline_dirty_tracker::{Gfn, Layout, Slot, SlotId, Subscription, Tracker};
use rayon::{ThreadPool, ThreadPoolBuilder};

use crate::{SplitMix64, note};

const FRAMES: u64 = 1 << 30;
const WORDS: usize = (FRAMES / 64) as usize;
const SLOT: SlotId = SlotId(0);
const MIB: f64 = (WORDS * 8) as f64 / (1 << 20) as f64;
const SAMPLES: usize = 20;
const TABLE: &str = "by 1 and 2 threads, ms";

/// Times `timed` on pools of one and two threads, each after `prepare`. `moved` is how often the
/// 128 MiB are read or written.
fn measure<T>(
    pools: &[ThreadPool; 2],
    row: &str,
    moved: f64,
    state: &mut T,
    prepare: impl Fn(&mut T) + Sync,
    timed: impl Fn(&mut T) + Sync,
) where
    T: Send,
{
    for turn in 0..SAMPLES + 1 {
        let spent = pools.each_ref().map(|pool| {
            pool.install(|| {
                prepare(state);
                let start = Instant::now();
                timed(state);
                start.elapsed().as_secs_f64()
            })
        });
        // The first sample has page faults and growing buffers.
        if turn > 0 {
            note(TABLE, row, "1 thread", spent[0] * 1e3);
            note(TABLE, row, "2 threads", spent[1] * 1e3);
            note(TABLE, row, "times faster", spent[0] / spent[1]);
            if moved > 0.0 {
                note(TABLE, row, "2 threads, MiB a second", moved * MIB / spent[1]);
            }
        }
    }
}

/// Returns a bitmap with the share `density` of all frames, chosen at random among the frames of
/// the first `words` words.
fn random_bitmap(words: usize, density: f64) -> Vec<u64> {
    let mut random = SplitMix64(7);
    let mut bitmap = vec![0; WORDS];
    for _ in 0..(FRAMES as f64 * density) as u64 {
        let frame = random.next() as usize % (words * 64);
        bitmap[frame / 64] |= 1 << (frame % 64);
    }
    bitmap
}

/// Measures the bandwidth of memory with as many threads as each pool has.
fn bandwidth(pools: &[ThreadPool; 2], from: &[u64]) {
    let mut to = vec![1u64; WORDS];
    let halves = |each: &(dyn Fn(&mut [u64], &[u64]) + Sync), to: &mut Vec<u64>| {
        let part = WORDS / rayon::current_num_threads();
        rayon::scope(|scope| {
            for (to, from) in to.chunks_mut(part).zip(from.chunks(part)) {
                scope.spawn(move |_| each(to, from));
            }
        });
    };
    let read = |_: &mut [u64], from: &[u64]| {
        black_box(from.iter().fold(0u64, |sum, word| sum.wrapping_add(*word)));
    };
    measure(pools, "memory: read", 1.0, &mut to, |_| (), |to| halves(&read, to));
    let write = |to: &mut [u64], _: &[u64]| black_box(to).fill(1);
    measure(pools, "memory: write", 1.0, &mut to, |_| (), |to| halves(&write, to));
    let copy = |to: &mut [u64], from: &[u64]| black_box(to).copy_from_slice(from);
    measure(pools, "memory: copy", 2.0, &mut to, |_| (), |to| halves(&copy, to));
}

/// A guest of `frames` frames, and its only subscriber.
fn subscribed(frames: u64) -> (Arc<Tracker>, Subscription) {
    let layout = Layout::new([Slot { id: SLOT, base: Gfn(0), frames }]).expect("a layout");
    let tracker = Arc::new(Tracker::new(layout));
    let subscription = tracker.subscribe("bench").expect("address space");
    (tracker, subscription)
}

type TrackedGuest = (Arc<Tracker>, Subscription);

fn drain((_, subscription): &mut TrackedGuest) {
    subscription.drain().commit();
}

pub fn parallel(_: &mut Criterion) {
    let pools = [1, 2].map(|n| ThreadPoolBuilder::new().num_threads(n).build().expect("a pool"));
    let random = random_bitmap(WORDS, 0.01);
    let uneven = random_bitmap(WORDS / 16, 0.01);
    bandwidth(&pools, &random);

    let mut state = subscribed(FRAMES);
    let absorb = |(tracker, _): &mut TrackedGuest, bitmap: &[u64]| {
        tracker.absorb_bitmap(SLOT, bitmap).expect("a bitmap");
    };
    measure(&pools, "4 TiB: absorb a bitmap, 1 % random", 2.0, &mut state, drain, |s| {
        absorb(s, &random);
    });
    absorb(&mut state, &random);
    let nothing = |_: &mut TrackedGuest| ();
    measure(&pools, "4 TiB: absorb, nothing new", 2.0, &mut state, nothing, |s| {
        absorb(s, &random);
    });
    measure(&pools, "4 TiB: count, 1 % random", 1.0, &mut state, nothing, |s| {
        black_box(s.1.count());
    });
    for (row, bitmap) in [("1 % random", &random), ("1 %, all in one sixteenth", &uneven)] {
        let row = format!("4 TiB: drain, {row}");
        measure(&pools, &row, 0.0, &mut state, |s| absorb(s, bitmap), drain);
    }
    for gib in [16u64, 32, 64, 128] {
        let mut state = subscribed(gib << 18);
        let bitmap = &random[..(gib << 12) as usize];
        let row = format!("{gib} GiB: drain, 1 % random");
        measure(&pools, &row, 0.0, &mut state, |s| absorb(s, bitmap), drain);
    }
}
