//! The backend that runs a guest.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use super::error::ConfigError;

/// The backend that runs the vCPUs.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum BackendKind {
    /// A KVM virtual machine.
    #[default]
    Kvm,
    /// The payload's workload on host threads, for hosts without KVM.
    Threads,
}

impl BackendKind {
    const ALL: [BackendKind; 2] = [Self::Kvm, Self::Threads];

    /// Returns the backend's name on the command line.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Kvm => "kvm",
            Self::Threads => "threads",
        }
    }
}

impl fmt::Display for BackendKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for BackendKind {
    type Err = ConfigError;

    fn from_str(s: &str) -> Result<Self, ConfigError> {
        let found = Self::ALL.into_iter().find(|b| b.name() == s);
        found.ok_or_else(|| ConfigError::unknown("backend", s, "kvm or threads"))
    }
}
