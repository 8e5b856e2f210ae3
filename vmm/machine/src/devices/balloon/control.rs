//! Handle of a balloon's thread, used by the operator and by threads that copy memory.

use std::io;
use std::sync::Arc;
use std::sync::mpsc::{self, Receiver};
use std::time::Duration;

use driftline_dirty_tracker::{FrameSet, PAGE_SIZE};

use super::Balloon;
use super::sizes::BalloonSizes;
use crate::actor::{self, Handle};
use crate::config::BalloonConfig;
use crate::devices::latched_event::LatchedEvent;
use crate::memory::ProtectedFrames;

/// Extra time that the device gets after the caller's limit to return the hints so far.
const GRACE: Duration = Duration::from_millis(200);

/// Sizes of a balloon, in bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct BalloonStats {
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
    sizes: Arc<BalloonSizes>,
    balloon: Handle<Balloon>,
}

/// Returns the device and the handle by which the rest of the machine uses it. The device does not
/// discard frames that are in `protected`.
pub(in crate::devices) fn open(
    config: &BalloonConfig,
    protected: Arc<ProtectedFrames>,
) -> io::Result<(Balloon, BalloonControl)> {
    let (balloon, inbox) = actor::inbox("the balloon");
    let wake = Arc::new(LatchedEvent::new()?);
    let waker = wake.clone();
    let balloon = balloon.woken_by(move || waker.signal());
    let sizes = Arc::<BalloonSizes>::default();
    sizes.set_target(frames(config.bytes));
    let device = Balloon::new(config, protected, sizes.clone(), inbox, wake)?;
    Ok((device, BalloonControl { config: config.clone(), sizes, balloon }))
}

impl BalloonControl {
    /// Returns the balloon's configuration.
    pub fn config(&self) -> &BalloonConfig {
        &self.config
    }

    /// Returns the balloon's current sizes.
    pub fn stats(&self) -> BalloonStats {
        BalloonStats {
            target_bytes: u64::from(self.sizes.target()) * PAGE_SIZE,
            actual_bytes: u64::from(self.sizes.actual()) * PAGE_SIZE,
            discarded_bytes: self.sizes.discarded() * PAGE_SIZE,
        }
    }

    /// Sets the wanted size to `bytes`, rounded down to whole frames. The driver reaches it when it
    /// can. A paused driver is told when it runs again.
    pub fn set_target(&self, bytes: u64) {
        self.sizes.set_target(frames(bytes));
        // A thread that has ended has no driver to tell.
        self.balloon.tell(Balloon::show_target);
    }

    /// Asks the driver for hints. They are sent when the driver has finished, or when another run
    /// begins.
    pub(in crate::devices) fn begin_hints(&self) -> Receiver<FrameSet> {
        let (reply, free) = mpsc::channel();
        self.balloon.tell(|balloon| balloon.end_hints(false));
        self.balloon.tell(|balloon| balloon.begin_hints(reply));
        free
    }

    /// Returns frames that the running guest does not use at the moment. A copy of all memory may
    /// skip their content if the thread that copies has tracked the guest's writes since before
    /// this call. Returns none, or only a part, if the guest does not finish within `limit`.
    pub(crate) fn free_frames(&self, limit: Duration) -> FrameSet {
        if !self.sizes.hinting() {
            return FrameSet::new();
        }
        let free = self.begin_hints();
        let hints = free.recv_timeout(limit).or_else(|_| {
            self.balloon.tell(|balloon| balloon.end_hints(false));
            free.recv_timeout(GRACE)
        });
        hints.unwrap_or_default()
    }
}

fn frames(bytes: u64) -> u32 {
    u32::try_from(bytes / PAGE_SIZE).unwrap_or(u32::MAX)
}
