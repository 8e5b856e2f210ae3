//! The model's steps of the source and of the operator.

use driftline_guest::ClaimState;

use super::super::{Destination, Source, SourceEvent};
use super::state::{ModelMessage, ModelState, Question, Read, StepKind, ToDo};
use crate::protocol::decision::{Decision, Resolution, Verdict};

impl ModelState {
    /// Adds the steps of the source's process.
    pub(super) fn source_steps(&self, all: &mut Vec<(StepKind, Self)>) {
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
        self.source_order_steps(all);
        if let Some(verdict) = self.answer {
            let w = Self { answer: None, ..self.clone() };
            all.push((Good, w.source_event(E::Answer(verdict))));
            all.push((Bad, w.source_event(E::Lost)));
        }
        if self.source == Source::InDoubt {
            self.operator_steps(all);
        }
        // `driftline resume` of a guest that could not be taken back.
        let is_left = self.source == Source::Aborted && self.source_todo == ToDo::Nothing;
        if self.claim.is_some() && is_left && !self.source_runs && !self.is_taken() {
            all.push((StepKind::Operator, self.source_keeps()));
        }
    }

    /// Adds the steps that perform the source's order, or fail to.
    fn source_order_steps(&self, all: &mut Vec<(StepKind, Self)>) {
        use SourceEvent as E;
        use StepKind::{Bad, Good};
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
            ToDo::Ask => match self.claim {
                Some(ClaimState::Running) => {
                    all.push((Good, self.source_event(E::Answer(Verdict::Running))));
                }
                Some(ClaimState::Offered | ClaimState::Kept) => {
                    let w = Self { claim: Some(ClaimState::Kept), ..self.clone() };
                    all.push((Good, w.source_event(E::Answer(Verdict::Discarded))));
                }
                // The pipe has reported the end of the destination's process.
                Some(ClaimState::Taken) if !self.destination_alive => {
                    let w = Self { claim: Some(ClaimState::Kept), ..self.clone() };
                    all.push((Good, w.source_event(E::Answer(Verdict::Discarded))));
                }
                Some(ClaimState::Starting) if !self.destination_alive => {
                    all.push((Good, self.source_event(E::Answer(Verdict::Running))));
                }
                // It reads the claim again later.
                Some(ClaimState::Taken | ClaimState::Starting) => {}
                None => self.ask(all),
            },
            ToDo::TakeBack => {
                let w = self.done_source().source_keeps();
                all.push((Good, Self { recorded: false, ..w.clone() }));
                // Removing the record fails.
                all.push((Bad, w));
            }
            ToDo::End => all.push((Good, Self { recorded: false, ..self.done_source() })),
            _ => {}
        }
    }

    /// Adds the operator's resolutions of a migration in doubt.
    fn operator_steps(&self, all: &mut Vec<(StepKind, Self)>) {
        use SourceEvent as E;
        use StepKind::Bad;
        // The operator runs the guest here only after making sure that it cannot run there. In a
        // local hand-over the operator may be wrong, because the claim prevents a second run.
        let cannot = matches!(
            self.destination,
            Destination::Discarded | Destination::Dropped | Destination::Discarding
        );
        let may = match self.claim {
            Some(_) => !self.is_taken(),
            None => !self.destination_alive || cannot,
        };
        if may {
            let w = Self { operator: Some(Resolution::Run), ..self.clone() };
            all.push((StepKind::Operator, w.source_event(E::Operator(Resolution::Run))));
        }
        let w = Self { operator: Some(Resolution::Discard), ..self.clone() };
        // A guest that was taken has died with its destination.
        let has_died = !self.destination_alive && self.is_taken();
        let kind = if has_died { StepKind::Operator } else { Bad };
        all.push((kind, w.source_event(E::Operator(Resolution::Discard))));
    }

    /// Adds the steps of a question, which reaches the destination or another process that shares
    /// its records.
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
}
