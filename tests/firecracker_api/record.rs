//! The files of sequences: what is sent, what Firecracker answers, and where Driftline differs.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use serde::Deserialize;
use serde_json::Value;

/// A file of sequences about one subject.
#[derive(Deserialize, Debug)]
#[serde(deny_unknown_fields)]
pub struct SequenceFile {
    /// Where Firecracker's answers are from.
    pub origin: String,
    /// Fields of pages. `"$NAME"` stands for one, and `{"$like": NAME, ..}` for one with other
    /// fields.
    #[serde(default)]
    pub shapes: BTreeMap<String, Value>,
    /// The sequences. Each has a directory and processes of its own.
    pub sequences: Vec<CallSequence>,
}

/// Steps that follow each other.
#[derive(Deserialize, Debug)]
#[serde(deny_unknown_fields)]
pub struct CallSequence {
    pub name: String,
    /// What the host must have.
    #[serde(default)]
    pub needs: Vec<HostNeed>,
    /// The files that exist before the first step.
    #[serde(default)]
    pub files: BTreeMap<String, Fixture>,
    /// Parsed one by one, for messages that name the step.
    pub steps: Vec<Value>,
}

/// Something that not every host has.
#[derive(Deserialize, Clone, Copy, PartialEq, Eq, Debug)]
#[serde(rename_all = "lowercase")]
pub enum HostNeed {
    Kvm,
    /// Two taps, `$TAP0` and `$TAP1`.
    Taps,
}

/// The content of a file.
#[derive(Deserialize, Clone, Debug)]
#[serde(rename_all = "kebab-case")]
pub enum Fixture {
    /// A kernel that waits for ever.
    WaitingKernel,
    /// A kernel that asks for a reset.
    ResettingKernel,
    /// A kernel that causes a triple fault.
    CrashingKernel,
    /// 1 MiB of zeros.
    Disk,
    /// A socket without a listener.
    StaleSocket,
    Text(String),
}

/// A step.
#[derive(Deserialize, Debug)]
#[serde(untagged)]
pub enum SequenceStep {
    Call(Box<CallStep>),
    Raw(RawStep),
    Together(TogetherStep),
    Start(StartStep),
    Run(RunStep),
    End(EndStep),
}

/// A request on the connection that all calls to a process share.
#[derive(Deserialize, Debug)]
#[serde(deny_unknown_fields)]
pub struct CallStep {
    /// Method and path.
    pub call: String,
    /// The body.
    pub json: Option<Value>,
    /// The body, if it is not to be JSON.
    pub text: Option<String>,
    pub answer: RecordedAnswer,
    pub differs: Option<AnswerDifference>,
}

/// Bytes on a connection of their own.
#[derive(Deserialize, Debug)]
#[serde(deny_unknown_fields)]
pub struct RawStep {
    /// The writes.
    pub raw: Vec<RawPart>,
    /// Number of other connections that are open and silent meanwhile.
    #[serde(default)]
    pub beside: usize,
    /// All replies, unless `open_end`.
    pub answers: Vec<RecordedAnswer>,
    /// Whether more replies may follow: how many depends on how the bytes arrive.
    #[serde(default)]
    pub open_end: bool,
    pub differs: Option<RawDifference>,
}

/// A write of a raw step.
#[derive(Deserialize, Debug)]
#[serde(untagged, deny_unknown_fields)]
pub enum RawPart {
    Text(String),
    /// `repeat` so many times between two texts.
    Repeated {
        repeat: String,
        times: usize,
        before: String,
        after: String,
    },
    /// Waits for a number of replies before what follows.
    Replies {
        replies: usize,
    },
}

/// Calls on connections of their own, sent simultaneously. Each has one answer.
#[derive(Deserialize, Debug)]
#[serde(deny_unknown_fields)]
pub struct TogetherStep {
    pub together: Vec<CallStep>,
}

/// Starts a process that serves the API. An earlier one is killed. Without such a step, the first
/// call starts a process without arguments.
#[derive(Deserialize, Debug)]
#[serde(deny_unknown_fields)]
pub struct StartStep {
    pub start: Vec<String>,
}

/// Runs the program to its end.
#[derive(Deserialize, Debug)]
#[serde(deny_unknown_fields)]
pub struct RunStep {
    pub run: Vec<String>,
    pub ends: ProcessEnd,
    /// A part of what it prints on stdout.
    pub prints: Option<String>,
    pub differs: Option<EndDifference>,
}

/// The end of the process that serves the API.
#[derive(Deserialize, Debug)]
#[serde(deny_unknown_fields)]
pub struct EndStep {
    /// Name of the signal that causes it, without `SIG`.
    pub signal: Option<String>,
    pub ends: ProcessEnd,
    pub differs: Option<EndDifference>,
}

/// How a process ends.
#[derive(Deserialize, Clone, Copy, PartialEq, Eq, Debug)]
#[serde(rename_all = "lowercase")]
pub enum ProcessEnd {
    Code(i32),
    Signal(i32),
}

/// An answer. A number is a status: 204 and 100 have no body, and all others have a fault. A string
/// is the text of a fault with status 400.
#[derive(Deserialize, Clone, Debug)]
#[serde(untagged)]
pub enum RecordedAnswer {
    Status(u16),
    Fault(String),
    Detailed(DetailedAnswer),
}

/// An answer with details.
#[derive(Deserialize, Clone, Default, Debug)]
#[serde(deny_unknown_fields)]
pub struct DetailedAnswer {
    pub status: Option<u16>,
    /// The text of a fault, or its beginning and `...`.
    pub fault: Option<String>,
    /// The text of a refusal of the HTTP server, or its beginning and `...`.
    pub error: Option<String>,
    /// The fields of a page with their types. Equal neighbours in an array are there once.
    pub keys: Option<Value>,
    /// Values of a page, by JSON pointer.
    #[serde(default)]
    pub values: BTreeMap<String, Value>,
    /// Whether the answer has the header `Deprecation`.
    #[serde(default)]
    pub deprecated: bool,
    /// A body that is nothing of the above.
    pub other: Option<String>,
}

/// Why Driftline differs.
#[derive(Deserialize, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
#[serde(rename_all = "kebab-case")]
pub enum DifferenceKind {
    /// Driftline does not have it.
    Refused,
    /// Driftline does it in another way, or has more.
    OnPurpose,
    /// Driftline is to answer as Firecracker does.
    NotYet,
}

/// Driftline's other answer.
#[derive(Deserialize, Debug)]
#[serde(deny_unknown_fields)]
pub struct AnswerDifference {
    pub kind: DifferenceKind,
    pub why: String,
    pub answer: RecordedAnswer,
    /// The operation that differs, if that is not the call's: this one only shows it.
    pub of: Option<String>,
}

/// Driftline's other answers.
#[derive(Deserialize, Debug)]
#[serde(deny_unknown_fields)]
pub struct RawDifference {
    pub why: String,
    pub answers: Vec<RecordedAnswer>,
}

/// Driftline's other end.
#[derive(Deserialize, Debug)]
#[serde(deny_unknown_fields)]
pub struct EndDifference {
    pub why: String,
    pub ends: ProcessEnd,
}

/// Returns the folder of the files.
pub fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("firecracker")
}

/// Returns the names of the files, without their extension, sorted.
pub fn names() -> Vec<String> {
    let entries = fs::read_dir(folder()).expect("a folder");
    let paths = entries.map(|entry| entry.expect("an entry").path());
    let mut names: Vec<_> = paths
        .map(|path| path.file_stem().and_then(|stem| stem.to_str()).expect("a name").to_owned())
        .collect();
    names.sort();
    names
}

/// Reads a file.
pub fn read(name: &str) -> SequenceFile {
    let path = folder().join(format!("{name}.json"));
    let text = fs::read_to_string(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    serde_json::from_str(&text).unwrap_or_else(|e| panic!("{}: {e}", path.display()))
}

/// Parses a step, whose place is for the message.
pub fn step(value: Value, place: &str) -> SequenceStep {
    serde_json::from_value(value.clone()).unwrap_or_else(|e| panic!("{place}: {e}: {value}"))
}
