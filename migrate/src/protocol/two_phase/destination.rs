//! The destination's half.
//!
//! ```text
//! Assembling --Restored--> Prepared --Commit--> Deciding --stands: committed--> Committed --> Running
//!     |                     |    |                 |  |                            |
//!   Failed            Aborted  Failed     NotStored  stands: discarded        NotResumed
//!     v                     v    v                 |  v                            |
//!  Dropped <----------------+  Discarding <--------+  Discarded <---stored---  Discarding
//! ```

use crate::protocol::decision::Decision;
use crate::protocol::decision::Verdict;

/// Where the destination stands. The guest may run only in `Running`; only `Committed` leads there,
/// which needs a decision that stands: found by every process of the host, and durable itself or by
/// a prepared record.
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
    /// The guest was thrown away after PREPARED, and that is not durable yet.
    Discarding,
    /// It is. Final.
    Discarded,
    /// Thrown away when the source could not have said COMMIT. Final.
    Dropped,
}

/// What happens to the destination.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(crate) enum DestinationEvent {
    /// All of the guest is in place.
    Restored,
    /// COMMIT came, with this migration's token.
    Commit,
    /// The source said ABORT.
    Aborted,
    /// Anything failed: a cut, a deadline, a cancel, a wrong message.
    Failed,
    /// A decision stands: ours, or another process's of this site.
    Stands(Decision),
    /// The decision could not be stored, or made durable where that has to be.
    NotStored,
    /// The guest was taken over.
    Resumed,
    /// It could not be, and it never ran.
    NotResumed,
    /// Someone asks what became of it.
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
    /// Say PREPARED and wait for COMMIT.
    SayPrepared,
    /// Store the decision to run; durably, unless the prepared record names the host's boot.
    StoreCommitted,
    /// Take devices and let the guest run.
    TakeOver(MayRun),
    /// Say RUNNING.
    SayRunning,
    /// Throw the guest away; nobody needs to be told.
    Drop,
    /// Throw the guest away (if that has not been done) and make that durable.
    StoreDiscarded,
    /// Throw the guest away (if that has not been done) and say so.
    SayDiscarded,
}

impl Destination {
    /// The next state and what to do. Events that mean nothing in a state change nothing.
    pub(crate) fn on(self, event: DestinationEvent) -> (Self, DestinationOrder) {
        use DestinationEvent as E;
        use DestinationOrder as O;
        match (self, event) {
            (Self::Assembling, E::Restored) => (Self::Prepared, O::SayPrepared),
            (Self::Assembling, E::Failed | E::Aborted) => (Self::Dropped, O::Drop),
            (Self::Prepared, E::Commit) => (Self::Deciding, O::StoreCommitted),
            // A source never says ABORT after COMMIT, and goes on with its guest: it will never
            // ask.
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

    /// Whether this process, which had the guest, needs its decision no more once the source is
    /// settled: nothing that can still happen would read or make one.
    pub(crate) fn may_forget(self) -> bool {
        matches!(self, Self::Running | Self::Discarded)
    }

    /// What a source that asks is told.
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
