//! Linux guests and their checkers: boots them and checks their output.
//!
//! A console is clean if no checker has reported an error or ended, and if the kernel has printed
//! nothing since its shell started. The kernel prints warnings. Messages about a busy host are
//! allowed.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use crate::{Driftline, GUEST, GuestConsole, Namespace, SOON, ScratchDir, wait_for};

/// Time limit of a boot. A guest boots in seconds unless its ring 0 is emulated.
const BOOT: Duration = Duration::from_secs(240);
/// Time limit for progress of the checkers, which print a line a second when they run.
const PROGRESS_LIMIT: Duration = Duration::from_secs(120);
/// Messages of a kernel whose vCPUs did not run for long. Each is printed once.
const STARVED: [&str; 2] = ["hrtimer: interrupt took", "sched: DL replenish lagged too much"];
/// The line that the shell prints when it starts.
const SHELL: &str = "driftline-linux: shell";
/// Options with which a kernel boots where its ring 0 is emulated. They are harmless elsewhere.
/// Warnings are printed.
pub const LINUX_CMDLINE: &str = "console=ttyS0 reboot=k panic=-1 quiet loglevel=5 noxsave \
     tsc=reliable no_timer_check rodata=off clearcpuid=popcnt,smap,erms,fsrm,cx16 noreplace-smp";

/// The Linux image: kernel, initramfs, checkers.
#[derive(Clone, Debug)]
pub struct LinuxImage {
    image: PathBuf,
}

impl LinuxImage {
    /// Returns the image. If there is no KVM or no image, reports that `test` is skipped and
    /// returns `None`.
    pub fn or_skip(test: &str) -> Option<Self> {
        if !driftline_machine::testing::kvm_or_skip(test) {
            return None;
        }
        match driftline_machine::testing::linux_guest() {
            Ok(image) => Some(Self { image }),
            Err(why) => {
                driftline_machine::testing::skip(test, &why.to_string());
                None
            }
        }
    }

    /// Returns the path of a file of the image.
    pub fn file(&self, name: &str) -> PathBuf {
        self.image.join(name)
    }

    /// Boots `kernel` of the image on `host` until its shell runs, with `more` on its command line.
    pub fn boot(
        &self,
        kernel: &str,
        host: &Namespace,
        scratch: &ScratchDir,
        name: &str,
        more: &str,
        args: &[&str],
    ) -> Driftline {
        let (kernel, initrd) = (self.file(kernel), self.file("initramfs.cpio"));
        let text = |path: &Path| path.to_str().expect("a path in UTF-8").to_owned();
        let (kernel, initrd) = (text(&kernel), text(&initrd));
        let cmdline = format!("{LINUX_CMDLINE} driftline.ip={GUEST}/24 {more}");
        let boot = ["run", "--kernel", &kernel, "--initrd", &initrd, "--cmdline", &cmdline];
        let begun = Instant::now();
        let mut vm = Driftline::start_at(host, scratch, name, &[&boot, args].concat());
        wait_for("shell of the guest", BOOT, || {
            vm.must_live();
            vm.console().text().contains(SHELL).then_some(())
        });
        eprintln!("{name}: booted in {:.1} s", begun.elapsed().as_secs_f64());
        vm
    }

    /// Runs a checker on this host to its end.
    pub fn check(&self, args: &[&str]) -> Output {
        let mut check = Command::new(self.file("driftline-check"));
        check.args(args).stdin(Stdio::null()).output().expect("the image's checkers run")
    }

    /// Verifies the disk checker's log in `disk`, which no guest uses. All records that were
    /// flushed when record `at_least` was flushed must be in it.
    pub fn verify_disk(&self, disk: &Path, at_least: u64) {
        let path = format!("path={}", disk.display());
        let out = self.check(&["disk-verify", &path, &format!("at-least={at_least}")]);
        let stdout = String::from_utf8_lossy(&out.stdout);
        assert!(
            out.status.success() && stdout.contains("intact=yes"),
            "{}: {stdout}",
            disk.display()
        );
        eprintln!("{}", stdout.trim());
    }
}

/// The last status of each checker on a console.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct CheckerProgress {
    /// Passes of the memory checker over its pages.
    pub passes: u64,
    /// Records of the disk checker that are flushed.
    pub flushed: u64,
    /// Messages that the TCP server has returned.
    pub messages: u64,
    /// Ticks of the clock watcher.
    pub ticks: u64,
}

impl CheckerProgress {
    /// Returns the status on `console`; `None` until every checker has printed a line.
    pub fn on(console: &GuestConsole) -> Option<Self> {
        let last = |checker: &str, key: &str| checker_value(console, checker, key);
        Some(Self {
            passes: last("mem", "passes")?,
            flushed: last("disk", "flushed")?,
            messages: last("tcp", "messages")?,
            ticks: last("clock", "ticks")?,
        })
    }

    /// Waits until the disk checker on `vm` has flushed records after number `last`.
    pub fn wait_flushed(vm: &Driftline, last: u64) {
        wait_for("further record of the disk checker", PROGRESS_LIMIT, || {
            let now = Self::on(&vm.console())?;
            (now.flushed > last).then_some(())
        });
    }

    /// Waits until every checker has made progress since its first line on the console of `vm`. The
    /// console must stay clean. The TCP server must have progressed only if `has_peer`.
    pub fn wait(vm: &mut Driftline, has_peer: bool) -> Self {
        let console = vm.console();
        let mut before = None;
        let begun = Instant::now();
        loop {
            vm.must_live();
            assert_clean(&console);
            let now = Self::on(&console);
            before = before.or(now);
            if let (Some(before), Some(now)) = (before, now)
                && now.passes > before.passes
                && now.flushed > before.flushed
                && (now.messages > before.messages || !has_peer)
                && now.ticks > before.ticks
            {
                return now;
            }
            let text = console.text();
            assert!(
                begun.elapsed() < PROGRESS_LIMIT,
                "a checker makes no progress: {before:?}, {now:?}: {text}"
            );
            std::thread::sleep(Duration::from_millis(20));
        }
    }
}

/// Returns the last number that a checker has printed after `key=`.
pub fn checker_value(console: &GuestConsole, checker: &str, key: &str) -> Option<u64> {
    let own = format!("check {checker}: ");
    let lines = console.lines();
    lines.iter().rev().filter(|line| line.starts_with(&own)).find_map(|line| value(line, key))
}

/// Returns the number after `key=` in a line.
pub(crate) fn value(line: &str, key: &str) -> Option<u64> {
    let mut words = line.split_whitespace().filter_map(|word| word.split_once('='));
    words.find(|(k, _)| *k == key)?.1.parse().ok()
}

/// Returns whether the guest of `console` has booted there.
pub fn has_booted(console: &GuestConsole) -> bool {
    console.lines().iter().any(|line| line.contains(SHELL))
}

/// Fails the test if a checker or the kernel has reported a problem on `console`.
pub fn assert_clean(console: &GuestConsole) {
    let lines = console.lines();
    // Warnings during boot are not the subject of these tests.
    let shell = lines.iter().position(|l| l.contains(SHELL)).unwrap_or(0);
    if let Some(bad) = lines[shell..].iter().find(|line| is_complaint(line)) {
        panic!("the guest reports a problem: {bad}\nin:\n{}", lines.join("\n"));
    }
}

fn is_complaint(line: &str) -> bool {
    let counts = ["errors", "back", "strangers"];
    (line.contains("check ") && line.contains(": error"))
        || counts.iter().any(|key| value(line, key).is_some_and(|n| n > 0))
        || line.contains("driftline-linux: checker")
        || (is_from_kernel(line) && !STARVED.iter().any(|starved| line.contains(starved)))
}

/// Returns whether the line contains output of the kernel: its time stamp is `[    1.234567]`. It
/// may interrupt the line of a program.
fn is_from_kernel(line: &str) -> bool {
    line.match_indices('[').any(|(at, _)| {
        let stamp = line[at + 1..].split_once(']').map(|(stamp, _)| stamp.trim_start());
        let parts = stamp.and_then(|stamp| stamp.split_once('.'));
        parts.is_some_and(|(seconds, micros)| {
            let digits = |s: &str| !s.is_empty() && s.bytes().all(|b| b.is_ascii_digit());
            digits(seconds) && digits(micros) && micros.len() == 6
        })
    })
}

/// The echo checker's client at the peer: sends numbered messages at a fixed rate and checks the
/// answers.
#[derive(Debug)]
pub struct EchoClient {
    child: Child,
    output: GuestConsole,
}

impl EchoClient {
    /// Starts a client at `peer` that sends a message every 20 ms. Waits for 50 answers.
    pub fn start(linux: &LinuxImage, peer: &Namespace, scratch: &ScratchDir, name: &str) -> Self {
        let mut echo = Self::start_with(&["interval=20ms"], linux, peer, scratch, name);
        echo.wait_answers(50);
        echo
    }

    /// Starts a client at `peer` with these options of the checker.
    pub fn start_with(
        options: &[&str],
        linux: &LinuxImage,
        peer: &Namespace,
        scratch: &ScratchDir,
        name: &str,
    ) -> Self {
        let path = scratch.path(&format!("{name}.echo"));
        let child = peer
            .command(&linux.file("driftline-check"))
            .args(["echo", &format!("addr={GUEST}"), "port=7", "drain=60s"])
            .args(options)
            .stdin(Stdio::null())
            .stdout(File::create(&path).expect("a file for the client's output"))
            .spawn()
            .expect("the image's checkers run");
        Self { child, output: GuestConsole::at(path) }
    }

    /// Returns the lines that the client has printed.
    fn lines(&self) -> Vec<String> {
        self.output.lines()
    }

    /// Returns the number of answers so far, from the client's last line.
    pub fn received(&self) -> u64 {
        self.lines().iter().rev().find_map(|l| value(l, "received")).unwrap_or(0)
    }

    /// Waits for more than `more` further answers.
    pub fn wait_answers(&mut self, more: u64) {
        let before = self.received();
        wait_for("more answers of the guest's echo", PROGRESS_LIMIT, || {
            let ended = self.child.try_wait().expect("a child of ours");
            assert!(ended.is_none(), "the echo ended: {ended:?}: {:?}", self.lines());
            (self.received() > before + more).then_some(())
        });
    }

    /// Returns a position in the client's output, for [`silence_since`](Self::silence_since).
    pub fn mark(&self) -> usize {
        self.lines().len()
    }

    /// Returns the longest time between two answers since `mark`, in milliseconds.
    pub fn silence_since(&self, mark: usize) -> u64 {
        let lines = self.lines();
        lines[mark..].iter().filter_map(|l| value(l, "silence_ms")).max().unwrap_or(0)
    }

    /// Ends the client. Fails the test unless every message has been answered once, complete and in
    /// order. Returns the number of messages and the longest time between two answers, in
    /// milliseconds.
    pub fn finish(mut self) -> (u64, u64) {
        let pid = self.child.id().to_string();
        let sent = Command::new("kill").args(["-INT", &pid]).status().expect("kill runs");
        assert!(sent.success());
        let code = wait_for("end of the echo", PROGRESS_LIMIT + SOON, || {
            self.child.try_wait().expect("a child of ours")
        });
        let lines = self.lines();
        let last = lines.last().cloned().unwrap_or_default();
        assert!(code.success() && last.contains("intact=yes"), "{}", lines.join("\n"));
        assert_eq!(value(&last, "sent"), value(&last, "received"), "{last}");
        (value(&last, "received").unwrap_or(0), value(&last, "longest_silence_ms").unwrap_or(0))
    }
}

impl Drop for EchoClient {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        if std::thread::panicking() {
            let lines = self.lines();
            eprintln!("--- the echo: {}", lines[lines.len().saturating_sub(4)..].join("\n"));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn complaints_are_recognized() {
        for good in [
            "check mem: passes=3 errors=0 pages=4096",
            "check clock: ticks=7 gap_ms=30 longest_gap_ms=40 realtime_step_ms=0 back=0",
            "check tcp: connections=1 messages=7 errors=0 strangers=0",
            "~ # echo [x] [1.2] a.b]",
            "[   60.705641] hrtimer: interrupt took 202173319 ns",
        ] {
            assert!(!is_complaint(good), "{good}");
        }
        for bad in [
            "check mem: passes=3 errors=1 pages=4096",
            "check disk: error: reading back record 7: unreadable",
            "check clock: ticks=7 gap_ms=30 longest_gap_ms=40 realtime_step_ms=0 back=2",
            "driftline-linux: checker mem was ended by signal 11",
            "[   12.345678] rcu: INFO: rcu_preempt detected stalls",
            "check mem: pas[  112.345678] clocksource: tsc unstable",
        ] {
            assert!(is_complaint(bad), "{bad}");
        }
    }

    #[test]
    fn values_are_found_by_their_whole_key() {
        let line = "check echo: sent=5 silence_ms=7 longest_silence_ms=9";
        assert_eq!(value(line, "silence_ms"), Some(7));
        assert_eq!(value(line, "longest_silence_ms"), Some(9));
        assert_eq!(value(line, "received"), None);
    }
}
