//! The guest itself: its workers, their transitions, and the traits of a guest.

use std::io::Write;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use driftline_dirty_tracker::{FrameRun, Layout, Subscription};
use driftline_guest::{
    Clock, CollectionReport, DirtyLog, GuestContents, GuestDrive, GuestError, GuestIdentity,
    GuestRam, LazyRestoreProgress, Lifecycle, Line, MemoryLoader, MemoryRight, PageSource,
    Populate, RunState, SavedPause, Section, SectionHead, SharedGuest, Stateful, VcpuPauses,
    VcpuWrites, VmId, WriteProtection, WriteThrottle,
};
use driftline_images::PayloadSpec;
use driftline_images::workload::{WorkingSetPlacement, ready_line};
use driftline_machine::actor::{self, Handle};
use driftline_machine::config::{Boot, HostConfig, MachineConfig};
use driftline_machine::devices::{
    BalloonControl, DiskFileControl, MachineCounts, RateLimitControl, SerialOutputThread,
    SerialWriter, open_serial_output,
};
use driftline_machine::machine::MachineError;
use driftline_machine::memory::{Memory, MemoryError};
use driftline_machine::sandbox::{self, Class};
use driftline_machine::tracking::TrackingMode;
use driftline_machine::vm::{EndReason, Timings, VcpuInfo, Vm, VmInfo};
use driftline_machine::wall_clock;
use parking_lot::{Mutex, MutexGuard};

use super::clock::GuestClock;
use super::end::GuestEnd;
use super::error::{HasRun, Lack, ThreadMachineError, WorkloadError};
use super::state::{self, SavedThreadWorker};
use super::worker::{GuestWorker, WorkerControl};
use crate::payload::place;

/// Limit for a worker's answer; a tick takes microseconds.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(10);

/// A guest whose vCPUs are host threads.
pub struct ThreadMachine {
    vm_id: VmId,
    config: MachineConfig,
    spec: PayloadSpec,
    placement: WorkingSetPlacement,
    pub(super) memory: Memory,
    clock: Arc<GuestClock>,
    serial: SerialWriter,
    end: Arc<GuestEnd>,
    created: Instant,
    /// Number of marked frames that `collect` has already reported.
    reported_frames: AtomicU64,
    control: Mutex<RunControl>,
    /// The last field, so that it is dropped last: it writes the guest's final output.
    _serial: SerialOutputThread,
}

/// The state that one transition at a time may change.
pub(super) struct RunControl {
    state: RunState,
    /// Whether the workload has neither run nor been restored.
    fresh: bool,
    workers: Vec<(Handle<WorkerControl>, JoinHandle<()>)>,
}

impl ThreadMachine {
    /// Builds a paused guest with zeroed memory.
    ///
    /// # Errors
    ///
    /// The configuration is unusable, or the host lacks memory, the serial sink or threads.
    pub fn new(
        vm_id: VmId,
        config: MachineConfig,
        host: &HostConfig,
    ) -> Result<Arc<Self>, GuestError> {
        Self::build(vm_id, config, host, |bytes| Memory::new(bytes, &host.memory))
    }

    /// Builds a paused guest on the memory of another one.
    ///
    /// # Errors
    ///
    /// As [`new`](Self::new), or `shared` is not the memory of such a guest.
    pub(crate) fn on(
        vm_id: VmId,
        config: MachineConfig,
        host: &HostConfig,
        shared: &SharedGuest,
    ) -> Result<Arc<Self>, GuestError> {
        Self::build(vm_id, config, host, |bytes| Memory::shared(bytes, &host.memory, shared))
    }

    fn build(
        vm_id: VmId,
        config: MachineConfig,
        host: &HostConfig,
        memory: impl FnOnce(u64) -> Result<Memory, MemoryError>,
    ) -> Result<Arc<Self>, GuestError> {
        config.check().map_err(|e| GuestError::malformed("the configuration", e))?;
        let spec = payload_spec(&config)?;
        let memory = memory(config.mem_bytes).map_err(MachineError::from)?;
        let placement = place(&spec, config.vcpus, memory.layout())
            .map_err(|e| WorkloadError::from(e).of(&config.boot))?;
        let (serial, serial_thread) = open_serial_output(&host.serial, host.serial_limit)
            .map_err(ThreadMachineError::from)?;
        let machine = Self {
            vm_id,
            spec,
            placement,
            memory,
            clock: Arc::new(GuestClock::new()),
            serial,
            _serial: serial_thread,
            end: Arc::default(),
            created: Instant::now(),
            reported_frames: AtomicU64::new(0),
            control: Mutex::new(RunControl {
                state: RunState::Paused,
                fresh: true,
                workers: Vec::new(),
            }),
            config,
        };
        machine.start_workers()?;
        Ok(Arc::new(machine))
    }

    fn start_workers(&self) -> Result<(), GuestError> {
        let mut control = self.control();
        for index in 0..self.vcpus() {
            let (handle, inbox) = actor::inbox(format!("worker {index}"));
            let worker = GuestWorker {
                index,
                vcpus: self.vcpus(),
                spec: self.spec.clone(),
                placement: self.placement,
                ram: self.memory.ram().clone(),
                clock: self.clock.clone(),
                serial: self.serial.clone(),
                end: self.end.clone(),
            };
            let name = format!("worker-{index}");
            let thread = sandbox::spawn(Class::Worker, name, move || worker.run(&inbox))
                .map_err(ThreadMachineError::from)?;
            control.workers.push((handle, thread));
        }
        Ok(())
    }

    fn vcpus(&self) -> u32 {
        u32::from(self.config.vcpus)
    }

    /// Locks the transitions. If the guest has ended by itself, the state in the guard is
    /// `Stopped`.
    fn control(&self) -> MutexGuard<'_, RunControl> {
        let mut control = self.control.lock();
        if self.end.reason().is_some() {
            control.state = RunState::Stopped;
        }
        control
    }

    pub(super) fn require_paused(
        &self,
        request: &'static str,
    ) -> Result<MutexGuard<'_, RunControl>, GuestError> {
        let control = self.control();
        match control.state {
            RunState::Paused => Ok(control),
            state => Err(GuestError::State { request, state }),
        }
    }
}

impl RunControl {
    /// Runs on every worker the job that `make` returns for it. Waits for all answers, in order.
    fn ask<T, J>(&self, what: &'static str, make: impl Fn(usize) -> J) -> Result<Vec<T>, GuestError>
    where
        T: Send + 'static,
        J: FnOnce(&mut WorkerControl) -> T + Send + 'static,
    {
        let deadline = Instant::now() + ANSWER_TIMEOUT;
        let workers = self.workers.iter().enumerate();
        let calls = workers.map(|(index, (worker, _))| worker.begin(what, deadline, make(index)));
        let calls: Vec<_> = calls.collect();
        calls.into_iter().map(|call| Ok(call.wait().map_err(ThreadMachineError::from)?)).collect()
    }

    fn run(&self) {
        // A worker that has ended is reported by the next request.
        self.workers.iter().for_each(|(worker, _)| _ = worker.tell(|worker| worker.runs = true));
    }
}

impl GuestIdentity for ThreadMachine {
    fn vm_id(&self) -> VmId {
        self.vm_id
    }

    fn line(&self) -> Line {
        self.config.identity.line
    }

    fn config(&self) -> Vec<u8> {
        self.config.encode()
    }

    fn layout(&self) -> &Layout {
        self.memory.layout()
    }
}

impl GuestContents for ThreadMachine {
    fn ram(&self) -> &GuestRam {
        self.memory.ram()
    }

    fn memory_right(&self) -> &MemoryRight {
        self.memory.right()
    }

    fn populated(&self) -> Result<Vec<FrameRun>, GuestError> {
        Ok(self.memory.resident()?)
    }

    fn resident(&self) -> Result<Vec<FrameRun>, GuestError> {
        self.populated()
    }

    fn fetch(&self, _: &[FrameRun]) -> Result<(), GuestError> {
        // No page is missing.
        Ok(())
    }

    fn write_protection(&self) -> Result<Option<Box<dyn WriteProtection>>, GuestError> {
        Ok(self.memory.write_protection()?)
    }

    fn drives(&self) -> Vec<Box<dyn GuestDrive>> {
        // This backend has no disks.
        Vec::new()
    }
}

impl Populate for ThreadMachine {
    fn prefault(&self, frames: FrameRun) {
        self.memory.prefault(frames);
    }

    fn memory_loader(&self) -> Option<Box<dyn MemoryLoader>> {
        if self.run_state() == RunState::Paused { self.memory.memory_loader() } else { None }
    }

    fn fetch_lazily(
        &self,
        source: Box<dyn PageSource>,
    ) -> Result<Option<Box<dyn PageSource>>, GuestError> {
        // Lazy restore is unsupported.
        Ok(Some(source))
    }

    fn fetching(&self) -> Option<LazyRestoreProgress> {
        None
    }
}

impl DirtyLog for ThreadMachine {
    fn subscribe(&self, name: &str) -> Result<Subscription, GuestError> {
        if self.config.tracking == TrackingMode::None {
            return Err(GuestError::NotTracked);
        }
        Ok(self.memory.tracker().subscribe(name)?)
    }

    fn collect(&self) -> Result<CollectionReport, GuestError> {
        let marked = self.memory.tracker().stats().marked_frames;
        let before = self.reported_frames.swap(marked, Ordering::Relaxed);
        Ok(CollectionReport {
            frames: marked.saturating_sub(before),
            ..CollectionReport::default()
        })
    }
}

impl WriteThrottle for ThreadMachine {
    fn vcpu_writes(&self) -> Vec<VcpuWrites> {
        // Writes are not counted per worker.
        Vec::new()
    }

    fn throttle(&self, _: Option<u64>) {
        // Writes are not counted per worker, so none writes more than others.
    }
}

impl Lifecycle for ThreadMachine {
    fn run_state(&self) -> RunState {
        self.control().state
    }

    fn pause(&self) -> Result<RunState, GuestError> {
        let mut control = self.control();
        match control.state {
            RunState::Stopped => {
                Err(GuestError::State { request: "pause", state: RunState::Stopped })
            }
            RunState::Paused => Ok(RunState::Paused),
            RunState::Running => {
                if let Err(e) =
                    control.ask("pause", |_| |worker: &mut WorkerControl| worker.runs = false)
                {
                    // The guest still counts as running, so the workers that have already paused
                    // run again.
                    control.run();
                    return Err(e);
                }
                control.state = RunState::Paused;
                Ok(RunState::Running)
            }
        }
    }

    fn pause_and_save(&self) -> Result<SavedPause, GuestError> {
        let since = Instant::now();
        let before = self.pause()?;
        Ok(SavedPause { before, since, saved: self.save_state() })
    }

    fn resume(&self) -> Result<(), GuestError> {
        let mut control = self.require_paused("resume")?;
        if std::mem::take(&mut control.fresh) {
            // A sink never fails: it drops and counts output that is not read.
            let _ = self.serial.clone().write_all(ready_line(&self.spec, self.vcpus()).as_bytes());
        }
        control.run();
        control.state = RunState::Running;
        Ok(())
    }

    fn stop(&self, why: &str) {
        self.end.set(EndReason::Stopped(why.to_owned()));
        let workers = std::mem::take(&mut self.control().workers);
        workers.iter().for_each(|(worker, _)| worker.end());
        for (_, thread) in workers {
            if thread.join().is_err() {
                tracing::error!(vm = %self.vm_id, "a worker had panicked");
            }
        }
    }

    fn vcpu_pauses(&self) -> Vec<VcpuPauses> {
        // Workers do not record their pauses.
        Vec::new()
    }
}

impl Stateful for ThreadMachine {
    fn save_state(&self) -> Result<Vec<Section>, GuestError> {
        let control = self.require_paused("save the state of")?;
        let workers =
            control.ask("give its state", |_| |worker: &mut WorkerControl| worker.state.clone())?;
        let (guest_ns, wall_ns) = (self.clock.now_ns(), wall_clock::wall_ns());
        let saved =
            workers.into_iter().map(|worker| SavedThreadWorker { guest_ns, wall_ns, worker });
        saved.enumerate().map(|(index, saved)| state::encode(index, &saved)).collect()
    }

    fn restore_state(&self, sections: &[Section], clock: Clock) -> Result<(), GuestError> {
        let mut control = self.require_paused("restore")?;
        if !control.fresh {
            return Err(GuestError::unsupported("a state", HasRun));
        }
        let saved = state::decode(sections, &self.spec, self.vcpus())?;
        if let Some(first) = saved.first() {
            let away_ns = wall_clock::advance_ns(clock, first.wall_ns, wall_clock::wall_ns());
            self.clock.set(first.guest_ns.saturating_add(away_ns));
        }
        control.fresh = saved.iter().all(|s| s.worker.runner.is_none());
        control.ask("take its state", |index| {
            let state = saved[index].worker.clone();
            move |worker: &mut WorkerControl| worker.state = state
        })?;
        Ok(())
    }

    fn state_heads(&self) -> Vec<SectionHead> {
        // Known only in a pause.
        Vec::new()
    }

    fn check_state_heads(&self, _: &[SectionHead]) -> Result<(), GuestError> {
        // `restore_state` refuses what it does not know.
        Ok(())
    }
}

impl Drop for ThreadMachine {
    fn drop(&mut self) {
        self.stop("the VMM dropped it");
    }
}

impl Vm for ThreadMachine {
    fn machine_config(&self) -> &MachineConfig {
        &self.config
    }

    fn info(&self) -> VmInfo {
        VmInfo {
            vm_id: self.vm_id,
            name: self.config.identity.name.clone(),
            lineage: self.config.identity.lineage,
            state: self.run_state(),
            vcpus: self.config.vcpus,
            mem_bytes: self.config.mem_bytes,
            tracking: self.config.tracking,
            backend: self.config.backend,
            uptime_ms: u64::try_from(self.created.elapsed().as_millis()).unwrap_or(u64::MAX),
            ring_overruns: 0,
            vcpu: vec![VcpuInfo::default(); usize::from(self.config.vcpus)],
            dirty: self.memory.tracker().stats(),
            devices: Vec::new(),
        }
    }

    fn send_nmi(&self) -> Result<(), GuestError> {
        Err(GuestError::unsupported("an NMI", Lack::Interrupts))
    }

    fn press_ctrl_alt_del(&self) -> Result<(), GuestError> {
        Err(GuestError::unsupported("Ctrl-Alt-Del", Lack::Keyboard))
    }

    fn timings(&self) -> Timings {
        Timings { collections: None, restore: self.memory.restore_figures() }
    }

    fn rate_limits(&self) -> &[RateLimitControl] {
        &[]
    }

    fn disk_files(&self) -> &[DiskFileControl] {
        &[]
    }

    fn counts(&self) -> MachineCounts {
        MachineCounts::default()
    }

    fn balloon(&self) -> Option<&BalloonControl> {
        None
    }

    fn wait_end(&self, timeout: Option<Duration>) -> Option<EndReason> {
        self.end.wait(timeout)
    }
}

/// Returns the workers' workload. Only the payload runs on threads.
fn payload_spec(config: &MachineConfig) -> Result<PayloadSpec, GuestError> {
    let spec = match &config.boot {
        Boot::Payload(spec) => spec.parse::<PayloadSpec>().map_err(WorkloadError::from),
        Boot::Kernel { .. } => Err(WorkloadError::Kernel),
    };
    let spec = spec.and_then(|spec| match spec.io_ms {
        Some(_) => Err(WorkloadError::Devices),
        None => Ok(spec),
    });
    spec.map_err(|e| e.of(&config.boot))
}

#[cfg(test)]
mod tests;
