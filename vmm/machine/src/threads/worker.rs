//! A worker: a host thread that runs one vCPU's share of the payload's workload and obeys commands
//! between two ticks.

use std::io::Write;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, TryRecvError};
use std::time::Duration;

use driftline_guest::GuestRam;
use driftline_images::PayloadSpec;
use driftline_images::workload::{Next, Placement, Runner, Share};
use serde::{Deserialize, Serialize};

use super::clock::GuestClock;
use super::end::End;
use super::memory::WorkingSet;
use crate::devices::SinkWriter;
use crate::vm::EndReason;

/// A command to a worker. The worker exits when the channel closes.
pub(super) enum Command {
    /// Runs until the next command.
    Run,
    /// Parks. The answer confirms it, and that all of the worker's writes are marked.
    Park(Sender<()>),
    /// Returns the state of a parked worker.
    Save(Sender<WorkerState>),
    /// Loads a state, from which the next `Run` continues.
    Load(Box<WorkerState>, Sender<()>),
}

/// A worker's own state: its part of its `THREAD_WORKER` section.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct WorkerState {
    /// The loop's state; `None` before the worker first runs.
    pub(super) runner: Option<Runner>,
    /// Generations expected of the worker's pages, for patterns that need them.
    pub(super) table: Vec<u32>,
}

/// All inputs of a worker; they move into the thread.
pub(super) struct Worker {
    pub(super) index: u32,
    pub(super) vcpus: u32,
    pub(super) spec: PayloadSpec,
    pub(super) placement: Placement,
    pub(super) ram: GuestRam,
    pub(super) clock: Arc<GuestClock>,
    pub(super) serial: SinkWriter,
    pub(super) end: Arc<End>,
    pub(super) commands: Receiver<Command>,
}

/// What the loop does after a command.
enum Told {
    Run,
    Stand,
    /// The workload is complete.
    Finished,
    Exit,
}

impl Worker {
    /// Runs the thread's main loop.
    pub(super) fn run(self) {
        let _guard = PanicGuard { end: self.end.clone(), index: self.index };
        let mut memory = match WorkingSet::new(&self.ram, &self.placement) {
            Ok(memory) => memory,
            Err(e) => return self.end.set(EndReason::Crashed(e.to_string())),
        };
        let mut state = WorkerState::default();
        let mut finished = false;
        while let Ok(command) = self.commands.recv() {
            match self.obey(command, &mut state) {
                Told::Run if !finished => match self.work(&mut state, &mut memory) {
                    Told::Exit => return,
                    Told::Finished => finished = true,
                    Told::Run | Told::Stand => {}
                },
                _ => {}
            }
        }
    }

    fn obey(&self, command: Command, state: &mut WorkerState) -> Told {
        // A closed answer channel means that the caller has given up.
        match command {
            Command::Run => return Told::Run,
            Command::Park(answer) => _ = answer.send(()),
            Command::Save(answer) => _ = answer.send(state.clone()),
            Command::Load(loaded, answer) => {
                *state = *loaded;
                _ = answer.send(());
            }
        }
        Told::Stand
    }

    /// Ticks until a command parks the worker, or until the workload is complete.
    fn work(&self, state: &mut WorkerState, memory: &mut WorkingSet<'_>) -> Told {
        let mut serial = self.serial.clone();
        let now = self.clock.now_ns();
        let runner = state
            .runner
            .get_or_insert_with(|| Runner::new(&self.spec, self.vcpus, self.index, now));
        if state.table.len() != runner.workload().table_len() {
            state.table = vec![0; runner.workload().table_len()];
        }
        loop {
            let Some(runner) = &mut state.runner else { return Told::Stand };
            // A sink never fails: it drops and counts what is not read.
            let mut print = |line: &[u8]| _ = serial.write_all(line);
            let now = self.clock.now_ns();
            let next = runner.tick(now, memory, &mut state.table, &mut print);
            let command = match next {
                Next::Go => match self.commands.try_recv() {
                    Ok(command) => command,
                    Err(TryRecvError::Empty) => continue,
                    Err(TryRecvError::Disconnected) => return Told::Exit,
                },
                Next::SleepUntil(wake_ns) => {
                    let left = wake_ns.saturating_sub(self.clock.now_ns());
                    match self.commands.recv_timeout(Duration::from_nanos(left)) {
                        Ok(command) => command,
                        Err(RecvTimeoutError::Timeout) => continue,
                        Err(RecvTimeoutError::Disconnected) => return Told::Exit,
                    }
                }
                Next::Done => {
                    // A thread that learns of the end finds the last line written.
                    serial.settle();
                    self.end.worker_done(self.vcpus);
                    return Told::Finished;
                }
            };
            match self.obey(command, state) {
                Told::Run => {}
                told => return told,
            }
        }
    }
}

/// Returns whether `state` can belong to worker `index`: the share and the table size must match.
pub(super) fn fits(state: &WorkerState, spec: &PayloadSpec, vcpus: u32, index: u32) -> bool {
    let Some(runner) = &state.runner else { return state.table.is_empty() };
    let workload = runner.workload();
    workload.share() == Share::of(spec.ws_pages(), vcpus, index)
        && state.table.len() == workload.table_len()
}

/// Ends the guest if its worker panics, so that no thread waits for it for ever.
struct PanicGuard {
    end: Arc<End>,
    index: u32,
}

impl Drop for PanicGuard {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.end.set(EndReason::Crashed(format!("worker {} panicked", self.index)));
        }
    }
}
