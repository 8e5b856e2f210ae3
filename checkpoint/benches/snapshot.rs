//! The cost of writing a memory file until it is durable: whether it pays to begin the writeback
//! early, in which steps, and to write on two threads.
//!
//! `cargo bench -p driftline-checkpoint --bench snapshot [-- REPETITIONS]`. Each repetition writes
//! a new sparse file of 1 GiB from guest memory: 64 MiB of it in runs of 64 KiB, as a diff may, or
//! 64 or 256 MiB in one run. The methods take turns. Then it takes snapshots of the same amounts of
//! a paused guest. Prints milliseconds, each the median. `DRIFTLINE_BENCH_STORE` names another
//! directory.
#![allow(clippy::print_stdout, clippy::unwrap_used)]

use std::fs::File;
use std::path::Path;
use std::time::Instant;

use driftline_checkpoint::{SnapshotFile, SnapshotKind, SnapshotRequest, create_snapshot};
use driftline_dirty_tracker::{FrameRun, Gfn, Slot, SlotId};
use driftline_format::range_write::{begin_writeback, write_guest_at};
use driftline_guest::testing::{MemoryConfig, MemoryGuest};
use driftline_guest::{DirtyLog, GuestContents, GuestRam, VmId};

const MEMORY_FRAMES: u64 = 1 << 18;

/// How runs are written.
#[derive(Clone, Copy)]
struct SnapshotWrite {
    name: &'static str,
    /// Frames after which writeback begins, if it begins before the sync.
    step: Option<u64>,
    threads: usize,
}

fn write(file: &File, ram: &GuestRam, runs: &[FrameRun], step: Option<u64>) {
    let (mut unwritten, mut from) = (0, None);
    for piece in runs.iter().flat_map(|run| run.chunks(step.unwrap_or(u64::MAX))) {
        let at = piece.start.gpa();
        write_guest_at(file, ram, piece, at).unwrap();
        let (begin, end) = (*from.get_or_insert(at), at + piece.bytes());
        unwritten += piece.count;
        if step.is_some_and(|step| unwritten >= step) {
            begin_writeback(file, begin, end - begin);
            (unwritten, from) = (0, None);
        }
    }
}

/// Writes a new file, and returns the milliseconds until all is written and until all is durable.
fn take(path: &Path, ram: &GuestRam, runs: &[FrameRun], method: SnapshotWrite) -> (f64, f64) {
    let since = Instant::now();
    let file = File::create_new(path).unwrap();
    file.set_len(MEMORY_FRAMES << 12).unwrap();
    std::thread::scope(|scope| {
        for runs in runs.chunks(runs.len().div_ceil(method.threads)) {
            let file = &file;
            scope.spawn(move || write(file, ram, runs, method.step));
        }
    });
    let written = since.elapsed();
    file.sync_data().unwrap();
    let durable = since.elapsed();
    std::fs::remove_file(path).unwrap();
    (written.as_secs_f64() * 1e3, durable.as_secs_f64() * 1e3)
}

fn median(mut of: Vec<f64>) -> f64 {
    of.sort_by(f64::total_cmp);
    of[of.len() / 2]
}

fn main() {
    let repetitions: usize = std::env::args().skip(1).find_map(|a| a.parse().ok()).unwrap_or(5);
    let place = std::env::var_os("DRIFTLINE_BENCH_STORE").unwrap_or_else(|| ".".into());
    let dir = tempfile::tempdir_in(place).unwrap();
    let slots = vec![Slot { id: SlotId(0), base: Gfn(0), frames: MEMORY_FRAMES }];
    let config = MemoryConfig { slots, ..MemoryConfig::still() };
    let guest = MemoryGuest::new(VmId::random(), config).unwrap();
    let scattered: Vec<FrameRun> =
        (0..1024).map(|n| FrameRun { start: Gfn(n * 256), count: 16 }).collect();
    let whole = |count| FrameRun { start: Gfn(0), count }.chunks(2048).collect::<Vec<FrameRun>>();
    let contents =
        [("64 MiB scattered", scattered), ("64 MiB", whole(1 << 14)), ("256 MiB", whole(1 << 16))];
    let mut changes = guest.subscribe("bench").unwrap();
    let dirty = |runs: &[FrameRun]| {
        for gfn in runs.iter().flat_map(|run| run.frames()) {
            guest.write(gfn, &[gfn.0 as u8 | 1; 4096]).unwrap();
        }
    };
    let method = |name, step, threads| SnapshotWrite { name, step, threads };
    let methods = [
        method("sync only", None, 1),
        method("writeback each 256 KiB", Some(64), 1),
        method("writeback each MiB", Some(256), 1),
        method("writeback each 8 MiB", Some(2048), 1),
        method("2 threads, sync only", None, 2),
        method("2 threads, writeback each MiB", Some(256), 2),
        method("2 threads, writeback each 8 MiB", Some(2048), 2),
    ];
    println!("| content | method | written, ms | durable, ms |");
    println!("| --- | --- | ---: | ---: |");
    for (content, runs) in &contents {
        dirty(runs);
        let mut taken = methods.map(|_| (Vec::new(), Vec::new()));
        for _ in 0..repetitions {
            for (method, taken) in methods.iter().zip(&mut taken) {
                let (written, durable) = take(&dir.path().join("file"), guest.ram(), runs, *method);
                taken.0.push(written);
                taken.1.push(durable);
            }
        }
        for (method, (written, durable)) in methods.iter().zip(taken) {
            let (written, durable) = (median(written), median(durable));
            println!("| {content} | {} | {written:.1} | {durable:.1} |", method.name);
        }
    }
    for (content, runs) in &contents {
        let (mut written, mut all) = (Vec::new(), Vec::new());
        for n in 0..repetitions {
            drop(changes);
            changes = guest.subscribe("bench").unwrap();
            dirty(runs);
            let at =
                |name: &str| SnapshotFile::at(&dir.path().join(format!("{name}-{n}"))).unwrap();
            let (memory, state) = (at("memory"), at("state"));
            let kind = SnapshotKind::Diff;
            let (backing, since_boot, extra) = (None, false, Vec::new());
            let request = SnapshotRequest { kind, memory, state, backing, since_boot, extra };
            let report = create_snapshot(&*guest, Some(&mut changes), &request).unwrap();
            written.push(report.write_ms);
            all.push(report.time_ms);
            std::fs::remove_file(request.memory.path()).unwrap();
            std::fs::remove_file(request.state.path()).unwrap();
        }
        let (written, all) = (median(written), median(all));
        println!("| {content} | snapshot | {written:.1} | {all:.1} |");
    }
}
