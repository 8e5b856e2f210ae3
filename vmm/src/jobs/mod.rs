//! What is done to a guest over time, beside running it. One object owns each run of checkpoints and
//! each migration, with its thread; a run of checkpoints and a migration may be under way together.

mod checkpoints;
mod holds;

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crate::api::model::{CheckpointPage, CheckpointRequest, GuestState, Info};
use crate::vm::SharedVm;
use checkpoints::CheckpointJob;
use holds::Holds;
pub use holds::OperatorError;

/// How long a process whose guest has ended waits for the readers of its jobs' last reports.
const LAST_READ: Duration = Duration::from_secs(2);

/// A guest and the jobs on it.
pub struct Jobs {
    vm: SharedVm,
    holds: Arc<Holds>,
    checkpoint: Mutex<Option<Arc<CheckpointJob>>>,
}

impl Jobs {
    /// No jobs yet.
    pub fn new(vm: SharedVm) -> Arc<Self> {
        let holds = Holds::new(vm.clone());
        Arc::new(Self { vm, holds, checkpoint: Mutex::default() })
    }

    /// The guest.
    pub fn vm(&self) -> &SharedVm {
        &self.vm
    }

    /// The guest's figures, with what its jobs make of its state.
    pub fn info(&self) -> Info {
        let state = GuestState::from(self.holds.operator_state());
        let checkpointing = self.checkpoint_job().is_some_and(|job| !job.is_over());
        Info::new(self.vm.info(), state, checkpointing)
    }

    /// The operator stops the vCPUs.
    pub fn pause(&self) -> Result<(), OperatorError> {
        self.holds.operator_pause()
    }

    /// The operator lets the vCPUs run.
    pub fn resume(&self) -> Result<(), OperatorError> {
        self.holds.operator_resume()
    }

    /// Begins a run of checkpoints; there is one at a time.
    pub fn start_checkpoints(&self, request: &CheckpointRequest) -> Result<(), String> {
        let mut place = lock(&self.checkpoint);
        if place.as_ref().is_some_and(|job| !job.is_over()) {
            return Err("checkpoints are being taken already; stop them first".to_owned());
        }
        *place = Some(CheckpointJob::start(&self.holds, request)?);
        Ok(())
    }

    /// Ends the run of checkpoints after the epoch under way.
    pub fn stop_checkpoints(&self) -> Result<(), String> {
        let job = self.checkpoint_job().filter(|job| !job.is_over());
        job.ok_or("no checkpoints are being taken")?.cancel();
        Ok(())
    }

    /// The latest run's reports from number `since` on: at once if there are any, else when there is
    /// one, the run is over, or `wait` has passed.
    pub async fn checkpoints(&self, since: u64, wait: Duration) -> Result<CheckpointPage, String> {
        let job = self.checkpoint_job().ok_or("no checkpoints have been taken")?;
        // Either way the page says what there is.
        let _ = tokio::time::timeout(wait, job.news_since(since)).await;
        Ok(job.page(since))
    }

    /// The guest has ended: waits a moment until the jobs are over and who asked for them knows it.
    pub fn settle(&self) {
        let end = Instant::now() + LAST_READ;
        if let Some(job) = self.checkpoint_job() {
            job.guest_ended();
            while !(job.is_over() && job.end_was_read()) && Instant::now() < end {
                std::thread::sleep(Duration::from_millis(5));
            }
        }
    }

    fn checkpoint_job(&self) -> Option<Arc<CheckpointJob>> {
        lock(&self.checkpoint).clone()
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
