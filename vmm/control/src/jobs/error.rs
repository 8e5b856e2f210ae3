//! Why a job cannot be started, read or ended.

use std::io;
use std::path::PathBuf;

use driftline_guest::GuestError;
use driftline_machine::sandbox::NotAllowed;
use driftline_migrate::{ControlError, RecordsError};
use driftline_store::StoreError;

/// Why a request about a job is refused.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum JobError {
    /// There is no job of this number.
    #[error("there is no job {0} of this kind here, or its result is no longer kept")]
    NoJob(u64),
    /// There is no watch of this number.
    #[error("there is no watch {0} here, or it has ended")]
    NoWatch(u64),
    /// No job of this kind has been started, or none is under way. This is a sentence.
    #[error("{0}")]
    Nothing(&'static str),
    /// A job of this kind is under way already. This is a sentence about it.
    #[error("{0}")]
    UnderWay(String),
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
    #[error("there can be no new store in {}: {cause}", store.display())]
    NoNewStore {
        /// The directory.
        store: PathBuf,
        /// The reason.
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
        cause: io::Error,
    },
}
