//! A hundred checkpoints a second: what they achieve, and what is left of the guest.
//!
//! `cargo bench -p tests --bench cadence [-- SECONDS]`, 5 unless given; issue 6 asks for a minute.
//! A guest of 2 vCPUs and 1 GiB writes a thousand frames in each 10 ms, going over 64 MiB: first by
//! itself, then with its writes followed and nothing stored, then with a checkpoint every 10 ms, of
//! which 20 are kept. `DRIFTLINE_BENCH_STORE` names a folder for the store: a thousand frames in 10
//! ms are 410 MB a second, which not every disk takes; a memory file system does. With
//! `DRIFTLINE_BENCH_DIRECT` set they go past the page cache, as with `checkpoint --direct-io`. What
//! a fault of tracking costs drifts with a machine's neighbours: the guest is followed without
//! checkpoints before and after each row.
#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used, reason = "a bench")]

mod guest;

use std::ops::ControlFlow;
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};

use driftline_checkpoint::{Cadence, Checkpointer, Spread, Tally};
use driftline_guest::{DirtyLog, GuestContents};
use driftline_store::Store;
use guest::BenchGuest;
use tests::StolenTime;

const EVERY: Duration = Duration::from_millis(10);
/// How long a guest is followed before each row, and after it.
const BESIDE: Duration = Duration::from_secs(10);
/// 102,400 pages a second.
const SPEC: &str = "payload,ws=64M,rate=400M,pattern=seq";

fn main() {
    if let Err(why) = driftline_machine::doctor::usable_kvm() {
        println!("not measured: {why}");
        return;
    }
    let asked = std::env::args().skip(1).find_map(|a| a.parse().ok());
    let time = Duration::from_secs(asked.unwrap_or(5).max(2));
    // What stands beside it needs no minute.
    let short = time.min(Duration::from_secs(10));
    idle_shield(short / 2);
    let guest = BenchGuest::start(SPEC, 2);
    let alone = rate(&guest, || std::thread::sleep(short));
    let followed = followed(&guest, short);
    println!(
        "page writes a second: {alone:.0} by itself, {followed:.0} followed ({:.1} %)",
        followed / alone * 100.0
    );
    let ways = [
        ("built in", None, time),
        ("behind the guest from 128 frames on", Some(128), short),
        ("all in the pause", Some(u64::MAX), short),
    ];
    for (way, behind_from, time) in ways {
        checkpointed(&guest, way, behind_from, time);
    }
}

/// Page writes a second of a guest whose writes are followed, and nothing else.
fn followed(guest: &BenchGuest, time: Duration) -> f64 {
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

/// What it costs a guest that it could be shielded, while nothing is protected: as fast as it can,
/// in turns.
fn idle_shield(time: Duration) {
    let guest = BenchGuest::start("payload,ws=64M,rate=max,pattern=random", 2);
    let (mut without, mut with) = (Vec::new(), Vec::new());
    for _ in 0..3 {
        without.push(rate(&guest, || std::thread::sleep(time)) / 1e3);
        let shield = guest.machine.shield().unwrap();
        assert!(shield.is_some(), "this host has no userfaultfd that protects");
        with.push(rate(&guest, || std::thread::sleep(time)) / 1e3);
    }
    println!(
        "thousand page writes a second: {without:.0?} without a shield, {with:.0?} with one that protects nothing"
    );
}

fn checkpointed(guest: &BenchGuest, way: &str, behind_from: Option<u64>, time: Duration) {
    let place = std::env::var_os("DRIFTLINE_BENCH_STORE").map(tempfile::tempdir_in);
    let place = place.map(|place| place.expect("a folder for the store"));
    let dir = place.as_ref().map_or(guest.dir.path(), |place| place.path()).join(way);
    let open = match std::env::var_os("DRIFTLINE_BENCH_DIRECT") {
        Some(_) => Store::create_or_open_direct,
        None => Store::create_or_open,
    };
    let store = open(&dir).unwrap();
    let mut checkpointer = Checkpointer::new(guest.machine.clone(), store).unwrap();
    if let Some(frames) = behind_from {
        checkpointer.copy_behind_from(frames);
    }
    checkpointer.keep(Some(20));
    let size = || {
        let files = std::fs::read_dir(&dir).unwrap();
        files.map(|file| file.unwrap().metadata().unwrap().len()).sum::<u64>() >> 20
    };
    let (mut tally, mut frames, mut behind) = (Tally::default(), 0, 0);
    let (mut waits, mut waited_us) = (0, 0);
    let max_pause = Some(Duration::from_millis(2));
    let cadence = Cadence { every: EVERY, count: None, max_pause };
    let (mut half_way, half) = (None, time / 2);
    let before = followed(guest, time.min(BESIDE));
    // What has changed by now, or a full one, is not what this is about.
    checkpointer.take().unwrap();
    let (begun, stolen) = (Instant::now(), StolenTime::begin());
    let writes = rate(guest, || {
        checkpointer.run(&cadence, &AtomicBool::new(false), |taken| {
            tally.add(&taken);
            let report = taken.outcome.as_ref().unwrap();
            (frames, waits) = (frames + report.frames, waits + report.waits);
            (waited_us, behind) = (waited_us + report.waited_us, behind + report.behind_frames);
            if half_way.is_none() && begun.elapsed() >= half {
                half_way = Some(size());
            }
            if begun.elapsed() < time { ControlFlow::Continue(()) } else { ControlFlow::Break(()) }
        });
    });
    let stolen = stolen.percent();
    drop(checkpointer);
    let after = followed(guest, time.min(BESIDE));
    let a = tally.achieved();
    println!("\n| {way}, {} s | p50, ms | p90, ms | p99, ms | max, ms |", time.as_secs());
    println!("| --- | ---: | ---: | ---: | ---: |");
    for (name, s) in [("pause", a.pause), ("interval", a.interval), ("durable after", a.write)] {
        let Spread { p50_us, p90_us, p99_us, max_us } = s;
        let [p50, p90, p99, max] = [p50_us, p90_us, p99_us, max_us].map(|us| us as f64 / 1e3);
        println!("| {name} | {p50:.2} | {p90:.2} | {p99:.2} | {max:.2} |");
    }
    let of = |sum: u64| sum as f64 / a.epochs.max(1) as f64;
    println!(
        "\n{} epochs of {:.0} frames, {:.0} of them behind, with {:.1} waits of {:.0} us in all, {} early, {} left out; the store has {} MiB, and had {} half-way; \
         {writes:.0} page writes a second ({:.1} % of those of a guest that is followed: {before:.0} before, {after:.0} after); \
         {stolen:.1} % of the processors were stolen",
        a.epochs,
        of(frames),
        of(behind),
        of(waits),
        of(waited_us),
        a.early,
        a.skipped,
        size(),
        half_way.unwrap_or_default(),
        writes * 200.0 / (before + after),
    );
}

/// Page writes a second of the guest's own time while `meanwhile` lasts, all vCPUs together.
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
