//! The figures of BENCHMARKS.md: `cargo bench -p driftline-dirty-tracker --all-features`.
//!
//! Criterion samples every cell. At the end come summary tables of the medians, and the same as one
//! JSON object on the last line. `-- 2016` runs one table: 2016, 12TiB, bits, density, threads,
//! ranges, marks, ring, frameset or parallel. Without the feature `vm-memory` there is no `marks`,
//! and without `parallel` no table of that name.
#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used, reason = "a bench")]
#![allow(clippy::incompatible_msrv, reason = "only the library is for older compilers")]

#[path = "tables/bits.rs"]
mod bits;
#[path = "tables/frame_set.rs"]
mod frame_set;
#[cfg(feature = "vm-memory")]
#[path = "tables/marks.rs"]
mod marks;
#[cfg(feature = "parallel")]
#[path = "tables/parallel.rs"]
mod parallel;
mod rivals;

use std::cell::RefCell;
use std::hint::black_box;
use std::num::NonZeroUsize;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use criterion::{Bencher, BenchmarkId, Criterion, SamplingMode};
use driftline_dirty_tracker::ring::{ENTRY_DIRTY, ENTRY_RESET, Harvester, RingEntry};
use driftline_dirty_tracker::{FrameRun, Gfn, Layout, Slot, SlotId, Tracker, Tree};
use rivals::{Flat, FlatSimd, Hibit, LINE, Ours, PlainList, Radix8, Rival, Roaring, VmMemory};
use vm_memory::bitmap::AtomicBitmap;

/// Samples by table, row and column, in the order of their first appearance.
#[derive(Default)]
struct Summary {
    cells: Vec<(String, String, String, Vec<f64>)>,
}

thread_local! {
    static SUMMARY: RefCell<Summary> = RefCell::default();
}

/// Records one sample, in ns (or in the unit that the column names).
fn note(table: &str, row: impl ToString, column: &str, value: f64) {
    let row = row.to_string();
    SUMMARY.with_borrow_mut(|s| {
        match s.cells.iter_mut().find(|c| c.0 == table && c.1 == row && c.2 == column) {
            Some(cell) => cell.3.push(value),
            None => s.cells.push((table.into(), row, column.into(), vec![value])),
        }
    });
}

/// Returns the median.
fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or_default()
}

impl Summary {
    fn print(self) {
        let cells: Vec<_> = self
            .cells
            .into_iter()
            .map(|(t, r, c, v)| {
                let value = median(v);
                (t, r, c, value)
            })
            .collect();
        let mut tables: Vec<&str> = cells.iter().map(|c| c.0.as_str()).collect();
        tables.sort_by_key(|t| cells.iter().position(|c| c.0 == *t));
        tables.dedup();
        for table in tables {
            let here: Vec<_> = cells.iter().filter(|c| c.0 == table).collect();
            let mut columns: Vec<&str> = Vec::new();
            let mut rows: Vec<&str> = Vec::new();
            for cell in &here {
                if !columns.contains(&cell.2.as_str()) {
                    columns.push(&cell.2)
                }
                if !rows.contains(&cell.1.as_str()) {
                    rows.push(&cell.1)
                }
            }
            println!(
                "\n| {table} | {} |\n|{}",
                columns.join(" | "),
                " --- |".repeat(columns.len() + 1)
            );
            for row in rows {
                let value = |column: &&str| {
                    let found = here.iter().find(|c| c.1 == row && c.2 == *column);
                    found.map_or(String::from("-"), |c| {
                        if c.3 >= 100.0 { format!("{:.0}", c.3) } else { format!("{:.2}", c.3) }
                    })
                };
                println!(
                    "| {row} | {} |",
                    columns.iter().map(value).collect::<Vec<_>>().join(" | ")
                );
            }
        }
        let json: Vec<String> = cells
            .iter()
            .map(|(t, r, c, v)| {
                format!("{{\"table\":{t:?},\"row\":{r:?},\"column\":{c:?},\"value\":{v:.2}}}")
            })
            .collect();
        println!("\n[{}]", json.join(","));
    }
}

/// SplitMix64: frames that look random and are the same in every run.
struct SplitMix64(u64);

impl SplitMix64 {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }
}

fn quick<'c>(
    c: &'c mut Criterion,
    name: &str,
) -> criterion::BenchmarkGroup<'c, criterion::measurement::WallTime> {
    let mut group = c.benchmark_group(name);
    group.sample_size(10).sampling_mode(SamplingMode::Flat);
    group.warm_up_time(Duration::from_millis(30)).measurement_time(Duration::from_millis(150));
    group
}

const FRAMES_2016: u64 = 10_000_000;
/// Number of rounds in which each cell is sampled, so that a disturbance of some seconds does not
/// affect one cell alone.
const ROUNDS_2016: usize = 3;

/// Returns the sets of the table, by column.
fn rivals_2016() -> Vec<(&'static str, Box<dyn Rival>)> {
    let page = NonZeroUsize::new(4096).unwrap();
    let bytes = FRAMES_2016 as usize * 4096;
    vec![
        ("list", Box::new(PlainList(Vec::new()))),
        ("tree", Box::new(Ours::new(FRAMES_2016, false))),
        ("tree, shared", Box::new(Ours::new(FRAMES_2016, true))),
        ("radix-8", Box::new(Radix8::new(FRAMES_2016))),
        ("flat", Box::new(Flat::new(FRAMES_2016))),
        ("flat SIMD", Box::new(FlatSimd::new(FRAMES_2016))),
        ("hibitset", Box::new(Hibit(hibitset::BitSet::with_capacity(FRAMES_2016 as u32)))),
        ("roaring", Box::new(Roaring(roaring::RoaringBitmap::new()))),
        ("AtomicBitmap", Box::new(VmMemory(AtomicBitmap::new(bytes, page)))),
    ]
}

/// A row of the table: its name, the frames to choose from, and how many are taken.
type Row2016<'a> = (String, &'a [u64], usize);

/// Checks that each rival drains what was inserted.
fn check_rivals(rows: &[Row2016<'_>], rivals: &mut [(&'static str, Box<dyn Rival>)]) {
    let mut out: Vec<u64> = Vec::with_capacity(FRAMES_2016 as usize);
    for (row, all, count) in rows {
        for (name, rival) in &mut *rivals {
            let frames = &all[..*count];
            let mut expected = frames.to_vec();
            expected.sort_unstable();
            frames.iter().for_each(|f| rival.insert(*f));
            out.clear();
            rival.drain(&mut out);
            if *name == "list" {
                out.sort_unstable()
            }
            assert!(out == expected, "{name} is wrong at {row}");
        }
    }
}

/// Returns the times of inserting `frames` and of draining them to `out`.
fn time_rival(rival: &mut dyn Rival, frames: &[u64], out: &mut Vec<u64>) -> (Duration, Duration) {
    let start = Instant::now();
    frames.iter().for_each(|f| rival.insert(*f));
    let insert = start.elapsed();
    out.clear();
    let start = Instant::now();
    rival.drain_timed(black_box(out));
    (insert, start.elapsed())
}

fn table_2016(c: &mut Criterion) {
    let mut random = SplitMix64(2016);
    let mut shuffled: Vec<u64> = (0..FRAMES_2016).collect();
    for i in (1..shuffled.len()).rev() {
        shuffled.swap(i, (random.next() % (i as u64 + 1)) as usize);
    }
    let ascending: Vec<u64> = (0..FRAMES_2016).collect();
    let sizes = [100, 1_000, 10_000, 100_000, 1_000_000, 10_000_000];
    let rows: Vec<Row2016<'_>> = sizes
        .map(|n| (format!("{n} random"), shuffled.as_slice(), n))
        .into_iter()
        .chain([1_000, 10_000, 100_000].map(|n| (format!("{n} sequential"), &ascending[..], n)))
        .collect();
    let mut rivals = rivals_2016();
    check_rivals(&rows, &mut rivals);
    let mut out: Vec<u64> = Vec::with_capacity(FRAMES_2016 as usize);
    for round in 0..ROUNDS_2016 {
        let mut group = quick(c, &format!("2016, round {round}"));
        group.measurement_time(Duration::from_millis(150) / ROUNDS_2016 as u32);
        for (row, all, count) in &rows {
            for (name, rival) in &mut rivals {
                let mut random = SplitMix64((count + round) as u64);
                group.bench_function(BenchmarkId::new(*name, row), |b| {
                    b.iter_custom(|iterations| {
                        let (mut insert, mut drain) = (Duration::ZERO, Duration::ZERO);
                        for _ in 0..iterations {
                            // Other frames each time, as with a guest, so that no branch predictor
                            // learns them.
                            let first = random.next() as usize % (all.len() - count + 1);
                            let frames = &all[first..first + count];
                            let times = time_rival(&mut **rival, frames, &mut out);
                            (insert, drain) = (insert + times.0, drain + times.1);
                        }
                        let each = |d: Duration| d.as_nanos() as f64 / iterations as f64;
                        note("to a list of frames, ns", row, name, each(drain));
                        note("insert, ns a frame", row, name, each(insert) / *count as f64);
                        drain
                    });
                });
            }
        }
        group.finish();
    }
}

/// Returns the resident memory of this process, MiB.
fn resident_mib() -> f64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find(|l| l.starts_with("VmRSS")).unwrap_or_default();
    let kib = line.split_whitespace().nth(1).and_then(|n| n.parse::<f64>().ok());
    kib.unwrap_or_default() / 1024.0
}

const TABLE_12_TIB: &str = "12 TiB, drained to runs";

/// Measures `drain`, which returns its time, for a cell of the table.
fn bench_drain(b: &mut Bencher<'_>, row: &str, column: &str, mut drain: impl FnMut() -> Duration) {
    b.iter_custom(|iterations| {
        let total: Duration = (0..iterations).map(|_| drain()).sum();
        note(TABLE_12_TIB, row, column, total.as_nanos() as f64 / iterations as f64);
        total
    });
}

/// Notes the time of building a tree.
fn note_build(layout: &Arc<Layout>) {
    let start = Instant::now();
    let tree = Tree::new(layout.clone()).unwrap();
    note(TABLE_12_TIB, "build", "tree, ns", start.elapsed().as_nanos() as f64);
    drop(tree);
}

fn table_12_tib(c: &mut Criterion) {
    const FRAMES: u64 = 3_221_225_472;
    const RUN: u64 = 256;
    let layout = Layout::new([Slot { id: SlotId(0), base: Gfn(0), frames: FRAMES }]).unwrap();
    let layout = Arc::new(layout);
    note_build(&layout);
    let mut random = SplitMix64(12);
    let mut runs: Vec<FrameRun> = Vec::new();
    let mut group = quick(c, "12TiB");
    let mut flat = vec![0u64; (FRAMES / 64) as usize];
    let cases = [
        ("0 frames", 0, 1),
        ("1,000 random frames", 1_000, 1),
        ("1,000,000 random frames", 1_000_000, 1),
        ("0.1 % in runs of 256", FRAMES / 1000 / RUN, RUN),
        ("1 % in runs of 256", FRAMES / 100 / RUN, RUN),
    ];
    for (row, count, length) in cases {
        let mut mark = |word: &mut dyn FnMut(u64)| {
            (0..count).for_each(|_| word((random.next() % (FRAMES - length)) / length * length));
        };
        let before = resident_mib();
        let mut tree = Tree::new(layout.clone()).unwrap();
        let run = |f| FrameRun { start: Gfn(f), count: length };
        mark(&mut |f| tree.mark(run(f)).unwrap());
        note(TABLE_12_TIB, row, "tree, resident MiB", resident_mib() - before);
        for (name, shared) in [("tree", false), ("tree, shared", true)] {
            group.bench_function(BenchmarkId::new(name, row), |b| {
                bench_drain(b, row, &format!("{name}, ns"), || {
                    mark(&mut |f| tree.mark(run(f)).unwrap());
                    runs.clear();
                    let start = Instant::now();
                    match shared {
                        true => tree.drain_into(&mut runs),
                        false => tree.exclusive().drain_into(&mut runs),
                    };
                    start.elapsed()
                });
            });
        }
        let tracker = Arc::new(Tracker::new(layout.clone()));
        let mut subscription = tracker.subscribe("bench").unwrap();
        group.bench_function(BenchmarkId::new("subscriber", row), |b| {
            bench_drain(b, row, "subscriber, 2 threads, ns", || {
                mark(&mut |f| tracker.mark(run(f)).unwrap());
                let start = Instant::now();
                let set = subscription.drain();
                let time = start.elapsed();
                set.commit();
                time
            });
        });
        mark(&mut |f| (f..f + length).for_each(|f| flat[(f / 64) as usize] |= 1 << (f % 64)));
        note_flat_scans(row, &flat);
        flat.fill(0);
    }
    group.finish();
}

/// Notes three scans of a flat bitmap. They only read; clearing the words is not timed.
fn note_flat_scans(row: &str, flat: &[u64]) {
    for _ in 0..3 {
        note(TABLE_12_TIB, row, "flat SIMD, ns", time_flat_scan(flat).as_nanos() as f64);
    }
}

/// Times a scan that counts the set bits and skips empty lines.
fn time_flat_scan(flat: &[u64]) -> Duration {
    let start = Instant::now();
    let mut dirty = 0u64;
    for line in flat.as_chunks::<LINE>().0 {
        if line.iter().fold(0, |all, word| all | word) != 0 {
            dirty += line.iter().map(|w| u64::from(w.count_ones())).sum::<u64>();
        }
    }
    black_box(dirty);
    start.elapsed()
}

fn table_threads(_: &mut Criterion) {
    const INSERTS: u64 = 1_000_000;
    // Enough frames for each thread that nearly all inserts are new.
    const FRAMES: u64 = 1 << 23;
    let layout = Layout::new([Slot { id: SlotId(0), base: Gfn(0), frames: 2 * FRAMES }]).unwrap();
    let tree = Tree::new(layout).unwrap();
    for (row, threads, same, drainer) in [
        ("1 thread", 1, true, false),
        ("2 threads, same words", 2, true, false),
        ("2 threads, different words", 2, false, false),
        ("1 thread and a drainer", 1, true, true),
        ("2 threads and a drainer", 2, false, true),
    ] {
        for _ in 0..3 {
            let stop = AtomicBool::new(false);
            let start = Instant::now();
            std::thread::scope(|scope| {
                let inserters: Vec<_> = (0..threads)
                    .map(|t| {
                        let tree = &tree;
                        scope.spawn(move || {
                            let base = if same { 0 } else { t * FRAMES };
                            let mut random = SplitMix64(t);
                            for _ in 0..INSERTS {
                                let start = Gfn(base + random.next() % FRAMES);
                                tree.mark(FrameRun { start, count: 1 }).unwrap();
                            }
                        })
                    })
                    .collect();
                if drainer {
                    scope.spawn(|| {
                        let mut runs: Vec<FrameRun> = Vec::new();
                        while !stop.load(Ordering::Relaxed) {
                            runs.clear();
                            tree.drain_into(&mut runs);
                        }
                    });
                }
                inserters.into_iter().for_each(|t| t.join().unwrap());
                stop.store(true, Ordering::Relaxed);
            });
            let rate = (threads * INSERTS) as f64 / start.elapsed().as_secs_f64() / 1e6;
            note("concurrency", row, "million inserts a second", rate);
            tree.clear();
        }
    }
}

fn table_ranges(c: &mut Criterion) {
    const FRAMES: u64 = 1 << 20;
    let layout = Layout::new([Slot { id: SlotId(0), base: Gfn(0), frames: FRAMES }]).unwrap();
    let mut tree = Tree::new(layout.clone()).unwrap();
    let flat = AtomicBitmap::new(FRAMES as usize * 4096, NonZeroUsize::new(4096).unwrap());
    let mut group = quick(c, "ranges");
    for count in [1, 16, 256, 4096] {
        let starts: Vec<u64> = (0..32).map(|i| i * 8192 + 37).collect();
        let table = "marking a range of clean frames, ns";
        let row = format!("{count} frames");
        let mut measure = |name: &str, mark: &mut dyn FnMut(u64), clear: &mut dyn FnMut()| {
            group.bench_function(BenchmarkId::new(name, count), |b| {
                b.iter_custom(|iterations| {
                    let mut spent = Duration::ZERO;
                    for _ in 0..iterations {
                        let start = Instant::now();
                        starts.iter().for_each(|s| mark(*s));
                        spent += start.elapsed();
                        clear();
                    }
                    note(table, &row, name, spent.as_nanos() as f64 / (32 * iterations) as f64);
                    spent / 32
                });
            });
        };
        let run = |start| FrameRun { start: Gfn(start), count };
        let mut runs: Vec<FrameRun> = Vec::new();
        let mut clear = || {
            runs.clear();
            tree.drain_into(&mut runs);
        };
        measure("tree, shared", &mut |s| tree.mark(run(s)).unwrap(), &mut clear);
        let own = RefCell::new(&mut tree);
        let mut clear = || {
            own.borrow_mut().exclusive().drain_into(&mut runs);
            runs.clear();
        };
        let mark = &mut |s| own.borrow_mut().exclusive().mark(run(s)).unwrap();
        measure("tree", mark, &mut clear);
        // The path of a `TrackedBitmap`: all subscribers, counted, and ordered with the write
        // before it. Marks that are still gathered at the end reach the tree with the drain, which
        // is not timed: see the table of marks.
        let tracker = Arc::new(Tracker::new(layout.clone()));
        let mut subscription = tracker.subscribe("bench").unwrap();
        measure("tracker", &mut |s| tracker.mark(run(s)).unwrap(), &mut || {
            subscription.drain().commit();
        });
        let mark = &mut |s| flat.set_addr_range(s as usize * 4096, count as usize * 4096);
        measure("AtomicBitmap", mark, &mut || flat.reset());
    }
    group.finish();
}

fn table_ring(c: &mut Criterion) {
    const SIZE: usize = 65_536;
    let slot = Slot { id: SlotId(0), base: Gfn(0), frames: 1 << 20 };
    let tracker = Arc::new(Tracker::new(Layout::new([slot]).unwrap()));
    let mut subscription = tracker.subscribe("bench").unwrap();
    let ring: Vec<RingEntry> = (0..SIZE).map(|_| RingEntry::default()).collect();
    let mut harvester = Harvester::new(1, SIZE);
    let (mut published, mut random) = (0usize, SplitMix64(7));
    let mut group = quick(c, "ring");
    for row in ["random frames", "sequential frames"] {
        group.bench_function(row, |b| {
            b.iter_custom(|iterations| {
                let (mut total, mut frame) = (Duration::ZERO, 0);
                let count = SIZE - 64;
                for _ in 0..iterations {
                    for _ in 0..count {
                        frame = if row.starts_with('r') { random.next() } else { frame + 1 };
                        let entry = &ring[published % SIZE];
                        entry.offset.store(frame & 0xfffff, Ordering::Relaxed);
                        entry.flags.store(ENTRY_DIRTY, Ordering::Release);
                        published += 1;
                    }
                    let start = Instant::now();
                    let harvest = harvester.harvest([ring.as_slice()]);
                    let harvested = start.elapsed();
                    for entry in &ring {
                        if entry.flags.load(Ordering::Acquire) & ENTRY_RESET != 0 {
                            entry.flags.store(0, Ordering::Release);
                        }
                    }
                    let start = Instant::now();
                    harvest.reprotected(count as u32).insert_into(&tracker);
                    subscription.drain().commit();
                    total += harvested + start.elapsed();
                }
                let rate = (count as u64 * iterations) as f64 / total.as_secs_f64() / 1e6;
                note("65,472 ring entries to runs", row, "million entries a second", rate);
                total
            });
        });
    }
    group.finish();
}

type BenchTable = fn(&mut Criterion);

fn main() {
    let chosen: Vec<String> = std::env::args().skip(1).filter(|a| !a.starts_with('-')).collect();
    let mut criterion = Criterion::default().without_plots();
    let tables: &[(&str, BenchTable)] = &[
        ("2016", table_2016),
        ("12TiB", table_12_tib),
        ("bits", bits::tests),
        ("density", bits::density),
        ("threads", table_threads),
        ("ranges", table_ranges),
        #[cfg(feature = "vm-memory")]
        ("marks", marks::marks),
        ("ring", table_ring),
        ("frameset", frame_set::frame_set),
        #[cfg(feature = "parallel")]
        ("parallel", parallel::parallel),
    ];
    for (name, table) in tables {
        if chosen.is_empty() || chosen.iter().any(|c| c == name) {
            table(&mut criterion);
        }
    }
    criterion.final_summary();
    SUMMARY.take().print();
}
