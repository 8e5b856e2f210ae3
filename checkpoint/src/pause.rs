//! The pause of an epoch, from when the guest is asked to stop until it has gone on, and how long
//! it stood.

use std::time::{Duration, Instant};

use driftline_dirty_tracker::{DirtySet, Subscription};
use driftline_guest::{Guest, Paused, Section, VcpuPauses};
use driftline_store::{Calm, EpochWriter};

use crate::disk_copy::{self, Followed, Stood};
use crate::report::{Cause, Phase, step};

/// What a pause brought.
pub(crate) struct Pause<T> {
    pub(crate) changed: DirtySet,
    pub(crate) blocks: Vec<Stood>,
    pub(crate) sections: Vec<Section>,
    pub(crate) dealt: T,
    /// By the clock of who asked for it.
    pub(crate) time: Duration,
}

/// The pause: saves the state and learns what changed. The guest goes on when that has been dealt
/// with by `deal`.
pub(crate) fn pause<T>(
    guest: &dyn Guest,
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

/// How long the vCPU stood that stood longest in the one pause since then; `None` if one of them
/// has not gone on yet, has stood more often, or does not know. Who asks for a pause is told of its
/// end by a thread that has to get a processor first, which the guest may have again.
pub(crate) fn stood_since(guest: &dyn Guest, before: &[VcpuPauses]) -> Option<Duration> {
    let now = guest.stood();
    let once = |(now, before): (&VcpuPauses, &VcpuPauses)| now.pauses == before.pauses + 1;
    let all = now.len() == before.len() && now.iter().zip(before).all(once);
    if all { now.iter().map(|stood| stood.last).max() } else { None }
}
