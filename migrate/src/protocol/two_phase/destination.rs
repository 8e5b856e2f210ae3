//! The destination's state machine.
//!
//! ```text
//! Assembling --Restored--> Prepared --Commit--> Deciding --recorded: run--> Committed -> Running
//!     |                     |    |                 |  |                         |
//!   Failed            Aborted  Failed     NotStored  recorded: discard      NotResumed
//!     v                     v    v                 |  v                         |
//!  Dropped <----------------+  Discarding <--------+  Discarded <-recorded- Discarding
//! ```

use crate::protocol::decision::{Decision, Verdict};

/// State of the destination. The guest may run only in `Running`, which only `Committed` leads to.
/// `Committed` needs a recorded decision: every process of the host finds it, and either it is
/// durable or a durable prepared record answers in its place. If memory is shared, the claim takes
/// the place of both.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(crate) enum Destination {
    /// The guest is received, up to PREPARED.
    Assembling,
    /// Restored and paused, waiting for COMMIT.
    Prepared,
    /// COMMIT has arrived; the decision is being made.
    Deciding,
    /// The decision to run is recorded.
    Committed,
    /// The guest has been taken over. Final.
    Running,
    /// The guest was discarded after PREPARED, and the decision is not durable yet.
    Discarding,
    /// The decision to discard the guest is durable. Final.
    Discarded,
    /// The guest was discarded before the source can have sent COMMIT. Final.
    Dropped,
}

/// An event at the destination.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(crate) enum DestinationEvent {
    /// The guest is restored.
    Restored,
    /// COMMIT has arrived, with this migration's token.
    Commit,
    /// ABORT has arrived.
    Aborted,
    /// A failure: a lost connection, a deadline, a cancel, a wrong message.
    Failed,
    /// A decision is recorded, made by this process or by another one of this site.
    Recorded(Decision),
    /// Storing the decision failed.
    NotStored,
    /// The guest was taken over.
    Resumed,
    /// The take-over failed, and the guest never ran.
    NotResumed,
    /// A source asks about the migration.
    Asked,
}

/// Permission to run the guest at the destination.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct MayRun(());

/// The next action of the destination.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum DestinationOrder {
    /// Wait for the next event.
    Wait,
    /// Send PREPARED and wait for COMMIT.
    SayPrepared,
    /// Store the decision to run the guest; durably, unless the prepared record names a boot.
    StoreCommitted,
    /// Acquire the devices and run the guest.
    TakeOver(MayRun),
    /// Send RUNNING.
    SayRunning,
    /// Discard the guest; no peer needs to be told.
    Drop,
    /// Discard the guest, if it exists, and store that decision durably.
    StoreDiscarded,
    /// Discard the guest, if it exists, and tell the source.
    SayDiscarded,
}

impl Destination {
    /// Returns the next state and an order. Events without a meaning in a state change nothing.
    pub(crate) fn on(self, event: DestinationEvent) -> (Self, DestinationOrder) {
        use DestinationEvent as E;
        use DestinationOrder as O;
        match (self, event) {
            (Self::Assembling, E::Restored) => (Self::Prepared, O::SayPrepared),
            (Self::Assembling, E::Failed | E::Aborted) => (Self::Dropped, O::Drop),
            (Self::Prepared, E::Commit) => (Self::Deciding, O::StoreCommitted),
            // A source sends ABORT only if it has not sent COMMIT. It resumes its guest, and never
            // asks.
            (Self::Prepared, E::Aborted) => (Self::Dropped, O::Drop),
            (Self::Prepared, E::Failed) => (Self::Discarding, O::StoreDiscarded),
            (Self::Deciding, E::Recorded(Decision::Committed)) => {
                (Self::Committed, O::TakeOver(MayRun(())))
            }
            (Self::Deciding | Self::Discarding, E::Recorded(Decision::Discarded)) => {
                (Self::Discarded, O::SayDiscarded)
            }
            (Self::Deciding, E::NotStored) => (Self::Discarding, O::StoreDiscarded),
            (Self::Committed, E::Resumed) => (Self::Running, O::SayRunning),
            (Self::Committed, E::NotResumed) => (Self::Discarding, O::StoreDiscarded),
            (Self::Discarding, E::Asked) => (Self::Discarding, O::StoreDiscarded),
            (state, _) => (state, O::Wait),
        }
    }

    /// Whether this process may remove its decision after ENDED: no later event reads or makes one.
    pub(crate) fn may_forget(self) -> bool {
        matches!(self, Self::Running | Self::Discarded)
    }

    /// Returns the answer to a source that asks.
    pub(crate) fn verdict(self) -> Verdict {
        match self {
            Self::Assembling | Self::Prepared | Self::Deciding | Self::Discarding => {
                Verdict::Undecided
            }
            Self::Committed => Verdict::Committed,
            Self::Running => Verdict::Running,
            Self::Discarded => Verdict::Discarded,
            Self::Dropped => Verdict::Unknown,
        }
    }
}
