//! A guest that moves a thousand times from process to process. What a move loses or leaks adds up.

use std::fs;

use driftline_machine::testing::kvm_or_skip;
use tests::{Driftline, SOON, ScratchDir, json_of, repeats};

const GUEST: &str = "payload,ws=16M,rate=100M,pattern=random";
const MACHINE: [&str; 4] = ["--vcpus", "2", "--mem", "256M"];

/// Resources of a process.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
struct ProcessUsage {
    resident_kib: u64,
    files: usize,
    threads: u64,
}

impl ProcessUsage {
    fn of(process: &Driftline) -> Self {
        let proc = format!("/proc/{}", process.pid());
        let status = fs::read_to_string(format!("{proc}/status")).expect("a running process");
        let figure = |name: &str| {
            let line = status.lines().find_map(|line| line.strip_prefix(name));
            let figure = line.and_then(|rest| rest.split_whitespace().next()?.parse().ok());
            figure.expect("a figure of the process")
        };
        let files = fs::read_dir(format!("{proc}/fd")).expect("a running process").count();
        Self { resident_kib: figure("VmRSS:"), files, threads: figure("Threads:") }
    }
}

/// Returns the median of each figure.
fn median(usage: &[ProcessUsage]) -> ProcessUsage {
    fn middle<T: Copy + Ord>(usage: &[ProcessUsage], figure: impl Fn(&ProcessUsage) -> T) -> T {
        let mut sorted: Vec<T> = usage.iter().map(figure).collect();
        sorted.sort_unstable();
        sorted[sorted.len() / 2]
    }
    ProcessUsage {
        resident_kib: middle(usage, |u| u.resident_kib),
        files: middle(usage, |u| u.files),
        threads: middle(usage, |u| u.threads),
    }
}

/// Eight moves, and a thousand with `DRIFTLINE_FULL=1`.
#[test]
fn repeated_migrations_leak_nothing() {
    if !kvm_or_skip("repeated_migrations_leak_nothing") {
        return;
    }
    let hops = repeats(8, 1000);
    let mut scratch = ScratchDir::new();
    let mut source = Driftline::run(&scratch, "hop0", GUEST, &MACHINE);
    source.console().wait_reports(2, 1, SOON);
    let mut usage = Vec::with_capacity(hops);
    let mut downtimes = Vec::with_capacity(hops);
    for hop in 1..=hops {
        // The output of earlier processes is removed with their directory.
        let new = ScratchDir::new();
        let (destination, address) = Driftline::receive(&new, &format!("hop{hop}"));
        let sent = source.cli("send-migration", &[&address, "--json"]);
        let stderr = String::from_utf8_lossy(&sent.stderr);
        assert_eq!(sent.status.code(), Some(0), "hop {hop}: {stderr}\n{}", destination.log());
        downtimes.push(json_of(&sent)["downtime_ms"].as_f64().unwrap_or(f64::NAN));
        assert_eq!(source.wait_exit(SOON), 0, "hop {hop}");
        // The guest has verified its earlier writes.
        destination.console().wait_reports(2, 1, SOON);
        destination.console().assert_clean();
        usage.push(ProcessUsage::of(&destination));
        source = destination;
        scratch = new;
        if hop.is_multiple_of(100) {
            eprintln!("hop {hop}: {:?}", median(&usage[hop - 100..]));
        }
    }
    downtimes.sort_by(f64::total_cmp);
    let few = (hops / 10).max(3);
    let (first, last) = (median(&usage[..few]), median(&usage[hops - few..]));
    eprintln!(
        "{hops} moves, downtime {:.1} ms in the middle, {:.1} ms at most; at first {first:?}, at \
         last {last:?}",
        downtimes[hops / 2],
        downtimes[hops - 1],
    );
    assert_eq!((first.files, first.threads), (last.files, last.threads));
    // Most of the resident memory is the guest's own, which the guest touches over time.
    assert!(last.resident_kib <= first.resident_kib + 4096, "{first:?}, {last:?}");
    assert!(source.cli("stop", &[]).status.success());
    assert_eq!(source.wait_exit(SOON), 0);
    drop(scratch);
}
