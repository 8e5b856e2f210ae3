//! An epoch and its pause, from the pause request until the guest has resumed.

use std::time::{Duration, Instant};

use driftline_dirty_tracker::{DirtySet, Subscription};
use driftline_guest::{Lifecycle, Paused, Section, VcpuPauses};
use driftline_store::PauseGate;

use crate::copy_policy::CopyPolicy;
use crate::disk_copy::DiskCopy;
use crate::epoch_output::EpochOutput;
use crate::guest::Checkpointable;
use crate::report::{EpochStep, FailedStep, step};

/// An epoch that is being taken.
pub(crate) struct Epoch<'e> {
    pub(crate) guest: &'e dyn Checkpointable,
    pub(crate) policy: &'e CopyPolicy,
    /// Makes low-priority work of the store yield during the pause.
    pub(crate) pause_gate: &'e PauseGate,
    pub(crate) subscription: &'e mut Subscription,
    pub(crate) disks: DiskCopy<'e>,
    pub(crate) file: &'e mut dyn EpochOutput,
}

/// The results of a pause.
pub(crate) struct Pause<T> {
    pub(crate) changed: DirtySet,
    pub(crate) sections: Vec<Section>,
    /// What the caller's closure returned.
    pub(crate) handled: T,
    /// Length by the clock of the thread that requested the pause.
    pub(crate) time: Duration,
    pub(crate) resumed: Instant,
}

impl Epoch<'_> {
    /// Drains what the running guest has changed so far.
    pub(crate) fn drain(&mut self) -> Result<DirtySet, FailedStep> {
        step(EpochStep::Drain, || self.guest.collect())?;
        Ok(self.subscription.drain())
    }

    /// Pauses the guest, saves its state, and drains what changed. The guest resumes after
    /// `handle` has copied or protected that.
    pub(crate) fn pause<T>(
        &mut self,
        handle: impl FnOnce(&DirtySet, &mut dyn EpochOutput) -> Result<T, FailedStep>,
    ) -> Result<Pause<T>, FailedStep> {
        let Self { guest, pause_gate, subscription, disks, file, .. } = self;
        let _closed = pause_gate.close();
        let since = Instant::now();
        // Saved before the drain: saving may make the host write into guest memory.
        let (paused, saved) = step(EpochStep::Pause, || Paused::saving(*guest))?;
        let sections = step(EpochStep::Save, || saved)?;
        let changed = step(EpochStep::Drain, || paused.drain(subscription))?;
        step(EpochStep::CopyDrives, || disks.begin(&mut **file))?;
        let handled = handle(&changed, &mut **file)?;
        step(EpochStep::Resume, || paused.resume())?;
        let resumed = Instant::now();
        Ok(Pause { changed, sections, handled, time: resumed.duration_since(since), resumed })
    }
}

/// Returns the longest per-vCPU stop time of the single pause since `before`. `None` if a vCPU has
/// not resumed yet, has stopped more than once, or does not know. The thread that requests a pause
/// learns of its end only when it gets a processor, which the guest may be using again.
pub(crate) fn longest_stop(guest: &dyn Lifecycle, before: &[VcpuPauses]) -> Option<Duration> {
    let now = guest.vcpu_pauses();
    let once = |(now, before): (&VcpuPauses, &VcpuPauses)| now.pauses == before.pauses + 1;
    let all = now.len() == before.len() && now.iter().zip(before).all(once);
    if all { now.iter().map(|pauses| pauses.last).max() } else { None }
}
