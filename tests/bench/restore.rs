//! The time to restore a guest of 1 GiB with 256 MiB of populated memory, eagerly and lazily, with
//! a warm page cache.
//!
//! `cargo bench -p tests --bench restore` prints medians, minima and maxima of five. The first row
//! of each way is the time from the start of the process until the guest runs, by the process's own
//! clock. "Restored" is the rate at which an eager restore reads memory, beside a plain copy of as
//! many bytes into memory that is not resident, on one and on two threads.
#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used, reason = "a bench")]

use std::time::{Duration, Instant};

use tests::{Driftline, SOON, ScratchDir, wait_for};

const SPEC: &str = "payload,ws=256M,rate=max,pattern=random";
const BYTES: usize = 256 << 20;
const TIMES: usize = 5;

fn main() {
    if let Err(why) = driftline_machine::doctor::usable_kvm() {
        println!("not measured: {why}");
        return;
    }
    let scratch = ScratchDir::new();
    let mut guest = Driftline::run(&scratch, "guest", SPEC, &["--mem", "1G"]);
    // In a random order twelve visits for each page leave almost none unwritten.
    let console = guest.console();
    wait_for("twelve passes", Duration::from_secs(120), || {
        (console.last_reports(1)?[0].passes >= 12).then_some(())
    });
    let store = scratch.path("store");
    let store = store.to_str().unwrap();
    assert_eq!(guest.cli("checkpoint", &["--store", store]).status.code(), Some(0));
    guest.kill();
    println!("\n| restore | median | least | most |\n| --- | ---: | ---: | ---: |");
    let mut speeds = Vec::new();
    for (way, args) in [
        ("eager", &["restore", "--store", store][..]),
        ("lazy", &["restore", "--store", store, "--lazy"]),
    ] {
        let (mut runs, mut whole) = (Vec::new(), Vec::new());
        for i in 0..TIMES {
            let mut vm = Driftline::start_logging(&scratch, &format!("{way}{i}"), args);
            // From the log: a command that queries the process would take one of its two
            // processors.
            let us = wait_for("the start in the log", SOON, || vm.figure("start_us="));
            runs.push(us / 1e3);
            if way == "lazy" {
                whole.push(wait_for("all frames", SOON, || {
                    vm.figure("ms=").filter(|_| vm.log().contains("lazy restore complete"))
                }));
            } else {
                // From the log line at the end of the restore.
                let figure = |name| wait_for("the restore's end", SOON, || vm.figure(name));
                speeds.push(figure("frames=") * 4096.0 / figure("ms=") / 1e3);
            }
            vm.console().wait_reports(1, 1, SOON);
            vm.console().assert_clean();
            vm.kill();
        }
        row(&format!("{way}: start of the process to the guest running, ms"), runs);
        if !whole.is_empty() {
            row("lazy: until the restore is complete, ms", whole);
        }
    }
    row("eager: restored, MB/s", speeds);
    row(
        "copy of 256 MiB into untouched memory, 1 thread, MB/s",
        (0..TIMES).map(|_| copy(1)).collect(),
    );
    row("the same, 2 threads, MB/s", (0..TIMES).map(|_| copy(2)).collect());
}

/// Copies 256 MiB on `threads` threads. Returns MB/s.
fn copy(threads: usize) -> f64 {
    let from = vec![1u8; BYTES];
    let since = Instant::now();
    std::thread::scope(|scope| {
        for part in from.chunks(BYTES / threads) {
            scope.spawn(move || std::hint::black_box(part.to_vec()));
        }
    });
    BYTES as f64 / since.elapsed().as_secs_f64() / 1e6
}

fn row(name: &str, mut of: Vec<f64>) {
    of.sort_by(f64::total_cmp);
    println!("| {name} | {:.1} | {:.1} | {:.1} |", of[of.len() / 2], of[0], of[of.len() - 1]);
}
