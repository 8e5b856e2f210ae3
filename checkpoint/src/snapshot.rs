//! The instant of an epoch. The guest is paused for as long as it takes to drain what changed and
//! to save its state. Changed frames are copied in that pause. If there are many and the guest can
//! [write-protect](Shield) them, they are copied after the guest has resumed:
//!
//! ```text
//! this thread   collect, drain, protect; repeat   PAUSE: save, drain, copy   write ...  publish
//! copy thread       unprotect what is written ..                             copy, unprotect ..
//! guest         runs .........................                               runs; a write to an
//!                                                                            uncopied frame waits
//! ```
//!
//! So the length of the pause depends on what changes while little is protected, not on what
//! changed before. Frames are protected before the pause; if that takes long, so are the frames
//! that change meanwhile. A frame that the guest writes before the pause is unprotected at once,
//! becomes dirty again, and is copied in the pause. After the pause, a frame is unprotected when it
//! has been copied: frames with a waiting writer first, the others in order. Copies wait in the
//! staging area until they are written to the file. If the file is slow, writers wait for room in
//! the area.

use std::io;
use std::sync::mpsc::{self, Receiver, Sender};
use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use driftline_dirty_tracker::{DirtySet, FrameSet, PAGE_SIZE, Subscription};
use driftline_guest::{GuestError, Shield};
use driftline_store::{Calm, EpochWriter};

use crate::background_copy::{Before, Full, Saver};
use crate::chunks::{in_slots, spans};
use crate::copy_policy::{Way, Ways};
use crate::disk_copy::{self, Followed, Stood};
use crate::guest::Checkpointable;
use crate::pause::{Pause, pause, stood_since};
use crate::precopy_buffer::Copied;
use crate::protection::{OfEpoch, Released, Waits};
use crate::report::{Cause, Phase, step};
use crate::staging::{Staging, copy, window};

/// Frames copied and unprotected at a time. Smaller pieces cost more system calls, larger ones
/// delay a writer for longer.
const PIECE_FRAMES: u64 = 64;
/// Frames that changed while others were being protected are copied in the pause if there are at
/// most this many; otherwise they are protected, too.
const LATE_FRAMES: u64 = 512;
/// Frames that changed while others were being protected are protected before the pause, too, if
/// there are more than this many, or more than the policy's threshold (`Ways::behind_from`) if that
/// is lower. There are mostly fewer of them than in the round before, so each round takes less long
/// and fewer frames change meanwhile.
const AGAIN_FRAMES: u64 = LATE_FRAMES / 2;
/// Maximum number of extra rounds. After that the guest writes faster than frames are protected.
const AGAIN_TIMES: u32 = 2;
/// Frames written at a time while copy-before-write may be saving blocks of drives.
const AT_ONCE: u64 = 1024;

/// Everything an epoch is taken with.
pub(crate) struct Means<'m> {
    pub(crate) guest: &'m dyn Checkpointable,
    /// Held in the pause.
    pub(crate) calm: &'m Calm,
    pub(crate) drives: &'m mut [Followed],
    /// Whether writes to a drive may wait for room. If not, blocks that may find no room are copied
    /// in the pause.
    pub(crate) patient: bool,
    pub(crate) shield: Option<&'m dyn Shield>,
    pub(crate) ways: &'m mut Ways,
    pub(crate) staging: &'m mut Staging,
    pub(crate) file: &'m mut EpochWriter,
}

/// An epoch whose content is all in the file; nothing of it is durable yet.
pub(crate) struct Taken {
    /// Changed frames and blocks, to be committed once the epoch is durable.
    pub(crate) changed: Vec<DirtySet>,
    /// Frames that had to fit into the staging area at once.
    pub(crate) staged: u64,
    /// Frames, and blocks of drives, that were copied in the pause.
    pub(crate) in_pause: u64,
    /// Frames copied while the guest ran.
    pub(crate) behind: u64,
    /// Number of times a write waited, before the pause or after it.
    pub(crate) waits: u64,
    /// Time for which writes waited.
    pub(crate) waited: Duration,
    /// Length of the pause, by the vCPUs' clocks where these are available.
    pub(crate) pause: Duration,
    pub(crate) resumed: Instant,
}

impl Taken {
    /// An epoch with a pause of `pause` in which nothing was copied while the guest ran and no
    /// write waited.
    fn new(
        all: Vec<DirtySet>,
        staged: u64,
        of: &[Stood],
        (pause, at): (Duration, Instant),
    ) -> Self {
        let (in_pause, changed, waited) = (disk_copy::in_pause(of), all, Duration::ZERO);
        Self { changed, staged, in_pause, behind: 0, waits: 0, waited, pause, resumed: at }
    }
}

/// Takes the state, and what changed since the last epoch. On every return path the guest runs
/// again if it ran before, and no write waits for a frame or a block.
pub(crate) fn take(
    means: Means<'_>,
    subscription: &mut Subscription,
) -> Result<Taken, (Phase, Cause)> {
    let Means { guest, calm, drives, patient, shield, ways, staging, file } = means;
    let before = guest.vcpu_pauses();
    let (staging_of, file_of) = (&mut *staging, &mut *file);
    let means =
        Means { staging: staging_of, file: file_of, guest, calm, drives, patient, shield, ways };
    let (mut taken, blocks) = take_one(means, subscription)?;
    // The vCPUs have resumed by now. There may be another pause while drives are copied.
    if let Some(stood) = stood_since(guest, &before) {
        taken.pause = stood;
    }
    // Drives come after memory, because vCPUs wait for memory.
    let copied = step(Phase::CopyDrives, || disk_copy::copy_behind(blocks, staging, file));
    let (mut changed, waits) = copied?;
    taken.changed.append(&mut changed);
    taken.waits += waits.times;
    taken.waited += waits.time;
    Ok(taken)
}

/// An epoch without the changed blocks of drives, and those blocks.
type Apart = (Taken, Vec<Stood>);

fn take_one(means: Means<'_>, subscription: &mut Subscription) -> Result<Apart, (Phase, Cause)> {
    // What is collected here need not be collected in the pause.
    step(Phase::Drain, || means.guest.collect())?;
    let early = subscription.drain();
    let room = means.staging.frames();
    let way = means.ways.of_next(early.frames(), room, means.shield.is_some());
    match (way, means.shield) {
        (Way::Behind, Some(shield)) => behind(means, shield, early, subscription),
        (Way::Before, _) => in_the_pause(means, Some(early), subscription),
        _ => {
            early.give_back();
            in_the_pause(means, None, subscription)
        }
    }
}

/// Takes an epoch in the pause. `early` holds the frames that are already drained, if any.
fn in_the_pause(
    means: Means<'_>,
    early: Option<DirtySet>,
    subscription: &mut Subscription,
) -> Result<Apart, (Phase, Cause)> {
    let Means { guest, calm, drives, patient, staging, ways, file, .. } = means;
    let mut copied = match &early {
        Some(early) => step(Phase::CopyLive, || Copied::before_pause(guest, staging, early))?,
        None => Copied::default(),
    };
    let Pause { changed, mut blocks, sections, dealt: (), time } =
        pause(guest, calm, (drives, patient), subscription, file, |changed, file| {
            step(Phase::Copy, || copied.in_pause(guest, staging, file, changed.runs()))
        })?;
    let resumed = Instant::now();
    step::<_, Cause>(Phase::Write, || {
        let mut aside = Vec::new();
        for (runs, at) in copied.left() {
            let left = runs.iter().map(|run| run.count).sum();
            let at_once = if blocks.is_empty() { left } else { AT_ONCE };
            for from in (0..left).step_by(at_once.max(1) as usize) {
                let count = at_once.min(left - from);
                let part = window(runs.iter().copied(), from, count);
                file.frames(part, staging.from(at + from, count), false)?;
                disk_copy::save_aside(&mut blocks, &mut aside, file)?;
            }
        }
        Ok(sections.iter().try_for_each(|section| file.section(section))?)
    })?;
    if early.is_some() {
        ways.note(&copied);
    }
    let all = early.into_iter().chain([changed]).collect();
    let mut taken = Taken::new(all, copied.staged(), &blocks, (time, resumed));
    taken.in_pause += copied.copied_in_pause();
    Ok((taken, blocks))
}

/// Takes an epoch that is copied after the guest has resumed. `early` is already drained.
fn behind(
    means: Means<'_>,
    shield: &dyn Shield,
    early: DirtySet,
    subscription: &mut Subscription,
) -> Result<Apart, (Phase, Cause)> {
    let Means { guest, calm, drives, patient, ways, staging, file, .. } = means;
    let drives = (drives, patient);
    let shield = &OfEpoch::new(shield);
    // The copy thread has its own guard: if it ends early, nothing can be protected afterwards.
    let _released = Released(shield);
    let piece_frames = PIECE_FRAMES.min(staging.frames() / 2);
    let (late_room, room) = staging.split(LATE_FRAMES.min(staging.frames() / 2));
    let (to_guest, empty) = mpsc::channel();
    for buffer in room.chunks_exact_mut((piece_frames * PAGE_SIZE) as usize) {
        // The receiver is in this function.
        let _ = to_guest.send(buffer);
    }
    let (go, gone) = mpsc::channel();
    let (to_file, full) = mpsc::channel();
    let before = Mutex::new(Some(Vec::new()));
    let saver = Saver {
        guest,
        shield,
        before: &before,
        gone,
        empty,
        to_file,
        piece_frames,
        waits: Waits::default(),
    };
    thread::scope(|scope| {
        let span = tracing::Span::current();
        let saving = thread::Builder::new()
            .name("checkpoint-copy".into())
            .spawn_scoped(scope, move || span.in_scope(|| saver.run()))
            .map_err(|e| (Phase::Protect, system("starting a thread that copies", e)))?;
        let before = &before;
        let again_over = AGAIN_FRAMES.min(ways.behind_from());
        let taker =
            Taker { guest, calm, shield, before, again_over, late_room, file, go, full, to_guest };
        let taken = taker.take(early, drives, subscription);
        // The channels are closed: the copy thread ends if it has not ended yet.
        let saved = saving.join().unwrap_or_else(|_| {
            Err(system("copying behind the guest", io::Error::other("its thread panicked")))
        });
        // Report the copy thread's error first: the other error may follow from it. The copy thread
        // never fails because of an error of this thread.
        let saved = saved.map_err(|cause| (Phase::CopyBehind, cause))?;
        let (mut taken, blocks) = taken?;
        (taken.behind, taken.waits, taken.waited) = (saved.frames, saved.waits, saved.waited);
        Ok((taken, blocks))
    })
}

fn system(what: &'static str, e: io::Error) -> Cause {
    GuestError::System { what, cause: e.into() }.into()
}

/// State of the thread that takes the epoch.
struct Taker<'m, 'b> {
    guest: &'m dyn Checkpointable,
    calm: &'m Calm,
    shield: &'m OfEpoch<'m>,
    before: &'m Before,
    /// If more frames than this changed meanwhile, they are protected before the pause, too.
    again_over: u64,
    late_room: &'b mut [u8],
    file: &'m mut EpochWriter,
    go: Sender<(FrameSet, FrameSet)>,
    full: Receiver<Full<'b>>,
    to_guest: Sender<&'b mut [u8]>,
}

impl Taker<'_, '_> {
    fn take(
        self,
        early: DirtySet,
        drives: (&mut [Followed], bool),
        subscription: &mut Subscription,
    ) -> Result<Apart, (Phase, Cause)> {
        let Self { guest, calm, shield, before, again_over, .. } = self;
        let Self { late_room, file, go, full, to_guest, .. } = self;
        let layout = guest.layout();
        let Ahead { mut frames, left, mut epochs } =
            protect_ahead(guest, shield, before, (early, again_over), subscription)?;
        let Pause { changed, mut blocks, sections, dealt: late, time } =
            pause(guest, calm, drives, subscription, file, |changed, _| {
                let released = before.lock().unwrap_or_else(PoisonError::into_inner).take();
                let released = released.into_iter().flatten();
                let mut late: FrameSet =
                    changed.runs().chain(left.iter()).chain(released).collect();
                if late.frames() * PAGE_SIZE <= late_room.len() as u64 {
                    step(Phase::Copy, || copy(late_room, guest.ram(), in_slots(layout, &late)))?;
                } else {
                    step(Phase::Protect, || shield.protect(&spans(layout, &late)))?;
                    frames.insert_all(late.as_slice());
                    late.clear();
                }
                Ok(late)
            })?;
        let resumed = Instant::now();
        // Since `released` was taken, no frame has been unprotected without being copied. If the
        // copy thread has ended, its join returns the reason.
        let _ = go.send((frames, late.clone()));
        step::<_, Cause>(Phase::Write, || {
            let mut aside = Vec::new();
            for Full { runs, buffer } in full {
                file.frames(runs.iter().copied(), buffer, false)?;
                // The copy thread may have ended because everything is copied.
                let _ = to_guest.send(buffer);
                disk_copy::save_aside(&mut blocks, &mut aside, file)?;
            }
            let bytes = (late.frames() * PAGE_SIZE) as usize;
            file.frames(in_slots(layout, &late), &late_room[..bytes], false)?;
            Ok(sections.iter().try_for_each(|section| file.section(section))?)
        })?;
        epochs.push(changed);
        Ok((Taken::new(epochs, 0, &blocks, (time, resumed)), blocks))
    }
}

/// What was protected before a pause, so that little is left for the pause.
struct Ahead {
    /// Frames that were protected; some may have been unprotected since.
    frames: FrameSet,
    /// Frames that changed since and were not protected.
    left: FrameSet,
    /// The dirty sets of all of these.
    epochs: Vec<DirtySet>,
}

/// Protects the frames in `early`. Repeats with the frames that change meanwhile, as long as there
/// are more than `again_over` of them.
fn protect_ahead(
    guest: &dyn Checkpointable,
    shield: &OfEpoch<'_>,
    before: &Before,
    (early, again_over): (DirtySet, u64),
    subscription: &mut Subscription,
) -> Result<Ahead, (Phase, Cause)> {
    let layout = guest.layout();
    let mut next: FrameSet = early.runs().collect();
    let (mut frames, mut epochs) = (FrameSet::new(), vec![early]);
    for again in 0.. {
        step(Phase::Protect, || shield.protect(&spans(layout, &next)))?;
        frames.insert_all(next.as_slice());
        step(Phase::Drain, || guest.collect())?;
        let since = subscription.drain();
        next = since.runs().collect();
        epochs.push(since);
        if next.frames() <= again_over || again == AGAIN_TIMES {
            break;
        }
        // These frames are protected again with the others, so they are not late. A frame that is
        // unprotected and written from now on is in the next drain.
        if let Some(released) = &mut *before.lock().unwrap_or_else(PoisonError::into_inner) {
            next.insert_all(&std::mem::take(released));
        }
    }
    Ok(Ahead { frames, left: next, epochs })
}

#[cfg(all(test, feature = "testing"))]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicU64, Ordering::SeqCst};

    use driftline_dirty_tracker::{FrameRun, Gfn, Slot, SlotId};
    use proptest::prelude::*;

    use super::*;
    use driftline_guest::testing::{MemoryConfig, MemoryGuest};
    use driftline_guest::{DirtyLog, VmId};

    const FIRST: FrameRun = FrameRun { start: Gfn(0), count: 1000 };

    /// A shield that protects nothing. During each call, the guest writes to consecutive frames.
    struct Busy {
        guest: Arc<MemoryGuest>,
        /// Frames written in each call.
        writes: Vec<u64>,
        times: AtomicU64,
        protected: Mutex<Vec<FrameSet>>,
    }

    impl Busy {
        fn written(&self, time: usize) -> FrameRun {
            let start = FIRST.end().0 + self.writes[..time].iter().sum::<u64>();
            FrameRun { start: Gfn(start), count: self.writes[time] }
        }
    }

    impl Shield for Busy {
        fn protect(&self, frames: &[FrameRun]) -> Result<(), GuestError> {
            self.protected.lock().unwrap().push(frames.iter().copied().collect());
            let written = self.written(self.times.fetch_add(1, SeqCst) as usize);
            (written.start.0..written.end().0).try_for_each(|gfn| self.guest.write(Gfn(gfn), &[1]))
        }

        fn release(&self, _: FrameRun) -> Result<(), GuestError> {
            Ok(())
        }

        fn release_all(&self) {}

        fn awaited(&self, _: Duration) -> Result<Option<FrameRun>, GuestError> {
            Ok(None)
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]

        /// Rounds end when few frames change, or when the maximum number of rounds is reached.
        #[test]
        fn what_changes_while_much_is_protected_is_protected_too(
            writes in prop::collection::vec(prop_oneof![1..=AGAIN_FRAMES, AGAIN_FRAMES + 1..1000], 3),
        ) {
            let slot = Slot { id: SlotId(0), base: Gfn(0), frames: 4000 };
            let config = MemoryConfig { slots: vec![slot], ..MemoryConfig::still() };
            let guest = MemoryGuest::new(VmId::random(), config).unwrap();
            let mut subscription = guest.subscribe("test").unwrap();
            subscription.drain().commit();
            (FIRST.start.0..FIRST.end().0).for_each(|gfn| guest.write(Gfn(gfn), &[1]).unwrap());
            let early = subscription.drain();
            let (times, protected) = (AtomicU64::new(0), Mutex::default());
            let busy = Busy { guest: guest.clone(), writes: writes.clone(), times, protected };
            let let_go = FrameRun { start: Gfn(7), count: 3 };
            let before = Mutex::new(Some(vec![let_go]));
            let shield = OfEpoch::new(&busy);
            let early = (early, AGAIN_FRAMES);
            let ahead = protect_ahead(&*guest, &shield, &before, early, &mut subscription).unwrap();

            let last = writes.iter().position(|n| *n <= AGAIN_FRAMES).unwrap_or(2);
            let mut wants = vec![FrameSet::from_iter([FIRST])];
            wants.extend((0..last).map(|time| FrameSet::from_iter([busy.written(time)])));
            if let Some(again) = wants.get_mut(1) {
                again.insert(let_go);
            }
            prop_assert_eq!(&*busy.protected.lock().unwrap(), &wants);
            let union = wants.iter().flat_map(FrameSet::iter).collect::<FrameSet>();
            prop_assert_eq!(ahead.frames, union);
            prop_assert_eq!(ahead.left.frames(), writes[last]);
            prop_assert!(ahead.left.contains_run(busy.written(last)));
            // A frame that is protected again is not late; otherwise it is.
            let late = if last > 0 { vec![] } else { vec![let_go] };
            prop_assert_eq!(before.into_inner().unwrap(), Some(late));
            let drained = ahead.epochs.iter().map(DirtySet::frames).sum::<u64>();
            prop_assert_eq!(drained, 1000 + writes[..=last].iter().sum::<u64>());
        }
    }
}
