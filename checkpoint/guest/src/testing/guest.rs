//! The guest itself.

mod hand_over;
mod observe;
mod state;

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::SeqCst};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use driftline_dirty_tracker::{FrameRun, Gfn, Layout, Subscription, Tracker};
use parking_lot::Mutex;
use vm_memory::{Bytes, GuestAddress};

use super::config::MemoryConfig;
use super::drives::{TestDisk, TestDiskHandle};
use super::faults::{ExclusiveDrive, Faults, Op};
use super::memory::{TestGuestMemory, system};
use super::memory_loader::TestMemoryLoader;
use super::pages::PageSweep;
use super::write_protection::{FrameProtectionState, SoftwareWriteProtection};
use super::writers::{PageWriter, WriterGate};
use crate::blocks::PAGE_BYTES;
use crate::collection_report::CollectionReport;
use crate::contents::{GuestContents, GuestRam};
use crate::dirty_log::DirtyLog;
use crate::drive::GuestDrive;
use crate::error::{GuestError, RunState};
use crate::hand_over::HandOver;
use crate::identity::GuestIdentity;
use crate::lifecycle::{Lifecycle, SavedPause, VcpuPauses};
use crate::lineage::{Line, LineId};
use crate::memory_claim::MemoryRight;
use crate::page_source::{LazyRestoreProgress, PageSource};
use crate::populate::{MemoryLoader, Populate};
use crate::stateful::Stateful;
use crate::vm_id::VmId;
use crate::write_protect::WriteProtection;
use crate::write_throttle::{VcpuWrites, WriteThrottle};

pub use observe::image;

/// A guest of host threads on guest-shaped memory. See the [module](super).
pub struct MemoryGuest {
    vm_id: VmId,
    line: Line,
    config: MemoryConfig,
    layout: Arc<Layout>,
    tracker: Arc<Tracker>,
    ram: GuestRam,
    right: MemoryRight,
    gate: Arc<WriterGate>,
    writers: Vec<Arc<PageWriter>>,
    threads: Mutex<Vec<JoinHandle<()>>>,
    /// Packets that `attach` received.
    received_packets: Mutex<Vec<u8>>,
    faults: Arc<Faults>,
    drive: Arc<ExclusiveDrive>,
    disks: Vec<Arc<TestDisk>>,
    /// Tells guests with the same `vm_id` apart.
    serial: u64,
    /// Number of frames passed to `prefault`.
    prefaulted: AtomicU64,
    protected: Arc<FrameProtectionState>,
    filling: Arc<AtomicBool>,
    /// Bytes of an additional section that a restore compares.
    extra_state_bytes: AtomicU64,
}

impl fmt::Debug for MemoryGuest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MemoryGuest").field("vm_id", &self.vm_id).finish_non_exhaustive()
    }
}

impl MemoryGuest {
    /// Returns the number of frames passed to [`Populate::prefault`], over all calls.
    pub fn prefaulted(&self) -> u64 {
        self.prefaulted.load(SeqCst)
    }

    /// Adds one section of `bytes` to the state; a restore compares it.
    pub fn set_extra_state(&self, bytes: u64) {
        self.extra_state_bytes.store(bytes, SeqCst);
    }

    /// Returns the throttle of each writer in writes per second, if there is one.
    pub fn throttled(&self) -> Option<u64> {
        self.gate.throttled()
    }

    /// Creates a paused guest that has never run.
    ///
    /// # Errors
    ///
    /// The configuration is malformed, or the host refuses memory or a thread.
    pub fn new(vm_id: VmId, config: MemoryConfig) -> Result<Arc<Self>, GuestError> {
        Self::with_disks(vm_id, config, Vec::new())
    }

    /// Like [`new`](Self::new), with drives.
    ///
    /// # Errors
    ///
    /// As [`new`](Self::new).
    pub fn with_disks(
        vm_id: VmId,
        config: MemoryConfig,
        disks: Vec<Arc<TestDisk>>,
    ) -> Result<Arc<Self>, GuestError> {
        let (faults, drive) = Default::default();
        Self::build(vm_id, config, TestGuestMemory::Private, faults, drive, disks)
    }

    /// Creates a paused guest of another line that has never run.
    ///
    /// # Errors
    ///
    /// As [`new`](Self::new).
    pub fn of_line(vm_id: VmId, line: Line, config: MemoryConfig) -> Result<Arc<Self>, GuestError> {
        let mut guest = Self::new(vm_id, config)?;
        if let Some(new) = Arc::get_mut(&mut guest) {
            new.line = line;
        }
        Ok(guest)
    }

    /// Starts a guest with a random identity, which holds its own [`ExclusiveDrive`].
    ///
    /// # Errors
    ///
    /// As [`new`](Self::new).
    pub fn start(config: MemoryConfig) -> Result<Arc<Self>, GuestError> {
        let guest = Self::new(VmId::random(), config)?;
        guest.acquire()?;
        guest.resume()?;
        Ok(guest)
    }

    pub(super) fn build(
        vm_id: VmId,
        config: MemoryConfig,
        memory: TestGuestMemory<'_>,
        faults: Arc<Faults>,
        drive: Arc<ExclusiveDrive>,
        disks: Vec<Arc<TestDisk>>,
    ) -> Result<Arc<Self>, GuestError> {
        static SERIAL: AtomicU64 = AtomicU64::new(1);
        let layout = config.layout()?;
        let tracker = Arc::new(Tracker::new(layout.clone()));
        let (ram, right) = (memory.map(&layout, &tracker)?, memory.right()?);
        let (layout, gate) = (Arc::new(layout), Arc::new(WriterGate::new(config.writers.into())));
        let mut guest = Self {
            vm_id,
            // One line for all guests with this id, unless a test chooses another.
            line: Line { own: LineId(vm_id.0), from: None },
            layout,
            tracker,
            ram,
            right,
            gate,
            writers: Vec::new(),
            threads: Mutex::default(),
            received_packets: Mutex::default(),
            faults,
            drive,
            disks,
            serial: SERIAL.fetch_add(1, SeqCst),
            prefaulted: AtomicU64::new(0),
            protected: Arc::default(),
            filling: Arc::default(),
            extra_state_bytes: AtomicU64::new(0),
            config,
        };
        let of = u64::from(guest.config.writers);
        for index in 0..of {
            let share = (guest.config.working_set - index).div_ceil(of);
            let writer = Arc::new(PageWriter {
                index,
                of,
                sweep: PageSweep::new(share, guest.config.seed ^ index << 32),
                steps: AtomicU64::new(0),
                errors: AtomicU64::new(0),
                rate: guest.config.writes_per_s,
                throttled_ns: AtomicU64::new(0),
            });
            let (gate, layout, ram) = (guest.gate.clone(), guest.layout.clone(), guest.ram.clone());
            let (mine, protected) = (writer.clone(), guest.protected.clone());
            let thread = std::thread::Builder::new()
                .name(format!("writer-{index}"))
                .spawn(move || mine.run(&gate, &layout, &ram, &protected))
                .map_err(|e| system("starting a writer", e))?;
            guest.threads.get_mut().push(thread);
            guest.writers.push(writer);
        }
        Ok(Arc::new(guest))
    }

    /// Returns the switches that make its operations fail.
    pub fn faults(&self) -> &Faults {
        &self.faults
    }

    /// Returns what it holds between `acquire` and `release`.
    pub fn drive(&self) -> &Arc<ExclusiveDrive> {
        &self.drive
    }

    /// Returns its drives with data in them.
    pub fn disks(&self) -> &[Arc<TestDisk>] {
        &self.disks
    }

    /// Returns what `attach` received here: the mark of the guest on its last host.
    pub fn received_packets(&self) -> Vec<u8> {
        self.received_packets.lock().clone()
    }

    /// Returns what `detach` gives if the guest has writers.
    pub fn mark(&self) -> Vec<u8> {
        self.serial.to_le_bytes().to_vec()
    }

    /// Writes to a frame as a vCPU or device of the guest does: waits while the frame is
    /// write-protected.
    ///
    /// # Errors
    ///
    /// The frame lies in no slot, or `bytes` extends past the end of one.
    pub fn write(&self, gfn: Gfn, bytes: &[u8]) -> Result<(), GuestError> {
        self.protected.wait(gfn);
        let written = self.ram.write_slice(bytes, GuestAddress(gfn.gpa()));
        written.map_err(|e| system("writing memory", e))
    }

    /// Returns the number of write-protected frames.
    pub fn protected(&self) -> u64 {
        self.protected.frames()
    }

    /// Returns the tracker behind its memory.
    pub fn tracker(&self) -> &Arc<Tracker> {
        &self.tracker
    }

    fn must_be_paused(&self, request: &'static str) -> Result<(), GuestError> {
        match self.gate.state() {
            RunState::Paused => Ok(()),
            state => Err(GuestError::State { request, state }),
        }
    }
}

impl GuestIdentity for MemoryGuest {
    fn vm_id(&self) -> VmId {
        self.vm_id
    }

    fn line(&self) -> Line {
        self.line
    }

    fn config(&self) -> Vec<u8> {
        // Encoding into a vector cannot fail; every factory would refuse empty bytes.
        postcard::to_stdvec(&self.config).unwrap_or_default()
    }

    fn layout(&self) -> &Layout {
        &self.layout
    }
}

impl GuestContents for MemoryGuest {
    fn ram(&self) -> &GuestRam {
        &self.ram
    }

    fn memory_right(&self) -> &MemoryRight {
        &self.right
    }

    /// Returns the frames that are not zero now. One written later is in the next epoch.
    fn populated(&self) -> Result<Vec<FrameRun>, GuestError> {
        self.faults.check(Op::Populated, "asking which memory is populated")?;
        let mut runs: Vec<FrameRun> = Vec::new();
        let mut page = [0; PAGE_BYTES];
        for slot in self.layout.slots() {
            let slot_start = runs.len();
            for gfn in slot.run().frames() {
                self.ram
                    .read_slice(&mut page[..], GuestAddress(gfn.gpa()))
                    .map_err(|e| system("reading memory", e))?;
                if page == [0; PAGE_BYTES] {
                    continue;
                }
                match runs[slot_start..].last_mut() {
                    Some(last) if last.end() == gfn => last.count += 1,
                    _ => runs.push(FrameRun { start: gfn, count: 1 }),
                }
            }
        }
        Ok(runs)
    }

    fn resident(&self) -> Result<Vec<FrameRun>, GuestError> {
        self.populated()
    }

    fn fetch(&self, _: &[FrameRun]) -> Result<(), GuestError> {
        // All its memory is there.
        Ok(())
    }

    /// Stops its own writers and callers of [`write`](MemoryGuest::write), but no other write to
    /// its memory.
    fn write_protection(&self) -> Result<Option<Box<dyn WriteProtection>>, GuestError> {
        self.faults.check(Op::WriteProtection, "setting up write protection")?;
        let (protected, faults) = (self.protected.clone(), self.faults.clone());
        Ok(Some(Box::new(SoftwareWriteProtection { protected, faults })))
    }

    fn drives(&self) -> Vec<Box<dyn GuestDrive>> {
        self.disks
            .iter()
            .map(|disk| Box::new(TestDiskHandle(disk.clone())) as Box<dyn GuestDrive>)
            .collect()
    }
}

impl Populate for MemoryGuest {
    fn prefault(&self, frames: FrameRun) {
        self.prefaulted.fetch_add(frames.count, SeqCst);
    }

    fn memory_loader(&self) -> Option<Box<dyn MemoryLoader>> {
        let (filling, faults) = (self.filling.clone(), self.faults.clone());
        Some(Box::new(TestMemoryLoader::begin(self.ram.clone(), filling, faults)))
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

impl DirtyLog for MemoryGuest {
    fn subscribe(&self, name: &str) -> Result<Subscription, GuestError> {
        self.faults.check(Op::Subscribe, "tracking writes")?;
        // Writers are stopped, so that no write is in progress that saw no subscriber and is not
        // yet in memory.
        Ok(self.gate.while_parked(|| self.tracker.subscribe(name))?)
    }

    fn collect(&self) -> Result<CollectionReport, GuestError> {
        self.faults.check(Op::Collect, "collecting dirty frames")?;
        Ok(CollectionReport::default())
    }
}

impl WriteThrottle for MemoryGuest {
    /// Counts every write, including one to a frame that is already dirty.
    fn vcpu_writes(&self) -> Vec<VcpuWrites> {
        let writes = |w: &Arc<PageWriter>| VcpuWrites {
            dirtied_frames: w.steps.load(SeqCst),
            throttled: Duration::from_nanos(w.throttled_ns.load(SeqCst)),
        };
        self.writers.iter().map(writes).collect()
    }

    fn throttle(&self, frames_per_s: Option<u64>) {
        self.gate.throttle(frames_per_s);
    }
}

impl Lifecycle for MemoryGuest {
    fn run_state(&self) -> RunState {
        self.gate.state()
    }

    fn pause(&self) -> Result<RunState, GuestError> {
        self.faults.check(Op::Pause, "pausing")?;
        match self.gate.set(RunState::Paused) {
            RunState::Stopped => {
                Err(GuestError::State { request: "pause", state: RunState::Stopped })
            }
            RunState::Running => {
                self.drive.guest_paused();
                self.disks.iter().for_each(|disk| disk.set_paused(true));
                Ok(RunState::Running)
            }
            RunState::Paused => Ok(RunState::Paused),
        }
    }

    fn pause_and_save(&self) -> Result<SavedPause, GuestError> {
        let since = Instant::now();
        let before = self.pause()?;
        Ok(SavedPause { before, since, saved: self.save_state() })
    }

    fn resume(&self) -> Result<(), GuestError> {
        self.faults.check(Op::Resume, "resuming")?;
        match self.gate.set(RunState::Running) {
            RunState::Stopped => {
                Err(GuestError::State { request: "resume", state: RunState::Stopped })
            }
            RunState::Paused => {
                self.drive.guest_resumed();
                self.disks.iter().for_each(|disk| disk.set_paused(false));
                Ok(())
            }
            RunState::Running => Ok(()),
        }
    }

    fn stop(&self, why: &str) {
        assert!(!self.filling.load(SeqCst), "its memory is still being filled");
        tracing::debug!(vm = %self.vm_id, why, "stopped");
        if self.gate.set(RunState::Stopped) == RunState::Running {
            self.drive.guest_paused();
        }
        let mut threads = self.threads.lock();
        for thread in threads.drain(..) {
            // A panicked writer has reported that on stderr; its guest fails `verify`.
            let _ = thread.join();
        }
        self.drive.release(self.serial);
    }

    fn vcpu_pauses(&self) -> Vec<VcpuPauses> {
        // Writers keep no account of their pauses.
        Vec::new()
    }
}

impl Drop for MemoryGuest {
    fn drop(&mut self) {
        self.stop("dropped");
        self.drive.detach(self.serial);
    }
}
