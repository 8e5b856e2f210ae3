//! Actors: threads that each own something mutable and run other threads' jobs on it.
//!
//! ```text
//! caller   Handle::call(what, deadline, |state| ..) ----> Inbox ----> job(&mut state)   the thread
//!                     at most until the deadline     <---- result of the job
//! ```
//!
//! A job is a closure, so a new request costs one call and one method of the state. A job runs to
//! its end before the next one. The caller's wait ends at the deadline. A job that the thread
//! reaches after its deadline is dropped: for the caller the request has failed, and the caller may
//! have done something else since. `begin_even_late` is for jobs that must run even then.
//!
//! When the thread ends, its inbox is dropped with all jobs that are left, and their callers get
//! [`CallError::Ended`] immediately.

use std::fmt;
use std::sync::Arc;
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender, TryRecvError};
use std::time::{Duration, Instant};

/// A job for the thread that owns an `S`.
pub type Job<S> = Box<dyn FnOnce(&mut S) + Send>;

/// Wakes the owner of an inbox after a message was put into it.
type Wake = Arc<dyn Fn() + Send + Sync>;

/// The reason why a request to another thread has no result.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum CallError {
    /// The thread has ended, and has not carried the request out.
    #[error("{thread}'s thread has ended")]
    Ended {
        /// The owner's name.
        thread: Arc<str>,
    },
    /// The thread has not answered in time.
    #[error("{thread} did not {what} within {limit:.1?}")]
    TimedOut {
        /// The owner's name.
        thread: Arc<str>,
        /// The request, as a verb and its object.
        what: &'static str,
        /// Time for which the caller has waited.
        limit: Duration,
    },
}

/// Creates an inbox, and the first handle of the thread that will own it. `name` is that thread's
/// name in errors.
pub fn inbox<S>(name: impl Into<Arc<str>>) -> (Handle<S>, Inbox<S>) {
    let (jobs, inbox) = mpsc::channel();
    (Handle { name: name.into(), jobs, wake: None }, Inbox(inbox))
}

/// The sending side of an [`Inbox`]. Any thread may have one.
pub struct Handle<S> {
    name: Arc<str>,
    /// `None` ends the thread.
    jobs: Sender<Option<Job<S>>>,
    wake: Option<Wake>,
}

impl<S> Handle<S> {
    /// Returns a handle of the same inbox that calls `wake` after each message. For a thread that
    /// does not always wait on its inbox.
    pub(crate) fn woken_by(&self, wake: impl Fn() + Send + Sync + 'static) -> Self {
        Self { wake: Some(Arc::new(wake)), ..self.clone() }
    }

    /// Returns the name of the thread in errors.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Has the thread run `job`, and returns the result. `what` describes the job in an error, as a
    /// verb and its object.
    ///
    /// # Errors
    ///
    /// The thread has ended, or has not answered by `deadline`.
    pub fn call<R: Send + 'static>(
        &self,
        what: &'static str,
        deadline: Instant,
        job: impl FnOnce(&mut S) -> R + Send + 'static,
    ) -> Result<R, CallError> {
        self.begin(what, deadline, job).wait()
    }

    /// Behaves like [`call`](Self::call), but returns immediately. The caller waits for the result
    /// later.
    pub fn begin<R: Send + 'static>(
        &self,
        what: &'static str,
        deadline: Instant,
        job: impl FnOnce(&mut S) -> R + Send + 'static,
    ) -> PendingCall<R> {
        self.send(what, deadline, false, job)
    }

    /// Behaves like [`begin`](Self::begin), but the thread runs `job` even if it reaches it after
    /// the deadline.
    pub(crate) fn begin_even_late<R: Send + 'static>(
        &self,
        what: &'static str,
        deadline: Instant,
        job: impl FnOnce(&mut S) -> R + Send + 'static,
    ) -> PendingCall<R> {
        self.send(what, deadline, true, job)
    }

    /// Sends the thread a job without waiting for its end. Returns false if the thread has ended.
    pub fn tell(&self, job: impl FnOnce(&mut S) + Send + 'static) -> bool {
        self.put(Some(Box::new(job)))
    }

    /// Ends the thread, once it has run the jobs that it was given before.
    pub fn end(&self) {
        // A thread that has ended already needs no message.
        self.put(None);
    }

    fn send<R: Send + 'static>(
        &self,
        what: &'static str,
        deadline: Instant,
        even_late: bool,
        job: impl FnOnce(&mut S) -> R + Send + 'static,
    ) -> PendingCall<R> {
        let (reply, answer) = mpsc::sync_channel(1);
        let limit = deadline.saturating_duration_since(Instant::now());
        // If the thread has ended, the job is dropped, and `answer` is closed.
        self.tell(move |state| {
            if even_late || Instant::now() < deadline {
                // The caller may have stopped waiting.
                let _ = reply.send(job(state));
            }
        });
        PendingCall { thread: self.name.clone(), what, limit, deadline, answer }
    }

    fn put(&self, job: Option<Job<S>>) -> bool {
        let sent = self.jobs.send(job).is_ok();
        if let Some(wake) = self.wake.as_ref().filter(|_| sent) {
            wake();
        }
        sent
    }
}

impl<S> Clone for Handle<S> {
    fn clone(&self) -> Self {
        Self { name: self.name.clone(), jobs: self.jobs.clone(), wake: self.wake.clone() }
    }
}

impl<S> fmt::Debug for Handle<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Handle").field(&self.name).finish()
    }
}

/// A call in progress: the caller waits for the result later.
#[must_use = "the result says whether it was done"]
pub struct PendingCall<R> {
    thread: Arc<str>,
    what: &'static str,
    limit: Duration,
    deadline: Instant,
    answer: Receiver<R>,
}

impl<R> PendingCall<R> {
    /// Waits for the result until the request's deadline.
    ///
    /// # Errors
    ///
    /// The thread has ended, or has not answered by then. If the thread is running the job at the
    /// deadline, it may still finish it, before any later job.
    pub fn wait(self) -> Result<R, CallError> {
        self.wait_for(Duration::ZERO)
    }

    /// Behaves like [`wait`](Self::wait), but waits for another `grace` after the deadline: a job
    /// that gives up at the deadline can still report why.
    ///
    /// # Errors
    ///
    /// As [`wait`](Self::wait).
    pub fn wait_for(self, grace: Duration) -> Result<R, CallError> {
        let left = (self.deadline + grace).saturating_duration_since(Instant::now());
        self.answer.recv_timeout(left).map_err(|e| match e {
            // After the deadline the thread may have dropped the job instead.
            RecvTimeoutError::Disconnected if Instant::now() < self.deadline => {
                CallError::Ended { thread: self.thread }
            }
            _ => CallError::TimedOut { thread: self.thread, what: self.what, limit: self.limit },
        })
    }
}

/// The jobs for one thread.
pub struct Inbox<S>(Receiver<Option<Job<S>>>);

/// The next message of an inbox.
pub enum Next<S> {
    /// A job, to be run immediately.
    Job(Job<S>),
    /// No job has arrived in time.
    Nothing,
    /// The thread is to end.
    End,
}

impl<S> Inbox<S> {
    /// Waits for the next job, or for the end.
    pub fn recv(&self) -> Next<S> {
        self.0.recv().ok().flatten().map_or(Next::End, Next::Job)
    }

    /// Returns the next job, if there is one, without waiting.
    pub fn try_recv(&self) -> Next<S> {
        match self.0.try_recv() {
            Ok(Some(job)) => Next::Job(job),
            Err(TryRecvError::Empty) => Next::Nothing,
            Ok(None) | Err(TryRecvError::Disconnected) => Next::End,
        }
    }

    /// Waits for the next job for at most `limit`.
    pub fn recv_timeout(&self, limit: Duration) -> Next<S> {
        match self.0.recv_timeout(limit) {
            Ok(Some(job)) => Next::Job(job),
            Err(RecvTimeoutError::Timeout) => Next::Nothing,
            Ok(None) | Err(RecvTimeoutError::Disconnected) => Next::End,
        }
    }

    /// Runs jobs on `state` until the thread is to end. For a thread that does nothing else.
    pub fn serve(self, state: &mut S) {
        while let Next::Job(job) = self.recv() {
            job(state);
        }
    }
}

impl<S> fmt::Debug for Inbox<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Inbox")
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU32, Ordering};
    use std::thread;

    use super::*;

    const SOON: Duration = Duration::from_millis(20);

    fn far() -> Instant {
        Instant::now() + Duration::from_secs(60)
    }

    #[test]
    fn jobs_run_in_order_and_the_state_stays() {
        let (handle, inbox) = inbox::<Vec<u32>>("the list");
        let thread = thread::spawn(move || {
            let mut list = Vec::new();
            inbox.serve(&mut list);
            list
        });
        assert!(handle.tell(|list| list.push(1)));
        let call = handle.begin("take a number", far(), |list| list.push(2));
        assert_eq!(handle.call("count", far(), |list| list.len()), Ok(2));
        call.wait().unwrap();
        handle.end();
        assert_eq!(thread.join().unwrap(), [1, 2]);
        assert!(!handle.tell(|list| list.push(3)));
    }

    #[test]
    fn call_to_an_ended_thread_fails_immediately() {
        let (handle, inbox) = inbox::<()>("the opener");
        let queued = handle.begin("open a file", far(), |()| ());
        drop(inbox);
        let ended = CallError::Ended { thread: "the opener".into() };
        assert_eq!(queued.wait(), Err(ended.clone()));
        assert_eq!(handle.call("open a file", far(), |()| ()), Err(ended.clone()));
        assert_eq!(ended.to_string(), "the opener's thread has ended");
        // A panic drops the remaining jobs as well.
        let (handle, inbox) = self::inbox::<()>("the opener");
        let panics = handle.begin("panic", far(), |()| panic!("of a test"));
        let queued = handle.begin("open a file", far(), |()| ());
        thread::spawn(move || inbox.serve(&mut ())).join().unwrap_err();
        assert_eq!((panics.wait(), queued.wait()), (Err(ended.clone()), Err(ended)));
    }

    #[test]
    fn no_caller_waits_past_its_deadline() {
        let (handle, inbox) = inbox::<u32>("vCPU 0");
        let began = Instant::now();
        let error = handle.call("pause", began + SOON, |_| ()).unwrap_err();
        assert!(began.elapsed() >= SOON && began.elapsed() < Duration::from_secs(30));
        let CallError::TimedOut { what: "pause", limit, .. } = error else { panic!("{error}") };
        assert!(limit <= SOON, "{limit:?}");
        let error = CallError::TimedOut { thread: "vCPU 0".into(), what: "pause", limit: SOON };
        assert_eq!(error.to_string(), "vCPU 0 did not pause within 20.0ms");
        drop(inbox);
    }

    #[test]
    fn late_job_is_dropped_unless_marked() {
        let (handle, inbox) = inbox::<Vec<&str>>("a device");
        let now = Instant::now();
        let dropped = handle.begin("release", now, |done| done.push("release"));
        let done = handle.begin_even_late("undo", now, |done| done.push("undo"));
        let mut list = Vec::new();
        handle.end();
        inbox.serve(&mut list);
        assert_eq!(list, ["undo"]);
        assert!(matches!(dropped.wait(), Err(CallError::TimedOut { what: "release", .. })));
        assert_eq!(done.wait(), Ok(()));
    }

    #[test]
    fn result_within_the_grace_counts() {
        let (handle, inbox) = inbox::<()>("a device");
        let call = handle.begin_even_late("quiesce", Instant::now(), |()| 7);
        let thread = thread::spawn(move || {
            thread::sleep(SOON);
            inbox.serve(&mut ());
        });
        assert_eq!(call.wait_for(Duration::from_secs(60)), Ok(7));
        drop(handle);
        thread.join().unwrap();
    }

    #[test]
    fn each_message_wakes_a_thread_that_is_there() {
        let (handle, inbox) = inbox::<()>("a device");
        let wakes = Arc::new(AtomicU32::new(0));
        let count = wakes.clone();
        let waking = handle.woken_by(move || _ = count.fetch_add(1, Ordering::SeqCst));
        handle.tell(|()| ());
        waking.tell(|()| ());
        waking.end();
        assert_eq!(wakes.load(Ordering::SeqCst), 2);
        assert!(matches!(inbox.try_recv(), Next::Job(_)));
        assert!(matches!(inbox.recv_timeout(SOON), Next::Job(_)));
        assert!(matches!(inbox.recv(), Next::End));
        assert!(matches!(inbox.try_recv(), Next::Nothing));
        drop(inbox);
        waking.tell(|()| ());
        assert_eq!(wakes.load(Ordering::SeqCst), 2);
    }
}
