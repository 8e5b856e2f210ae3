//! Shared parts of the binary's tests: a process that does not outlive its test, and its guest's
//! reports.

pub mod echo;
pub mod latest_process;
pub mod proxied_upgrade;
pub mod pty;
pub mod script;
pub mod serving;
pub mod snapshots;
pub mod stuck_guest;
pub mod stuck_storage;
pub mod upgrade_proxy;

use std::fs::{DirEntry, File, OpenOptions};
use std::io::{ErrorKind, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::os::fd::OwnedFd;
use std::os::unix::fs::OpenOptionsExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

use driftline_images::{PayloadMessage, PayloadReport};
use driftline_machine::testing::ProcessUsage;
use rustix::fs::{CWD, FileType, Mode, OFlags, mknodat};
use rustix::net::{AddressFamily, SocketFlags, SocketType, bind, getsockname, socket_with};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use tempfile::TempDir;

/// Sends one request to the API at `socket`. Returns the whole answer.
pub fn request(socket: &str, method: &str, path: &str, body: &str) -> String {
    let length = body.len();
    let head = format!("{method} {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n");
    raw(socket, &format!("{head}Content-Length: {length}\r\n\r\n{body}"))
}

/// Sends `bytes` to the API at `socket`. Returns what it answers until it closes the connection.
pub fn raw(socket: &str, bytes: &str) -> String {
    let mut stream = UnixStream::connect(socket).unwrap();
    stream.set_read_timeout(Some(TIMEOUT)).unwrap();
    // A refused request may be answered before it is read, and the connection may be reset.
    let _ = stream.write_all(bytes.as_bytes());
    let mut answer = Vec::new();
    if let Err(e) = stream.read_to_end(&mut answer) {
        assert_ne!(e.kind(), ErrorKind::WouldBlock, "no whole answer within {TIMEOUT:?}");
    }
    text(&answer)
}

/// Time limit after which a test gives up.
pub const TIMEOUT: Duration = Duration::from_secs(60);
/// A guest that works on every host, and writes all the time.
pub const SMALL_GUEST: &[&str] = &[
    "--backend",
    "threads",
    "--mem",
    "32M",
    "--guest",
    "payload,ws=4M,rate=1M,burst=8,report=200",
];

/// Returns the minimum duration of an attack: a minute with `DRIFTLINE_FULL=1`, otherwise no longer
/// than its first steps.
pub fn attack() -> Duration {
    Duration::from_secs(if driftline_machine::testing::full() { 60 } else { 0 })
}

/// Returns a command that runs the binary under test.
pub fn driftline(args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_driftline"));
    command.args(args).env_remove("RUST_LOG").stdin(Stdio::null());
    command
}

/// Runs a command until it ends.
pub fn output(args: &[&str]) -> Output {
    driftline(args).output().unwrap()
}

/// Runs a command that must succeed. Returns its stdout.
pub fn succeed(args: &[&str]) -> String {
    let out = output(args);
    assert!(out.status.success(), "{args:?}: {}: {}", out.status, text(&out.stderr));
    text(&out.stdout)
}

/// Runs a command that must fail with `code`. Returns its message.
pub fn fail(code: i32, args: &[&str]) -> String {
    let out = output(args);
    let (stderr, printed) = (text(&out.stderr), text(&out.stdout));
    assert_eq!(out.status.code(), Some(code), "{args:?}: {stderr}{printed}");
    assert_eq!(printed, "", "{args:?} failed and printed a result");
    stderr
}

/// Returns the `status` in `/proc` of each thread of a process.
///
/// The kernel ends a listing early if the thread that it has listed last ends meanwhile, and a
/// thread that has just started has neither its name nor its filters. So a caller repeats this
/// until it finds the threads that it expects.
pub fn thread_statuses(pid: u32) -> Vec<String> {
    let tasks = std::fs::read_dir(format!("/proc/{pid}/task")).unwrap();
    let status = |task: std::io::Result<DirEntry>| {
        std::fs::read_to_string(task.ok()?.path().join("status")).ok()
    };
    tasks.filter_map(status).collect()
}

/// Returns whether the host's kernel has landlock.
pub fn has_landlock() -> bool {
    text(&output(&["doctor"]).stdout).contains("ABI ")
}

/// Returns the value of a field in a `status` of `/proc`. The name ends in a colon.
pub fn status_field<'s>(status: &'s str, name: &str) -> Option<&'s str> {
    status.lines().find_map(|line| line.strip_prefix(name)).map(str::trim)
}

pub fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// Waits until `check` returns a value.
pub fn wait_for<T>(what: &str, mut check: impl FnMut() -> Option<T>) -> T {
    let end = Instant::now() + TIMEOUT;
    loop {
        if let Some(found) = check() {
            return found;
        }
        assert!(Instant::now() < end, "waited {TIMEOUT:?} for {what}");
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// Runs the cases of a test at the same time, because each waits for most of its time. A failure of
/// one fails the test.
pub fn side_by_side<T: Send>(cases: impl IntoIterator<Item = T>, test: impl Fn(T) + Sync) {
    std::thread::scope(|scope| {
        for case in cases {
            let test = &test;
            scope.spawn(move || test(case));
        }
    });
}

/// A temporary directory for one test.
pub struct TestDir(TempDir);

impl TestDir {
    pub fn new() -> Self {
        Self(tempfile::tempdir().unwrap())
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    pub fn text(&self, name: &str) -> String {
        self.path(name).to_str().unwrap().to_owned()
    }

    pub fn read(&self, name: &str) -> String {
        std::fs::read_to_string(self.path(name)).unwrap_or_default()
    }

    /// Creates a FIFO.
    pub fn fifo(&self, name: &str) -> PathBuf {
        let path = self.path(name);
        mknodat(CWD, &path, FileType::Fifo, Mode::RUSR | Mode::WUSR, 0).unwrap();
        path
    }
}

/// Opens both ends of the FIFO at `path`. Neither waits.
pub fn open_both_ends(path: &Path) -> File {
    let flags = OFlags::NONBLOCK.bits().cast_signed();
    OpenOptions::new().read(true).write(true).custom_flags(flags).open(path).unwrap()
}

/// Reads what a FIFO contains now. Does not wait.
pub fn read_now(reader: &mut File) -> String {
    let (mut read, mut chunk) = (Vec::new(), [0; 4096]);
    while let Ok(bytes @ 1..) = reader.read(&mut chunk) {
        read.extend_from_slice(&chunk[..bytes]);
    }
    text(&read)
}

/// A TCP address on which nothing listens. It stays bound, so that no other program gets its port.
pub struct ClosedAddress {
    pub address: SocketAddr,
    _socket: OwnedFd,
}

impl ClosedAddress {
    pub fn new() -> Self {
        let flags = SocketFlags::CLOEXEC;
        let socket = socket_with(AddressFamily::INET, SocketType::STREAM, flags, None).unwrap();
        bind(&socket, &SocketAddr::from(([127, 0, 0, 1], 0))).unwrap();
        let address = SocketAddr::try_from(getsockname(&socket).unwrap()).unwrap();
        Self { address, _socket: socket }
    }
}

/// A driftline process that has, or waits for, a guest. Uses `name.sock`, `name.serial` and
/// `name.err` in the test's directory. Killed when dropped.
pub struct Vmm<'p> {
    tmp: &'p TestDir,
    name: &'static str,
    child: Child,
}

impl<'p> Vmm<'p> {
    /// Starts `args`, with a socket and a serial file added.
    pub fn start(tmp: &'p TestDir, name: &'static str, args: &[&str]) -> Self {
        Self::start_by(tmp, name, driftline(args))
    }

    /// Starts `command`, with a socket and a serial file added.
    pub fn start_by(tmp: &'p TestDir, name: &'static str, mut command: Command) -> Self {
        let serial = format!("file:{}", tmp.text(&format!("{name}.serial")));
        let socket = tmp.text(&format!("{name}.sock"));
        let stderr = std::fs::File::create(tmp.path(&format!("{name}.err"))).unwrap();
        let child = command
            .args(["--api-sock", &socket, "--serial", &serial])
            .args(["--state-dir", &tmp.text("state")])
            .stdout(Stdio::null())
            .stderr(stderr)
            .spawn()
            .unwrap();
        Self { tmp, name, child }
    }

    /// Starts a guest and waits until its API answers.
    pub fn run(tmp: &'p TestDir, name: &'static str, args: &[&str]) -> Self {
        let mut vmm = Self::start(tmp, name, &[&["run"], args].concat());
        vmm.await_api();
        vmm
    }

    pub fn await_api(&mut self) {
        let end = Instant::now() + TIMEOUT;
        while self.state_if_there().is_none() {
            let ended = self.child.try_wait().unwrap();
            assert!(ended.is_none(), "{} ended: {ended:?}: {}", self.name, self.stderr());
            assert!(Instant::now() < end, "{} does not answer: {}", self.name, self.stderr());
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    pub fn socket(&self) -> String {
        self.tmp.text(&format!("{}.sock", self.name))
    }

    /// Waits until the process has written `text` to stderr. A restored guest's API answers before
    /// the restore is reported.
    pub fn await_message(&mut self, text: &str) {
        let end = Instant::now() + TIMEOUT;
        while !self.stderr().contains(text) {
            let ended = self.child.try_wait().unwrap();
            assert!(ended.is_none(), "{} ended: {ended:?}: {}", self.name, self.stderr());
            assert!(Instant::now() < end, "no \"{text}\" from {}: {}", self.name, self.stderr());
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    /// Returns the process's stderr.
    pub fn stderr(&self) -> String {
        self.tmp.read(&format!("{}.err", self.name))
    }

    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Sends a signal to the process.
    pub fn signal(&self, signal: Signal) {
        kill_process(Pid::from_raw(self.pid() as i32).unwrap(), signal).unwrap();
    }

    /// Returns what the process uses now. The number of threads is the kernel's own, because a
    /// listing of them may end early (see [`thread_statuses`]).
    pub fn usage(&self) -> ProcessUsage {
        ProcessUsage::of(self.pid()).unwrap()
    }

    /// Returns what `info --json` would print, if the process answers.
    pub fn info(&self) -> Option<Value> {
        let page = driftline_machine::testing::get(Path::new(&self.socket()), "/v1/info")?;
        serde_json::from_str(&page).ok()
    }

    fn state_if_there(&self) -> Option<String> {
        Some(self.info()?["state"].as_str().unwrap().to_owned())
    }

    pub fn state(&self) -> String {
        self.state_if_there().unwrap_or_else(|| panic!("{} does not answer", self.name))
    }

    /// Runs a client command for this guest that must succeed.
    pub fn tell(&self, args: &[&str]) -> String {
        succeed(&[args, &["--api-sock", &self.socket()]].concat())
    }

    /// Runs a client command for this guest that must fail with `code`.
    pub fn refuse(&self, code: i32, args: &[&str]) -> String {
        fail(code, &[args, &["--api-sock", &self.socket()]].concat())
    }

    /// Returns whether the process has not ended yet.
    pub fn is_alive(&mut self) -> bool {
        self.child.try_wait().unwrap().is_none()
    }

    /// Kills the process with SIGKILL.
    pub fn kill(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }

    /// Waits until the process ends. Returns its exit code.
    pub fn wait(&mut self) -> Option<i32> {
        let name = self.name;
        wait_for(name, || self.child.try_wait().unwrap()).code()
    }

    /// Returns the last report of each vCPU that this process has written so far.
    pub fn reports(&self) -> Vec<PayloadReport> {
        last_reports(&self.tmp.path(&format!("{}.serial", self.name)))
    }

    /// Waits until each of `vcpus` vCPUs has gone through its pages twice since it has written more
    /// than in `than`, and so has checked each, without an error.
    pub fn await_checked_pages(&self, vcpus: usize, than: &[PayloadReport]) {
        let first = self.await_progress(vcpus, than);
        wait_for("each page to be checked", || {
            let now = self.reports();
            assert!(now.iter().all(|report| report.errors == 0), "{now:?}");
            now.iter().zip(&first).all(|(now, first)| now.passes > first.passes + 1).then_some(())
        });
    }

    /// Waits until each of `vcpus` vCPUs has written more pages than in `than`, and checks that
    /// none found an error.
    pub fn await_progress(&self, vcpus: usize, than: &[PayloadReport]) -> Vec<PayloadReport> {
        let more = |r: &PayloadReport| {
            let before = than.iter().find(|b| b.vcpu == r.vcpu).map_or(0, |b| b.pages);
            r.pages > before
        };
        let reports = wait_for("the guest's reports", || {
            let now = self.reports();
            (now.len() == vcpus && now.iter().all(more)).then_some(now)
        });
        assert!(reports.iter().all(|r| r.errors == 0), "{reports:?}");
        reports
    }
}

/// Starts a process that waits for a guest. Returns it with its address.
pub fn receiver<'p>(tmp: &'p TestDir, name: &'static str, more: &[&str]) -> (Vmm<'p>, String) {
    let vmm = Vmm::start(tmp, name, &[&["receive-migration", "tcp:127.0.0.1:0"], more].concat());
    let address = address_of(&vmm);
    (vmm, address)
}

/// Waits until a receiver listens. Returns its address.
pub fn address_of(receiver: &Vmm<'_>) -> String {
    wait_for("the receiver to listen", || {
        let stderr = receiver.stderr();
        let (_, rest) = stderr.split_once("waiting for a migration on ")?;
        Some(rest.split_once('\n')?.0.to_owned())
    })
}

impl Drop for Vmm<'_> {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        if std::thread::panicking() {
            eprintln!("{} said: {}", self.name, self.stderr());
        }
    }
}

/// Returns the last report of each vCPU in a serial log, and checks that the guest complains of
/// nothing.
pub fn last_reports(serial: &Path) -> Vec<PayloadReport> {
    let log = std::fs::read_to_string(serial).unwrap_or_default();
    let mut last: Vec<PayloadReport> = Vec::new();
    for line in log.split_inclusive('\n').filter(|l| l.ends_with('\n')) {
        match PayloadMessage::parse(line) {
            Some(PayloadMessage::Report(r)) => {
                last.retain(|l| l.vcpu != r.vcpu);
                last.push(r);
            }
            Some(PayloadMessage::Ready { .. } | PayloadMessage::Io(_)) | None => {}
            Some(bad) => panic!("the guest says {bad:?}"),
        }
    }
    last.sort_by_key(|r| r.vcpu);
    last
}

/// Whether the source had written its hand-over record when a proxy received COMMIT.
pub struct RecordAtCommit(Receiver<bool>);

impl RecordAtCommit {
    /// Waits for COMMIT, and checks that the record was written before it (I7).
    pub fn assert_written(&self) {
        assert_eq!(self.0.recv_timeout(TIMEOUT), Ok(true), "COMMIT without a hand-over record");
    }
}

/// Forwards bytes to `to` until COMMIT, which never arrives. The connection stays open. The source
/// writes its hand-over record into `state`. Returns the proxy's address.
pub fn proxy_that_keeps_commit(to: &str, state: PathBuf) -> (String, RecordAtCommit) {
    proxy(to, state, |mut source, _, _| {
        // Keep the connection open until the source ends.
        let mut piece = vec![0; 1 << 16];
        while matches!(source.read(&mut piece), Ok(1..)) {}
    })
}

/// Does the same as [`proxy_that_keeps_commit`], but COMMIT arrives, and both connections end with
/// it.
pub fn proxy_that_ends_with_commit(to: &str, state: PathBuf) -> (String, RecordAtCommit) {
    proxy(to, state, |source, mut destination, commit| {
        source.shutdown(Shutdown::Both).unwrap();
        destination.write_all(commit).unwrap();
        destination.shutdown(Shutdown::Write).unwrap();
    })
}

/// Forwards bytes to `to` until a piece that ends with COMMIT, which is passed to `then`.
fn proxy(
    to: &str,
    state: PathBuf,
    then: fn(TcpStream, TcpStream, &[u8]),
) -> (String, RecordAtCommit) {
    let (report, record) = channel();
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = format!("tcp:{}", listener.local_addr().unwrap());
    let to = to.trim_start_matches("tcp:").to_owned();
    std::thread::spawn(move || {
        let (mut source, _) = listener.accept().unwrap();
        let mut destination = TcpStream::connect(to).unwrap();
        let (mut back, mut answers) =
            (source.try_clone().unwrap(), destination.try_clone().unwrap());
        std::thread::spawn(move || std::io::copy(&mut answers, &mut back));
        let mut piece = vec![0; 1 << 16];
        while let Ok(n @ 1..) = source.read(&mut piece) {
            // The source writes the record earlier, while the destination restores.
            if ends_with_commit(&piece[..n]) {
                // A test that does not wait for the answer has ended.
                let _ = report.send(record_in(&state));
                return then(source, destination, &piece[..n]);
            }
            if destination.write_all(&piece[..n]).is_err() {
                return;
            }
        }
    });
    (address, RecordAtCommit(record))
}

/// Returns whether these bytes of a stream end with a COMMIT. Nothing follows a COMMIT before its
/// answer.
fn ends_with_commit(bytes: &[u8]) -> bool {
    let (commit, head, payload) = (14u16.to_le_bytes(), 24, 16u32.to_le_bytes());
    let Some(at) = bytes.len().checked_sub(head + 16) else { return false };
    bytes[at..at + 2] == commit && bytes[at + 8..at + 12] == payload
}

fn record_in(state: &Path) -> bool {
    let is_record = |e: DirEntry| e.file_name().to_string_lossy().ends_with(".source.json");
    state.read_dir().is_ok_and(|entries| entries.flatten().any(is_record))
}
