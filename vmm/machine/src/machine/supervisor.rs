//! The supervisor is the only thread that decides whether a machine runs. It owns the vCPU threads,
//! serves one request at a time, and receives a message from a vCPU when the guest ends.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use driftline_guest::{Clock, GuestError, RunState, SavedState};

use super::MachineError;
use super::state::{self, SavedMachine};
use super::vcpus::{HALT_LIMIT, VcpuHandle, Vcpus};
use crate::actor::Handle;
use crate::boot;
use crate::collector;
use crate::devices::{Bus, RequestError};
use crate::kvm::KvmVm;
use crate::sandbox::{self, Class};
use crate::vcpu::{Adjust, Command, Peers, SavedVcpu, StateContext, Stood, Wave, wall_ns};
use crate::vm::EndReason;

/// Limit for the vCPUs to restore a state. KVM touches pages that vCPUs share with the guest, and
/// in a lazy restore those pages come from storage.
const RESTORE_LIMIT: Duration = Duration::from_secs(if cfg!(test) { 5 } else { 30 });

/// A message to the supervisor.
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
    /// A vCPU reports that the guest has ended.
    Ended(EndReason),
    /// The machine is being dropped.
    Quit,
}

/// Whether the machine runs, and whether it may. The supervisor writes it and any thread reads it.
/// For a guest without devices, the thread that releases or acquires the guest writes it too.
#[derive(Debug)]
pub(super) struct Status {
    now: Mutex<Now>,
    changed: Condvar,
    /// Whether the vCPUs are restoring a state.
    takes_state: AtomicBool,
    /// Why a page of memory is lost: the guest ends, or never runs.
    lost: OnceLock<String>,
}

#[derive(Debug)]
struct Now {
    state: RunState,
    end: Option<EndReason>,
    /// Whether the machine holds what only one host may hold; without devices, that is the right to
    /// run. One lock covers this flag and the state that it permits, so that a released guest never
    /// runs (I7).
    holds: bool,
}

impl Status {
    /// Returns the status of a paused guest.
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

    /// Records whether the machine holds what only one host may hold. Refuses `request` unless the
    /// guest is paused.
    pub(super) fn set_holds(&self, request: &'static str, holds: bool) -> Result<(), GuestError> {
        let mut now = self.lock();
        now.require(request, RunState::Paused)?;
        now.holds = holds;
        Ok(())
    }

    /// Marks the guest as running if it is paused and held here.
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

/// The channels from a vCPU to the supervisor and the collector.
pub(super) struct Peer {
    pub(super) supervisor: Sender<Request>,
    pub(super) collector: Handle<collector::Work>,
}

impl Peers for Peer {
    fn ended(&self, _: u8, why: EndReason) {
        // A supervisor that has already ended ends all vCPUs.
        let _ = self.supervisor.send(Request::Ended(why));
    }

    fn ring_full(&self, vcpu: u8, reply: &Sender<Command>) -> bool {
        let reply = reply.clone();
        self.collector.tell(move |work| {
            work.relieve(vcpu);
            // The vCPU may have ended meanwhile.
            let _ = reply.send(Command::RingsDrained);
        })
    }

    fn slice_over(&self, vcpu: u8, holds: u64) -> bool {
        self.collector.tell(move |work| work.end_slice(vcpu, holds))
    }
}

/// The outcome of pausing the vCPUs.
#[derive(Clone, PartialEq, Eq, Debug)]
enum Halted {
    /// All vCPUs are paused and can resume.
    Paused,
    /// The guest has ended.
    Ended,
    /// A vCPU has not paused in time. The message names it.
    Late(String),
}

/// The state that the supervisor's thread owns.
pub(super) struct Supervisor {
    /// The first field: dropping it joins the threads, so that none of them drops the bus.
    vcpus: Vcpus,
    vm: Arc<KvmVm>,
    bus: Arc<Bus>,
    context: Arc<StateContext>,
    status: Arc<Status>,
    requests: Receiver<Request>,
    has_run: bool,
    /// Whether a restore has failed half-way and none has succeeded since.
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
        // Comes first: while the vCPUs pause, a disk ends its wait for an epoch.
        self.bus.virtio().hurry(true);
        let stands = match self.halt() {
            Halted::Paused => Some(devices("pausing the guest", self.bus.virtio().quiesce())),
            Halted::Late(why) => {
                // The devices were not asked to quiesce, so they continue.
                self.bus.virtio().hurry(false);
                Some(Err(GuestError::System { what: "pausing the guest", cause: why.into() }))
            }
            Halted::Ended => None,
        };
        match stands {
            Some(Ok(())) => {
                self.status.set(RunState::Paused);
                return Ok(RunState::Running);
            }
            Some(Err(why)) => {
                // The guest continues as if no pause had been requested. A late vCPU receives the
                // resume as well.
                self.go_on();
                return Err(why);
            }
            None => {}
        }
        // The guest has ended meanwhile and has reported it to this channel: read that report
        // first.
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

    /// Pauses all vCPUs.
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
                // The end of the guest takes precedence over a late vCPU.
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

    /// Accepts input again and resumes all vCPUs. Some of them may not be paused.
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
        // The vCPUs are paused, so they receive it. None may be told to pause again before all have
        // resumed.
        let _ = Wave::begin(all).recv();
        Ok(())
    }

    /// Ends the guest. The first reason is kept.
    fn end(&mut self, why: EndReason) {
        if self.status.state() == RunState::Stopped {
            return;
        }
        self.bus.virtio().hurry(true);
        if let Halted::Late(why) = self.halt() {
            tracing::warn!("the guest has ended, and a processor has not: {why}");
        }
        // The devices of a paused guest are quiesced already; a stuck device would only cost time.
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
        // This runs in parallel with the vCPU threads; all vCPUs are paused.
        let vm = state::save_vm(&self.vm, &self.context)?;
        let com1 = self.bus.com1().state();
        let platform = state::SavedPlatform { power: self.bus.power().state() };
        let virtio = devices("saving a virtio device", self.bus.virtio().save())?;
        let mut vcpus = Vec::with_capacity(waiting.len());
        for (saved, id) in waiting.into_iter().zip(0..) {
            let left = deadline.saturating_duration_since(Instant::now());
            vcpus.push(*saved.recv_timeout(left).map_err(|e| no_answer(id, e))??);
        }
        state::encode(&SavedMachine { vm, vcpus, com1, platform, virtio })
    }

    /// Releases what only one host may hold.
    fn release(&mut self) -> Result<(), GuestError> {
        // Comes first: if the release fails, part of it may be done.
        self.status.set_holds("release", false)?;
        devices("releasing a device", self.bus.virtio().release())
    }

    /// Detaches the channels through which peers reach the guest, after `release`.
    fn detach(&mut self) -> Result<Vec<u8>, GuestError> {
        self.status.set_holds("detach", false)?;
        devices("detaching a device", self.bus.virtio().detach())
    }

    /// Attaches the channels through which peers reach the guest on this host.
    fn attach(&self, late: &[u8]) -> Result<(), GuestError> {
        self.require("attach", RunState::Paused)?;
        devices("attaching a device", self.bus.virtio().attach(late))
    }

    /// Acquires what only one host may hold.
    fn acquire(&mut self) -> Result<(), GuestError> {
        self.require("acquire", RunState::Paused)?;
        devices("acquiring a device", self.bus.virtio().acquire())?;
        self.status.set_holds("acquire", true)
    }

    /// Restores a state. vCPUs come before interrupt controllers: restoring the local APIC would
    /// overwrite an interrupt that a controller passes on. The clock comes last: it counts from the
    /// TSCs.
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
        // Waits for all vCPUs, even if the first one fails.
        let deadline = Instant::now() + RESTORE_LIMIT;
        let restored = waiting.into_iter().zip(0..).map(|(restored, id)| {
            let left = deadline.saturating_duration_since(Instant::now());
            restored.recv_timeout(left).map_err(|e| not_restored(id, e))?
        });
        restored.collect::<Vec<_>>().into_iter().collect()
    }

    fn restore_parts(&self, saved: SavedMachine, clock: Clock) -> Result<(), GuestError> {
        if clock == Clock::Continue {
            self.vm.memory().ask(boot::generation_frame());
        }
        // KVM reads and writes pages that vCPUs share with the guest, and waits until they arrive.
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
            why: why.to_string(),
        })?;
        state::restore_vm(&self.vm, &self.context, &saved.vm, clock)?;
        // Comes after the restore of the interrupt controllers' own state.
        self.bus.virtio().interrupt_again(&self.vm).map_err(|e| GuestError::System {
            what: "interrupting for a virtio device",
            cause: Box::new(e),
        })?;
        self.bus.power().restore(saved.platform.power);
        // Many guests may be restored from one checkpoint; a migrated guest keeps its identity.
        if clock == Clock::Continue {
            state::renew_generation(&self.vm, &saved.vm, RESTORE_LIMIT)?;
        }
        Ok(())
    }
}

fn devices<T>(what: &'static str, r: Result<T, RequestError>) -> Result<T, GuestError> {
    r.map_err(|why| GuestError::System { what, cause: Box::new(why) })
}

fn gone() -> GuestError {
    GuestError::System { what: "asking a vCPU", cause: "its thread has ended".into() }
}

/// Returns the error for vCPU `id`, which has not answered within [`HALT_LIMIT`].
fn no_answer(id: u32, e: RecvTimeoutError) -> GuestError {
    match e {
        RecvTimeoutError::Disconnected => gone(),
        RecvTimeoutError::Timeout => {
            let cause = format!("vCPU {id} did not give its state in {} s", HALT_LIMIT.as_secs());
            GuestError::System { what: "saving the state of a vCPU", cause: cause.into() }
        }
    }
}

/// Returns the error for vCPU `id`, which has not restored its state within [`RESTORE_LIMIT`].
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

/// Answers a request that arrived after the guest's end.
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

/// Sends a reply. The caller may have ended meanwhile.
fn answer<T>(reply: &Sender<T>, with: T) {
    let _ = reply.send(with);
}
