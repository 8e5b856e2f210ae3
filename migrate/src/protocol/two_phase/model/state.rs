//! The state of the model: two processes, the messages between them, the destination's disk, and
//! whether a second process shares that disk.

use driftline_guest::ClaimState;

use super::super::{
    Destination, DestinationEvent, DestinationOrder, Source, SourceEvent, SourceOrder,
};
use crate::protocol::decision::{Decision, Resolution, Verdict};

#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(super) enum ModelMessage {
    Prepared,
    Abort,
    Commit,
    Running,
    Answer(Verdict),
}

/// An order that has not been performed yet, without its permit.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(super) enum ToDo {
    Nothing,
    Record,
    Commit,
    Ask,
    TakeBack,
    End,
    SayPrepared,
    StoreCommitted,
    TakeOver,
    SayRunning,
    StoreDiscarded,
    SayDiscarded,
    Drop,
}

#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub(super) struct ModelState {
    pub(super) source: Source,
    pub(super) source_alive: bool,
    pub(super) source_runs: bool,
    pub(super) source_todo: ToDo,
    /// The guest is paused, and all of it was sent.
    pub(super) sent: bool,
    /// The source's record is on its disk.
    pub(super) recorded: bool,
    /// COMMIT was sent.
    pub(super) commit_sent: bool,
    pub(super) destination: Destination,
    pub(super) destination_alive: bool,
    pub(super) destination_runs: bool,
    pub(super) destination_ran: bool,
    pub(super) destination_todo: ToDo,
    /// The destination process's own `committed` is on its disk.
    pub(super) placed: bool,
    pub(super) disk: Option<Decision>,
    /// Whether the disk's decision, or its absence, survives a crash of the host.
    pub(super) durable: bool,
    /// The destination's prepared record is durable.
    pub(super) prepared: bool,
    /// The destination's host has a boot id, and its prepared record names it.
    pub(super) names_boot: bool,
    /// The destination's host has rebooted, or has remounted its records: writes that were not
    /// durable may be lost.
    pub(super) rebooted: bool,
    pub(super) to_source: Vec<ModelMessage>,
    pub(super) to_destination: Vec<ModelMessage>,
    pub(super) source_hung_up: bool,
    pub(super) destination_hung_up: bool,
    /// A question that another process of the site is answering.
    pub(super) question: Option<Question>,
    /// The answer to a question, in flight.
    pub(super) answer: Option<Verdict>,
    pub(super) operator: Option<Resolution>,
    /// Which process has the guest of a local hand-over. `None` if memory is copied.
    pub(super) claim: Option<ClaimState>,
}

/// Progress of `Records::decide_unknown`. Other processes may act between any two of its accesses.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(super) struct Question {
    /// Whether the decision was `discarded` when the source asked.
    pub(super) discarded: bool,
    pub(super) read: Read,
}

/// What `decide_unknown` has read so far.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(super) enum Read {
    /// Whether there is a prepared record.
    Prepared(bool),
    /// A prepared record and no decision.
    Undecided,
    /// After `Undecided`, no prepared record.
    Removed,
    /// After `Undecided`, still a prepared record, and no decision can have been lost.
    Never,
}

/// Kind of a step, for the search for resolvable states.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum StepKind {
    /// A success, or a limit that is reached.
    Good,
    /// A failure.
    Bad,
    /// A step of the operator, who knows that the destination does not run the guest.
    Operator,
}

impl ModelState {
    pub(super) fn new(names_boot: bool, is_local: bool) -> Self {
        Self {
            names_boot,
            source: Source::Streaming,
            source_alive: true,
            source_runs: true,
            source_todo: ToDo::Nothing,
            sent: false,
            recorded: false,
            commit_sent: false,
            destination: Destination::Assembling,
            destination_alive: true,
            destination_runs: false,
            destination_ran: false,
            destination_todo: ToDo::Nothing,
            placed: false,
            disk: None,
            durable: true,
            prepared: false,
            rebooted: false,
            to_source: Vec::new(),
            to_destination: Vec::new(),
            source_hung_up: false,
            destination_hung_up: false,
            question: None,
            answer: None,
            operator: None,
            claim: is_local.then_some(ClaimState::Offered),
        }
    }

    pub(super) fn source_event(&self, event: SourceEvent) -> Self {
        let mut w = self.clone();
        let (next, order) = w.source.on(event);
        w.source = next;
        w.source_todo = match order {
            SourceOrder::Wait => w.source_todo,
            SourceOrder::Record => ToDo::Record,
            SourceOrder::Commit => ToDo::Commit,
            SourceOrder::Ask => ToDo::Ask,
            SourceOrder::TakeBack(_) => ToDo::TakeBack,
            SourceOrder::End(_) => ToDo::End,
        };
        w
    }

    pub(super) fn destination_event(&self, event: DestinationEvent) -> Self {
        let mut w = self.clone();
        let (next, order) = w.destination.on(event);
        w.destination = next;
        w.destination_todo = match order {
            DestinationOrder::Wait => w.destination_todo,
            DestinationOrder::SayPrepared => ToDo::SayPrepared,
            DestinationOrder::StoreCommitted => ToDo::StoreCommitted,
            DestinationOrder::TakeOver(_) => ToDo::TakeOver,
            DestinationOrder::SayRunning => ToDo::SayRunning,
            DestinationOrder::Drop => ToDo::Drop,
            DestinationOrder::StoreDiscarded => ToDo::StoreDiscarded,
            DestinationOrder::SayDiscarded => ToDo::SayDiscarded,
        };
        w
    }

    pub(super) fn say_to_source(mut self, message: ModelMessage) -> Self {
        if !self.destination_hung_up {
            self.to_source.push(message);
        }
        self
    }

    pub(super) fn say_to_destination(mut self, message: ModelMessage) -> Self {
        if !self.source_hung_up {
            self.to_destination.push(message);
        }
        self
    }

    pub(super) fn done_source(&self) -> Self {
        Self { source_todo: ToDo::Nothing, ..self.clone() }
    }

    pub(super) fn done_destination(&self) -> Self {
        Self { destination_todo: ToDo::Nothing, ..self.clone() }
    }

    /// Returns every state that is one step away.
    pub(super) fn next(&self) -> Vec<(StepKind, Self)> {
        let mut all = Vec::new();
        if self.source_alive {
            self.source_steps(&mut all);
        }
        if self.destination_alive {
            self.destination_steps(&mut all);
        }
        // Once, the destination's host crashes, or loses the file system of its records and
        // remounts it.
        if !self.rebooted {
            for survivor in [self.destination_dies(), self.clone()] {
                // The process that was answering has died, or its file system is lost.
                let w = Self { rebooted: true, durable: true, question: None, ..survivor };
                if !self.durable {
                    all.push((StepKind::Bad, Self { disk: None, ..w.clone() }));
                }
                all.push((StepKind::Bad, w));
            }
        }
        // The next process sweeps the record of a dead one. If the record names no boot, the
        // decision was durable before the guest ran, so a crash cannot have lost it.
        let undecided = self.disk.is_none() && !(self.rebooted && self.names_boot);
        if !self.destination_alive && self.prepared && undecided {
            all.push((StepKind::Good, Self { prepared: false, ..self.clone() }));
        }
        // As `Records::sweep`: a prepared record is not needed beside a durable decision, and
        // `discarded` is not needed without a prepared record.
        if !self.destination_alive && self.prepared && self.disk.is_some() {
            all.push((StepKind::Good, Self { prepared: false, durable: true, ..self.clone() }));
        }
        if !self.prepared && self.disk == Some(Decision::Discarded) {
            all.push((StepKind::Good, Self { disk: None, durable: true, ..self.clone() }));
        }
        if let Some(question) = self.question {
            all.push((self.elsewhere(), self.answer_on(question)));
        }
        // The network loses the messages in flight.
        for (lost, w) in [
            (&self.to_source, Self { to_source: Vec::new(), ..self.clone() }),
            (&self.to_destination, Self { to_destination: Vec::new(), ..self.clone() }),
        ] {
            if !lost.is_empty() {
                all.push((StepKind::Bad, w));
            }
        }
        all
    }

    /// Returns the kind of a step of another process of the site. While the destination's process
    /// lives, it is bad, because the source asks that process.
    pub(super) fn elsewhere(&self) -> StepKind {
        if self.destination_alive { StepKind::Bad } else { StepKind::Good }
    }

    /// As `Records::decide_unknown`, one access at a time.
    fn answer_on(&self, question: Question) -> Self {
        let reads = |read| {
            let question = Some(Question { read, ..question });
            Self { question, ..self.clone() }
        };
        let answered = |w: Self, decision| {
            let wrong = question.discarded && decision == Decision::Committed;
            assert!(!wrong, "a discarded guest is answered as committed: {w:#?}");
            let verdict = match decision {
                Decision::Committed => Verdict::Committed,
                Decision::Discarded => Verdict::Discarded,
            };
            Self { question: None, answer: Some(verdict), ..w }
        };
        match (question.read, self.disk) {
            (Read::Prepared(_) | Read::Removed, Some(decision)) => {
                answered(Self { durable: true, ..self.clone() }, decision)
            }
            (Read::Prepared(false) | Read::Removed, None) => {
                answered(self.clone(), Decision::Discarded)
            }
            (Read::Prepared(true), None) => reads(Read::Undecided),
            (Read::Undecided, _) if !self.prepared => reads(Read::Removed),
            (Read::Undecided, _) if self.rebooted && self.names_boot => {
                answered(self.clone(), Decision::Committed)
            }
            (Read::Undecided, _) => reads(Read::Never),
            // The link fails if another decision is recorded.
            (Read::Never, recorded) => {
                let recorded = recorded.unwrap_or(Decision::Discarded);
                answered(Self { disk: Some(recorded), durable: true, ..self.clone() }, recorded)
            }
        }
    }

    /// Returns the state after `Migration::store` on a working disk.
    pub(super) fn stored(&self, decision: Decision) -> (Self, DestinationEvent) {
        let mut w = self.clone();
        if w.claim.is_some() {
            return (w, DestinationEvent::Recorded(decision));
        }
        if decision == Decision::Discarded && w.placed {
            (w.disk, w.durable) = (Some(Decision::Discarded), true);
            return (w, DestinationEvent::Recorded(Decision::Discarded));
        }
        // If the prepared record names a boot, `committed` is made durable after the guest runs.
        let waits = w.disk.is_some() || decision == Decision::Discarded || !w.names_boot;
        let recorded = *w.disk.get_or_insert(decision);
        w.durable = waits;
        w.placed |= (decision, recorded) == (Decision::Committed, Decision::Committed);
        (w, DestinationEvent::Recorded(recorded))
    }

    /// Checks I7 and its consequences.
    pub(super) fn check(&self) {
        assert!(
            !(self.source_runs && self.destination_runs),
            "both hosts run the guest: {self:#?}"
        );
        let undecided = matches!(self.source, Source::Committed | Source::InDoubt);
        assert!(
            self.recorded || !(self.commit_sent && undecided),
            "COMMIT was sent without a record: {self:#?}"
        );
        // With copied memory the operator may run a guest that has run and ended elsewhere: its
        // memory here is as it was in the pause. Shared memory is not.
        let resolved_to_run = self.operator == Some(Resolution::Run) && self.claim.is_none();
        assert!(
            !(self.source_runs && self.destination_ran) || resolved_to_run,
            "the source runs a guest that has run elsewhere: {self:#?}"
        );
    }

    /// Returns the state after the source has kept the guest, or has failed to.
    pub(super) fn source_keeps(&self) -> Self {
        let mut w = self.clone();
        match w.claim {
            Some(ClaimState::Offered) => w.claim = Some(ClaimState::Kept),
            // It stays paused.
            Some(ClaimState::Taken | ClaimState::Starting | ClaimState::Running) => return w,
            Some(ClaimState::Kept) | None => {}
        }
        w.source_runs = true;
        w
    }

    /// Whether the destination has the guest of a local hand-over.
    pub(super) fn is_taken(&self) -> bool {
        let taken = [ClaimState::Taken, ClaimState::Starting, ClaimState::Running];
        self.claim.is_some_and(|claim| taken.contains(&claim))
    }

    /// Whether a migration may end here: exactly one side runs the guest, or the surviving side
    /// knows the outcome.
    pub(super) fn is_resolved(&self) -> bool {
        match (self.source_alive, self.destination_alive) {
            (true, true) => self.source_runs != self.destination_runs,
            // The destination's guest died with its process.
            (true, false) => {
                matches!(self.source, Source::Aborted if self.source_runs || self.is_taken())
                    || self.source == Source::Ended
            }
            (false, true) => {
                self.destination_runs
                    || matches!(
                        self.destination,
                        Destination::Discarded | Destination::Dropped | Destination::Discarding
                    )
            }
            (false, false) => true,
        }
    }
}
