//! The model's steps of the destination.

use driftline_guest::ClaimState;

use super::super::{Destination, DestinationEvent, Source};
use super::state::{ModelMessage, ModelState, StepKind, ToDo};
use crate::protocol::decision::{Decision, Verdict};

impl ModelState {
    /// Returns the state after the destination's process has died.
    pub(super) fn destination_dies(&self) -> Self {
        let (destination_alive, destination_runs, destination_hung_up) = (false, false, true);
        Self { destination_alive, destination_runs, destination_hung_up, ..self.clone() }
    }

    /// Adds the steps of the destination's process.
    pub(super) fn destination_steps(&self, all: &mut Vec<(StepKind, Self)>) {
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
                // A prepared record that cannot be made is a failure, below. If the claim decides,
                // there is none.
                let is_voted = self.prepared || self.claim.is_some();
                if !is_voted {
                    all.push((Good, Self { prepared: true, ..self.clone() }));
                }
                if self.sent && is_voted {
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
        // ENDED. Another process of the site may receive it as well, but it had no guest and
        // removes nothing.
        let is_resolved = matches!(self.source, Source::Aborted | Source::Ended)
            && self.source_todo == ToDo::Nothing;
        if is_resolved && self.disk.is_some() && self.destination.may_forget() {
            // The host may crash between the two removals.
            let w = Self { prepared: false, ..self.clone() };
            all.push((Good, Self { disk: None, ..w.clone() }));
            all.push((Bad, w));
        }
        if !self.durable {
            all.push((Good, Self { durable: true, ..self.clone() }));
        }
        self.destination_order_steps(all);
    }

    /// Adds the steps of a destination whose memory the source has, too.
    fn local_take_over_steps(&self, all: &mut Vec<(StepKind, Self)>) {
        use DestinationEvent as E;
        use StepKind::{Bad, Good};
        let has = |claim| Self { claim: Some(claim), ..self.clone() };
        match self.claim {
            Some(ClaimState::Offered) => all.push((Good, has(ClaimState::Taken))),
            Some(ClaimState::Taken) => {
                all.push((Good, has(ClaimState::Starting)));
                let given_back = has(ClaimState::Offered).done_destination();
                all.push((Bad, given_back.destination_event(E::NotResumed)));
            }
            Some(ClaimState::Starting) if self.destination_runs => {
                let done = has(ClaimState::Running).done_destination();
                all.push((Good, done.destination_event(E::Resumed)));
            }
            Some(ClaimState::Starting) => {
                let (destination_runs, destination_ran) = (true, true);
                all.push((Good, Self { destination_runs, destination_ran, ..self.clone() }));
                let given_back = has(ClaimState::Offered).done_destination();
                all.push((Bad, given_back.destination_event(E::NotResumed)));
            }
            _ => all.push((Good, self.done_destination().destination_event(E::NotResumed))),
        }
        // Taking the guest is the last of several steps.
        if !matches!(self.claim, Some(ClaimState::Taken | ClaimState::Starting)) {
            all.push((Bad, self.done_destination().destination_event(E::NotResumed)));
        }
    }

    /// Adds the steps that store a decision. Nothing is stored, and nothing fails, if the claim
    /// decides.
    fn store_steps(&self, done: Self, decision: Decision, all: &mut Vec<(StepKind, Self)>) {
        let (w, event) = done.stored(decision);
        all.push((StepKind::Good, w.destination_event(event)));
        if self.claim.is_none() {
            all.push((StepKind::Bad, done.destination_event(DestinationEvent::NotStored)));
        }
    }

    /// Adds the steps that perform the destination's order, or fail to.
    fn destination_order_steps(&self, all: &mut Vec<(StepKind, Self)>) {
        use DestinationEvent as E;
        use StepKind::{Bad, Good};
        let done = self.done_destination();
        match self.destination_todo {
            ToDo::SayPrepared => {
                all.push((Good, done.clone().say_to_source(ModelMessage::Prepared)));
                all.push((Bad, done.destination_event(E::Failed)));
            }
            ToDo::StoreCommitted => {
                self.store_steps(done, Decision::Committed, all);
            }
            ToDo::StoreDiscarded => self.store_steps(done, Decision::Discarded, all),
            ToDo::TakeOver if self.claim.is_some() => self.local_take_over_steps(all),
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
}
