//! A Linux guest with 2 vCPUs, a disk and a network is migrated and restored while its checkers
//! run.
//!
//! The tests need KVM, the right to create network namespaces, and the image that
//! `images/linux/build.sh` builds. A test reports what is missing. `images/linux/README.md`
//! describes the checkers.
//!
//! The peer of a connection is not part of a checkpoint. With `--disks external`, neither is the
//! disk. Therefore the tests restore a guest in three ways:
//! - The guest is paused, checkpointed and killed, so nothing happens after the checkpoint. The
//!   restored guest uses the same disk, and its connections continue.
//! - The guest is paused and checkpointed, its disk is copied, and the guest runs until it is
//!   killed. The restored guest uses the copy. Connections do not survive, because the peer has
//!   received data from after the checkpoint, so the peer closes its connection before.
//! - Checkpoints with the disk are taken while the guest runs, and the guest is killed later. It is
//!   restored from any of them with the disk of that moment.
#![allow(clippy::expect_used, clippy::panic, reason = "a test fails by saying what it expected")]

#[path = "linux/clients.rs"]
mod clients;
#[path = "linux/clones.rs"]
mod clones;
#[path = "linux/drives.rs"]
mod drives;
#[path = "linux/firecracker.rs"]
mod firecracker;
#[path = "linux/hand_overs.rs"]
mod hand_overs;
#[path = "linux/kernel_tls.rs"]
mod kernel_tls;
#[path = "linux/page_handler.rs"]
mod page_handler;
#[path = "linux/served.rs"]
mod served;
#[path = "linux/topology.rs"]
mod topology;
#[path = "linux/vsock_loads.rs"]
mod vsock_loads;

use std::fs::File;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use tests::{
    CheckerProgress, Driftline, EchoClient, LinuxImage, Network, SOON, ScratchDir, StolenTime,
    json_of, repeats,
};

/// The checkers print a line every other second, because a line takes the guest a tenth of a second
/// where ring 0 is emulated.
const CHECKERS: &str = "driftline.check=mem,disk,tcp,clock driftline.mem=every=2s \
     driftline.disk=path=/dev/vda,pause=50ms,every=2s driftline.tcp=every=2s \
     driftline.clock=every=2s";
const DISK_BYTES: u64 = 32 << 20;
/// Longest time without an answer that a migration may cause.
const SILENCE_MS: u64 = 200;

/// Stolen processor time, in percent, up to which a measurement of silence counts.
const UNDISTURBED: f64 = 1.0;

/// Answers, one every 20 ms, after which a booted guest is idle.
const IDLE_AFTER: u64 = 500;

/// A guest with its checkers, its disk and its current process.
struct CheckedGuest<'t> {
    linux: &'t LinuxImage,
    network: &'t Network,
    scratch: &'t ScratchDir,
    process: Driftline,
    /// Index of the host on which it runs.
    host: usize,
    disk: PathBuf,
    /// Number of processes so far, for their names.
    processes: usize,
}

impl<'t> CheckedGuest<'t> {
    fn boot(
        linux: &'t LinuxImage,
        network: &'t Network,
        scratch: &'t ScratchDir,
        tracking: &str,
    ) -> Self {
        Self::boot_with(CHECKERS, linux, network, scratch, tracking)
    }

    /// As [`boot`](Self::boot), with these checkers.
    fn boot_with(
        checkers: &str,
        linux: &'t LinuxImage,
        network: &'t Network,
        scratch: &'t ScratchDir,
        tracking: &str,
    ) -> Self {
        Self::boot_by(checkers, linux, network, scratch, tracking, &[])
    }

    /// As [`boot_with`](Self::boot_with), with further arguments of the process.
    fn boot_by(
        checkers: &str,
        linux: &'t LinuxImage,
        network: &'t Network,
        scratch: &'t ScratchDir,
        tracking: &str,
        more: &[&str],
    ) -> Self {
        let disk = scratch.path("disk0");
        let made = File::create(&disk).and_then(|file| file.set_len(DISK_BYTES));
        made.expect("a file for the disk");
        let path = format!("path={}", text(&disk));
        let machine = ["--mem", "128M", "--vcpus", "2", "--tracking", tracking];
        let devices = ["--disk", &path, "--net", "tap=tap0"];
        let args = [&machine[..], &devices, more].concat();
        let process = linux.boot("vmlinux", &network.hosts[0], scratch, "life0", checkers, &args);
        let mut guest = Self { linux, network, scratch, process, host: 0, disk, processes: 0 };
        CheckerProgress::wait(&mut guest.process, false);
        guest
    }

    /// Starts a peer that sends messages to the guest slowly, because the other checkers keep it
    /// busy.
    fn echo(&self) -> EchoClient {
        let name = format!("echo{}", self.processes);
        let peer = &self.network.peer;
        let mut echo = EchoClient::start_with(
            &["interval=50ms", "window=8"],
            self.linux,
            peer,
            self.scratch,
            &name,
        );
        echo.wait_answers(10);
        echo
    }

    fn next_name(&mut self) -> String {
        self.processes += 1;
        format!("life{}", self.processes)
    }

    /// Moves the guest to the other host while `echo` sends messages. Returns the longest silence,
    /// ms.
    fn migrate(&mut self, echo: &mut EchoClient) -> u64 {
        let name = self.next_name();
        self.migrate_with(echo, &name, &[], &[])
    }

    /// As [`migrate`](Self::migrate), with the disk. Removes the old file.
    fn migrate_with_disk(&mut self, echo: &mut EchoClient) -> u64 {
        let (silence, old) = self.migrate_copying_disk(echo);
        std::fs::remove_file(old).expect("the disk is ours");
        silence
    }

    /// As [`migrate_with_disk`](Self::migrate_with_disk), but returns the path of the old file,
    /// too.
    fn migrate_copying_disk(&mut self, echo: &mut EchoClient) -> (u64, PathBuf) {
        let name = self.next_name();
        let copy = self.scratch.path(&format!("disk-{name}"));
        let spec = format!("path={},id=disk0,copy", text(&copy));
        let silence = self.migrate_with(echo, &name, &["--disk", &spec], &["--copy-disks"]);
        (silence, std::mem::replace(&mut self.disk, copy))
    }

    /// Moves the guest to a receiver called `name` with further arguments for both commands.
    fn migrate_with(
        &mut self,
        echo: &mut EchoClient,
        name: &str,
        receive_args: &[&str],
        send_args: &[&str],
    ) -> u64 {
        self.host = 1 - self.host;
        let host = &self.network.hosts[self.host];
        let args = [&["--net", "tap=tap0"], receive_args].concat();
        let (destination, address) = Driftline::receive_at(host, self.scratch, name, &args);
        let mark = echo.mark();
        let resting = echo.silence_since(mark.saturating_sub(5));
        let sent = self
            .process
            .cli("send-migration", &[&[&address, "--json", "--insecure"], send_args].concat());
        let stderr = String::from_utf8_lossy(&sent.stderr);
        assert_eq!(sent.status.code(), Some(0), "{name}: {stderr}\n{}", destination.log());
        let report = json_of(&sent);
        assert_eq!(report["status"], "completed", "{name}: {report}");
        let code = self.process.wait_exit(SOON);
        assert_eq!(code, 0, "{name}: the source ends once its guest has moved");
        tests::assert_clean(&self.process.console());
        self.process = destination;
        let progress = CheckerProgress::wait(&mut self.process, true);
        echo.wait_answers(20);
        let silence = echo.silence_since(mark);
        eprintln!(
            "{name}: moved in {:.0} ms, {} bytes of its disk, downtime {:.1} ms, longest silence \
             {silence} ms, {resting} ms before; {progress:?}",
            report["total_time_ms"].as_f64().unwrap_or(f64::NAN),
            report["disk_bytes"],
            report["downtime_ms"].as_f64().unwrap_or(f64::NAN),
        );
        assert_eq!(
            report["disk_bytes"].as_u64() > Some(0),
            !send_args.is_empty(),
            "{name}: {report}"
        );
        silence
    }

    /// Pauses the guest and takes a checkpoint. Returns the store and the last record that was
    /// certainly flushed.
    fn checkpoint(&self) -> (PathBuf, u64) {
        let paused = self.process.cli("pause", &[]);
        assert!(paused.status.success(), "{}", self.process.log());
        let store = self.scratch.path(&format!("store{}", self.processes));
        let taken =
            self.process.cli("checkpoint", &["--store", text(&store), "--disks", "external"]);
        let stderr = String::from_utf8_lossy(&taken.stderr);
        assert_eq!(taken.status.code(), Some(0), "{stderr}");
        let progress =
            CheckerProgress::on(&self.process.console()).expect("every checker has printed");
        (store, progress.flushed)
    }

    /// Kills the guest and restores it from `store` with its disk.
    fn restore(&mut self, store: &Path, has_peer: bool) {
        tests::assert_clean(&self.process.console());
        let begun = Instant::now();
        self.process.kill();
        let name = self.next_name();
        let disk = format!("path={}", text(&self.disk));
        let args =
            ["restore", "--same-id", "--store", text(store), "--disk", &disk, "--net", "tap=tap0"];
        let host = &self.network.hosts[self.host];
        self.process = Driftline::start_at(host, self.scratch, &name, &args);
        self.process.wait_state("running");
        let took = begun.elapsed();
        let progress = CheckerProgress::wait(&mut self.process, has_peer);
        eprintln!("{name}: killed, and running after {:.0} ms; {progress:?}", ms(took));
        std::fs::remove_dir_all(store).expect("the store is ours");
    }

    /// Takes a checkpoint, kills the paused guest and restores it.
    fn restore_paused(&mut self, echo: &mut EchoClient) {
        let (store, _) = self.checkpoint();
        self.restore(&store, true);
        echo.wait_answers(20);
    }

    /// Takes a checkpoint, lets the guest continue, kills it, and restores the checkpoint.
    fn roll_back(&mut self) {
        let (store, flushed) = self.checkpoint();
        let copy = self.scratch.path(&format!("disk{}", self.processes + 1));
        std::fs::copy(&self.disk, &copy).expect("the disk is copied");
        self.linux.verify_disk(&copy, flushed);
        let resumed = self.process.cli("resume", &[]);
        assert!(resumed.status.success(), "{}", self.process.log());
        CheckerProgress::wait_flushed(&self.process, flushed);
        let discarded = std::mem::replace(&mut self.disk, copy);
        self.restore(&store, false);
        std::fs::remove_file(discarded).expect("the disk is ours");
    }

    /// Kills the guest and verifies its disk from the host.
    fn end(mut self) {
        let progress = CheckerProgress::wait(&mut self.process, false);
        self.process.kill();
        self.linux.verify_disk(&self.disk, progress.flushed);
    }
}

fn text(path: &Path) -> &str {
    path.to_str().expect("a path in UTF-8")
}

fn ms(time: Duration) -> f64 {
    time.as_secs_f64() * 1e3
}

/// Returns the image and a network. If one is missing, reports that `test` is skipped and returns
/// `None`.
fn linux_and_network(test: &str) -> Option<(LinuxImage, Network)> {
    let linux = LinuxImage::or_skip(test)?;
    match Network::new() {
        Ok(network) => Some((linux, network)),
        Err(why) => {
            driftline_machine::testing::skip(test, &why);
            None
        }
    }
}

/// Returns whether this host supports the tracking mode. If not, reports that `test` is skipped.
fn can_track(test: &str, tracking: &str) -> bool {
    let guest = ["run", "--guest", "payload,ws=1M,passes=1", "--mem", "64M", "--serial", "null"];
    let tried = tests::run_cli(&[&guest[..], &["--tracking", tracking]].concat());
    let stderr = String::from_utf8_lossy(&tried.stderr);
    match tried.status.code() {
        Some(0) => true,
        Some(3) => {
            driftline_machine::testing::skip(test, stderr.trim());
            false
        }
        code => panic!("{code:?}: {stderr}"),
    }
}

/// Moves one guest `times` times and restores it as often, in both ways.
fn migrate_and_restore(test: &str, tracking: &str, times: usize) {
    let _alone = tests::one_at_a_time();
    let Some((linux, network)) = linux_and_network(test) else { return };
    if !can_track(test, tracking) {
        return;
    }
    let scratch = ScratchDir::new();
    let mut guest = CheckedGuest::boot(&linux, &network, &scratch, tracking);
    let mut echo = guest.echo();
    let silences: Vec<u64> = (0..times).map(|_| guest.migrate(&mut echo)).collect();
    eprintln!("{tracking}: silences of {times} moves, in ms: {silences:?}");
    for _ in 0..times.div_ceil(2) {
        guest.restore_paused(&mut echo);
    }
    let (messages, silence) = echo.finish();
    eprintln!("{tracking}: {messages} messages, longest silence {silence} ms");
    for _ in 0..times / 2 {
        guest.roll_back();
        let (messages, _) = guest.echo().finish();
        assert!(messages > 0);
    }
    guest.end();
}

#[test]
fn checkers_find_nothing_under_rings() {
    migrate_and_restore("checkers_find_nothing_under_rings", "dirty-ring", repeats(2, 20));
}

#[test]
fn checkers_find_nothing_under_bitmaps() {
    migrate_and_restore("checkers_find_nothing_under_bitmaps", "dirty-bitmap", repeats(2, 20));
}

#[test]
fn checkers_find_nothing_under_bitmaps_cleared_by_hand() {
    let test = "checkers_find_nothing_under_bitmaps_cleared_by_hand";
    migrate_and_restore(test, "dirty-bitmap-manual", repeats(1, 20));
}

#[test]
fn checkers_find_nothing_under_userfaultfd() {
    let test = "checkers_find_nothing_under_userfaultfd";
    migrate_and_restore(test, "userfault-wp", repeats(1, 20));
}

/// Moves in both directions while the disk's checker writes.
#[test]
fn disk_moves_with_its_guest() {
    let _alone = tests::one_at_a_time();
    let test = "disk_moves_with_its_guest";
    let Some((linux, network)) = linux_and_network(test) else { return };
    let scratch = ScratchDir::new();
    let mut guest = CheckedGuest::boot(&linux, &network, &scratch, "dirty-ring");
    let mut echo = guest.echo();
    for _ in 0..repeats(2, 20) {
        guest.migrate_with_disk(&mut echo);
    }
    echo.finish();
    guest.end();
}

/// Only the network's checker, on one vCPU: the time for which the peer receives nothing.
#[test]
fn a_connection_survives_moves_with_little_silence() {
    let _alone = tests::one_at_a_time();
    let test = "a_connection_survives_moves_with_little_silence";
    let Some((linux, network)) = linux_and_network(test) else { return };
    let scratch = ScratchDir::new();
    let args = ["--mem", "128M", "--net", "tap=tap0"];
    // The server rarely prints. A line on the console delays the connection, by a tenth of a second
    // where ring 0 is emulated.
    let checkers = "driftline.check=tcp driftline.tcp=every=60s";
    let mut process = linux.boot("vmlinux", &network.hosts[0], &scratch, "stay0", checkers, &args);
    // A kernel that has just booted has background work for some seconds.
    let mut echo = EchoClient::start(&linux, &network.peer, &scratch, "idle");
    echo.wait_answers(IDLE_AFTER);
    echo.finish();
    let (mut silences, mut disturbed) = (Vec::new(), Vec::new());
    // The long form ends after twenty undisturbed moves.
    let wanted = repeats(usize::MAX, 20);
    for i in 1..=repeats(4, 60) {
        let mut echo = EchoClient::start(&linux, &network.peer, &scratch, &format!("echo{i}"));
        let (mark, stolen) = (echo.mark(), StolenTime::begin());
        let before = echo.silence_since(0);
        let name = format!("stay{i}");
        let (destination, address) =
            Driftline::receive_at(&network.hosts[i % 2], &scratch, &name, &["--net", "tap=tap0"]);
        let sent = process.cli("send-migration", &[&address, "--json", "--insecure"]);
        assert_eq!(sent.status.code(), Some(0), "{name}: {}", destination.log());
        let report = json_of(&sent);
        assert_eq!(process.wait_exit(SOON), 0, "{name}");
        process = destination;
        echo.wait_answers(100);
        tests::assert_clean(&process.console());
        let (silence, stolen) = (echo.silence_since(mark), stolen.percent());
        echo.finish();
        eprintln!(
            "{name}: downtime {:.1} ms, longest silence {silence} ms, {before} ms before; stolen \
             {stolen:.1} %",
            report["downtime_ms"].as_f64().unwrap_or(f64::NAN),
        );
        let which = if stolen <= UNDISTURBED { &mut silences } else { &mut disturbed };
        which.push(silence);
        if silences.len() >= wanted {
            break;
        }
    }
    silences.sort_unstable();
    disturbed.sort_unstable();
    eprintln!("silences, in ms: {silences:?}; with stolen processor time: {disturbed:?}");
    // Only the long form judges the silences: it requires an idle machine.
    if wanted == 20 {
        assert!(silences.iter().all(|ms| *ms <= SILENCE_MS), "{silences:?}");
        assert!(silences.len() >= 10, "too much stolen processor time: {disturbed:?}");
    }
}

/// CPU features without which a distribution's kernel runs longest where ring 0 is emulated.
const STOCK_CPU: &str = "host,-cx16,-popcnt,-smap,-erms,-fsrm";
const STOCK_CMDLINE: &str = "console=ttyS0 earlyprintk=ttyS0 reboot=k panic=-1 noxsave \
    tsc=reliable no_timer_check rodata=off clearcpuid=popcnt,smap,erms,fsrm,cx16 noreplace-smp \
    nokaslr mitigations=off";
/// Time limit of the boot, which takes minutes where ring 0 is emulated.
const STOCK_BOOT: Duration = Duration::from_secs(1200);

/// Boots the kernel that `DRIFTLINE_STOCK_KERNEL` names, such as a distribution's uncompressed
/// kernel, until the image's shell runs. On a host whose KVM emulates ring 0 the boot may end with
/// a message that names an instruction. Skipped by default.
#[test]
fn stock_kernel_boots_or_names_the_unemulated_instruction() {
    let test = "stock_kernel_boots_or_names_the_unemulated_instruction";
    let Some(linux) = LinuxImage::or_skip(test) else { return };
    let Some(kernel) = std::env::var_os("DRIFTLINE_STOCK_KERNEL").map(PathBuf::from) else {
        return driftline_machine::testing::skip(test, "DRIFTLINE_STOCK_KERNEL names no kernel");
    };
    let scratch = ScratchDir::new();
    let initrd = linux.file("initramfs.cpio");
    let boot = ["run", "--kernel", text(&kernel), "--initrd", text(&initrd), "--mem", "512M"];
    let args = [&boot[..], &["--cpu", STOCK_CPU, "--cmdline", STOCK_CMDLINE]].concat();
    let begun = Instant::now();
    let mut vm = Driftline::start(&scratch, "stock", &args);
    let (end, code) = tests::wait_for("end of the stock kernel's boot", STOCK_BOOT, || {
        if vm.console().text().contains("driftline-linux: shell") {
            Some(("its shell", None))
        } else {
            vm.exited().map(|code| ("its end", Some(code)))
        }
    });
    let lines = vm.console().lines();
    eprintln!(
        "{end} after {:.0} s and {} lines: {:?}",
        begun.elapsed().as_secs_f64(),
        lines.len(),
        lines.last()
    );
    for early in ["Linux version", "Memory: ", "kvm-clock"] {
        assert!(lines.iter().any(|line| line.contains(early)), "no \"{early}\" in {lines:#?}");
    }
    if let Some(code) = code {
        let log = vm.log();
        eprintln!("{log}");
        assert!(code == 1 && log.contains("KVM cannot emulate an instruction"), "{code}: {log}");
    }
}
