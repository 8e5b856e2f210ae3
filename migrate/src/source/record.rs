//! The hand-over record at its source: staged, made durable, and removed again unless the guest is
//! committed with it.

use uuid::Uuid;

use crate::error::Cause;
use crate::journal::{Records, RecordsError, SourceMark, SourceRecord, StagedSource};
use crate::protocol::ids::{Secret, Token};
use crate::protocol::two_phase::{Source, SourceEvent, SourceOrder};

/// A hand-over record before PREPARED.
pub(super) enum HandOverRecord {
    Staged(StagedRecord),
    Durable(DurableRecord),
}

impl HandOverRecord {
    /// Makes the record durable unless it already is.
    pub(super) fn make_durable(self) -> Result<DurableRecord, Cause> {
        match self {
            Self::Staged(staged) => staged.place(),
            Self::Durable(durable) => Ok(durable),
        }
    }

    /// Removes a durable record and stages it again, because pre-copy continues. During passes an
    /// operator must not find a record.
    pub(super) fn withdraw(self) -> Result<Self, Cause> {
        match self {
            Self::Staged(staged) => Ok(Self::Staged(staged)),
            Self::Durable(durable) => durable.withdraw().map(Self::Staged),
        }
    }
}

/// A record that is written, but not yet linked to its name. Dropping it removes it.
pub(super) struct StagedRecord {
    records: Records,
    staged: StagedSource,
    secret: Secret,
}

impl StagedRecord {
    /// Takes a staged record, and the secret from READY.
    pub(super) fn new(records: Records, staged: StagedSource, secret: Secret) -> Self {
        Self { records, staged, secret }
    }

    /// Makes the record durable. Dropping the result removes it, unless the guest was committed
    /// with it.
    fn place(self) -> Result<DurableRecord, Cause> {
        let Self { records, staged, secret } = self;
        let (state, order) = Source::Streaming.on(SourceEvent::Converged);
        debug_assert_eq!(order, SourceOrder::Record);
        // The record may exist even if linking it has failed.
        let guard = RemoveOnDrop { records, token: staged.token(), armed: true };
        let mark = guard.records.place_source(staged)?;
        let (state, _wait) = state.on(SourceEvent::Recorded);
        Ok(DurableRecord { guard, mark, state, secret })
    }
}

/// A durable record. Dropping it removes the record, because the guest stays on this host. It must
/// be dropped after the paused guest, whose resume must not wait for that disk write.
#[must_use = "dropping this removes the record"]
pub(super) struct DurableRecord {
    guard: RemoveOnDrop,
    mark: SourceMark,
    state: Source,
    secret: Secret,
}

impl DurableRecord {
    fn withdraw(self) -> Result<StagedRecord, Cause> {
        let Self { mut guard, mark, state: _, secret } = self;
        let SourceRecord { token, vm_id, peer, site, .. } = mark.record().clone();
        guard.records.remove_source(token)?;
        guard.armed = false;
        let staged = guard.records.stage_source(token, vm_id, &peer, site)?;
        Ok(StagedRecord { records: guard.records.clone(), staged, secret })
    }

    /// Returns the site of the destination's records, from READY.
    pub(super) fn site(&self) -> Uuid {
        self.mark.record().site
    }

    /// Keeps the record until the outcome is known, because COMMIT follows.
    pub(super) fn commit(self) -> (CommittedRecord, Source, SourceOrder) {
        let Self { mut guard, mark, state, secret } = self;
        guard.armed = false;
        let (state, order) = state.on(SourceEvent::Prepared);
        (CommittedRecord { records: guard.records.clone(), mark, secret }, state, order)
    }
}

/// The record of a guest that may be the destination's.
pub(super) struct CommittedRecord {
    records: Records,
    mark: SourceMark,
    secret: Secret,
}

impl CommittedRecord {
    /// Returns what a question about the migration carries: the site of the destination's records,
    /// and the secret.
    pub(super) fn question(&self) -> (Uuid, Secret) {
        (self.mark.record().site, self.secret)
    }

    /// Removes the record, because it is known which host has the guest.
    pub(super) fn remove(self) -> Result<(), RecordsError> {
        self.records.remove_source(self.mark.record().token)
    }
}

/// Removes a record on drop, because without COMMIT it has no meaning.
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
        if let Err(e) = self.records.remove_source(self.token) {
            let token = self.token;
            tracing::warn!(
                %token, "the guest is here, but the record of its hand-over may stay: {e}"
            );
        }
    }
}
