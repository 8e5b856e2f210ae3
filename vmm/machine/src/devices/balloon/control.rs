//! The way to a balloon's thread: what the operator and whoever copies memory ask of it.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering::Relaxed};
use std::sync::mpsc::{self, Receiver, Sender};
use std::time::Duration;

use driftline_dirty_tracker::{FrameSet, PAGE_SIZE};
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

use crate::config::BalloonConfig;

/// How much longer than it was given a device may take to say what it has heard.
const GRACE: Duration = Duration::from_millis(200);

/// What the device is asked.
pub(super) enum Ask {
    /// The target has changed: tell the driver.
    Publish,
    /// Begin a run of hints. Without a driver that hints, the sender is dropped.
    BeginHints(Sender<FrameSet>),
    /// Make do with the hints that have come.
    EndHints,
}

/// What is shared without a message: each figure by itself.
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

    /// Whether the driver hints.
    pub(super) fn set_hinting(&self, hinting: bool) {
        self.hinting.store(hinting, Relaxed);
    }

    pub(super) fn discarded(&self, frames: u64) {
        self.discarded.fetch_add(frames, Relaxed);
    }
}

/// A balloon's figures, in bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct BalloonFigures {
    /// What the operator wants in it.
    pub target_bytes: u64,
    /// What the driver says is in it.
    pub actual_bytes: u64,
    /// What has been given back to this host so far, frames given back again counted again.
    pub discarded_bytes: u64,
}

/// A balloon, for everyone but its thread.
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

    /// How it was made.
    pub fn config(&self) -> &BalloonConfig {
        &self.config
    }

    /// How it stands.
    pub fn figures(&self) -> BalloonFigures {
        let Figures { target, actual, discarded, .. } = &*self.figures;
        BalloonFigures {
            target_bytes: u64::from(target.load(Relaxed)) * PAGE_SIZE,
            actual_bytes: u64::from(actual.load(Relaxed)) * PAGE_SIZE,
            discarded_bytes: discarded.load(Relaxed) * PAGE_SIZE,
        }
    }

    /// Wants `bytes` in the balloon, whole frames of them. The driver gets there when it can; one
    /// that is paused hears of it when it runs.
    pub fn set_target(&self, bytes: u64) {
        self.figures.set_target(frames(bytes));
        self.ask(Ask::Publish);
    }

    /// Asks the driver for hints; they come when it has said all, or someone else asks.
    pub(in crate::devices) fn begin_hints(&self) -> Receiver<FrameSet> {
        let (reply, free) = mpsc::channel();
        self.ask(Ask::BeginHints(reply));
        free
    }

    /// Frames that the running guest has no use for now: their content may be left out of a copy of
    /// all memory by whoever has followed the guest's writes since before this call. None if the
    /// guest does not say within `limit`, or a part of them.
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
