//! The reasons why a configuration is refused.

use std::path::PathBuf;

/// Maximum characters of a refused value in a message. The value may be from a peer.
const MAX_QUOTED: usize = 64;

/// The reason why a configuration, or a value of an option on the command line, is refused.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum ConfigError {
    /// A value does not have its form.
    #[error("{} is not a valid {what}: {form}", quoted(value))]
    Malformed {
        /// The kind of value that is expected.
        what: &'static str,
        /// The value.
        value: String,
        /// The form that it must have.
        form: String,
    },
    /// No part has this name.
    #[error("unknown {what} {}: use {choices}", quoted(name))]
    Unknown {
        /// The kind of part.
        what: &'static str,
        /// The name.
        name: String,
        /// The valid names.
        choices: &'static str,
    },
    /// No processor feature has this name.
    #[error("unknown processor feature {}", quoted(name))]
    UnknownFeature {
        /// The name.
        name: String,
    },
    /// No processor feature has the name that a user gave.
    #[error(
        "unknown processor feature {}{} `driftline doctor -v` lists the features of this host",
        quoted(name),
        nearest.map_or(";".to_owned(), |nearest| format!(": did you mean {nearest}?"))
    )]
    MisspelledFeature {
        /// The name.
        name: String,
        /// The feature that has a similar name.
        nearest: Option<&'static str>,
    },
    /// A number is outside its range.
    #[error("{value} {what}, not {least} to {most}")]
    OutOfRange {
        /// The unit of the number.
        what: &'static str,
        /// The number.
        value: u64,
        /// The smallest number allowed.
        least: u64,
        /// The largest number allowed.
        most: u64,
    },
    /// A part has a size that it cannot have.
    #[error("{part} has {value} {unit}, not {wanted}")]
    Size {
        /// The part.
        part: String,
        /// Its size.
        value: u64,
        /// The unit of the size.
        unit: &'static str,
        /// The sizes that it can have.
        wanted: String,
    },
    /// Two parts share a value that must be unique.
    #[error("the machine has two {what} \"{name}\"")]
    Twice {
        /// The parts, and the value's kind.
        what: &'static str,
        /// The value that they share.
        name: String,
    },
    /// A path cannot be written into a configuration.
    #[error("its file {0:?} has a name that is not UTF-8")]
    NotUtf8(PathBuf),
    /// The backend has no devices.
    #[error("the {backend} backend has no devices, and {count} are given: they need --backend kvm")]
    NoDevices {
        /// The backend's name.
        backend: &'static str,
        /// Number of devices in the configuration.
        count: usize,
    },
}

impl ConfigError {
    pub(super) fn malformed(
        what: &'static str,
        value: impl Into<String>,
        form: impl Into<String>,
    ) -> Self {
        Self::Malformed { what, value: value.into(), form: form.into() }
    }

    pub(super) fn unknown(what: &'static str, name: &str, choices: &'static str) -> Self {
        Self::Unknown { what, name: name.to_owned(), choices }
    }
}

/// Checks that `value` is in its range.
pub(super) fn in_range(
    what: &'static str,
    value: u64,
    least: u64,
    most: u64,
) -> Result<(), ConfigError> {
    match (least..=most).contains(&value) {
        true => Ok(()),
        false => Err(ConfigError::OutOfRange { what, value, least, most }),
    }
}

fn quoted(value: &str) -> String {
    if value.chars().nth(MAX_QUOTED).is_none() {
        return format!("\"{}\"", value.escape_debug());
    }
    let begins: String = value.chars().take(MAX_QUOTED).collect();
    format!("\"{}\"... of {} bytes", begins.escape_debug(), value.len())
}
