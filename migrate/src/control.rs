//! Handles to a migration in progress: they show its progress, cancel it, and resolve it when it is
//! in doubt.

use std::fmt;
use std::sync::Arc;

use parking_lot::Mutex;
use serde::{Deserialize, Serialize};

use crate::protocol::decision::Resolution;
use crate::report::VcpuThrottle;
use crate::transport::stop::{StopFlag, TooLate};

/// The phases of a migration, at either end.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Phase {
    /// Not started; a destination waits for a source.
    #[default]
    Waiting,
    /// Both sides connect and exchange HELLOs.
    Connect,
    /// The destination builds the machine.
    Setup,
    /// Memory moves while the guest runs.
    Precopy,
    /// The guest is paused; the rest of its memory and its state move.
    SwitchOver,
    /// The destination is prepared; the source sends COMMIT and the destination decides.
    HandOver,
    /// COMMIT was sent, and the destination's answer is not known.
    InDoubt,
    /// Ended, with success or not.
    Finished,
}

impl fmt::Display for Phase {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Waiting => "before it began",
            Self::Connect => "while connecting",
            Self::Setup => "in setup",
            Self::Precopy => "in pre-copy",
            Self::SwitchOver => "in switch-over",
            Self::HandOver => "in the hand-over",
            Self::InDoubt => "in doubt",
            Self::Finished => "finished",
        })
    }
}

/// Progress of a migration: a consistent snapshot.
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize)]
pub struct Progress {
    /// The current phase.
    pub phase: Phase,
    /// Number of the current pass, from 0.
    pub pass: u32,
    /// Bytes sent, or received at a destination, including headers.
    pub sent_bytes: u64,
    /// At a destination: bytes received from sources whose guest did not arrive. They are not part
    /// of `sent_bytes`.
    pub earlier_bytes: u64,
    /// Frames left in the current pass.
    pub remaining_frames: u64,
    /// Bytes of copied disks left in the current pass; 0 at a destination, which does not know.
    pub remaining_disk_bytes: u64,
    /// The guest's dirty rate during the last complete pass, bytes/s of whole frames and of blocks
    /// of copied disks.
    pub dirty_rate_bytes_per_s: u64,
    /// Rate of the last complete pass, bytes/s.
    pub link_rate_bytes_per_s: u64,
    /// Expected pause if it began now, ms; 0 while unknown.
    pub expected_downtime_ms: f64,
    /// How far each vCPU is throttled, see [`SendReport::throttle`](crate::SendReport::throttle).
    pub throttle: Vec<VcpuThrottle>,
    /// In doubt: the result of the last question to the destination, as a sentence.
    pub doubt: Option<String>,
    /// At a destination: number of connections that were refused or failed before PREPARED.
    pub refused: u64,
    /// Peer and reason of the last of these connections.
    pub last_refusal: Option<String>,
}

impl Progress {
    /// Resets the figures at a destination whose guest did not arrive, because another may.
    pub(crate) fn forget_stream(&mut self) {
        let (refused, last_refusal) = (self.refused, self.last_refusal.take());
        let earlier_bytes = self.earlier_bytes + self.sent_bytes;
        *self = Self { refused, last_refusal, earlier_bytes, ..Self::default() };
    }
}

/// A request that does not fit the phase of the migration.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum ControlError {
    /// COMMIT is being sent, or has arrived at a destination.
    #[error("it is too late to cancel: the guest has been handed over")]
    TooLate,
    /// Only a migration in doubt can be resolved.
    #[error("there is nothing to resolve: the migration is not in doubt ({phase})")]
    NotInDoubt {
        /// The current phase.
        phase: Phase,
    },
}

impl From<TooLate> for ControlError {
    fn from(_: TooLate) -> Self {
        Self::TooLate
    }
}

/// Handle to a migration at its source. One handle serves one migration.
#[derive(Debug, Default)]
pub struct SendControl {
    pub(crate) stop: Arc<StopFlag>,
    progress: Mutex<Progress>,
    resolution: Mutex<Option<Resolution>>,
    /// Interrupts a question to the destination once the operator has resolved the migration.
    pub(crate) resolved: Arc<StopFlag>,
}

impl SendControl {
    /// Returns a handle for one call of `send`.
    pub fn new() -> Arc<Self> {
        Arc::default()
    }

    /// Ends the migration within about 100 ms, or within a second while disks are flushed before
    /// the pause; the guest continues here. Telling the destination takes up to 2 s more.
    ///
    /// # Errors
    ///
    /// [`ControlError::TooLate`] once COMMIT is being sent.
    pub fn cancel(&self) -> Result<(), ControlError> {
        Ok(self.stop.cancel()?)
    }

    /// Whether COMMIT is being sent or was sent. From then on the guest may run at the destination,
    /// until `send` returns.
    pub fn is_committed(&self) -> bool {
        self.stop.is_committed()
    }

    /// Returns the progress.
    pub fn progress(&self) -> Progress {
        self.progress.lock().clone()
    }

    /// Resolves a migration in doubt by the operator's decision; [`Resolution`] says what each
    /// decision asserts.
    ///
    /// # Errors
    ///
    /// [`ControlError::NotInDoubt`] in any other phase.
    pub fn resolve(&self, how: Resolution) -> Result<(), ControlError> {
        let phase = self.progress().phase;
        if phase != Phase::InDoubt {
            return Err(ControlError::NotInDoubt { phase });
        }
        *self.resolution.lock() = Some(how);
        self.resolved.force();
        Ok(())
    }

    pub(crate) fn resolution(&self) -> Option<Resolution> {
        *self.resolution.lock()
    }

    pub(crate) fn update(&self, change: impl FnOnce(&mut Progress)) {
        change(&mut self.progress.lock());
    }
}

/// Handle to a destination that waits for a guest or receives one.
#[derive(Debug, Default)]
pub struct ReceiveControl {
    pub(crate) stop: Arc<StopFlag>,
    progress: Mutex<Progress>,
}

impl ReceiveControl {
    /// Returns a handle for one call of `receive`.
    pub fn new() -> Arc<Self> {
        Arc::default()
    }

    /// Ends the receiver within about 100 ms. While a guest arrives, telling its source takes up to
    /// 2 s more, and removing copies of disks up to 5 s. Between PREPARED and COMMIT it first takes
    /// up to 2 s to tell its source that the guest was discarded, and gives it another 2 s to ask.
    /// After a failed take-over the receiver ends once the source knows of it, or has had the same
    /// time to ask.
    ///
    /// # Errors
    ///
    /// [`ControlError::TooLate`] from COMMIT on, unless the take-over fails.
    pub fn cancel(&self) -> Result<(), ControlError> {
        Ok(self.stop.cancel()?)
    }

    /// Returns the progress.
    pub fn progress(&self) -> Progress {
        self.progress.lock().clone()
    }

    pub(crate) fn update(&self, change: impl FnOnce(&mut Progress)) {
        change(&mut self.progress.lock());
    }
}
