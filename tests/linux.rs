//! A Linux guest with 2 vCPUs, a disk and a network, moved and brought back while its checkers run.
//!
//! Needs KVM, the right to make network namespaces, and the image that `images/linux/build.sh`
//! makes; what is missing is said. What the checkers look at, `images/linux/README.md` says.
//!
//! A connection's other end is part of no checkpoint, and with `--disks external` the disk is not
//! either. So a guest is killed in three ways here:
//! - It is paused, checkpointed and killed, so that nothing of it is later than the checkpoint. It
//!   goes on with the disk as it is, and its connections go on too.
//! - It is paused, checkpointed, its disk copied; it goes on, and is killed some time later. It
//!   goes on from the checkpoint with the copy. Its peer has heard of a future that never was: no
//!   connection survives that, and the peer's is closed before.
//! - Checkpoints with its disk are taken while it runs, and it is killed later. It goes on from any
//!   of them, and the disk is what it was then.
#![allow(clippy::expect_used, clippy::panic, reason = "a test fails by saying what it expected")]

#[path = "linux/drives.rs"]
mod drives;

use std::fs::File;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use tests::{
    CheckerProgress, Driftline, EchoClient, LinuxImage, Namespace, Network, PEER, SOON, ScratchDir,
    StolenTime, json_of, repeats,
};

/// They speak every other second: where ring 0 is emulated, a line costs the guest a tenth of a
/// second.
const CHECKERS: &str = "driftline.check=mem,disk,tcp,clock driftline.mem=every=2s \
     driftline.disk=path=/dev/vda,pause=50ms,every=2s driftline.tcp=every=2s driftline.clock=every=2s";
const DISK_BYTES: u64 = 32 << 20;
/// What a peer may hear nothing for, when its guest moves.
const SILENCE_MS: u64 = 200;

/// What a host may take from us of the processors' time, in percent, while that is measured.
const UNDISTURBED: f64 = 1.0;

/// Answers at 20 ms, after which a guest has settled.
const SETTLED: u64 = 500;

/// A guest with all its checkers, and where it is.
struct CheckedGuest<'t> {
    linux: &'t LinuxImage,
    network: &'t Network,
    scratch: &'t ScratchDir,
    here: Driftline,
    /// Which of the hosts it is at.
    at: usize,
    disk: PathBuf,
    /// Processes that it has had.
    lives: usize,
}

impl<'t> CheckedGuest<'t> {
    fn begin(
        linux: &'t LinuxImage,
        network: &'t Network,
        scratch: &'t ScratchDir,
        tracking: &str,
    ) -> Self {
        Self::begin_with(CHECKERS, linux, network, scratch, tracking)
    }

    /// As [`begin`](Self::begin), with these checkers.
    fn begin_with(
        checkers: &str,
        linux: &'t LinuxImage,
        network: &'t Network,
        scratch: &'t ScratchDir,
        tracking: &str,
    ) -> Self {
        let disk = scratch.path("disk0");
        let made = File::create(&disk).and_then(|file| file.set_len(DISK_BYTES));
        made.expect("a file for the disk");
        let path = format!("path={}", text(&disk));
        let machine = ["--mem", "128M", "--vcpus", "2", "--tracking", tracking];
        let devices = ["--disk", &path, "--net", "tap=tap0"];
        let args = [&machine[..], &devices].concat();
        let here = linux.boot("vmlinux", &network.hosts[0], scratch, "life0", checkers, &args);
        let mut story = Self { linux, network, scratch, here, at: 0, disk, lives: 0 };
        CheckerProgress::wait(&mut story.here, false);
        story
    }

    /// A peer that talks to it, and waits for a guest that is busy with its other checkers.
    fn echo(&self) -> EchoClient {
        let name = format!("echo{}", self.lives);
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
        self.lives += 1;
        format!("life{}", self.lives)
    }

    /// Moves it to the other host, while `echo` talks to it; the longest silence.
    fn move_on(&mut self, echo: &mut EchoClient) -> u64 {
        let name = self.next_name();
        self.go(echo, &name, &[], &[])
    }

    /// Moves it likewise, with its disk, which then is in a new file alone.
    fn move_on_with_disk(&mut self, echo: &mut EchoClient) -> u64 {
        let (silence, old) = self.move_on_leaving_disk(echo);
        std::fs::remove_file(old).expect("the disk is ours");
        silence
    }

    /// As [`move_on_with_disk`](Self::move_on_with_disk), leaving the old file, whose path is
    /// returned, too.
    fn move_on_leaving_disk(&mut self, echo: &mut EchoClient) -> (u64, PathBuf) {
        let name = self.next_name();
        let copy = self.scratch.path(&format!("disk-{name}"));
        let spec = format!("path={},id=disk0,copy", text(&copy));
        let silence = self.go(echo, &name, &["--disk", &spec], &["--copy-disks"]);
        (silence, std::mem::replace(&mut self.disk, copy))
    }

    /// Moves it as `name`, to a receiver that is told `there` more, by a sender that is told `how`.
    fn go(&mut self, echo: &mut EchoClient, name: &str, there: &[&str], how: &[&str]) -> u64 {
        self.at = 1 - self.at;
        let host = &self.network.hosts[self.at];
        let args = [&["--net", "tap=tap0"], there].concat();
        let (there, address) = Driftline::receive_at(host, self.scratch, name, &args);
        let mark = echo.mark();
        let resting = echo.silence_since(mark.saturating_sub(5));
        let sent = self.here.cli("send-migration", &[&[&address, "--json"], how].concat());
        let said = String::from_utf8_lossy(&sent.stderr);
        assert_eq!(sent.status.code(), Some(0), "{name}: {said}\n{}", there.log());
        let report = json_of(&sent);
        assert_eq!(report["status"], "completed", "{name}: {report}");
        let code = self.here.wait_exit(SOON);
        assert_eq!(code, 0, "{name}: the source ends once its guest has moved");
        tests::assert_clean(&self.here.console());
        self.here = there;
        let progress = CheckerProgress::wait(&mut self.here, true);
        echo.wait_answers(20);
        let silence = echo.silence_since(mark);
        eprintln!(
            "{name}: moved in {:.0} ms, {} bytes of its disk, downtime {:.1} ms, longest silence {silence} ms, {resting} ms \
             before; {progress:?}",
            report["total_time_ms"].as_f64().unwrap_or(f64::NAN),
            report["disk_bytes"],
            report["downtime_ms"].as_f64().unwrap_or(f64::NAN),
        );
        assert_eq!(report["disk_bytes"].as_u64() > Some(0), !how.is_empty(), "{name}: {report}");
        silence
    }

    /// Pauses the guest and takes a checkpoint; the store, and what was flushed then at least.
    fn checkpoint(&self) -> (PathBuf, u64) {
        let paused = self.here.cli("pause", &[]);
        assert!(paused.status.success(), "{}", self.here.log());
        let store = self.scratch.path(&format!("store{}", self.lives));
        let taken = self.here.cli("checkpoint", &["--store", text(&store), "--disks", "external"]);
        let said = String::from_utf8_lossy(&taken.stderr);
        assert_eq!(taken.status.code(), Some(0), "{said}");
        let progress = CheckerProgress::on(&self.here.console()).expect("the checkers have spoken");
        (store, progress.flushed)
    }

    /// Brings the guest back from `store` with its disk, once no other process has it.
    fn restore(&mut self, store: &Path, talking: bool) {
        tests::assert_clean(&self.here.console());
        let begun = Instant::now();
        self.here.kill();
        let name = self.next_name();
        let disk = format!("path={}", text(&self.disk));
        let args =
            ["restore", "--same-id", "--store", text(store), "--disk", &disk, "--net", "tap=tap0"];
        let host = &self.network.hosts[self.at];
        self.here = Driftline::start_at(host, self.scratch, &name, &args);
        self.here.wait_state("running");
        let took = begun.elapsed();
        let progress = CheckerProgress::wait(&mut self.here, talking);
        eprintln!("{name}: killed, and running after {:.0} ms; {progress:?}", ms(took));
        std::fs::remove_dir_all(store).expect("the store is ours");
    }

    /// Checkpoint, kill, restore, with nothing between the first two.
    fn hold_and_restore(&mut self, echo: &mut EchoClient) {
        let (store, _) = self.checkpoint();
        self.restore(&store, true);
        echo.wait_answers(20);
    }

    /// Checkpoint, some more life, kill, restore: that life has not been.
    fn roll_back(&mut self) {
        let (store, flushed) = self.checkpoint();
        let copy = self.scratch.path(&format!("disk{}", self.lives + 1));
        std::fs::copy(&self.disk, &copy).expect("the disk is copied");
        self.linux.verify_disk(&copy, flushed);
        let resumed = self.here.cli("resume", &[]);
        assert!(resumed.status.success(), "{}", self.here.log());
        std::thread::sleep(Duration::from_millis(300));
        let forgotten = std::mem::replace(&mut self.disk, copy);
        self.restore(&store, false);
        std::fs::remove_file(forgotten).expect("the disk is ours");
    }

    /// Its end: the disk is read from outside.
    fn end(mut self) {
        let progress = CheckerProgress::wait(&mut self.here, false);
        self.here.kill();
        self.linux.verify_disk(&self.disk, progress.flushed);
    }
}

fn text(path: &Path) -> &str {
    path.to_str().expect("a path in UTF-8")
}

fn ms(time: Duration) -> f64 {
    time.as_secs_f64() * 1e3
}

/// What these tests need, or a word that `test` is skipped.
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

/// Whether this host can track so; says if not that `test` is skipped.
fn can_track(test: &str, tracking: &str) -> bool {
    let guest = ["run", "--guest", "payload,ws=1M,passes=1", "--mem", "64M", "--serial", "null"];
    let tried = tests::run_cli(&[&guest[..], &["--tracking", tracking]].concat());
    let said = String::from_utf8_lossy(&tried.stderr);
    match tried.status.code() {
        Some(0) => true,
        Some(3) => {
            driftline_machine::testing::skip(test, said.trim());
            false
        }
        code => panic!("{code:?}: {said}"),
    }
}

/// Moves one guest so many times, and brings it back as often, each way in turn.
fn moved_and_brought_back(test: &str, tracking: &str, times: usize) {
    let _alone = tests::one_at_a_time();
    let Some((linux, network)) = linux_and_network(test) else { return };
    if !can_track(test, tracking) {
        return;
    }
    let scratch = ScratchDir::new();
    let mut story = CheckedGuest::begin(&linux, &network, &scratch, tracking);
    let mut echo = story.echo();
    let silences: Vec<u64> = (0..times).map(|_| story.move_on(&mut echo)).collect();
    eprintln!("{tracking}: silences of {times} moves, in ms: {silences:?}");
    for _ in 0..times.div_ceil(2) {
        story.hold_and_restore(&mut echo);
    }
    let (messages, silence) = echo.finish();
    eprintln!("{tracking}: {messages} messages, longest silence {silence} ms");
    for _ in 0..times / 2 {
        story.roll_back();
        let (messages, _) = story.echo().finish();
        assert!(messages > 0);
    }
    story.end();
}

#[test]
fn checkers_find_nothing_under_rings() {
    moved_and_brought_back("checkers_find_nothing_under_rings", "dirty-ring", repeats(2, 20));
}

#[test]
fn checkers_find_nothing_under_bitmaps() {
    moved_and_brought_back("checkers_find_nothing_under_bitmaps", "dirty-bitmap", repeats(2, 20));
}

#[test]
fn checkers_find_nothing_under_bitmaps_cleared_by_hand() {
    let test = "checkers_find_nothing_under_bitmaps_cleared_by_hand";
    moved_and_brought_back(test, "dirty-bitmap-manual", repeats(1, 20));
}

#[test]
fn checkers_find_nothing_under_userfaultfd() {
    let test = "checkers_find_nothing_under_userfaultfd";
    moved_and_brought_back(test, "userfault-wp", repeats(1, 20));
}

/// There and back, while the disk's checker writes to it.
#[test]
fn disk_moves_with_its_guest() {
    let _alone = tests::one_at_a_time();
    let test = "disk_moves_with_its_guest";
    let Some((linux, network)) = linux_and_network(test) else { return };
    let scratch = ScratchDir::new();
    let mut story = CheckedGuest::begin(&linux, &network, &scratch, "dirty-ring");
    let mut echo = story.echo();
    for _ in 0..repeats(2, 20) {
        story.move_on_with_disk(&mut echo);
    }
    echo.finish();
    story.end();
}

/// The network alone, on one vCPU: how long the peer hears nothing.
#[test]
fn a_connection_survives_moves_with_little_silence() {
    let _alone = tests::one_at_a_time();
    let test = "a_connection_survives_moves_with_little_silence";
    let Some((linux, network)) = linux_and_network(test) else { return };
    let scratch = ScratchDir::new();
    let args = ["--mem", "128M", "--net", "tap=tap0"];
    // The server hardly speaks: a line on the console is silence at the connection, a tenth of a
    // second of it where ring 0 is emulated.
    let checkers = "driftline.check=tcp driftline.tcp=every=60s";
    let mut here = linux.boot("vmlinux", &network.hosts[0], &scratch, "stay0", checkers, &args);
    // A kernel that has only just booted is busy with itself for some seconds.
    let mut echo = EchoClient::start(&linux, &network.peer, &scratch, "settling");
    echo.wait_answers(SETTLED);
    echo.finish();
    let (mut silences, mut disturbed) = (Vec::new(), Vec::new());
    // In the long form until twenty were undisturbed.
    let judged = repeats(usize::MAX, 20);
    for i in 1..=repeats(4, 60) {
        let mut echo = EchoClient::start(&linux, &network.peer, &scratch, &format!("echo{i}"));
        let (mark, stolen) = (echo.mark(), StolenTime::begin());
        let before = echo.silence_since(0);
        let name = format!("stay{i}");
        let (there, address) =
            Driftline::receive_at(&network.hosts[i % 2], &scratch, &name, &["--net", "tap=tap0"]);
        let sent = here.cli("send-migration", &[&address, "--json"]);
        assert_eq!(sent.status.code(), Some(0), "{name}: {}", there.log());
        let report = json_of(&sent);
        assert_eq!(here.wait_exit(SOON), 0, "{name}");
        here = there;
        echo.wait_answers(100);
        tests::assert_clean(&here.console());
        let (silence, stolen) = (echo.silence_since(mark), stolen.percent());
        echo.finish();
        eprintln!(
            "{name}: downtime {:.1} ms, longest silence {silence} ms, {before} ms before; stolen {stolen:.1} %",
            report["downtime_ms"].as_f64().unwrap_or(f64::NAN),
        );
        let which = if stolen <= UNDISTURBED { &mut silences } else { &mut disturbed };
        which.push(silence);
        if silences.len() >= judged {
            break;
        }
    }
    silences.sort_unstable();
    disturbed.sort_unstable();
    eprintln!("silences, in ms: {silences:?}; while the host was elsewhere: {disturbed:?}");
    // With nothing else on this machine, which only whoever asks for the long form knows of.
    if judged == 20 {
        assert!(silences.iter().all(|ms| *ms <= SILENCE_MS), "{silences:?}");
        assert!(silences.len() >= 10, "the host was elsewhere too often: {disturbed:?}");
    }
}

/// Guests that go on from one checkpoint at once.
const CLONES: usize = 10;

/// Boots `kernel` with a network, takes a checkpoint, and has ten guests go on from it, each with a
/// tap of its own at a host of its own. Each gives randomness of its own at once, by the command
/// `ask` or by a checker, between `<` and `>`; no two may give the same.
fn ten_go_on(test: &str, kernel: &str, checkers: &str, ask: Option<&str>) {
    let _alone = tests::one_at_a_time();
    let Some(linux) = LinuxImage::or_skip(test) else { return };
    if !linux.file(kernel).exists() {
        let why = format!("the image has no {kernel}; images/linux/build.sh --kernel all makes it");
        return driftline_machine::testing::skip(test, &why);
    }
    let host = |name: &str| {
        let host = Namespace::new(PEER)?;
        host.add_tap(name)?;
        Ok::<_, String>(host)
    };
    let hosts: Result<Vec<Namespace>, String> =
        (0..=CLONES).map(|i| host(&format!("tap{i}"))).collect();
    let hosts = match hosts {
        Ok(hosts) => hosts,
        Err(why) => return driftline_machine::testing::skip(test, &why),
    };
    let scratch = ScratchDir::new();
    let args = ["--mem", "128M", "--net", "tap=tap0"];
    // What a checker says takes time from guests that are many.
    let quiet = format!("driftline.check={checkers} driftline.tcp=every=60s");
    let mut first = linux.boot(kernel, &hosts[0], &scratch, "first", &quiet, &args);
    let store = scratch.path("store");
    let store = text(&store);
    // The server listens.
    EchoClient::start(&linux, &hosts[0], &scratch, "first").finish();
    for checker in checkers.split(',') {
        let ready = format!("check {checker}: ready");
        tests::wait_for("checkers", SOON, || first.console().text().contains(&ready).then_some(()));
    }
    let taken = first.cli("checkpoint", &["--store", store]);
    assert_eq!(taken.status.code(), Some(0), "{}", first.log());
    tests::assert_clean(&first.console());
    first.kill();

    let begun = Instant::now();
    let restore = |i: usize| {
        let net = format!("tap=tap{i}");
        let args = ["restore", "--store", store, "--net", &net];
        let mut clone = Driftline::start_typed_to(&hosts[i], &scratch, &format!("clone{i}"), &args);
        // There when the guest first runs: the shell, which waits for it, is among the first to
        // run.
        ask.iter().for_each(|line| clone.type_line(line));
        clone
    };
    let mut clones: Vec<Driftline> = (1..=CLONES).map(restore).collect();
    for clone in &clones {
        clone.wait_state("running");
    }
    eprintln!("{CLONES} guests run after {:.0} ms", ms(begun.elapsed()));
    let mut answers: Vec<String> = clones.iter_mut().map(fresh).collect();
    eprintln!("{CLONES} guests have answered after {:.0} ms: {answers:?}", ms(begun.elapsed()));
    answers.sort_unstable();
    answers.dedup();
    assert_eq!(answers.len(), CLONES, "{answers:?}");
    // Each on its own tap, all at once.
    let echo = |i: usize| {
        let name = format!("clone{i}");
        EchoClient::start_with(&["interval=500ms", "window=2"], &linux, &hosts[i], &scratch, &name)
    };
    let mut echoes: Vec<EchoClient> = (1..=CLONES).map(echo).collect();
    echoes.iter_mut().for_each(|echo| echo.wait_answers(5));
    for echo in echoes {
        let (messages, _) = echo.finish();
        assert!(messages > 5);
    }
    for clone in &mut clones {
        clone.must_live();
        tests::assert_clean(&clone.console());
    }
}

/// The randomness that a guest has given.
fn fresh(clone: &mut Driftline) -> String {
    let console = clone.console();
    tests::wait_for("randomness of a guest", Duration::from_secs(600), || {
        clone.must_live();
        let lines = console.lines();
        // The typed line is on the console as well.
        let answers = lines.iter().filter_map(|line| line.split_once('<')?.1.split_once('>'));
        let random = |text: &str| {
            text.len() >= 12
                && text.bytes().all(|b| b.is_ascii_alphanumeric() || b"-+/".contains(&b))
        };
        answers.map(|(answer, _)| answer).find(|answer| random(answer)).map(str::to_owned)
    })
}

/// Without ACPI nothing tells a kernel that it was brought back; whoever needs randomness of its
/// own reads the host's, behind what the driver may have fetched before the checkpoint.
#[test]
fn clones_read_fresh_randomness_from_hwrng() {
    let test = "clones_read_fresh_randomness_from_hwrng";
    ten_go_on(test, "vmlinux", "tcp", Some("echo \"<$(head -c137 /dev/hwrng|tail -c9|base64)>\""));
}

/// A kernel with ACPI is told by the generation ID, some milliseconds after it goes on, and says
/// so; a program that waits for that asks for randomness then.
#[test]
fn clones_are_reseeded_by_the_generation_id() {
    let test = "clones_are_reseeded_by_the_generation_id";
    ten_go_on(test, "vmlinux-acpi", "tcp,fork", None);
}

/// What a kernel of the distribution's needs to come far where its ring 0 is emulated.
const STOCK_CPU: &str = "host,-cx16,-popcnt,-smap,-erms,-fsrm";
const STOCK_CMDLINE: &str = "console=ttyS0 earlyprintk=ttyS0 reboot=k panic=-1 noxsave tsc=reliable no_timer_check \
     rodata=off clearcpuid=popcnt,smap,erms,fsrm,cx16 noreplace-smp nokaslr mitigations=off";
/// It takes minutes where its ring 0 is emulated.
const STOCK_BOOT: Duration = Duration::from_secs(1200);

/// Not in any default run: boots the kernel that `DRIFTLINE_STOCK_KERNEL` names, such as a
/// distribution's uncompressed one, to the image's shell; or, on a host whose KVM emulates ring 0,
/// as far as that goes.
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
        let there = vm.console().text().contains("driftline-linux: shell");
        if there {
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
        let said = vm.log();
        eprintln!("{said}");
        assert!(code == 1 && said.contains("KVM cannot emulate an instruction"), "{code}: {said}");
    }
}
