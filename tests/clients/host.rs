//! What the program of each client needs of the host: namespaces with a tap, the echo checker and
//! the console of a guest. Each failure ends the program by a panic that says what was expected.

use std::fmt::Display;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// Number of guests that are loaded from one snapshot and run at the same time.
pub const CLONES: usize = 10;
/// Time limit of each step. A guest boots in seconds unless its ring 0 is emulated.
pub const LIMIT: Duration = Duration::from_secs(240);
pub const GUEST_MAC: &str = "06:00:0a:4d:00:02";
/// Amount of the balloon that the guest gets while it runs, in MiB.
pub const BALLOON_MIB: u16 = 8;
/// The options before `driftline.ip` are for hosts whose KVM emulates ring 0, and harmless
/// elsewhere.
pub const BOOT_ARGS: &str = "console=ttyS0 reboot=k panic=-1 quiet loglevel=5 noxsave tsc=reliable \
     no_timer_check rodata=off clearcpuid=popcnt,smap,erms,fsrm,cx16 noreplace-smp \
     driftline.ip=10.77.0.2/24 driftline.check=tcp,disk driftline.tcp=every=60s \
     driftline.disk=path=/dev/vda,pause=500ms,every=2s";

const DISK_BYTES: u64 = 32 << 20;

/// What the program is given on its command line.
pub struct ClientRun {
    pub firecracker: PathBuf,
    image: PathBuf,
    scratch: PathBuf,
}

impl ClientRun {
    /// Reads the command line. The program ends if it is wrong.
    pub fn from_args() -> Self {
        // A process changes its working directory.
        let absolute = |path| std::path::absolute(path).expect("a path");
        let mut args = std::env::args_os().skip(1).map(absolute);
        match (args.next(), args.next(), args.next(), args.next()) {
            (Some(firecracker), Some(image), Some(scratch), None) => {
                Self { firecracker, image, scratch }
            }
            _ => {
                eprintln!("usage: PROGRAM FIRECRACKER IMAGE_DIRECTORY SCRATCH_DIRECTORY");
                std::process::exit(2);
            }
        }
    }

    /// Returns the path of a file of the Linux image.
    pub fn image(&self, name: &str) -> PathBuf {
        self.image.join(name)
    }

    /// Creates the folder of a process, in which it runs.
    pub fn folder(&self, name: &str) -> PathBuf {
        let folder = self.scratch.join(name);
        fs::create_dir(&folder).expect("a new folder in the scratch directory");
        folder
    }

    /// Creates the guest's first drive.
    pub fn disk(&self, path: &Path) {
        sized_file(path, DISK_BYTES);
    }

    /// Starts a peer of the guest's echo. Start all peers, then finish them: they run at the same
    /// time.
    pub fn echo(&self, host: &TapNamespace, to: &str) -> EchoPeer {
        let child = host
            .command(&self.image("driftline-check"))
            .args(["echo", to, "port=7", "interval=200ms", "run=2s", "drain=120s"])
            .args(["connect=120s"])
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .spawn()
            .expect("the image's checkers run");
        EchoPeer { child, to: to.to_owned() }
    }

    /// Verifies that the disk has all records that the guest had flushed.
    pub fn verify_disk(&self, disk: &Path, at_least: u64) {
        let out = Command::new(self.image("driftline-check"))
            .args(["disk-verify", &format!("path={}", disk.display())])
            .arg(format!("at-least={at_least}"))
            .output()
            .expect("the image's checkers run");
        let said = String::from_utf8_lossy(&out.stdout);
        assert!(out.status.success() && said.contains("intact=yes"), "{said}");
        step(format_args!("the disk has {at_least} flushed records"));
    }
}

/// Prints that a step's effect was seen.
pub fn step(what: impl Display) {
    println!("{what}");
}

/// Creates a file of zeros.
pub fn sized_file(path: &Path, bytes: u64) {
    fs::File::create(path).and_then(|file| file.set_len(bytes)).expect("a file");
}

/// Copies a file, without its holes.
pub fn copy_disk(from: &Path, to: &Path) {
    let copied = Command::new("cp").arg("--sparse=always").args([from, to]).status();
    assert!(copied.expect("cp runs").success());
}

/// Calls `what` every 5 ms until it returns a value. Fails after [`LIMIT`].
pub fn wait_for<T>(awaited: &str, mut what: impl FnMut() -> Option<T>) -> T {
    let begun = Instant::now();
    loop {
        if let Some(found) = what() {
            return found;
        }
        assert!(begun.elapsed() < LIMIT, "after {LIMIT:?} still no {awaited}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// A network namespace with a tap, whose other end is the guest's. Dropping it removes both.
pub struct TapNamespace {
    name: String,
}

impl TapNamespace {
    pub fn with_tap(tap: &str) -> Self {
        let new = Self { name: format!("client-{}-{tap}", std::process::id()) };
        ip(&["netns", "add", &new.name]);
        ip(&["-n", &new.name, "tuntap", "add", "dev", tap, "mode", "tap"]);
        // The guest of a snapshot knows its peer by this address.
        ip(&["-n", &new.name, "link", "set", tap, "address", "06:00:0a:4d:00:01"]);
        ip(&["-n", &new.name, "addr", "add", "10.77.0.1/24", "dev", tap]);
        ip(&["-n", &new.name, "link", "set", tap, "up"]);
        new
    }

    pub fn name(&self) -> &str {
        &self.name
    }

    fn command(&self, program: &Path) -> Command {
        let mut command = Command::new("ip");
        command.args(["netns", "exec", &self.name]).arg(program);
        command
    }
}

impl Drop for TapNamespace {
    fn drop(&mut self) {
        let _ = Command::new("ip").args(["netns", "del", &self.name]).status();
    }
}

fn ip(args: &[&str]) {
    let done = Command::new("ip").args(args).status();
    assert!(done.expect("ip runs").success(), "ip {args:?}");
}

/// A peer of the guest's echo that runs for two seconds.
pub struct EchoPeer {
    child: Child,
    to: String,
}

impl EchoPeer {
    /// Waits for the end. Every message must have been answered once and in order.
    pub fn finish(self) {
        let out = self.child.wait_with_output().expect("a child of ours");
        let said = String::from_utf8_lossy(&out.stdout);
        let last = said.lines().last().unwrap_or_default();
        assert!(out.status.success() && last.contains("intact=yes"), "{}: {said}", self.to);
        step(format_args!("{}: {last}", self.to));
    }
}

/// The target of an echo over a tap.
pub const OVER_TAP: &str = "addr=10.77.0.2";

/// The target of an echo over a vsock device with this socket.
pub fn over_vsock(socket: &Path) -> String {
    format!("vsock={}", socket.display())
}

/// The file that receives a guest's console.
pub struct ConsoleFile {
    path: PathBuf,
}

impl ConsoleFile {
    pub fn at(path: PathBuf) -> Self {
        Self { path }
    }

    /// Returns the whole output so far.
    pub fn text(&self) -> String {
        String::from_utf8_lossy(&fs::read(&self.path).unwrap_or_default()).into_owned()
    }

    pub fn await_boot(&self) {
        wait_for("shell of the guest", || {
            self.text().contains("driftline-linux: shell").then_some(())
        });
        step("the guest's shell runs");
    }

    /// Returns the number of records that the disk checker has flushed: more than `more_than`.
    pub fn await_flushed(&self, more_than: u64) -> u64 {
        wait_for("flushed record", || {
            let text = self.text();
            let line = text.lines().rev().find(|line| line.starts_with("check disk: flushed="))?;
            let flushed = line.split(['=', ' ']).nth(3)?.parse().ok()?;
            (flushed > more_than).then_some(flushed)
        })
    }
}
