//! The receiver's session: the guest that has it, and the state of its hand-over.
//!
//! The receiving thread and the threads of connections share the session. Every change of the
//! hand-over's state goes through [`Session::post`], under one lock, together with the decision
//! that it needs. So an answer never precedes the decision that other processes find on disk.

use std::time::{Duration, Instant};

use driftline_guest::{LogLimit, VmId};
use parking_lot::{Condvar, Mutex, MutexGuard};
use uuid::Uuid;

use crate::journal::{PreparedMark, Records, RecordsError, StagedDecision};
use crate::protocol::decision::{Decision, Verdict};
use crate::protocol::ids::{Secret, Token};
use crate::protocol::limits::MAX_CONNECTIONS;
use crate::protocol::two_phase::{Destination, DestinationEvent, DestinationOrder};
use crate::transport::stop::StopFlag;
use crate::transport::wait::SLICE;

/// Time that [`Session::await_source_informed`] gives a source to ask even if the receiver is
/// cancelled. A source in doubt asks every 500 ms by default (`SendOptions::ask_interval`).
const CANCELLED_LIMIT: Duration = Duration::from_secs(2);

/// A receiver's only session.
#[derive(Debug)]
pub(super) struct Session {
    records: Records,
    state: Mutex<SessionState>,
    changed: Condvar,
}

#[derive(Debug, Default)]
enum SessionState {
    /// No guest has the session.
    #[default]
    Free,
    /// The machine of this guest is being built. It has no prepared record yet.
    Building { vm_id: VmId, token: Token },
    /// A guest is being received, or was.
    Migrating(Migration),
}

/// Why a source, or a channel that joins, is refused.
#[derive(Debug, thiserror::Error)]
pub(super) enum SessionRefusal {
    #[error("busy with guest {0}")]
    Busy(VmId),
    #[error("this receiver has taken over guest {0}")]
    TakenOver(VmId),
    #[error("it joins a migration that is not in progress here")]
    NotInProgress,
    #[error("it does not carry the secret of that migration")]
    WrongSecret,
    #[error("a migration has at most {} connections", MAX_CONNECTIONS)]
    TooManyConnections,
    #[error("another connection displaced it, because too many were open")]
    Displaced,
}

/// How other processes learn which process has the guest.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum DecidedBy {
    /// The records of this site.
    Records,
    /// The claim of memory that both processes have. Its source asks no process, so nothing is
    /// recorded.
    Claim,
}

#[derive(Debug)]
struct Migration {
    token: Token,
    vm_id: VmId,
    secret: Secret,
    by: DecidedBy,
    state: Destination,
    /// This process's `committed`, staged until the decision.
    staged: Option<StagedDecision>,
    /// The prepared record, until it is removed.
    prepared: Option<PreparedMark>,
    /// Whether this process's own `committed` is on disk.
    placed: bool,
    /// Whether the source knows that the guest was discarded.
    source_informed: bool,
    /// Channels besides the first.
    joined: u32,
    /// Why the last decision could not be stored.
    fault: Option<RecordsError>,
}

impl Session {
    pub(super) fn new(records: Records) -> Self {
        Self { records, state: Mutex::default(), changed: Condvar::new() }
    }

    pub(super) fn site(&self) -> Uuid {
        self.records.site()
    }

    fn lock(&self) -> MutexGuard<'_, SessionState> {
        self.state.lock()
    }

    /// Fails with the guest that has the session, unless it is free.
    pub(super) fn vacant(&self) -> Result<(), SessionRefusal> {
        self.lock().vacant()
    }

    /// Gives the session to a source if it is free. If `accept` fails, the session stays free.
    pub(super) fn claim(
        &self,
        vm_id: VmId,
        token: Token,
        accept: impl FnOnce() -> Result<(), SessionRefusal>,
    ) -> Result<(), SessionRefusal> {
        let mut state = self.lock();
        state.vacant()?;
        accept()?;
        *state = SessionState::Building { vm_id, token };
        Ok(())
    }

    /// Frees the session.
    pub(super) fn vacate(&self) {
        *self.lock() = SessionState::Free;
    }

    /// Begins a migration: makes its prepared record durable, if records decide. From now on this
    /// process answers for `token`, to callers that know `secret`.
    pub(super) fn begin(
        &self,
        token: Token,
        vm_id: VmId,
        secret: Secret,
        by: DecidedBy,
    ) -> Result<(), RecordsError> {
        let (prepared, staged) = match by {
            DecidedBy::Claim => (None, None),
            DecidedBy::Records => {
                let prepared = self.records.prepare(token, vm_id, secret)?;
                // Staged now rather than in the pause. If that fails, the decision is written in
                // the pause.
                (Some(prepared), self.records.stage(token, Some(vm_id), Decision::Committed).ok())
            }
        };
        *self.lock() = SessionState::Migrating(Migration {
            token,
            vm_id,
            secret,
            by,
            state: Destination::Assembling,
            staged,
            prepared,
            placed: false,
            source_informed: false,
            joined: 0,
            fault: None,
        });
        Ok(())
    }

    /// Makes the decision durable, after the guest has resumed.
    pub(super) fn sync(&self, token: Token) {
        if self.lock().migration_of(token).is_some_and(|m| m.by == DecidedBy::Claim) {
            return;
        }
        if let Err(e) = self.records.sync(token) {
            tracing::error!(
                %token,
                "the guest runs here, but the decision may not survive a crash of this host; then \
                 its source stays in doubt if RUNNING has not reached it: {e}"
            );
        }
    }

    /// Adds a channel to the migration whose guest is being received, or returns why not. If
    /// `accept` fails, the channel does not count.
    pub(super) fn join(
        &self,
        token: Token,
        secret: &Secret,
        accept: impl FnOnce() -> Result<(), SessionRefusal>,
    ) -> Result<(), SessionRefusal> {
        let mut state = self.lock();
        let migration = state.migration_of(token);
        if migration.as_ref().is_some_and(|migration| !migration.secret.is(secret)) {
            return Err(SessionRefusal::WrongSecret);
        }
        let migration = migration.filter(|s| s.state == Destination::Assembling);
        let migration = migration.ok_or(SessionRefusal::NotInProgress)?;
        if migration.joined + 1 >= MAX_CONNECTIONS {
            return Err(SessionRefusal::TooManyConnections);
        }
        accept()?;
        migration.joined += 1;
        Ok(())
    }

    /// Passes an event to the state machine, and stores the decisions that it orders. Returns the
    /// first order that the caller has to perform, and why a decision could not be stored.
    pub(super) fn post(&self, event: DestinationEvent) -> (DestinationOrder, Option<RecordsError>) {
        let mut state = self.lock();
        let SessionState::Migrating(migration) = &mut *state else {
            return (DestinationOrder::Wait, None);
        };
        let order = migration.advance(&self.records, event);
        let fault = migration.fault.take();
        drop(state);
        self.changed.notify_all();
        (order, fault)
    }

    /// Returns the verdict on this receiver's own migration.
    pub(super) fn verdict(&self, token: Token) -> Verdict {
        self.lock().migration_of(token).map_or(Verdict::Unknown, |s| s.state.verdict())
    }

    /// Answers a question, unless it carries another secret than its migration's. For a token that
    /// this process does not know, the site's records decide: after *discarded* no process that
    /// shares them can run that guest.
    pub(super) fn answer(
        &self,
        token: Token,
        site: Uuid,
        secret: &Secret,
    ) -> Result<Verdict, SessionRefusal> {
        let mut state = self.lock();
        match &mut *state {
            SessionState::Migrating(migration) if migration.token == token => {
                if !migration.secret.is(secret) {
                    return Err(SessionRefusal::WrongSecret);
                }
                migration.advance(&self.records, DestinationEvent::Asked);
                return Ok(migration.state.verdict());
            }
            // An honest source does not ask at that time.
            SessionState::Building { token: building, .. } if *building == token => {
                return Ok(Verdict::Undecided);
            }
            _ => {}
        }
        drop(state);
        if site != self.records.site() {
            return Ok(Verdict::Unknown);
        }
        let accepted = self.records.accepts(token, secret);
        if matches!(accepted, Ok(false)) {
            return Err(SessionRefusal::WrongSecret);
        }
        Ok(match accepted.and_then(|_| self.records.decide_unknown(token)) {
            Ok(Decision::Discarded) => Verdict::Discarded,
            Ok(Decision::Committed) => Verdict::Committed,
            Err(e) => {
                static LIMIT: LogLimit = LogLimit::new();
                if let Some(unshown) = LIMIT.admit() {
                    tracing::warn!(%token, unshown, "deciding about an unknown token failed: {e}");
                }
                Verdict::Undecided
            }
        })
    }

    /// Records that the source knows that the guest was discarded, and will not ask again.
    pub(super) fn note_source_informed(&self, token: Token) {
        if let Some(migration) = self.lock().migration_of(token) {
            migration.source_informed = true;
        }
        self.changed.notify_all();
    }

    /// Removes the records of a migration after ENDED. Only the process that had the guest, and
    /// will not decide about it again, may do so: the decision of another process is all that
    /// prevents that process from running the guest.
    pub(super) fn forget(&self, token: Token) {
        let mut state = self.lock();
        let migration = state.migration_of(token).filter(|s| s.state.may_forget());
        let Some(migration) = migration else {
            return tracing::debug!(%token, "the decision stays: this process never had the guest");
        };
        if migration.by == DecidedBy::Claim {
            return;
        }
        let prepared = migration.prepared.take();
        drop(state);
        if let Err(e) = self.records.forget_decision(token, prepared) {
            tracing::warn!(%token, "the records of a finished migration stay: {e}");
        }
    }

    /// Waits until a source knows that the guest was discarded, at most `limit`, and at most
    /// [`CANCELLED_LIMIT`] if the receiver is cancelled. Returns whether it knows.
    pub(super) fn await_source_informed(&self, limit: Duration, stop: &StopFlag) -> bool {
        let began = Instant::now();
        let mut state = self.lock();
        loop {
            if !matches!(&*state, SessionState::Migrating(s) if !s.source_informed) {
                return true;
            }
            let limit = if stop.is_requested() { limit.min(CANCELLED_LIMIT) } else { limit };
            if began.elapsed() >= limit {
                return false;
            }
            self.changed.wait_for(&mut state, SLICE);
        }
    }
}

impl SessionState {
    fn vacant(&self) -> Result<(), SessionRefusal> {
        match self {
            Self::Free => Ok(()),
            Self::Migrating(Migration { state: Destination::Running, vm_id, .. }) => {
                Err(SessionRefusal::TakenOver(*vm_id))
            }
            Self::Building { vm_id, .. } | Self::Migrating(Migration { vm_id, .. }) => {
                Err(SessionRefusal::Busy(*vm_id))
            }
        }
    }

    /// Returns the migration of `token`, if it is this receiver's.
    fn migration_of(&mut self, token: Token) -> Option<&mut Migration> {
        match self {
            Self::Migrating(migration) if migration.token == token => Some(migration),
            _ => None,
        }
    }
}

impl Migration {
    fn advance(&mut self, records: &Records, event: DestinationEvent) -> DestinationOrder {
        let mut event = event;
        loop {
            let (next, order) = self.state.on(event);
            let (token, from) = (self.token, self.state);
            tracing::debug!(%token, ?event, ?from, to = ?next, "hand-over");
            self.state = next;
            if !matches!(
                next,
                Destination::Assembling | Destination::Prepared | Destination::Deciding
            ) {
                self.staged = None;
            }
            // The source cannot have sent COMMIT, and will not ask.
            if next == Destination::Dropped
                && let Some(prepared) = self.prepared.take()
            {
                records.withdraw(self.token, prepared);
            }
            event = match order {
                DestinationOrder::StoreCommitted => self.store(records, Decision::Committed),
                DestinationOrder::StoreDiscarded => {
                    let event = self.store(records, Decision::Discarded);
                    if event == DestinationEvent::NotStored {
                        return DestinationOrder::Wait;
                    }
                    event
                }
                order => return order,
            };
        }
    }

    fn store(&mut self, records: &Records, decision: Decision) -> DestinationEvent {
        if self.by == DecidedBy::Claim {
            return DestinationEvent::Recorded(decision);
        }
        let staged = self.staged.take_if(|_| decision == Decision::Committed);
        let stored = match (decision, self.placed, staged) {
            // The guest never ran, so this process may replace its own decision.
            (Decision::Discarded, true, _) => {
                records.overturn(self.token, self.vm_id).map(|()| Decision::Discarded)
            }
            (_, _, Some(staged)) => match &self.prepared {
                Some(prepared) => records.decide_prepared(staged, prepared),
                None => records.decide_by(staged),
            },
            _ => records.decide(self.token, Some(self.vm_id), decision),
        };
        match stored {
            Ok(recorded) => {
                self.placed |= (decision, recorded) == (Decision::Committed, Decision::Committed);
                DestinationEvent::Recorded(recorded)
            }
            Err(e) => {
                tracing::error!(token = %self.token, ?decision, "the decision is not durable: {e}");
                self.fault = Some(e);
                DestinationEvent::NotStored
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn session(dir: &tempfile::TempDir) -> Session {
        Session::new(Records::open(dir.path()).unwrap())
    }

    const SECRET: Secret = Secret::from_bytes([7; 32]);

    fn prepared(session: &Session, token: Token) {
        session.begin(token, VmId::random(), SECRET, DecidedBy::Records).unwrap();
        let (order, _) = session.post(DestinationEvent::Restored);
        assert_eq!(order, DestinationOrder::SayPrepared);
    }

    #[test]
    fn ended_keeps_the_decision_of_another_process() {
        let dir = tempfile::tempdir().unwrap();
        let (holder, other, token) = (session(&dir), session(&dir), Token::random());
        prepared(&holder, token);
        // The source in doubt asks the other process, resumes its guest, and sends ENDED.
        assert_eq!(other.answer(token, other.site(), &SECRET).unwrap(), Verdict::Discarded);
        other.forget(token);
        let (order, fault) = holder.post(DestinationEvent::Commit);
        assert_eq!((order, fault.is_none()), (DestinationOrder::SayDiscarded, true));
        assert_eq!(holder.verdict(token), Verdict::Discarded);
        // Now no process has the guest.
        holder.forget(token);
        assert_eq!(holder.records.decision(token).unwrap(), None);
    }

    #[test]
    fn stranger_without_the_secret_gets_no_answer() {
        let dir = tempfile::tempdir().unwrap();
        let (holder, other, token) = (session(&dir), session(&dir), Token::random());
        prepared(&holder, token);
        let wrong = Secret::from_bytes([8; 32]);
        for session in [&holder, &other] {
            let refusal = session.answer(token, session.site(), &wrong).unwrap_err();
            assert!(matches!(refusal, SessionRefusal::WrongSecret));
        }
        let joined = holder.join(token, &wrong, || Ok(()));
        assert!(matches!(joined, Err(SessionRefusal::WrongSecret)));
        // No question has counted: the guest may still be taken over.
        let (order, _) = holder.post(DestinationEvent::Commit);
        assert!(matches!(order, DestinationOrder::TakeOver(_)), "{order:?}");
    }

    #[test]
    fn cancel_leaves_the_source_time_to_ask() {
        let dir = tempfile::tempdir().unwrap();
        let (session, token, stop) = (session(&dir), Token::random(), StopFlag::default());
        prepared(&session, token);
        assert!(stop.commit());
        // During the take-over, which fails.
        stop.cancel().unwrap_err();
        stop.undo_commit();
        let began = Instant::now();
        // No source asks.
        assert!(!session.await_source_informed(Duration::from_secs(600), &stop));
        assert!(began.elapsed() >= CANCELLED_LIMIT, "a source may have been about to ask");
        session.note_source_informed(token);
        assert!(session.await_source_informed(Duration::from_secs(600), &stop));
    }

    fn files(dir: &tempfile::TempDir, end: &str) -> Vec<std::path::PathBuf> {
        let entries = std::fs::read_dir(dir.path()).unwrap().map(|entry| entry.unwrap().path());
        entries.filter(|path| path.to_str().unwrap().ends_with(end)).collect()
    }

    #[test]
    fn lost_decision_of_another_boot_answers_committed() {
        let dir = tempfile::tempdir().unwrap();
        let (holder, token, vm) = (session(&dir), Token::random(), VmId::random());
        holder.begin(token, vm, SECRET, DecidedBy::Records).unwrap();
        holder.post(DestinationEvent::Restored);
        let (order, _) = holder.post(DestinationEvent::Commit);
        assert!(matches!(order, DestinationOrder::TakeOver(_)), "{order:?}");
        let decision = files(&dir, ".destination.json").pop().unwrap();
        assert_eq!(
            session(&dir).answer(token, holder.site(), &SECRET).unwrap(),
            Verdict::Committed
        );
        // The host crashes before the decision is durable, and reboots.
        std::fs::remove_file(decision).unwrap();
        let prepared = files(&dir, ".prepared.json").pop().unwrap();
        let record = std::fs::read_to_string(&prepared).unwrap();
        let boot = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap();
        let earlier = record.replace(boot.trim(), &Uuid::new_v4().to_string());
        assert_ne!(record, earlier);
        std::fs::write(&prepared, earlier).unwrap();
        assert_eq!(
            session(&dir).answer(token, holder.site(), &SECRET).unwrap(),
            Verdict::Committed
        );
        assert!(files(&dir, ".destination.json").is_empty(), "no decision is stored");
        holder.post(DestinationEvent::Resumed);
        holder.forget(token);
        assert!(files(&dir, ".prepared.json").is_empty(), "its own process removes it");
    }

    #[test]
    fn dropped_guest_leaves_no_record() {
        for event in [DestinationEvent::Failed, DestinationEvent::Aborted] {
            let dir = tempfile::tempdir().unwrap();
            let (session, token, vm) = (session(&dir), Token::random(), VmId::random());
            session.begin(token, vm, SECRET, DecidedBy::Records).unwrap();
            assert_eq!(files(&dir, ".prepared.json").len(), 1);
            session.post(event);
            assert!(files(&dir, ".json").is_empty());
        }
    }

    #[test]
    fn decision_stays_until_ended_after_running() {
        let dir = tempfile::tempdir().unwrap();
        let (session, token) = (session(&dir), Token::random());
        prepared(&session, token);
        let (order, _) = session.post(DestinationEvent::Commit);
        assert!(matches!(order, DestinationOrder::TakeOver(_)), "{order:?}");
        session.forget(token);
        assert_eq!(session.records.decision(token).unwrap(), Some(Decision::Committed));
        session.post(DestinationEvent::Resumed);
        session.forget(Token::random());
        assert_eq!(session.records.decision(token).unwrap(), Some(Decision::Committed));
        session.forget(token);
        assert_eq!(session.records.decision(token).unwrap(), None);
    }

    #[test]
    fn migration_that_a_claim_decides_records_nothing() {
        let dir = tempfile::tempdir().unwrap();
        let (session, token, vm) = (session(&dir), Token::random(), VmId::random());
        let before = files(&dir, "");
        session.begin(token, vm, SECRET, DecidedBy::Claim).unwrap();
        session.post(DestinationEvent::Restored);
        let (order, _) = session.post(DestinationEvent::Commit);
        assert!(matches!(order, DestinationOrder::TakeOver(_)), "{order:?}");
        assert_eq!(session.verdict(token), Verdict::Committed);
        session.post(DestinationEvent::Resumed);
        session.sync(token);
        session.forget(token);
        assert_eq!(files(&dir, ""), before);
    }
}
