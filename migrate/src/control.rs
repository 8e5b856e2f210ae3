//! What others may see of a migration and do to it while it is under way.

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
    /// Not begun; a destination waits for a source.
    #[default]
    Waiting,
    /// The two sides introduce themselves.
    Connect,
    /// The destination builds the machine.
    Setup,
    /// Memory moves while the guest runs.
    Precopy,
    /// The guest is paused; what is left of memory and the state move.
    SwitchOver,
    /// The destination is prepared; records are made and the decision is told.
    HandOver,
    /// The source's record is durable and the destination's answer is not known.
    InDoubt,
    /// It is over, one way or the other.
    Finished,
}

impl fmt::Display for Phase {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Waiting => "before it began",
            Self::Connect => "while connecting",
            Self::Setup => "in setup",
            Self::Precopy => "in precopy",
            Self::SwitchOver => "in switch-over",
            Self::HandOver => "in the hand-over",
            Self::InDoubt => "in doubt",
            Self::Finished => "finished",
        })
    }
}

/// What a migration has done so far. A snapshot: the fields belong together.
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize)]
pub struct Progress {
    /// The phase under way.
    pub phase: Phase,
    /// The pass under way, from 0.
    pub pass: u32,
    /// Bytes sent (by a destination: received), everything included.
    pub sent_bytes: u64,
    /// At a destination: bytes received from sources whose guest did not arrive. They are not part
    /// of `sent_bytes`.
    #[serde(default)]
    pub earlier_bytes: u64,
    /// Frames that this pass has still to send (by a destination: unknown, 0).
    pub remaining_frames: u64,
    /// Bytes of drives that go along which this pass has still to send (by a destination: unknown,
    /// 0).
    #[serde(default)]
    pub remaining_disk_bytes: u64,
    /// How fast the guest wrote during the last complete pass, bytes/s of whole frames, and blocks
    /// of drives that go along.
    pub dirty_rate_bytes_per_s: u64,
    /// How fast the last complete pass moved, bytes/s.
    pub link_rate_bytes_per_s: u64,
    /// What the pause would take if it began now, ms; 0 while unknown.
    pub expected_downtime_ms: f64,
    /// Every vCPU and how it is held, see [`SendReport::throttle`](crate::SendReport::throttle).
    #[serde(default)]
    pub throttle: Vec<VcpuThrottle>,
    /// In doubt: what the last question to the destination brought, as a sentence.
    pub doubt: Option<String>,
    /// At a destination: connections that were refused, or failed before PREPARED, and the last
    /// one's reason.
    pub refused: u64,
    /// See `refused`.
    pub last_refusal: Option<String>,
}

impl Progress {
    /// At a destination: a guest did not arrive, and another may.
    pub(crate) fn forget_stream(&mut self) {
        let (refused, last_refusal) = (self.refused, self.last_refusal.take());
        let earlier_bytes = self.earlier_bytes + self.sent_bytes;
        *self = Self { refused, last_refusal, earlier_bytes, ..Self::default() };
    }
}

/// The request comes too late, or too early.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ControlError {
    /// COMMIT is being said (at a destination: it has come).
    #[error("it is too late to cancel: the guest has been handed over")]
    TooLate,
    /// Only a migration in doubt can be resolved.
    #[error("there is nothing to resolve: the migration is {phase}")]
    NotInDoubt {
        /// Where it stands.
        phase: Phase,
    },
}

impl From<TooLate> for ControlError {
    fn from(_: TooLate) -> Self {
        Self::TooLate
    }
}

/// The handle to a migration at its source. One handle serves one migration.
#[derive(Debug, Default)]
pub struct SendControl {
    pub(crate) stop: Arc<StopFlag>,
    progress: Mutex<Progress>,
    resolution: Mutex<Option<Resolution>>,
    /// Ends a question to the destination that is under way when the operator resolves.
    pub(crate) resolved: Arc<StopFlag>,
}

impl SendControl {
    /// A handle, to be given to `send` and kept.
    pub fn new() -> Arc<Self> {
        Arc::default()
    }

    /// Ends the migration within about 100 ms; the guest continues here. Refused once the hand-over
    /// record is being written.
    pub fn cancel(&self) -> Result<(), ControlError> {
        Ok(self.stop.cancel()?)
    }

    /// Whether the hand-over record is being written, or was: from then on the guest may be the
    /// destination's, until `send` returns.
    pub fn is_committed(&self) -> bool {
        self.stop.is_committed()
    }

    /// Where the migration stands.
    pub fn progress(&self) -> Progress {
        self.progress.lock().clone()
    }

    /// Settles a migration in doubt by the operator's word; see [`Resolution`] for what it asserts.
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

/// The handle to a destination that waits for a guest or receives one.
#[derive(Debug, Default)]
pub struct ReceiveControl {
    pub(crate) stop: Arc<StopFlag>,
    progress: Mutex<Progress>,
}

impl ReceiveControl {
    /// A handle, to be given to `receive` and kept.
    pub fn new() -> Arc<Self> {
        Arc::default()
    }

    /// Ends the waiting or receiving within about 100 ms. Between PREPARED and COMMIT the receiver
    /// first has up to 2 s to tell its source that the guest was discarded, and the source another
    /// 2 s to ask. Refused once COMMIT has come, until taking the guest over has failed: then the
    /// receiver ends as soon as the source knows that, or has had the same time to ask.
    pub fn cancel(&self) -> Result<(), ControlError> {
        Ok(self.stop.cancel()?)
    }

    /// Where it stands.
    pub fn progress(&self) -> Progress {
        self.progress.lock().clone()
    }

    pub(crate) fn update(&self, change: impl FnOnce(&mut Progress)) {
        change(&mut self.progress.lock());
    }
}
