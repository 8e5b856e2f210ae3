//! Plays sequences against a program, and compares what it does with the record.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io;
use std::os::unix::net::UnixListener;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread;

use driftline_machine::testing::{Elf, TestTap, kvm_or_skip, skip};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Map, Value};
use tests::{ApiDocument, RawConnection, RawReply, SOON, ScratchDir, driftline, wait_for};

use super::compare::mismatch;
use super::record::{
    self, CallSequence, CallStep, Fixture, HostNeed, ProcessEnd, RawPart, RawStep, RecordedAnswer,
    RunStep, SequenceStep,
};

/// The environment variable that names Firecracker's binary.
const FIRECRACKER: &str = "FIRECRACKER";
/// A part of the text of refusals of bodies that are not what the operation takes.
const MALFORMED: &str = "An error occurred when deserializing the json body of a request";

/// A program that serves the API.
#[derive(Clone, PartialEq, Eq, Debug)]
enum ApiProgram {
    Driftline,
    /// Firecracker itself, at this path.
    Firecracker(PathBuf),
}

impl ApiProgram {
    /// Returns the programs of this run.
    fn all() -> Vec<Self> {
        let theirs = std::env::var_os(FIRECRACKER).map(|path| Self::Firecracker(path.into()));
        [Self::Driftline].into_iter().chain(theirs).collect()
    }

    fn command(&self) -> Command {
        let mut command = match self {
            Self::Driftline => {
                let mut command = Command::new(driftline());
                command.arg("firecracker").env_remove("RUST_LOG");
                command
            }
            Self::Firecracker(path) => Command::new(path),
        };
        command.stdin(Stdio::null());
        command
    }
}

/// Plays all sequences of a file against all programs.
pub fn play(name: &str) {
    let file = record::read(name);
    let failures: Vec<String> = file
        .sequences
        .iter()
        .flat_map(|sequence| {
            let place = format!("{name}.json, {}", sequence.name);
            let shapes = &file.shapes;
            ApiProgram::all().into_iter().flat_map(move |program| {
                let player = Player::new(program, shapes, sequence, &place);
                player.map(Player::play).unwrap_or_default()
            })
        })
        .collect();
    let origin = &file.origin;
    assert!(failures.is_empty(), "answers {origin}:\n{}", failures.join("\n"));
}

/// A sequence that is played.
struct Player<'s> {
    program: ApiProgram,
    shapes: &'s BTreeMap<String, Value>,
    sequence: &'s CallSequence,
    place: String,
    scratch: ScratchDir,
    taps: Vec<TestTap>,
    process: Option<ApiProcess>,
    started: usize,
    /// Whether the process ends by itself after the current step.
    ends_next: bool,
    failures: Vec<String>,
}

impl<'s> Player<'s> {
    /// Returns `None`, and says so, if the host lacks something.
    fn new(
        program: ApiProgram,
        shapes: &'s BTreeMap<String, Value>,
        sequence: &'s CallSequence,
        place: &str,
    ) -> Option<Self> {
        if sequence.needs.contains(&HostNeed::Kvm) && !kvm_or_skip(place) {
            return None;
        }
        let taps = match sequence.needs.contains(&HostNeed::Taps) {
            true => two_taps(),
            false => Ok(Vec::new()),
        };
        let taps = taps.inspect_err(|e| skip(place, &e.to_string())).ok()?;
        let scratch = ScratchDir::new();
        for (name, fixture) in &sequence.files {
            write(&scratch, name, fixture);
        }
        Some(Self {
            program,
            shapes,
            sequence,
            place: place.to_owned(),
            scratch,
            taps,
            process: None,
            started: 0,
            ends_next: false,
            failures: Vec::new(),
        })
    }

    /// Plays the sequence. Returns what differs from the record.
    fn play(mut self) -> Vec<String> {
        for (number, step) in (1..).zip(&self.sequence.steps) {
            let place = format!("{}, step {number}", self.place);
            let step = record::step(self.expanded(step.clone()), &place);
            let before = self.failures.len();
            let next = self.sequence.steps.get(number);
            self.ends_next = next.is_some_and(|next| {
                let next = record::step(self.expanded(next.clone()), &place);
                matches!(next, SequenceStep::End(end) if end.signal.is_none())
            });
            self.step(&step);
            for failure in &mut self.failures[before..] {
                *failure = format!("{place}, {:?}: {failure}", self.program);
            }
        }
        if !self.failures.is_empty() {
            let stderr = self.scratch.path(&format!("stderr-{}", self.started));
            self.failures.push(fs::read_to_string(stderr).unwrap_or_default());
        }
        self.failures
    }

    fn step(&mut self, step: &SequenceStep) {
        match step {
            SequenceStep::Call(call) => {
                let connection = self.process().connection();
                let reply = ask(connection, call);
                self.compare_call(call, reply);
            }
            SequenceStep::Together(step) => {
                let socket = &self.process().socket;
                let replies: Vec<_> = thread::scope(|scope| {
                    let ask = |call| scope.spawn(move || ask(&mut open(socket), call));
                    let asked: Vec<_> = step.together.iter().map(ask).collect();
                    asked.into_iter().map(|asked| asked.join().expect("no panic")).collect()
                });
                for (call, reply) in step.together.iter().zip(replies) {
                    self.compare_call(call, reply);
                }
            }
            SequenceStep::Raw(step) => self.raw(step),
            SequenceStep::Start(step) => self.start(&step.start),
            SequenceStep::Run(step) => self.run(step),
            SequenceStep::End(step) => {
                let mut process = self.process.take().expect("a process");
                if let Some(name) = &step.signal {
                    process.signal(name);
                }
                let differs = step.differs.as_ref().map(|differs| differs.ends);
                self.compare_end(process.child.wait(), step.ends, differs);
            }
        }
    }

    fn run(&mut self, step: &RunStep) {
        let printed = self.scratch.path("printed");
        let mut command = self.program.command();
        command.args(&step.run).stderr(Stdio::null());
        command.stdout(File::create(&printed).expect("a file"));
        let mut running = KilledChild(command.spawn().expect("it starts"));
        let end = running.wait();
        let stdout = fs::read_to_string(printed).expect("text");
        if !step.prints.as_ref().is_none_or(|text| stdout.contains(text)) {
            self.failures.push(format!("expected {:?}, got {stdout}", step.prints));
        }
        self.compare_end(end, step.ends, step.differs.as_ref().map(|differs| differs.ends));
    }

    fn raw(&mut self, step: &RawStep) {
        let is_ours = self.program == ApiProgram::Driftline;
        let answers = match &step.differs {
            Some(differs) if is_ours => &differs.answers,
            _ => &step.answers,
        };
        let process = self.process();
        let silent: Vec<_> = (0..step.beside).map(|_| open(&process.socket)).collect();
        let mut connection = open(&process.socket);
        let mut replies = Vec::new();
        for part in &step.raw {
            match part {
                // A server that refuses a request may close the connection before it has all.
                RawPart::Text(text) => _ = connection.send(text.as_bytes()),
                RawPart::Repeated { repeat, times, before, after } => {
                    let text = [before.as_str(), &repeat.repeat(*times), after].concat();
                    let _ = connection.send(text.as_bytes());
                }
                RawPart::Replies { replies: count } => {
                    replies.extend((0..*count).map_while(|_| connection.reply().ok()));
                }
            }
        }
        let left = answers.len().saturating_sub(replies.len());
        replies.extend((0..left).map_while(|_| connection.reply().ok()));
        let rest = if step.open_end { Ok(Vec::new()) } else { connection.finish() };
        drop(silent);
        let rest = rest.unwrap_or_else(|e| e.to_string().into_bytes());
        let mut wrong = differences(&replies, answers);
        if !rest.is_empty() {
            wrong.push(format!("{} follows", String::from_utf8_lossy(&rest)));
        }
        if is_ours && step.differs.is_some() && differences(&replies, &step.answers).is_empty() {
            wrong.push("differs no longer: remove the difference".to_owned());
        }
        self.failures.extend(wrong);
    }

    fn compare_call(&mut self, call: &CallStep, reply: io::Result<RawReply>) {
        let mut reply = match reply {
            Ok(reply) => reply,
            Err(e) => return self.failures.push(format!("{}: {e}", call.call)),
        };
        if self.program == ApiProgram::Driftline && self.ends_next {
            keep_alive(&mut reply);
        }
        let differs = call.differs.as_ref().filter(|_| self.program == ApiProgram::Driftline);
        if self.program == ApiProgram::Driftline {
            self.failures.extend(undocumented(call, &reply));
        }
        let theirs = mismatch(&reply, &call.answer);
        let wrong = match (differs, theirs) {
            (None, theirs) => theirs,
            (Some(differs), Some(_)) => mismatch(&reply, &differs.answer),
            (Some(_), None) => Some("differs no longer: remove the difference".to_owned()),
        };
        self.failures.extend(wrong.map(|wrong| format!("{}: {wrong}", call.call)));
    }

    fn compare_end(&mut self, end: ExitStatus, ends: ProcessEnd, differs: Option<ProcessEnd>) {
        let differs = differs.filter(|_| self.program == ApiProgram::Driftline);
        let end = match (end.code(), end.signal()) {
            (Some(code), _) => ProcessEnd::Code(code),
            (None, signal) => ProcessEnd::Signal(signal.unwrap_or_default()),
        };
        let expected = differs.unwrap_or(ends);
        if differs.is_some() && end == ends {
            self.failures.push("differs no longer: remove the difference".to_owned());
        } else if end != expected {
            self.failures.push(format!("expected {expected:?}, got {end:?}"));
        }
    }

    /// Returns the process that serves the API, which starts if there is none.
    fn process(&mut self) -> &mut ApiProcess {
        if self.process.is_none() {
            self.start(&[]);
        }
        self.process.as_mut().expect("started")
    }

    fn start(&mut self, args: &[String]) {
        self.started += 1;
        let name = |what: &str| self.scratch.path(&format!("{what}-{}", self.started));
        // The earlier process is killed first.
        self.process = None;
        self.process = Some(ApiProcess::start(&self.program, args, name));
    }

    /// Replaces the names of shapes, `$DIR`, `$TAP0` and `$TAP1` in a step.
    fn expanded(&self, value: Value) -> Value {
        match value {
            Value::String(text) => {
                let shape = text.strip_prefix('$').and_then(|name| self.shapes.get(name));
                shape.map_or_else(|| self.with_paths(&text).into(), |shape| shape.clone())
            }
            Value::Array(values) => values.into_iter().map(|value| self.expanded(value)).collect(),
            Value::Object(fields) => {
                let fields = fields.into_iter().map(|(name, value)| (name, self.expanded(value)));
                let mut fields: Map<_, _> = fields.collect();
                let like = fields.remove("$like");
                let shape = like.as_ref().and_then(Value::as_str).map(|name| &self.shapes[name]);
                let mut whole = shape.and_then(Value::as_object).cloned().unwrap_or_default();
                whole.extend(fields);
                whole.into()
            }
            other => other,
        }
    }

    fn with_paths(&self, text: &str) -> String {
        let taps = self.taps.iter().enumerate();
        taps.fold(with_dir(&self.scratch, text), |text, (number, tap)| {
            text.replace(&format!("$TAP{number}"), &tap.0)
        })
    }
}

/// A process. Killed when dropped.
struct KilledChild(Child);

impl KilledChild {
    fn wait(&mut self) -> ExitStatus {
        wait_for("end of the process", SOON, || self.0.try_wait().expect("a child of ours"))
    }
}

impl Drop for KilledChild {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// A process that serves the API.
struct ApiProcess {
    child: KilledChild,
    socket: PathBuf,
    /// The connection of calls.
    connection: Option<RawConnection>,
}

impl ApiProcess {
    /// Starts a process and waits for its socket. `name` returns the paths of its files.
    fn start(program: &ApiProgram, args: &[String], name: impl Fn(&str) -> PathBuf) -> Self {
        let socket = name("socket");
        let child = program
            .command()
            .arg("--api-sock")
            .arg(&socket)
            .args(args)
            .stdout(File::create(name("stdout")).expect("a file"))
            .stderr(File::create(name("stderr")).expect("a file"))
            .spawn()
            .expect("it starts");
        let mut child = KilledChild(child);
        wait_for("API socket", SOON, || {
            let ended = child.0.try_wait().expect("a child of ours");
            assert!(ended.is_none(), "{args:?} end the process: {ended:?}");
            RawConnection::open(&socket).ok()
        });
        Self { child, socket, connection: None }
    }

    fn connection(&mut self) -> &mut RawConnection {
        self.connection.get_or_insert_with(|| open(&self.socket))
    }

    fn signal(&self, name: &str) {
        let signal = match name {
            "TERM" => Signal::TERM,
            "INT" => Signal::INT,
            "HUP" => Signal::HUP,
            "BUS" => Signal::BUS,
            "SEGV" => Signal::SEGV,
            "XFSZ" => Signal::XFSZ,
            "XCPU" => Signal::XCPU,
            "ILL" => Signal::ILL,
            other => panic!("unknown signal {other}"),
        };
        let pid = i32::try_from(self.child.0.id()).ok().and_then(Pid::from_raw);
        kill_process(pid.expect("a process"), signal).expect("a child of ours");
    }
}

fn open(socket: &Path) -> RawConnection {
    RawConnection::open(socket).unwrap_or_else(|e| panic!("{}: {e}", socket.display()))
}

fn ask(connection: &mut RawConnection, call: &CallStep) -> io::Result<RawReply> {
    let body = match (&call.json, &call.text) {
        (Some(json), _) => json.to_string(),
        (None, text) => text.clone().unwrap_or_default(),
    };
    let length = match body.len() {
        0 => String::new(),
        length => format!("Content-Length: {length}\r\n"),
    };
    connection.send(format!("{} HTTP/1.1\r\n{length}\r\n{body}", call.call).as_bytes())?;
    connection.reply()
}

/// Returns how a call differs from `docs/openapi.yaml`: its reply, or a body that the document
/// permits and the parser refuses, or the other way round.
fn undocumented(call: &CallStep, reply: &RawReply) -> Option<String> {
    let document = ApiDocument::read();
    let (method, path) = call.call.split_once(' ').expect("method and path");
    let operation = document.find(&["firecracker", "driftline"], method, path)?;
    let tag = if operation.has_tag("firecracker") { "firecracker" } else { "driftline" };
    let text = reply.body.as_deref().map(String::from_utf8_lossy);
    let violation = operation.violation(tag, reply.status, text.as_deref());
    let body_violation = || {
        let schema = operation.request_schema(tag)?;
        let violation = document.violation(schema, call.json.as_ref()?);
        let is_malformed = text.is_some_and(|text| text.contains(MALFORMED));
        match violation {
            Some(violation) if reply.status < 300 => Some(format!("done, although {violation}")),
            None if is_malformed => Some("refused, although the document permits it".to_owned()),
            _ => None,
        }
    };
    violation.or_else(body_violation)
}

/// Returns why replies are not the answers.
fn differences(replies: &[RawReply], answers: &[RecordedAnswer]) -> Vec<String> {
    let mut wrong: Vec<_> =
        replies.iter().zip(answers).filter_map(|(reply, answer)| mismatch(reply, answer)).collect();
    if replies.len() != answers.len() {
        wrong.push(format!("{} replies instead of {}", replies.len(), answers.len()));
    }
    wrong
}

/// Makes the reply of a process that ends the one of a process that stays: the first may say that
/// the connection ends.
fn keep_alive(reply: &mut RawReply) {
    for (name, value) in &mut reply.headers {
        if name == "Connection" && value == "close" {
            "keep-alive".clone_into(value);
        }
    }
}

/// Creates taps that no other sequence has.
fn two_taps() -> io::Result<Vec<TestTap>> {
    static MADE: AtomicU32 = AtomicU32::new(0);
    let tap = |_| TestTap::new(&format!("a{}", MADE.fetch_add(1, Ordering::Relaxed)));
    (0..2).map(tap).collect()
}

fn with_dir(scratch: &ScratchDir, text: &str) -> String {
    let dir = scratch.path("");
    text.replace("$DIR", dir.to_str().expect("a path in UTF-8").trim_end_matches('/'))
}

fn write(scratch: &ScratchDir, name: &str, fixture: &Fixture) {
    let path = scratch.path(name);
    let kernel = |code: &[u8]| Elf::new(code).bytes();
    let content = match fixture {
        // hlt; jmp $-1
        Fixture::WaitingKernel => kernel(&[0xf4, 0xeb, 0xfd]),
        // mov al, 0xfe; out 0x64, al; hlt
        Fixture::ResettingKernel => kernel(&[0xb0, 0xfe, 0xe6, 0x64, 0xf4]),
        // ud2, without an IDT
        Fixture::CrashingKernel => kernel(&[0x0f, 0x0b]),
        Fixture::Disk => vec![0; 1 << 20],
        Fixture::StaleSocket => return drop(UnixListener::bind(path).expect("a free path")),
        Fixture::Text(text) => with_dir(scratch, text).into_bytes(),
    };
    fs::write(path, content).expect("a file");
}
