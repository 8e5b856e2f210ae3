//! The KVM machine: assembles the parts and implements [`Guest`](driftline_guest::Guest) and [`Vm`]
//! for them.
//!
//! ```text
//! API, jobs ----> supervisor ----> vCPU threads                   pause, save, restore, end
//!          \----> collector <----- vCPU threads: ring full        which vCPU dirtied what
//!                 collector -----> vCPU threads: stall            which vCPU to throttle
//! supervisor ----> device threads                                 quiesce, save, restore, locks
//! vCPU threads --registers--> device threads
//! vCPU threads --bytes--> serial thread --> the sink
//! ```
//!
//! Each arrow is an [`actor`](crate::actor)'s inbox. The supervisor waits for vCPUs and devices,
//! each with a time limit. A vCPU waits for the collector, and for a device whose register it has
//! written; it runs the jobs in its inbox while it waits. A device waits for the `opener` thread,
//! with a time limit. The collector and the opener wait for no thread of the machine. Therefore
//! nothing here can deadlock: after the time limit a request that meets a stuck backend fails with
//! the device's name. The same holds for the next request and for the guest's end.

mod build;
mod dirty_tracking;
mod early;
mod error;
mod factory;
#[cfg(test)]
mod failed_builds;
#[cfg(any(test, fuzzing))]
pub(crate) mod fuzz;
#[cfg(test)]
pub(crate) mod golden;
mod hand_over;
mod host_lack;
mod later_state;
#[cfg(test)]
mod lazy_restore_tests;
mod measured;
mod request_error;
mod spread;
mod state;
mod status;
mod supervisor;
#[cfg(test)]
mod tests;
mod threads;
mod vcpus;

use std::borrow::Cow;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use driftline_dirty_tracker::{FrameRun, FrameSet, Layout, Subscription};
use driftline_guest::{
    Clock, CollectionReport, DirtyLog, GuestContents, GuestDrive, GuestError, GuestIdentity,
    GuestRam, LazyRestoreProgress, Lifecycle, Line, MemoryLoader, MemoryRight, PageSource,
    Populate, RunState, SavedPause, SavedState, Section, SectionHead, Stateful, VcpuPauses,
    VcpuWrites, VmId, WriteProtection, WriteThrottle,
};

use crate::actor::Handle;
use crate::collector::Collector;
use crate::config::{MachineConfig, disks_mut};
use crate::devices::{
    BalloonControl, DiskFileControl, Drive, DriveSource, MachineCounters, MachineCounts,
    RateLimitControl, SerialInput, SerialOutputThread, StatsHandle,
};
use crate::exit;
use crate::memory::{self, Memory};
use crate::tracking::TrackingMode;
use crate::vcpu::Counters;
use crate::vm::{EndReason, Timings, Vm, VmInfo};

pub use crate::vcpu::TemplateLack;
pub use build::{BeforeDevices, BuildOptions, FirstContents, command_line};
pub use early::EarlyVm;
pub use error::MachineError;
pub use factory::MachineFactory;
pub use host_lack::HostLack;
use request_error::SupervisorError;
pub(crate) use state::registers;
use status::MachineStatus;
use supervisor::{EndReporter, Supervisor};

/// Limit on waiting for the supervisor. It is longer than the limits of all that one request waits
/// for, so only a defect takes this long.
const ANSWER_LIMIT: Duration = Duration::from_secs(300);
/// Limit on waiting for the guest's free-page hints before all memory is copied.
const HINTS_LIMIT: Duration = Duration::from_secs(1);

/// A KVM virtual machine. Dropping it ends the guest and joins all the guest's threads.
#[derive(Debug)]
pub struct KvmMachine {
    vm_id: VmId,
    config: MachineConfig,
    memory: Arc<Memory>,
    drives: Vec<Drive>,
    sources: Vec<DriveSource>,
    stats_handles: Vec<StatsHandle>,
    rate_limits: Vec<RateLimitControl>,
    disk_files: Vec<DiskFileControl>,
    device_counters: MachineCounters,
    balloon: Option<BalloonControl>,
    /// Whether another process of this host has handed over the devices' files.
    has_handed_over_files: bool,
    status: Arc<MachineStatus>,
    counters: Vec<Arc<Counters>>,
    started: Instant,
    supervisor: Handle<Supervisor>,
    supervisor_thread: Option<JoinHandle<()>>,
    /// Dropped after the supervisor: vCPUs may wait for the collector until they have ended.
    collector: Option<Collector>,
    #[cfg(test)]
    bus: Arc<crate::devices::Bus>,
    /// Restores the terminal on drop.
    input: Option<SerialInput>,
    /// The last field, so that it is dropped last: it writes the guest's final output.
    serial: SerialOutputThread,
}

impl KvmMachine {
    /// Has the supervisor run `job`. `what` describes it in errors, as a verb and its object.
    fn ask<T: Send + 'static>(
        &self,
        what: &'static str,
        job: impl FnOnce(&mut Supervisor) -> Result<T, SupervisorError> + Send + 'static,
    ) -> Result<T, GuestError> {
        let answer = self.supervisor.call(what, Instant::now() + ANSWER_LIMIT, job);
        let what = "asking the supervisor";
        Ok(answer.map_err(|cause| SupervisorError::Call { what, cause })??)
    }

    /// Behaves like [`restore_state`](Stateful::restore_state), for one of several guests that may
    /// be restored from one state: the guest gets a new generation ID whatever `clock` is.
    ///
    /// # Errors
    ///
    /// As [`restore_state`](Stateful::restore_state).
    pub fn restore_clone(&self, sections: &[Section], clock: Clock) -> Result<(), GuestError> {
        self.restore(sections, clock, true)
    }

    fn restore(&self, sections: &[Section], clock: Clock, renews: bool) -> Result<(), GuestError> {
        let saved = state::decode(sections, self.config.vcpus, self.config.devices.len())?;
        self.ask("restore the guest's state", move |supervisor| {
            supervisor.restore(saved, clock, renews)
        })
    }

    fn collector(&self) -> Result<&Collector, GuestError> {
        self.collector.as_ref().ok_or(GuestError::NotTracked)
    }

    /// Returns the configuration with the files that the disks have now.
    fn current_config(&self) -> Cow<'_, MachineConfig> {
        let mut config = Cow::Borrowed(&self.config);
        for disk in self.disk_files.iter().filter_map(DiskFileControl::exchanged_config) {
            let devices = &mut config.to_mut().devices;
            let same = disks_mut(devices).find(|other| other.id == disk.id);
            same.into_iter().for_each(|same| *same = disk.clone());
        }
        config
    }

    /// Returns the owner that ends the guest if a frame of its memory is lost.
    fn memory_owner(&self) -> MachineRestoreOwner {
        let (status, supervisor) = (self.status.clone(), self.supervisor.clone());
        MachineRestoreOwner { end: EndReporter { status, supervisor } }
    }

    /// Returns the frames whose content the guest declares useless.
    fn free_frames(&self) -> FrameSet {
        // A paused guest cannot send hints.
        let balloon = self.balloon.as_ref().filter(|_| self.run_state() == RunState::Running);
        balloon.map(|b| b.free_frames(HINTS_LIMIT)).unwrap_or_default()
    }
}

impl GuestIdentity for KvmMachine {
    fn vm_id(&self) -> VmId {
        self.vm_id
    }

    fn line(&self) -> Line {
        self.config.identity.line
    }

    fn config(&self) -> Vec<u8> {
        self.current_config().encode()
    }

    fn layout(&self) -> &Layout {
        self.memory.layout()
    }
}

impl GuestContents for KvmMachine {
    fn ram(&self) -> &GuestRam {
        self.memory.ram()
    }

    fn memory_right(&self) -> &MemoryRight {
        self.memory.right()
    }

    fn populated(&self) -> Result<Vec<FrameRun>, GuestError> {
        let free = self.free_frames();
        let populated = self.resident()?;
        if free.is_empty() {
            return Ok(populated);
        }
        tracing::debug!(frames = free.frames(), "the guest hints free frames");
        Ok(populated.into_iter().flat_map(|run| free.gaps(run)).collect())
    }

    fn resident(&self) -> Result<Vec<FrameRun>, GuestError> {
        Ok(self.memory.resident()?)
    }

    fn fetch(&self, frames: &[FrameRun]) -> Result<(), GuestError> {
        Ok(self.memory.fetch(frames)?)
    }

    fn write_protection(&self) -> Result<Option<Box<dyn WriteProtection>>, GuestError> {
        if self.config.tracking == TrackingMode::UserfaultWp {
            tracing::info!(
                "no write protection: --tracking userfault-wp uses the one userfaultfd of this \
                 memory; changed frames are copied in the pause"
            );
            return Ok(None);
        }
        Ok(self.memory.write_protection()?)
    }

    fn drives(&self) -> Vec<Box<dyn GuestDrive>> {
        self.sources.iter().map(|drive| Box::new(drive.clone()) as Box<dyn GuestDrive>).collect()
    }
}

impl Populate for KvmMachine {
    fn prefault(&self, frames: FrameRun) {
        self.memory.prefault(frames);
    }

    fn memory_loader(&self) -> Option<Box<dyn MemoryLoader>> {
        // Dirty tracking holds the only userfaultfd descriptor that a memory may have.
        let is_tracked = self.config.tracking == TrackingMode::UserfaultWp;
        let is_paused = self.run_state() == RunState::Paused;
        if is_paused && !is_tracked { self.memory.memory_loader() } else { None }
    }

    fn fetch_lazily(
        &self,
        source: Box<dyn PageSource>,
    ) -> Result<Option<Box<dyn PageSource>>, GuestError> {
        if self.config.tracking == TrackingMode::UserfaultWp {
            tracing::info!(
                "no lazy restore: --tracking userfault-wp uses the one userfaultfd of this \
                 memory; all pages are read first"
            );
            return Ok(Some(source));
        }
        Ok(self.memory.fetch_lazily(source, Box::new(self.memory_owner()))?)
    }

    fn fetching(&self) -> Option<LazyRestoreProgress> {
        self.memory.fetching()
    }
}

impl DirtyLog for KvmMachine {
    fn subscribe(&self, name: &str) -> Result<Subscription, GuestError> {
        Ok(self.collector()?.subscribe(name)?)
    }

    fn collect(&self) -> Result<CollectionReport, GuestError> {
        Ok(self.collector()?.collect()?)
    }
}

impl WriteThrottle for KvmMachine {
    fn vcpu_writes(&self) -> Vec<VcpuWrites> {
        let Some(collector) = &self.collector else { return Vec::new() };
        let both = collector.dirtied().zip(&self.counters);
        both.map(|(dirtied_frames, c)| VcpuWrites {
            dirtied_frames,
            throttled: c.throttled.stalled(),
        })
        .collect()
    }

    fn throttle(&self, frames_per_s: Option<u64>) {
        if let Some(collector) = &self.collector {
            collector.throttle(frames_per_s);
        }
    }
}

impl Lifecycle for KvmMachine {
    fn run_state(&self) -> RunState {
        self.status.state()
    }

    fn pause(&self) -> Result<RunState, GuestError> {
        self.ask("pause the guest", |supervisor| supervisor.pause().map(|(before, _)| before))
    }

    fn pause_and_save(&self) -> Result<SavedPause, GuestError> {
        let paused = self.ask("pause the guest", Supervisor::pause_and_save)?;
        let (before, since, saved) = paused;
        Ok(SavedPause { before, since, saved: saved.map_err(GuestError::from) })
    }

    fn resume(&self) -> Result<(), GuestError> {
        self.ask("resume the guest", Supervisor::resume)?;
        // Input starts only after the resume: an earlier start would delay a hand-over.
        self.input.iter().for_each(SerialInput::begin);
        Ok(())
    }

    fn stop(&self, why: &str) {
        let why = EndReason::Stopped(why.to_owned());
        let stop = |supervisor: &mut Supervisor| {
            supervisor.end(why);
            Ok(())
        };
        // If the supervisor has ended, so has the guest.
        if let Err(e) = self.ask("stop the guest", stop) {
            tracing::debug!("{e}");
        }
    }

    fn vcpu_pauses(&self) -> Vec<VcpuPauses> {
        self.counters.iter().map(|c| c.pauses()).collect()
    }
}

impl Stateful for KvmMachine {
    fn save_state(&self) -> SavedState {
        self.ask("save the guest's state", |supervisor| supervisor.save())
    }

    fn restore_state(&self, sections: &[Section], clock: Clock) -> Result<(), GuestError> {
        // A migrated guest keeps its identity, and is the only one that is restored from its state.
        let renews_generation_id = match clock {
            Clock::Advance => false,
            Clock::AdvanceAnyTime | Clock::Continue => true,
        };
        self.restore(sections, clock, renews_generation_id)
    }

    fn state_heads(&self) -> Vec<SectionHead> {
        let (vcpus, devices) = (self.config.vcpus, self.config.devices.len());
        let heads = move |supervisor: &mut Supervisor| Ok(supervisor.state_heads(vcpus, devices));
        let heads = self.ask("describe the guest's state", heads);
        heads.inspect_err(|e| tracing::debug!("{e}")).unwrap_or_default()
    }

    fn check_state_heads(&self, heads: &[SectionHead]) -> Result<(), GuestError> {
        state::check_heads(heads, self.config.vcpus, self.config.devices.len())
    }
}

/// Ends the guest if a frame of its memory is lost.
struct MachineRestoreOwner {
    end: EndReporter,
}

impl memory::RestoreOwner for MachineRestoreOwner {
    fn lost(&self, why: String) {
        let why = format!("its memory cannot be restored: {why}");
        self.end.status.set_lost(&why);
        exit::lost_memory(&why);
        self.end.report(EndReason::Crashed(why));
    }

    fn has_ended(&self) -> bool {
        self.end.status.state() == RunState::Stopped
    }

    fn restores_vcpus(&self) -> bool {
        self.end.status.restores_vcpus()
    }

    fn runs(&self) -> bool {
        self.end.status.state() == RunState::Running
    }
}

impl Vm for KvmMachine {
    fn machine_config(&self) -> &MachineConfig {
        &self.config
    }

    fn info(&self) -> VmInfo {
        let mut vcpu: Vec<_> = self.counters.iter().map(|c| c.read()).collect();
        for (vcpu, peak) in vcpu.iter_mut().zip(self.collector.iter().flat_map(|c| c.peaks())) {
            vcpu.ring_peak_entries = Some(peak);
        }
        VmInfo {
            vm_id: self.vm_id,
            name: self.config.identity.name.clone(),
            lineage: self.config.identity.lineage,
            state: self.run_state(),
            vcpus: self.config.vcpus,
            mem_bytes: self.config.mem_bytes,
            tracking: self.config.tracking,
            backend: self.config.backend,
            uptime_ms: u64::try_from(self.started.elapsed().as_millis()).unwrap_or(u64::MAX),
            ring_overruns: self.collector.as_ref().map_or(0, Collector::overruns),
            vcpu,
            dirty: self.memory.tracker().stats(),
            devices: self.stats_handles.iter().map(StatsHandle::read).collect(),
        }
    }

    fn send_nmi(&self) -> Result<(), GuestError> {
        self.ask("send an NMI", |supervisor| supervisor.send_nmi())
    }

    fn press_ctrl_alt_del(&self) -> Result<(), GuestError> {
        self.ask("press Ctrl-Alt-Del", |supervisor| supervisor.press_ctrl_alt_del())
    }

    fn timings(&self) -> Timings {
        Timings {
            collections: self.collector.as_ref().map(Collector::times),
            restore: self.memory.restore_figures(),
        }
    }

    fn rate_limits(&self) -> &[RateLimitControl] {
        &self.rate_limits
    }

    fn disk_files(&self) -> &[DiskFileControl] {
        &self.disk_files
    }

    fn counts(&self) -> MachineCounts {
        let of = |limits: &RateLimitControl| (limits.device().to_owned(), limits.throttles());
        let throttles = self.rate_limits.iter().map(of).collect();
        MachineCounts { throttles, ..self.device_counters.read() }
    }

    fn balloon(&self) -> Option<&BalloonControl> {
        self.balloon.as_ref()
    }

    fn wait_end(&self, timeout: Option<Duration>) -> Option<EndReason> {
        self.status.wait_end(timeout)
    }
}

impl Drop for KvmMachine {
    fn drop(&mut self) {
        self.supervisor.end();
        if let Some(thread) = self.supervisor_thread.take() {
            let _ = thread.join();
        }
    }
}
