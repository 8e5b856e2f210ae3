//! Handle of a balloon's thread, used by the operator and by threads that copy memory.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering::Relaxed};
use std::sync::mpsc::{self, Receiver, Sender};
use std::time::Duration;

use driftline_dirty_tracker::{FrameSet, PAGE_SIZE};
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

use crate::config::BalloonConfig;

/// Extra time that the device gets after the caller's limit to return the hints so far.
const GRACE: Duration = Duration::from_millis(200);

/// Request to the device.
pub(super) enum Ask {
    /// The target has changed; tell the driver.
    Publish,
    /// Begin a run of hints. If no driver supports hints, the sender is dropped.
    BeginHints(Sender<FrameSet>),
    /// Return the hints that have arrived so far.
    EndHints,
}

/// Values that are shared without messages. Each is independent of the others.
#[derive(Debug, Default)]
pub(super) struct Figures {
    target: AtomicU32,
    actual: AtomicU32,
    hinting: AtomicBool,
    discarded: AtomicU64,
}

impl Figures {
    pub(super) fn target(&self) -> u32 {
        self.target.load(Relaxed)
    }

    pub(super) fn set_target(&self, frames: u32) {
        self.target.store(frames, Relaxed);
    }

    pub(super) fn set_actual(&self, frames: u32) {
        self.actual.store(frames, Relaxed);
    }

    /// Sets whether the driver supports hints.
    pub(super) fn set_hinting(&self, hinting: bool) {
        self.hinting.store(hinting, Relaxed);
    }

    pub(super) fn discarded(&self, frames: u64) {
        self.discarded.fetch_add(frames, Relaxed);
    }
}

/// Sizes of a balloon, in bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct BalloonFigures {
    /// Size that the operator wants.
    pub target_bytes: u64,
    /// Size that the driver reports.
    pub actual_bytes: u64,
    /// Memory given back to this host so far. Frames that are given back again count again.
    pub discarded_bytes: u64,
}

/// Handle of a balloon, for all threads except its own.
#[derive(Clone, Debug)]
pub struct BalloonControl {
    config: BalloonConfig,
    figures: Arc<Figures>,
    asks: Sender<Ask>,
    wake: Arc<EventFd>,
}

impl BalloonControl {
    pub(super) fn new(config: &BalloonConfig) -> io::Result<(Self, Receiver<Ask>)> {
        let (asks, inbox) = mpsc::channel();
        let wake = Arc::new(EventFd::new(EFD_NONBLOCK)?);
        let figures = Arc::<Figures>::default();
        figures.set_target(frames(config.bytes));
        Ok((Self { config: config.clone(), figures, asks, wake }, inbox))
    }

    pub(super) fn shared_figures(&self) -> Arc<Figures> {
        self.figures.clone()
    }

    pub(super) fn wake(&self) -> Arc<EventFd> {
        self.wake.clone()
    }

    fn ask(&self, ask: Ask) {
        // A thread that has ended has no driver to tell.
        let _ = self.asks.send(ask);
        let _ = self.wake.write(1);
    }

    /// Returns the balloon's configuration.
    pub fn config(&self) -> &BalloonConfig {
        &self.config
    }

    /// Returns the balloon's current sizes.
    pub fn figures(&self) -> BalloonFigures {
        let Figures { target, actual, discarded, .. } = &*self.figures;
        BalloonFigures {
            target_bytes: u64::from(target.load(Relaxed)) * PAGE_SIZE,
            actual_bytes: u64::from(actual.load(Relaxed)) * PAGE_SIZE,
            discarded_bytes: discarded.load(Relaxed) * PAGE_SIZE,
        }
    }

    /// Sets the wanted size to `bytes`, rounded down to whole frames. The driver reaches it when it
    /// can. A paused driver is told when it runs again.
    pub fn set_target(&self, bytes: u64) {
        self.figures.set_target(frames(bytes));
        self.ask(Ask::Publish);
    }

    /// Asks the driver for hints. They are sent when the driver has finished, or when another run
    /// begins.
    pub(in crate::devices) fn begin_hints(&self) -> Receiver<FrameSet> {
        let (reply, free) = mpsc::channel();
        self.ask(Ask::BeginHints(reply));
        free
    }

    /// Returns frames that the running guest does not use at the moment. A copy of all memory may
    /// skip their content if the thread that copies has tracked the guest's writes since before
    /// this call. Returns none, or only a part, if the guest does not finish within `limit`.
    pub fn free_frames(&self, limit: Duration) -> FrameSet {
        if !self.figures.hinting.load(Relaxed) {
            return FrameSet::new();
        }
        let free = self.begin_hints();
        let heard = free.recv_timeout(limit).or_else(|_| {
            self.ask(Ask::EndHints);
            free.recv_timeout(GRACE)
        });
        heard.unwrap_or_default()
    }
}

fn frames(bytes: u64) -> u32 {
    u32::try_from(bytes / PAGE_SIZE).unwrap_or(u32::MAX)
}
