//! The state of the model: two processes, the messages between them, the destination's disk, and
//! whether a second process shares that disk.

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
}

/// Progress of `Records::decide_unknown`. Other processes may act between any two of its accesses.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(super) struct Question {
    /// Whether the decision was `discarded` when the source asked.
    discarded: bool,
    read: Read,
}

/// What `decide_unknown` has read so far.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(super) enum Read {
    /// Whether there is a prepared record.
    Prepared(bool),
    /// A prepared record and no decision.
    Undecided,
    /// After `Undecided`, no prepared record.
    Gone,
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
    /// The operator lets the source run the guest, knowing that the destination cannot.
    Operator,
}

impl ModelState {
    pub(super) fn new(names_boot: bool) -> Self {
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
        }
    }

    fn source_event(&self, event: SourceEvent) -> Self {
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

    fn destination_event(&self, event: DestinationEvent) -> Self {
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

    fn say_to_source(mut self, message: ModelMessage) -> Self {
        if !self.destination_hung_up {
            self.to_source.push(message);
        }
        self
    }

    fn say_to_destination(mut self, message: ModelMessage) -> Self {
        if !self.source_hung_up {
            self.to_destination.push(message);
        }
        self
    }

    fn done_source(&self) -> Self {
        Self { source_todo: ToDo::Nothing, ..self.clone() }
    }

    fn done_destination(&self) -> Self {
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

    fn source_steps(&self, all: &mut Vec<(StepKind, Self)>) {
        use SourceEvent as E;
        use StepKind::{Bad, Good};
        all.push((
            Bad,
            Self { source_alive: false, source_runs: false, source_hung_up: true, ..self.clone() },
        ));
        // The source has one thread: messages wait while it writes its record.
        if self.source_todo != ToDo::Record
            && let Some((first, rest)) = self.to_source.split_first()
        {
            let rest = Self { to_source: rest.to_vec(), ..self.clone() };
            all.push((
                Good,
                match first {
                    ModelMessage::Prepared => rest.source_event(E::Prepared),
                    ModelMessage::Running => rest.source_event(E::Running),
                    ModelMessage::Answer(v) => rest.source_event(E::Answer(*v)),
                    ModelMessage::Abort => rest.source_event(E::Lost),
                    ModelMessage::Commit => unreachable!("only the source sends COMMIT"),
                },
            ));
        }
        if self.source == Source::Streaming {
            all.push((Good, self.source_event(E::Converged)));
        }
        // After the record, or before it if digests are compared first; never while it is written.
        let may_send = matches!(self.source, Source::Streaming | Source::Recorded);
        if may_send && self.source_todo != ToDo::Record && !self.sent {
            all.push((Good, Self { sent: true, source_runs: false, ..self.clone() }));
        }
        // A lost connection, a deadline, or a cancel before COMMIT.
        if matches!(self.source, Source::Streaming | Source::Recorded | Source::Committed) {
            let mut w = self.source_event(E::Lost);
            if self.source != Source::Committed {
                w = w.say_to_destination(ModelMessage::Abort);
            }
            w.source_hung_up = true;
            // Sending COMMIT may have failed before or after the message left.
            all.push((Good, w));
        }
        match self.source_todo {
            ToDo::Record => {
                let recorded = Self { recorded: true, ..self.done_source() };
                all.push((Good, recorded.source_event(E::Recorded)));
                // Writing the record failed; it may exist.
                for half in [self.done_source(), Self { recorded: true, ..self.done_source() }] {
                    let failed = half.source_event(E::Lost);
                    all.push((Bad, failed.clone().say_to_destination(ModelMessage::Abort)));
                    all.push((Bad, Self { source_hung_up: true, ..failed }));
                }
            }
            ToDo::Commit => {
                let w = Self { commit_sent: true, ..self.done_source() };
                all.push((Good, w.say_to_destination(ModelMessage::Commit)));
            }
            ToDo::Ask => self.ask(all),
            ToDo::TakeBack => {
                let w = Self { source_runs: true, recorded: false, ..self.done_source() };
                all.push((Good, w));
                // Removing the record fails.
                let w = Self { source_runs: true, ..self.done_source() };
                all.push((Bad, w));
            }
            ToDo::End => all.push((Good, Self { recorded: false, ..self.done_source() })),
            _ => {}
        }
        if let Some(verdict) = self.answer {
            let w = Self { answer: None, ..self.clone() };
            all.push((Good, w.source_event(E::Answer(verdict))));
            all.push((Bad, w.source_event(E::Lost)));
        }
        if self.source == Source::InDoubt {
            // The operator runs the guest here only after making sure that it cannot run there.
            let cannot = matches!(
                self.destination,
                Destination::Discarded | Destination::Dropped | Destination::Discarding
            );
            if !self.destination_alive || cannot {
                let w = Self { operator: Some(Resolution::Run), ..self.clone() };
                all.push((StepKind::Operator, w.source_event(E::Operator(Resolution::Run))));
            }
            let w = Self { operator: Some(Resolution::Discard), ..self.clone() };
            all.push((Bad, w.source_event(E::Operator(Resolution::Discard))));
        }
    }

    /// A question reaches the destination, or another process that shares its records.
    fn ask(&self, all: &mut Vec<(StepKind, Self)>) {
        if self.answer.is_some() {
            return;
        }
        let answered = |w: Self, verdict| Self { answer: Some(verdict), ..w };
        if self.destination_alive {
            if self.destination == Destination::Discarding {
                let (w, event) = self.stored(Decision::Discarded);
                let w = w.destination_event(event);
                all.push((StepKind::Good, answered(w.clone(), w.destination.verdict())));
                all.push((StepKind::Bad, answered(self.clone(), self.destination.verdict())));
            } else {
                all.push((StepKind::Good, answered(self.clone(), self.destination.verdict())));
            }
        }
        if self.question.is_none() {
            let discarded = self.disk == Some(Decision::Discarded);
            let read = Read::Prepared(self.prepared);
            let question = Some(Question { discarded, read });
            all.push((self.elsewhere(), Self { question, ..self.clone() }));
        }
    }

    /// Returns the kind of a step of another process of the site. While the destination's process
    /// lives, it is bad, because the source asks that process.
    fn elsewhere(&self) -> StepKind {
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
            (Read::Prepared(_) | Read::Gone, Some(decision)) => {
                answered(Self { durable: true, ..self.clone() }, decision)
            }
            (Read::Prepared(false) | Read::Gone, None) => {
                answered(self.clone(), Decision::Discarded)
            }
            (Read::Prepared(true), None) => reads(Read::Undecided),
            (Read::Undecided, _) if !self.prepared => reads(Read::Gone),
            (Read::Undecided, _) if self.rebooted && self.names_boot => {
                answered(self.clone(), Decision::Committed)
            }
            (Read::Undecided, _) => reads(Read::Never),
            // The link fails if another decision stands.
            (Read::Never, stands) => {
                let stands = stands.unwrap_or(Decision::Discarded);
                answered(Self { disk: Some(stands), durable: true, ..self.clone() }, stands)
            }
        }
    }

    /// Returns the state after `Migration::store` on a working disk.
    fn stored(&self, decision: Decision) -> (Self, DestinationEvent) {
        let mut w = self.clone();
        if decision == Decision::Discarded && w.placed {
            (w.disk, w.durable) = (Some(Decision::Discarded), true);
            return (w, DestinationEvent::Stands(Decision::Discarded));
        }
        // If the prepared record names a boot, `committed` is made durable after the guest runs.
        let waits = w.disk.is_some() || decision == Decision::Discarded || !w.names_boot;
        let stands = *w.disk.get_or_insert(decision);
        w.durable = waits;
        w.placed |= (decision, stands) == (Decision::Committed, Decision::Committed);
        (w, DestinationEvent::Stands(stands))
    }

    fn destination_dies(&self) -> Self {
        let (destination_alive, destination_runs, destination_hung_up) = (false, false, true);
        Self { destination_alive, destination_runs, destination_hung_up, ..self.clone() }
    }

    fn destination_steps(&self, all: &mut Vec<(StepKind, Self)>) {
        use DestinationEvent as E;
        use StepKind::{Bad, Good};
        all.push((Bad, self.destination_dies()));
        if let Some((first, rest)) = self.to_destination.split_first() {
            let rest = Self { to_destination: rest.to_vec(), ..self.clone() };
            all.push((
                Good,
                match first {
                    ModelMessage::Commit => rest.destination_event(E::Commit),
                    _ => rest.destination_event(E::Aborted),
                },
            ));
        }
        match self.destination {
            Destination::Assembling => {
                // A prepared record that cannot be made is a failure, below.
                if !self.prepared {
                    all.push((Good, Self { prepared: true, ..self.clone() }));
                }
                if self.sent && self.prepared {
                    all.push((Good, self.destination_event(E::Restored)));
                }
                let failed = self.destination_event(E::Failed);
                // The end of the connection is noticed.
                let kind = if self.source_hung_up { Good } else { Bad };
                all.push((kind, failed.say_to_source(ModelMessage::Abort)));
            }
            // A lost connection or the deadline, after sending PREPARED.
            Destination::Prepared if self.destination_todo == ToDo::Nothing => {
                all.push((Good, self.destination_event(E::Failed)));
            }
            _ => {}
        }
        let done = self.done_destination();
        // ENDED. Another process of the site may receive it as well, but it had no guest and
        // removes nothing.
        let is_resolved =
            matches!(self.source, Source::Here | Source::Gone) && self.source_todo == ToDo::Nothing;
        if is_resolved && self.disk.is_some() && self.destination.may_forget() {
            // The host may crash between the two removals.
            let w = Self { prepared: false, ..self.clone() };
            all.push((Good, Self { disk: None, ..w.clone() }));
            all.push((Bad, w));
        }
        if !self.durable {
            all.push((Good, Self { durable: true, ..self.clone() }));
        }
        match self.destination_todo {
            ToDo::SayPrepared => {
                all.push((Good, done.clone().say_to_source(ModelMessage::Prepared)));
                all.push((Bad, done.destination_event(E::Failed)));
            }
            ToDo::StoreCommitted => {
                let (w, event) = done.stored(Decision::Committed);
                all.push((Good, w.destination_event(event)));
                all.push((Bad, done.destination_event(E::NotStored)));
            }
            ToDo::StoreDiscarded => {
                let (w, event) = done.stored(Decision::Discarded);
                all.push((Good, w.destination_event(event)));
                all.push((Bad, done.destination_event(E::NotStored)));
            }
            ToDo::TakeOver => {
                let w = Self { destination_runs: true, destination_ran: true, ..done.clone() };
                all.push((Good, w.destination_event(E::Resumed)));
                all.push((Bad, done.destination_event(E::NotResumed)));
            }
            ToDo::SayRunning => all.push((Good, done.say_to_source(ModelMessage::Running))),
            ToDo::SayDiscarded => {
                all.push((Good, done.say_to_source(ModelMessage::Answer(Verdict::Discarded))));
            }
            ToDo::Drop => all.push((Good, Self { prepared: false, ..done })),
            _ => {}
        }
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
        let resolved_to_run = self.operator == Some(Resolution::Run);
        assert!(
            !(self.source_runs && self.destination_ran) || resolved_to_run,
            "the source runs a guest that has run elsewhere: {self:#?}"
        );
    }

    /// Whether a migration may end here: exactly one side runs the guest, or the surviving side
    /// knows the outcome.
    pub(super) fn is_resolved(&self) -> bool {
        match (self.source_alive, self.destination_alive) {
            (true, true) => self.source_runs != self.destination_runs,
            // The destination's guest died with its process.
            (true, false) => {
                matches!(self.source, Source::Here if self.source_runs)
                    || self.source == Source::Gone
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
