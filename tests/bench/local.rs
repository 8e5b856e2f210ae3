//! Hands guests over to another process of this host, without a copy of memory and, for comparison,
//! with one: `cargo bench -p tests --bench local`.
//!
//! | figure | of |
//! | --- | --- |
//! | downtime | from the source's request to pause until the destination has resumed the guest |
//! | longest gap | the longest time between two ticks of a vCPU's loop, or printed bytes, in the 0.1 s in which the pause lies, and for `upgrade` in the whole command |
//! | baseline gap | the longest gap in an equally long time without a hand-over |
//! | both | the most memory that both processes had together, above what one had before |
//!
//! The guests have 2 vCPUs, which write 32 MiB/s. Those of `upgrade` have a disk and a tap, and use
//! both every 5 ms; each upgrade is followed by more blocks and frames. Linux has checkers that use
//! them all the time; its gap is not known, because its own scheduler makes longer ones. The
//! figures are medians of 50 hand-overs, and their maximum; a number as an argument is the number
//! of hand-overs, and words select the rows whose name contains one of them. The Linux guest needs
//! what `images/linux/README.md` describes.
#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a bench")]

use std::process::Command;

use driftline_images::PayloadReport;
use driftline_machine::testing::{most_in_upgrade, most_together, share_kib};
use tests::{
    CheckerProgress, Driftline, EchoClient, LinuxImage, Network, SOON, ScratchDir, StopsLatest,
    json_of,
};

/// Default number of hand-overs of each guest.
const COUNT: usize = 50;
/// Number of hand-overs of each guest in which memory is read.
const MEMORY_COUNT: usize = 5;
const VCPUS: u32 = 2;
const SPEC: &str = "payload,ws=16M,rate=32M";
const CHECKERS: &str = "driftline.check=mem,disk,tcp,clock driftline.mem=every=2s \
     driftline.disk=path=/dev/vda,pause=5ms,every=2s driftline.tcp=every=2s \
     driftline.clock=every=2s";
const DISK_BYTES: u64 = 32 << 20;

/// A guest, and how its memory reaches the next process.
struct HandOverRow {
    name: &'static str,
    guest: &'static [&'static str],
    sending: &'static [&'static str],
    /// One of this many hand-overs is made.
    of: usize,
}

/// Guests whose process is replaced by `upgrade`: the name, and the options.
const UPGRADES: [(&str, &[&str]); 2] =
    [("1 GiB, populated, `upgrade`", ROWS[0].guest), ("16 GiB, sparse, `upgrade`", ROWS[1].guest)];
const LINUX_UPGRADE: &str = "Linux, 1 GiB, populated, `upgrade`";

const ROWS: [HandOverRow; 3] = [
    HandOverRow {
        name: "1 GiB, populated",
        guest: &["--mem", "1G", "--memory-backing", "memfd", "--prefault"],
        sending: &["--local"],
        of: 1,
    },
    HandOverRow {
        name: "16 GiB, sparse",
        guest: &["--mem", "16G", "--memory-backing", "memfd"],
        sending: &["--local"],
        of: 1,
    },
    HandOverRow {
        name: "1 GiB, copied",
        guest: &["--mem", "1G", "--memory-backing", "memfd", "--prefault"],
        sending: &[],
        of: 5,
    },
];

/// The figures of a row.
#[derive(Default)]
struct HandOverFigures {
    downtime_ms: Vec<f64>,
    gap_ms: Vec<f64>,
    baseline_gap_ms: Vec<f64>,
    more_mib: Vec<f64>,
}

fn main() {
    if let Err(why) = driftline_machine::doctor::usable_kvm() {
        println!("not measured: {why}");
        return;
    }
    let args: Vec<String> = std::env::args().skip(1).filter(|a| !a.starts_with('-')).collect();
    let count = args.iter().find_map(|a| a.parse().ok()).unwrap_or(COUNT).max(1);
    let words: Vec<&String> = args.iter().filter(|a| a.parse::<usize>().is_err()).collect();
    let is_wanted =
        |name: &str| words.is_empty() || words.iter().any(|word| name.contains(word.as_str()));
    let upgrades = UPGRADES.map(|(name, _)| name);
    let names = ROWS.iter().map(|row| row.name).chain(upgrades).chain([LINUX_UPGRADE]);
    assert!(
        names.clone().any(is_wanted),
        "no row has such a name: {:?}",
        names.collect::<Vec<_>>()
    );
    let figures = "downtime, ms | longest gap, ms | baseline gap, ms | both, MiB more";
    println!("| guest | hand-overs | {figures} |");
    println!("| --- | --- | --- | --- | --- | --- |");
    for row in ROWS.iter().filter(|row| is_wanted(row.name)) {
        print_row(row.name, hand_over(row, count.div_ceil(row.of)));
    }
    let network = Network::new().inspect_err(|why| println!("`upgrade`: not measured: {why}"));
    let Ok(network) = network else { return };
    for (name, guest) in UPGRADES.iter().filter(|(name, _)| is_wanted(name)) {
        print_row(name, upgrade_payload(&network, guest, count));
    }
    if is_wanted(LINUX_UPGRADE)
        && let Some(samples) = upgrade_linux(&network, count)
    {
        print_row(LINUX_UPGRADE, samples);
    }
}

fn print_row(name: &str, samples: HandOverFigures) {
    println!(
        "| {name} | {} | {} | {} | {} | {} |",
        samples.downtime_ms.len(),
        figure(samples.downtime_ms),
        figure(samples.gap_ms),
        figure(samples.baseline_gap_ms),
        figure(samples.more_mib),
    );
}

/// Returns the median and the maximum.
fn figure(mut values: Vec<f64>) -> String {
    values.sort_by(f64::total_cmp);
    let (median, most) = (values.get(values.len() / 2), values.last());
    median.zip(most).map_or("-".to_owned(), |(m, most)| format!("{m:.2} (at most {most:.2})"))
}

/// Hands the guest of a row over `count` times, each time to a new process. In a few more
/// hand-overs it reads the processes' memory, which delays them.
fn hand_over(row: &HandOverRow, count: usize) -> HandOverFigures {
    let scratch = ScratchDir::new();
    let args = [row.guest, &["--vcpus", "2"]].concat();
    let mut vm = Driftline::run(&scratch, "0", SPEC, &args);
    vm.console().wait_reports(VCPUS, 3, SOON);
    let mut samples = HandOverFigures::default();
    for number in 1..=count + MEMORY_COUNT {
        // An earlier report may have the hand-over in it, or the end of the process before.
        let baseline = vm.console().wait_reports(VCPUS, 2, SOON);
        let name = number.to_string();
        let to = format!("unix:{}", scratch.path(&format!("{name}.in")).display());
        let next = Driftline::start(&scratch, &name, &["receive-migration", &to, "--json"]);
        tests::wait_for("a receiver", SOON, || {
            next.log().contains("waiting for a migration on").then_some(())
        });
        let sending = [&[&*to, "--json"], row.sending].concat();
        let send = || vm.cli("send-migration", &sending);
        let sent = if number <= count {
            send()
        } else {
            let before = share_kib(vm.pid()).expect("a process");
            let (sent, most) = most_together([vm.pid(), next.pid()], send);
            let most = most.expect("both processes were there");
            samples.more_mib.push(most.saturating_sub(before) as f64 / 1024.0);
            sent
        };
        assert!(sent.status.success(), "{}", String::from_utf8_lossy(&sent.stderr));
        let paused = json_of(&sent)["paused_at_unix_us"].as_f64().expect("a time");
        let runs = next.arrival()["taken_over_at_unix_us"].as_f64().expect("a time");
        next.console().wait_reports(VCPUS, 1, SOON);
        if number <= count {
            samples.downtime_ms.push((runs - paused) / 1e3);
            samples.gap_ms.push(most_gap_ms(&first_reports(&next.console().reports())));
            samples.baseline_gap_ms.push(most_gap_ms(&baseline));
        }
        vm.wait_exit(SOON);
        vm = next;
    }
    samples
}

/// Creates a disk. Returns the options of a guest that has it, a tap and [`VCPUS`].
fn devices(scratch: &ScratchDir) -> Vec<String> {
    let disk = scratch.path("disk");
    std::fs::File::create(&disk).unwrap().set_len(DISK_BYTES).unwrap();
    let disk = format!("path={}", disk.display());
    ["--vcpus", "2", "--disk", &disk, "--net", "tap=tap0"].map(str::to_owned).to_vec()
}

/// Replaces the process of a guest `count` times. In a few more upgrades it reads the processes'
/// memory, which delays them.
fn upgrade_payload(network: &Network, guest: &[&str], count: usize) -> HandOverFigures {
    let scratch = ScratchDir::new();
    let devices = devices(&scratch);
    let own: Vec<&str> = devices.iter().map(String::as_str).collect();
    let spec = format!("{SPEC},report=100,io=5");
    let args = [&["run", "--guest", &spec], guest, &own].concat();
    let vm = Driftline::start_at(&network.hosts[0], &scratch, "0", &args);
    let _stops = StopsLatest(vm.socket().to_owned());
    vm.console().wait_reports(VCPUS, 3, SOON);
    let mut samples = HandOverFigures::default();
    for _ in 0..count {
        let before = vm.console().reports().len();
        samples.downtime_ms.push(upgrade(&vm));
        vm.console().wait_io(SOON);
        vm.console().wait_reports(VCPUS, 2, SOON);
        let after = vm.console().reports().len();
        samples.gap_ms.push(most_gap_ms(&vm.console().reports()[before..after]));
        // The next report of each vCPU may have the end of the old process in it.
        vm.console().wait_reports(VCPUS, 1, SOON);
        let first = vm.console().reports().len();
        vm.console().wait_reports(VCPUS, (after - before).div_ceil(VCPUS as usize), SOON);
        let reports = vm.console().reports();
        samples.baseline_gap_ms.push(most_gap_ms(&reports[first..first + (after - before)]));
    }
    for _ in 0..MEMORY_COUNT {
        let previous = vm.info().expect("it answers")["pid"].as_u64().expect("a number") as u32;
        let before = share_kib(previous).expect("a process");
        let mut command = Command::new(tests::driftline());
        command.args(["upgrade", "--api-sock", vm.socket()]);
        let (replaced, most) = most_in_upgrade(previous, command).expect("an upgrade");
        assert!(replaced.status.success(), "{}", String::from_utf8_lossy(&replaced.stderr));
        let most = most.expect("both processes were there");
        samples.more_mib.push(most.saturating_sub(before) as f64 / 1024.0);
        vm.console().wait_reports(VCPUS, 1, SOON);
    }
    samples
}

/// Replaces the process of a Linux guest `count` times while it uses its disk and its tap.
fn upgrade_linux(network: &Network, count: usize) -> Option<HandOverFigures> {
    let linux = LinuxImage::or_skip("Linux")?;
    let scratch = ScratchDir::new();
    let devices = devices(&scratch);
    let own: Vec<&str> = devices.iter().map(String::as_str).collect();
    let args = [ROWS[0].guest, &own].concat();
    let mut vm = linux.boot("vmlinux", &network.hosts[0], &scratch, "0", CHECKERS, &args);
    let _stops = StopsLatest(vm.socket().to_owned());
    CheckerProgress::wait(&mut vm, false);
    let mut echo = EchoClient::start(&linux, &network.peer, &scratch, "echo");
    let mut samples = HandOverFigures::default();
    for _ in 0..count {
        samples.downtime_ms.push(upgrade(&vm));
        echo.wait_answers(10);
    }
    echo.finish();
    tests::assert_clean(&vm.console());
    Some(samples)
}

/// Replaces the process of a guest. Returns the downtime, ms.
fn upgrade(vm: &Driftline) -> f64 {
    let replaced = vm.cli("upgrade", &["--json"]);
    assert!(replaced.status.success(), "{}", String::from_utf8_lossy(&replaced.stderr));
    json_of(&replaced)["downtime_ms"].as_f64().expect("a time")
}

/// Returns the first report of each vCPU.
fn first_reports(reports: &[PayloadReport]) -> Vec<PayloadReport> {
    (0..VCPUS).filter_map(|v| reports.iter().find(|report| report.vcpu == v).copied()).collect()
}

/// Returns the longest gap of `reports`, ms.
fn most_gap_ms(reports: &[PayloadReport]) -> f64 {
    reports.iter().map(|report| report.gap_us).max().unwrap_or(0) as f64 / 1e3
}
