//! Driftline and Firecracker, started and used by the same requests of Firecracker's API.
//!
//! `FIRECRACKER=/usr/bin/firecracker cargo bench -p tests --bench firecracker`. The environment
//! variable is the path of Firecracker's binary; without it only Driftline is measured.
//! Firecracker's releases are static programs, and so is what Driftline's package installs:
//! `DRIFTLINE_STATIC` is the path of that. Without it, the bench builds the program for this host's
//! libc.
//!
//! The programs take turns, and all figures are medians of ten. The guest has 1 GiB and one vCPU.
//! It prints a byte, writes to each page of 64 MiB, and then halts or writes to them again and
//! again. "Loaded" is the time from the start of the process to the answer to `PUT /snapshot/load`
//! with `resume_vm`. The memory of a clone is the mean PSS of 20 processes that have loaded the
//! same files.
#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used, reason = "a bench")]

use std::fs::{self, File};
use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use driftline_machine::testing::Elf;
use driftline_store::{Backend, DirBackend};
use serde_json::{Value, json};
use tests::{RawConnection, RawReply, SOON, ScratchDir, driftline, wait_for};

const ROUNDS: usize = 10;
const CLONES: usize = 20;
/// Requests of a round whose median is one sample.
const REQUESTS: usize = 200;
const MEM_MIB: u64 = 1024;

/// 32-bit code: prints `!`, writes to each page of 64 MiB from 16 MiB on, prints `.`.
const WRITES_ONCE: [u8; 32] = [
    0xba, 0xf8, 0x03, 0, 0, // mov edx, 0x3f8
    0xb0, b'!', 0xee, // mov al, '!'; out dx, al
    0x43, // again: inc ebx
    0xbf, 0, 0, 0, 1, // mov edi, 16 << 20
    0xb9, 0, 0x40, 0, 0, // mov ecx, 16384
    0x89, 0x1f, // page: mov [edi], ebx
    0x81, 0xc7, 0, 0x10, 0, 0,    // add edi, 4096
    0x49, // dec ecx
    0x75, 0xf5, // jnz page
    0xb0, b'.', // mov al, '.'
];

/// What the guest does after it has written.
#[derive(Clone, Copy)]
enum AfterWrites {
    Halt,
    WriteAgain,
}

impl AfterWrites {
    fn kernel(self) -> Vec<u8> {
        let rest: &[u8] = match self {
            // out dx, al; cli; hlt; jmp hlt
            Self::Halt => &[0xee, 0xfa, 0xf4, 0xeb, 0xfd],
            // out dx, al; jmp again
            Self::WriteAgain => &[0xee, 0xeb, 0xe5],
        };
        Elf::new(&[&WRITES_ONCE, rest].concat()).bytes()
    }
}

/// One of the programs that are compared.
struct Contender {
    name: &'static str,
    program: PathBuf,
    args: &'static [&'static str],
    scratch: ScratchDir,
}

impl Contender {
    fn all() -> Vec<Self> {
        let new = |name, program, args| Self { name, program, args, scratch: ScratchDir::new() };
        let program = std::env::var_os("DRIFTLINE_STATIC");
        let program = program.map_or_else(|| driftline().to_owned(), PathBuf::from);
        let ours = new("Driftline", program, &["firecracker"][..]);
        let Some(theirs) = std::env::var_os("FIRECRACKER") else {
            println!("Firecracker not measured: FIRECRACKER does not name its binary");
            return vec![ours];
        };
        vec![ours, new("Firecracker", theirs.into(), &[])]
    }

    /// Returns the text of the path of a file of this program.
    fn file(&self, name: &str) -> String {
        self.scratch.path(name).to_str().unwrap().to_owned()
    }

    /// Removes the files of a snapshot. A file system that discards what is removed would do so
    /// during the next snapshot, of the other program.
    fn remove_snapshot(&self, suffix: &str) {
        for file in ["state", "memory"] {
            fs::remove_file(self.file(&format!("{file}{suffix}"))).unwrap();
        }
        rustix::fs::sync();
        std::thread::sleep(Duration::from_millis(500));
    }

    fn start(&self, name: &str, stdout: Stdio) -> ApiServer {
        let socket = self.scratch.path(&format!("{name}.sock"));
        let mut command = Command::new(&self.program);
        command.args(self.args).arg("--api-sock").arg(&socket);
        // Without a file of its own the log is on the console.
        let log = self.file("log");
        File::create(&log).unwrap();
        // The pause of a live snapshot is in the log of level "Info".
        let level = if name == "running" { "Info" } else { "Error" };
        command.args(["--level", level, "--log-path", &log]);
        command.env_remove("RUST_LOG").stdin(Stdio::null()).stdout(stdout);
        let mut child = command.stderr(Stdio::null()).spawn().expect("it starts");
        let connection = loop {
            match RawConnection::open(&socket) {
                Ok(connection) => break connection,
                Err(_) => std::thread::sleep(Duration::from_micros(50)),
            }
            let ended = child.try_wait().unwrap();
            assert!(ended.is_none(), "{} ended: {ended:?}", self.name);
        };
        ApiServer { child, connection }
    }

    /// Returns the length in ms of the pause of the last live snapshot, by the log.
    fn last_pause(&self) -> f64 {
        let log = fs::read_to_string(self.file("log")).unwrap();
        let (_, after) = log.rsplit_once("pause_us=").expect("the log has it");
        let digits = after.split(|c: char| !c.is_ascii_digit()).next().unwrap();
        digits.parse::<f64>().unwrap() / 1e3
    }

    /// Starts a guest whose console is a file.
    fn start_guest(&self, name: &str, after: AfterWrites) -> (ApiServer, PathBuf) {
        let console = self.scratch.path(&format!("{name}.console"));
        let mut server = self.start(name, File::create(&console).unwrap().into());
        server.boot(&self.kernel(after));
        await_passes(&console, 1);
        (server, console)
    }

    fn kernel(&self, after: AfterWrites) -> String {
        let kernel = self.file("kernel");
        fs::write(&kernel, after.kernel()).unwrap();
        kernel
    }

    /// Starts a process that loads the snapshot of [`snapshot`](Self::snapshot) and runs its guest.
    fn load(&self, name: &str) -> ApiServer {
        let mut server = self.start(name, Stdio::null());
        let backend = json!({ "backend_type": "File", "backend_path": self.file("memory") });
        let load = json!({ "snapshot_path": self.file("state"), "mem_backend": backend,
            "resume_vm": true });
        server.done("PUT", "/snapshot/load", &load);
        server
    }

    /// Takes the snapshot of a guest that has halted.
    fn snapshot(&self) {
        let (mut server, _) = self.start_guest("original", AfterWrites::Halt);
        server.pause(true);
        server.done("PUT", "/snapshot/create", &self.create("Full", ""));
    }

    fn create(&self, kind: &str, suffix: &str) -> Value {
        json!({ "snapshot_type": kind, "snapshot_path": self.file(&format!("state{suffix}")),
            "mem_file_path": self.file(&format!("memory{suffix}")) })
    }
}

/// A process that serves the API. Dropping it kills the process.
struct ApiServer {
    child: Child,
    connection: RawConnection,
}

impl ApiServer {
    fn ask(&mut self, method: &str, path: &str, body: &str) -> RawReply {
        let length = body.len();
        let request = format!("{method} {path} HTTP/1.1\r\nContent-Length: {length}\r\n\r\n{body}");
        self.connection.send(request.as_bytes()).unwrap();
        self.connection.reply().unwrap()
    }

    fn done(&mut self, method: &str, path: &str, body: &Value) {
        let reply = self.ask(method, path, &body.to_string());
        let text = String::from_utf8_lossy(reply.body.as_deref().unwrap_or_default()).into_owned();
        assert_eq!(reply.status, 204, "{method} {path} {body}: {text}");
    }

    fn boot(&mut self, kernel: &str) {
        let machine =
            json!({ "vcpu_count": 1, "mem_size_mib": MEM_MIB, "track_dirty_pages": true });
        self.done("PUT", "/machine-config", &machine);
        self.done("PUT", "/boot-source", &json!({ "kernel_image_path": kernel }));
        self.done("PUT", "/actions", &json!({ "action_type": "InstanceStart" }));
    }

    fn pause(&mut self, pause: bool) {
        let state = if pause { "Paused" } else { "Resumed" };
        self.done("PATCH", "/vm", &json!({ "state": state }));
    }

    /// Returns the process's proportional set size, and what it shares with no other, in MiB.
    fn memory_mib(&self) -> [f64; 2] {
        let rollup = fs::read_to_string(format!("/proc/{}/smaps_rollup", self.child.id())).unwrap();
        let mib = |name: &str| {
            let line = rollup.lines().find_map(|line| line.strip_prefix(name)).unwrap();
            line.trim().trim_end_matches(" kB").parse::<f64>().unwrap() / 1024.0
        };
        [mib("Pss:"), mib("Private_Clean:") + mib("Private_Dirty:")]
    }
}

impl Drop for ApiServer {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The samples of one figure, by contender.
struct Samples {
    name: &'static str,
    of: Vec<Vec<f64>>,
}

impl Samples {
    /// Takes ten samples of each contender, in turn.
    fn take(
        name: &'static str,
        contenders: &[Contender],
        mut sample: impl FnMut(&Contender) -> f64,
    ) -> Self {
        let mut of = vec![Vec::new(); contenders.len()];
        for _ in 0..ROUNDS {
            for (contender, of) in contenders.iter().zip(&mut of) {
                of.push(sample(contender));
            }
        }
        Self { name, of }
    }

    fn print(self) {
        let medians: Vec<f64> = self.of.into_iter().map(median).collect();
        let [ours, theirs @ ..] = &medians[..] else { return };
        let theirs = theirs.first().map_or_else(
            || "not measured | ".to_owned(),
            |theirs| format!("{theirs:.2} | {:.2}", ours / theirs),
        );
        println!("| {} | {ours:.2} | {theirs} |", self.name);
    }
}

fn main() {
    if let Err(why) = driftline_machine::doctor::usable_kvm() {
        println!("not measured: {why}");
        return;
    }
    let contenders = Contender::all();
    for contender in &contenders {
        contender.snapshot();
    }
    println!("\n| | Driftline | Firecracker | ratio |\n| --- | ---: | ---: | ---: |");
    Samples::take("start of the process to the guest's first byte, ms", &contenders, first_byte)
        .print();
    for samples in snapshots(&contenders) {
        samples.print();
    }
    let alone = median((0..ROUNDS).map(|_| disk_alone()).collect());
    println!("| the disk alone: 64 MiB written and synced, ms | {alone:.2} | | |");
    pauses(&contenders).print();
    Samples::take("loaded: start of the process to the guest running, ms", &contenders, |c| {
        let since = Instant::now();
        let server = c.load("load");
        let taken = ms(since);
        drop(server);
        remove_socket(c, "load");
        taken
    })
    .print();
    for samples in clones(&contenders) {
        samples.print();
    }
    requests(&contenders).print();
}

fn first_byte(contender: &Contender) -> f64 {
    let kernel = contender.kernel(AfterWrites::Halt);
    let since = Instant::now();
    let mut server = contender.start("first", Stdio::piped());
    server.boot(&kernel);
    let mut byte = [0];
    let console = server.child.stdout.as_mut().unwrap();
    while byte != *b"!" {
        assert_eq!(console.read(&mut byte).unwrap(), 1, "{} ended", contender.name);
    }
    let taken = ms(since);
    drop(server);
    remove_socket(contender, "first");
    taken
}

/// Starts a guest of each contender that writes 64 MiB again and again, and pauses it. Returns it
/// with its console.
fn writing_guests<'c>(
    contenders: &'c [Contender],
    name: &str,
) -> Vec<(&'c Contender, ApiServer, PathBuf)> {
    let paused = |contender: &'c Contender| {
        let (mut server, console) = contender.start_guest(name, AfterWrites::WriteAgain);
        server.pause(true);
        (contender, server, console)
    };
    contenders.iter().map(paused).collect()
}

/// Measures snapshots of a guest that writes 64 MiB again and again. While one guest is measured,
/// the others are paused.
fn snapshots(contenders: &[Contender]) -> Vec<Samples> {
    let mut guests = writing_guests(contenders, "writing");
    let kinds = [
        ("Full", "`Full` snapshot of a paused guest, ms"),
        ("Diff", "`Diff` snapshot of 64 MiB of a paused guest, ms"),
    ];
    let mut all = kinds.map(|(_, name)| Samples { name, of: vec![Vec::new(); contenders.len()] });
    for _ in 0..ROUNDS {
        for (number, (contender, server, console)) in guests.iter_mut().enumerate() {
            for ((kind, _), samples) in kinds.iter().zip(&mut all) {
                server.pause(false);
                // All pages have been written since the last snapshot.
                let passes = passes(console);
                await_passes(console, passes + 2);
                server.pause(true);
                let create = contender.create(kind, "-writing");
                let since = Instant::now();
                server.done("PUT", "/snapshot/create", &create);
                samples.of[number].push(ms(since));
                contender.remove_snapshot("-writing");
            }
        }
    }
    all.into()
}

/// Returns how long a file takes that has 64 MiB and is made durable, without a guest, ms. The disk
/// begins to write after each MiB. Writes without the page cache, by one to four threads, take
/// longer on the disk of the published figures.
fn disk_alone() -> f64 {
    let scratch = ScratchDir::new();
    let backend = DirBackend::open(&scratch.path(".")).unwrap();
    let content: Vec<u8> =
        (0..1u32 << 18).flat_map(|n| n.wrapping_mul(0x9e37_79b9).to_le_bytes()).collect();
    let since = Instant::now();
    let file = backend.create_new("file").unwrap();
    file.truncate(MEM_MIB << 20).unwrap();
    for at in (0..64u64).map(|piece| piece << 20) {
        file.write_all_at(&content, at).unwrap();
        file.begin_writeback(at, 1 << 20);
    }
    file.sync().unwrap();
    let taken = ms(since);
    drop((file, scratch));
    rustix::fs::sync();
    std::thread::sleep(Duration::from_millis(500));
    taken
}

/// Measures how long a guest is paused that writes 64 MiB again and again: by a live snapshot, or
/// from the request for a pause until it is resumed.
fn pauses(contenders: &[Contender]) -> Samples {
    let mut guests = writing_guests(contenders, "running");
    let of = vec![Vec::new(); contenders.len()];
    let mut all = Samples { name: "pause of the guest for a `Diff` snapshot of 64 MiB, ms", of };
    for _ in 0..ROUNDS {
        for (number, (contender, server, console)) in guests.iter_mut().enumerate() {
            server.pause(false);
            let passes = passes(console);
            await_passes(console, passes + 2);
            let mut create = contender.create("Diff", "-running");
            let sample = if contender.name == "Driftline" {
                create["live"] = json!(true);
                server.done("PUT", "/snapshot/create", &create);
                server.pause(true);
                contender.last_pause()
            } else {
                let since = Instant::now();
                server.pause(true);
                server.done("PUT", "/snapshot/create", &create);
                server.pause(false);
                let sample = ms(since);
                server.pause(true);
                sample
            };
            all.of[number].push(sample);
            contender.remove_snapshot("-running");
        }
    }
    all
}

fn clones(contenders: &[Contender]) -> [Samples; 2] {
    let mut private = vec![Vec::new(); contenders.len()];
    let all = Samples::take("memory a clone (PSS, 20 clones), MiB", contenders, |contender| {
        let names: Vec<String> = (0..CLONES).map(|clone| format!("clone-{clone}")).collect();
        let clones: Vec<_> = names.iter().map(|name| contender.load(name)).collect();
        std::thread::sleep(Duration::from_millis(200));
        let sizes: Vec<_> = clones.iter().map(ApiServer::memory_mib).collect();
        drop(clones);
        for name in &names {
            remove_socket(contender, name);
        }
        let mean = |part: usize| sizes.iter().map(|of| of[part]).sum::<f64>() / CLONES as f64;
        let number = contenders.iter().position(|other| other.name == contender.name).unwrap();
        private[number].push(mean(1));
        mean(0)
    });
    [all, Samples { name: "of which no other process has, MiB", of: private }]
}

fn requests(contenders: &[Contender]) -> Samples {
    let mut servers: Vec<_> = contenders.iter().map(|contender| contender.load("asked")).collect();
    let mut of = vec![Vec::new(); contenders.len()];
    for _ in 0..ROUNDS {
        for (server, of) in servers.iter_mut().zip(&mut of) {
            let asked = (0..REQUESTS).map(|_| {
                let since = Instant::now();
                assert_eq!(server.ask("GET", "/", "").status, 200);
                since.elapsed().as_secs_f64() * 1e6
            });
            of.push(median(asked.collect()));
        }
    }
    Samples { name: "`GET /`, p50, µs", of }
}

/// Firecracker's process leaves its socket when it is killed, and refuses one that exists.
fn remove_socket(contender: &Contender, name: &str) {
    let _ = fs::remove_file(contender.scratch.path(&format!("{name}.sock")));
}

/// Returns how often the guest has written to all its pages.
fn passes(console: &Path) -> usize {
    let text = fs::read(console).unwrap();
    text.iter().filter(|byte| **byte == b'.').count()
}

fn await_passes(console: &Path, at_least: usize) {
    wait_for("pass of the guest", SOON, || (passes(console) >= at_least).then_some(()));
}

fn ms(since: Instant) -> f64 {
    since.elapsed().as_secs_f64() * 1e3
}

fn median(mut samples: Vec<f64>) -> f64 {
    samples.sort_by(f64::total_cmp);
    let middle = samples.len() / 2;
    f64::midpoint(samples[(samples.len() - 1) / 2], samples[middle])
}
