//! The destination's state machine.
//!
//! ```text
//! Assembling --Restored--> Prepared --Commit--> Deciding --stands: committed--> Committed --> Running
//!     |                     |    |                 |  |                            |
//!   Failed            Aborted  Failed     NotStored  stands: discarded        NotResumed
//!     v                     v    v                 |  v                            |
//!  Dropped <----------------+  Discarding <--------+  Discarded <---stored---  Discarding
//! ```

use crate::protocol::decision::{Decision, Verdict};

/// State of the destination. The guest may run only in `Running`, which only `Committed` leads to.
/// That needs a decision that stands: every process of the host finds it, and it is durable itself
/// or through a prepared record.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(crate) enum Destination {
    /// Everything up to PREPARED.
    Assembling,
    /// Restored and paused, waiting for COMMIT.
    Prepared,
    /// COMMIT has come; the decision is being made.
    Deciding,
    /// The decision to run stands.
    Committed,
    /// The guest has been taken over. Final.
    Running,
    /// The guest was discarded after PREPARED, and that is not durable yet.
    Discarding,
    /// The discarding is durable. Final.
    Discarded,
    /// Discarded when the source could not have sent COMMIT. Final.
    Dropped,
}

/// What happens to the destination.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(crate) enum DestinationEvent {
    /// All of the guest is in place.
    Restored,
    /// COMMIT came, with this migration's token.
    Commit,
    /// ABORT came.
    Aborted,
    /// Anything failed: a cut, a deadline, a cancel, a wrong message.
    Failed,
    /// A decision stands: of this process, or of another one of this site.
    Stands(Decision),
    /// The decision could not be stored, or not made durable where it must be.
    NotStored,
    /// The guest was taken over.
    Resumed,
    /// The take-over failed, and the guest never ran.
    NotResumed,
    /// A source asks about the migration.
    Asked,
}

/// Permission to let the guest run on the destination.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct MayRun(());

/// What the destination has to do next.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum DestinationOrder {
    /// Wait for the next event.
    Wait,
    /// Send PREPARED and wait for COMMIT.
    SayPrepared,
    /// Store the decision to run; durably, unless the prepared record names the host's boot.
    StoreCommitted,
    /// Acquire the devices and run the guest.
    TakeOver(MayRun),
    /// Send RUNNING.
    SayRunning,
    /// Discard the guest; no peer needs to be told.
    Drop,
    /// Discard the guest (unless that is done) and make that durable.
    StoreDiscarded,
    /// Discard the guest (unless that is done) and tell the source.
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
            // A source never sends ABORT after COMMIT. It resumes its guest, and will never ask.
            (Self::Prepared, E::Aborted) => (Self::Dropped, O::Drop),
            (Self::Prepared, E::Failed) => (Self::Discarding, O::StoreDiscarded),
            (Self::Deciding, E::Stands(Decision::Committed)) => {
                (Self::Committed, O::TakeOver(MayRun(())))
            }
            (Self::Deciding | Self::Discarding, E::Stands(Decision::Discarded)) => {
                (Self::Discarded, O::SayDiscarded)
            }
            (Self::Deciding, E::NotStored) => (Self::Discarding, O::StoreDiscarded),
            (Self::Committed, E::Resumed) => (Self::Running, O::SayRunning),
            (Self::Committed, E::NotResumed) => (Self::Discarding, O::StoreDiscarded),
            (Self::Discarding, E::Asked) => (Self::Discarding, O::StoreDiscarded),
            (state, _) => (state, O::Wait),
        }
    }

    /// Whether this process, which had the guest, no longer needs its decision once the source is
    /// settled: no later event reads or makes one.
    pub(crate) fn may_forget(self) -> bool {
        matches!(self, Self::Running | Self::Discarded)
    }

    /// The answer to a source that asks.
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
