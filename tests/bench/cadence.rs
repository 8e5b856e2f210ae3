//! Checkpoints at a rate of a hundred a second: their pauses and intervals, and the guest's speed.
//!
//! `cargo bench -p tests --bench cadence [-- SECONDS]`, 5 by default. A guest of 2 vCPUs and 1 GiB
//! writes a thousand frames in each 10 ms, in order, to 64 MiB: first untracked, then tracked
//! without checkpoints, then with a checkpoint every 10 ms, of which the store retains 20.
//! `DRIFTLINE_BENCH_STORE` names a directory for the store. A thousand frames in 10 ms are 410
//! MB/s, which many disks cannot write; a memory file system can. `DRIFTLINE_BENCH_DIRECT` bypasses
//! the page cache, as `checkpoint --direct-io` does. The cost of a tracking fault drifts on a
//! shared machine, so the tracked guest is measured before and after each row.
#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used, reason = "a bench")]

mod guest;

use std::ops::ControlFlow;
use std::path::Path;
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};

use driftline_checkpoint::{Cadence, Checkpointer, Percentiles, Tally};
use driftline_guest::{DirtyLog, GuestContents};
use driftline_store::Store;
use guest::BenchGuest;
use tests::StolenTime;

const EVERY: Duration = Duration::from_millis(10);
/// Time for which the tracked guest is measured before and after each row.
const BASELINE: Duration = Duration::from_secs(10);
/// 102,400 pages a second.
const SPEC: &str = "payload,ws=64M,rate=400M,pattern=seq";

fn main() {
    if let Err(why) = driftline_machine::doctor::usable_kvm() {
        println!("not measured: {why}");
        return;
    }
    let seconds = std::env::args().skip(1).find_map(|a| a.parse().ok());
    let time = Duration::from_secs(seconds.unwrap_or(5).max(2));
    // The baselines need less time than a long run.
    let short = time.min(Duration::from_secs(10));
    idle_write_protection(short / 2);
    let guest = BenchGuest::start(SPEC, 2);
    let untracked = rate(&guest, || std::thread::sleep(short));
    let tracked = tracked(&guest, short);
    println!(
        "page writes a second: {untracked:.0} untracked, {tracked:.0} tracked ({:.1} %)",
        tracked / untracked * 100.0
    );
    let ways = [
        ("built in", None, time),
        ("after the pause from 128 frames on", Some(128), short),
        ("all in the pause", Some(u64::MAX), short),
    ];
    for (way, background_from, time) in ways {
        checkpointed(&guest, way, background_from, time);
    }
}

/// Returns the page writes a second of a guest that is tracked without checkpoints.
fn tracked(guest: &BenchGuest, time: Duration) -> f64 {
    let mut subscription = guest.machine.subscribe("bench").unwrap();
    rate(guest, || {
        let end = Instant::now() + time;
        while Instant::now() < end {
            std::thread::sleep(EVERY);
            guest.machine.collect().unwrap();
            subscription.drain().commit();
        }
    })
}

/// Prints the cost of registering memory for write protection while no page is protected, with a
/// guest that writes as fast as it can. Both are measured in turn.
fn idle_write_protection(time: Duration) {
    let guest = BenchGuest::start("payload,ws=64M,rate=max,pattern=random", 2);
    let (mut without, mut with) = (Vec::new(), Vec::new());
    for _ in 0..3 {
        without.push(rate(&guest, || std::thread::sleep(time)) / 1e3);
        let protection = guest.machine.write_protection().unwrap();
        assert!(protection.is_some(), "this host has no userfaultfd write protection");
        with.push(rate(&guest, || std::thread::sleep(time)) / 1e3);
    }
    println!(
        "thousand page writes a second: {without:.0?} unregistered, {with:.0?} registered for \
         write protection"
    );
}

/// Returns a checkpointer of `guest` with a new store in `dir`.
fn checkpointer(guest: &BenchGuest, dir: &Path, background_from: Option<u64>) -> Checkpointer {
    let open = match std::env::var_os("DRIFTLINE_BENCH_DIRECT") {
        Some(_) => Store::create_or_open_direct,
        None => Store::create_or_open,
    };
    let store = open(dir).unwrap();
    let mut checkpointer = Checkpointer::new(guest.machine.clone(), store).unwrap();
    if let Some(frames) = background_from {
        checkpointer.background_copy_from(frames);
    }
    checkpointer.keep(Some(20));
    checkpointer
}

fn checkpointed(guest: &BenchGuest, way: &str, background_from: Option<u64>, time: Duration) {
    let parent = std::env::var_os("DRIFTLINE_BENCH_STORE").map(tempfile::tempdir_in);
    let parent = parent.map(|dir| dir.expect("a directory for the store"));
    let dir = parent.as_ref().map_or(guest.dir.path(), |dir| dir.path()).join(way);
    let mut checkpointer = checkpointer(guest, &dir, background_from);
    let size = || {
        let files = std::fs::read_dir(&dir).unwrap();
        files.map(|file| file.unwrap().metadata().unwrap().len()).sum::<u64>() >> 20
    };
    let (mut tally, mut frames, mut copied_after) = (Tally::default(), 0, 0);
    let (mut waits, mut waited_us) = (0, 0);
    let max_pause = Some(Duration::from_millis(2));
    let cadence = Cadence { every: EVERY, count: None, max_pause };
    let (mut half_way, half) = (None, time / 2);
    let before = tracked(guest, time.min(BASELINE));
    // The full checkpoint is not measured.
    checkpointer.take().unwrap();
    let (begun, stolen) = (Instant::now(), StolenTime::begin());
    let writes = rate(guest, || {
        checkpointer.run(&cadence, &AtomicBool::new(false), |taken| {
            tally.add(&taken);
            let report = taken.outcome.as_ref().unwrap();
            (frames, waits) = (frames + report.frames, waits + report.waits);
            (waited_us, copied_after) =
                (waited_us + report.waited_us, copied_after + report.copied_after_frames);
            if half_way.is_none() && begun.elapsed() >= half {
                half_way = Some(size());
            }
            if begun.elapsed() < time { ControlFlow::Continue(()) } else { ControlFlow::Break(()) }
        });
    });
    let stolen = stolen.percent();
    drop(checkpointer);
    let after = tracked(guest, time.min(BASELINE));
    let a = tally.achieved();
    println!("\n| {way}, {} s | p50, ms | p90, ms | p99, ms | max, ms |", time.as_secs());
    println!("| --- | ---: | ---: | ---: | ---: |");
    print_row("pause", a.pause);
    print_row("interval", a.interval);
    print_row("durable after", a.write);
    let of = |sum: u64| sum as f64 / a.epochs.max(1) as f64;
    println!(
        "\n{} epochs of {:.0} frames, {:.0} of them copied after the pause, with {:.1} waits of \
         {:.0} µs in total, {} early, {} skipped; the store has {} MiB, and had {} half-way; \
         {writes:.0} page writes a second ({:.1} % of those of a tracked guest: {before:.0} \
         before, {after:.0} after); {stolen:.1} % of processor time was stolen",
        a.epochs,
        of(frames),
        of(copied_after),
        of(waits),
        of(waited_us),
        a.early,
        a.skipped,
        size(),
        half_way.unwrap_or_default(),
        writes * 200.0 / (before + after),
    );
}

/// Prints a row of the table.
fn print_row(name: &str, percentiles: Percentiles) {
    let Percentiles { p50_us, p90_us, p99_us, max_us } = percentiles;
    let [p50, p90, p99, max] = [p50_us, p90_us, p99_us, max_us].map(|us| us as f64 / 1e3);
    println!("| {name} | {p50:.2} | {p90:.2} | {p99:.2} | {max:.2} |");
}

/// Returns the page writes of all vCPUs in a second of the guest's time while `meanwhile` runs.
fn rate(guest: &BenchGuest, meanwhile: impl FnOnce()) -> f64 {
    let last = |vcpu| guest.reports().filter(|r| r.vcpu == vcpu).last().expect("a report");
    let before = [last(0), last(1)];
    meanwhile();
    let both = before.into_iter().map(|before| {
        let after = last(before.vcpu);
        assert_eq!(after.errors, 0, "{after:?}");
        let ms = after.t_ms.saturating_sub(before.t_ms).max(1);
        (after.pages - before.pages) as f64 * 1e3 / ms as f64
    });
    both.sum()
}
