//! vCPUs: one thread each. The thread owns the vCPU's file descriptor and runs other threads' jobs.
//!
//! ```text
//!          resume                 the guest ends
//! Paused ---------> Running --------------------> Finished
//!        <---------         (power-off, crash)
//!          pause, after a kick
//! ```
//!
//! A vCPU that pauses first completes the current instruction. An instruction whose port or device
//! access caused an exit from `KVM_RUN` is half done until the next `KVM_RUN`. If the state were
//! saved before that, the instruction would be lost or done twice.
//!
//! A running vCPU may be throttled (see `throttle`): the collector stalls it for a limited time.

pub mod baseline;
mod control;
pub mod cpu_compat;
pub mod cpuid;
mod error;
mod lack;
mod leaves;
pub mod msrs;
mod reset;
mod state;
mod state_context;
pub mod template;
mod throttle_handle;
pub mod tsc;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use driftline_dirty_tracker::ring::RingFull;
use driftline_guest::VcpuPauses;
use kvm_bindings::{CpuId, KVM_CAP_KVMCLOCK_CTRL, KVM_EXIT_DIRTY_RING_FULL};
use kvm_ioctls::{VcpuExit, VcpuFd};

use crate::actor::{Handle, Inbox, Next};
use crate::devices::{Bus, Completion};
use crate::end_reason::EndReason;
use crate::kvm::{ImmediateExit, KvmVm, internal_error};
use crate::throttle::{StallMeter, ThrottleState};
use crate::vm::VcpuInfo;

pub use error::VcpuError;
pub use lack::ProcessorLack;
pub(crate) use state::CoreRegisters;
pub use state::{Adjust, SavedVcpu};
pub use state_context::StateContext;
pub use template::TemplateLack;
pub(crate) use throttle_handle::ThrottleHandle;

/// Pauses at least this long are reported to the guest. Guests' watchdogs wait much longer than
/// this: Linux's for soft lockups waits 20 s by default.
const LONG_PAUSE: Duration = Duration::from_secs(1);

/// The result of a pause.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum PauseOutcome {
    /// The vCPU can resume.
    Paused,
    /// The guest has ended.
    Finished,
}

/// The rest of the machine, as a vCPU reports to it.
pub(crate) trait Peers: Send {
    /// Reports that the guest has ended.
    fn ended(&self, why: EndReason);

    /// Reports that vCPU `id` cannot continue before the rings are harvested; it waits for any job
    /// on `vcpu`. Returns whether a collector exists to harvest them.
    fn ring_full(&self, id: u8, vcpu: Handle<Vcpu>) -> bool;

    /// Reports that vCPU `id`, after `stalls` stalls, has run for its slice; it waits for
    /// `begin_stall` or `end_stall`. Returns whether a collector exists to answer.
    fn slice_over(&self, id: u8, stalls: u64) -> bool;
}

/// A vCPU's counters. Any thread may read them.
#[derive(Debug, Default)]
pub(crate) struct Counters {
    exits: AtomicU64,
    ring_full_exits: AtomicU64,
    /// Time spent waiting after ring-full exits, in nanoseconds.
    ring_full_ns: AtomicU64,
    /// Number and total duration of its stalls.
    pub(crate) throttled: StallMeter,
    /// Number of completed pauses.
    pauses: AtomicU64,
    /// Duration of the last of them, in nanoseconds.
    paused_ns: AtomicU64,
    /// Time of the last resume, in microseconds of Unix time; 0 if the vCPU has never run.
    resumed_us: AtomicU64,
}

impl Counters {
    pub(crate) fn read(&self) -> VcpuInfo {
        VcpuInfo {
            exits: self.exits.load(Ordering::Relaxed),
            ring_full_exits: self.ring_full_exits.load(Ordering::Relaxed),
            throttled_ms: u64::try_from(self.throttled.stalled().as_millis()).unwrap_or(u64::MAX),
            ring_peak_entries: None,
        }
    }

    /// Returns how long the vCPU has waited for room in its dirty ring.
    pub(crate) fn ring_full_time(&self) -> Duration {
        Duration::from_nanos(self.ring_full_ns.load(Ordering::Relaxed))
    }

    /// Returns the completed pauses.
    pub(crate) fn pauses(&self) -> VcpuPauses {
        // Pairs with the release in `count_pause`: `last` is at least as new as `pauses`.
        let pauses = self.pauses.load(Ordering::Acquire);
        let resumed_us = Some(self.resumed_us.load(Ordering::Relaxed)).filter(|us| *us != 0);
        VcpuPauses {
            pauses,
            last: Duration::from_nanos(self.paused_ns.load(Ordering::Relaxed)),
            resumed: resumed_us.map(|us| UNIX_EPOCH + Duration::from_micros(us)),
        }
    }

    /// Counts a completed pause.
    fn count_pause(&self, took: Duration) {
        let ns = u64::try_from(took.as_nanos()).unwrap_or(u64::MAX);
        self.paused_ns.store(ns, Ordering::Relaxed);
        self.pauses.fetch_add(1, Ordering::Release);
    }

    /// Records that the vCPU enters the guest again. The thread that has requested it may learn of
    /// it later, because the guest may have its processor.
    fn count_resume(&self) {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let us = u64::try_from(now.as_micros()).unwrap_or(u64::MAX);
        self.resumed_us.store(us, Ordering::Relaxed);
    }
}

/// The state that a vCPU thread owns.
pub(crate) struct Vcpu {
    pub(crate) id: u8,
    pub(crate) fd: VcpuFd,
    /// The CPUID table that the vCPU was given. KVM's own copy has bits that follow the guest.
    pub(crate) cpuid: CpuId,
    /// Frequency of its time stamp counter in kHz, if KVM reports it. Read once, because each read
    /// takes ten microseconds of a pause.
    pub(crate) tsc_khz: Option<u32>,
    pub(crate) immediate_exit: Arc<ImmediateExit>,
    pub(crate) bus: Arc<Bus>,
    pub(crate) counters: Arc<Counters>,
    /// Counter of ring-full exits; `None` in modes without rings.
    pub(crate) ring_full: Option<RingFull>,
    pub(crate) context: Arc<StateContext>,
    pub(crate) inbox: Inbox<Self>,
    /// The handle without a kick, for jobs for which the vCPU waits.
    pub(crate) handle: Handle<Self>,
    pub(crate) peers: Box<dyn Peers>,
    pub(crate) state: VcpuState,
    /// Number of the guest's writes that devices are still working on. The vCPU continues when it
    /// is 0.
    pub(crate) awaited: usize,
    /// The current stall or slice.
    pub(crate) throttle: ThrottleState,
    /// Whether no state has been restored into the vCPU yet: many registers have reset values.
    pub(crate) reset: bool,
    /// Whether the vCPU may be in the middle of an instruction.
    pub(crate) midway: bool,
    /// Time of the pause, if the vCPU ran before.
    pub(crate) paused_since: Option<Instant>,
    /// Keeps guest memory mapped while the vCPU may write to it.
    pub(crate) _vm: Arc<KvmVm>,
}

/// Whether a vCPU runs.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) enum VcpuState {
    /// The vCPU can resume.
    #[default]
    Paused,
    /// The vCPU enters the guest, unless it is stalled or waits for a device.
    Running,
    /// The guest has ended.
    Finished,
    /// The thread ends.
    Ended,
}

/// The consequence of one exit.
enum AfterExit {
    Run,
    Interrupted,
    RingFull,
    End(EndReason),
}

impl Vcpu {
    /// Runs the thread's main loop, until the handle ends it.
    pub(crate) fn run_thread(mut self) {
        self.immediate_exit.listen();
        while self.state != VcpuState::Ended {
            match self.state {
                VcpuState::Running => self.run(),
                _ => {
                    let next = self.inbox.recv();
                    self.handle_next(next);
                }
            }
        }
    }

    /// Resumes the guest, if it is paused.
    pub(crate) fn resume(&mut self) {
        if self.state == VcpuState::Paused {
            self.report_gap();
            self.counters.count_resume();
            self.state = VcpuState::Running;
        }
    }

    /// Pauses the guest between two instructions. The caller must kick the vCPU.
    pub(crate) fn pause(&mut self) -> PauseOutcome {
        if self.state == VcpuState::Running {
            self.throttle.end(&self.counters.throttled);
            self.state = VcpuState::Paused;
            if let Some(why) = self.complete() {
                self.end(why);
            }
        }
        if self.state == VcpuState::Finished {
            PauseOutcome::Finished
        } else {
            PauseOutcome::Paused
        }
    }

    /// Stalls the vCPU, which makes frames dirty too fast, until `until`, then lets it run for
    /// `slice` and report. The caller must kick the vCPU.
    pub(crate) fn begin_stall(&mut self, until: Instant, slice: Duration) {
        match self.state {
            VcpuState::Running => self.throttle.begin(until, slice, &self.counters.throttled),
            // The vCPU is not entering the guest.
            _ => self.counters.throttled.skip(),
        }
    }

    /// Ends the stall, if there is one, so that the vCPU enters the guest immediately. The caller
    /// must kick the vCPU.
    pub(crate) fn end_stall(&mut self) {
        self.throttle.end(&self.counters.throttled);
    }

    /// Counts a completed pause. After a long one, reports through kvmclock to the guest's
    /// watchdogs that it was not a lock-up.
    fn report_gap(&mut self) {
        let paused = self.paused_since.take().map(|since| since.elapsed());
        paused.into_iter().for_each(|paused| self.counters.count_pause(paused));
        if paused.is_some_and(|paused| paused >= LONG_PAUSE)
            && self.context.has(KVM_CAP_KVMCLOCK_CTRL)
        {
            // Fails for a guest without kvmclock, whose watchdogs have no such report.
            let _ = self.fd.kvmclock_ctrl();
        }
    }

    /// Runs the guest until a job stops it or it ends.
    fn run(&mut self) {
        while self.state == VcpuState::Running {
            if self.throttle.slice_is_over() {
                match self.peers.slice_over(self.id, self.counters.throttled.stalls()) {
                    true => self.throttle.wait(&self.counters.throttled),
                    false => self.throttle.end(&self.counters.throttled),
                }
            }
            let next = match self.awaited {
                0 => self.throttle.next(&self.inbox, &self.counters.throttled),
                _ => self.inbox.recv(),
            };
            // All jobs run first: several kicks may cause only one exit.
            if !matches!(next, Next::Nothing) {
                self.handle_next(next);
                continue;
            }
            if self.awaited > 0 || self.throttle.is_stalled() {
                continue;
            }
            match self.step() {
                AfterExit::Run => {}
                // Cleared before the inbox is read: see kvm/kick.
                AfterExit::Interrupted => self.immediate_exit.clear(),
                AfterExit::RingFull => self.wait_for_drain(),
                AfterExit::End(why) => self.end(why),
            }
        }
    }

    fn handle_next(&mut self, next: Next<Self>) {
        match next {
            Next::Job(job) => job(self),
            Next::Nothing => {}
            Next::End => self.state = VcpuState::Ended,
        }
    }

    /// Handles a ring-full exit: the guest cannot continue before the collector has harvested the
    /// rings. The vCPU still runs jobs meanwhile, and a pause does not need the collector.
    fn wait_for_drain(&mut self) {
        self.counters.ring_full_exits.fetch_add(1, Ordering::Relaxed);
        if let Some(full) = &self.ring_full {
            full.report();
        }
        if !self.peers.ring_full(self.id, self.handle.clone()) {
            return self.end(EndReason::Crashed(format!(
                "vCPU {} filled its dirty ring, and nothing harvests it",
                self.id
            )));
        }
        let began = Instant::now();
        let next = self.inbox.recv();
        let waited = u64::try_from(began.elapsed().as_nanos()).unwrap_or(u64::MAX);
        self.counters.ring_full_ns.fetch_add(waited, Ordering::Relaxed);
        self.handle_next(next);
    }

    /// Records that a device has finished the work that a write of the guest started.
    fn device_done(&mut self) {
        self.awaited = self.awaited.saturating_sub(1);
    }

    fn end(&mut self, why: EndReason) {
        // Stops the timer.
        self.throttle.end(&self.counters.throttled);
        self.peers.ended(why);
        self.state = VcpuState::Finished;
    }

    /// Finishes an instruction that left `KVM_RUN` half done, without running another.
    fn complete(&mut self) -> Option<EndReason> {
        self.immediate_exit.set();
        let ended = loop {
            // An unnecessary `KVM_RUN` takes ten microseconds of a pause.
            if !self.midway {
                break None;
            }
            match self.step() {
                // A string instruction may exit again for its next part.
                AfterExit::Run => {}
                AfterExit::Interrupted | AfterExit::RingFull => break None,
                AfterExit::End(why) => break Some(why),
            }
        };
        self.immediate_exit.clear();
        self.paused_since = Some(Instant::now());
        ended
    }

    /// Enters the guest once and handles the exit.
    fn step(&mut self) -> AfterExit {
        self.counters.exits.fetch_add(1, Ordering::Relaxed);
        let id = self.id;
        let crashed = |why: String| AfterExit::End(EndReason::Crashed(format!("vCPU {id}: {why}")));
        let run = self.fd.run();
        // An interrupted KVM_RUN has completed what the previous exit had begun, and has begun
        // nothing since.
        self.midway = run.as_ref().err().is_none_or(|e| e.errno() != libc::EINTR);
        match run {
            Ok(VcpuExit::IoOut(port, data)) => {
                let width = self.immediate_exit.port_width();
                self.bus.write(port, width, data).map_or(AfterExit::Run, AfterExit::End)
            }
            Ok(VcpuExit::IoIn(port, data)) => {
                self.bus.read(port, self.immediate_exit.port_width(), data);
                AfterExit::Run
            }
            Ok(VcpuExit::MmioRead(addr, data)) => {
                self.bus.read_mmio(addr, data);
                AfterExit::Run
            }
            Ok(VcpuExit::MmioWrite(addr, data)) => {
                let done = || {
                    let vcpu = self.handle.clone();
                    // A vCPU that has ended does not wait.
                    Completion::new(move || _ = vcpu.tell(Self::device_done))
                };
                if self.bus.write_mmio(addr, data, done) {
                    self.awaited += 1;
                }
                AfterExit::Run
            }
            Ok(VcpuExit::IoapicEoi(_)) => AfterExit::Run,
            Ok(VcpuExit::Intr | VcpuExit::IrqWindowOpen) => AfterExit::Interrupted,
            // KVM handles HLT itself as long as it has the interrupt controllers.
            Ok(VcpuExit::Hlt) => AfterExit::Run,
            Ok(VcpuExit::Unsupported(KVM_EXIT_DIRTY_RING_FULL)) => AfterExit::RingFull,
            Ok(VcpuExit::InternalError) => {
                let why = internal_error(&mut self.fd);
                let rip = self.fd.get_regs().map(|r| format!(" at RIP {:#x}", r.rip));
                crashed(why + &rip.unwrap_or_default())
            }
            Ok(exit) => crashed(why_crashed(&exit)),
            Err(e) => match e.errno() {
                libc::EINTR | libc::EAGAIN => AfterExit::Interrupted,
                _ => crashed(format!("KVM_RUN failed: {e}")),
            },
        }
    }
}

/// Returns why the guest has crashed, given an exit after which it cannot continue.
fn why_crashed(exit: &VcpuExit<'_>) -> String {
    match exit {
        // This VMM cannot distinguish a guest that resets itself this way from one that crashed.
        VcpuExit::Shutdown => "triple fault".to_owned(),
        VcpuExit::FailEntry(reason, cpu) => {
            format!("the processor refused to enter the guest, reason {reason:#x} on CPU {cpu}")
        }
        VcpuExit::MemoryFault { gpa, .. } => {
            format!("its memory at guest address {gpa:#x} cannot be reached")
        }
        other => format!("unexpected exit {other:?}"),
    }
}

impl Drop for Vcpu {
    fn drop(&mut self) {
        self.immediate_exit.stop_listening();
        self.throttle.end(&self.counters.throttled);
        if std::thread::panicking() {
            let why = format!("vCPU {}: its thread has panicked, a defect of the VMM", self.id);
            self.peers.ended(EndReason::Crashed(why));
        }
    }
}
