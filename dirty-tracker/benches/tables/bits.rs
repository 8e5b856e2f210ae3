//! Single bits at every size of memory, and entire drains at every density.

use std::collections::LinkedList;
use std::hint::black_box;
use std::time::Instant;

use criterion::Criterion;
use driftline_dirty_tracker::{Gfn, Layout, Slot, SlotId, Tree};

use crate::rivals::{Flat, FlatSimd, Ours, Rival};
use crate::{SplitMix64, note};

/// A page of bits, and the frames that it covers.
struct BitPage {
    frames: std::ops::Range<u64>,
    bits: Box<[u64]>,
}

/// The bitmap of hibernation before July 2014: pages of bits in a linked list, searched from its
/// head.
struct BitPageList(LinkedList<BitPage>);

const PER_PAGE: u64 = 4096 * 8;

impl BitPageList {
    fn new(frames: u64) -> Self {
        let page = |start| BitPage {
            frames: start..(start + PER_PAGE).min(frames),
            bits: vec![0; 512].into_boxed_slice(),
        };
        Self((0..frames).step_by(PER_PAGE as usize).map(page).collect())
    }

    fn test(&self, frame: u64) -> bool {
        let page = self.0.iter().find(|page| page.frames.contains(&frame));
        let bit = frame % PER_PAGE;
        page.is_some_and(|p| p.bits[(bit / 64) as usize] >> (bit % 64) & 1 == 1)
    }
}

/// Random tests of single bits: in the tree at a computed position, in the old list of pages from
/// its head.
pub fn tests(_: &mut Criterion) {
    for gib in [1u64, 16, 256, 4096, 12288] {
        let frames = gib << 18;
        let layout = Layout::new([Slot { id: SlotId(0), base: Gfn(0), frames }]).unwrap();
        let tree = Tree::new(layout).unwrap();
        let pages = BitPageList::new(frames);
        let mut random = SplitMix64(gib);
        let count = 2_000_000 / gib.max(16);
        let mut measure = |name: &str, count: u64, test: &mut dyn FnMut(u64) -> bool| {
            for _ in 0..5 {
                let tested: Vec<u64> = (0..count).map(|_| random.next() % frames).collect();
                let start = Instant::now();
                tested.iter().for_each(|f| {
                    black_box(test(*f));
                });
                let each = start.elapsed().as_nanos() as f64 / count as f64;
                note("random test of one bit, ns", format!("{gib} GiB"), name, each);
            }
        };
        let mut cursor = tree.cursor();
        measure("tree", 100_000, &mut |f| cursor.contains(Gfn(f)));
        measure("list of pages", count, &mut |f| pages.test(f));
    }
}

/// Drains to frames, from nearly empty to full: a flat scan must not be faster at any density.
pub fn density(_: &mut Criterion) {
    const FRAMES: u64 = 4_000_000;
    let mut rivals: Vec<(&str, Box<dyn Rival>)> = vec![
        ("tree", Box::new(Ours::new(FRAMES, false))),
        ("flat", Box::new(Flat::new(FRAMES))),
        ("flat SIMD", Box::new(FlatSimd::new(FRAMES))),
    ];
    let mut out = Vec::with_capacity(FRAMES as usize);
    let mut measure = |row: &str, frames: &[u64]| {
        for (name, rival) in &mut rivals {
            frames.iter().for_each(|f| rival.insert(*f));
            out.clear();
            let start = Instant::now();
            rival.drain_timed(black_box(&mut out));
            let ns = start.elapsed().as_nanos() as f64;
            note("4,000,000 frames by density, ns", row, name, ns);
        }
    };
    for per_mille in [0, 1, 3, 10, 30, 100, 200, 300, 500, 700, 900, 970, 990, 999, 1000] {
        let mut random = SplitMix64(per_mille);
        let row = format!("{:.1} %", per_mille as f64 / 10.0);
        for _ in 0..15 {
            let dirty = |_: &u64| random.next() % 1000 < per_mille;
            measure(&row, &(0..FRAMES).filter(dirty).collect::<Vec<_>>());
        }
    }
    // Full words beside others, in which the frames of a word are consecutive.
    for (row, full, of) in
        [("full, empty", 1, 2), ("2 full, empty", 2, 3), ("12 full, empty", 12, 13)]
    {
        let frames: Vec<u64> = (0..FRAMES).filter(|f| f / 64 % of < full).collect();
        (0..15).for_each(|_| measure(&format!("words: {row}"), &frames));
    }
    let frames: Vec<u64> = (0..FRAMES).filter(|f| f / 64 % 2 == 0 || f % 64 == 7).collect();
    (0..15).for_each(|_| measure("words: full, one bit", &frames));
}
