//! `driftline` processes: starts them, queries them, and kills them by their own pid.

use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use driftline_machine::testing::share_kib;
use serde_json::Value;
use tempfile::TempDir;

use crate::{GuestConsole, Namespace, SOON, wait_for};

/// Returns the path of the binary under test: a bench measures the program that users install.
/// Builds it first, because cargo builds the binaries of other packages only on request.
pub fn driftline() -> &'static Path {
    static PATH: OnceLock<PathBuf> = OnceLock::new();
    PATH.get_or_init(|| {
        // .../target/<profile>/deps/<test> -> .../target/<profile>/driftline
        let test = std::env::current_exe().expect("the test knows its own path");
        let profile = test.parent().and_then(Path::parent).expect("a test lies in target/*/deps");
        let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
        let target = profile.parent().expect("target");
        let (args, folder) = match cfg!(debug_assertions) {
            // With the features of `cargo test --workspace`, which has already built the binary for
            // its own package's tests. Other features would build it and its dependencies again.
            true => (["test", "--no-run", "--workspace", "--test=cli"], profile.to_owned()),
            false => {
                let args = ["build", "--profile=product", "--package=driftline-cli", "--locked"];
                (args, target.join("product"))
            }
        };
        let mut build = Command::new(cargo);
        build.args(args).arg("--quiet").arg("--target-dir").arg(target);
        // Cargo describes the package of this test to it. Build scripts of crates with C code run
        // again if that changes, and so would they in the next build without it.
        let of_this_package = |name: &str| {
            name == "OUT_DIR"
                || ["CARGO_PKG_", "CARGO_MANIFEST_"].iter().any(|p| name.starts_with(p))
        };
        for (name, _) in std::env::vars_os() {
            if name.to_str().is_some_and(of_this_package) {
                build.env_remove(name);
            }
        }
        build.current_dir(env!("CARGO_MANIFEST_DIR"));
        assert!(build.status().expect("cargo runs").success(), "driftline does not build");
        folder.join("driftline")
    })
}

/// A directory for one test's sockets, consoles and stores. Dropping it removes the directory.
pub struct ScratchDir {
    dir: TempDir,
}

impl Default for ScratchDir {
    fn default() -> Self {
        Self::new()
    }
}

impl ScratchDir {
    /// Creates an empty directory.
    pub fn new() -> Self {
        Self { dir: tempfile::tempdir().expect("a temporary folder") }
    }

    /// Returns the path of `name` in the directory.
    pub fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }
}

/// A `driftline` process that runs a guest or waits for one. Dropping it kills the process.
pub struct Driftline {
    child: Child,
    socket: PathBuf,
    console: PathBuf,
    log: PathBuf,
}

impl Driftline {
    /// Starts `driftline ARGS --api-sock ..`. `name` is the stem of its files in `scratch`. Its
    /// stdout is the guest's console.
    pub fn start(scratch: &ScratchDir, name: &str, args: &[&str]) -> Self {
        Self::start_by(Command::new(driftline()), Stdio::null(), scratch, name, args)
    }

    /// As [`start`](Self::start), with log lines of level `info`.
    pub fn start_logging(scratch: &ScratchDir, name: &str, args: &[&str]) -> Self {
        let mut command = Command::new(driftline());
        command.env("RUST_LOG", "info");
        Self::start_by(command, Stdio::null(), scratch, name, args)
    }

    /// As [`start`](Self::start), in a network namespace.
    pub fn start_at(host: &Namespace, scratch: &ScratchDir, name: &str, args: &[&str]) -> Self {
        Self::start_by(host.command(driftline()), Stdio::null(), scratch, name, args)
    }

    /// As [`start_at`](Self::start_at), with a pipe as the console's input.
    pub fn start_typed_to(
        host: &Namespace,
        scratch: &ScratchDir,
        name: &str,
        args: &[&str],
    ) -> Self {
        Self::start_by(host.command(driftline()), Stdio::piped(), scratch, name, args)
    }

    fn start_by(
        mut command: Command,
        input: Stdio,
        scratch: &ScratchDir,
        name: &str,
        args: &[&str],
    ) -> Self {
        let state = scratch.path(&format!("{name}.state"));
        command.args(args).arg("--state-dir").arg(state);
        Self::spawn(command, input, scratch, name)
    }

    /// As [`start`](Self::start), of `driftline serve`, with log lines of level `info` and a pipe
    /// as the console's input.
    pub(crate) fn serve(scratch: &ScratchDir, name: &str) -> Self {
        let mut command = Command::new(driftline());
        command.args(["serve", "--id", name]).env("RUST_LOG", "info");
        Self::spawn(command, Stdio::piped(), scratch, name)
    }

    fn spawn(mut command: Command, input: Stdio, scratch: &ScratchDir, name: &str) -> Self {
        let socket = scratch.path(&format!("{name}.sock"));
        let console = scratch.path(&format!("{name}.console"));
        let log = scratch.path(&format!("{name}.log"));
        let child = command
            .arg("--api-sock")
            .arg(&socket)
            .stdin(input)
            .stdout(File::create(&console).expect("a console file"))
            .stderr(File::create(&log).expect("a log file"))
            .spawn()
            .expect("driftline starts");
        Self { child, socket, console, log }
    }

    /// Starts `driftline run` with the payload `spec` and further `args`. Waits until the guest
    /// runs. Its vCPUs report ten times a second, because tests wait for reports, unless `spec` has
    /// another interval.
    pub fn run(scratch: &ScratchDir, name: &str, spec: &str, args: &[&str]) -> Self {
        let report = if spec.contains("report=") { "" } else { ",report=100" };
        let spec = format!("{spec}{report}");
        let mut all = vec!["run", "--guest", &spec];
        all.extend_from_slice(args);
        let vm = Self::start(scratch, name, &all);
        vm.wait_state("running");
        vm
    }

    /// Starts `receive-migration` on a free loopback port. Returns the process and its address.
    pub fn receive(scratch: &ScratchDir, name: &str) -> (Self, String) {
        Self::receive_with_answer_timeout(scratch, name, "1s")
    }

    /// As [`receive`](Self::receive), with `--answer-timeout`: how long the receiver waits for the
    /// source's question after it has discarded a complete guest.
    pub fn receive_with_answer_timeout(
        scratch: &ScratchDir,
        name: &str,
        answer_timeout: &str,
    ) -> (Self, String) {
        Self::receive_with(scratch, name, &["--answer-timeout", answer_timeout])
    }

    /// As [`receive`](Self::receive), with further `args`.
    pub fn receive_with(scratch: &ScratchDir, name: &str, args: &[&str]) -> (Self, String) {
        let args = [&["receive-migration", "tcp:127.0.0.1:0"], args].concat();
        let vm = Self::start(scratch, name, &args);
        let address = vm.listens_on();
        (vm, address)
    }

    /// Returns the report that `receive-migration --json` prints on the guest's arrival, among the
    /// guest's own output.
    pub fn arrival(&self) -> serde_json::Value {
        wait_for("report of an arrival", SOON, || {
            let console = fs::read_to_string(&self.console).ok()?;
            let report = &console[console.find("{\"vm_id\":")?..];
            serde_json::from_str(report.split_once('\n')?.0).ok()
        })
    }

    /// Starts `receive-migration` with further `args` in a network namespace, at its address.
    pub fn receive_at(
        host: &Namespace,
        scratch: &ScratchDir,
        name: &str,
        args: &[&str],
    ) -> (Self, String) {
        let address = format!("tcp:{}:0", host.address());
        let args = [&["receive-migration", &address, "--insecure"], args].concat();
        let vm = Self::start_at(host, scratch, name, &args);
        let address = vm.listens_on();
        (vm, address)
    }

    /// Starts `receive-migration` in a network namespace, at a unix socket of its own.
    pub fn receive_locally(host: &Namespace, scratch: &ScratchDir, name: &str) -> (Self, String) {
        let address = format!("unix:{}", scratch.path(&format!("{name}.migration")).display());
        let vm = Self::start_at(host, scratch, name, &["receive-migration", &address]);
        wait_for("listening receiver", SOON, || vm.log().contains(&address).then_some(()));
        (vm, address)
    }

    /// Returns the address on which a receiver waits, from its log.
    fn listens_on(&self) -> String {
        wait_for("listening receiver", SOON, || {
            let log = self.log();
            let at = log.find("waiting for a migration on tcp:")?;
            let rest = &log[at + "waiting for a migration on ".len()..];
            let end = rest.find(|c: char| !(c.is_ascii_alphanumeric() || ".:".contains(c)))?;
            Some(rest[..end].trim_end_matches(['.', ':']).to_owned())
        })
    }

    /// Writes a line to the guest's console.
    pub fn type_line(&mut self, line: &str) {
        let input = self.child.stdin.as_mut().expect("a console with a pipe");
        writeln!(input, "{line}").expect("driftline reads its input");
    }

    /// Returns the path of the API socket.
    pub fn socket(&self) -> &str {
        self.socket.to_str().expect("a path in UTF-8")
    }

    /// Returns the guest's console.
    pub fn console(&self) -> GuestConsole {
        GuestConsole::at(&self.console)
    }

    /// Returns the output on stderr so far.
    pub fn log(&self) -> String {
        fs::read_to_string(&self.log).unwrap_or_default()
    }

    /// Returns the number after the last `name` in the log, such as `waits=` of a process that
    /// [logs](Self::start_logging).
    pub fn figure(&self, name: &str) -> Option<f64> {
        let log = self.log();
        let at = log.rfind(name)? + name.len();
        log[at..].split(|c: char| !c.is_ascii_digit() && c != '.').next()?.parse().ok()
    }

    /// Returns the process id.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Runs `driftline COMMAND ARGS --api-sock SOCKET` to its end.
    pub fn cli(&self, command: &str, args: &[&str]) -> Output {
        let mut all = vec![command];
        all.extend_from_slice(args);
        all.extend_from_slice(&["--api-sock", self.socket()]);
        run_cli(&all)
    }

    /// Returns what `info --json` would print; `None` if the process does not answer.
    pub fn info(&self) -> Option<Value> {
        let page = driftline_machine::testing::get(&self.socket, "/v1/info")?;
        serde_json::from_str(&page).ok()
    }

    /// Returns the guest's state as `info` reports it.
    pub fn state(&self) -> Option<String> {
        Some(self.info()?.get("state")?.as_str()?.to_owned())
    }

    /// Waits until `info` reports `state`.
    pub fn wait_state(&self, state: &str) {
        wait_for(&format!("state {state} of {}", self.log.display()), SOON, || {
            (self.state()? == state).then_some(())
        });
    }

    /// Waits until a receiver whose guest did not arrive waits for the next source.
    pub fn wait_for_another(&self) {
        wait_for(&format!("{} to wait for another", self.log.display()), SOON, || {
            (self.info()?["migration"]["phase"] == "waiting").then_some(())
        });
    }

    /// Fails the test if the process has ended.
    pub fn must_live(&mut self) {
        let ended = self.exited();
        assert!(ended.is_none(), "{} has ended: {ended:?}", self.log.display());
    }

    /// Returns the exit code, -1 after a signal; `None` while the process runs.
    pub fn exited(&mut self) -> Option<i32> {
        self.child.try_wait().expect("a child of ours").map(|s| s.code().unwrap_or(-1))
    }

    /// Waits for the end of the process and returns the exit code, -1 after a signal.
    pub fn wait_exit(&mut self, limit: Duration) -> i32 {
        let log = self.log.clone();
        wait_for(&format!("end of the process with {}", log.display()), limit, || self.exited())
    }

    /// Kills the process by SIGKILL.
    pub fn kill(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Drop for Driftline {
    fn drop(&mut self) {
        self.kill();
        if std::thread::panicking() {
            eprintln!("--- {}\n{}", self.log.display(), self.log());
            let lines = self.console().lines();
            eprintln!("--- {}", self.console.display());
            for line in &lines[lines.len().saturating_sub(12)..] {
                eprintln!("{line}");
            }
        }
    }
}

/// Stops the guest at an API socket when dropped, and waits until its latest process, which is no
/// child of this one, has released what the next guest may use.
#[derive(Debug)]
pub struct StopsLatest(pub String);

impl Drop for StopsLatest {
    fn drop(&mut self) {
        let info = run_cli(&["info", "--api-sock", &self.0, "--json"]);
        let pid =
            serde_json::from_slice::<Value>(&info.stdout).ok().and_then(|i| i["pid"].as_u64());
        run_cli(&["stop", "--api-sock", &self.0]);
        let Some(pid) = pid else { return };
        let limit = Instant::now() + SOON;
        // A process that has ended has no memory, even if no parent has waited for it.
        while share_kib(pid as u32).is_some() && Instant::now() < limit {
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}

/// Runs `driftline ARGS` to its end.
pub fn run_cli(args: &[&str]) -> Output {
    Command::new(driftline()).args(args).stdin(Stdio::null()).output().expect("driftline starts")
}

/// Returns the JSON object that a command printed on stdout.
pub fn json_of(out: &Output) -> Value {
    let text = String::from_utf8_lossy(&out.stdout);
    serde_json::from_str(text.trim()).unwrap_or_else(|e| panic!("no JSON ({e}): {text}"))
}
