//! The commit thread: makes epochs durable while the next ones are taken.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use driftline_store::{Bounds, CommittedEpoch, Committer, PageFile, StoreError, WrittenEpoch};

use crate::report::EpochFailure;

/// A request to the commit thread.
enum CommitRequest {
    /// Check whether the store's files are still those that it has open.
    Check,
    /// Commit an epoch that is written, and answer.
    Commit(Box<WrittenEpoch>, Bounds, Sender<CommitAnswer>),
}

/// The outcome of an epoch.
#[derive(Debug)]
pub(crate) struct CommitAnswer {
    pub(crate) result: Result<CommittedEpoch, EpochFailure>,
    /// Time at which the outcome was known.
    pub(crate) at: Instant,
    /// Whether a sync failed, so that what was written counts as lost.
    pub(crate) lost: bool,
    /// The latest durable epoch.
    pub(crate) last: Option<u64>,
    /// Whether the commit thread has ended unexpectedly.
    pub(crate) thread_ended: bool,
}

impl CommitAnswer {
    /// Returns the outcome of an epoch whose commit thread has ended.
    fn thread_ended() -> Self {
        let (result, at) = (Err(thread_ended()), Instant::now());
        Self { result, at, lost: true, last: None, thread_ended: true }
    }
}

/// A [`Committer`] on its own thread. Drop waits, without a limit, until every epoch handed over is
/// durable or has failed.
#[derive(Debug)]
pub(crate) struct CommitThread {
    requests: Option<Sender<CommitRequest>>,
    checks: Receiver<Result<(), StoreError>>,
    thread: Option<JoinHandle<()>>,
    pages: Arc<PageFile>,
    /// The latest durable epoch at the start of the thread.
    last: Option<u64>,
    /// Whether the thread is rewriting the log, which may take long.
    rotating: Arc<AtomicBool>,
}

impl CommitThread {
    /// Starts the thread.
    pub(crate) fn start(mut committer: Committer) -> Result<Self, StoreError> {
        let (pages, last) = (committer.pages().clone(), committer.last());
        let (requests, requested) = mpsc::channel();
        let (to_checks, checks) = mpsc::channel();
        let rotating = Arc::new(AtomicBool::new(false));
        let busy = rotating.clone();
        let work = move || {
            // If the receiver was dropped, the result is not needed.
            for request in requested {
                match request {
                    CommitRequest::Check => drop(to_checks.send(committer.check())),
                    CommitRequest::Commit(written, bounds, answer) => {
                        committer.set_bounds(bounds);
                        let result = committer.commit(*written).map_err(EpochFailure::from);
                        let (at, lost, last) =
                            (Instant::now(), committer.has_lost(), committer.last());
                        // Set before the caller receives the answer and sends its next request.
                        let rotates = committer.needs_rotation();
                        busy.store(rotates, Ordering::SeqCst);
                        drop(answer.send(CommitAnswer {
                            result,
                            at,
                            lost,
                            last,
                            thread_ended: false,
                        }));
                        if rotates {
                            committer.rotate_log();
                            busy.store(false, Ordering::SeqCst);
                        }
                    }
                }
            }
        };
        let thread = thread::Builder::new().name("store-commit".into());
        // The thread logs in the span of the same guest.
        let span = tracing::Span::current();
        let thread = thread.spawn(move || span.in_scope(work));
        let failed = |cause| StoreError::Io {
            what: "starting a thread that commits to",
            path: pages.path().to_owned(),
            cause,
        };
        let thread = Some(thread.map_err(failed)?);
        Ok(Self { requests: Some(requests), checks, thread, pages, last, rotating })
    }

    /// Returns the page file, for writers of epochs.
    pub(crate) fn pages(&self) -> &Arc<PageFile> {
        &self.pages
    }

    /// Returns the latest epoch that was durable when the thread started.
    pub(crate) fn last(&self) -> Option<u64> {
        self.last
    }

    /// Checks that the store's files are still the open ones. Waits for everything handed over
    /// before, but not while the log is rewritten: the committer also checks this before it appends
    /// an epoch.
    pub(crate) fn check(&self) -> Result<(), EpochFailure> {
        if self.rotating.load(Ordering::SeqCst) {
            return Ok(());
        }
        self.ask(CommitRequest::Check);
        Ok(self.checks.recv().map_err(|_| thread_ended())??)
    }

    /// Hands an epoch over. Epochs are committed in this order.
    pub(crate) fn commit(&self, written: WrittenEpoch, bounds: Bounds) -> PendingCommit {
        let (to_answer, answer) = mpsc::channel();
        self.ask(CommitRequest::Commit(Box::new(written), bounds, to_answer));
        PendingCommit { answer }
    }

    fn ask(&self, request: CommitRequest) {
        if let Some(requests) = &self.requests {
            // If the thread has ended, the caller notices when it waits for the answer.
            let _ = requests.send(request);
        }
    }
}

/// An epoch that was handed over.
#[derive(Debug)]
pub(crate) struct PendingCommit {
    answer: Receiver<CommitAnswer>,
}

impl PendingCommit {
    /// Returns the outcome as soon as it is known.
    pub(crate) fn recv(&self) -> CommitAnswer {
        self.answer.recv().unwrap_or_else(|_| CommitAnswer::thread_ended())
    }

    /// Returns the outcome, or `None` if it is not known after `limit`.
    pub(crate) fn recv_timeout(&self, limit: Duration) -> Option<CommitAnswer> {
        match self.answer.recv_timeout(limit) {
            Ok(answer) => Some(answer),
            Err(RecvTimeoutError::Timeout) => None,
            Err(RecvTimeoutError::Disconnected) => Some(CommitAnswer::thread_ended()),
        }
    }
}

fn thread_ended() -> EpochFailure {
    EpochFailure::ThreadEnded { thread: "commit" }
}

impl Drop for CommitThread {
    fn drop(&mut self) {
        drop(self.requests.take());
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            tracing::error!("the commit thread has panicked");
        }
    }
}
