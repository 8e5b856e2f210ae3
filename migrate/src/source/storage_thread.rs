//! The thread that reads copied disks.
//!
//! A system call on storage that does not answer cannot be interrupted. The thread that migrates,
//! which has paused the guest in the last pass, therefore makes none of these calls. It waits for
//! this thread in slices, until the limit of the phase, the limit of a call, or a stop request.
//! The thread is then abandoned with its open files, and ends once the storage answers.

use std::fs::File;
use std::io;
use std::sync::Arc;
use std::sync::mpsc::{self, Sender};
use std::thread::{Builder, JoinHandle};
use std::time::{Duration, Instant};

use driftline_guest::StoragePermit;

use super::limit::Limit;
use crate::error::{Cause, DriveFailure};
use crate::transport::stop::StopFlag;
use crate::transport::wait;

/// Duration of a call at which its storage counts as hung. If the limit of the phase is reached
/// during a shorter call, the failure is that of the limit and does not name the storage.
const HUNG: Duration = Duration::from_secs(1);

type StorageCall = Box<dyn FnOnce() + Send>;

/// Handle of the thread. Dropping it ends the thread, and waits for its end unless a call was
/// abandoned.
pub(super) struct StorageThread {
    /// `None` once this is being dropped.
    calls: Option<Sender<StorageCall>>,
    /// `None` once the thread is abandoned.
    thread: Option<JoinHandle<()>>,
    /// Upper bound on one call.
    call_limit: Duration,
    stop: Arc<StopFlag>,
}

/// What a call does, for its error.
#[derive(Clone, Copy)]
pub(super) struct DriveCall<'a> {
    /// The disk's name.
    pub(super) id: &'a str,
    /// The operation.
    pub(super) what: &'static str,
}

impl DriveCall<'_> {
    pub(super) fn failed(self, cause: impl Into<DriveFailure>) -> Cause {
        Cause::Drive { id: self.id.to_owned(), what: self.what, cause: cause.into() }
    }
}

impl StorageThread {
    /// Starts the thread.
    ///
    /// # Errors
    ///
    /// Too many earlier threads wait for storage that does not answer.
    pub(super) fn start(call_limit: Duration, stop: Arc<StopFlag>) -> Result<Self, Cause> {
        let failed = |cause| Cause::System { what: "starting a thread for disks", cause };
        let permit = StoragePermit::take().map_err(failed)?;
        let (sender, calls) = mpsc::channel::<StorageCall>();
        let serve = move || {
            let _permit = permit;
            calls.into_iter().for_each(|call| call());
        };
        let thread = Builder::new().name("migrate-read".into()).spawn(serve).map_err(failed)?;
        Ok(Self { calls: Some(sender), thread: Some(thread), call_limit, stop })
    }

    /// Runs `work` on the thread, and waits for its result.
    ///
    /// # Errors
    ///
    /// `work` fails, or it has not returned at `limit`, within the limit of a call, or when the
    /// migration is cancelled.
    pub(super) fn call<T: Send + 'static>(
        &mut self,
        call: DriveCall<'_>,
        limit: Limit,
        work: impl FnOnce() -> io::Result<T> + Send + 'static,
    ) -> Result<T, Cause> {
        let (reply, result) = mpsc::sync_channel(1);
        let begun = Instant::now();
        if let Some(calls) = &self.calls {
            // If the thread has ended, `reply` is dropped here. If the caller has given up, the
            // result is dropped.
            let _ = calls.send(Box::new(move || drop(reply.try_send(work()))));
        }
        let ended = || call.failed(DriveFailure::ThreadEnded);
        let result = wait::answer(&result, ended, || {
            self.check(call, begun.elapsed(), limit).inspect_err(|_| {
                // Detaches the thread.
                self.thread = None;
            })
        });
        result?.map_err(|cause| call.failed(cause))
    }

    /// Closes `files` on the thread: on hung storage that may hang, too.
    pub(super) fn close(&self, files: Vec<Arc<File>>) {
        if let Some(calls) = &self.calls {
            // If the thread has ended, this closes them here.
            let _ = calls.send(Box::new(move || drop(files)));
        }
    }

    /// Fails if the wait for `call`, `waited` so far, has to end.
    fn check(&self, call: DriveCall<'_>, waited: Duration, limit: Limit) -> Result<(), Cause> {
        if self.stop.is_cancelled() {
            return Err(Cause::Cancelled);
        }
        if waited >= self.call_limit {
            return Err(call.failed(DriveFailure::Unanswered { limit: self.call_limit }));
        }
        limit.check().map_err(|reached| match waited < HUNG {
            true => reached,
            false => call.failed(DriveFailure::PhaseOver { waited, limit: reached.into() }),
        })
    }
}

impl Drop for StorageThread {
    fn drop(&mut self) {
        self.calls = None;
        if let Some(thread) = self.thread.take() {
            // A panic of a call has failed that call.
            let _ = thread.join();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const CALL: DriveCall<'_> = DriveCall { id: "d", what: "reading it" };
    const LONG: Duration = Duration::from_secs(600);

    /// A thread in a call that does not return until the sender is dropped, and the call's failure.
    fn hanging(call_limit: Duration, limit: Limit, stop: Arc<StopFlag>) -> (Sender<()>, String) {
        let (answer, storage) = mpsc::channel();
        let mut thread = StorageThread::start(call_limit, stop).unwrap();
        let hang = move || {
            let _ = storage.recv();
            Ok(())
        };
        let failure = thread.call(CALL, limit, hang).unwrap_err().to_string();
        // This does not wait for the call.
        drop(thread);
        (answer, failure)
    }

    #[test]
    fn read_that_never_returns_fails_by_disk_name() {
        let short = Duration::from_millis(1);
        let (_answer, why) = hanging(short, Limit::of_pause(Instant::now(), LONG), Arc::default());
        let expected =
            "copying disk \"d\" failed: reading it: its storage has not answered for 1ms";
        assert_eq!(why, expected);
        let limit = Limit::of_pause(Instant::now(), 3 * HUNG);
        let (_answer, why) = hanging(LONG, limit, Arc::default());
        assert!(why.starts_with("copying disk \"d\" failed: reading it: its storage has"), "{why}");
        assert!(why.contains("the pause reached its limit of 3.0 s"), "{why}");
        let stop = Arc::new(StopFlag::default());
        stop.cancel().unwrap();
        let (_answer, why) = hanging(LONG, Limit::of_pause(Instant::now(), LONG), stop);
        assert_eq!(why, "cancelled");
    }

    #[test]
    fn slow_read_fails_by_the_limit() {
        let thread = StorageThread::start(LONG, Arc::default()).unwrap();
        let limit = Limit::of_pause(Instant::now(), Duration::ZERO);
        let cause = thread.check(CALL, HUNG / 2, limit);
        assert!(matches!(cause, Err(Cause::PauseTooLong { .. })), "{cause:?}");
    }

    #[test]
    fn call_returns_the_result_of_its_work() {
        let mut thread = StorageThread::start(LONG, Arc::default()).unwrap();
        let limit = Limit::of_pause(Instant::now(), LONG);
        assert_eq!(thread.call(CALL, limit, || Ok(7)).unwrap(), 7);
        let failed = thread.call(CALL, limit, || Err::<(), _>(io::ErrorKind::NotFound.into()));
        assert_eq!(
            failed.unwrap_err().to_string(),
            "copying disk \"d\" failed: reading it: entity not found"
        );
    }
}
