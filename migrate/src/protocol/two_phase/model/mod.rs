//! Model checking of both state machines, with every failure in every order.
//!
//! [`ModelState::next`] returns every possible step: a message arrives or is lost, an end notices a
//! failure, an order is performed or fails, a process dies, the destination's host crashes and
//! loses whatever is not durable, the source asks, the operator resolves. The test visits every
//! reachable state.

mod destination_steps;
mod source_steps;
mod state;

use std::collections::{HashMap, HashSet, VecDeque};

use self::state::{ModelState, StepKind};
use super::{Destination, Source, SourceEvent, SourceOrder};
use crate::protocol::decision::Resolution;

/// Returns the states from which steps of these kinds can lead to a resolved one.
fn resolvable<'w>(
    seen: &'w HashSet<ModelState>,
    back: &'w HashMap<ModelState, Vec<(StepKind, ModelState)>>,
    kinds: &[StepKind],
) -> HashSet<&'w ModelState> {
    let mut resolvable: HashSet<&ModelState> = HashSet::new();
    let mut queue: VecDeque<&ModelState> = seen.iter().filter(|w| w.is_resolved()).collect();
    while let Some(state) = queue.pop_front() {
        if resolvable.insert(state) {
            let before = back.get(state).into_iter().flatten();
            queue.extend(before.filter(|(kind, _)| kinds.contains(kind)).map(|(_, w)| w));
        }
    }
    resolvable
}

#[test]
fn at_most_one_runs_and_every_state_resolves() {
    for (names_boot, is_local) in [(true, false), (false, false), (true, true), (false, true)] {
        explore(names_boot, is_local);
    }
}

fn explore(names_boot: bool, is_local: bool) {
    let mut seen: HashSet<ModelState> = HashSet::new();
    // The predecessors of each state by good steps and the operator's.
    let mut back: HashMap<ModelState, Vec<(StepKind, ModelState)>> = HashMap::new();
    let mut queue = VecDeque::from([ModelState::new(names_boot, is_local)]);
    while let Some(state) = queue.pop_front() {
        if !seen.insert(state.clone()) {
            continue;
        }
        state.check();
        for (kind, next) in state.next() {
            if kind != StepKind::Bad {
                back.entry(next.clone()).or_default().push((kind, state.clone()));
            }
            if !seen.contains(&next) {
                queue.push_back(next);
            }
        }
    }
    // States after an operator's discard may end without a guest.
    let honest = |w: &&ModelState| w.operator != Some(Resolution::Discard);
    let resolvable = resolvable(&seen, &back, &[StepKind::Good, StepKind::Operator]);
    let stuck = seen.iter().filter(honest).find(|w| !resolvable.contains(w));
    assert!(stuck.is_none(), "no step resolves {stuck:#?}");
    // While both processes live, no operator is needed.
    let resolvable = self::resolvable(&seen, &back, &[StepKind::Good]);
    let both = |w: &&ModelState| {
        let is_left = is_local && w.operator.is_some();
        w.source_alive && w.destination_alive && !is_left
    };
    let stuck = seen.iter().filter(honest).filter(both).find(|w| !resolvable.contains(w));
    assert!(stuck.is_none(), "only an operator resolves {stuck:#?}");
    // In a local hand-over the source needs no operator while its process lives: the claim and the
    // end of the destination's process tell it the outcome.
    let is_told = |w: &&ModelState| is_local && w.source_alive && w.operator.is_none();
    let stuck = seen.iter().filter(honest).filter(is_told).find(|w| !resolvable.contains(w));
    assert!(stuck.is_none(), "the source does not learn of {stuck:#?}");
    assert!(seen.len() > 1_000, "only {} states were visited", seen.len());
    for wanted in [Source::Aborted, Source::Ended, Source::InDoubt] {
        assert!(seen.iter().any(|w| w.source == wanted), "{wanted:?} was never reached");
    }
    let count = seen.len();
    println!("{count} states (records name a boot: {names_boot}, local: {is_local})");
}

#[test]
fn without_faults_the_guest_arrives() {
    let mut state = ModelState::new(true, false);
    while let Some((_, next)) = state.next().into_iter().find(|(kind, next)| {
        // Deadlines and lost connections count as good steps; this run takes none of them.
        let late = next.source == Source::InDoubt
            || next.destination == Destination::Discarding
            || (next.source_hung_up && next.source != Source::Ended);
        *kind == StepKind::Good && !late
    }) {
        state = next;
    }
    assert_eq!((state.source, state.destination), (Source::Ended, Destination::Running));
    assert!(state.destination_runs && !state.source_runs);
}

#[test]
fn only_failure_before_commit_resumes_the_guest() {
    for state in [Source::Streaming, Source::Recording, Source::Recorded] {
        let (next, order) = state.on(SourceEvent::Lost);
        assert!(next == Source::Aborted && matches!(order, SourceOrder::TakeBack(_)), "{state:?}");
    }
    for state in [Source::Committed, Source::InDoubt] {
        assert_eq!(state.on(SourceEvent::Lost), (Source::InDoubt, SourceOrder::Ask));
    }
}

#[test]
fn commit_needs_the_record_and_prepared() {
    for state in [Source::Streaming, Source::Recording] {
        assert_eq!(state.on(SourceEvent::Prepared), (state, SourceOrder::Wait));
    }
    let (recorded, _) = Source::Recording.on(SourceEvent::Recorded);
    assert_eq!(recorded.on(SourceEvent::Prepared), (Source::Committed, SourceOrder::Commit));
}
