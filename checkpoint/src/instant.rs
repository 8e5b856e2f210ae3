//! The instant of an epoch: the guest is stopped for as long as it takes to know what changed and to save its state.
//! What changed is copied in that pause, or, where it is much and the guest can [shield](Shield) it, behind its back:
//!
//! ```text
//! this thread    collect, drain   protect   PAUSE: save, drain again, copy that   write ............  publish
//! the saver              let go of what is written to .......................   copy, let go ...
//! the guest      runs ........................................................  runs; writes wait for what is not copied
//! ```
//!
//! So the pause depends on what changes while much is protected, which is little, and not on what changed before. Frames are
//! protected before the pause; one that is written to in between is let go of at once, is dirty again, and is copied in
//! the pause. From the pause on a frame is let go of when it has been copied: those that somebody waits for first, the
//! others in order. Copies wait in the staging area for the file; where that is slow, writers wait for room in it.

use std::io;
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender, TryRecvError};
use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use dirty_tracker::{Epoch, FrameRun, FrameSet, PAGE_SIZE, Subscription};

use crate::calm::Calm;
use crate::checkpointer::step;
use crate::copied::{Copied, Way, Ways};
use crate::cost::stood_since;
use crate::followed::{self, Followed, Stood};
use crate::pieces::{Pieces, in_slots, spans};
use crate::report::{Cause, Phase};
use crate::shield::{OfEpoch, Released, Waits};
use crate::staging::{Staging, copy, window};
use crate::store::EpochWriter;
use crate::{Guest, GuestError, Paused, Section, Shield};

/// Frames that are copied, and let go of, at once. Fewer cost more calls of the kernel, more hold a writer for longer.
const PIECE_FRAMES: u64 = 64;
/// What changes while much is protected is copied in the pause if it is at most so many frames, else protected, too.
const LATE_FRAMES: u64 = 512;
/// Frames that are written at a time where blocks of drives may be set aside meanwhile.
const AT_ONCE: u64 = 1024;
/// How often the saver looks whether the pause has come.
const BEFORE_LOOK: Duration = Duration::from_micros(500);
/// How often the saver looks whether somebody waits while there is no room for a copy.
const ROOM_LOOK: Duration = Duration::from_millis(1);
/// How long somebody may have waited to write, all in all in an epoch, when there is no room for a copy. Less than a pause
/// waits for vCPUs and devices, which may be among those that wait.
pub(crate) const PATIENCE: Duration = Duration::from_secs(2);

/// What an epoch is taken with.
pub(crate) struct Means<'m> {
    pub(crate) guest: &'m dyn Guest,
    /// Held in the pause.
    pub(crate) calm: &'m Calm,
    pub(crate) drives: &'m mut [Followed],
    /// Who writes to one waits for room; else what may have none is copied in the pause.
    pub(crate) patient: bool,
    pub(crate) shield: Option<&'m dyn Shield>,
    pub(crate) ways: &'m mut Ways,
    pub(crate) staging: &'m mut Staging,
    pub(crate) file: &'m mut EpochWriter,
}

/// An epoch all of which is in the file; nothing of it is durable yet.
pub(crate) struct Taken {
    /// To be committed once it is.
    pub(crate) changed: Vec<Epoch>,
    /// Frames that had to fit into the staging area at once.
    pub(crate) staged: u64,
    /// Frames, and blocks of drives, that were copied in the pause.
    pub(crate) in_pause: u64,
    /// Frames copied while the guest ran.
    pub(crate) behind: u64,
    /// How often somebody waited to write, before the pause or after it.
    pub(crate) waits: u64,
    /// For how long somebody did.
    pub(crate) waited: Duration,
    /// For how long the guest stood, by its vCPUs' clocks where those tell.
    pub(crate) pause: Duration,
    pub(crate) resumed: Instant,
}

impl Taken {
    /// Nothing was copied while the guest ran, and nobody waited. It stood for `pause`.
    fn new(all: Vec<Epoch>, staged: u64, of: &[Stood], (pause, at): (Duration, Instant)) -> Self {
        let (in_pause, changed, waited) = (followed::in_pause(of), all, Duration::ZERO);
        Self { changed, staged, in_pause, behind: 0, waits: 0, waited, pause, resumed: at }
    }
}

/// Takes what changed since the last epoch, and the state. On every way out the guest runs again if it ran before, and
/// nobody waits for a frame or a block.
pub(crate) fn take(
    means: Means<'_>,
    subscription: &mut Subscription,
) -> Result<Taken, (Phase, Cause)> {
    let Means { guest, calm, drives, patient, shield, ways, staging, file } = means;
    let before = guest.stood();
    let (staging_of, file_of) = (&mut *staging, &mut *file);
    let means =
        Means { staging: staging_of, file: file_of, guest, calm, drives, patient, shield, ways };
    let (mut taken, blocks) = take_one(means, subscription)?;
    // By now they have gone on; there may be another pause while drives are copied.
    if let Some(stood) = stood_since(guest, &before) {
        taken.pause = stood;
    }
    // After memory, for which vCPUs wait.
    let copied = step(Phase::CopyDrives, || followed::copy_behind(blocks, staging, file));
    let (mut changed, waits) = copied?;
    taken.changed.append(&mut changed);
    taken.waits += waits.times;
    taken.waited += waits.time;
    Ok(taken)
}

/// An epoch without what changed of drives, and what that is.
type Apart = (Taken, Vec<Stood>);

fn take_one(means: Means<'_>, subscription: &mut Subscription) -> Result<Apart, (Phase, Cause)> {
    // What is collected now is not in the pause.
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

/// What a pause brought.
struct Pause<T> {
    changed: Epoch,
    blocks: Vec<Stood>,
    sections: Vec<Section>,
    dealt: T,
    time: Duration,
}

/// The pause: saves the state and learns what changed. Ends when that has been dealt with by `deal`.
fn pause<T>(
    guest: &dyn Guest,
    calm: &Calm,
    (drives, patient): (&mut [Followed], bool),
    subscription: &mut Subscription,
    file: &mut EpochWriter,
    deal: impl FnOnce(&Epoch, &mut EpochWriter) -> Result<T, (Phase, Cause)>,
) -> Result<Pause<T>, (Phase, Cause)> {
    let _held = calm.hold();
    let since = Instant::now();
    // Saved before the drain: saving may make the host write into guest memory.
    let (paused, saved) = step(Phase::Pause, || Paused::saving(guest))?;
    let sections = step(Phase::Save, || saved)?;
    let changed = step(Phase::Drain, || paused.drain(subscription))?;
    let blocks = step(Phase::Drain, || followed::stand(drives, patient, file))?;
    let dealt = deal(&changed, file)?;
    step(Phase::Resume, || paused.resume())?;
    Ok(Pause { changed, blocks, sections, dealt, time: since.elapsed() })
}

/// Takes an epoch of which `early` is drained already, if anything is.
fn in_the_pause(
    means: Means<'_>,
    early: Option<Epoch>,
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
                followed::save_aside(&mut blocks, &mut aside, file)?;
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

/// Takes an epoch of which `early` is drained already.
fn behind(
    means: Means<'_>,
    shield: &dyn Shield,
    early: Epoch,
    subscription: &mut Subscription,
) -> Result<Apart, (Phase, Cause)> {
    let Means { guest, calm, drives, patient, staging, file, .. } = means;
    let drives = (drives, patient);
    let shield = &OfEpoch::new(shield);
    // The saver has one of its own: if it ends early, nothing is protected after.
    let _released = Released(shield);
    let piece_frames = PIECE_FRAMES.min(staging.frames() / 2);
    let (late_room, room) = staging.split(LATE_FRAMES.min(staging.frames() / 2));
    let (to_guest, empty) = mpsc::channel();
    for buffer in room.chunks_exact_mut((piece_frames * PAGE_SIZE) as usize) {
        // The receiver is here.
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
        let saving = thread::Builder::new()
            .name("checkpoint-copy".into())
            .spawn_scoped(scope, move || saver.run())
            .map_err(|e| (Phase::Protect, system("starting a thread that copies", e)))?;
        let before = &before;
        let taker = Taker { guest, calm, shield, before, late_room, file, go, full, to_guest };
        let taken = taker.take(early, drives, subscription);
        // Its channels are closed: the saver ends if it has not.
        let saved = saving.join().unwrap_or_else(|_| {
            Err(system("copying behind the guest", io::Error::other("its thread panicked")))
        });
        // First why the saver ended: what befell the other may have come of that. By itself it fails for no other's failure.
        let saved = saved.map_err(|cause| (Phase::CopyBehind, cause))?;
        let (mut taken, blocks) = taken?;
        (taken.behind, taken.waits, taken.waited) = (saved.frames, saved.waits, saved.waited);
        Ok((taken, blocks))
    })
}

fn system(what: &'static str, e: io::Error) -> Cause {
    GuestError::System { what, cause: e.into() }.into()
}

/// What was let go of before the pause; `None` once that is no longer done. Under one lock, so that nothing is let go of
/// unknown to the pause: who waited may have been stopped before it wrote, and writes after.
type Before = Mutex<Option<Vec<FrameRun>>>;

/// A piece on its way to the file.
struct Full<'b> {
    runs: Vec<FrameRun>,
    buffer: &'b mut [u8],
}

/// What the thread has that takes the epoch.
struct Taker<'m, 'b> {
    guest: &'m dyn Guest,
    calm: &'m Calm,
    shield: &'m OfEpoch<'m>,
    before: &'m Before,
    late_room: &'b mut [u8],
    file: &'m mut EpochWriter,
    go: Sender<(FrameSet, FrameSet)>,
    full: Receiver<Full<'b>>,
    to_guest: Sender<&'b mut [u8]>,
}

impl Taker<'_, '_> {
    fn take(
        self,
        early: Epoch,
        drives: (&mut [Followed], bool),
        subscription: &mut Subscription,
    ) -> Result<Apart, (Phase, Cause)> {
        let Self { guest, calm, shield, before, late_room, file, go, full, to_guest } = self;
        let layout = guest.layout();
        let mut frames: FrameSet = early.runs().collect();
        step(Phase::Protect, || shield.protect(&spans(layout, &frames)))?;
        let Pause { changed, mut blocks, sections, dealt: late, time } =
            pause(guest, calm, drives, subscription, file, |changed, _| {
                let released = before.lock().unwrap_or_else(PoisonError::into_inner).take();
                let mut late: FrameSet =
                    changed.runs().chain(released.unwrap_or_default()).collect();
                if late.frames() * PAGE_SIZE <= late_room.len() as u64 {
                    step(Phase::Copy, || copy(late_room, guest.ram(), in_slots(layout, &late)))?;
                } else {
                    step(Phase::Protect, || shield.protect(&spans(layout, &late)))?;
                    frames.insert_all(late.as_slice());
                    late.clear();
                }
                // While it stands: from here on nothing is let go of that is not copied. A saver that has ended says why
                // when it is joined.
                let _ = go.send((std::mem::take(&mut frames), late.clone()));
                Ok(late)
            })?;
        let resumed = Instant::now();
        step::<_, Cause>(Phase::Write, || {
            let mut aside = Vec::new();
            for Full { runs, buffer } in full {
                file.frames(runs.iter().copied(), buffer, false)?;
                // The saver may have copied all there is.
                let _ = to_guest.send(buffer);
                followed::save_aside(&mut blocks, &mut aside, file)?;
            }
            let bytes = (late.frames() * PAGE_SIZE) as usize;
            file.frames(in_slots(layout, &late), &late_room[..bytes], false)?;
            Ok(sections.iter().try_for_each(|section| file.section(section))?)
        })?;
        Ok((Taken::new(vec![early, changed], 0, &blocks, (time, resumed)), blocks))
    }
}

/// Copies what is protected and lets go of it.
struct Saver<'m, 'b> {
    guest: &'m dyn Guest,
    shield: &'m OfEpoch<'m>,
    before: &'m Before,
    /// What is to be copied, and what not of that, told while the guest stands; closed if nothing is.
    gone: Receiver<(FrameSet, FrameSet)>,
    empty: Receiver<&'b mut [u8]>,
    to_file: Sender<Full<'b>>,
    piece_frames: u64,
    waits: Waits,
}

/// What a saver did.
#[derive(Debug, Default)]
struct Saved {
    frames: u64,
    waits: u64,
    waited: Duration,
}

impl<'b> Saver<'_, 'b> {
    fn run(mut self) -> Result<Saved, Cause> {
        let _released = Released(self.shield);
        let frames = match self.until_the_pause()? {
            Some((frames, late)) => self.save(&frames, &late)?,
            None => 0,
        };
        Ok(Saved { frames, waits: self.waits.times, waited: self.waits.all() })
    }

    /// Copies `frames` without `late`. How many; fewer if the file has failed, which is the better reason.
    fn save(&mut self, frames: &FrameSet, late: &FrameSet) -> Result<u64, Cause> {
        let frames: FrameSet = frames.iter().flat_map(|run| late.gaps(run)).collect();
        let mut pieces = Pieces::new(self.guest.layout(), &frames, self.piece_frames);
        let mut saved = 0;
        while let Some(next) = pieces.next() {
            // Before it is chosen what to copy: somebody may begin to wait meanwhile.
            let Some(buffer) = self.room(&pieces)? else { return Ok(saved) };
            let piece = self.wanted(&pieces)?.unwrap_or(next);
            let runs = pieces.runs(piece).to_vec();
            copy(buffer, self.guest.ram(), runs.iter().copied())?;
            pieces.spans(piece).try_for_each(|span| self.shield.release(span))?;
            self.waits.over();
            pieces.done(piece);
            saved += runs.iter().map(|run| run.count).sum::<u64>();
            if self.to_file.send(Full { runs, buffer }).is_err() {
                return Ok(saved);
            }
        }
        Ok(saved)
    }

    /// The piece that somebody waits for, if it is to be copied. What is not is let go of.
    fn wanted(&mut self, pieces: &Pieces) -> Result<Option<usize>, GuestError> {
        loop {
            self.waits.look(self.shield, Duration::ZERO)?;
            let Some(FrameRun { start, .. }) = self.waits.awaited else { return Ok(None) };
            if let Some(piece) = pieces.with(start) {
                return Ok(Some(piece));
            }
            // It is free already, or was copied in the pause.
            self.shield.release(FrameRun { start, count: 1 })?;
            self.waits.over();
        }
    }

    /// Lets go of what is written to, until it is said what is to be copied. `None` if nothing is.
    fn until_the_pause(&mut self) -> Result<Option<(FrameSet, FrameSet)>, Cause> {
        loop {
            match self.gone.try_recv() {
                Ok(sets) => return Ok(Some(sets)),
                Err(TryRecvError::Disconnected) => return Ok(None),
                Err(TryRecvError::Empty) => {}
            }
            self.waits.look(self.shield, BEFORE_LOOK)?;
            let Some(frames) = self.waits.awaited else { continue };
            let mut before = self.before.lock().unwrap_or_else(PoisonError::into_inner);
            let Some(released) = &mut *before else {
                drop(before);
                // The guest stands, or has stood.
                let sets = self.gone.recv().ok();
                // A pause is not the store's doing.
                self.waits.since = Some(Instant::now());
                return Ok(sets);
            };
            self.shield.release(frames)?;
            released.push(frames);
            self.waits.over();
        }
    }

    /// Room for a piece; `None` if the file has failed. Fails if somebody has waited for too long.
    fn room(&mut self, pieces: &Pieces) -> Result<Option<&'b mut [u8]>, Cause> {
        let mut limit = Duration::ZERO;
        loop {
            match self.empty.recv_timeout(limit) {
                Ok(buffer) => return Ok(Some(buffer)),
                Err(RecvTimeoutError::Disconnected) => return Ok(None),
                Err(RecvTimeoutError::Timeout) => limit = ROOM_LOOK,
            }
            if self.wanted(pieces)?.is_some() && self.waits.all() >= PATIENCE {
                return Err(Cause::Stalled(PATIENCE));
            }
        }
    }
}

#[cfg(all(test, feature = "testing"))]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::VmId;
    use crate::testing::{MemoryConfig, MemoryGuest};
    use dirty_tracker::Gfn;

    /// Has a guest wait for a store that takes a frame each `every`, or none, and says for how long the saver put up with that.
    fn stalled(every: Option<Duration>) -> Duration {
        let guest = MemoryGuest::new(VmId::random(), MemoryConfig::still()).unwrap();
        let opened = guest.shield().unwrap().unwrap();
        let shield = &OfEpoch::new(&*opened);
        let frames = FrameRun { start: Gfn(3), count: 40 };
        shield.protect(&[frames]).unwrap();
        let mut buffer = vec![0; PAGE_SIZE as usize];
        let ((go, gone), (to_file, full)) = (mpsc::channel(), mpsc::channel());
        let (to_guest, empty) = mpsc::channel();
        go.send((FrameSet::from_iter([frames]), FrameSet::new())).unwrap();
        if every.is_some() {
            to_guest.send(&mut buffer[..]).unwrap();
        }
        let writer = guest.clone();
        // Against the order of the pieces.
        let writer =
            thread::spawn(move || (3..43).rev().try_for_each(|gfn| writer.write(Gfn(gfn), &[1])));
        let (guest_dyn, before) = (&*guest as &dyn Guest, &Mutex::new(None));
        let (waits, piece_frames) = (Waits::default(), 1);
        let saver =
            Saver { guest: guest_dyn, shield, before, gone, empty, to_file, piece_frames, waits };
        let since = Instant::now();
        thread::scope(|scope| {
            scope.spawn(move || {
                for Full { buffer, .. } in full {
                    thread::sleep(every.unwrap_or(PATIENCE));
                    let _ = to_guest.send(buffer);
                }
            });
            let saved = saver.run();
            assert!(matches!(saved, Err(Cause::Stalled(_))), "{saved:?}");
        });
        let took = since.elapsed();
        writer.join().unwrap().unwrap();
        assert_eq!(guest.protected(), 0);
        shield.protect(&[frames]).unwrap_err();
        assert_eq!(guest.protected(), 0, "nobody would serve who waits");
        took
    }

    #[test]
    fn a_store_that_takes_nothing_does_not_hold_the_guest_for_ever() {
        assert!(stalled(None) >= PATIENCE);
    }

    #[test]
    fn nor_does_one_that_takes_little_each_time() {
        // 40 frames would take 10 s.
        let took = stalled(Some(Duration::from_millis(250)));
        assert!((PATIENCE..2 * PATIENCE).contains(&took), "{took:?}");
    }
}
