//! Owns the second look at a guest's writes, `run --shadow`: whether the guest's tracking has told
//! of every frame that changed.
//!
//! Now and then it holds the guest still, devices included, and collects. A frame whose content is
//! another than the last time, and that was not reported since, was *missed*: there is no innocent
//! way to that, because what changes memory is known by the time a guest stands. Contents are known
//! by a checksum of 32 bits a frame, so one change in four thousand million does not show.
//!
//! | mode | which frames are looked at |
//! | --- | --- |
//! | `compare` | all that have memory; a pause reads all of it |
//! | `userfault-wp` | those that either side reports; a pause costs what is written |
//!
//! The reverse is no error: KVM counts a frame that it maps writable for a read, and a write of the
//! same bytes changes nothing.

use std::fmt;
use std::str::FromStr;
use std::sync::Arc;
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use driftline_dirty_tracker::{FrameRun, FrameSet, Gfn, PAGE_SIZE, Subscription};
use driftline_guest::{Guest, GuestError, Paused, RunState};
use driftline_machine::log;
use driftline_machine::memory::WriteWatch;
use vm_memory::{Bytes, GuestAddress};

use super::holds::View;

/// Between two looks: at least, and so many times as long as the last one took.
const PERIOD: Duration = Duration::from_millis(100);
const REST: u32 = 9;
/// Frames that are named.
const NAMED: usize = 16;
/// Between the two looks at a guest that has ended, whose devices may not have told of their last
/// writes yet.
const LAST: Duration = Duration::from_millis(50);

/// What the guest's tracking is compared with. Reads and shows as its name on the command line.
///
/// ```
/// use driftline_control::jobs::ShadowMode;
/// assert_eq!("compare".parse(), Ok(ShadowMode::Compare));
/// assert!("magic".parse::<ShadowMode>().unwrap_err().contains("compare and userfault-wp"));
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ShadowMode {
    /// All of memory, as it was the last time.
    Compare,
    /// Asynchronous write protection of userfaultfd.
    UserfaultWp,
}

impl fmt::Display for ShadowMode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Compare => "compare",
            Self::UserfaultWp => "userfault-wp",
        })
    }
}

impl FromStr for ShadowMode {
    type Err = String;

    fn from_str(s: &str) -> Result<Self, String> {
        match s {
            "compare" => Ok(Self::Compare),
            "userfault-wp" => Ok(Self::UserfaultWp),
            _ => Err(format!("there is no shadow \"{s}\"; there are compare and userfault-wp")),
        }
    }
}

/// Why there is no second look.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ShadowError {
    /// The kernel, or its administrator, does not allow it.
    #[error(
        "this host lacks userfaultfd's asynchronous write protection: --shadow userfault-wp needs Linux 6.7, and root, \
         vm.unprivileged_userfaultfd=1 or /dev/userfaultfd; --shadow compare does without ({0})"
    )]
    HostLacks(std::io::Error),
    /// The guest cannot be followed or read.
    #[error(transparent)]
    Guest(#[from] GuestError),
    /// There is no thread for it.
    #[error("the thread of --shadow cannot be started: {0}")]
    Thread(std::io::Error),
}

/// What the looks have shown.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct ShadowReport {
    /// Looks at a guest that stood, the last one included.
    pub looks: u64,
    /// Looks that could not be had.
    pub failed: u64,
    /// Frames that were reported, each look for itself.
    pub reported_frames: u64,
    /// Of these, with a content as before.
    pub unchanged_frames: u64,
    /// Frames that changed and were not reported, each look for itself.
    pub missed_frames: u64,
    /// The first of them.
    pub missed: Vec<Gfn>,
}

/// A second look that goes on until it is ended.
pub(super) struct Shadow {
    end: Sender<()>,
    thread: JoinHandle<ShadowReport>,
}

impl Shadow {
    /// Begins with a guest as it is now; best before it runs, since all of its memory is read
    /// first.
    pub(super) fn start(guest: Arc<View>, mode: ShadowMode) -> Result<Self, ShadowError> {
        let mut looker = Looker::new(guest, mode)?;
        let (end, ended) = mpsc::channel();
        let thread = log::spawn("shadow", move || {
            looker.run(&ended);
            looker.report
        });
        Ok(Self { end, thread: thread.map_err(ShadowError::Thread)? })
    }

    /// Looks a last time, at a guest that has ended; `None` if the looking itself has died of a
    /// defect.
    pub(super) fn end(self) -> Option<ShadowReport> {
        drop(self.end);
        self.thread.join().ok()
    }
}

/// What the thread has.
struct Looker {
    guest: Arc<View>,
    subscription: Subscription,
    /// Of mode `userfault-wp`.
    watch: Option<WriteWatch>,
    /// Checksums of all frames, slot by slot.
    known: Vec<(FrameRun, Vec<u32>)>,
    buffer: Vec<u8>,
    report: ShadowReport,
}

impl Looker {
    fn new(guest: Arc<View>, mode: ShadowMode) -> Result<Self, ShadowError> {
        let subscription = guest.subscribe("shadow")?;
        let buffer = vec![0; PAGE_SIZE as usize];
        let zero = crc32c::crc32c(&buffer);
        let slots = guest.layout().slots().map(|slot| slot.run());
        let known = slots.map(|run| (run, vec![zero; run.count as usize])).collect();
        let watch = match mode {
            ShadowMode::Compare => None,
            ShadowMode::UserfaultWp => {
                let watch = WriteWatch::open(guest.ram()).map_err(ShadowError::HostLacks)?;
                Some(watch)
            }
        };
        let report = ShadowReport::default();
        let mut new = Self { guest: guest.clone(), subscription, watch, known, buffer, report };
        let paused = Paused::new(&*guest)?;
        paused.drain(&mut new.subscription)?.commit();
        if let Some(watch) = &mut new.watch {
            watch.begin().map_err(|e| failed("write-protecting guest memory", e))?;
        }
        for run in guest.resident()? {
            run.frames().try_for_each(|gfn| new.has_changed(gfn).map(drop))?;
        }
        paused.resume()?;
        Ok(new)
    }

    fn run(&mut self, ended: &Receiver<()>) {
        let mut rest = PERIOD;
        while let Err(RecvTimeoutError::Timeout) = ended.recv_timeout(rest) {
            let begun = Instant::now();
            match self.look() {
                Ok(missed) => self.note(&missed),
                // The last look is after its end.
                Err(_) if self.guest.run_state() == RunState::Stopped => {}
                Err(e) => {
                    self.report.failed += 1;
                    tracing::warn!("the shadow could not look at the guest: {e}");
                }
            }
            rest = PERIOD.max(REST * begun.elapsed());
        }
        match self.last_look() {
            Ok(missed) => self.note(&missed),
            Err(e) => {
                self.report.failed += 1;
                tracing::warn!("the shadow could not look at the guest after its end: {e}");
            }
        }
    }

    /// One look; what it finds missed.
    fn look(&mut self) -> Result<Vec<Gfn>, GuestError> {
        let guest = self.guest.clone();
        let paused = Paused::new(&*guest)?;
        let missed = self.compare()?;
        paused.resume()?;
        Ok(missed)
    }

    /// At a guest that has ended: what is missed must be missed still when its devices have come to
    /// an end, too.
    fn last_look(&mut self) -> Result<Vec<Gfn>, GuestError> {
        let mut missed = self.compare()?;
        if !missed.is_empty() {
            thread::sleep(LAST);
            self.guest.collect()?;
            let epoch = self.subscription.drain();
            let late: FrameSet = epoch.runs().collect();
            epoch.commit();
            missed.retain(|gfn| !late.contains(*gfn));
        }
        Ok(missed)
    }

    /// Frames that changed since the last time and were not reported.
    fn compare(&mut self) -> Result<Vec<Gfn>, GuestError> {
        self.guest.collect()?;
        let epoch = self.subscription.drain();
        let reported: FrameSet = epoch.runs().collect();
        // Only this looks at them, and it does so now; a look that fails counts as one.
        epoch.commit();
        self.report.looks += 1;
        self.report.reported_frames += reported.frames();
        for gfn in reported.iter().flat_map(FrameRun::frames) {
            self.report.unchanged_frames += u64::from(!self.has_changed(gfn)?);
        }
        let mut others = FrameSet::default();
        match &mut self.watch {
            Some(watch) => {
                let seen = watch.written(|run| _ = others.insert(run));
                seen.map_err(|e| failed("PAGEMAP_SCAN", e))?;
            }
            None => {
                others.insert_all(&self.guest.resident()?);
            }
        }
        let mut missed = Vec::new();
        for gfn in others.iter().flat_map(FrameRun::frames) {
            if !reported.contains(gfn) && self.has_changed(gfn)? {
                missed.push(gfn);
            }
        }
        Ok(missed)
    }

    /// Whether the content of a frame is another than when it was last looked at.
    fn has_changed(&mut self, gfn: Gfn) -> Result<bool, GuestError> {
        let read = self.guest.ram().read_slice(&mut self.buffer, GuestAddress(gfn.gpa()));
        read.map_err(|e| failed("reading guest memory", std::io::Error::other(e)))?;
        let sum = crc32c::crc32c(&self.buffer);
        let slot = self.known.iter_mut().find(|(run, _)| run.start <= gfn && gfn < run.end());
        let known = slot.and_then(|(run, sums)| sums.get_mut((gfn.0 - run.start.0) as usize));
        // The layout has no other frames.
        Ok(known.is_some_and(|known| std::mem::replace(known, sum) != sum))
    }

    fn note(&mut self, missed: &[Gfn]) {
        if missed.is_empty() {
            return;
        }
        let report = &mut self.report;
        report.missed_frames += missed.len() as u64;
        let room = NAMED.saturating_sub(report.missed.len());
        report.missed.extend(missed.iter().take(room));
        // The rest is counted.
        if room > 0 {
            tracing::error!("{} pages changed unreported: {}", missed.len(), names(missed));
        }
    }
}

impl ShadowReport {
    /// The missed frames that are named, in a row.
    pub fn names(&self) -> String {
        names(&self.missed)
    }
}

fn names(frames: &[Gfn]) -> String {
    let names: Vec<_> = frames.iter().take(NAMED).map(|gfn| format!("{:#x}", gfn.0)).collect();
    let more = if frames.len() > NAMED { ", ..." } else { "" };
    format!("gfn {}{more}", names.join(", "))
}

fn failed(what: &'static str, e: std::io::Error) -> GuestError {
    GuestError::System { what, cause: Box::new(e) }
}
