//! The supervisor: the one thread that decides whether a machine runs. It owns the vCPU threads,
//! obeys one request at a time, and is told by a vCPU when the guest ends.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use driftline_guest::{Clock, GuestError, RunState, SavedState};

use super::MachineError;
use super::state::{self, SavedMachine};
use super::vcpus::{HALT_LIMIT, VcpuHandle, Vcpus};
use crate::boot;
use crate::collector;
use crate::devices::Bus;
use crate::kvm::KvmVm;
use crate::sandbox::{self, Class};
use crate::vcpu::{Adjust, Command, Peers, SavedVcpu, StateContext, Stood, Wave, wall_ns};
use crate::vm::EndReason;

/// How long vCPUs have to take over a state. KVM touches pages that vCPUs share with the guest, and
/// those of a lazy restore come from storage.
const RESTORE_LIMIT: Duration = Duration::from_secs(if cfg!(test) { 5 } else { 30 });

/// What the supervisor is told.
pub(super) enum Request {
    Pause(Sender<Result<RunState, GuestError>>),
    Resume(Sender<Result<(), GuestError>>),
    Save(Sender<SavedState>),
    PauseAndSave(Sender<Result<(RunState, SavedState), GuestError>>),
    Restore(Box<SavedMachine>, Clock, Sender<Result<(), GuestError>>),
    Release(Sender<Result<(), GuestError>>),
    Detach(Sender<Result<Vec<u8>, GuestError>>),
    Attach(Vec<u8>, Sender<Result<(), GuestError>>),
    Acquire(Sender<Result<(), GuestError>>),
    Stop(String, Sender<Result<(), GuestError>>),
    /// From a vCPU: the guest has ended.
    Ended(EndReason),
    /// The machine is dropped.
    Quit,
}

/// Whether the machine runs, and may run. The supervisor writes it; anyone reads it, and lets go of
/// a guest without devices.
#[derive(Debug)]
pub(super) struct Status {
    now: Mutex<Now>,
    changed: Condvar,
    /// The vCPUs are taking over a state.
    takes_state: AtomicBool,
    /// Why a page of memory cannot be had: the guest ends, or never runs.
    lost: OnceLock<String>,
}

#[derive(Debug)]
struct Now {
    state: RunState,
    end: Option<EndReason>,
    /// The machine has what only one host may hold: of a guest without devices, the right to run
    /// alone. Looked at in one step with what it allows, so that a guest that was let go of does
    /// not run (I7).
    holds: bool,
}

impl Status {
    /// Paused.
    pub(super) fn new(holds: bool) -> Self {
        let now = Now { state: RunState::Paused, end: None, holds };
        Self {
            now: Mutex::new(now),
            changed: Condvar::new(),
            takes_state: AtomicBool::new(false),
            lost: OnceLock::new(),
        }
    }

    pub(super) fn takes_state(&self) -> bool {
        self.takes_state.load(Ordering::SeqCst)
    }

    pub(super) fn lose(&self, why: &str) {
        let _ = self.lost.set(why.to_owned());
    }

    fn lock(&self) -> MutexGuard<'_, Now> {
        self.now.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn state(&self) -> RunState {
        self.lock().state
    }

    fn set(&self, state: RunState) {
        self.lock().state = state;
    }

    /// From now on the machine has what only one host may hold, or has not; refuses `request`
    /// unless the guest is paused.
    pub(super) fn set_holds(&self, request: &'static str, holds: bool) -> Result<(), GuestError> {
        let mut now = self.lock();
        now.require(request, RunState::Paused)?;
        now.holds = holds;
        Ok(())
    }

    /// From now on the guest runs, if it is paused and here.
    fn run(&self) -> Result<(), GuestError> {
        let mut now = self.lock();
        now.require("resume", RunState::Paused)?;
        if !now.holds {
            let what = "the guest".to_owned();
            let why = "it was let go of, or not taken yet: it may be another host's".to_owned();
            return Err(GuestError::Unsupported { what, why });
        }
        now.state = RunState::Running;
        Ok(())
    }

    fn end(&self, why: EndReason) {
        let mut now = self.lock();
        (now.state, now.end) = (RunState::Stopped, Some(why));
        drop(now);
        self.changed.notify_all();
    }

    pub(super) fn wait_end(&self, timeout: Option<Duration>) -> Option<EndReason> {
        let deadline = timeout.and_then(|t| Instant::now().checked_add(t));
        let mut now = self.lock();
        while now.end.is_none() {
            now = match deadline {
                None => self.changed.wait(now).unwrap_or_else(PoisonError::into_inner),
                Some(deadline) => {
                    let left = deadline.checked_duration_since(Instant::now())?;
                    let waited = self.changed.wait_timeout(now, left);
                    waited.unwrap_or_else(PoisonError::into_inner).0
                }
            };
        }
        now.end.clone()
    }
}

impl Now {
    fn require(&self, request: &'static str, needed: RunState) -> Result<(), GuestError> {
        let state = self.state;
        if state == needed { Ok(()) } else { Err(GuestError::State { request, state }) }
    }
}

/// The ways from one vCPU to the others.
pub(super) struct Peer {
    pub(super) supervisor: Sender<Request>,
    pub(super) collector: Sender<collector::Message>,
}

impl Peers for Peer {
    fn ended(&self, _: u8, why: EndReason) {
        // A supervisor that has gone already ends all vCPUs.
        let _ = self.supervisor.send(Request::Ended(why));
    }

    fn ring_full(&self, vcpu: u8, reply: &Sender<Command>) -> bool {
        let reply = reply.clone();
        self.collector.send(collector::Message::RingFull { vcpu, reply }).is_ok()
    }

    fn slice_over(&self, vcpu: u8, holds: u64) -> bool {
        self.collector.send(collector::Message::SliceOver { vcpu, holds }).is_ok()
    }
}

/// How vCPUs that were told to pause came to stand.
#[derive(Clone, PartialEq, Eq, Debug)]
enum Halted {
    /// All can go on.
    Paused,
    /// The guest has ended.
    Ended,
    /// One has not: a sentence that names it.
    Late(String),
}

/// What the thread owns.
pub(super) struct Supervisor {
    /// First: dropping it joins the threads, so that none of them drops the bus.
    vcpus: Vcpus,
    vm: Arc<KvmVm>,
    bus: Arc<Bus>,
    context: Arc<StateContext>,
    status: Arc<Status>,
    requests: Receiver<Request>,
    has_run: bool,
    /// A restore failed half-way, and none has succeeded since.
    half_restored: bool,
}

impl Supervisor {
    pub(super) fn spawn(
        vm: Arc<KvmVm>,
        bus: Arc<Bus>,
        context: Arc<StateContext>,
        vcpus: Vcpus,
        status: Arc<Status>,
        requests: Receiver<Request>,
    ) -> Result<JoinHandle<()>, MachineError> {
        let supervisor = Self {
            vcpus,
            vm,
            bus,
            context,
            status,
            requests,
            has_run: false,
            half_restored: false,
        };
        sandbox::spawn(Class::Supervisor, "supervisor", move || supervisor.run())
            .map_err(MachineError::system("starting the supervisor"))
    }

    fn run(mut self) {
        while let Ok(request) = self.requests.recv() {
            match request {
                Request::Pause(reply) => answer(&reply, self.pause()),
                Request::Resume(reply) => answer(&reply, self.resume()),
                Request::Save(reply) => answer(&reply, self.save()),
                Request::PauseAndSave(reply) => {
                    let before = self.pause();
                    answer(&reply, before.map(|before| (before, self.save())));
                }
                Request::Restore(saved, clock, reply) => {
                    answer(&reply, self.restore(*saved, clock));
                }
                Request::Release(reply) => answer(&reply, self.release()),
                Request::Detach(reply) => answer(&reply, self.detach()),
                Request::Attach(late, reply) => answer(&reply, self.attach(&late)),
                Request::Acquire(reply) => answer(&reply, self.acquire()),
                Request::Stop(why, reply) => {
                    self.end(EndReason::Stopped(why));
                    answer(&reply, Ok(()));
                }
                Request::Ended(why) => self.end(why),
                Request::Quit => break,
            }
        }
        self.end(EndReason::Stopped("the machine was taken down".to_owned()));
    }

    /// Refuses `request` unless the machine is in state `needed`.
    fn require(&self, request: &'static str, needed: RunState) -> Result<(), GuestError> {
        self.status.lock().require(request, needed)
    }

    fn pause(&mut self) -> Result<RunState, GuestError> {
        match self.status.state() {
            RunState::Paused => return Ok(RunState::Paused),
            RunState::Stopped => self.require("pause", RunState::Running)?,
            RunState::Running => {}
        }
        // First: while vCPUs come to a stand a disk ends its wait for an epoch.
        self.bus.virtio().hurry(true);
        let stands = match self.halt() {
            Halted::Paused => Some(self.bus.virtio().quiesce()),
            Halted::Late(why) => {
                // Devices were not told to stand, and go on.
                self.bus.virtio().hurry(false);
                Some(Err(why))
            }
            Halted::Ended => None,
        };
        match stands {
            Some(Ok(())) => {
                self.status.set(RunState::Paused);
                return Ok(RunState::Running);
            }
            Some(Err(why)) => {
                // It goes on where it was, as if nobody had asked. A vCPU that is late finds this,
                // too.
                self.go_on();
                return Err(GuestError::System { what: "pausing the guest", cause: why.into() });
            }
            None => {}
        }
        // The guest has ended meanwhile, and has said so to our channel: listen to that first.
        if self.vcpus.iter().any(VcpuHandle::has_ended) {
            self.end(EndReason::Crashed("a vCPU thread has died".to_owned()));
        }
        while self.status.state() != RunState::Stopped {
            match self.requests.recv() {
                Ok(Request::Ended(why)) => self.end(why),
                Ok(other) => refuse(other),
                Err(_) => break,
            }
        }
        Err(GuestError::State { request: "pause", state: RunState::Stopped })
    }

    /// Brings all vCPUs to a stand.
    fn halt(&self) -> Halted {
        let deadline = Instant::now() + HALT_LIMIT;
        let pause = |vcpu: &VcpuHandle| {
            let (reply, stood) = mpsc::channel();
            vcpu.interrupt(Command::Pause(reply));
            stood
        };
        let waiting: Vec<Receiver<Stood>> = self.vcpus.iter().map(pause).collect();
        let mut halted = Halted::Paused;
        for (stood, id) in waiting.iter().zip(0..) {
            match stood.recv_timeout(deadline.saturating_duration_since(Instant::now())) {
                Ok(Stood::Paused) => {}
                // That the guest has ended is the more important.
                Ok(Stood::Finished) | Err(RecvTimeoutError::Disconnected) => halted = Halted::Ended,
                Err(RecvTimeoutError::Timeout) if halted == Halted::Paused => {
                    let limit = HALT_LIMIT.as_secs();
                    halted =
                        Halted::Late(format!("vCPU {id} did not come to a stand in {limit} s"));
                }
                Err(RecvTimeoutError::Timeout) => {}
            }
        }
        self.bus.com1().take_input(false);
        halted
    }

    /// Lets input in and all vCPUs run, of which some may not stand.
    fn go_on(&self) {
        self.bus.com1().take_input(true);
        for vcpu in self.vcpus.iter() {
            vcpu.tell(Command::Resume(Wave::alone()));
        }
    }

    fn resume(&mut self) -> Result<(), GuestError> {
        self.require("resume", RunState::Paused)?;
        if self.half_restored {
            let what = "the guest's state".to_owned();
            let why = "restoring it failed half-way, so it cannot run".to_owned();
            return Err(GuestError::Unsupported { what, why });
        }
        self.status.run()?;
        self.has_run = true;
        self.bus.virtio().resume();
        self.bus.com1().take_input(true);
        let all = self.vcpus.iter().map(VcpuHandle::commands).collect();
        // They stand, so they hear it; until all have, none may be told to stand again.
        let _ = Wave::begin(all).recv();
        Ok(())
    }

    /// The first reason stays.
    fn end(&mut self, why: EndReason) {
        if self.status.state() == RunState::Stopped {
            return;
        }
        self.bus.virtio().hurry(true);
        if let Halted::Late(why) = self.halt() {
            tracing::warn!("the guest has ended, and a processor has not: {why}");
        }
        // The devices of a paused guest stand already: a stuck one would only be waited for.
        if self.status.state() == RunState::Running
            && let Err(why) = self.bus.virtio().quiesce()
        {
            tracing::warn!(
                "the guest has ended, and a device has not: {why}; what the guest last wrote to it may not be durable"
            );
        }
        self.bus.com1().settle();
        tracing::debug!("the guest has ended: {why:?}");
        self.status.end(why);
    }

    fn save(&self) -> SavedState {
        self.require("save", RunState::Paused)?;
        let deadline = Instant::now() + HALT_LIMIT;
        let mut waiting = Vec::new();
        for vcpu in self.vcpus.iter() {
            let (reply, saved) = mpsc::channel();
            vcpu.tell(Command::Save(reply));
            waiting.push(saved);
        }
        // Beside the vCPUs, all of which stand.
        let vm = state::save_vm(&self.vm, &self.context)?;
        let com1 = self.bus.com1().state();
        let platform = Some(state::SavedPlatform { power: self.bus.power().state() });
        let virtio = self.bus.virtio().save().map_err(|why| GuestError::System {
            what: "saving a virtio device",
            cause: why.into(),
        })?;
        let mut vcpus = Vec::with_capacity(waiting.len());
        for (saved, id) in waiting.into_iter().zip(0..) {
            let left = deadline.saturating_duration_since(Instant::now());
            vcpus.push(*saved.recv_timeout(left).map_err(|e| no_answer(id, e))??);
        }
        state::encode(&SavedMachine { vm, vcpus, com1, platform, virtio })
    }

    /// Lets go of what only one host may hold.
    fn release(&mut self) -> Result<(), GuestError> {
        // Whatever fails, part of it may be gone.
        self.status.set_holds("release", false)?;
        devices("releasing a device", self.bus.virtio().release())
    }

    /// Lets go of what peers reach the guest by, after `release`.
    fn detach(&mut self) -> Result<Vec<u8>, GuestError> {
        self.status.set_holds("detach", false)?;
        devices("detaching a device", self.bus.virtio().detach())
    }

    /// Has peers reach the guest here.
    fn attach(&self, late: &[u8]) -> Result<(), GuestError> {
        self.require("attach", RunState::Paused)?;
        devices("attaching a device", self.bus.virtio().attach(late))
    }

    /// Takes what only one host may hold.
    fn acquire(&mut self) -> Result<(), GuestError> {
        self.require("acquire", RunState::Paused)?;
        devices("acquiring a device", self.bus.virtio().acquire())?;
        self.status.set_holds("acquire", true)
    }

    /// vCPUs before interrupt controllers: an interrupt that those pass on would be overwritten
    /// with the local APIC. The clock last: it counts from the TSCs.
    fn restore(&mut self, saved: SavedMachine, clock: Clock) -> Result<(), GuestError> {
        self.require("restore", RunState::Paused)?;
        if self.has_run {
            let what = "a state".to_owned();
            let why = "it can only be put into a guest that has never run".to_owned();
            return Err(GuestError::Unsupported { what, why });
        }
        self.half_restored = true;
        self.restore_parts(saved, clock)?;
        self.half_restored = false;
        Ok(())
    }

    fn restore_vcpus(&self, states: Vec<SavedVcpu>, adjust: Adjust) -> Result<(), GuestError> {
        let mut waiting = Vec::new();
        for (vcpu, state) in self.vcpus.iter().zip(states) {
            let (reply, restored) = mpsc::channel();
            vcpu.tell(Command::Restore(Box::new(state), adjust, reply));
            waiting.push(restored);
        }
        // For all of them, whatever the first one says.
        let deadline = Instant::now() + RESTORE_LIMIT;
        let restored = waiting.into_iter().zip(0..).map(|(restored, id)| {
            let left = deadline.saturating_duration_since(Instant::now());
            restored.recv_timeout(left).map_err(|e| not_restored(id, e))?
        });
        restored.collect::<Vec<_>>().into_iter().collect()
    }

    fn restore_parts(&self, saved: SavedMachine, clock: Clock) -> Result<(), GuestError> {
        if clock == Clock::Continue && saved.platform.is_some() {
            self.vm.memory().ask(boot::generation_frame());
        }
        // KVM reads and writes pages that vCPUs share with the guest, and waits for those to come.
        self.status.takes_state.store(true, Ordering::SeqCst);
        let taken = self.restore_vcpus(saved.vcpus, Adjust { clock, now_ns: wall_ns() });
        self.status.takes_state.store(false, Ordering::SeqCst);
        if let Some(why) = self.status.lost.get() {
            let why = why.clone().into();
            return Err(GuestError::System { what: "restoring the guest", cause: why });
        }
        taken?;
        let malformed = |why| GuestError::Malformed { what: "the serial port's state".into(), why };
        self.bus.com1().restore(saved.com1).map_err(malformed)?;
        self.bus.virtio().restore(saved.virtio).map_err(|(i, why)| GuestError::Malformed {
            what: format!("the state of virtio device {i}"),
            why,
        })?;
        state::restore_vm(&self.vm, &self.context, &saved.vm, clock)?;
        // Not before the interrupt controllers' own state is in place.
        self.bus.virtio().interrupt_again(&self.vm).map_err(|e| GuestError::System {
            what: "interrupting for a virtio device",
            cause: Box::new(e),
        })?;
        if let Some(platform) = saved.platform {
            self.bus.power().restore(platform.power);
            // From one checkpoint many may go on; what migrates stays the one that it was.
            if clock == Clock::Continue {
                state::renew_generation(&self.vm, &saved.vm, RESTORE_LIMIT)?;
            }
        }
        Ok(())
    }
}

fn devices<T>(what: &'static str, r: Result<T, String>) -> Result<T, GuestError> {
    r.map_err(|why| GuestError::System { what, cause: why.into() })
}

fn gone() -> GuestError {
    GuestError::System { what: "asking a vCPU", cause: "its thread has ended".into() }
}

/// vCPU `id` has not answered in [`HALT_LIMIT`].
fn no_answer(id: u32, e: RecvTimeoutError) -> GuestError {
    match e {
        RecvTimeoutError::Disconnected => gone(),
        RecvTimeoutError::Timeout => {
            let cause = format!("vCPU {id} did not give its state in {} s", HALT_LIMIT.as_secs());
            GuestError::System { what: "saving the state of a vCPU", cause: cause.into() }
        }
    }
}

/// vCPU `id` has not taken over its state in [`RESTORE_LIMIT`].
fn not_restored(id: u32, e: RecvTimeoutError) -> GuestError {
    match e {
        RecvTimeoutError::Disconnected => gone(),
        RecvTimeoutError::Timeout => {
            let limit = RESTORE_LIMIT.as_secs();
            let cause = format!(
                "vCPU {id} did not take over its state in {limit} s: a page that it shares with KVM may not come"
            );
            GuestError::System { what: "restoring the state of a vCPU", cause: cause.into() }
        }
    }
}

/// Answers a request that came too late.
fn refuse(request: Request) {
    let stopped = |request| GuestError::State { request, state: RunState::Stopped };
    match request {
        Request::Pause(reply) => answer(&reply, Err(stopped("pause"))),
        Request::Resume(reply) => answer(&reply, Err(stopped("resume"))),
        Request::Save(reply) => answer(&reply, Err(stopped("save"))),
        Request::PauseAndSave(reply) => answer(&reply, Err(stopped("pause"))),
        Request::Restore(_, _, reply) => answer(&reply, Err(stopped("restore"))),
        Request::Release(reply) => answer(&reply, Err(stopped("release"))),
        Request::Detach(reply) => answer(&reply, Err(stopped("detach"))),
        Request::Attach(_, reply) => answer(&reply, Err(stopped("attach"))),
        Request::Acquire(reply) => answer(&reply, Err(stopped("acquire"))),
        Request::Stop(_, reply) => answer(&reply, Ok(())),
        Request::Ended(_) | Request::Quit => {}
    }
}

/// Sends a reply; whoever asked may have gone meanwhile.
fn answer<T>(reply: &Sender<T>, with: T) {
    let _ = reply.send(with);
}
