//! Owns the options of every command: help, and the log.

use std::path::PathBuf;

use clap::{ArgAction, Args, ValueEnum};

use super::headings;

/// Help, and the log's level, format and output.
#[derive(Args)]
pub(crate) struct GlobalArgs {
    #[command(flatten)]
    pub(crate) log: LogArgs,
    /// Print help; -h prints one line for each option
    #[arg(short, long, global = true, action = ArgAction::Help, help_heading = headings::OUTPUT)]
    pub(crate) help: Option<bool>,
}

/// The log's level, format and output.
#[derive(Args)]
pub(crate) struct LogArgs {
    /// Log more: -v events, -vv details, -vvv everything
    #[arg(short, long, global = true, action = ArgAction::Count, help_heading = headings::OUTPUT)]
    pub(crate) verbose: u8,
    /// Log filter, such as debug or driftline_machine=trace,info
    ///
    /// Without this option and -v, the environment variable RUST_LOG is the filter.
    #[arg(long, global = true, value_name = "FILTER", help_heading = headings::OUTPUT)]
    pub(crate) log: Option<String>,
    /// Log format: text or json
    ///
    /// With json, each line is an object.
    #[arg(long, global = true, value_name = "FORMAT", value_enum, hide_possible_values = true,
          default_value_t = LogFormat::Text, help_heading = headings::OUTPUT)]
    pub(crate) log_format: LogFormat,
    /// Append the log to this file instead of writing it to stderr
    #[arg(long, global = true, value_name = "FILE", help_heading = headings::OUTPUT)]
    pub(crate) log_file: Option<PathBuf>,
}

/// Format of the log.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
pub(crate) enum LogFormat {
    /// For people
    Text,
    /// For programs
    Json,
}
