//! Handle of a balloon's thread, used by the operator and by threads that copy memory.

use std::io;
use std::sync::Arc;
use std::sync::mpsc::{self, Receiver};
use std::time::Duration;

use driftline_dirty_tracker::{FrameSet, PAGE_SIZE};

use super::Balloon;
use super::hints::DONE;
use super::shared::{DiscardCounters, SharedBalloonState};
use super::statistics::MemoryStatistics;
use crate::actor::{self, Handle};
use crate::config::BalloonConfig;
use crate::devices::latched_event::LatchedEvent;
use crate::memory::ProtectedFrames;

/// Extra time that the device gets after the caller's limit to return the hints so far.
const GRACE: Duration = Duration::from_millis(200);

/// Sizes of a balloon, in bytes, and what it has done in this process.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct BalloonStats {
    /// Size that the operator wants.
    pub target_bytes: u64,
    /// Size that the driver reports.
    pub actual_bytes: u64,
    /// Memory given back to this host so far. Frames that are given back again count again.
    pub discarded_bytes: u64,
    /// Requests of the driver.
    pub counts: BalloonCounts,
}

/// Numbers of a balloon driver's requests.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct BalloonCounts {
    /// Requests to put frames into the balloon.
    pub inflations: u64,
    /// Requests to take frames out of it.
    pub deflations: u64,
    /// Readings of the driver's statistics.
    pub statistics: u64,
    /// Entries of the statistics that could not be used, and buffers that were too long.
    pub statistics_failures: u64,
    /// Frames that the driver has reported as free.
    pub reports: DiscardCounts,
    /// Frames that the driver has hinted to the operator.
    pub hints: DiscardCounts,
}

/// Numbers of pieces of memory that a driver has offered.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct DiscardCounts {
    /// Pieces.
    pub pieces: u64,
    /// Bytes that this host got back.
    pub bytes: u64,
    /// Pieces that the host did not get back because of an error.
    pub failures: u64,
}

impl From<&DiscardCounters> for DiscardCounts {
    fn from(counters: &DiscardCounters) -> Self {
        Self {
            pieces: counters.pieces.get(),
            bytes: counters.bytes.get(),
            failures: counters.failures.get(),
        }
    }
}

/// Hinting commands of a balloon and of its driver.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct HintingStatus {
    /// The device's command: the number of the last run; 1 once that is done, or after a move; 0
    /// before the first run.
    pub host_command: u32,
    /// The driver's last command: the number of the run that it serves, or 0 after its last hint.
    /// `None` if it has sent none.
    pub guest_command: Option<u32>,
}

/// The reason why there are no hints.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum HintingError {
    /// The balloon is configured without hinting.
    #[error("hinting is off in the balloon's configuration")]
    Off,
    /// No driver is ready.
    #[error("the guest's balloon driver is not ready")]
    NotActive,
}

/// The reason why the statistics' interval does not change.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[error("only a balloon's configuration turns its statistics on or off: an interval of 0 s is off")]
pub struct StatisticsError;

/// Handle of a balloon, for all threads except its own.
#[derive(Clone, Debug)]
pub struct BalloonControl {
    config: BalloonConfig,
    pub(super) shared: Arc<SharedBalloonState>,
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
    let shared = Arc::<SharedBalloonState>::default();
    shared.set_target(frames(config.bytes));
    shared.set_statistics_interval_s(config.statistics_interval_s);
    let device = Balloon::new(config, protected, shared.clone(), inbox, wake)?;
    Ok((device, BalloonControl { config: config.clone(), shared, balloon }))
}

impl BalloonControl {
    /// Returns the balloon's configuration.
    pub fn config(&self) -> &BalloonConfig {
        &self.config
    }

    /// Returns the balloon's current sizes and counts.
    pub fn stats(&self) -> BalloonStats {
        let counters = &self.shared.counters;
        BalloonStats {
            target_bytes: u64::from(self.shared.target()) * PAGE_SIZE,
            actual_bytes: u64::from(self.shared.actual()) * PAGE_SIZE,
            discarded_bytes: self.shared.discarded() * PAGE_SIZE,
            counts: BalloonCounts {
                inflations: counters.inflations.get(),
                deflations: counters.deflations.get(),
                statistics: counters.statistics.get(),
                statistics_failures: counters.statistics_failures.get(),
                reports: DiscardCounts::from(&counters.reports),
                hints: DiscardCounts::from(&counters.hints),
            },
        }
    }

    /// Sets the wanted size to `bytes`, rounded down to whole frames. The driver reaches it when it
    /// can. A paused driver is told when it runs again.
    pub fn set_target(&self, bytes: u64) {
        self.shared.set_target(frames(bytes));
        // A thread that has ended has no driver to tell.
        self.balloon.tell(Balloon::show_target);
    }

    /// Returns what the driver last said about the guest's memory; nothing if the balloon has no
    /// statistics.
    pub fn statistics(&self) -> MemoryStatistics {
        self.shared.statistics()
    }

    /// Returns the interval at which the driver is asked for statistics, in seconds; 0 if there are
    /// none.
    pub fn statistics_interval_s(&self) -> u16 {
        self.shared.statistics_interval_s()
    }

    /// Changes the interval of the statistics. The driver is asked for new ones immediately, or
    /// when a paused guest resumes.
    ///
    /// # Errors
    ///
    /// The balloon has no statistics, or is to have none from now on.
    pub fn set_statistics_interval_s(&self, interval_s: u16) -> Result<(), StatisticsError> {
        let now_s = self.statistics_interval_s();
        if interval_s == now_s {
            return Ok(());
        }
        if interval_s == 0 || now_s == 0 {
            return Err(StatisticsError);
        }
        self.shared.set_statistics_interval_s(interval_s);
        self.balloon.tell(Balloon::show_interval);
        Ok(())
    }

    /// Asks the driver for free frames, which are discarded. With `acknowledge`, the driver may
    /// take its frames back once it has no more; without, it keeps them from the guest until
    /// [`stop_hinting`](Self::stop_hinting). Ends any run in progress. A paused driver is asked
    /// when it runs again.
    ///
    /// # Errors
    ///
    /// There is no hinting, or no driver.
    pub fn start_hinting(&self, acknowledge: bool) -> Result<(), HintingError> {
        self.check_hinting()?;
        let command = self.shared.next_command();
        self.balloon.tell(move |balloon| balloon.begin_discarding_hints(command, acknowledge));
        Ok(())
    }

    /// Ends the run of hints. The driver may take its frames back.
    ///
    /// # Errors
    ///
    /// There is no hinting, or no driver.
    pub fn stop_hinting(&self) -> Result<(), HintingError> {
        self.check_hinting()?;
        self.shared.set_host_command(DONE);
        self.balloon.tell(Balloon::end_hints);
        Ok(())
    }

    /// Returns the hinting commands of both sides.
    ///
    /// # Errors
    ///
    /// There is no hinting.
    pub fn hinting_status(&self) -> Result<HintingStatus, HintingError> {
        if !self.config.hinting {
            return Err(HintingError::Off);
        }
        let commands = self.shared.commands();
        Ok(HintingStatus { host_command: commands.host, guest_command: commands.guest })
    }

    fn check_hinting(&self) -> Result<(), HintingError> {
        match (self.config.hinting, self.shared.active()) {
            (false, _) => Err(HintingError::Off),
            (true, false) => Err(HintingError::NotActive),
            (true, true) => Ok(()),
        }
    }

    /// Asks the driver for hints for a copy. They are sent when the driver has finished, or when
    /// another run begins. Drops the sender if the operator's run is in progress.
    pub(in crate::devices) fn begin_copy_hints(&self) -> Receiver<FrameSet> {
        let (reply, free) = mpsc::channel();
        self.balloon.tell(Balloon::end_copy_hints);
        self.balloon.tell(|balloon| balloon.begin_copy_hints(reply));
        free
    }

    /// Returns frames that the running guest does not use at the moment. A copy of all memory may
    /// skip their content if the thread that copies has tracked the guest's writes since before
    /// this call. Returns none, or only a part, if the guest does not finish within `limit`.
    pub(crate) fn free_frames(&self, limit: Duration) -> FrameSet {
        if !self.shared.hinting() {
            return FrameSet::new();
        }
        let free = self.begin_copy_hints();
        let hints = free.recv_timeout(limit).or_else(|_| {
            self.balloon.tell(Balloon::end_copy_hints);
            free.recv_timeout(GRACE)
        });
        hints.unwrap_or_default()
    }
}

fn frames(bytes: u64) -> u32 {
    u32::try_from(bytes / PAGE_SIZE).unwrap_or(u32::MAX)
}
