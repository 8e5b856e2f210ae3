//! What others may see of a migration and do to it while it is under way.

use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use serde::{Deserialize, Serialize};

use crate::report::VcpuThrottle;

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
    /// Frames that this pass has still to send (by a destination: unknown, 0).
    pub remaining_frames: u64,
    /// Bytes of drives that go along which this pass has still to send (by a destination: unknown, 0).
    #[serde(default)]
    pub remaining_disk_bytes: u64,
    /// How fast the guest wrote during the last complete pass, bytes/s of whole frames, and blocks of drives that go along.
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
    /// At a destination: connections that were refused, or failed before PREPARED, and the last one's reason.
    pub refused: u64,
    /// See `refused`.
    pub last_refusal: Option<String>,
}

impl Progress {
    /// At a destination: a guest did not arrive, and another may.
    pub(crate) fn forget_stream(&mut self) {
        let (refused, last_refusal) = (self.refused, self.last_refusal.take());
        *self = Self { refused, last_refusal, ..Self::default() };
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

/// The operator's word on a migration in doubt.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Resolution {
    /// The guest shall run here. The operator has made sure that the destination does not run it and
    /// never will (its process is dead, its host is off); otherwise two run.
    Run,
    /// The guest here shall end. If the destination does not run it, it is lost.
    Discard,
}

const OPEN: u8 = 0;
const CANCELLED: u8 = 1;
const SEALED: u8 = 2;
/// The guest that was sealed does not run here after all.
const UNSEALED: u8 = 3;

/// The stop flag, and the point after which it cannot be set any more: one of the two comes first.
#[derive(Debug, Default)]
pub(crate) struct Stop {
    state: AtomicU8,
    /// It was asked to stop, in time or not.
    asked: AtomicBool,
}

impl Stop {
    pub(crate) fn cancel(&self) -> Result<(), ControlError> {
        self.asked.store(true, Ordering::SeqCst);
        match self.exchange(OPEN, CANCELLED) {
            Ok(_) | Err(CANCELLED | UNSEALED) => Ok(()),
            Err(_) => Err(ControlError::TooLate),
        }
    }

    /// Passes the point of no return; `false` if it was cancelled before.
    pub(crate) fn seal(&self) -> bool {
        !matches!(self.exchange(OPEN, SEALED), Err(CANCELLED))
    }

    /// At a destination whose take-over has failed: requests to stop are no longer refused.
    pub(crate) fn unseal(&self) {
        // Fails if the flag was forced meanwhile.
        let _ = self.exchange(SEALED, UNSEALED);
    }

    fn exchange(&self, from: u8, to: u8) -> Result<u8, u8> {
        self.state.compare_exchange(from, to, Ordering::SeqCst, Ordering::SeqCst)
    }

    fn is_sealed(&self) -> bool {
        self.state.load(Ordering::SeqCst) == SEALED
    }

    pub(crate) fn is_cancelled(&self) -> bool {
        self.state.load(Ordering::SeqCst) == CANCELLED
    }

    /// Whether anybody has asked to stop, also when that was too late.
    pub(crate) fn is_asked(&self) -> bool {
        self.asked.load(Ordering::SeqCst)
    }

    /// Sets the flag for good: whoever reads with it is to end.
    pub(crate) fn force(&self) {
        self.state.store(CANCELLED, Ordering::SeqCst);
    }
}

/// The handle to a migration at its source. One handle serves one migration.
#[derive(Debug, Default)]
pub struct SendControl {
    pub(crate) stop: Arc<Stop>,
    progress: Mutex<Progress>,
    resolution: Mutex<Option<Resolution>>,
    /// Ends a question to the destination that is under way when the operator resolves.
    pub(crate) resolved: Arc<Stop>,
}

impl SendControl {
    /// A handle, to be given to `send` and kept.
    pub fn new() -> Arc<Self> {
        Arc::default()
    }

    /// Ends the migration within about 100 ms; the guest continues here. Refused once the hand-over
    /// record is being written.
    pub fn cancel(&self) -> Result<(), ControlError> {
        self.stop.cancel()
    }

    /// Whether the hand-over record is being written, or was: from then on the guest may be the
    /// destination's, until `send` returns.
    pub fn is_sealed(&self) -> bool {
        self.stop.is_sealed()
    }

    /// Where the migration stands.
    pub fn progress(&self) -> Progress {
        self.progress.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Settles a migration in doubt by the operator's word; see [`Resolution`] for what it asserts.
    pub fn resolve(&self, how: Resolution) -> Result<(), ControlError> {
        let phase = self.progress().phase;
        if phase != Phase::InDoubt {
            return Err(ControlError::NotInDoubt { phase });
        }
        *self.resolution.lock().unwrap_or_else(PoisonError::into_inner) = Some(how);
        self.resolved.force();
        Ok(())
    }

    pub(crate) fn resolution(&self) -> Option<Resolution> {
        *self.resolution.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn update(&self, change: impl FnOnce(&mut Progress)) {
        change(&mut self.progress.lock().unwrap_or_else(PoisonError::into_inner));
    }
}

/// The handle to a destination that waits for a guest or receives one.
#[derive(Debug, Default)]
pub struct ReceiveControl {
    pub(crate) stop: Arc<Stop>,
    progress: Mutex<Progress>,
}

impl ReceiveControl {
    /// A handle, to be given to `receive` and kept.
    pub fn new() -> Arc<Self> {
        Arc::default()
    }

    /// Ends the waiting or receiving within about 100 ms. Refused once COMMIT has come, until taking
    /// the guest over has failed: then the receiver ends as soon as the source knows that, or has had
    /// time to ask.
    pub fn cancel(&self) -> Result<(), ControlError> {
        self.stop.cancel()
    }

    /// Where it stands.
    pub fn progress(&self) -> Progress {
        self.progress.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    pub(crate) fn update(&self, change: impl FnOnce(&mut Progress)) {
        change(&mut self.progress.lock().unwrap_or_else(PoisonError::into_inner));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stop_is_refused_between_commit_and_a_failure_alone() {
        let stop = Stop::default();
        assert!(stop.seal() && !stop.is_asked());
        assert_eq!(stop.cancel(), Err(ControlError::TooLate));
        assert!(stop.is_asked());
        stop.unseal();
        assert_eq!(stop.cancel(), Ok(()));
        // The failure is told as what it is.
        assert!(!stop.is_cancelled());
    }
}
