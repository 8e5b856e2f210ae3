//! The supervisor is the only thread that decides whether a machine runs. It owns the vCPU threads
//! and serves one request at a time. A vCPU reports the end of the guest to it.

use std::os::fd::OwnedFd;
use std::sync::{Arc, mpsc};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use driftline_guest::{Clock, NextHost, RunState, Section, SectionHead};

use super::MachineError;
use super::request_error::SupervisorError;
use super::spread::Spread;
use super::state::{self, SavedMachine};
use super::status::MachineStatus;
use super::vcpus::{HALT_LIMIT, VcpuHandle, Vcpus};
use crate::actor::{CallError, Handle, Inbox, PendingCall};
use crate::boot;
use crate::collector;
use crate::devices::{Bus, RequestError};
use crate::kvm::KvmVm;
use crate::sandbox::{self, Class};
use crate::vcpu::{Adjust, PauseOutcome, Peers, SavedVcpu, StateContext, Vcpu, VcpuError};
use crate::vm::EndReason;
use crate::wall_clock::wall_ns;

/// Limit for the vCPUs to restore a state. KVM touches pages that vCPUs share with the guest, and
/// in a lazy restore those pages come from storage.
const RESTORE_LIMIT: Duration = Duration::from_secs(if cfg!(test) { 5 } else { 30 });

/// The sections of a state, or why it cannot be saved.
type Saved = Result<Vec<Section>, SupervisorError>;

/// Reports to the supervisor that the guest has ended.
#[derive(Clone, Debug)]
pub(super) struct EndReporter {
    pub(super) status: Arc<MachineStatus>,
    pub(super) supervisor: Handle<Supervisor>,
}

impl EndReporter {
    /// Ends the guest soon. Only the first report takes effect.
    pub(super) fn report(&self, why: EndReason) {
        // A pause that finds vCPUs finished reads the reason before this job runs.
        self.status.report_end(why);
        // A supervisor that has already ended ends all vCPUs.
        self.supervisor.tell(Supervisor::end_as_reported);
    }
}

/// A vCPU's access to the supervisor and the collector.
pub(super) struct Peer {
    pub(super) end: EndReporter,
    pub(super) collector: Handle<collector::CollectorState>,
}

impl Peers for Peer {
    fn ended(&self, why: EndReason) {
        self.end.report(why);
    }

    fn ring_full(&self, id: u8, vcpu: Handle<Vcpu>) -> bool {
        self.collector.tell(move |collector| {
            collector.relieve(id);
            // Ends its wait. The vCPU may have ended meanwhile.
            vcpu.tell(|_| ());
        })
    }

    fn slice_over(&self, id: u8, stalls: u64) -> bool {
        self.collector.tell(move |collector| collector.end_slice(id, stalls))
    }
}

/// The outcome of pausing the vCPUs.
#[derive(Clone, PartialEq, Eq, Debug)]
enum Halted {
    /// All vCPUs are paused and can resume.
    Paused,
    /// The guest has ended.
    Ended,
    /// A vCPU has not paused in time.
    TimedOut(CallError),
}

/// The state that the supervisor's thread owns.
pub(super) struct Supervisor {
    /// The first field: dropping it joins the threads, so that none of them drops the bus.
    vcpus: Vcpus,
    vm: Arc<KvmVm>,
    bus: Arc<Bus>,
    context: Arc<StateContext>,
    status: Arc<MachineStatus>,
    has_run: bool,
    /// Whether a paused vCPU may still be in a job, and would not reach the next one.
    vcpus_are_busy: bool,
    /// Whether a restore has failed half-way and none has succeeded since.
    half_restored: bool,
}

impl Supervisor {
    pub(super) fn spawn(
        vm: Arc<KvmVm>,
        bus: Arc<Bus>,
        context: Arc<StateContext>,
        vcpus: Vcpus,
        status: Arc<MachineStatus>,
        inbox: Inbox<Self>,
    ) -> Result<JoinHandle<()>, MachineError> {
        let supervisor = Self {
            vcpus,
            vm,
            bus,
            context,
            status,
            has_run: false,
            vcpus_are_busy: false,
            half_restored: false,
        };
        sandbox::spawn(Class::Supervisor, "supervisor", move || supervisor.run(inbox))
            .map_err(MachineError::system("starting the supervisor"))
    }

    fn run(mut self, inbox: Inbox<Self>) {
        inbox.serve(&mut self);
        self.end(EndReason::Stopped("the machine was taken down".to_owned()));
    }

    /// Refuses `request` unless the machine is in state `needed`.
    fn require(&self, request: &'static str, needed: RunState) -> Result<(), SupervisorError> {
        self.status.require(request, needed)
    }

    /// Pauses the guest. Returns its state before, and when its vCPUs were told to stop.
    pub(super) fn pause(&mut self) -> Result<(RunState, Instant), SupervisorError> {
        match self.status.state() {
            RunState::Paused => return Ok((RunState::Paused, Instant::now())),
            RunState::Stopped => self.require("pause", RunState::Running)?,
            RunState::Running => {}
        }
        // Comes first: the vCPUs run while a disk finishes the requests in flight, a flush among
        // them. What they ask of a device meanwhile waits for the resume.
        device_result("pausing the guest", self.bus.virtio().quiesce())?;
        let since = Instant::now();
        match self.halt() {
            Halted::Paused => {
                self.status.set(RunState::Paused);
                return Ok((RunState::Running, since));
            }
            Halted::TimedOut(why) => {
                // The guest continues as if no pause had been requested. A vCPU that has not paused
                // in time receives the resume as well.
                self.bus.virtio().resume();
                self.resume_all();
                return Err(call_failed("pausing the guest")(why));
            }
            Halted::Ended => {}
        }
        // The guest has ended meanwhile. A vCPU reports that before it has finished.
        self.end_as_reported();
        self.end(EndReason::Crashed("a vCPU thread has died".to_owned()));
        Err(SupervisorError::State { request: "pause", state: RunState::Stopped })
    }

    /// Pauses the guest and saves its state.
    pub(super) fn pause_and_save(&mut self) -> Result<(RunState, Instant, Saved), SupervisorError> {
        let (before, since) = self.pause()?;
        Ok((before, since, self.save()))
    }

    /// Pauses all vCPUs.
    fn halt(&self) -> Halted {
        self.bus.com1().take_input(false);
        let deadline = Instant::now() + HALT_LIMIT;
        let calls: Vec<_> = self.vcpus.iter().map(|vcpu| vcpu.begin_pause(deadline)).collect();
        let mut halted = Halted::Paused;
        for call in calls {
            match call.wait() {
                Ok(PauseOutcome::Paused) => {}
                // The end of the guest takes precedence over a timeout.
                Ok(PauseOutcome::Finished) | Err(CallError::Ended { .. }) => halted = Halted::Ended,
                Err(timeout) if halted == Halted::Paused => halted = Halted::TimedOut(timeout),
                Err(_) => {}
            }
        }
        self.bus.com1().await_read();
        halted
    }

    /// Accepts input again and resumes all vCPUs, of which some may not be paused.
    fn resume_all(&self) {
        self.bus.com1().take_input(true);
        for vcpu in self.vcpus.iter() {
            vcpu.paused().tell(Vcpu::resume);
        }
    }

    pub(super) fn resume(&mut self) -> Result<(), SupervisorError> {
        self.require("resume", RunState::Paused)?;
        if self.half_restored {
            return Err(SupervisorError::HalfRestored);
        }
        self.wait_for_idle_vcpus()?;
        self.status.run()?;
        self.has_run = true;
        self.bus.com1().take_input(true);
        let vcpus: Vec<_> = self.vcpus.iter().collect();
        let spread = self.spread_vcpus();
        let (others, last) = vcpus.split_at(vcpus.len().saturating_sub(1));
        let others = begin_resumes(others);
        if spread.keeps_any() {
            let _ = others.recv();
        }
        // The devices' threads may take the processors of the other vCPUs, which have resumed if
        // they are kept apart. They come before the last vCPU, which may take this thread's
        // processor for a tick: until the devices have resumed, what the guest asks of them waits.
        self.bus.virtio().resume();
        let last = begin_resumes(last);
        // Needs no limit: every vCPU waits for a job, and nothing in `resume` blocks. No vCPU may
        // be told to pause again before all have resumed.
        for resumes in [others, last] {
            let _ = resumes.recv();
        }
        drop(spread);
        Ok(())
    }

    /// Keeps the vCPUs on different processors, until the result is dropped.
    fn spread_vcpus(&self) -> Spread {
        let threads: Vec<_> = self.vcpus.iter().filter_map(VcpuHandle::thread_id).collect();
        Spread::of(&threads)
    }

    /// Waits until the vCPUs, which are paused, have finished all their jobs. Of all jobs only a
    /// save may be unfinished here: for it KVM reads guest memory, which may be on storage that
    /// hangs. A restore that leaves one unfinished has failed, and then the guest does not resume.
    fn wait_for_idle_vcpus(&mut self) -> Result<(), SupervisorError> {
        if !self.vcpus_are_busy {
            return Ok(());
        }
        let deadline = Instant::now() + HALT_LIMIT;
        let probe = |vcpu: &VcpuHandle| {
            vcpu.paused().begin("finish the job that it was given before", deadline, |_| ())
        };
        let calls: Vec<_> = self.vcpus.iter().map(probe).collect();
        let failed = call_failed("resuming the guest");
        calls.into_iter().try_for_each(|call| call.wait().map_err(&failed))?;
        self.vcpus_are_busy = false;
        Ok(())
    }

    /// Calls `f` with the first vCPU.
    #[cfg(test)]
    pub(super) fn with_first_vcpu(&self, f: impl FnOnce(&VcpuHandle)) {
        self.vcpus.iter().next().map(f);
    }

    /// Ends the guest if a thread has reported that it has ended.
    fn end_as_reported(&mut self) {
        if let Some(why) = self.status.reported_end() {
            self.end(why);
        }
    }

    /// Ends the guest. Only the first reason takes effect.
    pub(super) fn end(&mut self, why: EndReason) {
        if self.status.state() == RunState::Stopped {
            return;
        }
        self.bus.virtio().cancel_disk_waits();
        if let Halted::TimedOut(why) = self.halt() {
            tracing::warn!("the guest has ended, and a vCPU has not: {why}");
        }
        // The devices of a paused guest are quiesced already; a stuck device would only cost time.
        if self.status.state() == RunState::Running
            && let Err(why) = self.bus.virtio().quiesce()
        {
            tracing::warn!(
                "the guest has ended, and a device has not: {why}; the guest's last writes to it \
                 may not be durable"
            );
        }
        self.bus.com1().drain();
        tracing::debug!("the guest has ended: {why:?}");
        self.status.end(why);
    }

    pub(super) fn save(&mut self) -> Saved {
        self.require("save", RunState::Paused)?;
        self.vcpus_are_busy = true;
        let deadline = Instant::now() + HALT_LIMIT;
        let save =
            |vcpu: &VcpuHandle| vcpu.paused().begin("save its state", deadline, |vcpu| vcpu.save());
        // All vCPUs are paused. This thread saves the VM while the first vCPU saves its state, and
        // wakes the other vCPUs when it is about to wait. Woken at once, two vCPUs on two
        // processors share the one that this thread does not use.
        let mut vcpus = self.vcpus.iter();
        let first = vcpus.next().map(save);
        let vm = state::save_vm(&self.vm, &self.context)?;
        let calls: Vec<_> = first.into_iter().chain(vcpus.map(save)).collect();
        let com1 = self.bus.com1().state();
        let platform = state::SavedPlatform { power: self.bus.power().state() };
        let keyboard = self.bus.keyboard();
        let virtio = device_result("saving a virtio device", self.bus.virtio().save())?;
        let mut vcpus = Vec::with_capacity(calls.len());
        for call in calls {
            vcpus.push(call.wait().map_err(call_failed("saving the state of a vCPU"))?);
        }
        self.vcpus_are_busy = false;
        let vcpus = vcpus.into_iter().map(|saved| saved.map(|saved| *saved));
        let vcpus = vcpus.collect::<Result<_, VcpuError>>()?;
        state::encode(&SavedMachine { vm, vcpus, com1, platform, virtio, keyboard })
    }

    /// Returns the heads of the sections that [`save`](Self::save) returns.
    pub(super) fn state_heads(&self, vcpus: u8, devices: usize) -> Vec<SectionHead> {
        state::heads(vcpus, devices, self.bus.keyboard().is_some())
    }

    /// Sends every vCPU a non-maskable interrupt. A paused vCPU takes it when it resumes.
    pub(super) fn send_nmi(&self) -> Result<(), SupervisorError> {
        if self.status.state() == RunState::Stopped {
            self.require("send an NMI to", RunState::Running)?;
        }
        let deadline = Instant::now() + HALT_LIMIT;
        let send =
            |vcpu: &VcpuHandle| vcpu.running().begin("take an NMI", deadline, |vcpu| vcpu.nmi());
        let calls: Vec<_> = self.vcpus.iter().map(send).collect();
        let failed = call_failed("sending an NMI");
        calls.into_iter().try_for_each(|call| Ok(call.wait().map_err(&failed)??))
    }

    /// Presses Ctrl-Alt-Del. A paused guest sees it when it resumes.
    pub(super) fn press_ctrl_alt_del(&self) -> Result<(), SupervisorError> {
        match self.bus.press_ctrl_alt_del() {
            Some(pressed) => Ok(pressed?),
            None => Err(SupervisorError::NoKeyboard),
        }
    }

    /// Returns duplicates of the devices' files, for each device in order.
    pub(super) fn share(&self) -> Result<Vec<Vec<OwnedFd>>, SupervisorError> {
        device_result("sharing a device's files", self.bus.virtio().share())
    }

    /// Releases what only one host may have, for `next`.
    pub(super) fn release(&mut self, next: NextHost) -> Result<(), SupervisorError> {
        // Comes first: if the release fails, part of it may be done.
        self.status.set_acquired("release", false)?;
        device_result("releasing a device", self.bus.virtio().release(next))
    }

    /// Detaches the channels through which peers reach the guest, after `release`.
    pub(super) fn detach(&mut self, next: NextHost) -> Result<Vec<u8>, SupervisorError> {
        self.status.set_acquired("detach", false)?;
        device_result("detaching a device", self.bus.virtio().detach(next))
    }

    /// Attaches the channels through which peers reach the guest on this host.
    pub(super) fn attach(&self, queued_packets: &[u8]) -> Result<(), SupervisorError> {
        self.require("attach", RunState::Paused)?;
        device_result("attaching a device", self.bus.virtio().attach(queued_packets))
    }

    /// Acquires what only one host may have, from `from`. If that fails, `from` keeps it.
    pub(super) fn acquire(&mut self, from: NextHost) -> Result<(), SupervisorError> {
        self.require("acquire", RunState::Paused)?;
        device_result("acquiring a device", self.bus.virtio().acquire(from))?;
        self.status.set_acquired("acquire", true)
    }

    /// Restores a state. vCPUs precede interrupt controllers: restoring the local APIC would
    /// overwrite an interrupt that a controller passes on. The clock is last: it counts from the
    /// TSCs. With `renews`, the guest gets a new generation ID, because many guests may be restored
    /// from one state.
    pub(super) fn restore(
        &mut self,
        saved: SavedMachine,
        clock: Clock,
        renews: bool,
    ) -> Result<(), SupervisorError> {
        // First, because a lost page ends the guest, and the caller wants to know why.
        self.refuse_if_lost()?;
        self.require("restore", RunState::Paused)?;
        if self.has_run {
            return Err(SupervisorError::HasRun);
        }
        self.half_restored = true;
        self.restore_parts(saved, clock, renews)?;
        self.half_restored = false;
        Ok(())
    }

    fn begin_vcpu_restores(
        &self,
        states: Vec<SavedVcpu>,
        adjust: Adjust,
    ) -> Vec<PendingCall<Result<(), VcpuError>>> {
        let deadline = Instant::now() + RESTORE_LIMIT;
        let restore = |(vcpu, state): (&VcpuHandle, SavedVcpu)| {
            let what = "restore its state, for which it needs pages that it shares with KVM,";
            vcpu.paused().begin(what, deadline, move |vcpu| vcpu.restore(&state, adjust))
        };
        self.vcpus.iter().zip(states).map(restore).collect()
    }

    fn refuse_if_lost(&self) -> Result<(), SupervisorError> {
        match self.status.lost() {
            Some(why) => Err(SupervisorError::Lost(why.to_owned())),
            None => Ok(()),
        }
    }

    fn restore_parts(
        &self,
        saved: SavedMachine,
        clock: Clock,
        renews: bool,
    ) -> Result<(), SupervisorError> {
        if renews {
            self.vm.memory().fetch_next(boot::generation_frame());
        }
        // KVM reads and writes pages that vCPUs share with the guest, and waits until they arrive.
        self.status.set_restores_vcpus(true);
        let adjust = Adjust { clock, now_ns: wall_ns() };
        // The devices' threads restore while the vCPUs' threads do. They are woken first, because a
        // vCPU that runs may keep this thread from its processor.
        let devices = self.bus.virtio().begin_restore(saved.virtio);
        // Only in the downtime of a migration: another restore may wait for pages, and its vCPUs
        // may be bound to processors meanwhile.
        let spread = (clock == Clock::Advance).then(|| self.spread_vcpus());
        let vcpus = self.begin_vcpu_restores(saved.vcpus, adjust);
        let restored = finish_vcpu_restores(vcpus);
        drop(spread);
        if restored.is_err() {
            // A vCPU that still waits for a page could not end.
            self.vm.memory().abandon();
        }
        self.status.set_restores_vcpus(false);
        self.refuse_if_lost()?;
        restored?;
        self.bus.com1().restore(saved.com1).map_err(SupervisorError::Serial)?;
        let virtio = devices.and_then(|begun| self.bus.virtio().finish_restore(begun));
        virtio.map_err(|(index, e)| SupervisorError::Virtio { index, cause: Box::new(e) })?;
        state::restore_vm(&self.vm, &self.context, &saved.vm, clock)?;
        // Comes after the restore of the interrupt controllers' own state.
        let interrupted = self.bus.virtio().interrupt_again(&self.vm);
        interrupted.map_err(SupervisorError::Interrupt)?;
        self.bus.power().restore(saved.platform.power);
        self.bus.set_keyboard(saved.keyboard);
        if renews {
            state::renew_generation(&self.vm, &saved.vm, RESTORE_LIMIT)?;
        }
        Ok(())
    }
}

/// Tells vCPUs to resume. The channel is closed when all have.
fn begin_resumes(vcpus: &[&VcpuHandle]) -> mpsc::Receiver<()> {
    let (in_progress, resumed) = mpsc::channel::<()>();
    for vcpu in vcpus {
        let in_progress = in_progress.clone();
        // A vCPU whose thread has ended drops the job.
        vcpu.paused().tell(move |vcpu| {
            vcpu.resume();
            drop(in_progress);
        });
    }
    resumed
}

/// Waits for all vCPUs, even if the first one fails.
fn finish_vcpu_restores(
    calls: Vec<PendingCall<Result<(), VcpuError>>>,
) -> Result<(), SupervisorError> {
    let failed = call_failed("restoring the state of a vCPU");
    let restored = calls.into_iter().map(|call| Ok(call.wait().map_err(&failed)??));
    restored.collect::<Vec<_>>().into_iter().collect()
}

fn device_result<T>(what: &'static str, r: Result<T, RequestError>) -> Result<T, SupervisorError> {
    r.map_err(|e| SupervisorError::Device { what, cause: Box::new(e) })
}

fn call_failed(what: &'static str) -> impl Fn(CallError) -> SupervisorError {
    move |cause| SupervisorError::Call { what, cause }
}
