//! Cost of allocating and freeing slots of a page file. Repeats the measurements of the patches
//! that gave Linux's percpu allocator its bitmap in 2017.
//!
//! `cargo bench -p driftline-store --bench slots`. A million runs of each size are allocated, and
//! freed in order, alternating (every other, then the rest) and in reverse; *aligned* runs begin at
//! multiples of twice their size. Prints the shortest of three times, in milliseconds, beside that
//! of a sorted list of free runs that joins neighbours (`BTreeMap`, first fit).
#![allow(clippy::print_stdout, clippy::unwrap_used)]

use std::collections::BTreeMap;
use std::time::Instant;

use driftline_store::SlotRun;
use driftline_store::testing::Slots;

const RUNS: u32 = 1_000_000;
const SIZES: [u32; 5] = [1, 4, 16, 64, 256];
const TIMES: usize = 3;

trait Allocator {
    fn new(total: u32) -> Self;
    fn allocate(&mut self, count: u32, align: u32) -> SlotRun;
    fn free(&mut self, run: SlotRun);
}

impl Allocator for Slots {
    fn new(total: u32) -> Self {
        Slots::new(total)
    }

    fn allocate(&mut self, count: u32, align: u32) -> SlotRun {
        Slots::allocate(self, count, align).unwrap()
    }

    fn free(&mut self, run: SlotRun) {
        Slots::free(self, run).unwrap();
    }
}

/// Free runs by their first slot, no two of which touch.
struct SortedRuns(BTreeMap<u32, u32>);

impl Allocator for SortedRuns {
    fn new(total: u32) -> Self {
        Self([(0, total)].into())
    }

    fn allocate(&mut self, count: u32, align: u32) -> SlotRun {
        let fits = |(&at, &len): (&u32, &u32)| {
            let start = at.next_multiple_of(align);
            (start - at + count <= len).then_some((at, len, start))
        };
        let (at, len, start) = self.0.iter().find_map(fits).unwrap();
        match start - at {
            0 => self.0.remove(&at),
            before => self.0.insert(at, before),
        };
        let (end, all) = (start + count, at + len);
        if end < all {
            self.0.insert(end, all - end);
        }
        SlotRun { start, count }
    }

    fn free(&mut self, run: SlotRun) {
        let SlotRun { start, mut count } = run;
        if let Some(after) = self.0.remove(&(start + count)) {
            count += after;
        }
        if let Some((&at, len)) = self.0.range_mut(..start).next_back()
            && at + *len == start
        {
            *len += count;
            return;
        }
        self.0.insert(start, count);
    }
}

/// Returns the numbers of the runs, in the order in which they are freed.
fn order(name: &str) -> Vec<usize> {
    let runs = 0..RUNS as usize;
    match name {
        "in order" => runs.collect(),
        "reverse" => runs.rev().collect(),
        _ => runs.clone().step_by(2).chain(runs.skip(1).step_by(2)).collect(),
    }
}

/// Returns the shortest time of allocating all runs, and of freeing them, in milliseconds.
fn measure<A: Allocator>(size: u32, align: u32, order: &[usize]) -> (f64, f64) {
    let mut best = (f64::MAX, f64::MAX);
    for _ in 0..TIMES {
        let mut slots = A::new(RUNS * size.max(align));
        let since = Instant::now();
        let runs: Vec<SlotRun> = (0..RUNS).map(|_| slots.allocate(size, align)).collect();
        best.0 = best.0.min(since.elapsed().as_secs_f64() * 1e3);
        let since = Instant::now();
        order.iter().for_each(|&n| slots.free(runs[n]));
        best.1 = best.1.min(since.elapsed().as_secs_f64() * 1e3);
    }
    best
}

fn row<A: Allocator>(name: &str, aligned: bool) -> f64 {
    let mut worst = 0.0f64;
    for size in SIZES {
        let align = if aligned { 2 * size } else { 1 };
        let (mut allocate, mut free) = (f64::MAX, Vec::new());
        for order in ["in order", "alternating", "reverse"].map(order) {
            let (took, freed) = measure::<A>(size, align, &order);
            allocate = allocate.min(took);
            free.push(freed);
        }
        let (least, most) = free.iter().fold((f64::MAX, 0.0f64), |(l, m), &f| (l.min(f), m.max(f)));
        worst = worst.max(most / least);
        println!(
            "{name:<12} {size:5}{} {allocate:9.1} {:9.1} {:11.1} {:8.1} {:11.2}",
            if aligned { " by 2n" } else { "       " },
            free[0],
            free[1],
            free[2],
            most / least,
        );
    }
    worst
}

fn main() {
    println!("a million runs, ms      allocate  in order alternating  reverse  worst/best");
    let mut worst = 0.0f64;
    for aligned in [false, true] {
        worst = worst.max(row::<Slots>("bitmap", aligned));
        // Aligned runs leave gaps. The sorted list would search all of them, which takes hours.
        if !aligned {
            row::<SortedRuns>("sorted list", aligned);
        }
    }
    println!("bitmap: the worst order of freeing takes {worst:.2} times the best");
}
