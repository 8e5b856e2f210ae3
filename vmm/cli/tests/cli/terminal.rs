//! The end of a process by signals and from its terminal: its message, its exit code, and that it
//! leaves neither a raw terminal nor a socket behind.

use std::fs::File;
use std::io::Write;
use std::os::fd::OwnedFd;
use std::os::unix::process::ExitStatusExt;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::thread;
use std::time::Duration;

use crate::common::pty::Pty;
use crate::common::{
    TestDir, Vmm, output, proxy_that_keeps_commit, receiver, status_field, thread_statuses,
    wait_for,
};
use driftline_machine::testing::kvm_or_skip;
use rustix::process::{Pid, Signal, kill_process};
use rustix::termios::{LocalModes, tcgetattr};

const GUEST: [&str; 4] = ["--mem", "32M", "--guest", "payload,ws=1M,rate=1M,burst=8"];

fn pid(raw: u32) -> Pid {
    Pid::from_raw(raw.try_into().unwrap()).unwrap()
}

/// A guest whose console is a terminal.
struct RunOnTerminal<'p> {
    tmp: &'p TestDir,
    child: Child,
    /// The user's side.
    keyboard: File,
    /// The process's side, which keeps the settings.
    terminal: OwnedFd,
}

impl<'p> RunOnTerminal<'p> {
    fn run(tmp: &'p TestDir) -> Self {
        let pty = Pty::new();
        let terminal = pty.terminal();
        let child = Command::new("setsid")
            .args(["--ctty", env!("CARGO_BIN_EXE_driftline"), "run"])
            .args(GUEST)
            .args(["--api-sock", &tmp.text("a.sock"), "--state-dir", &tmp.text("state")])
            .stdin(Stdio::from(terminal.try_clone().unwrap()))
            .stdout(Stdio::null())
            .stderr(File::create(tmp.path("a.err")).unwrap())
            .spawn()
            .unwrap();
        let vm = Self { tmp, child, keyboard: pty.master.into(), terminal };
        wait_for("a raw terminal", || vm.is_raw().then_some(()));
        wait_for("the API", || vm.info().then_some(()));
        vm
    }

    fn info(&self) -> bool {
        output(&["info", "--api-sock", &self.tmp.text("a.sock")]).status.success()
    }

    fn is_raw(&self) -> bool {
        let modes = tcgetattr(&self.terminal).unwrap().local_modes;
        !modes.contains(LocalModes::ICANON | LocalModes::ECHO | LocalModes::ISIG)
    }

    fn signal(&self, signal: Signal) {
        kill_process(pid(self.child.id()), signal).unwrap();
    }

    /// Waits for the thread of this name. Returns its id.
    fn thread(&self, name: &str) -> Pid {
        wait_for(name, || {
            let statuses = thread_statuses(self.child.id());
            let status = statuses.iter().find(|s| status_field(s, "Name:") == Some(name))?;
            Some(pid(status_field(status, "Pid:")?.parse().ok()?))
        })
    }

    fn stderr(&self) -> String {
        self.tmp.read("a.err")
    }

    /// Waits for the end of the process, after which the terminal must not be raw.
    fn wait(&mut self) -> ExitStatus {
        let ended = wait_for("the end", || self.child.try_wait().unwrap());
        assert!(!self.is_raw(), "the terminal is left raw: {}", self.stderr());
        ended
    }
}

impl Drop for RunOnTerminal<'_> {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[test]
fn signals_within_a_second_are_one_request() {
    let tmp = TestDir::new();
    for round in 0..20 {
        let mut vmm = Vmm::run(&tmp, "a", &[&["--backend", "threads"], &GUEST[..]].concat());
        for signal in [Signal::TERM, Signal::TERM, Signal::INT, Signal::HUP, Signal::TERM] {
            // The process may have ended before the last signal.
            let _ = kill_process(pid(vmm.pid()), signal);
            if round % 2 == 1 {
                thread::sleep(Duration::from_micros(200));
            }
        }
        assert_eq!(vmm.wait(), Some(0), "round {round}: {}", vmm.stderr());
        assert!(!tmp.path("a.sock").exists(), "round {round}");
    }
}

/// A process that is killed when the test ends.
struct Killed(Child);

impl Drop for Killed {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

impl Killed {
    /// Starts a guest in a process that inherits the disposition of SIGHUP from `option` of `env`.
    /// The test's own SIGHUP may be ignored.
    fn run(tmp: &TestDir, option: &str) -> Self {
        let socket = tmp.text("a.sock");
        let args = ["--backend", "threads", "--api-sock", &socket];
        let child = Command::new("env")
            .args([option, env!("CARGO_BIN_EXE_driftline"), "run"])
            .args([&args[..], &["--state-dir", &tmp.text("state")], &GUEST[..]].concat())
            .stdin(Stdio::null())
            .stderr(File::create(tmp.path("a.err")).unwrap())
            .spawn()
            .unwrap();
        let vmm = Self(child);
        let info = || output(&["info", "--api-sock", &socket]).status.success();
        wait_for("the API", || info().then_some(()));
        vmm
    }

    fn signal(&self, signal: Signal) {
        kill_process(pid(self.0.id()), signal).unwrap();
    }

    fn wait(&mut self) -> ExitStatus {
        wait_for("the end", || self.0.try_wait().unwrap())
    }
}

#[test]
fn sighup_is_as_sigterm() {
    let tmp = TestDir::new();
    let mut vmm = Killed::run(&tmp, "--default-signal=HUP");
    vmm.signal(Signal::HUP);
    assert_eq!(vmm.wait().code(), Some(0), "{}", tmp.read("a.err"));
    let stderr = tmp.read("a.err");
    assert!(stderr.contains("interrupted by SIGHUP"), "{stderr}");
    assert!(!tmp.path("a.sock").exists());
}

/// The process is started as by `nohup`.
#[test]
fn ignored_sighup_stays_ignored() {
    let tmp = TestDir::new();
    let mut vmm = Killed::run(&tmp, "--ignore-signal=HUP");
    vmm.signal(Signal::HUP);
    // Long enough for a signal that is not ignored to be reported first.
    thread::sleep(Duration::from_millis(100));
    vmm.signal(Signal::TERM);
    assert_eq!(vmm.wait().code(), Some(0));
    let stderr = tmp.read("a.err");
    assert!(stderr.contains("SIGTERM") && !stderr.contains("SIGHUP"), "{stderr}");
}

#[test]
fn ctrl_a_x_is_named_in_the_message() {
    if !kvm_or_skip("ctrl_a_x_is_named_in_the_message") {
        return;
    }
    let tmp = TestDir::new();
    let mut vm = RunOnTerminal::run(&tmp);
    vm.keyboard.write_all(b"\x01x").unwrap();
    assert_eq!(vm.wait().code(), Some(0), "{}", vm.stderr());
    assert!(vm.stderr().contains("ended by Ctrl-A x"), "{}", vm.stderr());
    assert!(!vm.stderr().contains("SIGTERM"), "{}", vm.stderr());
}

#[test]
fn sigsys_on_any_thread_restores_the_terminal() {
    if !kvm_or_skip("sigsys_on_any_thread_restores_the_terminal") {
        return;
    }
    for name in ["driftline", "vcpu0", "supervisor", "serial", "serial-input", "control"] {
        let tmp = TestDir::new();
        let mut vm = RunOnTerminal::run(&tmp);
        kill_process(vm.thread(name), Signal::SYS).unwrap();
        assert_eq!(vm.wait().signal(), Some(libc::SIGSYS), "{name}: {}", vm.stderr());
    }
}

#[test]
fn forced_end_leaves_neither_raw_terminal_nor_socket() {
    if !kvm_or_skip("forced_end_leaves_neither_raw_terminal_nor_socket") {
        return;
    }
    for by_key in [false, true] {
        let tmp = TestDir::new();
        let mut vm = RunOnTerminal::run(&tmp);
        // A guest that may be running elsewhere does not end when its process is asked to.
        let (_destination, to) = receiver(&tmp, "b", &[]);
        let (to, record) = proxy_that_keeps_commit(&to, tmp.path("state"));
        let socket = tmp.text("a.sock");
        let sender = thread::spawn(move || output(&["send-migration", &to, "--api-sock", &socket]));
        let request = |vm: &mut RunOnTerminal| match by_key {
            true => vm.keyboard.write_all(b"\x01x").unwrap(),
            false => vm.signal(Signal::TERM),
        };
        wait_for("COMMIT", || {
            let info = output(&["info", "--json", "--api-sock", &tmp.text("a.sock")]);
            let info: serde_json::Value = serde_json::from_slice(&info.stdout).ok()?;
            (info["migration"]["phase"] == "hand-over").then_some(())
        });
        record.assert_written();
        request(&mut vm);
        // Each signal asks again, since the guest may have come back. The third one is not refused.
        for refused in 1..=2 {
            wait_for("a refusal", || {
                (vm.stderr().matches("this process").count() >= refused).then_some(())
            });
            thread::sleep(Duration::from_millis(1100));
            assert!(vm.child.try_wait().unwrap().is_none(), "{}", vm.stderr());
            request(&mut vm);
        }
        assert_eq!(vm.wait().code(), Some(1), "{}", vm.stderr());
        assert!(!tmp.path("a.sock").exists(), "its socket is left");
        sender.join().unwrap();
    }
}
