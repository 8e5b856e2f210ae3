//! Measures what huge pages gain a guest, what memory files cost it, how tracking affects both, and
//! which pages prefault memory fastest: `cargo bench -p driftline-backends --bench huge_pages`.
//!
//! First 512 MiB are prefaulted as in a migration's destination, in ranges of 2 MiB: with the pages
//! that the machine chooses, with huge pages alone and with small pages alone.
//!
//! Then a guest with one vCPU writes 512 MiB as fast as it can: first touches; then untracked; then
//! with a subscriber that drains every 100 ms; then untracked again. `hugetlbfs` needs a pool:
//! `sysctl vm.nr_hugepages=600`.
//!
//! The results are medians of several rounds. Each round has all kinds of pages in turn.
#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used, reason = "a bench")]

use std::path::Path;
use std::time::{Duration, Instant};

use driftline_dirty_tracker::{FrameRun, Gfn};
use driftline_guest::{DirtyLog, Lifecycle};
use driftline_images::PayloadReport;
use driftline_machine::config::{
    BackendKind, Boot, CpuConfig, DEFAULT_RING_ENTRIES, HostConfig, MachineConfig, SerialSink,
};
use driftline_machine::machine::KvmMachine;
use driftline_machine::memory::{Backing, HugePages, Memory, MemoryOptions};
use driftline_machine::tracking::TrackingMode;

const ROUNDS: usize = 3;
const WINDOW: Duration = Duration::from_millis(3500);
const EPOCH: Duration = Duration::from_millis(100);
/// Number of 4 KiB pages in the working set.
const PAGES: u64 = 512 << 8;
const LONG: Duration = Duration::from_secs(60);

/// Kinds of memory that a guest is measured with.
const KINDS: [(Backing, HugePages); 5] = [
    (Backing::Anon, HugePages::None),
    (Backing::Memfd, HugePages::None),
    (Backing::Anon, HugePages::Thp),
    (Backing::Memfd, HugePages::Thp),
    (Backing::Anon, HugePages::Hugetlbfs),
];

const COLUMNS: [&str; 5] = [
    "first 512 MiB, ms",
    "untracked, pages/ms",
    "tracked, pages/ms",
    "frames an epoch",
    "untracked again, pages/ms",
];

fn main() {
    prefaults();
    if let Err(why) = driftline_machine::doctor::usable_kvm() {
        println!("not measured: {why}");
        return;
    }
    let mut samples = vec![vec![Vec::new(); COLUMNS.len()]; KINDS.len() * 2];
    let mut why_not = Vec::new();
    for _ in 0..ROUNDS {
        for (k, kind) in KINDS.into_iter().enumerate() {
            for (t, tracking) in
                [TrackingMode::DirtyRing, TrackingMode::DirtyBitmap].into_iter().enumerate()
            {
                match measure(kind, tracking) {
                    Ok(values) => {
                        values.into_iter().zip(&mut samples[2 * k + t]).for_each(|(v, s)| s.push(v))
                    }
                    Err(why) if why_not.contains(&why) => {}
                    Err(why) => why_not.push(why),
                }
            }
        }
    }
    println!("\n| memory, huge pages, tracking | {} |", COLUMNS.join(" | "));
    println!("|{}", " --- |".repeat(COLUMNS.len() + 1));
    for (row, cells) in samples.iter_mut().enumerate().filter(|(_, c)| !c[0].is_empty()) {
        let tracking = if row % 2 == 0 { "dirty-ring" } else { "dirty-bitmap" };
        let cells: Vec<String> = cells.iter_mut().map(|c| format!("{:.0}", median(c))).collect();
        let (backing, huge_pages) = KINDS[row / 2];
        println!("| {backing}, {huge_pages}, {tracking} | {} |", cells.join(" | "));
    }
    why_not.iter().for_each(|why| println!("not measured: {why}"));
}

/// Compares the machine's choice of pages for prefaulted memory with each page size alone.
fn prefaults() {
    let kinds =
        [("chosen", None), ("huge", Some(HugePages::Thp)), ("small", Some(HugePages::None))];
    let mut samples = vec![Vec::new(); kinds.len()];
    for _ in 0..ROUNDS {
        for ((_, huge_pages), samples) in kinds.iter().zip(&mut samples) {
            samples.push(prefault_ms(*huge_pages));
        }
    }
    println!("| pages | 512 MiB prefaulted, ms |\n| --- | ---: |");
    for ((name, _), samples) in kinds.iter().zip(&mut samples) {
        println!("| {name} | {:.0} |", median(samples));
    }
}

fn prefault_ms(huge_pages: Option<HugePages>) -> f64 {
    let options = MemoryOptions { huge_pages, ..MemoryOptions::default() };
    let memory = Memory::new(1 << 30, &options).unwrap();
    let begun = Instant::now();
    FrameRun { start: Gfn(0), count: PAGES }.chunks(512).for_each(|run| memory.prefault(run));
    begun.elapsed().as_secs_f64() * 1e3
}

fn median(values: &mut [f64]) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

fn measure(
    (backing, huge_pages): (Backing, HugePages),
    tracking: TrackingMode,
) -> Result<Vec<f64>, String> {
    let dir = tempfile::tempdir().unwrap();
    let serial = dir.path().join("serial");
    let memory = MemoryOptions { backing, huge_pages: Some(huge_pages), prefault: false };
    let host =
        HostConfig { serial: SerialSink::File(serial.clone()), memory, ..Default::default() };
    let config = MachineConfig {
        identity: Default::default(),
        mem_bytes: 1 << 30,
        vcpus: 1,
        tracking,
        ring_entries: DEFAULT_RING_ENTRIES,
        backend: BackendKind::Kvm,
        boot: Boot::Payload("payload,ws=512M,rate=max,pattern=seq".to_owned()),
        cpu: CpuConfig::default(),
        devices: Vec::new(),
    };
    let image = driftline_backends::image(&config).unwrap();
    let host = HostConfig { image, ..host };
    let machine =
        KvmMachine::launch(config, &host).map_err(|e| format!("{backing}, {huge_pages}: {e}"))?;
    let start = Instant::now();
    machine.resume().unwrap();
    while reports(&serial).iter().all(|r| r.passes == 0) {
        assert!(start.elapsed() < LONG, "the guest has not written its memory once");
        std::thread::sleep(Duration::from_millis(5));
    }
    let first = reports(&serial).into_iter().find(|r| r.passes > 0);
    let untracked = rate(&serial, |_| std::thread::sleep(WINDOW));
    // The first report's time, without the share spent on pages that had been touched before.
    let touched = first.map(|r| r.t_ms as f64 - r.pages.saturating_sub(PAGES) as f64 / untracked);
    let mut frames = Vec::new();
    let tracked = {
        let mut subscription = machine.subscribe("bench").unwrap();
        rate(&serial, |_| {
            let end = Instant::now() + WINDOW;
            while Instant::now() < end {
                std::thread::sleep(EPOCH);
                machine.collect().unwrap();
                let epoch = subscription.drain();
                frames.push(epoch.frames() as f64);
                epoch.commit();
            }
        })
    };
    let again = rate(&serial, |_| std::thread::sleep(WINDOW));
    machine.stop("measured");
    Ok(vec![touched.unwrap_or(f64::NAN), untracked, tracked, median(&mut frames), again])
}

fn reports(serial: &Path) -> Vec<PayloadReport> {
    let text = std::fs::read_to_string(serial).unwrap_or_default();
    PayloadReport::all_of(&text).collect()
}

/// Returns the pages that the guest writes per millisecond of its own clock during `meanwhile`.
fn rate(serial: &Path, meanwhile: impl FnOnce(&Path)) -> f64 {
    let before = reports(serial).last().map_or((0, 0), |r| (r.t_ms, r.pages));
    meanwhile(serial);
    let after = reports(serial).last().map_or((0, 0), |r| (r.t_ms, r.pages));
    (after.1 - before.1) as f64 / (after.0 - before.0).max(1) as f64
}
