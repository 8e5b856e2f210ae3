//! Compares a live migration with QEMU's, of the same guest on the same machine, in turn:
//! `cargo bench -p tests --bench migrate_vs_qemu`.
//!
//! | table | rows | figures |
//! | --- | --- | --- |
//! | migration | loads | total time and downtime as each program reports them, the downtime measured across both processes, and the guest's own longest gap |
//! | throughput | pass 0 of incompressible memory | MB/s beside a plain copy through a socket, CPU seconds a GiB |
//!
//! The reported downtimes do not compare. QEMU's is in whole milliseconds and ends when the source
//! has sent all data. Driftline's is from the pause to the first instruction at the destination, as
//! far as the source knows. Therefore the downtime is also measured from events of both processes
//! of a program, on the one clock of this host. For Driftline it begins with the source's request
//! to pause and ends when the destination has resumed the guest. For QEMU it begins with the
//! source's event STOP, when vCPUs are already paused, and ends with the destination's event
//! RESUME, before they run. The ratio is of these downtimes.
//!
//! The figures are medians of five pairs. A word as an argument selects the rows whose name
//! contains it; a number is the number of pairs.
#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a bench")]

mod copy;
mod process;
mod qemu;

use std::fs;

use driftline_images::PayloadSpec;
use process::{CpuTimes, has_ended, wait_for_pass};
use qemu::QemuProcess;
use tests::{Driftline, GuestConsole, SOON, ScratchDir, json_of};

/// Default number of pairs of migrations.
const PAIRS: usize = 5;
const DOWNTIME_MS: u64 = 300;

/// A guest and its load.
struct BenchLoad {
    name: &'static str,
    spec: &'static str,
    mem: &'static str,
    vcpus: u32,
}

const LOADS: [BenchLoad; 6] = [
    BenchLoad {
        name: "1 GiB, 64 MiB at 320 MiB/s",
        spec: "payload,ws=64M,rate=320M",
        mem: "1G",
        vcpus: 1,
    },
    BenchLoad {
        name: "1 GiB, 64 MiB at 320 MiB/s, 2 vCPUs",
        spec: "payload,ws=64M,rate=320M",
        mem: "1G",
        vcpus: 2,
    },
    BenchLoad { name: "4 GiB, mostly idle", spec: "payload,ws=4M,rate=1M", mem: "4G", vcpus: 1 },
    BenchLoad {
        name: "1 GiB, 256 MiB as fast as it can",
        spec: "payload,ws=256M,rate=max",
        mem: "1G",
        vcpus: 1,
    },
    BenchLoad {
        name: "1 GiB, 256 MiB, one word a page, never idle",
        spec: "payload,ws=256M,rate=max,check=end",
        mem: "1G",
        vcpus: 1,
    },
    BenchLoad {
        name: "4 GiB, 64 pages each 8 ms, spins between",
        spec: "payload,ws=4M,rate=32M,burst=64,idle=spin",
        mem: "4G",
        vcpus: 1,
    },
];

/// A guest whose memory does not compress and is written only once.
const BULK: BenchLoad = BenchLoad {
    name: "throughput",
    spec: "payload,ws=768M,rate=400M,pattern=once,fill=random",
    mem: "1G",
    vcpus: 1,
};
const BULK_BYTES: usize = 768 << 20;

/// One migration.
struct MigrationSample {
    total_ms: f64,
    downtime_ms: f64,
    /// Downtime from events of both processes, by one clock.
    measured_downtime_ms: f64,
    /// Longest time for which a vCPU did not run around the migration.
    gap_ms: f64,
    /// Rate of the first pass, bytes/s.
    pass0: Option<f64>,
    /// Processor time of source and destination.
    cpu_s: [f64; 2],
    sent_bytes: f64,
}

fn main() {
    if let Err(why) = driftline_machine::doctor::usable_kvm() {
        println!("not measured: {why}");
        return;
    }
    let args: Vec<String> = std::env::args().skip(1).filter(|a| !a.starts_with('-')).collect();
    let wanted = args.iter().find(|a| a.parse::<usize>().is_err()).cloned().unwrap_or_default();
    let count = args.iter().find_map(|a| a.parse().ok()).unwrap_or(PAIRS).max(1);
    let qemu = qemu::version();
    match &qemu {
        Some(version) => println!("{version}"),
        None => println!("QEMU is not measured: there is no qemu-system-x86_64"),
    }
    let loads: Vec<&BenchLoad> = LOADS.iter().filter(|load| load.name.contains(&wanted)).collect();
    if !loads.is_empty() {
        println!(
            "\n| migration, ms | total | QEMU | ratio | reported downtime | QEMU | downtime p50 | \
             p90 | QEMU p50 | p90 | ratio of p50 | longest gap | QEMU |"
        );
        println!("| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |");
    }
    for load in loads {
        let (ours, theirs) = pairs(load, qemu.is_some(), count);
        let cell = |of: fn(&MigrationSample) -> f64| {
            let (a, b) = (median(&ours, of), median(&theirs, of));
            (a, b, a / b)
        };
        let (total, measured) = (cell(|s| s.total_ms), cell(|s| s.measured_downtime_ms));
        let (reported, gap) = (cell(|s| s.downtime_ms), cell(|s| s.gap_ms));
        let p90 = |samples: &[MigrationSample]| quantile(samples, 0.9, |s| s.measured_downtime_ms);
        println!(
            "| {} | {:.0} | {:.0} | {:.2} | {:.2} | {:.0} | {:.2} | {:.2} | {:.2} | {:.2} | {:.2} \
             | {:.1} | {:.1} |",
            load.name,
            total.0,
            total.1,
            total.2,
            reported.0,
            reported.1,
            measured.0,
            p90(&ours),
            measured.1,
            p90(&theirs),
            measured.2,
            gap.0,
            gap.1
        );
    }
    if BULK.name.contains(&wanted) {
        throughput(qemu.is_some(), count);
    }
}

fn throughput(qemu: bool, count: usize) {
    let (ours, theirs) = pairs(&BULK, qemu, count);
    let mut copies: Vec<f64> = (0..count).map(|_| copy::bytes_per_second(BULK_BYTES)).collect();
    copies.sort_by(f64::total_cmp);
    let copy = copies[count / 2];
    let pass0 = median(&ours, |s| s.pass0.unwrap_or(f64::NAN));
    let gib = |s: &MigrationSample| s.sent_bytes / f64::from(1u32 << 30);
    println!(
        "\n| throughput of incompressible memory | MB/s | of a plain copy | CPU s a GiB, source | \
         destination |"
    );
    println!("| --- | --- | --- | --- | --- |");
    println!(
        "| Driftline, pass 0 | {:.0} | {:.2} | {:.2} | {:.2} |",
        pass0 / 1e6,
        pass0 / copy,
        median(&ours, |s| s.cpu_s[0] / gib(s)),
        median(&ours, |s| s.cpu_s[1] / gib(s)),
    );
    if qemu {
        let whole = median(&theirs, |s| s.sent_bytes / (s.total_ms / 1e3));
        println!(
            "| QEMU, whole | {:.0} | {:.2} | {:.2} | {:.2} |",
            whole / 1e6,
            whole / copy,
            median(&theirs, |s| s.cpu_s[0] / gib(s)),
            median(&theirs, |s| s.cpu_s[1] / gib(s)),
        );
    }
    println!("| a plain copy, two threads | {:.0} | 1 | | |", copy / 1e6);
}

/// Measures migrations of both programs, in turn.
fn pairs(
    load: &BenchLoad,
    qemu: bool,
    count: usize,
) -> (Vec<MigrationSample>, Vec<MigrationSample>) {
    let (mut ours, mut theirs) = (Vec::new(), Vec::new());
    for _ in 0..count {
        ours.push(driftline(load));
        if qemu {
            theirs.push(in_qemu(load));
        }
    }
    (ours, theirs)
}

fn driftline(load: &BenchLoad) -> MigrationSample {
    let scratch = ScratchDir::new();
    let vcpus = load.vcpus.to_string();
    let args = ["--mem", load.mem, "--vcpus", &vcpus];
    let mut source = Driftline::run(&scratch, "source", load.spec, &args);
    wait_for_pass(&source.console(), load.vcpus);
    let (destination, address) = Driftline::receive_with(&scratch, "destination", &["--json"]);
    let before = MigrationStart::new(&source.console(), [source.pid(), destination.pid()]);
    let downtime = DOWNTIME_MS.to_string();
    let source_console = source.console();
    let sent = source.cli("send-migration", &[&address, "--downtime-ms", &downtime, "--json"]);
    assert!(sent.status.success(), "{}", String::from_utf8_lossy(&sent.stderr));
    let report = json_of(&sent);
    tests::wait_for("end of the source", SOON, || has_ended(source.pid()).then_some(()));
    let cpu_s = before.cpu.since();
    source.wait_exit(SOON);
    let gap_ms = before.gap_ms(&source_console, &destination.console(), load.vcpus);
    let number = |name: &str| report[name].as_f64().expect("a figure of the report");
    let running = destination.arrival()["taken_over_at_unix_us"].as_f64().expect("a time");
    let pass0 = &report["passes"][0];
    let pass0 = pass0["bytes"].as_f64().zip(pass0["time_ms"].as_f64()).map(|(b, ms)| b / ms * 1e3);
    MigrationSample {
        total_ms: number("total_time_ms"),
        downtime_ms: number("downtime_ms"),
        measured_downtime_ms: (running - number("paused_at_unix_us")) / 1e3,
        gap_ms,
        pass0,
        cpu_s,
        sent_bytes: number("transferred_bytes"),
    }
}

fn in_qemu(load: &BenchLoad) -> MigrationSample {
    let scratch = ScratchDir::new();
    let kernel = scratch.path("payload.elf");
    fs::write(&kernel, driftline_images::PAYLOAD_ELF).unwrap();
    let spec: PayloadSpec = load.spec.parse().unwrap();
    let cmdline = spec.cmdline(load.vcpus);
    let size = (load.mem, load.vcpus);
    let mut source = QemuProcess::start(&scratch, "source", &kernel, &cmdline, size, None);
    wait_for_pass(source.console(), load.vcpus);
    let address = qemu::free_address();
    let mut destination =
        QemuProcess::start(&scratch, "destination", &kernel, &cmdline, size, Some(&address));
    let before = MigrationStart::new(source.console(), [source.pid(), destination.pid()]);
    let report = source.migrate(&address, DOWNTIME_MS);
    let cpu_s = before.cpu.since();
    let gap_ms = before.gap_ms(source.console(), destination.console(), load.vcpus);
    let downtime_us = destination.event_us("RESUME") - source.event_us("STOP");
    let number = |value: &serde_json::Value| value.as_f64().expect("a figure of query-migrate");
    MigrationSample {
        total_ms: number(&report["total-time"]),
        downtime_ms: number(&report["downtime"]),
        measured_downtime_ms: downtime_us / 1e3,
        gap_ms,
        pass0: None,
        cpu_s,
        sent_bytes: number(&report["ram"]["transferred"]),
    }
}

/// Counters at the start of a migration.
struct MigrationStart {
    cpu: CpuTimes,
    reports: usize,
}

impl MigrationStart {
    fn new(source: &GuestConsole, pids: [u32; 2]) -> Self {
        Self { cpu: CpuTimes::of(pids), reports: source.reports().len() }
    }

    /// Returns the longest gap that the guest has reported since then: in its last reports at the
    /// source and its first two at the destination.
    fn gap_ms(&self, source: &GuestConsole, destination: &GuestConsole, vcpus: u32) -> f64 {
        destination.wait_reports(vcpus, 2, SOON);
        let (first, last) = (destination.reports(), source.reports());
        let gaps = last[self.reports..].iter().chain(&first).map(|r| r.gap_us);
        gaps.max().unwrap_or(0) as f64 / 1e3
    }
}

fn median(samples: &[MigrationSample], of: impl Fn(&MigrationSample) -> f64) -> f64 {
    quantile(samples, 0.5, of)
}

/// Returns the value below which the share `part` (0 to 1) of the samples lies.
fn quantile(samples: &[MigrationSample], part: f64, of: impl Fn(&MigrationSample) -> f64) -> f64 {
    let mut values: Vec<f64> = samples.iter().map(of).collect();
    values.sort_by(f64::total_cmp);
    let at = (values.len() as f64 * part) as usize;
    values.get(at.min(values.len().saturating_sub(1))).copied().unwrap_or(f64::NAN)
}
