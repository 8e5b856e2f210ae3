//! Why a step of the demo failed.

use std::io;
use std::process::ExitStatus;
use std::time::Duration;

use driftline_control::api::ClientError;
use driftline_control::model::MigrationState;

/// The reason why a step failed.
#[derive(Debug, thiserror::Error)]
pub(super) enum StepError {
    /// A file or a process cannot be used.
    #[error(transparent)]
    Io(#[from] io::Error),
    /// The process cannot be started.
    #[error("cannot start a VMM: {0}")]
    Start(io::Error),
    /// The process has ended too early.
    #[error("the VMM ended ({status}) while the demo waited for {what}: {}", stderr.trim())]
    EndedBefore {
        /// What the demo waited for.
        what: &'static str,
        status: ExitStatus,
        stderr: String,
    },
    /// The process has ended with a failure.
    #[error("the VMM ended with {status}: {}", stderr.trim())]
    Ended { status: ExitStatus, stderr: String },
    /// The process does not end.
    #[error("the VMM does not end")]
    Runs,
    /// What was expected has not happened in time.
    #[error("waited {} s for {what}", limit.as_secs())]
    TimedOut { what: &'static str, limit: Duration },
    /// A request failed.
    #[error(transparent)]
    Client(#[from] ClientError),
    /// A request cannot be made from JSON.
    #[error(transparent)]
    Request(#[from] serde_json::Error),
    /// The guest has found that its memory is not what it wrote.
    #[error("the guest found {errors} errors: {}", line.trim())]
    GuestErrors { errors: u64, line: String },
    /// The guest cannot continue.
    #[error("the guest says: {}", line.trim())]
    GuestFailed { line: String },
    /// A checkpoint is not stored; the text is the VMM's.
    #[error("{0}")]
    NotStored(String),
    /// Some checkpoints are missing.
    #[error("{taken} checkpoints were taken, not {wanted}")]
    MissingCheckpoints { taken: u64, wanted: u64 },
    /// The migration failed; the text is the VMM's.
    #[error("{0}")]
    NotMigrated(String),
    /// The migration has not ended in time.
    #[error("the migration takes too long ({0:?})")]
    Migrating(MigrationState),
}
