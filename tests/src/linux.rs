//! Linux guests and their checkers: booted, and judged by what they print.
//!
//! A console is clean if no checker has found an error or ended, and if the kernel said nothing
//! since its shell was there: it is booted with warnings shown. One word of the kernel is let pass,
//! which says that its host was busy.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use crate::{Driftline, GUEST, GuestConsole, Namespace, SOON, ScratchDir, wait_for};

/// A guest boots in seconds where its ring 0 is not emulated.
const BOOT: Duration = Duration::from_secs(240);
/// A guest's checkers speak every second, when they get to run.
const TURN: Duration = Duration::from_secs(120);
/// What a kernel says, once each, whose host had no processor for it for long.
const STARVED: [&str; 2] = ["hrtimer: interrupt took", "sched: DL replenish lagged too much"];
/// The line of the shell.
const SHELL: &str = "driftline-linux: shell";
/// What a kernel needs to boot where its ring 0 is emulated; elsewhere it does no harm. Warnings
/// are shown.
const CMDLINE: &str = "console=ttyS0 reboot=k panic=-1 quiet loglevel=5 noxsave tsc=reliable \
     no_timer_check rodata=off clearcpuid=popcnt,smap,erms,fsrm,cx16 noreplace-smp";

/// The Linux image: kernel, initramfs, checkers.
#[derive(Clone, Debug)]
pub struct LinuxImage {
    image: PathBuf,
}

impl LinuxImage {
    /// The image, if KVM and it are there; if not, says that `test` is skipped.
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

    /// A file of the image.
    pub fn file(&self, name: &str) -> PathBuf {
        self.image.join(name)
    }

    /// Boots `kernel` of the image at `host` to its shell, with `more` on its command line.
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
        let cmdline = format!("{CMDLINE} driftline.ip={GUEST}/24 {more}");
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

    /// Runs one of the checkers on this host, to its end.
    pub fn check(&self, args: &[&str]) -> Output {
        let mut check = Command::new(self.file("driftline-check"));
        check.args(args).stdin(Stdio::null()).output().expect("the image's checkers run")
    }

    /// Verifies the disk checker's log in `disk`, which no guest is using: what was flushed when
    /// record `at_least` was must be there.
    pub fn verify_disk(&self, disk: &Path, at_least: u64) {
        let path = format!("path={}", disk.display());
        let out = self.check(&["disk-verify", &path, &format!("at-least={at_least}")]);
        let said = String::from_utf8_lossy(&out.stdout);
        assert!(out.status.success() && said.contains("intact=yes"), "{}: {said}", disk.display());
        eprintln!("{}", said.trim());
    }
}

/// The last status of each checker on a console.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct CheckerProgress {
    /// Passes of the memory checker over its pages.
    pub passes: u64,
    /// Records of the disk checker that are flushed.
    pub flushed: u64,
    /// Messages that the TCP server has given back.
    pub messages: u64,
    /// Ticks of the clock watcher.
    pub ticks: u64,
}

impl CheckerProgress {
    /// What `console` shows; `None` until every checker has spoken there.
    pub fn on(console: &GuestConsole) -> Option<Self> {
        let lines = console.lines();
        let last = |checker: &str, key: &str| {
            let own = format!("check {checker}: ");
            lines.iter().rev().filter(|l| l.starts_with(&own)).find_map(|l| value(l, key))
        };
        Some(Self {
            passes: last("mem", "passes")?,
            flushed: last("disk", "flushed")?,
            messages: last("tcp", "messages")?,
            ticks: last("clock", "ticks")?,
        })
    }

    /// Waits until every checker has got on since it first spoke on the console of `vm`, which must
    /// stay clean; with a peer that talks to the TCP server, if `talking`.
    pub fn wait(vm: &mut Driftline, talking: bool) -> Self {
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
                && (now.messages > before.messages || !talking)
                && now.ticks > before.ticks
            {
                return now;
            }
            let text = console.text();
            assert!(
                begun.elapsed() < TURN,
                "a checker does not get on: {before:?}, {now:?}: {text}"
            );
            std::thread::sleep(Duration::from_millis(20));
        }
    }
}

/// The number after `key=` in a line.
pub(crate) fn value(line: &str, key: &str) -> Option<u64> {
    let mut words = line.split_whitespace().filter_map(|word| word.split_once('='));
    words.find(|(k, _)| *k == key)?.1.parse().ok()
}

/// Fails the test if a checker or the kernel complains on `console`.
pub fn assert_clean(console: &GuestConsole) {
    let lines = console.lines();
    // What a kernel warns of while it boots is not a matter of these tests.
    let shell = lines.iter().position(|l| l.contains(SHELL)).unwrap_or(0);
    if let Some(bad) = lines[shell..].iter().find(|line| complains(line)) {
        panic!("the guest complains: {bad}\nin:\n{}", lines.join("\n"));
    }
}

fn complains(line: &str) -> bool {
    let counts = ["errors", "back", "strangers"];
    (line.contains("check ") && line.contains(": error"))
        || counts.iter().any(|key| value(line, key).is_some_and(|n| n > 0))
        || line.contains("driftline-linux: checker")
        || (is_kernels(line) && !STARVED.iter().any(|starved| line.contains(starved)))
}

/// Whether the kernel speaks in the line: its time stamp is `[    1.234567]`, wherever another's
/// line was interrupted by it.
fn is_kernels(line: &str) -> bool {
    line.match_indices('[').any(|(at, _)| {
        let stamp = line[at + 1..].split_once(']').map(|(stamp, _)| stamp.trim_start());
        let parts = stamp.and_then(|stamp| stamp.split_once('.'));
        parts.is_some_and(|(seconds, micros)| {
            let digits = |s: &str| !s.is_empty() && s.bytes().all(|b| b.is_ascii_digit());
            digits(seconds) && digits(micros) && micros.len() == 6
        })
    })
}

/// The echo's client at the peer: sends numbered messages at a pace, and checks what comes back.
#[derive(Debug)]
pub struct EchoClient {
    child: Child,
    output: GuestConsole,
}

impl EchoClient {
    /// Begins to talk to the guest from `peer`, every 20 ms; waits until it answers.
    pub fn start(linux: &LinuxImage, peer: &Namespace, scratch: &ScratchDir, name: &str) -> Self {
        let mut echo = Self::start_with(&["interval=20ms"], linux, peer, scratch, name);
        echo.wait_answers(50);
        echo
    }

    /// Begins to talk to the guest from `peer`, with these options of the checker.
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
            .stdout(File::create(&path).expect("a file for the echo's words"))
            .spawn()
            .expect("the image's checkers run");
        Self { child, output: GuestConsole::at(path) }
    }

    /// Lines that it has printed.
    fn lines(&self) -> Vec<String> {
        self.output.lines()
    }

    /// Answers so far, as of its last line.
    pub fn received(&self) -> u64 {
        self.lines().iter().rev().find_map(|l| value(l, "received")).unwrap_or(0)
    }

    /// Waits for so many more answers.
    pub fn wait_answers(&mut self, more: u64) {
        let before = self.received();
        wait_for("more answers of the guest's echo", TURN, || {
            let ended = self.child.try_wait().expect("a child of ours");
            assert!(ended.is_none(), "the echo ended: {ended:?}: {:?}", self.lines());
            (self.received() > before + more).then_some(())
        });
    }

    /// A place in what it prints, for [`silence_since`](Self::silence_since).
    pub fn mark(&self) -> usize {
        self.lines().len()
    }

    /// The longest time in milliseconds between two answers since `mark`, as far as it has told.
    pub fn silence_since(&self, mark: usize) -> u64 {
        let lines = self.lines();
        lines[mark..].iter().filter_map(|l| value(l, "silence_ms")).max().unwrap_or(0)
    }

    /// Has it end: every message must have come back, once, whole and in order. How many there
    /// were, and the longest time in milliseconds between two answers.
    pub fn finish(mut self) -> (u64, u64) {
        let pid = self.child.id().to_string();
        let told = Command::new("kill").args(["-INT", &pid]).status().expect("kill runs");
        assert!(told.success());
        let code = wait_for("end of the echo", TURN + SOON, || {
            self.child.try_wait().expect("a child of ours")
        });
        let lines = self.lines();
        let last = lines.last().cloned().unwrap_or_default();
        assert!(code.success() && last.contains("held=yes"), "{}", lines.join("\n"));
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
    fn complaining_lines_are_recognized() {
        for good in [
            "check mem: passes=3 errors=0 pages=4096",
            "check clock: ticks=7 gap_ms=30 longest_gap_ms=40 realtime_step_ms=0 back=0",
            "check tcp: connections=1 messages=7 errors=0 strangers=0",
            "~ # echo [x] [1.2] a.b]",
            "[   60.705641] hrtimer: interrupt took 202173319 ns",
        ] {
            assert!(!complains(good), "{good}");
        }
        for bad in [
            "check mem: passes=3 errors=1 pages=4096",
            "check disk: error: reading back record 7: unreadable",
            "check clock: ticks=7 gap_ms=30 longest_gap_ms=40 realtime_step_ms=0 back=2",
            "driftline-linux: checker mem was ended by signal 11",
            "[   12.345678] rcu: INFO: rcu_preempt detected stalls",
            "check mem: pas[  112.345678] clocksource: tsc unstable",
        ] {
            assert!(complains(bad), "{bad}");
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
