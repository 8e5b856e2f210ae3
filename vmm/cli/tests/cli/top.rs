//! `driftline top` from the command line and on a terminal, for a guest of the threads backend:
//! what it shows, what it leaves behind, and what it refuses.

use std::fs::File;
use std::io::{BufRead, BufReader, Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::process::{Child, Stdio};
use std::sync::mpsc::{self, Receiver};
use std::thread;

use crate::common::latest_process::LatestProcess;
use crate::common::pty::Pty;
use crate::common::{TestDir, Vmm, driftline, fail, receiver, request, text, wait_for};
use rustix::process::{Pid, Signal, kill_process};
use rustix::termios::{Termios, Winsize, tcgetattr, tcsetwinsize};
use serde_json::Value;

const MACHINE: &[&str] = &["--backend", "threads", "--mem", "64M", "--vcpus", "2"];
const GUEST: &[&str] = &["--guest", "payload,ws=16M,rate=8M,burst=8"];

fn guest<'p>(tmp: &'p TestDir, name: &'static str) -> Vmm<'p> {
    let vmm = Vmm::run(tmp, name, &[MACHINE, GUEST].concat());
    vmm.await_progress(2, &[]);
    vmm
}

fn subscribers(vmm: &Vmm) -> u64 {
    vmm.info().unwrap()["dirty"]["subscribers"].as_u64().unwrap()
}

fn await_no_watch(vmm: &Vmm) {
    wait_for("the end of the watch", || (subscribers(vmm) == 0).then_some(()));
}

#[test]
fn once_prints_one_window_then_stops_watching() {
    let tmp = TestDir::new();
    let vmm = guest(&tmp, "guest");
    let page: Value =
        serde_json::from_str(&vmm.tell(&["top", "--once", "--json", "--interval", "500ms"]))
            .unwrap();
    assert_eq!(page["info"]["state"], "running");
    assert_eq!((&page["end"], &page["moved_to"]), (&Value::Null, &Value::Null));
    assert!(page["window_ms"].as_f64() >= Some(499.0), "{page}");
    let bins: Vec<u64> =
        page["bin_frames"].as_array().unwrap().iter().map(|n| n.as_u64().unwrap()).collect();
    assert_eq!(bins.iter().sum::<u64>(), page["frames"].as_u64().unwrap());
    assert!(bins.len() <= 4096 && page["frames"].as_u64() > Some(0), "{page}");
    assert_eq!(page["bin_bytes"].as_u64().unwrap() * bins.len() as u64, 64 << 20);
    assert_eq!(page["memory"][0]["bytes"], 64 << 20);
    assert_eq!(page["vcpu"].as_array().unwrap().len(), 2);
    // The threads backend does not know which thread writes, and has no rings.
    assert_eq!(page["vcpu"][0]["dirtied_frames"], Value::Null);
    assert_eq!(page["ring_entries"], Value::Null);
    await_no_watch(&vmm);

    let plain = vmm.tell(&["top", "--once", "--interval", "200ms"]);
    let lines: Vec<&str> = plain.lines().collect();
    assert!(lines.len() <= 24 && lines.iter().all(|l| l.chars().count() <= 80), "{plain}");
    assert!(!plain.contains('\u{1b}'), "{plain}");
    assert!(lines[0].ends_with(" running"), "{plain}");
    assert!(lines[1].starts_with("64 MiB, 2 vCPUs, threads, dirty-ring, here for "), "{plain}");
    for expected in
        ["each cell ", "no migration and no checkpoints", "watching slows the guest's writes "]
    {
        assert!(plain.contains(expected), "{expected}: {plain}");
    }
    assert_eq!(vmm.state(), "running");
    // A paused guest can be watched, and writes nothing.
    vmm.tell(&["pause"]);
    vmm.tell(&["top", "--once", "--interval", "100ms"]);
    let still = vmm.tell(&["top", "--once", "--interval", "100ms"]);
    assert!(still.contains("writes 0 B/s, 0 pages") && still.contains("it is paused"), "{still}");
}

#[test]
fn impossible_top_is_refused_with_the_reason() {
    let tmp = TestDir::new();
    let vmm = guest(&tmp, "guest");
    let stderr = vmm.refuse(1, &["top"]);
    assert!(stderr.contains("top needs a terminal; use top --once"), "{stderr}");
    let stderr = fail(1, &["top", "--once", "--api-sock", &tmp.text("none.sock")]);
    assert!(stderr.contains("does not exist: is the guest running"), "{stderr}");
    for interval in ["99ms", "61s", "1"] {
        vmm.refuse(2, &["top", "--once", "--interval", interval]);
    }
    let none = [MACHINE, GUEST, &["--tracking", "none"]].concat();
    let untracked = Vmm::run(&tmp, "untracked", &none);
    let stderr = untracked.refuse(1, &["top", "--once"]);
    assert!(stderr.contains("--tracking none"), "{stderr}");
}

#[test]
fn hostile_requests_are_refused_and_watches_bounded() {
    let tmp = TestDir::new();
    let vmm = guest(&tmp, "guest");
    for (method, query, body, why) in [
        ("POST", "", r#"{"bins":0}"#, "bins is 0; it must be 1 to 4096"),
        ("POST", "", r#"{"bins":4097}"#, "bins is 4097; it must be 1 to 4096"),
        ("POST", "", r#"{"bins":4294967296}"#, "4294967296"),
        ("POST", "", r#"{"bin":1}"#, "unknown field"),
        ("GET", "?watch=99", "", "there is no watch 99 here"),
        ("GET", "?watch=1&wait_ms=60001", "", "wait_ms is 60001; it must be at most 60000"),
        ("GET", "?watch=-1", "", "invalid digit"),
        ("GET", "", "", "missing field"),
        ("DELETE", "?watch=99", "", "there is no watch 99 here"),
    ] {
        let answer = request(&vmm.socket(), method, &format!("/v1/dirty/watch{query}"), body);
        assert!(answer.starts_with("HTTP/1.1 400") && answer.contains(why), "{why}: {answer}");
    }
    assert_eq!(subscribers(&vmm), 0, "a refused request starts no watch");

    for number in 1..=4 {
        let answer = request(&vmm.socket(), "POST", "/v1/dirty/watch", r#"{"bins":1}"#);
        assert!(answer.ends_with(&format!(r#"{{"watch":{number}}}"#)), "{answer}");
    }
    let answer = request(&vmm.socket(), "POST", "/v1/dirty/watch", "{}");
    assert!(answer.contains("4 others are watching this guest's writes already"), "{answer}");
    let answer = request(&vmm.socket(), "GET", "/v1/dirty/watch?watch=4", "");
    assert!(answer.contains(r#""bin_bytes":67108864,"bin_frames":["#), "{answer}");
    let answer = request(&vmm.socket(), "DELETE", "/v1/dirty/watch?watch=4", "");
    assert!(answer.starts_with("HTTP/1.1 204"), "{answer}");
    let answer = request(&vmm.socket(), "GET", "/v1/dirty/watch?watch=4", "");
    assert!(answer.contains("there is no watch 4 here, or it has ended"), "{answer}");
    // A client that dies while it waits.
    let mut stream = UnixStream::connect(vmm.socket()).unwrap();
    stream
        .write_all(b"GET /v1/dirty/watch?watch=3&wait_ms=60000 HTTP/1.1\r\nHost: x\r\n\r\n")
        .unwrap();
    drop(stream);
    await_no_watch(&vmm);
}

/// `top` on its own terminal: the process and the terminal, with everything drawn.
struct TopOnTerminal {
    child: Child,
    terminal: File,
    slave: OwnedFd,
    before: Termios,
    drawn: Receiver<Vec<u8>>,
    all: Vec<u8>,
}

impl TopOnTerminal {
    fn start(vmm: &Vmm, env: &[(&str, &str)]) -> Self {
        let pty = Pty::new();
        let slave = pty.terminal();
        let size = Winsize { ws_row: 30, ws_col: 100, ws_xpixel: 0, ws_ypixel: 0 };
        tcsetwinsize(&slave, size).unwrap();
        let before = tcgetattr(&slave).unwrap();
        let child = driftline(&["top", "--interval", "100ms", "--api-sock", &vmm.socket()])
            .env_remove("NO_COLOR")
            .env("TERM", "xterm-256color")
            .envs(env.iter().copied())
            .stdin(Stdio::from(pty.terminal()))
            .stdout(Stdio::from(pty.terminal()))
            .stderr(Stdio::from(pty.terminal()))
            .spawn()
            .unwrap();
        let terminal = File::from(pty.master);
        let mut reader = terminal.try_clone().unwrap();
        let (sender, drawn) = mpsc::channel();
        thread::spawn(move || {
            let mut bytes = [0; 65536];
            while let Ok(n @ 1..) = reader.read(&mut bytes) {
                if sender.send(bytes[..n].to_vec()).is_err() {
                    return;
                }
            }
        });
        Self { child, terminal, slave, before, drawn, all: Vec::new() }
    }

    fn screen(&mut self) -> String {
        self.all.extend(self.drawn.try_iter().flatten());
        text(&self.all)
    }

    /// Waits until `what` has been drawn. The terminal is raw then.
    fn await_drawn(&mut self, what: &str) {
        wait_for(what, || self.screen().contains(what).then_some(()));
    }

    fn press(&mut self, keys: &str) {
        self.terminal.write_all(keys.as_bytes()).unwrap();
    }

    /// Waits for the end of the process, with exit code 0 and the terminal as before. Returns
    /// everything that was drawn.
    fn ends_well(mut self) -> String {
        let status = wait_for("the end of top", || self.child.try_wait().unwrap());
        // The kernel delivers the process's last output after its end.
        let screen = wait_for("the other screen's end", || {
            let screen = self.screen();
            screen.contains("\u{1b}[?1049l").then_some(screen)
        });
        assert_eq!(status.code(), Some(0), "{screen}");
        assert_eq!(screen.matches("\u{1b}[?1049h").count(), 1, "{screen}");
        assert!(screen.contains("\u{1b}[?25h"), "the cursor is back: {screen}");
        let after = tcgetattr(&self.slave).unwrap();
        let modes = |t: &Termios| (t.local_modes, t.input_modes, t.output_modes);
        assert_eq!(modes(&after), modes(&self.before));
        screen
    }
}

impl Drop for TopOnTerminal {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[test]
fn terminal_is_restored_after_every_exit() {
    let tmp = TestDir::new();
    let vmm = guest(&tmp, "guest");
    for keys in ["q", "\u{3}", "\u{1b}"] {
        let mut top = TopOnTerminal::start(&vmm, &[]);
        top.await_drawn("at any interval");
        top.press(keys);
        let screen = top.ends_well();
        assert!(screen.contains("\u{1b}[") && screen.contains("48;5;"), "in colours: {screen:?}");
    }
    let mut top = TopOnTerminal::start(&vmm, &[("NO_COLOR", "1")]);
    top.await_drawn("at any interval");
    top.press("p");
    top.await_drawn("paused");
    kill_process(Pid::from_child(&top.child), Signal::TERM).unwrap();
    let screen = top.ends_well();
    assert!(!screen.contains("48;5;") && !screen.contains("38;5;"), "without colours: {screen:?}");
    await_no_watch(&vmm);
}

#[test]
fn end_of_the_guest_is_no_error() {
    let tmp = TestDir::new();
    let mut vmm = guest(&tmp, "guest");
    let mut top = TopOnTerminal::start(&vmm, &[]);
    top.await_drawn("at any interval");
    vmm.tell(&["stop"]);
    assert_eq!(vmm.wait(), Some(0));
    let mut out = top.ends_well();
    out = out.rsplit_once("\u{1b}[?1049l").map(|(_, last)| last.to_owned()).unwrap_or(out);
    assert!(out.contains("the guest was stopped: stopped over the API"), "{out:?}");
}

/// Starts `top --json`, which writes to the file `name`: a slow reader of a pipe would block it.
fn follow(tmp: &TestDir, vmm: &Vmm, name: &str) -> Child {
    driftline(&["top", "--json", "--interval", "100ms", "--api-sock", &vmm.socket()])
        .stdout(File::create(tmp.path(name)).unwrap())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap()
}

#[test]
fn top_continues_with_the_next_process() {
    let tmp = TestDir::new();
    let vmm = Vmm::run(&tmp, "guest", &[MACHINE, GUEST, &["--memory-backing", "memfd"]].concat());
    let top = follow(&tmp, &vmm, "pages");
    let latest = LatestProcess::of(&vmm);
    for _ in 0..2 {
        wait_for("a watch", || (subscribers(&vmm) == 1).then_some(()));
        latest.upgrade();
        let next = format!("\"pid\":{},", latest.pid());
        wait_for("a page of the next process", || tmp.read("pages").contains(&next).then_some(()));
    }
    vmm.tell(&["stop"]);
    let ended = top.wait_with_output().unwrap();
    let stderr = text(&ended.stderr);
    assert_eq!(ended.status.code(), Some(0), "{stderr}");
    assert!(stderr.contains("the guest was stopped"), "{stderr}");
}

#[test]
fn guest_is_followed_until_it_moves() {
    let tmp = TestDir::new();
    let mut source = guest(&tmp, "source");
    let (destination, address) = receiver(&tmp, "destination", &[]);
    let waits = destination.refuse(1, &["top", "--once"]);
    assert!(waits.contains("there is no guest yet"), "{waits}");
    let follow = |vmm: &Vmm, name| follow(&tmp, vmm, name);
    let (leaving, arriving) = (follow(&source, "left"), follow(&destination, "stayed"));
    wait_for("a watch", || (subscribers(&source) == 1).then_some(()));
    source.tell(&["send-migration", &address, "--max-bandwidth", "16M"]);
    assert_eq!(source.wait(), Some(0));
    let left = leaving.wait_with_output().unwrap();
    let stderr = text(&left.stderr);
    assert_eq!(left.status.code(), Some(0), "{stderr}");
    assert!(stderr.contains("the guest has moved to "), "{stderr}");
    let pages: Vec<Value> =
        tmp.read("left").lines().map(|l| serde_json::from_str(l).unwrap()).collect();
    let sending = pages.iter().find(|page| page["migration"]["state"] == "sending");
    let sending = sending.expect("a window of the migration");
    assert_eq!(sending["info"]["state"], "migrating");

    // The other client has seen the guest arrive and has continued with it.
    wait_for("a watch", || (subscribers(&destination) == 1).then_some(()));
    destination.await_progress(2, &[]);
    destination.tell(&["stop"]);
    let stayed = arriving.wait_with_output().unwrap();
    assert_eq!(stayed.status.code(), Some(0));
    let first: Value = serde_json::from_str(tmp.read("stayed").lines().next().unwrap()).unwrap();
    assert_eq!(first["state"], "receiving");
    assert!(text(&stayed.stderr).contains("the guest was stopped"));
}

#[test]
fn closed_reader_ends_the_watch() {
    let tmp = TestDir::new();
    let vmm = guest(&tmp, "guest");
    let mut top = driftline(&["top", "--json", "--interval", "100ms", "--api-sock", &vmm.socket()])
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(top.stdout.take().unwrap()).lines();
    let page: Value = serde_json::from_str(&lines.next().unwrap().unwrap()).unwrap();
    assert_eq!(page["info"]["state"], "running");
    // The reader closes its end, as `head` does.
    drop(lines);
    let status = wait_for("its end", || top.try_wait().unwrap());
    assert_eq!(status.code(), Some(0));
    await_no_watch(&vmm);
}

#[test]
fn killed_vmm_is_an_error() {
    let tmp = TestDir::new();
    let mut vmm = guest(&tmp, "guest");
    let socket = vmm.socket();
    let mut top = driftline(&["top", "--json", "--interval", "60s", "--api-sock", &socket])
        .stderr(Stdio::piped())
        .stdout(Stdio::null())
        .spawn()
        .unwrap();
    wait_for("a watch", || (subscribers(&vmm) == 1).then_some(()));
    vmm.kill();
    let mut stderr = String::new();
    top.stderr.take().unwrap().read_to_string(&mut stderr).unwrap();
    assert_eq!(top.wait().unwrap().code(), Some(1), "{stderr}");
    assert!(stderr.starts_with("driftline: ") && stderr.contains("guest.sock"), "{stderr}");
    fail(1, &["top", "--once", "--api-sock", &socket]);
}
