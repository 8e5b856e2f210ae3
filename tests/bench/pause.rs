//! The pause of a checkpoint, and the time that vCPUs lose afterwards, over the number of frames
//! that changed.
//!
//! `cargo bench -p tests --bench pause [-- EPOCHS [VCPUS]]`, 100 and 2 by default. A guest of 1 GiB
//! writes a working set of the given number of frames as fast as it can, so that all of it changes
//! in each epoch. There are three ways: all frames are copied in the pause; all are copied after
//! it; and the built-in policy, which chooses. Epochs begin at eight phases of the host's scheduler
//! tick. Stolen processor time lengthens the figures, so its share is in the last column. The store
//! of a row is in the temporary directory and has at most 8 GiB: rows of many frames have fewer
//! epochs.
#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used, reason = "a bench")]

mod guest;

use std::time::Duration;

use driftline_checkpoint::{Checkpointer, EpochReport};
use driftline_guest::Lifecycle;
use driftline_store::Store;
use guest::BenchGuest;
use tests::StolenTime;

const FRAMES: [u64; 7] = [0, 16, 256, 1024, 4096, 16384, 65536];
/// Interval between two ticks of a scheduler at 250 Hz.
const TICK: Duration = Duration::from_millis(4);
/// Number of phases of the tick at which epochs begin in turn.
const PHASES: u32 = 8;
/// Bytes of the epochs of one row.
const ROW_BYTES: u64 = 8 << 30;
const WAYS: [(&str, Option<u64>); 3] =
    [("in the pause", Some(u64::MAX)), ("after it", Some(1)), ("built in", None)];

fn main() {
    if let Err(why) = driftline_machine::doctor::usable_kvm() {
        println!("not measured: {why}");
        return;
    }
    let mut counts = std::env::args().skip(1).filter_map(|a| a.parse::<u8>().ok());
    let epochs = usize::from(counts.next().unwrap_or(100));
    let vcpus = counts.next().unwrap_or(2);
    println!(
        "| frames written | way | frames | pause p50, ms | pause p99, ms | durable p50, ms | \
         MiB/epoch | copied after p50 | waits p50 | gap p50, ms | gap max, ms | full: pause, ms | \
         stolen, % |"
    );
    println!("|{}", " ---: |".repeat(13));
    for frames in FRAMES {
        for (way, background_from) in WAYS {
            row(frames, way, background_from, epochs, vcpus);
        }
    }
}

fn row(frames: u64, way: &str, background_from: Option<u64>, epochs: usize, vcpus: u8) {
    // Nearly no writes: a guest without any does not report progress.
    let (set, rate) = if frames == 0 { (2, "rate=8K") } else { (frames.max(2), "rate=max") };
    let spec = format!("payload,ws={}K,{rate},pattern=random", set * 4);
    let guest = BenchGuest::start(&spec, vcpus);
    let store = Store::create_or_open(&guest.dir.path().join("store")).unwrap();
    let mut checkpointer = Checkpointer::new(guest.machine.clone(), store).unwrap();
    if let Some(frames) = background_from {
        checkpointer.background_copy_from(frames);
    }
    let full = checkpointer.take().unwrap();
    let reports_before = guest.reports().count();
    // Long enough for the guest to rewrite its working set and for the disk to become idle.
    let pace = Duration::from_millis(20 + frames / 100);
    let mut taken: Vec<EpochReport> = Vec::new();
    let stolen = StolenTime::begin();
    let room = ROW_BYTES / (frames.max(1) * driftline_dirty_tracker::PAGE_SIZE);
    let phases = (0..PHASES).map(|phase| TICK * phase / PHASES).cycle();
    for phase in phases.take(epochs.min(room as usize)) {
        // Epochs at one phase of the tick would all wait for it, or none: a row would show one of
        // two durations by chance.
        std::thread::sleep(pace + phase);
        taken.push(checkpointer.take().unwrap());
    }
    let stolen = stolen.percent();
    // Each vCPU reports its longest gap once a second.
    std::thread::sleep(Duration::from_millis(1100));
    let mut gaps: Vec<f64> =
        guest.reports().skip(reports_before).map(|r| r.gap_us as f64 / 1e3).collect();
    assert!(guest.reports().all(|r| r.errors == 0), "the guest found errors");
    guest.machine.stop("measured");
    let of = |figure: fn(&EpochReport) -> f64, p| {
        percentile(&mut taken.iter().map(figure).collect::<Vec<_>>(), p)
    };
    println!(
        "| {frames} | {way} | {:.0} | {:.2} | {:.2} | {:.1} | {:.1} | {:.0} | {:.0} | {:.1} | \
         {:.1} | {:.2} | {stolen:.1} |",
        of(|r| r.frames as f64, 0.5),
        of(|r| r.pause_us as f64 / 1e3, 0.5),
        of(|r| r.pause_us as f64 / 1e3, 0.99),
        of(|r| r.write_ms, 0.5),
        of(|r| r.written_bytes as f64, 0.5) / f64::from(1 << 20),
        of(|r| r.copied_after_frames as f64, 0.5),
        of(|r| r.waits as f64, 0.5),
        percentile(&mut gaps, 0.5),
        percentile(&mut gaps, 1.0),
        full.pause_us as f64 / 1e3,
    );
}

/// Returns the value below which the share `p` (0 to 1) of the values lies.
fn percentile(values: &mut [f64], p: f64) -> f64 {
    values.sort_by(f64::total_cmp);
    let last = values.len().saturating_sub(1) as f64;
    values.get((last * p).round() as usize).copied().unwrap_or(f64::NAN)
}
