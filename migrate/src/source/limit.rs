//! Upper bounds on phases. A peer cannot extend them by silence or by sending slowly.

use std::time::{Duration, Instant};

use super::channels::Channels;
use crate::error::{Cause, PrecopyLimit};
use crate::policy::convergence::{Goals, TimeoutStrategy};

/// The time at which a phase fails, if it has a limit, and the failure.
#[derive(Clone, Copy, Debug)]
pub(super) struct Limit {
    at: Option<Instant>,
    kind: LimitKind,
}

#[derive(Clone, Copy, Debug)]
enum LimitKind {
    /// Pre-copy has taken this time.
    NotConverging(Duration),
    /// The pause has taken this time.
    PauseTooLong(Duration),
}

impl Limit {
    /// Returns the limit of a pre-copy that began at `begun`. The strategy `switchover` has none,
    /// because it pauses in any case and finishing the pass makes the pause shorter.
    pub(super) fn of_precopy(begun: Instant, goals: &Goals) -> Self {
        let at = match goals.strategy {
            // `None`, no limit, if the clock cannot represent the time.
            TimeoutStrategy::Cancel => begun.checked_add(goals.timeout),
            TimeoutStrategy::Switchover => None,
        };
        Self { at, kind: LimitKind::NotConverging(goals.timeout) }
    }

    /// Returns the limit of a pause that began at `since`.
    pub(super) fn of_pause(since: Instant, limit: Duration) -> Self {
        Self { at: since.checked_add(limit), kind: LimitKind::PauseTooLong(limit) }
    }

    /// Returns the time of the limit.
    pub(super) fn at(&self) -> Option<Instant> {
        self.at
    }

    fn is_reached(&self) -> bool {
        self.at.is_some_and(|at| Instant::now() >= at)
    }

    fn cause(&self) -> Cause {
        match self.kind {
            LimitKind::NotConverging(timeout) => {
                Cause::NotConverging { limit: PrecopyLimit::Timeout(timeout), throttle: None }
            }
            LimitKind::PauseTooLong(limit) => Cause::PauseTooLong { limit },
        }
    }

    /// Fails if the limit has been reached.
    pub(super) fn check(&self) -> Result<(), Cause> {
        if self.is_reached() { Err(self.cause()) } else { Ok(()) }
    }

    /// Runs `work` with the limit as the deadline of every wait for the peer.
    pub(super) fn enforce<T>(
        &self,
        channels: &mut Channels,
        work: impl FnOnce(&mut Channels) -> Result<T, Cause>,
    ) -> Result<T, Cause> {
        channels.first.stream_mut().set_deadline(self.at);
        let result = work(channels);
        channels.first.stream_mut().set_deadline(None);
        match result {
            Err(Cause::Wire(e)) if e.is_silence() && self.is_reached() => Err(self.cause()),
            result => result,
        }
    }
}
