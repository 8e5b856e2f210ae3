//! A worker: a host thread that runs one vCPU's share of the payload's workload, and other threads'
//! jobs between two ticks.

use std::io::Write;
use std::sync::Arc;
use std::time::Duration;

use driftline_guest::GuestRam;
use driftline_images::PayloadSpec;
use driftline_images::workload::{self, Runner, WorkingSetPlacement};
use driftline_machine::actor::{Inbox, Next};
use driftline_machine::devices::SerialWriter;
use driftline_machine::vm::EndReason;
use serde::{Deserialize, Serialize};

use super::clock::GuestClock;
use super::end::GuestEnd;
use super::memory::WorkerMemory;

/// A worker's own state: its part of its `THREAD_WORKER` section.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct WorkerState {
    /// The loop's state; `None` before the worker first runs.
    pub(super) runner: Option<Runner>,
    /// Generations expected of the worker's pages, for patterns that need them.
    pub(super) table: Vec<u32>,
}

/// All inputs of a worker; they move into the thread.
pub(super) struct GuestWorker {
    pub(super) index: u32,
    pub(super) vcpus: u32,
    pub(super) spec: PayloadSpec,
    pub(super) placement: WorkingSetPlacement,
    pub(super) ram: GuestRam,
    pub(super) clock: Arc<GuestClock>,
    pub(super) serial: SerialWriter,
    pub(super) end: Arc<GuestEnd>,
}

/// The state of a worker that jobs change between two ticks.
#[derive(Default)]
pub(super) struct WorkerControl {
    pub(super) state: WorkerState,
    /// Whether the worker runs. When a job has cleared it, all of the worker's writes are marked.
    pub(super) runs: bool,
}

impl GuestWorker {
    /// Runs the thread's main loop.
    pub(super) fn run(self, inbox: &Inbox<WorkerControl>) {
        let _guard = PanicGuard { end: self.end.clone(), index: self.index };
        let mut memory = match WorkerMemory::new(&self.ram, &self.placement) {
            Ok(memory) => memory,
            Err(e) => return self.end.set(EndReason::Crashed(e.to_string())),
        };
        let mut control = WorkerControl::default();
        let mut finished = false;
        loop {
            let next = match control.runs && !finished {
                true => self.tick(&mut control, &mut memory, inbox, &mut finished),
                false => inbox.recv(),
            };
            match next {
                Next::Job(job) => job(&mut control),
                Next::Nothing => {}
                Next::End => return,
            }
        }
    }

    /// Does one tick. Returns the next job, if there is one by then. Sets `finished` if the
    /// workload is complete.
    fn tick(
        &self,
        control: &mut WorkerControl,
        memory: &mut WorkerMemory<'_>,
        inbox: &Inbox<WorkerControl>,
        finished: &mut bool,
    ) -> Next<WorkerControl> {
        let mut serial = self.serial.clone();
        let now = self.clock.now_ns();
        let WorkerState { runner, table } = &mut control.state;
        let runner =
            runner.get_or_insert_with(|| Runner::new(&self.spec, self.vcpus, self.index, now));
        if table.len() != runner.workload().table_len() {
            *table = vec![0; runner.workload().table_len()];
        }
        // A sink never fails: it drops and counts output that is not read.
        let mut print = |line: &[u8]| _ = serial.write_all(line);
        match runner.tick(now, memory, table, &mut print) {
            workload::TickOutcome::TickAgain => inbox.try_recv(),
            workload::TickOutcome::SleepUntil(wake_ns) => {
                let left = wake_ns.saturating_sub(self.clock.now_ns());
                inbox.recv_timeout(Duration::from_nanos(left))
            }
            workload::TickOutcome::Done => {
                // A thread that learns of the end finds the last line written.
                serial.drain();
                self.end.worker_done(self.vcpus);
                *finished = true;
                Next::Nothing
            }
        }
    }
}

/// Returns whether `state` can belong to worker `index`: the loop and the table size must match.
pub(super) fn fits(state: &WorkerState, spec: &PayloadSpec, vcpus: u32, index: u32) -> bool {
    let Some(runner) = &state.runner else { return state.table.is_empty() };
    runner.is_state_of(spec, vcpus, index) && state.table.len() == runner.workload().table_len()
}

/// Ends the guest if its worker panics, so that no thread waits for it for ever.
struct PanicGuard {
    end: Arc<GuestEnd>,
    index: u32,
}

impl Drop for PanicGuard {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.end.set(EndReason::Crashed(format!("worker {} panicked", self.index)));
        }
    }
}
