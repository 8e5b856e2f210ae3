//! Owns what the API serves: at first nothing, then one guest with its jobs, to its end.

use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use crate::jobs::Jobs;

type Hook = Box<dyn FnOnce() + Send>;

/// The state behind every request.
pub struct App {
    jobs: OnceLock<Arc<Jobs>>,
    /// Says why there is no guest yet, as the end of a sentence.
    waiting: Box<dyn Fn() -> String + Send + Sync>,
    /// Ends the wait for a guest.
    give_up: Mutex<Option<Hook>>,
}

impl App {
    /// Serves a guest that is already there.
    pub fn new(jobs: Arc<Jobs>) -> Arc<Self> {
        let app = Self::waiting(String::new, || ());
        app.provide(jobs);
        app
    }

    /// Will serve a guest later; until then requests are told that it is `waiting`. `give_up` is
    /// called if the wait is interrupted.
    pub fn waiting(
        waiting: impl Fn() -> String + Send + Sync + 'static,
        give_up: impl FnOnce() + Send + 'static,
    ) -> Arc<Self> {
        Arc::new(Self {
            jobs: OnceLock::new(),
            waiting: Box::new(waiting),
            give_up: Mutex::new(Some(Box::new(give_up))),
        })
    }

    /// Here is the guest. Only the first one counts.
    pub fn provide(&self, jobs: Arc<Jobs>) {
        let _ = self.jobs.set(jobs);
    }

    /// The guest and its jobs, or why there is none.
    pub fn jobs(&self) -> Result<&Arc<Jobs>, String> {
        self.jobs.get().ok_or_else(|| format!("there is no guest yet: {}", (self.waiting)()))
    }

    /// Someone wants this process to end: stops the guest, or the wait for one. Refused while another
    /// host may have the guest.
    pub fn interrupt(&self, why: &str) -> Result<(), String> {
        if let Some(jobs) = self.jobs.get() {
            return jobs.stop(why);
        }
        let hook = self.give_up.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(give_up) = hook {
            give_up();
        }
        Ok(())
    }
}
