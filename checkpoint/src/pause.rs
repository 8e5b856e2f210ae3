//! The pause of an epoch, from the pause request until the guest has resumed, and its length.

use std::time::{Duration, Instant};

use driftline_dirty_tracker::{DirtySet, Subscription};
use driftline_guest::{Lifecycle, Paused, Section, VcpuPauses};
use driftline_store::{Calm, EpochWriter};

use crate::disk_copy::{self, Followed, Stood};
use crate::guest::Checkpointable;
use crate::report::{Cause, Phase, step};

/// The results of a pause.
pub(crate) struct Pause<T> {
    pub(crate) changed: DirtySet,
    pub(crate) blocks: Vec<Stood>,
    pub(crate) sections: Vec<Section>,
    pub(crate) dealt: T,
    /// Length by the clock of the thread that requested the pause.
    pub(crate) time: Duration,
}

/// Pauses the guest, saves its state, and drains what changed. The guest resumes after `deal` has
/// handled that.
pub(crate) fn pause<T>(
    guest: &dyn Checkpointable,
    calm: &Calm,
    (drives, patient): (&mut [Followed], bool),
    subscription: &mut Subscription,
    file: &mut EpochWriter,
    deal: impl FnOnce(&DirtySet, &mut EpochWriter) -> Result<T, (Phase, Cause)>,
) -> Result<Pause<T>, (Phase, Cause)> {
    let _held = calm.hold();
    let since = Instant::now();
    // Saved before the drain: saving may make the host write into guest memory.
    let (paused, saved) = step(Phase::Pause, || Paused::saving(guest))?;
    let sections = step(Phase::Save, || saved)?;
    let changed = step(Phase::Drain, || paused.drain(subscription))?;
    let blocks = step(Phase::Drain, || disk_copy::stand(drives, patient, file))?;
    let dealt = deal(&changed, file)?;
    step(Phase::Resume, || paused.resume())?;
    Ok(Pause { changed, blocks, sections, dealt, time: since.elapsed() })
}

/// Returns the longest per-vCPU stop time of the single pause since `before`. `None` if a vCPU has
/// not resumed yet, has stopped more than once, or does not know. The thread that requests a pause
/// learns of its end only when it gets a processor, which the guest may be using again.
pub(crate) fn stood_since(guest: &dyn Lifecycle, before: &[VcpuPauses]) -> Option<Duration> {
    let now = guest.vcpu_pauses();
    let once = |(now, before): (&VcpuPauses, &VcpuPauses)| now.pauses == before.pauses + 1;
    let all = now.len() == before.len() && now.iter().zip(before).all(once);
    if all { now.iter().map(|stood| stood.last).max() } else { None }
}
