//! The source's half.
//!
//! ```text
//! Streaming --Prepared--> Recording --Recorded--> Committed --Running--> Gone
//!     |                       |                       |  \
//!   Failed             Failed, Undone               Lost  Discarded
//!     v                       v                       v     v
//!    Here <-------------------+     InDoubt <---------+    Here
//!                                      |  Running, operator's Discard  -> Gone
//!                                      |  Discarded, operator's Run    -> Here
//! ```

use crate::control::Resolution;
use crate::message::Verdict;

/// Where the source stands. Before `Committed` it may take the guest back at any moment, because
/// COMMIT has not been said; after it, only on the destination's or the operator's word.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(crate) enum Source {
    /// Everything up to PREPARED.
    Streaming,
    /// The destination is prepared; the record is being made durable.
    Recording,
    /// The record is durable; COMMIT is being said and its answer awaited.
    Committed,
    /// No answer came.
    InDoubt,
    /// The guest is here again. Final.
    Here,
    /// The guest here has ended. Final.
    Gone,
}

/// What happens to the source.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(crate) enum SourceEvent {
    /// PREPARED came, and its digest and counts are ours.
    Prepared,
    /// Anything failed, or it was cancelled.
    Failed,
    /// The hand-over record is durable.
    Recorded,
    /// The destination was gone before COMMIT was said, and the record has been removed again.
    Undone,
    /// RUNNING came.
    Running,
    /// The connection broke, or the answer did not come in time.
    Lost,
    /// ANSWER came.
    Answer(Verdict),
    /// The operator said.
    Operator(Resolution),
}

/// Permission to let the guest run on the source.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct MayRunHere(());

/// Permission to end the guest on the source.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct MayEnd(());

/// What the source has to do next.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum SourceOrder {
    /// Wait for the next event.
    Wait,
    /// Make the hand-over record durable.
    Record,
    /// Say COMMIT and wait for the answer.
    Commit,
    /// Ask the destination again, after a while.
    Ask,
    /// Take the guest back.
    TakeBack(MayRunHere),
    /// End the guest here.
    End(MayEnd),
}

impl Source {
    /// The next state and what to do. Events that mean nothing in a state change nothing.
    pub(crate) fn on(self, event: SourceEvent) -> (Self, SourceOrder) {
        use SourceEvent as E;
        use SourceOrder as O;
        let take_back = (Self::Here, O::TakeBack(MayRunHere(())));
        let end = (Self::Gone, O::End(MayEnd(())));
        match (self, event) {
            (Self::Streaming, E::Prepared) => (Self::Recording, O::Record),
            (Self::Streaming, E::Failed | E::Lost) => take_back,
            // A record that failed half-way may stand: it forbids nothing, COMMIT was never said.
            (Self::Recording, E::Failed | E::Undone) => take_back,
            (Self::Recording, E::Recorded) => (Self::Committed, O::Commit),
            (Self::Committed | Self::InDoubt, E::Running | E::Answer(Verdict::Running)) => end,
            (Self::Committed | Self::InDoubt, E::Answer(Verdict::Discarded)) => take_back,
            // COMMIT may have arrived even if sending it failed.
            (Self::Committed, E::Lost | E::Failed | E::Answer(_)) => (Self::InDoubt, O::Ask),
            (Self::InDoubt, E::Lost | E::Failed | E::Answer(_)) => (Self::InDoubt, O::Ask),
            (Self::InDoubt, E::Operator(Resolution::Run)) => take_back,
            (Self::InDoubt, E::Operator(Resolution::Discard)) => end,
            (state, _) => (state, O::Wait),
        }
    }
}
