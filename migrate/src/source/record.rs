//! The hand-over record at its source: staged, standing, and removed again unless the guest is
//! sealed with it.

use uuid::Uuid;

use crate::error::Cause;
use crate::journal::{Records, RecordsError, SourceMark, SourceRecord, StagedSource};
use crate::protocol::ids::Token;
use crate::protocol::two_phase::{Source, SourceEvent, SourceOrder};

/// A hand-over record before PREPARED.
pub(super) enum Record {
    Staged(StagedRecord),
    Standing(StandingRecord),
}

impl Record {
    /// Makes the record durable unless it is already.
    pub(super) fn stand(self) -> Result<StandingRecord, Cause> {
        match self {
            Self::Staged(staged) => staged.place(),
            Self::Standing(standing) => Ok(standing),
        }
    }

    /// Removes a durable record and stages it again, because pre-copy goes on. An operator must not
    /// find a record for as long as passes take.
    pub(super) fn withdraw(self) -> Result<Self, Cause> {
        match self {
            Self::Staged(staged) => Ok(Self::Staged(staged)),
            Self::Standing(standing) => standing.withdraw().map(Self::Staged),
        }
    }
}

/// A record that is written but has no name yet. Dropping it removes it.
pub(super) struct StagedRecord {
    records: Records,
    staged: StagedSource,
}

impl StagedRecord {
    pub(super) fn new(records: Records, staged: StagedSource) -> Self {
        Self { records, staged }
    }

    /// Makes the record durable. Dropping the result removes it, unless the guest was sealed with
    /// it.
    fn place(self) -> Result<StandingRecord, Cause> {
        let Self { records, staged } = self;
        let (state, order) = Source::Streaming.on(SourceEvent::Converged);
        debug_assert_eq!(order, SourceOrder::Record);
        // A record whose placing failed half-way may exist.
        let guard = RemoveOnDrop { records, token: staged.token(), armed: true };
        let mark = guard.records.place_source(staged)?;
        let (state, _wait) = state.on(SourceEvent::Recorded);
        Ok(StandingRecord { guard, mark, state })
    }
}

/// Proof that the record is durable. Dropping it removes the record, because the guest stays on
/// this host. It must be dropped after the paused guest, which must not wait for that disk write.
#[must_use = "dropping this removes the record"]
pub(super) struct StandingRecord {
    guard: RemoveOnDrop,
    mark: SourceMark,
    state: Source,
}

impl StandingRecord {
    fn withdraw(self) -> Result<StagedRecord, Cause> {
        let Self { mut guard, mark, state: _ } = self;
        let SourceRecord { token, vm_id, peer, site, .. } = mark.record().clone();
        guard.records.settle(token)?;
        guard.armed = false;
        let staged = guard.records.stage_source(token, vm_id, &peer, site)?;
        Ok(StagedRecord { records: guard.records.clone(), staged })
    }

    /// The site of the destination's records, from READY.
    pub(super) fn site(&self) -> Uuid {
        self.mark.record().site
    }

    /// Keeps the record until the migration is settled: PREPARED has come.
    pub(super) fn seal(self) -> (SealedRecord, Source, SourceOrder) {
        let Self { mut guard, mark, state } = self;
        guard.armed = false;
        let (state, order) = state.on(SourceEvent::Prepared);
        (SealedRecord { records: guard.records.clone(), mark }, state, order)
    }
}

/// The record of a guest that may be the destination's.
pub(super) struct SealedRecord {
    records: Records,
    mark: SourceMark,
}

impl SealedRecord {
    /// The site of the destination's records.
    pub(super) fn site(&self) -> Uuid {
        self.mark.record().site
    }

    /// Removes the record, because it is known which host has the guest.
    pub(super) fn settle(self) -> Result<(), RecordsError> {
        self.records.settle(self.mark.record().token)
    }
}

/// Removes a record on drop: without COMMIT it has no meaning.
struct RemoveOnDrop {
    records: Records,
    token: Token,
    armed: bool,
}

impl Drop for RemoveOnDrop {
    fn drop(&mut self) {
        if !self.armed {
            return;
        }
        if let Err(e) = self.records.settle(self.token) {
            let token = self.token;
            tracing::warn!(
                %token, "the guest is here, and a record that says otherwise may stay: {e}"
            );
        }
    }
}
