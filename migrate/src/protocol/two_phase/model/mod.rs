//! Both machines against each other, through everything that can go wrong, in every order.
//!
//! [`World::next`] lists every step that can happen: a message arrives or is lost, an end notices a
//! failure, an order is performed or fails, a process dies, the destination's host crashes and
//! loses what is not durable, the source asks, the operator resolves. The test visits every world
//! that can be reached.

mod world;

use std::collections::{HashMap, HashSet, VecDeque};

use self::world::{Kind, World};
use super::{Destination, Source, SourceEvent, SourceOrder};
use crate::protocol::decision::Resolution;

/// The worlds from which steps of these kinds can lead to a settled one.
fn rescued<'w>(
    seen: &'w HashSet<World>,
    back: &'w HashMap<World, Vec<(Kind, World)>>,
    kinds: &[Kind],
) -> HashSet<&'w World> {
    let mut rescued: HashSet<&World> = HashSet::new();
    let mut queue: VecDeque<&World> = seen.iter().filter(|w| w.settled()).collect();
    while let Some(world) = queue.pop_front() {
        if rescued.insert(world) {
            let before = back.get(world).into_iter().flatten();
            queue.extend(before.filter(|(kind, _)| kinds.contains(kind)).map(|(_, w)| w));
        }
    }
    rescued
}

#[test]
fn at_most_one_runs_and_there_is_always_a_way_out() {
    for names_boot in [true, false] {
        explore(names_boot);
    }
}

fn explore(names_boot: bool) {
    let mut seen: HashSet<World> = HashSet::new();
    // Good steps and the operator's, backwards.
    let mut back: HashMap<World, Vec<(Kind, World)>> = HashMap::new();
    let mut queue = VecDeque::from([World::new(names_boot)]);
    while let Some(world) = queue.pop_front() {
        if !seen.insert(world.clone()) {
            continue;
        }
        world.check();
        for (kind, next) in world.next() {
            if kind != Kind::Bad {
                back.entry(next.clone()).or_default().push((kind, world.clone()));
            }
            if !seen.contains(&next) {
                queue.push_back(next);
            }
        }
    }
    // An operator who discards what runs nowhere has decided so.
    let honest = |w: &&World| w.operator != Some(Resolution::Discard);
    let rescued = rescued(&seen, &back, &[Kind::Good, Kind::Operator]);
    let stuck = seen.iter().filter(honest).find(|w| !rescued.contains(w));
    assert!(stuck.is_none(), "no way out of {stuck:#?}");
    // While both processes live, nobody has to be asked.
    let rescued = self::rescued(&seen, &back, &[Kind::Good]);
    let both = |w: &&World| w.source_alive && w.destination_alive;
    let stuck = seen.iter().filter(honest).filter(both).find(|w| !rescued.contains(w));
    assert!(stuck.is_none(), "no way out without an operator of {stuck:#?}");
    assert!(seen.len() > 1_000, "only {} worlds were visited", seen.len());
    for wanted in [Source::Here, Source::Gone, Source::InDoubt] {
        assert!(seen.iter().any(|w| w.source == wanted), "{wanted:?} was never reached");
    }
    println!("{} worlds (records name a boot: {names_boot})", seen.len());
}

#[test]
fn without_faults_the_guest_arrives() {
    let mut world = World::new(true);
    while let Some((_, next)) = world.next().into_iter().find(|(kind, next)| {
        // Deadlines and cuts are good steps too; here nothing is late.
        let late = next.source == Source::InDoubt
            || next.destination == Destination::Discarding
            || (next.source_hung_up && next.source != Source::Gone);
        *kind == Kind::Good && !late
    }) {
        world = next;
    }
    assert_eq!((world.source, world.destination), (Source::Gone, Destination::Running));
    assert!(world.destination_runs && !world.source_runs);
}

#[test]
fn only_before_commit_a_failure_gives_the_guest_back() {
    for state in [Source::Streaming, Source::Recording, Source::Recorded] {
        let (next, order) = state.on(SourceEvent::Lost);
        assert!(next == Source::Here && matches!(order, SourceOrder::TakeBack(_)), "{state:?}");
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
