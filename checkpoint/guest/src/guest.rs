//! The guest as checkpointing and migration see it.

use std::sync::Arc;
use std::time::{Duration, SystemTime};

use driftline_dirty_tracker::{Collected, DirtySet, FrameRun, Layout, Subscription, TrackedBitmap};
use serde::{Deserialize, Serialize};

use crate::drive::{DriveCopy, DriveHead, GuestDrive};
use crate::error::{GuestError, RunState};
use crate::lineage::{Line, Origin};
use crate::page_source::{Backlog, Fetching};
use crate::populate::Fill;
use crate::section::Section;
use crate::vm_id::VmId;
use crate::write_protect::Shield;

/// Guest memory in which writes by the VMM mark the trees.
pub type GuestRam = vm_memory::GuestMemoryMmap<TrackedBitmap>;

/// What the guest's clock does about the time in which the guest did not run.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Clock {
    /// Advances by that time: for a migration, whose downtime the guest may notice.
    Advance,
    /// Continues from where it stopped: for a restore, which may come a year later.
    Continue,
}

/// Maximum number of bytes that [`Guest::detach`] returns. They are sent during the downtime, and
/// the guest's peers decide how many arrive.
pub const MAX_LATE: usize = 256 << 10;

/// What one vCPU has done since the guest was built here.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct VcpuWrites {
    /// Frames that it has dirtied. A frame that is drained and written again counts again.
    pub dirtied_frames: u64,
    /// Time for which [`Guest::throttle`] slowed it down.
    pub held: Duration,
}

/// A vCPU's own account of its pauses, by the host's clock.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct VcpuPauses {
    /// Pauses that have ended for this vCPU.
    pub pauses: u64,
    /// Length of the last of them.
    pub last: Duration,
    /// When the vCPU last resumed; `None` if it has never run.
    pub resumed: Option<SystemTime>,
}

/// A guest that can be tracked, paused, saved and restored.
///
/// All methods may be called from any thread; implementations pass them as messages to the thread
/// that owns the state concerned. Reading [`ram`](Self::ram) while the guest runs gives each frame
/// as it is at some moment. Such a copy is complete only for frames that the tracker does not
/// report afterwards.
pub trait Guest: Send + Sync {
    /// Returns the guest's identity.
    fn vm_id(&self) -> VmId;

    /// Returns its line: which checkpoints its own may follow in a store. The line moves with the
    /// guest.
    fn line(&self) -> Line;

    /// Returns what a [`GuestFactory`] needs to build the same machine elsewhere: opaque, versioned
    /// by the implementation, a few hundred bytes.
    fn config(&self) -> Vec<u8>;

    /// Returns the guest's memory slots.
    fn layout(&self) -> &Layout;

    /// Returns the guest's memory. Writing to it marks the written frames in every subscriber's
    /// tree.
    fn ram(&self) -> &GuestRam;

    /// Returns the runs of frames, ascending, that a copy of all memory must include. Other frames
    /// were never written and read as zeros, or their content is of no use to the guest: the
    /// implementation may ask a running guest, for a second at most, which of its memory is free.
    /// If the guest writes such a frame after this call, only a caller that
    /// [subscribed](Self::subscribe) before this call learns of it. The runs may include frames
    /// that are zero. Costs one scan of the host's page tables.
    fn populated(&self) -> Result<Vec<FrameRun>, GuestError>;

    /// Like [`populated`](Self::populated), but does not ask the guest: returns all frames that the
    /// host has memory for. Other frames read as zeros.
    fn resident(&self) -> Result<Vec<FrameRun>, GuestError> {
        self.populated()
    }

    /// Populates frames that are about to be written, which is cheaper for many at once than for
    /// one at a time. Frames that are not reached are populated by the write itself. Contents are
    /// unchanged.
    fn prepare(&self, frames: FrameRun);

    /// Begins to track writes for one more subscriber. When this returns, every later write will be
    /// in one of its epochs: a copy of memory taken from now on plus the epochs since is complete.
    fn subscribe(&self, name: &str) -> Result<Subscription, GuestError>;

    /// Returns a shield that write-protects frames, so that they are copied while the guest runs;
    /// one at a time. `None`, the default, means unsupported: frames are then copied in the pause.
    /// Opening one costs about as much as a few pauses, so callers keep it for as long as they take
    /// epochs. While nothing is protected, it costs the guest nothing.
    fn shield(&self) -> Result<Option<Box<dyn Shield>>, GuestError> {
        Ok(None)
    }

    /// Returns a way to put contents into untouched memory of a paused guest that has never run, at
    /// less cost than a write. `None`, the default, means unsupported, or that the host's pages
    /// make a write cheaper.
    fn fill(&self) -> Option<Box<dyn Fill>> {
        None
    }

    /// Begins a lazy restore: a fault fetches its frame from `backlog`, and the other frames are
    /// fetched in the background, into untouched memory. The guest may run meanwhile. The default
    /// returns `backlog` to the caller: lazy restore is unsupported, and the frames must come
    /// first. If a frame cannot be read, the guest ends before it sees other content in its place.
    fn fetch_late(
        &self,
        backlog: Box<dyn Backlog>,
    ) -> Result<Option<Box<dyn Backlog>>, GuestError> {
        Ok(Some(backlog))
    }

    /// Returns the progress of a lazy restore; `None` if there was none.
    fn fetching(&self) -> Option<Fetching> {
        None
    }

    /// Returns the guest's drives, for copying; a guest without drives has none.
    fn drives(&self) -> Vec<Box<dyn GuestDrive>> {
        Vec::new()
    }

    /// Brings every subscriber's tree up to date: harvest, reprotect, insert. From a running guest
    /// it takes what has been reported so far; from a paused one, everything.
    fn collect(&self) -> Result<Collected, GuestError>;

    /// Returns what each vCPU has written, as of the last collection, in the order of vCPUs. Empty,
    /// the default, if writes are not counted per vCPU.
    fn vcpu_writes(&self) -> Vec<VcpuWrites> {
        Vec::new()
    }

    /// Returns the pauses that have ended, per vCPU, in the order of vCPUs. The thread that
    /// requested a pause learns of its end later, if the guest has the host's processors again.
    /// Empty, the default, if vCPUs do not keep this account.
    fn stood(&self) -> Vec<VcpuPauses> {
        Vec::new()
    }

    /// Throttles each vCPU that dirties more than this many frames a second; `None` ends it. The
    /// stops are too short to be noticed as pauses and never take all of the time. A vCPU that
    /// dirties fewer frames is not affected. A pause does not wait for a throttled vCPU. The caller
    /// that throttles must also end it: it is not part of the guest's state. Does nothing, the
    /// default, if writes are not [counted per vCPU](Self::vcpu_writes).
    fn throttle(&self, frames_per_s: Option<u64>) {
        let _ = frames_per_s;
    }

    /// Returns the guest's run state.
    fn run_state(&self) -> RunState;

    /// Announces a hand-over: for some milliseconds this host's processors should not enter sleep
    /// states, because threads wait for each other during the downtime. A hint; does nothing by
    /// default, or if there is no way to.
    fn stay_awake(&self) {}

    /// Stops all vCPUs between two instructions and quiesces devices. Returns the state before; a
    /// guest that is already paused stays paused. Prefer [`Paused::new`], which resumes by itself.
    fn pause(&self) -> Result<RunState, GuestError>;

    /// Does [`pause`](Self::pause) and then [`save_state`](Self::save_state). A guest that does
    /// both in one request is paused for less time. If only the save fails, that is the inner
    /// error, and the guest is paused. Prefer [`Paused::saving`], which resumes by itself.
    fn pause_and_save(&self) -> Result<(RunState, SavedState), GuestError> {
        let before = self.pause()?;
        Ok((before, self.save_state()))
    }

    /// Resumes a paused guest. Returns when its vCPUs have resumed, where they report that, so that
    /// the caller's next work does not take a processor from a woken vCPU. Does not wait for any
    /// write to guest memory, and makes none: frames that are [write-protected](Self::shield) are
    /// unprotected only after it has returned.
    fn resume(&self) -> Result<(), GuestError>;

    /// Returns the whole state besides memory, of a paused guest.
    fn save_state(&self) -> SavedState;

    /// Restores a saved state into a paused guest that has never run. Sections are hostile input.
    /// An unknown section that must be understood is refused by name.
    fn restore_state(&self, sections: &[Section], clock: Clock) -> Result<(), GuestError>;

    /// Makes disks' written data durable without stopping the guest, so that a later release has
    /// less left to do. Returns whether that was done within `limit`; the rest continues in the
    /// background. The guest also sees an error, as the result of its own next flush; until then
    /// [`release`](Self::release) fails.
    fn flush(&self, limit: Duration) -> Result<bool, GuestError>;

    /// Makes the guest's writes durable and releases what only one host may hold (drives' locks,
    /// listening sockets). The guest must be paused. Its taps are not released: packets that arrive
    /// on them wait.
    fn release(&self) -> Result<(), GuestError>;

    /// Releases a released guest's taps, too. Returns what has arrived for the guest since its
    /// state was saved: opaque, at most [`MAX_LATE`] bytes, for [`attach`](Self::attach) on the
    /// next host. If the guest stays here after all, it still receives that.
    fn detach(&self) -> Result<Vec<u8>, GuestError>;

    /// Makes peers reach the guest on the next host, and takes what [`detach`](Self::detach)
    /// returned, which is hostile input. Call it when the guest has its state and no other host is
    /// reached in its name. Peers that could not be notified are notified when the guest resumes.
    fn attach(&self, late: &[u8]) -> Result<(), GuestError>;

    /// Takes back what [`release`](Self::release) and [`detach`](Self::detach) released, or takes
    /// it first on a new host. If that fails, the guest holds nothing, and no peer reaches it here;
    /// but a guest that has run here still holds the drives on which its writes could not be made
    /// durable.
    fn acquire(&self) -> Result<(), GuestError>;

    /// Ends the guest here for good; it can never be resumed. `why` is for the log.
    fn stop(&self, why: &str);
}

/// A paused guest's state besides memory, or why it could not be saved.
pub type SavedState = Result<Vec<Section>, GuestError>;

/// A guest, and its drives or copies of them that are being filled.
pub type WithCopies<G> = (Arc<G>, Vec<Box<dyn DriveCopy>>);

/// Builds guests from what [`Guest::config`] returned, on this host or another.
pub trait GuestFactory: Send + Sync {
    /// The guest that it builds.
    type Guest: Guest + ?Sized;

    /// Builds a paused guest with zeroed memory, before any state is restored. `config` is hostile
    /// input: bounds are checked before anything is allocated.
    fn create(&self, vm_id: VmId, config: &[u8]) -> Result<Arc<Self::Guest>, GuestError>;

    /// Like [`create`](Self::create), for a guest whose `drives`, hostile input too, are copied
    /// here. Also returns the copies to be filled, in the order of `drives`; the guest uses them as
    /// its drives. A factory that makes no copies refuses.
    fn create_with_copies(
        &self,
        vm_id: VmId,
        config: &[u8],
        drives: &[DriveHead],
    ) -> Result<WithCopies<Self::Guest>, GuestError> {
        let Some(drive) = drives.first() else {
            return Ok((self.create(vm_id, config)?, Vec::new()));
        };
        let why = "no copies of drives are made here".to_owned();
        Err(GuestError::Unsupported { what: drive.to_string(), why })
    }

    /// Like [`create`](Self::create), for a guest that is restored from the checkpoint `from`. The
    /// factory decides whether the guest is the one that was checkpointed, or a new one.
    ///
    /// Returns the guest and, in the order of `drives`, the files that are about to be overwritten.
    /// Each is locked for this guest until it is yielded. `drives` is hostile input. A drive that
    /// is missing, differs from its description, cannot be written to or is in use is refused by
    /// its name, before anything is written to any of them. A factory whose guests have no drives
    /// refuses.
    fn create_with_drives(
        &self,
        from: &Origin,
        config: &[u8],
        drives: &[DriveHead],
    ) -> Result<WithCopies<Self::Guest>, GuestError> {
        let Some(drive) = drives.first() else {
            return Ok((self.create(from.vm_id, config)?, Vec::new()));
        };
        let why = "guests have no drives here".to_owned();
        Err(GuestError::Unsupported { what: drive.to_string(), why })
    }
}

/// A paused guest. Drop resumes the guest if it ran before, so that no error path leaves a guest
/// paused; only [`keep_paused`](Self::keep_paused) ends the pause without that.
///
/// Pauses of one guest do not nest: the one that began first resumes the guest, even if another has
/// not ended. If one guest is checkpointed and migrated, each does so through its own [`Guest`]
/// that counts pauses, as the machine's jobs do.
#[must_use = "dropping this resumes the guest"]
pub struct Paused<'g, G: Guest + ?Sized> {
    guest: &'g G,
    resume: bool,
}

impl<'g, G: Guest + ?Sized> Paused<'g, G> {
    /// Pauses `guest`.
    pub fn new(guest: &'g G) -> Result<Self, GuestError> {
        let before = guest.pause()?;
        Ok(Self { guest, resume: before == RunState::Running })
    }

    /// Pauses `guest` and saves its state, in less time than two separate calls take.
    pub fn saving(guest: &'g G) -> Result<(Self, SavedState), GuestError> {
        let (before, saved) = guest.pause_and_save()?;
        Ok((Self { guest, resume: before == RunState::Running }, saved))
    }

    /// Returns whether the guest ran before the pause, and so will run when this is dropped.
    pub fn was_running(&self) -> bool {
        self.resume
    }

    /// Drains everything that changed since `subscription` was last drained. Nothing is missing,
    /// because the guest is paused. Call it after [`save_state`](Self::save_state), which may
    /// itself make the host write into guest memory.
    pub fn drain(&self, subscription: &mut Subscription) -> Result<DirtySet, GuestError> {
        self.guest.collect()?;
        Ok(subscription.drain())
    }

    /// Returns the guest's state besides memory.
    pub fn save_state(&self) -> SavedState {
        self.guest.save_state()
    }

    /// Resumes the guest now, if it ran before. Reports failure, which drop cannot.
    pub fn resume(mut self) -> Result<(), GuestError> {
        if std::mem::take(&mut self.resume) { self.guest.resume() } else { Ok(()) }
    }

    /// Ends the pause and leaves the guest paused: another host may be running it.
    pub fn keep_paused(mut self) {
        self.resume = false;
    }
}

impl<G: Guest + ?Sized> Drop for Paused<'_, G> {
    fn drop(&mut self) {
        if self.resume
            && let Err(e) = self.guest.resume()
        {
            tracing::error!(vm = %self.guest.vm_id(), "the guest stays paused: {e}");
        }
    }
}
