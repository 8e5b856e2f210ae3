//! Owns what the API serves: no guest at first, then one guest with its jobs until that guest ends.

use std::io;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::sync::{Arc, OnceLock};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use driftline_machine::devices::ACQUIRE_LIMIT;
use driftline_migrate::Progress;
use parking_lot::{Condvar, Mutex, MutexGuard};
use tokio::sync::oneshot;
use tracing::Span;

use super::event::ApiEvent;
use super::process_line::{NoProcessLine, ProcessLine};
use super::relay::Relay;
use super::termination::Termination;
use crate::firecracker::{ApiCounts, InstanceName, started_instance};
use crate::jobs::{JobError, Jobs};
use crate::model::InstanceInfo;

/// Ends the wait for a guest, for the reason in its argument. Returns `false` if it is too late.
type GiveUp = Box<dyn Fn(&str) -> bool + Send + Sync>;

/// Limit for storing the decision that the guest runs here, and for resuming the guest.
const DECISION_LIMIT: Duration = Duration::from_secs(5);
/// Upper bound on taking over a guest after its source has handed it over. The steps are: the disk
/// copies are handed to the devices, the devices open their files in parallel, and the decision is
/// stored and the guest resumed. A step that exceeds its limit fails. Devices that cannot open
/// their files release them immediately, because nothing that must be made durable was written to
/// them here. If resuming fails, the devices also flush; the sum does not include that time. The
/// sum is less than the 30 s for which a client waits by default.
const TAKE_OVER_LIMIT: Duration =
    ACQUIRE_LIMIT.saturating_add(driftline_migrate::YIELD_LIMIT).saturating_add(DECISION_LIMIT);
/// Interval between attempts to end the wait for a guest while the attempts are refused.
const RETRY_INTERVAL: Duration = Duration::from_millis(100);

/// Why a request about the process's guest is refused.
#[derive(Debug, thiserror::Error)]
pub(crate) enum AppError {
    /// There is no guest yet. The text says why.
    #[error("there is no guest yet: {0}")]
    NoGuest(String),
    /// The guest has been handed over to this process, which is taking it over.
    #[error(
        "the source has handed the guest over to this process, which has not taken it over in \
         time: stop it again"
    )]
    TakingOver,
    /// The guest's jobs refuse.
    #[error(transparent)]
    Job(#[from] JobError),
    /// No thread can be started for the request.
    #[error("cannot start a thread that stops the guest: {0}")]
    Thread(io::Error),
    /// The request's thread has panicked.
    #[error("the thread that stops the guest has panicked")]
    Panicked,
}

/// The state behind every request.
pub struct App {
    jobs: OnceLock<Arc<Jobs>>,
    /// Whether the process ends, so that no guest arrives any more.
    is_over: Mutex<bool>,
    /// Notified when `is_over` or `jobs` is set.
    changed: Condvar,
    /// Threads that stop the guest or end the wait for one.
    stops: Mutex<Vec<StopThread>>,
    source: GuestSource,
    /// Ends the wait for a guest.
    give_up: GiveUp,
    termination: Termination,
    /// Counts of Firecracker's requests.
    api_counts: Arc<ApiCounts>,
    relay: Relay,
    /// The command line with which another process can continue with the guest, or why none can.
    process_line: OnceLock<Result<ProcessLine, NoProcessLine>>,
}

/// Where the guest comes from.
enum GuestSource {
    /// It began here.
    Here,
    /// It arrives, or has arrived, from another host. Returns its progress.
    OtherHost(Box<dyn Fn() -> Arriving + Send + Sync>),
    /// It is configured over the API.
    Api {
        /// Receives what the API asks of the thread that configures the guest.
        events: mpsc::Sender<ApiEvent>,
        /// The largest body of a request, in bytes.
        payload_limit: usize,
        /// The id and the program name that `GET /` shows.
        name: InstanceName,
    },
}

/// Why there is no guest in a process that is configured over the API.
const NOT_STARTED: &str = "it has not been started";

/// A thread of [`App::interrupt_aside`].
struct StopThread {
    thread: JoinHandle<()>,
    /// Disconnected once the thread no longer holds a reference to the [`App`].
    ended: mpsc::Receiver<()>,
}

/// The state of a guest that has not arrived yet.
#[derive(Clone, Debug, Default)]
pub struct Arriving {
    /// The reason why there is no guest yet, phrased as the end of a sentence.
    pub reason: String,
    /// What has been received so far.
    pub progress: Progress,
}

impl App {
    /// Creates an app that serves an existing guest.
    pub fn new(jobs: Arc<Jobs>) -> Arc<Self> {
        let app = Self::build(GuestSource::Here, Box::new(|_: &str| true));
        app.provide(jobs);
        app
    }

    /// Creates an app that serves a guest later. Until then, requests receive the state that
    /// `arriving` returns. `give_up` is called with the reason when the wait is to end; it returns
    /// `false` once this host owns the guest.
    pub fn waiting(
        arriving: impl Fn() -> Arriving + Send + Sync + 'static,
        give_up: impl Fn(&str) -> bool + Send + Sync + 'static,
    ) -> Arc<Self> {
        Self::build(GuestSource::OtherHost(Box::new(arriving)), Box::new(give_up))
    }

    /// Creates an app for a guest that is configured over the API, by requests with bodies of at
    /// most `payload_limit` bytes. The caller takes the events and answers the requests among them.
    pub fn configuring(
        name: InstanceName,
        payload_limit: usize,
    ) -> (Arc<Self>, mpsc::Receiver<ApiEvent>) {
        let (events, received) = mpsc::channel();
        let stops = events.clone();
        // If nothing receives events any more, the process is ending already.
        let give_up = move |why: &str| {
            let _ = stops.send(ApiEvent::Stop(why.to_owned()));
            true
        };
        let source = GuestSource::Api { events, payload_limit, name };
        (Self::build(source, Box::new(give_up)), received)
    }

    fn build(source: GuestSource, give_up: GiveUp) -> Arc<Self> {
        Arc::new(Self {
            jobs: OnceLock::new(),
            is_over: Mutex::default(),
            changed: Condvar::new(),
            stops: Mutex::default(),
            source,
            give_up,
            termination: Termination::default(),
            api_counts: Arc::default(),
            relay: Relay::default(),
            process_line: OnceLock::new(),
        })
    }

    /// Provides the guest to serve. Only the first call has an effect.
    pub fn provide(&self, jobs: Arc<Jobs>) {
        let is_over = self.lock();
        let _ = self.jobs.set(jobs);
        drop(is_over);
        self.changed.notify_all();
    }

    /// Returns the signal that asks the process to end.
    pub fn termination(&self) -> &Termination {
        &self.termination
    }

    /// Returns the counts of Firecracker's requests.
    pub fn api_counts(&self) -> &Arc<ApiCounts> {
        &self.api_counts
    }

    /// Returns what holds the API's requests, and moves its connections to another process.
    pub fn relay(&self) -> &Relay {
        &self.relay
    }

    /// Sets the command line with which another process can continue with the guest, or the reason
    /// why none can. Only the first call has an effect.
    pub fn set_process_line(&self, line: Result<ProcessLine, NoProcessLine>) {
        let _ = self.process_line.set(line);
    }

    /// Returns the command line that was set.
    ///
    /// # Errors
    ///
    /// The reason why no other process can continue with the guest.
    pub(super) fn process_line(&self) -> Result<ProcessLine, NoProcessLine> {
        self.process_line.get().cloned().unwrap_or(Err(NoProcessLine::ConfiguredOverApi))
    }

    /// Marks the process as ending: a guest that has not arrived yet will not arrive.
    pub(super) fn close(&self) {
        *self.lock() = true;
        self.changed.notify_all();
    }

    fn lock(&self) -> MutexGuard<'_, bool> {
        self.is_over.lock()
    }

    /// Returns the guest and its jobs.
    ///
    /// # Errors
    ///
    /// The reason why there is no guest yet.
    pub(crate) fn jobs(&self) -> Result<&Arc<Jobs>, AppError> {
        self.jobs.get().ok_or_else(|| {
            AppError::NoGuest(match &self.source {
                GuestSource::Here => String::new(),
                GuestSource::OtherHost(arriving) => arriving().reason,
                GuestSource::Api { .. } => NOT_STARTED.to_owned(),
            })
        })
    }

    /// Returns the guest's logging span, or the empty span while there is no guest.
    pub(super) fn span(&self) -> Span {
        self.jobs.get().map_or_else(Span::none, |jobs| jobs.span().clone())
    }

    /// Returns the progress of the guest's arrival, or `None` if the guest is here or does not come
    /// from another host.
    pub(crate) fn arriving(&self) -> Option<Progress> {
        self.received().filter(|_| self.jobs.get().is_none())
    }

    /// Returns the largest body of a request that configures the guest, in bytes, or `None` if the
    /// guest is not configured over the API.
    pub(super) fn payload_limit(&self) -> Option<usize> {
        match &self.source {
            GuestSource::Here | GuestSource::OtherHost(_) => None,
            GuestSource::Api { payload_limit, .. } => Some(*payload_limit),
        }
    }

    /// Sends an event to the thread that configures the guest. Returns whether there is one.
    pub(super) fn configure(&self, event: ApiEvent) -> bool {
        match &self.source {
            GuestSource::Here | GuestSource::OtherHost(_) => false,
            GuestSource::Api { events, .. } => events.send(event).is_ok(),
        }
    }

    /// Returns the guest that was configured over the API, as `GET /` shows it, once it is here.
    pub(super) fn started_instance(&self) -> Option<InstanceInfo> {
        match &self.source {
            GuestSource::Here | GuestSource::OtherHost(_) => None,
            GuestSource::Api { name, .. } => {
                self.jobs.get().map(|jobs| started_instance(name, jobs))
            }
        }
    }

    /// Returns the progress of the guest that arrives, or has arrived, from another host.
    pub(super) fn received(&self) -> Option<Progress> {
        match &self.source {
            GuestSource::OtherHost(arriving) => Some(arriving().progress),
            GuestSource::Here | GuestSource::Api { .. } => None,
        }
    }

    /// Stops the guest, or ends the wait for one. A guest that was just handed over to this process
    /// is stopped as soon as it has been taken over. Blocks.
    ///
    /// # Errors
    ///
    /// The reason why the guest cannot be stopped: for example, another host may own it.
    pub(crate) fn interrupt(&self, why: &str) -> Result<(), AppError> {
        let until = Instant::now() + TAKE_OVER_LIMIT;
        loop {
            if let Some(jobs) = self.jobs.get() {
                return Ok(jobs.span().in_scope(|| jobs.stop(why))?);
            }
            // `give_up` no longer refuses once the take-over has failed.
            if (self.give_up)(why) {
                return Ok(());
            }
            let waits = |is_over: &mut bool| !*is_over && self.jobs.get().is_none();
            let mut state = self.lock();
            self.changed.wait_while_for(&mut state, waits, RETRY_INTERVAL);
            let is_over = *state;
            drop(state);
            match self.jobs.get() {
                Some(_) => {}
                // The guest could not be taken over. The process reports the reason.
                None if is_over => return Ok(()),
                None if Instant::now() >= until => return Err(AppError::TakingOver),
                None => {}
            }
        }
    }

    /// Runs [`interrupt`](Self::interrupt) on a new thread, which starts immediately. The runtime's
    /// blocking threads cannot be used: all of them may be waiting for storage.
    pub(super) async fn interrupt_aside(
        self: Arc<Self>,
        why: &'static str,
    ) -> Result<(), AppError> {
        let (answer, answered) = oneshot::channel();
        let (end, ended) = mpsc::channel::<()>();
        let app = self.clone();
        let interrupt = move || {
            // The client that sent the request may have disconnected.
            let _ = answer.send(app.interrupt(why));
            drop(app);
            drop(end);
        };
        self.start_stop(interrupt, ended)?;
        drop(self);
        answered.await.unwrap_or(Err(AppError::Panicked))
    }

    /// Starts and records a thread for [`join_stops`](Self::join_stops). The record is locked
    /// before the thread starts, so a thread that has ended the guest is always in it.
    fn start_stop(
        &self,
        interrupt: impl FnOnce() + Send + 'static,
        ended: mpsc::Receiver<()>,
    ) -> Result<(), AppError> {
        let mut stops = self.stops.lock();
        stops.retain(|stop| !stop.thread.is_finished());
        let thread = thread::Builder::new().name("stop".to_owned()).spawn(interrupt);
        stops.push(StopThread { thread: thread.map_err(AppError::Thread)?, ended });
        Ok(())
    }

    /// Joins the threads of [`interrupt_aside`](Self::interrupt_aside), each of which may hold a
    /// reference to the guest. Threads that have not ended within `limit` are not joined.
    pub(super) fn join_stops(&self, limit: Duration) {
        let until = Instant::now() + limit;
        let stops = std::mem::take(&mut *self.stops.lock());
        for StopThread { thread, ended } in stops {
            let left = until.saturating_duration_since(Instant::now());
            match ended.recv_timeout(left) {
                Err(RecvTimeoutError::Timeout) => {
                    tracing::warn!("a request to stop is still under way: ending without it");
                }
                // If the thread has panicked, its client has received an error.
                _ => _ = thread.join(),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicU32;
    use std::sync::atomic::Ordering::SeqCst;

    use driftline_guest::VmId;

    use super::*;
    use driftline_machine::config::{BackendKind, HostConfig, SerialSink};
    use driftline_machine::testing::payload_config;
    use driftline_machine::vm::EndReason;

    #[test]
    fn stop_is_accepted_after_a_failed_take_over() {
        let refusals = AtomicU32::new(3);
        let app = App::waiting(Arriving::default, move |_| {
            let left = refusals.fetch_update(SeqCst, SeqCst, |left| left.checked_sub(1));
            left.is_err()
        });
        app.interrupt("requested by the test").unwrap();
    }

    #[test]
    fn handed_over_guest_is_stopped_when_it_arrives() {
        let config = payload_config(BackendKind::Threads);
        let host = HostConfig { serial: SerialSink::Null, ..Default::default() };
        let vm = driftline_backends::launch_as(VmId::random(), config, &host).unwrap();
        let app = App::waiting(Arriving::default, |_| false);
        std::thread::scope(|scope| {
            let stopping = scope.spawn(|| app.interrupt("requested by the test"));
            let dir = tempfile::tempdir().unwrap();
            // Either thread may be first.
            std::thread::yield_now();
            app.provide(Jobs::new(vm.clone(), dir.path().to_owned()));
            stopping.join().unwrap().unwrap();
        });
        assert_eq!(vm.wait_end(None), Some(EndReason::Stopped("requested by the test".to_owned())));
    }
}
