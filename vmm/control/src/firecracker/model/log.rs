//! The log and the metrics.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::str::FromStr;

use serde::de::Error;
use serde::{Deserialize, Deserializer};

/// Least severe level that is logged.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum LoggerLevel {
    /// Nothing is logged.
    Off,
    /// Everything.
    Trace,
    /// Details.
    Debug,
    /// Events.
    Info,
    /// Warnings.
    Warn,
    /// Errors.
    Error,
}

/// A text is not the name of a level.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[error("Invalid LevelFilter")]
pub struct NotALevel;

impl FromStr for LoggerLevel {
    type Err = NotALevel;

    fn from_str(text: &str) -> Result<Self, NotALevel> {
        match text.to_lowercase().as_str() {
            "off" => Ok(Self::Off),
            "trace" => Ok(Self::Trace),
            "debug" => Ok(Self::Debug),
            "info" => Ok(Self::Info),
            "warn" | "warning" => Ok(Self::Warn),
            "error" => Ok(Self::Error),
            _ => Err(NotALevel),
        }
    }
}

impl<'de> Deserialize<'de> for LoggerLevel {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        String::deserialize(deserializer)?.parse().map_err(D::Error::custom)
    }
}

/// Body of `PUT /logger`.
#[derive(Clone, PartialEq, Eq, Default, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LoggerConfig {
    /// File or FIFO that receives the log.
    pub log_path: Option<PathBuf>,
    /// Least severe level that is logged. Absent means Info.
    pub level: Option<LoggerLevel>,
    /// Whether a line has its level.
    pub show_level: Option<bool>,
    /// Whether a line has its file and line.
    pub show_log_origin: Option<bool>,
    /// The only module that logs, with those below it.
    pub module: Option<String>,
}

/// Body of `PUT /metrics`. Firecracker ignores unknown fields here.
#[derive(Clone, PartialEq, Eq, Debug, Deserialize)]
pub struct MetricsConfig {
    /// File or FIFO that receives the metrics.
    pub metrics_path: PathBuf,
    /// Whether each line has the instance's id.
    #[serde(default)]
    pub emit_id: bool,
    /// Properties that each line has.
    pub properties: Option<BTreeMap<String, String>>,
}
