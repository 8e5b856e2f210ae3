//! Owns what the API serves: at first nothing, then one guest with its jobs, to its end.

use std::sync::{Arc, OnceLock};

use migrate::Progress;

use crate::jobs::Jobs;

type Hook = Box<dyn Fn() -> Result<(), String> + Send + Sync>;

/// The state behind every request.
pub struct App {
    jobs: OnceLock<Arc<Jobs>>,
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
        let app = Self::waiting(Arriving::default, || Ok(()));
        app.provide(jobs);
        app
    }

    /// Will serve a guest later; until then requests are told how it is `arriving`. `give_up` is
    /// called when the wait is to end; it refuses once the guest is this host's.
    pub fn waiting(
        arriving: impl Fn() -> Arriving + Send + Sync + 'static,
        give_up: impl Fn() -> Result<(), String> + Send + Sync + 'static,
    ) -> Arc<Self> {
        Arc::new(Self {
            jobs: OnceLock::new(),
            arriving: Box::new(arriving),
            give_up: Box::new(give_up),
        })
    }

    /// Here is the guest. Only the first one counts.
    pub fn provide(&self, jobs: Arc<Jobs>) {
        let _ = self.jobs.set(jobs);
    }

    /// The guest and its jobs, or why there is none.
    pub fn jobs(&self) -> Result<&Arc<Jobs>, String> {
        self.jobs.get().ok_or_else(|| format!("there is no guest yet: {}", (self.arriving)().words))
    }

    /// How far the guest is, while there is none.
    pub fn arriving(&self) -> Option<Progress> {
        self.jobs.get().is_none().then(|| (self.arriving)().progress)
    }

    /// Someone wants this process to end: stops the guest, or the wait for one. Refused while another
    /// host may have the guest.
    pub fn interrupt(&self, why: &str) -> Result<(), String> {
        if let Some(jobs) = self.jobs.get() {
            return jobs.stop(why);
        }
        (self.give_up)()
    }
}
