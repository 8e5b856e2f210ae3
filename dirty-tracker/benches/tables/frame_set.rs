//! Adds a list of ranges to a set, in one pass and in two: ns and instructions for each range.
//!
//! Callgrind counts instructions: it runs this bench again and counts while it is in
//! [`frame_set_under_count`]. The count is exact and the same in every run, also on hosts without
//! hardware counters. Callgrind counts every repetition of a large move (`rep movsb`), so sets that
//! move many ranges look much worse in instructions than in ns. Without valgrind (`apt-get install
//! valgrind`) only the ns are measured.

use std::hint::black_box;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use criterion::{BenchmarkId, Criterion};
use driftline_dirty_tracker::{FrameRun, FrameSet, Gfn};
use rangemap::RangeSet;

use self::two_pass::{InsertAll, InsertEach, Memblock, Ranges};
use crate::{SplitMix64, note, quick};

mod two_pass;

/// Environment variable that is set when callgrind counts.
const COUNTING: &str = "DRIFTLINE_COUNT_FRAME_SET";
const TIME: &str = "adding ranges, ns each";
const INSTRUCTIONS: &str = "adding ranges, instructions each";
/// The rival of one pass: two passes for every range, as in older kernels.
const TWO_PASSES: &str = "two passes";
/// The present kernel: the first pass is skipped while there is room for twice the ranges.
const MEMBLOCK: &str = "memblock";

/// A set of `n` runs of 6 frames, 10 apart, and a list of ranges to add to it.
struct Case {
    name: String,
    set: FrameSet,
    list: Vec<FrameRun>,
}

fn cases() -> Vec<Case> {
    let mut cases = Vec::new();
    for n in [32u64, 512, 2048] {
        let run = |start, count| FrameRun { start: Gfn(start), count };
        let mut random = SplitMix64(n);
        let any = |_| run(random.next() % (16 * n), 1 + random.next() % 24);
        let shuffled: Vec<FrameRun> = (0..n).map(any).collect();
        let mut ascending = shuffled.clone();
        ascending.sort();
        for (name, list) in [
            // Each joins two runs and overlaps both.
            ("overlapping", (0..n / 2).map(|i| run(32 * i + 3, 16)).collect()),
            // Each begins where a run ends, and does not reach the next one.
            ("abutting", (0..n).map(|i| run(16 * i + 6, 4)).collect()),
            // Each lies between two runs.
            ("interleaved", (0..n).map(|i| run(16 * i + 9, 4)).collect()),
            ("of all kinds", ascending),
            ("of all kinds, in any order", shuffled),
        ] {
            let set = (0..n).map(|i| run(16 * i, 6)).collect();
            cases.push(Case { name: format!("{} {name}, to {n}", list.len()), set, list });
        }
    }
    cases
}

type CountedWork<'w> = dyn FnMut() + 'w;

/// Callgrind counts while this function runs.
#[inline(never)]
fn frame_set_under_count(work: &mut CountedWork<'_>) {
    work();
}

fn count<R: Ranges>(case: &Case) {
    // The first call includes look-ups by the dynamic linker.
    R::of(&case.set).add_all(&case.list[..4]);
    let mut set = R::of(&case.set);
    frame_set_under_count(&mut || set.add_all(black_box(&case.list)));
    black_box(set.contents());
}

/// Measures and records the ns; returns the median.
fn time<R: Ranges>(c: &mut Criterion, case: &Case, name: &str) -> f64 {
    let new = R::of(&case.set);
    let mut expected = FrameSet::new();
    for run in case.set.iter().chain(case.list.iter().copied()) {
        expected.insert(run);
    }
    let mut set = new.clone();
    set.add_all(&case.list);
    assert_eq!(set.contents(), expected.iter().map(|r| (r.start.0, r.end().0)).collect::<Vec<_>>());

    // Large batches, so that reading the clock does not matter.
    let at_a_time = (4096 / case.set.len()).max(1);
    let mut samples = Vec::new();
    quick(c, "frameset").bench_function(BenchmarkId::new(name, &case.name), |b| {
        b.iter_custom(|iterations| {
            let mut spent = Duration::ZERO;
            for _ in 0..iterations {
                let mut sets = vec![new.clone(); at_a_time];
                let start = Instant::now();
                sets.iter_mut().for_each(|set| set.add_all(black_box(&case.list)));
                spent += start.elapsed();
                black_box(&sets);
            }
            let ranges = (case.list.len() * at_a_time) as f64 * iterations as f64;
            let each = spent.as_nanos() as f64 / ranges;
            note(TIME, &case.name, name, each);
            samples.push(each);
            spent / at_a_time as u32
        });
    });
    samples.sort_by(f64::total_cmp);
    samples[samples.len() / 2]
}

/// A rival's name, and its functions for both kinds of measurement.
struct RangeRival {
    name: &'static str,
    time: fn(&mut Criterion, &Case, &str) -> f64,
    count: fn(&Case),
}

const fn column<R: Ranges>(name: &'static str) -> RangeRival {
    RangeRival { name, time: time::<R>, count: count::<R> }
}

const COLUMNS: [RangeRival; 6] = [
    column::<InsertAll>("insert_all"),
    column::<InsertEach>("insert"),
    column::<Memblock<false, false>>(TWO_PASSES),
    column::<Memblock<true, false>>(MEMBLOCK),
    column::<Memblock<true, true>>("memblock, searching"),
    column::<RangeSet<u64>>("rangemap"),
];

/// Records what one pass saves, in percent.
fn note_saved(table: &str, case: &Case, values: &[f64]) {
    let of = |name| COLUMNS.iter().zip(values).find(|(c, _)| c.name == name).map(|(_, v)| *v);
    for (name, rival) in
        [("insert_all", TWO_PASSES), ("insert", TWO_PASSES), ("insert_all", MEMBLOCK)]
    {
        if let (Some(one), Some(other)) = (of(name), of(rival)) {
            let column = format!("{name} saves of {rival}, %");
            note(table, &case.name, &column, 100.0 * (1.0 - one / other));
        }
    }
}

/// Returns the instructions of one cell.
fn instructions(cell: usize) -> Result<f64, String> {
    let out = Path::new(env!("CARGO_TARGET_TMPDIR")).join("frame_set.callgrind");
    let io = |e: std::io::Error| format!("{}: {e}", out.display());
    let mut valgrind = Command::new("valgrind");
    valgrind
        .args(["--tool=callgrind", "--toggle-collect=*frame_set_under_count*"])
        .arg(format!("--callgrind-out-file={}", out.display()))
        .arg(std::env::current_exe().map_err(io)?)
        .arg("frameset")
        .env(COUNTING, cell.to_string())
        .stdout(Stdio::null())
        .stderr(Stdio::null());
    let status = valgrind.status().map_err(|e| format!("valgrind cannot be run: {e}"))?;
    if !status.success() {
        return Err(format!("valgrind ended with {status}"));
    }
    let profile = std::fs::read_to_string(&out).map_err(io)?;
    let total = profile.lines().find_map(|l| l.strip_prefix("summary: "));
    let total = total.and_then(|t| t.trim().parse().ok()).filter(|t| *t > 0.0);
    total.ok_or_else(|| format!("{} has no count", out.display()))
}

/// Measures all cases, or counts one cell if callgrind runs this.
pub fn frame_set(c: &mut Criterion) {
    let cases = cases();
    if let Some(cell) = std::env::var(COUNTING).ok().and_then(|cell| cell.parse::<usize>().ok()) {
        (COLUMNS[cell % COLUMNS.len()].count)(&cases[cell / COLUMNS.len()]);
        return;
    }
    let instructions_of = |row: usize| -> Result<Vec<f64>, String> {
        (0..COLUMNS.len()).map(|column| instructions(row * COLUMNS.len() + column)).collect()
    };
    let mut not_counted = None;
    for (row, case) in cases.iter().enumerate() {
        let values: Vec<f64> =
            COLUMNS.iter().map(|column| (column.time)(c, case, column.name)).collect();
        note_saved(TIME, case, &values);
        if not_counted.is_some() {
            continue;
        }
        match instructions_of(row) {
            Ok(totals) => {
                for (column, total) in COLUMNS.iter().zip(&totals) {
                    note(INSTRUCTIONS, &case.name, column.name, total / case.list.len() as f64);
                }
                note_saved(INSTRUCTIONS, case, &totals);
            }
            Err(why) => not_counted = Some(why),
        }
    }
    if let Some(why) = not_counted {
        println!("{INSTRUCTIONS}: not counted, {why}");
    }
}
