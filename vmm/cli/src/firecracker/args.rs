//! Parses Firecracker's arguments: `--name value` and `--flag`, nothing else.
//!
//! An argument that this version does not honour is refused by name, with its reason in
//! [`ARGUMENTS`].

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::path::PathBuf;
use std::str::FromStr;

use driftline_control::firecracker::{LoggerConfig, LoggerLevel};

use super::fault::{ArgumentFault, FirecrackerFault, LevelFilterFromStrError};
use crate::serve::PAYLOAD_LIMIT;
use crate::values::DEFAULT_ID;

/// Arguments of a process that serves the API. The absent ones have Firecracker's defaults.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct FirecrackerArgs {
    /// The API's socket. Without an API it is not used.
    pub(super) api_sock: PathBuf,
    /// Whether there is no API: the configuration file starts the guest.
    pub(super) no_api: bool,
    /// The instance's id.
    pub(super) id: String,
    pub(super) config_file: Option<PathBuf>,
    /// A file with the first content of the metadata store.
    pub(super) metadata: Option<PathBuf>,
    /// The log, as `PUT /logger` sets it.
    pub(super) log: LoggerConfig,
    pub(super) metrics_path: Option<PathBuf>,
    pub(super) boot_timer: bool,
    pub(super) no_seccomp: bool,
    /// Time of the process's start, in microseconds of the monotonic clock.
    pub(super) start_time_us: Option<u64>,
    /// Processor time at the process's start, in microseconds.
    pub(super) start_time_cpu_us: Option<u64>,
    /// Processor time of the parent, in microseconds.
    pub(super) parent_cpu_time_us: Option<u64>,
    /// The largest body of a request, in bytes.
    pub(super) payload_limit: usize,
    /// The largest metadata store, in bytes.
    pub(super) mmds_limit: usize,
}

/// What the arguments ask for.
#[derive(PartialEq, Eq, Debug)]
pub(super) enum FirecrackerCommand {
    Help,
    Version,
    /// Print the version of the format of snapshots.
    SnapshotVersion,
    /// Print the version of the format of this state file.
    DescribeSnapshot(PathBuf),
    Serve(Box<FirecrackerArgs>),
}

/// An argument that Firecracker has.
struct Argument {
    name: &'static str,
    takes_value: bool,
    help: &'static str,
    default: Option<&'static str>,
    /// Why the argument is not honoured.
    refused: Option<&'static str>,
}

/// The API's socket if none is named.
const DEFAULT_API_SOCK: &str = "/run/firecracker.socket";

const fn value(name: &'static str, help: &'static str) -> Argument {
    Argument { name, takes_value: true, help, default: None, refused: None }
}

const fn flag(name: &'static str, help: &'static str) -> Argument {
    Argument { name, takes_value: false, help, default: None, refused: None }
}

impl Argument {
    const fn or(self, default: &'static str) -> Self {
        Self { default: Some(default), ..self }
    }

    const fn refused(self, why: &'static str) -> Self {
        Self { refused: Some(why), ..self }
    }
}

/// All arguments, in the order of their names.
static ARGUMENTS: [Argument; 22] = [
    value("api-sock", "Path of the API's unix socket.").or(DEFAULT_API_SOCK),
    flag("boot-timer", "Add the device that logs the time from start to boot."),
    value("config-file", "JSON file that configures the guest and starts it."),
    value("describe-snapshot", "Print the format version of a state file."),
    flag("enable-pci", "Attach the devices to a PCI bus.").refused("devices have no PCI bus"),
    value("http-api-max-payload-size", "Largest body of a request, in bytes.").or("51200"),
    value("id", "Identifier of the guest.").or(DEFAULT_ID),
    value("level", "Level of the log."),
    value("log-path", "File or FIFO that receives the log."),
    value("metadata", "JSON file with the first content of the MMDS."),
    value("metrics-path", "File or FIFO that receives the metrics."),
    value("mmds-size-limit", "Largest content of the MMDS, in bytes."),
    value("module", "Modules that are logged, as the beginning of a path."),
    flag("no-api", "Do not listen for requests. Needs a configuration file."),
    flag("no-seccomp", "Do not filter system calls."),
    value("parent-cpu-time-us", "Processor time of the parent process."),
    value("seccomp-filter", "File with filters of system calls.")
        .refused("the threads are not Firecracker's, so its filters do not fit them"),
    flag("show-level", "Log the level of each line."),
    flag("show-log-origin", "Log the file and the number of each line's source."),
    flag("snapshot-version", "Print the version of the snapshot format."),
    value("start-time-cpu-us", "Processor time at the process's start."),
    value("start-time-us", "Time of the process's start."),
];

/// Arguments that were given, with their values.
type GivenArguments = BTreeMap<&'static str, Option<String>>;

/// Returns the text that `--help` prints.
pub(super) fn help() -> String {
    let name = |argument: &Argument| match argument.takes_value {
        true => format!("  --{0} <{0}>", argument.name),
        false => format!("  --{}", argument.name),
    };
    let width = ARGUMENTS.iter().map(|argument| name(argument).len()).max().unwrap_or(0);
    let line = |argument: &Argument| {
        let Argument { help, default, refused, .. } = argument;
        let default = default.map(|value| format!(" [default: \"{value}\"]")).unwrap_or_default();
        let refused = if refused.is_some() { " [not honoured]" } else { "" };
        format!("{:<width$}   {help}{default}{refused}", name(argument))
    };
    let version = flag("version", "Print the version of Firecracker.");
    let lines = ARGUMENTS.iter().chain([&version]).map(line);
    format!("optional arguments:\n{}", lines.collect::<Vec<_>>().join("\n"))
}

/// Parses the arguments after the program's name.
pub(super) fn parse(line: Vec<OsString>) -> Result<FirecrackerCommand, FirecrackerFault> {
    let not_unicode =
        |text: OsString| ArgumentFault::UnexpectedArgument(text.to_string_lossy().into_owned());
    let line: Result<Vec<_>, _> = line.into_iter().map(OsString::into_string).collect();
    let line = line.map_err(not_unicode)?;
    let end = line.iter().position(|text| text == "--").unwrap_or(line.len());
    let asks_for = |name: &str| line[..end].iter().any(|text| text == name);
    if asks_for("--help") || asks_for("-h") {
        return Ok(FirecrackerCommand::Help);
    }
    if asks_for("--version") {
        return Ok(FirecrackerCommand::Version);
    }
    let mut given = given_arguments(&line[..end])?;
    // Firecracker ignores the arguments after `--`.
    if let Some(more) = line.get(end + 1) {
        return Err(ArgumentFault::UnexpectedArgument(more.clone()).into());
    }
    let refusal = ARGUMENTS.iter().find_map(|argument| {
        let why = argument.refused.filter(|_| given.contains_key(argument.name))?;
        Some(ArgumentFault::RefusedArgument(argument.name, why))
    });
    // These print and end, whatever else is given.
    if given.contains_key("snapshot-version") {
        return Ok(FirecrackerCommand::SnapshotVersion);
    }
    if let Some(path) = given.remove("describe-snapshot").flatten() {
        return Ok(FirecrackerCommand::DescribeSnapshot(path.into()));
    }
    let args = served(&mut given)?;
    match refusal {
        Some(refusal) => Err(refusal.into()),
        None => Ok(FirecrackerCommand::Serve(Box::new(args))),
    }
}

/// Collects the arguments, and checks which of them may be combined.
fn given_arguments(line: &[String]) -> Result<GivenArguments, ArgumentFault> {
    let mut given = GivenArguments::new();
    let mut line = line.iter();
    while let Some(text) = line.next() {
        let unexpected = |text: &str| ArgumentFault::UnexpectedArgument(text.to_owned());
        let name = text.strip_prefix("--").ok_or_else(|| unexpected(text))?;
        let known = ARGUMENTS.iter().find(|argument| argument.name == name);
        let &Argument { name, takes_value, .. } = known.ok_or_else(|| unexpected(name))?;
        if given.contains_key(name) {
            return Err(ArgumentFault::DuplicateArgument(name));
        }
        let value = match takes_value {
            false => None,
            true => {
                let value = line.next().filter(|value| !value.starts_with("--"));
                Some(value.ok_or(ArgumentFault::MissingValue(name))?.clone())
            }
        };
        given.insert(name, value);
    }
    if given.contains_key("no-api") && !given.contains_key("config-file") {
        return Err(ArgumentFault::MissingArgument("config-file"));
    }
    if given.contains_key("no-seccomp") && given.contains_key("seccomp-filter") {
        return Err(ArgumentFault::ForbiddenArgument("no-seccomp", "seccomp-filter"));
    }
    Ok(given)
}

/// Reads the values of the arguments.
fn served(given: &mut GivenArguments) -> Result<FirecrackerArgs, FirecrackerFault> {
    let mut text = |name: &'static str| given.remove(name).flatten();
    let id = text("id").unwrap_or_else(|| DEFAULT_ID.to_owned());
    check_id(&id)?;
    let (log_path, module) = (text("log-path").map(PathBuf::from), text("module"));
    let level = text("level").map(|level| match level.parse::<LoggerLevel>() {
        Ok(level) => Ok(level),
        Err(_) => Err(FirecrackerFault::InvalidLogLevel(LevelFilterFromStrError(level))),
    });
    let level = level.transpose()?;
    let payload_limit = number("http-api-max-payload-size", "usize", &mut text)?;
    let payload_limit = payload_limit.unwrap_or(PAYLOAD_LIMIT);
    let mmds_limit = number("mmds-size-limit", "usize", &mut text)?.unwrap_or(payload_limit);
    let start_time_us = number("start-time-us", "u64", &mut text)?;
    let start_time_cpu_us = number("start-time-cpu-us", "u64", &mut text)?;
    let parent_cpu_time_us = number("parent-cpu-time-us", "u64", &mut text)?;
    let api_sock = text("api-sock").unwrap_or_else(|| DEFAULT_API_SOCK.to_owned()).into();
    let config_file = text("config-file").map(PathBuf::from);
    let metadata = text("metadata").map(PathBuf::from);
    let metrics_path = text("metrics-path").map(PathBuf::from);
    let is_given = |name: &str| given.contains_key(name);
    Ok(FirecrackerArgs {
        api_sock,
        no_api: is_given("no-api"),
        id,
        config_file,
        metadata,
        log: LoggerConfig {
            log_path,
            level,
            show_level: is_given("show-level").then_some(true),
            show_log_origin: is_given("show-log-origin").then_some(true),
            module,
        },
        metrics_path,
        boot_timer: is_given("boot-timer"),
        no_seccomp: is_given("no-seccomp"),
        start_time_us,
        start_time_cpu_us,
        parent_cpu_time_us,
        payload_limit,
        mmds_limit,
    })
}

fn number<T: FromStr>(
    name: &'static str,
    kind: &str,
    text: &mut impl FnMut(&'static str) -> Option<String>,
) -> Result<Option<T>, ArgumentFault> {
    let wrong = || {
        let why = format!("'{name}' parameter expected to be of '{kind}' type.");
        ArgumentFault::InvalidValue(why)
    };
    text(name).map(|value| value.parse::<T>().map_err(|_| wrong())).transpose()
}

/// Checks an id: 1 to 64 bytes of letters, digits and hyphens.
fn check_id(id: &str) -> Result<(), ArgumentFault> {
    let invalid = |why| Err(ArgumentFault::InvalidValue(format!("Invalid instance ID: {why}")));
    if !(1..=64).contains(&id.len()) {
        return invalid(format!(
            "Invalid len ({});  the length must be between 1 and 64",
            id.len()
        ));
    }
    match id.chars().enumerate().find(|(_, c)| *c != '-' && !c.is_alphanumeric()) {
        None => Ok(()),
        Some((at, c)) => invalid(format!("Invalid char ({c}) at position {at}")),
    }
}

#[cfg(test)]
mod tests;
