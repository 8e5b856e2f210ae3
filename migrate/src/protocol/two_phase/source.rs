//! The source's state machine.
//!
//! ```text
//! Streaming -Converged-> Recording -Recorded-> Recorded -Prepared-> Committed -Running-> Ended
//!     |                      |                    |                   |  \
//!     +----------------------+--------------------+                 Lost  Discarded
//!                    Lost    v                                        v     v
//!                         Aborted                          InDoubt <--+  Aborted
//!                                                             |  Running, or Discard -> Ended
//!                                                             |  Discarded, or Run   -> Aborted
//! ```
//!
//! Run and Discard are the operator's decisions.
//!
//! The record is made before the pause, so that the pause does not wait for a disk; if digests are
//! compared, it is made within the pause. It has no effect until COMMIT is sent.

use crate::protocol::decision::{Resolution, Verdict};

/// State of the source. Before `Committed` it may resume the guest at any time, because COMMIT has
/// not been sent. After that, only the destination's answer or the operator allows it.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(crate) enum Source {
    /// Memory is sent, pass by pass.
    Streaming,
    /// The rest fits into a pause; the record is being made durable.
    Recording,
    /// The record is durable. The guest is paused, the rest is sent, and PREPARED is awaited.
    Recorded,
    /// COMMIT is sent, and its answer is awaited.
    Committed,
    /// No answer has arrived.
    InDoubt,
    /// The hand-over was aborted: the guest is at the source. Final.
    Aborted,
    /// The guest at the source has ended. Final.
    Ended,
}

/// An event at the source.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(crate) enum SourceEvent {
    /// The rest fits into a pause.
    Converged,
    /// The hand-over record is durable.
    Recorded,
    /// PREPARED has arrived, and its digest and counts are right.
    Prepared,
    /// RUNNING has arrived.
    Running,
    /// The connection broke, or the answer did not arrive in time. Before COMMIT: any step failed,
    /// or the migration was cancelled.
    Lost,
    /// ANSWER has arrived.
    Answer(Verdict),
    /// The operator has resolved the migration.
    Operator(Resolution),
}

/// Permission to run the guest at the source.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct MayRunHere(());

/// Permission to end the guest at the source.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct MayEnd(());

/// The next action of the source.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum SourceOrder {
    /// Wait for the next event.
    Wait,
    /// Make the hand-over record durable.
    Record,
    /// Send COMMIT and wait for the answer.
    Commit,
    /// Ask the destination again, after the interval.
    Ask,
    /// Resume the guest here, and remove a durable record.
    TakeBack(MayRunHere),
    /// End the guest here.
    End(MayEnd),
}

impl Source {
    /// Returns the next state and an order. Events without a meaning in a state change nothing.
    pub(crate) fn on(self, event: SourceEvent) -> (Self, SourceOrder) {
        use SourceEvent as E;
        use SourceOrder as O;
        let take_back = (Self::Aborted, O::TakeBack(MayRunHere(())));
        let end = (Self::Ended, O::End(MayEnd(())));
        match (self, event) {
            (Self::Streaming, E::Converged) => (Self::Recording, O::Record),
            (Self::Recording, E::Recorded) => (Self::Recorded, O::Wait),
            (Self::Recorded, E::Prepared) => (Self::Committed, O::Commit),
            // A record that stays does no harm, because COMMIT was never sent.
            (Self::Streaming | Self::Recording | Self::Recorded, E::Lost) => take_back,
            (Self::Committed | Self::InDoubt, E::Running | E::Answer(Verdict::Running)) => end,
            (Self::Committed | Self::InDoubt, E::Answer(Verdict::Discarded)) => take_back,
            // COMMIT may have arrived even if sending it failed.
            (Self::Committed, E::Lost | E::Answer(_)) => (Self::InDoubt, O::Ask),
            (Self::InDoubt, E::Lost | E::Answer(_)) => (Self::InDoubt, O::Ask),
            (Self::InDoubt, E::Operator(Resolution::Run)) => take_back,
            (Self::InDoubt, E::Operator(Resolution::Discard)) => end,
            (state, _) => (state, O::Wait),
        }
    }
}
