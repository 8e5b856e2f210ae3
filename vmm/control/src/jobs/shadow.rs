//! Verifies the guest's dirty tracking for `run --shadow`: whether tracking has reported every
//! frame that changed.
//!
//! The shadow thread pauses the guest from time to time, devices included, and collects. A frame is
//! *missed* if its content differs from the last check and tracking has not reported it since. A
//! missed frame is always a defect, because every change of memory is known by the time the guest
//! is paused. Contents are compared by a checksum of 32 bits per frame, so one change in 2^32
//! goes unnoticed.
//!
//! | mode | frames that are checked |
//! | --- | --- |
//! | `compare` | all frames that have memory; a pause reads all of it |
//! | `userfault-wp` | frames that either method reports; a pause costs what is written |
//!
//! The reverse is not a defect: KVM counts a frame that it maps writable for a read, and a write of
//! the same bytes changes nothing.

use std::fmt;
use std::str::FromStr;
use std::sync::Arc;
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use driftline_dirty_tracker::{FrameRun, FrameSet, Gfn, PAGE_SIZE, Subscription};
use driftline_guest::{
    DirtyLog, GuestContents, GuestError, GuestIdentity, Lifecycle, Paused, RunState,
};
use driftline_machine::log;
use driftline_machine::memory::WriteWatch;
use vm_memory::{Bytes, GuestAddress};

use super::pause_control::JobGuest;
use crate::model::UnknownName;

/// Delay between two checks: at least `MIN_DELAY`, and at least `DELAY_FACTOR` times the duration
/// of the last check.
const MIN_DELAY: Duration = Duration::from_millis(100);
const DELAY_FACTOR: u32 = 9;
/// Maximum number of missed frames that are listed.
const MAX_LISTED: usize = 16;
/// Delay between the two checks of a guest that has ended: its devices may not have reported their
/// last writes yet.
const FINAL_DELAY: Duration = Duration::from_millis(50);

/// The method with which the guest's tracking is compared. Parses from, and displays as, its name
/// on the command line.
///
/// ```
/// use driftline_control::jobs::ShadowMode;
/// assert_eq!("compare".parse(), Ok(ShadowMode::Compare));
/// let unknown = "magic".parse::<ShadowMode>().unwrap_err().to_string();
/// assert!(unknown.contains("compare or userfault-wp"));
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ShadowMode {
    /// Compares all memory with its content at the last check.
    Compare,
    /// Uses userfaultfd's asynchronous write protection.
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
    type Err = UnknownName;

    fn from_str(s: &str) -> Result<Self, UnknownName> {
        match s {
            "compare" => Ok(Self::Compare),
            "userfault-wp" => Ok(Self::UserfaultWp),
            _ => Err(UnknownName {
                what: "shadow",
                name: s.to_owned(),
                known: "compare or userfault-wp",
            }),
        }
    }
}

/// The reason why tracking cannot be verified.
#[derive(Debug, thiserror::Error)]
pub enum ShadowError {
    /// The kernel or its configuration does not allow the method.
    #[error(
        "this host lacks userfaultfd's asynchronous write protection: --shadow userfault-wp needs \
         Linux 6.7, and root, vm.unprivileged_userfaultfd=1 or /dev/userfaultfd; --shadow compare \
         does not need it ({0})"
    )]
    HostLacks(std::io::Error),
    /// The guest cannot be tracked or read.
    #[error(transparent)]
    Guest(#[from] GuestError),
    /// An operation on guest memory failed.
    #[error("{what} failed: {cause}")]
    System {
        /// The operation.
        what: &'static str,
        /// The system's error.
        #[source]
        cause: std::io::Error,
    },
    /// The thread cannot be started.
    #[error("the thread of --shadow cannot be started: {0}")]
    Thread(std::io::Error),
    /// The thread has panicked, so its last check was not made.
    #[error("the thread of --shadow has panicked, which is a defect of the VMM")]
    Panicked,
}

/// The result of the checks.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct ShadowReport {
    /// Number of checks of the paused guest, including the last one.
    pub checks: u64,
    /// Number of checks that failed.
    pub failed: u64,
    /// Number of reported frames, summed over the checks.
    pub reported_frames: u64,
    /// Number of those whose content had not changed.
    pub unchanged_frames: u64,
    /// Number of frames that changed and were not reported, summed over the checks.
    pub missed_frames: u64,
    /// The first of the missed frames.
    pub missed: Vec<Gfn>,
}

/// A verification that continues until it is ended.
pub(super) struct Shadow {
    end: Sender<()>,
    thread: JoinHandle<ShadowReport>,
}

impl Shadow {
    /// Starts the verification with the guest's current content. Reads all guest memory first, so
    /// it is best called before the guest runs.
    pub(super) fn start(guest: Arc<JobGuest>, mode: ShadowMode) -> Result<Self, ShadowError> {
        let mut checker = ShadowChecker::new(guest, mode)?;
        let (end, ended) = mpsc::channel();
        let thread = log::spawn("shadow", move || {
            checker.run(&ended);
            checker.report
        });
        Ok(Self { end, thread: thread.map_err(ShadowError::Thread)? })
    }

    /// Performs the last check, on a guest that has ended.
    pub(super) fn end(self) -> Result<ShadowReport, ShadowError> {
        drop(self.end);
        self.thread.join().map_err(|_| ShadowError::Panicked)
    }
}

/// State of the shadow thread.
struct ShadowChecker {
    guest: Arc<JobGuest>,
    subscription: Subscription,
    /// Present in mode `userfault-wp`.
    watch: Option<WriteWatch>,
    /// Checksums of all frames, per memory slot.
    checksums: Vec<(FrameRun, Vec<u32>)>,
    buffer: Vec<u8>,
    report: ShadowReport,
}

impl ShadowChecker {
    fn new(guest: Arc<JobGuest>, mode: ShadowMode) -> Result<Self, ShadowError> {
        let subscription = guest.subscribe("shadow")?;
        let buffer = vec![0; PAGE_SIZE as usize];
        let zero = crc32c::crc32c(&buffer);
        let slots = guest.layout().slots().map(|slot| slot.run());
        let checksums = slots.map(|run| (run, vec![zero; run.count as usize])).collect();
        let watch = match mode {
            ShadowMode::Compare => None,
            ShadowMode::UserfaultWp => {
                let watch = WriteWatch::open(guest.ram()).map_err(ShadowError::HostLacks)?;
                Some(watch)
            }
        };
        let report = ShadowReport::default();
        let mut new = Self { guest: guest.clone(), subscription, watch, checksums, buffer, report };
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
        let mut delay = MIN_DELAY;
        while let Err(RecvTimeoutError::Timeout) = ended.recv_timeout(delay) {
            let begun = Instant::now();
            match self.check() {
                Ok(missed) => self.note(&missed),
                // The guest has ended. The last check follows.
                Err(_) if self.guest.run_state() == RunState::Stopped => {}
                Err(e) => {
                    self.report.failed += 1;
                    tracing::warn!("--shadow cannot check the guest: {e}");
                }
            }
            delay = MIN_DELAY.max(DELAY_FACTOR * begun.elapsed());
        }
        match self.final_check() {
            Ok(missed) => self.note(&missed),
            Err(e) => {
                self.report.failed += 1;
                tracing::warn!("--shadow cannot check the guest after its end: {e}");
            }
        }
    }

    /// Performs one check. Returns the missed frames.
    fn check(&mut self) -> Result<Vec<Gfn>, ShadowError> {
        let guest = self.guest.clone();
        let paused = Paused::new(&*guest)?;
        let missed = self.compare()?;
        paused.resume()?;
        Ok(missed)
    }

    /// Checks a guest that has ended. A frame counts as missed only if it is still missed after the
    /// guest's devices have ended, too.
    fn final_check(&mut self) -> Result<Vec<Gfn>, ShadowError> {
        let mut missed = self.compare()?;
        if !missed.is_empty() {
            thread::sleep(FINAL_DELAY);
            self.guest.collect()?;
            let epoch = self.subscription.drain();
            let late_reports: FrameSet = epoch.runs().collect();
            epoch.commit();
            missed.retain(|gfn| !late_reports.contains(*gfn));
        }
        Ok(missed)
    }

    /// Returns the frames that changed since the last check and were not reported.
    fn compare(&mut self) -> Result<Vec<Gfn>, ShadowError> {
        self.guest.collect()?;
        let epoch = self.subscription.drain();
        let reported: FrameSet = epoch.runs().collect();
        // Only this check uses the epoch, and it does so now. A check that fails after this is
        // reported as failed.
        epoch.commit();
        self.report.checks += 1;
        self.report.reported_frames += reported.frames();
        for gfn in reported.iter().flat_map(FrameRun::frames) {
            self.report.unchanged_frames += u64::from(!self.has_changed(gfn)?);
        }
        let mut others = FrameSet::default();
        match &mut self.watch {
            Some(watch) => {
                let scanned = watch.written(|run| _ = others.insert(run));
                scanned.map_err(|e| failed("PAGEMAP_SCAN", e))?;
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
        // If another process has taken the memory over, that process writes to it.
        if self.guest.memory_right().check().is_err() {
            missed.clear();
        }
        Ok(missed)
    }

    /// Returns whether a frame's content differs from the last time it was read.
    fn has_changed(&mut self, gfn: Gfn) -> Result<bool, ShadowError> {
        let read = self.guest.ram().read_slice(&mut self.buffer, GuestAddress(gfn.gpa()));
        read.map_err(|e| failed("reading guest memory", std::io::Error::other(e)))?;
        let sum = crc32c::crc32c(&self.buffer);
        let slot = self.checksums.iter_mut().find(|(run, _)| run.start <= gfn && gfn < run.end());
        let old = slot.and_then(|(run, sums)| sums.get_mut((gfn.0 - run.start.0) as usize));
        // The layout has no other frames.
        Ok(old.is_some_and(|old| std::mem::replace(old, sum) != sum))
    }

    fn note(&mut self, missed: &[Gfn]) {
        if missed.is_empty() {
            return;
        }
        let report = &mut self.report;
        report.missed_frames += missed.len() as u64;
        let room = MAX_LISTED.saturating_sub(report.missed.len());
        report.missed.extend(missed.iter().take(room));
        // Once the list is full, missed frames are only counted.
        if room > 0 {
            tracing::error!("{} pages changed unreported: {}", missed.len(), names(missed));
        }
    }
}

impl ShadowReport {
    /// Returns the listed missed frames as one line.
    pub fn names(&self) -> String {
        names(&self.missed)
    }
}

fn names(frames: &[Gfn]) -> String {
    let names: Vec<_> = frames.iter().take(MAX_LISTED).map(|gfn| format!("{:#x}", gfn.0)).collect();
    let more = if frames.len() > MAX_LISTED { ", ..." } else { "" };
    format!("gfn {}{more}", names.join(", "))
}

fn failed(what: &'static str, cause: std::io::Error) -> ShadowError {
    ShadowError::System { what, cause }
}
