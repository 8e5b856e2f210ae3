//! Owns what the API serves: at first nothing, then one guest with its jobs, to its end.

use std::io;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread;
use std::time::Duration;

use migrate::Progress;
use tokio::sync::oneshot;
use tracing::Span;

use crate::devices::ACQUIRE_LIMIT;
use crate::jobs::Jobs;

/// Takes the reason.
type Hook = Box<dyn Fn(&str) -> Result<(), String> + Send + Sync>;

/// Upper bound on taking over a guest once its source has handed it over: all devices together take
/// their files in [`ACQUIRE_LIMIT`], after copies of disks have been given up to them, which takes
/// up to 8 s (`ReceiveOptions::disk_limit`). The guest ends where one of the two takes longer.
const TAKE_OVER_LIMIT: Duration = ACQUIRE_LIMIT.saturating_add(Duration::from_secs(9));

/// The state behind every request.
pub struct App {
    jobs: OnceLock<Arc<Jobs>>,
    /// No guest comes any more: the process ends. Whoever waits for `jobs` waits with this.
    is_over: Mutex<bool>,
    changed: Condvar,
    /// How far a guest is that comes from another host.
    arriving: Box<dyn Fn() -> Arriving + Send + Sync>,
    /// Ends the wait for a guest.
    give_up: Hook,
}

/// Where a guest that is not here yet stands.
#[derive(Clone, Debug, Default)]
pub struct Arriving {
    /// Why there is none, as the end of a sentence.
    pub words: String,
    /// What has come of it.
    pub progress: Progress,
}

impl App {
    /// Serves a guest that is already there.
    pub fn new(jobs: Arc<Jobs>) -> Arc<Self> {
        let app = Self::waiting(Arriving::default, |_| Ok(()));
        app.provide(jobs);
        app
    }

    /// Will serve a guest later; until then requests are told how it is `arriving`. `give_up` is
    /// called with the reason when the wait is to end; it refuses once the guest is this host's.
    pub fn waiting(
        arriving: impl Fn() -> Arriving + Send + Sync + 'static,
        give_up: impl Fn(&str) -> Result<(), String> + Send + Sync + 'static,
    ) -> Arc<Self> {
        Arc::new(Self {
            jobs: OnceLock::new(),
            is_over: Mutex::default(),
            changed: Condvar::new(),
            arriving: Box::new(arriving),
            give_up: Box::new(give_up),
        })
    }

    /// Here is the guest. Only the first one counts.
    pub fn provide(&self, jobs: Arc<Jobs>) {
        let is_over = self.lock();
        let _ = self.jobs.set(jobs);
        drop(is_over);
        self.changed.notify_all();
    }

    /// The process ends: a guest that is not here yet does not come.
    pub(super) fn close(&self) {
        *self.lock() = true;
        self.changed.notify_all();
    }

    fn lock(&self) -> MutexGuard<'_, bool> {
        self.is_over.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The guest and its jobs, or why there is none.
    pub fn jobs(&self) -> Result<&Arc<Jobs>, String> {
        self.jobs.get().ok_or_else(|| format!("there is no guest yet: {}", (self.arriving)().words))
    }

    /// The span of what is logged for the guest; none while there is none.
    pub(super) fn span(&self) -> Span {
        self.jobs.get().map_or_else(Span::none, |jobs| jobs.span().clone())
    }

    /// How far the guest is, while there is none.
    pub fn arriving(&self) -> Option<Progress> {
        self.jobs.get().is_none().then(|| (self.arriving)().progress)
    }

    /// Someone wants this process to end: stops the guest, or the wait for one. Refused while
    /// another host may have the guest. A guest that was just handed over to this process is
    /// stopped as soon as it has been taken over. Blocks.
    pub fn interrupt(&self, why: &str) -> Result<(), String> {
        if let Some(jobs) = self.jobs.get() {
            return jobs.span().in_scope(|| jobs.stop(why));
        }
        let Err(too_late) = (self.give_up)(why) else { return Ok(()) };
        let waits = |is_over: &mut bool| !*is_over && self.jobs.get().is_none();
        let waited = self.changed.wait_timeout_while(self.lock(), TAKE_OVER_LIMIT, waits);
        let is_over = *waited.unwrap_or_else(PoisonError::into_inner).0;
        match self.jobs.get() {
            Some(jobs) => jobs.span().in_scope(|| jobs.stop(why)),
            // It could not be taken over, and the process says why.
            None if is_over => Ok(()),
            None => Err(too_late),
        }
    }

    /// As [`interrupt`](Self::interrupt), on a thread of its own, which starts at once: those of
    /// the runtime may all wait for storage.
    pub(super) async fn interrupt_aside(self: Arc<Self>, why: &'static str) -> Result<(), String> {
        let (answer, answered) = oneshot::channel();
        let interrupt = move || {
            // A client that asked for it may have left.
            let _ = answer.send(self.interrupt(why));
        };
        let failed = |e: io::Error| format!("a thread that ends it cannot be started: {e}");
        thread::Builder::new().name("stop".to_owned()).spawn(interrupt).map_err(failed)?;
        answered.await.unwrap_or_else(|_| Err("the thread that ends it has panicked".to_owned()))
    }
}

#[cfg(test)]
mod tests {
    use checkpoint::VmId;

    use super::*;
    use crate::config::{Backend, HostConfig, SerialSink};
    use crate::testing::payload_config;
    use crate::vm::EndReason;

    #[test]
    fn handed_over_guest_is_stopped_when_it_arrives() {
        let config = payload_config(Backend::Threads);
        let host = HostConfig { serial: SerialSink::Null, ..Default::default() };
        let vm = crate::backend::launch_as(VmId::random(), config, &host).unwrap();
        let app = App::waiting(Arriving::default, |_| Err("it is too late".to_owned()));
        std::thread::scope(|scope| {
            let stopping = scope.spawn(|| app.interrupt("the test says so"));
            let dir = tempfile::tempdir().unwrap();
            // Whichever is first.
            std::thread::yield_now();
            app.provide(Jobs::new(vm.clone(), dir.path().to_owned()));
            assert_eq!(stopping.join().unwrap(), Ok(()));
        });
        assert_eq!(vm.wait_end(None), Some(EndReason::Stopped("the test says so".to_owned())));
    }
}
