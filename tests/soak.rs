//! A guest that moves a thousand times, from process to process: what is lost or left behind at
//! each move adds up.
#![allow(clippy::expect_used, reason = "a test fails by saying what it expected")]

use std::fs;

use driftline_machine::testing::kvm_or_skip;
use tests::{Driftline, SOON, ScratchDir, json_of, repeats};

const GUEST: &str = "payload,ws=16M,rate=100M,pattern=random";
const MACHINE: [&str; 4] = ["--vcpus", "2", "--mem", "256M"];

/// What a process holds of its host.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
struct ProcessUsage {
    resident_kib: u64,
    files: usize,
    threads: u64,
}

impl ProcessUsage {
    fn by(process: &Driftline) -> Self {
        let of = format!("/proc/{}", process.pid());
        let status = fs::read_to_string(format!("{of}/status")).expect("a process that lives");
        let figure = |name: &str| {
            let line = status.lines().find_map(|line| line.strip_prefix(name));
            let figure = line.and_then(|rest| rest.split_whitespace().next()?.parse().ok());
            figure.expect("a figure of the process")
        };
        let files = fs::read_dir(format!("{of}/fd")).expect("a process that lives").count();
        Self { resident_kib: figure("VmRSS:"), files, threads: figure("Threads:") }
    }
}

/// By each figure, the median of several.
fn median(held: &[ProcessUsage]) -> ProcessUsage {
    fn middle<T: Copy + Ord>(held: &[ProcessUsage], figure: impl Fn(&ProcessUsage) -> T) -> T {
        let mut sorted: Vec<T> = held.iter().map(figure).collect();
        sorted.sort_unstable();
        sorted[sorted.len() / 2]
    }
    ProcessUsage {
        resident_kib: middle(held, |h| h.resident_kib),
        files: middle(held, |h| h.files),
        threads: middle(held, |h| h.threads),
    }
}

/// A few times, and a thousand with `DRIFTLINE_FULL=1`.
#[test]
fn repeated_migrations_leak_nothing() {
    if !kvm_or_skip("repeated_migrations_leak_nothing") {
        return;
    }
    let _alone = tests::one_at_a_time();
    let hops = repeats(8, 1000);
    let mut scratch = ScratchDir::new();
    let mut here = Driftline::run(&scratch, "hop0", GUEST, &MACHINE);
    here.console().wait_reports(2, 1, SOON);
    let mut held = Vec::with_capacity(hops);
    let mut downtimes = Vec::with_capacity(hops);
    for hop in 1..=hops {
        // What the processes before have printed goes with this.
        let new = ScratchDir::new();
        let (there, address) = Driftline::receive(&new, &format!("hop{hop}"));
        let sent = here.cli("send-migration", &[&address, "--json"]);
        let said = String::from_utf8_lossy(&sent.stderr);
        assert_eq!(sent.status.code(), Some(0), "hop {hop}: {said}\n{}", there.log());
        downtimes.push(json_of(&sent)["downtime_ms"].as_f64().unwrap_or(f64::NAN));
        assert_eq!(here.wait_exit(SOON), 0, "hop {hop}");
        // It has verified what it wrote before.
        there.console().wait_reports(2, 1, SOON);
        there.console().assert_clean();
        held.push(ProcessUsage::by(&there));
        here = there;
        scratch = new;
        if hop.is_multiple_of(100) {
            eprintln!("hop {hop}: {:?}", median(&held[hop - 100..]));
        }
    }
    downtimes.sort_by(f64::total_cmp);
    let few = (hops / 10).max(3);
    let (first, last) = (median(&held[..few]), median(&held[hops - few..]));
    eprintln!(
        "{hops} moves, downtime {:.1} ms in the middle, {:.1} ms at most; at first {first:?}, at last {last:?}",
        downtimes[hops / 2],
        downtimes[hops - 1],
    );
    assert_eq!((first.files, first.threads), (last.files, last.threads));
    // The guest's own memory, all of it touched by and by, is the most of it.
    assert!(last.resident_kib <= first.resident_kib + 4096, "{first:?}, {last:?}");
    assert!(here.cli("stop", &[]).status.success());
    assert_eq!(here.wait_exit(SOON), 0);
    drop(scratch);
}
