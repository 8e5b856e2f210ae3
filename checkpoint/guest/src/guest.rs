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

/// Guest memory whose VMM-side writes mark the trees.
pub type GuestRam = vm_memory::GuestMemoryMmap<TrackedBitmap>;

/// What the guest's clock does over the time in which it did not run.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Clock {
    /// Advances by it: a migration, whose downtime the guest may notice.
    Advance,
    /// Goes on where it stood: a restore, which may come a year later.
    Continue,
}

/// Most bytes that [`Guest::detach`] gives: they are sent while the guest stands, and whoever sends
/// to it decides how many come.
pub const MAX_LATE: usize = 256 << 10;

/// What one vCPU has done since the guest was built here.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct VcpuWrites {
    /// Frames that it has made dirty. One that is drained and written again counts again.
    pub dirtied_frames: u64,
    /// How long it was held back by [`Guest::throttle`].
    pub held: Duration,
}

/// A vCPU's own account of its pauses, by the host's clock.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct VcpuPauses {
    /// Pauses that are over for it.
    pub pauses: u64,
    /// The last of them.
    pub last: Duration,
    /// When the vCPU last resumed; `None` if it has never run.
    pub resumed: Option<SystemTime>,
}

/// A guest that can be tracked, paused, saved and restored.
///
/// All methods may be called from any thread; implementations pass them as messages to the thread
/// that owns what is concerned. Reading [`ram`](Self::ram) while the guest runs gives each frame as
/// it is at some moment: complete only for frames that the tracker does not report afterwards.
pub trait Guest: Send + Sync {
    /// The guest's identity.
    fn vm_id(&self) -> VmId;

    /// Its line: which checkpoints its own may follow in a store. It moves with the guest.
    fn line(&self) -> Line;

    /// What a [`GuestFactory`] needs to build the same machine elsewhere: opaque, versioned by the
    /// implementation, a few hundred bytes.
    fn config(&self) -> Vec<u8>;

    /// The guest's memory slots.
    fn layout(&self) -> &Layout;

    /// The guest's memory. Writing to it marks the written frames in every subscriber's tree.
    fn ram(&self) -> &GuestRam;

    /// Runs of frames, ascending, that a copy of all memory has to take. All others were never
    /// written and read as zeros, or have a content that is of no use to the guest: a running guest
    /// may be asked, for a second at most, what of its memory is free. What such a frame is written
    /// with after this call is found by whoever has [subscribed](Self::subscribe) before it, and by
    /// nobody else. May include frames that are zero too. Costs one look at the host's page tables.
    fn populated(&self) -> Result<Vec<FrameRun>, GuestError>;

    /// As [`populated`](Self::populated), but nobody is asked: all frames that the host has memory
    /// for, whatever the guest says of them. All others read as zeros.
    fn resident(&self) -> Result<Vec<FrameRun>, GuestError> {
        self.populated()
    }

    /// Has the host give memory to frames that are about to be written, which is cheaper for many
    /// at once than for one at a time. What it does not get to, it does at the write; contents stay
    /// as they are.
    fn prepare(&self, frames: FrameRun);

    /// Begins to follow writes for one more subscriber. When this returns, every later write will
    /// be in one of its epochs: a copy of memory taken from now on plus the epochs since is
    /// complete.
    fn subscribe(&self, name: &str) -> Result<Subscription, GuestError>;

    /// What keeps frames as they are while the guest runs on, so that they are copied behind its
    /// back; one at a time. `None`, the default, where that cannot be had: then they are copied
    /// while it stands. Opening it costs about as much as a few pauses do, so it is kept for as
    /// long as epochs are taken; while nothing is protected it costs the guest nothing.
    fn shield(&self) -> Result<Option<Box<dyn Shield>>, GuestError> {
        Ok(None)
    }

    /// What puts contents into the memory of a guest that is paused and has never run, which nobody
    /// has touched, cheaper than a write does. `None`, the default, where that cannot be had, or
    /// pages are such that a write is cheaper.
    fn fill(&self) -> Option<Box<dyn Fill>> {
        None
    }

    /// Has `backlog` come when it is touched, and behind that, into memory that nobody has touched;
    /// the guest may run meanwhile. Gives it back, the default, where that cannot be done: then it
    /// has to come first. If a frame cannot be had the guest ends, before anybody sees something
    /// else in its place.
    fn fetch_late(
        &self,
        backlog: Box<dyn Backlog>,
    ) -> Result<Option<Box<dyn Backlog>>, GuestError> {
        Ok(Some(backlog))
    }

    /// How far that is; `None` where nothing was fetched so.
    fn fetching(&self) -> Option<Fetching> {
        None
    }

    /// The guest's drives, for whoever copies them; a guest without has none.
    fn drives(&self) -> Vec<Box<dyn GuestDrive>> {
        Vec::new()
    }

    /// Brings every subscriber's tree up to date: harvest, reprotect, insert. Of a running guest it
    /// takes what has been reported so far; of a paused one, everything.
    fn collect(&self) -> Result<Collected, GuestError>;

    /// What each vCPU has written, as of the last collection, in the order of vCPUs. Empty, the
    /// default, where it is not known who writes.
    fn vcpu_writes(&self) -> Vec<VcpuWrites> {
        Vec::new()
    }

    /// The pauses of each vCPU, in the order of vCPUs, that are over for it. Who asked for a pause
    /// learns of its end later, on a host whose processors the guest has again. Empty, the default,
    /// where vCPUs do not know.
    fn stood(&self) -> Vec<VcpuPauses> {
        Vec::new()
    }

    /// From now on holds back each vCPU that makes more than so many frames a second dirty, in
    /// holds too short to be noticed as pauses, and never for all of the time; `None` holds nobody.
    /// A vCPU that makes fewer dirty is let be. A pause does not wait for a hold. Whoever asks for
    /// this takes it back: it is no part of the guest's state. Does nothing, the default, where it
    /// is not known who [writes](Self::vcpu_writes).
    fn throttle(&self, frames_per_s: Option<u64>) {
        let _ = frames_per_s;
    }

    /// Whether the guest runs.
    fn run_state(&self) -> RunState;

    /// The guest is to be handed over: for some milliseconds this host's processors are better kept
    /// from sleeping, since threads then wait for each other while it stands. A hint; does nothing,
    /// the default, where there is no way to.
    fn stay_awake(&self) {}

    /// Stops all vCPUs between two instructions and quiesces devices. Returns the state before; a
    /// guest that is paused already stays so. Prefer [`Paused::new`], which resumes by itself.
    fn pause(&self) -> Result<RunState, GuestError>;

    /// [`pause`](Self::pause) and then [`save_state`](Self::save_state), for whoever wants both: a
    /// guest that does them at one request stands for less. Where only saving fails, that is the
    /// inner error, and the guest is paused. Prefer [`Paused::saving`], which resumes by itself.
    fn pause_and_save(&self) -> Result<(RunState, SavedState), GuestError> {
        let before = self.pause()?;
        Ok((before, self.save_state()))
    }

    /// Lets a paused guest run. Returns when its vCPUs have gone on, where they know: whatever the
    /// caller does next keeps no processor from one that was woken for it. Waits for nobody's write
    /// to guest memory, and makes none: frames that are [shielded](Self::shield) are let go of only
    /// when it has returned.
    fn resume(&self) -> Result<(), GuestError>;

    /// The whole state besides memory, of a paused guest.
    fn save_state(&self) -> SavedState;

    /// Puts a saved state into a guest that is paused and has never run. Sections are hostile
    /// input. Unknown ones that must be understood are refused by name.
    fn restore_state(&self, sections: &[Section], clock: Clock) -> Result<(), GuestError>;

    /// Has disks make durable what the guest has written, without stopping it: whoever lets go of
    /// it soon has less left to do then. Whether that was done within `limit`; what is not done
    /// then goes on. An error is reported to the guest, too, as one of the next flush that it asks
    /// for itself; until then [`release`](Self::release) fails.
    fn flush(&self, limit: Duration) -> Result<bool, GuestError>;

    /// Makes durable what the guest wrote and lets go of what only one host may hold (drives'
    /// locks, listening sockets), of a paused guest; but not of its taps: what comes by them waits.
    fn release(&self) -> Result<(), GuestError>;

    /// Lets go of a released guest's taps, too. What has come for it since its state was saved,
    /// opaque and at most [`MAX_LATE`] bytes, is for [`attach`](Self::attach) on the next host;
    /// should it stay here after all, it gets that nevertheless.
    fn detach(&self) -> Result<Vec<u8>, GuestError>;

    /// On the next host, once the guest has its state and nobody else is reached in its name any
    /// more: has peers reach it here, and takes what [`detach`](Self::detach) gave, which is
    /// hostile input. Whoever could not be told is told when the guest goes on.
    fn attach(&self, late: &[u8]) -> Result<(), GuestError>;

    /// Takes again what [`release`](Self::release) and [`detach`](Self::detach) let go of, or takes
    /// it first on a new host. If that fails, the guest holds nothing, and no peer reaches it here;
    /// but a guest that has run here holds what its writes could not be made durable in.
    fn acquire(&self) -> Result<(), GuestError>;

    /// Ends the guest here for good; it can never be resumed. `why` is for the log.
    fn stop(&self, why: &str);
}

/// A paused guest's state besides memory, or why it could not be saved.
pub type SavedState = Result<Vec<Section>, GuestError>;

/// A guest, and its drives, or copies of them, that are being filled.
pub type WithCopies<G> = (Arc<G>, Vec<Box<dyn DriveCopy>>);

/// Builds guests from what [`Guest::config`] returned, on this host or another.
pub trait GuestFactory: Send + Sync {
    /// What it builds.
    type Guest: Guest + ?Sized;

    /// A paused guest with zeroed memory, before any state is restored. `config` is hostile input:
    /// bounds are checked before anything is allocated.
    fn create(&self, vm_id: VmId, config: &[u8]) -> Result<Arc<Self::Guest>, GuestError>;

    /// As [`create`](Self::create), for a guest whose `drives`, hostile input too, are copied here:
    /// beside it, for each of them in their order, its copy in the making, which the guest has for
    /// its drive. A factory that makes no copies refuses.
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

    /// As [`create`](Self::create), for a guest that is restored from the checkpoint `from`. The
    /// factory decides whether the guest is the one that was checkpointed, or a new one.
    ///
    /// Returns the guest and, in the order of `drives`, the files that are about to be written
    /// over. Each is locked for this guest until it is yielded. `drives` is hostile input. A drive
    /// that is missing, differs from its description, cannot be written to or is in use is refused
    /// by its name, before anything is written to any of them. A factory whose guests have no
    /// drives refuses.
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

/// A guest held still. Dropping it resumes the guest if it ran before, so that no error path leaves
/// a guest standing; only [`keep_paused`](Self::keep_paused) ends the hold without that.
///
/// Holds of one guest do not nest by themselves: the one that began first resumes it, whoever else
/// holds it still. Where one guest is checkpointed and migrated, each does so through a [`Guest`]
/// of its own that counts holds, as the machine's jobs do.
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

    /// Pauses `guest` and saves its state, in less time than one after the other takes.
    pub fn saving(guest: &'g G) -> Result<(Self, SavedState), GuestError> {
        let (before, saved) = guest.pause_and_save()?;
        Ok((Self { guest, resume: before == RunState::Running }, saved))
    }

    /// Whether the guest ran before the pause, and so will when this is dropped.
    pub fn was_running(&self) -> bool {
        self.resume
    }

    /// Everything that changed since `subscription` was last drained: nothing is missing, because
    /// the guest stands still. Comes after [`save_state`](Self::save_state), which may itself make
    /// the host write into guest memory.
    pub fn drain(&self, subscription: &mut Subscription) -> Result<DirtySet, GuestError> {
        self.guest.collect()?;
        Ok(subscription.drain())
    }

    /// The guest's state besides memory.
    pub fn save_state(&self) -> SavedState {
        self.guest.save_state()
    }

    /// Lets the guest run on now, if it ran before; says whether that worked, which dropping
    /// cannot.
    pub fn resume(mut self) -> Result<(), GuestError> {
        if std::mem::take(&mut self.resume) { self.guest.resume() } else { Ok(()) }
    }

    /// Ends the hold and leaves the guest paused: another host may be running it.
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
