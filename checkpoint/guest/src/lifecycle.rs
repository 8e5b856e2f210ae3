//! Whether a guest runs: pause, resume, end.

use std::time::{Duration, Instant, SystemTime};

use driftline_dirty_tracker::{DirtySet, Subscription};

use crate::delegate::Delegate;
use crate::dirty_log::DirtyLog;
use crate::error::{GuestError, RunState};
use crate::identity::GuestIdentity;
use crate::stateful::{SavedState, Stateful};

/// Pauses, resumes and ends a guest.
pub trait Lifecycle: Send + Sync {
    /// Returns the guest's run state.
    fn run_state(&self) -> RunState;

    /// Quiesces devices, and then stops all vCPUs between two instructions, so that the vCPUs run
    /// while a disk finishes what is in flight. Returns the state before; a guest that is already
    /// paused stays paused. Prefer [`Paused::new`], which resumes by itself.
    ///
    /// # Errors
    ///
    /// The guest has ended, or a vCPU or device does not stop in time.
    fn pause(&self) -> Result<RunState, GuestError>;

    /// Does [`pause`](Self::pause) and then [`Stateful::save_state`]. A guest that does both in one
    /// request is paused for less time. If only the save fails, that is the inner error, and the
    /// guest is paused. Prefer [`Paused::saving`], which resumes by itself.
    ///
    /// # Errors
    ///
    /// As [`pause`](Self::pause).
    fn pause_and_save(&self) -> Result<SavedPause, GuestError>;

    /// Resumes a paused guest. Returns when its vCPUs have resumed, if they report that, so that
    /// the caller's next work does not take a processor from a woken vCPU. Does not wait for any
    /// write to guest memory, and makes none: frames that are
    /// [write-protected](crate::GuestContents::write_protection) are unprotected only after it has
    /// returned.
    ///
    /// # Errors
    ///
    /// The guest has ended, or does not hold what only one host may hold.
    fn resume(&self) -> Result<(), GuestError>;

    /// Ends the guest here; it can never be resumed. `why` is for the log.
    fn stop(&self, why: &str);

    /// Returns the pauses that have ended, per vCPU, in the order of vCPUs. The thread that
    /// requested a pause learns of its end later, if the guest has the host's processors again.
    /// Empty if vCPUs do not keep this account.
    fn vcpu_pauses(&self) -> Vec<VcpuPauses>;
}

impl<T: Delegate<dyn Lifecycle>> Lifecycle for T {
    fn run_state(&self) -> RunState {
        self.delegate().run_state()
    }

    fn pause(&self) -> Result<RunState, GuestError> {
        self.delegate().pause()
    }

    fn pause_and_save(&self) -> Result<SavedPause, GuestError> {
        self.delegate().pause_and_save()
    }

    fn resume(&self) -> Result<(), GuestError> {
        self.delegate().resume()
    }

    fn stop(&self, why: &str) {
        self.delegate().stop(why);
    }

    fn vcpu_pauses(&self) -> Vec<VcpuPauses> {
        self.delegate().vcpu_pauses()
    }
}

/// A pause, and the state that was saved in it.
#[derive(Debug)]
pub struct SavedPause {
    /// The state before the pause.
    pub before: RunState,
    /// When the vCPUs were told to stop, after devices had been quiesced. If the guest was paused
    /// before, the time of the call.
    pub since: Instant,
    /// The state; or why it cannot be saved, although the guest is paused.
    pub saved: SavedState,
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

/// A paused guest. Drop resumes the guest if it ran before, so that no error path leaves a guest
/// paused; only [`keep_paused`](Self::keep_paused) ends the pause without that.
///
/// Pauses of one guest do not nest: the one that began first resumes the guest, even if another has
/// not ended. If one guest is checkpointed and migrated at the same time, each engine has its own
/// [`Lifecycle`], and these count the pauses, as the machine's jobs do.
#[must_use = "dropping this resumes the guest"]
pub struct Paused<'g, G: Lifecycle + GuestIdentity + ?Sized> {
    guest: &'g G,
    resume: bool,
}

impl<'g, G: Lifecycle + GuestIdentity + ?Sized> Paused<'g, G> {
    /// Pauses `guest`.
    ///
    /// # Errors
    ///
    /// As [`Lifecycle::pause`].
    pub fn new(guest: &'g G) -> Result<Self, GuestError> {
        let before = guest.pause()?;
        Ok(Self { guest, resume: before == RunState::Running })
    }

    /// Pauses `guest` and saves its state, in less time than two separate calls take.
    ///
    /// # Errors
    ///
    /// As [`Lifecycle::pause`].
    pub fn saving(guest: &'g G) -> Result<(Self, SavedState), GuestError> {
        let (paused, pause) = Self::timed(guest)?;
        Ok((paused, pause.saved))
    }

    /// Does [`saving`](Self::saving), and also returns the time of the pause.
    ///
    /// # Errors
    ///
    /// As [`Lifecycle::pause`].
    pub fn timed(guest: &'g G) -> Result<(Self, SavedPause), GuestError> {
        let pause = guest.pause_and_save()?;
        Ok((Self { guest, resume: pause.before == RunState::Running }, pause))
    }

    /// Returns whether the guest ran before the pause, and so will run when this is dropped.
    pub fn was_running(&self) -> bool {
        self.resume
    }

    /// Resumes the guest now, if it ran before. Reports failure, which drop cannot.
    ///
    /// # Errors
    ///
    /// As [`Lifecycle::resume`].
    pub fn resume(mut self) -> Result<(), GuestError> {
        if std::mem::take(&mut self.resume) { self.guest.resume() } else { Ok(()) }
    }

    /// Ends the pause and leaves the guest paused: another host may be running it.
    pub fn keep_paused(mut self) {
        self.resume = false;
    }
}

impl<G: Lifecycle + GuestIdentity + DirtyLog + ?Sized> Paused<'_, G> {
    /// Drains everything that changed since `subscription` was last drained. Nothing is missing,
    /// because the guest is paused. Call it after [`save_state`](Self::save_state), which may
    /// itself make the host write into guest memory.
    ///
    /// # Errors
    ///
    /// As [`DirtyLog::collect`].
    pub fn drain(&self, subscription: &mut Subscription) -> Result<DirtySet, GuestError> {
        self.guest.collect()?;
        Ok(subscription.drain())
    }
}

impl<G: Lifecycle + GuestIdentity + Stateful + ?Sized> Paused<'_, G> {
    /// Returns the guest's state besides memory.
    ///
    /// # Errors
    ///
    /// As [`Stateful::save_state`].
    pub fn save_state(&self) -> SavedState {
        self.guest.save_state()
    }
}

impl<G: Lifecycle + GuestIdentity + ?Sized> Drop for Paused<'_, G> {
    fn drop(&mut self) {
        if self.resume
            && let Err(e) = self.guest.resume()
        {
            tracing::error!(vm = %self.guest.vm_id(), "the guest stays paused: {e}");
        }
    }
}
