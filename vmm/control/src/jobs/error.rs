//! Why a job cannot be started, read or ended.

use std::io;
use std::num::NonZeroU64;
use std::path::PathBuf;
use std::time::Duration;

use driftline_guest::GuestError;
use driftline_machine::sandbox::NotAllowed;
use driftline_migrate::{ControlError, RecordsError};
use driftline_store::StoreError;

/// Why a request about a job is refused.
#[derive(Debug, thiserror::Error)]
pub enum JobError {
    /// There is no job of this number.
    #[error("there is no job {0} of this kind here, or its result is no longer kept")]
    NoJob(u64),
    /// There is no watch of this number.
    #[error("there is no watch {0} here, or it has ended")]
    NoWatch(u64),
    /// No checkpoint run is under way.
    #[error("no checkpoints are being taken")]
    NoCheckpointRun,
    /// No checkpoint run has been started, or none is kept.
    #[error("no checkpoints have been taken")]
    NoCheckpoints,
    /// No migration is under way.
    #[error("no migration is under way")]
    NotMigrating,
    /// No migration has been started, or none is kept.
    #[error("no migration has been started")]
    NeverMigrated,
    /// No migration is in doubt.
    #[error("no migration is in doubt")]
    NotInDoubt,
    /// A checkpoint run is under way already.
    #[error(
        "a checkpoint run (job {job}, {}, into {}) is active",
        every_ms.map_or("one checkpoint".to_owned(), |ms| format!("every {ms} ms")),
        store.display()
    )]
    CheckpointsUnderWay {
        /// The run's number.
        job: u64,
        /// Its interval in milliseconds; `None` for a single checkpoint.
        every_ms: Option<NonZeroU64>,
        /// Its store.
        store: PathBuf,
    },
    /// A checkpoint run cannot be suspended in time.
    #[error(
        "the checkpoint in progress (job {job}) is not stored within {limit:?}; try again, or end \
         the run first"
    )]
    CheckpointTakesLong {
        /// The run's number.
        job: u64,
        /// Length of the wait.
        limit: Duration,
    },
    /// The store of a checkpoint run that has moved is not closed.
    #[error("the store of the run (job {job}) is not closed within {limit:?}")]
    StoreStaysOpen {
        /// The run's number.
        job: u64,
        /// Length of the wait.
        limit: Duration,
    },
    /// The guest's tracking is being verified.
    #[error(
        "the process verifies the guest's tracking (--shadow), which another process cannot \
         continue"
    )]
    Shadowed,
    /// An upgrade is under way.
    #[error("another upgrade is under way")]
    UpgradeUnderWay,
    /// A job is being started.
    #[error("another job is being started, and its storage does not answer")]
    StartUnderWay,
    /// A migration is under way already.
    #[error("the guest is being migrated already, to {to}")]
    MigrationUnderWay {
        /// Address of the other host.
        to: String,
    },
    /// A drive's file was exchanged. A job would track and copy the first one.
    #[error(
        "the file or size of drive \"{0}\" was exchanged since the guest's start, and checkpoints \
         and migrations track and copy the first one; take a snapshot (PUT /snapshot/create), load \
         it, and use the guest that was loaded"
    )]
    DriveExchanged(String),
    /// The guest's writes are being watched for another plan.
    #[error("the guest is being watched already, for another plan")]
    PlanUnderWay,
    /// There are as many watches as there may be.
    #[error("{0} others are watching this guest's writes already")]
    TooManyWatches(usize),
    /// A watch has as many unanswered requests as it may have.
    #[error("watch {watch} has {requests} unanswered requests already; wait for an answer")]
    TooManyRequests {
        /// The watch's number.
        watch: u64,
        /// Number of its requests.
        requests: usize,
    },
    /// The guest's state allows no plan.
    #[error("no plan can be made: the guest {0}")]
    NoPlan(&'static str),
    /// The guest has ended.
    #[error("the guest has ended")]
    Ended,
    /// Another host may have the guest.
    #[error(
        "the guest has been handed over and may be running at {to}; resolve it with `driftline \
         resolve --discard`"
    )]
    HandedOver {
        /// Address of the other host.
        to: String,
    },
    /// A new store was requested, and the directory cannot become one.
    #[error("cannot create a new store in {}: {cause}", store.display())]
    NoNewStore {
        /// The directory.
        store: PathBuf,
        /// The reason.
        #[source]
        cause: io::Error,
    },
    /// The sandbox does not allow writes to the store.
    #[error(transparent)]
    NotAllowed(#[from] NotAllowed),
    /// The store cannot be opened, or the guest cannot be checkpointed into it.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// The guest refuses.
    #[error(transparent)]
    Guest(#[from] GuestError),
    /// The migration refuses.
    #[error(transparent)]
    Migration(#[from] ControlError),
    /// The hand-over records cannot be read or written.
    #[error(transparent)]
    Records(#[from] RecordsError),
    /// A thread cannot be started.
    #[error("cannot start a thread {purpose}: {cause}")]
    Thread {
        /// The thread's purpose.
        purpose: &'static str,
        /// The system's error.
        #[source]
        cause: io::Error,
    },
}
