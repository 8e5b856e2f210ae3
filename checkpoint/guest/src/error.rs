//! Why a guest refuses a request, and the states that decide it.

use std::error::Error;
use std::fmt;

use driftline_dirty_tracker::NoMemory;
use serde::{Deserialize, Serialize};

/// Whether a guest's vCPUs execute.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum RunState {
    /// The vCPUs execute.
    Running,
    /// The vCPUs are stopped between two instructions and can be resumed.
    Paused,
    /// The guest has ended: by itself, on request, or because another host has it.
    Stopped,
}

impl fmt::Display for RunState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Running => "running",
            Self::Paused => "paused",
            Self::Stopped => "stopped",
        })
    }
}

/// Why a process may not run a guest in shared memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum ClaimError {
    /// The process to which the memory was offered has the guest.
    #[error(
        "another process has taken the guest over, in the memory that both have: continuing it \
         here as well would destroy it"
    )]
    Taken,
    /// The process that offered the memory has the guest.
    #[error(
        "the process that offered the guest's memory has kept the guest, or another one has it"
    )]
    Kept,
}

/// Why a guest refused or failed a request. The guest's state is unchanged unless stated otherwise.
#[derive(Debug, thiserror::Error)]
pub enum GuestError {
    /// The request does not fit the guest's state.
    #[error("cannot {request} a guest that is {state}")]
    State {
        /// The request.
        request: &'static str,
        /// The state that forbids it.
        state: RunState,
    },
    /// The guest's tracking mode is `none`.
    #[error(
        "the guest was started with --tracking none, so its writes are not tracked: start it with \
         another --tracking mode"
    )]
    NotTracked,
    /// Another process has the guest, in memory that both have.
    #[error(transparent)]
    Claim(#[from] ClaimError),
    /// The configuration or a state section cannot be used on this host.
    #[error("{what} cannot be used on this host: {cause}")]
    Unsupported {
        /// What cannot be used.
        what: String,
        /// The reason.
        #[source]
        cause: Box<dyn Error + Send + Sync>,
    },
    /// A configuration or state section is malformed.
    #[error("{what} is malformed: {cause}")]
    Malformed {
        /// What is malformed.
        what: String,
        /// The reason.
        #[source]
        cause: Box<dyn Error + Send + Sync>,
    },
    /// An operation of the underlying system failed.
    #[error("{what} failed: {cause}")]
    System {
        /// The operation.
        what: &'static str,
        /// The system's error.
        #[source]
        cause: Box<dyn Error + Send + Sync>,
    },
}

impl GuestError {
    /// Creates the error of a configuration or state section, named `what`, that cannot be used on
    /// this host.
    pub fn unsupported(
        what: impl fmt::Display,
        cause: impl Into<Box<dyn Error + Send + Sync>>,
    ) -> Self {
        Self::Unsupported { what: what.to_string(), cause: cause.into() }
    }

    /// Creates the error of a malformed configuration or state section, named `what`.
    pub fn malformed(
        what: impl fmt::Display,
        cause: impl Into<Box<dyn Error + Send + Sync>>,
    ) -> Self {
        Self::Malformed { what: what.to_string(), cause: cause.into() }
    }
}

/// The host lacks address space for another subscriber's tree.
impl From<NoMemory> for GuestError {
    fn from(e: NoMemory) -> Self {
        Self::System { what: "tracking the guest's writes", cause: Box::new(e) }
    }
}
