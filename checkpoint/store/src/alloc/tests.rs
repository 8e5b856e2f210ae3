//! Tests the allocator against a plain row of booleans.

use proptest::prelude::*;

use super::*;

/// The reference, which is searched slot by slot.
struct PlainSlots(Vec<bool>);

impl PlainSlots {
    fn is_free(&self, start: u32, count: u32) -> bool {
        let slots = self.0.get(start as usize..start as usize + count as usize);
        slots.is_some_and(|slots| slots.iter().all(|used| !used))
    }

    fn has_room(&self, count: u32, align: u32) -> bool {
        (0..self.0.len() as u32).step_by(align as usize).any(|at| self.is_free(at, count))
    }

    fn longest(&self) -> u32 {
        self.0.split(|used| *used).map(<[bool]>::len).max().unwrap_or(0) as u32
    }

    fn set(&mut self, run: SlotRun, used: bool) {
        self.0[run.start as usize..run.end() as usize].fill(used);
    }

    fn used_runs(&self) -> Vec<SlotRun> {
        let mut runs: Vec<SlotRun> = Vec::new();
        for (slot, _) in self.0.iter().enumerate().filter(|(_, used)| **used) {
            match runs.last_mut() {
                Some(run) if run.end() == slot as u64 => run.count += 1,
                _ => runs.push(SlotRun { start: slot as u32, count: 1 }),
            }
        }
        runs
    }
}

#[derive(Clone, Debug)]
enum SlotAct {
    Take {
        count: u32,
        align: u32,
    },
    UpTo {
        count: u32,
    },
    /// Frees a part of a used run: which run, from where, and how much of it.
    Free {
        which: prop::sample::Index,
        from: prop::sample::Index,
        count: u32,
    },
    /// Frees this many slots, every other one from a slot on, if they are used.
    FreeAlternate {
        from: prop::sample::Index,
        count: u32,
    },
    Mark {
        start: u32,
        count: u32,
    },
    Grow {
        by: u32,
    },
}

fn counts() -> impl Strategy<Value = u32> {
    prop_oneof![1u32..6, 1u32..130, Just(64), 1000u32..=4096]
}

fn act() -> impl Strategy<Value = SlotAct> {
    let index = any::<prop::sample::Index>;
    prop_oneof![
        6 => (counts(), 0u32..=12)
            .prop_map(|(count, bits)| SlotAct::Take { count, align: 1 << bits }),
        4 => counts().prop_map(|count| SlotAct::Take { count, align: 1 }),
        3 => counts().prop_map(|count| SlotAct::UpTo { count }),
        8 => (index(), index(), counts())
            .prop_map(|(which, from, count)| SlotAct::Free { which, from, count }),
        1 => (index(), 1u32..400)
            .prop_map(|(from, count)| SlotAct::FreeAlternate { from, count }),
        1 => (0u32..20_000, counts()).prop_map(|(start, count)| SlotAct::Mark { start, count }),
        1 => (1u32..5000).prop_map(|by| SlotAct::Grow { by }),
    ]
}

/// The allocator and its model.
struct SlotsPair {
    slots: Slots,
    plain: PlainSlots,
}

impl SlotsPair {
    fn perform(&mut self, act: SlotAct) -> Result<(), TestCaseError> {
        let Self { slots, plain } = self;
        match act {
            SlotAct::Take { count, align } => match slots.allocate(count, align) {
                Some(run) => {
                    prop_assert!(run.count == count && run.start.is_multiple_of(align));
                    prop_assert!(plain.is_free(run.start, count), "{run} twice");
                    plain.set(run, true);
                }
                None => prop_assert!(!plain.has_room(count, align), "{count} by {align}"),
            },
            SlotAct::UpTo { count } => {
                let expected = count.min(plain.longest());
                let run = slots.allocate_up_to(count);
                prop_assert_eq!(run.map_or(0, |run| run.count), expected);
                if let Some(run) = run {
                    prop_assert!(plain.is_free(run.start, run.count), "{run} twice");
                    plain.set(run, true);
                }
            }
            SlotAct::Free { which, from, count } => self.free(which, from, count)?,
            SlotAct::FreeAlternate { from, count } => self.free_alternate(from, count),
            SlotAct::Mark { start, count } => {
                let run = SlotRun { start, count };
                let marked = slots.mark(run);
                if plain.is_free(start, count) {
                    prop_assert_eq!(marked, Ok(()));
                    plain.set(run, true);
                } else {
                    prop_assert!(marked.is_err());
                }
            }
            SlotAct::Grow { by } => {
                let total = slots.total() + by;
                slots.grow_to(total);
                plain.0.resize(total as usize, false);
            }
        }
        Ok(())
    }

    /// Frees a part of a run of used slots, if there is one. It cannot be freed again.
    fn free(
        &mut self,
        which: prop::sample::Index,
        from: prop::sample::Index,
        count: u32,
    ) -> Result<(), TestCaseError> {
        let runs = self.plain.used_runs();
        if runs.is_empty() {
            return Ok(());
        }
        let run = runs[which.index(runs.len())];
        let start = run.start + from.index(run.count as usize) as u32;
        let count = count.min((run.end() - u64::from(start)) as u32);
        let part = SlotRun { start, count };
        self.slots.free(part).unwrap();
        self.plain.set(part, false);
        prop_assert_eq!(self.slots.free(part), Err(SlotError::Free { run: part, slot: start }));
        Ok(())
    }

    /// Frees `count` slots, every other one from `from` on, if they are used.
    fn free_alternate(&mut self, from: prop::sample::Index, count: u32) {
        let from = from.index(self.plain.0.len()) as u32;
        for n in 0..count {
            let run = SlotRun { start: from + 2 * n, count: 1 };
            let is_there = run.end() <= self.plain.0.len() as u64;
            if is_there && !self.plain.is_free(run.start, 1) {
                self.slots.free(run).unwrap();
                self.plain.set(run, false);
            }
        }
    }

    fn check_totals(&self) -> Result<(), TestCaseError> {
        let Self { slots, plain } = self;
        let used = plain.0.iter().rposition(|used| *used).map_or(0, |slot| slot as u32 + 1);
        prop_assert_eq!(slots.used_end(), used);
        let free = plain.0.iter().filter(|used| !**used).count() as u64;
        prop_assert_eq!(slots.free_slots(), free);
        Ok(())
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]
    #[test]
    fn allocator_matches_a_plain_model(
        total in 1u32..14_000,
        full in any::<bool>(),
        acts in prop::collection::vec(act(), 1..60),
    ) {
        let plain = PlainSlots(vec![false; total as usize]);
        let mut pair = SlotsPair { slots: Slots::new(total), plain };
        if full {
            let all = SlotRun { start: 0, count: total };
            pair.slots.mark(all).unwrap();
            pair.plain.set(all, true);
        }
        for act in acts {
            pair.perform(act)?;
            pair.check_totals()?;
        }
        for (slot, used) in pair.plain.0.iter().enumerate() {
            prop_assert_eq!(pair.slots.is_used(slot as u32), *used);
        }
    }
}

#[test]
fn invalid_requests_are_refused_by_name() {
    let mut slots = Slots::new(5000);
    for (count, align) in [(0, 1), (4097, 1), (1, 0), (1, 3), (1, 8192)] {
        assert_eq!(slots.allocate(count, align), None, "{count} by {align}");
    }
    assert_eq!(slots.allocate_up_to(0), None);
    let run = SlotRun { start: 4990, count: 20 };
    let message = slots.free(run).unwrap_err().to_string();
    assert_eq!(message, "slots 4990..5010 are not all there: the file has 5000 slots");
    let run = SlotRun { start: u32::MAX, count: u32::MAX };
    assert!(matches!(slots.mark(run), Err(SlotError::Outside { .. })));
    slots.mark(SlotRun { start: 4090, count: 10 }).unwrap();
    let message = slots.free(SlotRun { start: 4095, count: 6 }).unwrap_err().to_string();
    assert_eq!(message, "slots 4095..4101 cannot be freed: slot 4100 is free already");
    let message = slots.mark(SlotRun { start: 4000, count: 91 }).unwrap_err().to_string();
    assert_eq!(message, "slots 4000..4091 cannot be marked as used: slot 4090 is used already");
    assert_eq!(slots.free_slots(), 4990, "nothing has changed");
}

#[test]
fn run_may_cross_blocks() {
    let mut slots = Slots::new(3 * 4096);
    slots.mark(SlotRun { start: 0, count: 3 * 4096 }).unwrap();
    slots.free(SlotRun { start: 4000, count: 4096 }).unwrap();
    assert_eq!(slots.allocate(4096, 1), Some(SlotRun { start: 4000, count: 4096 }));
    assert_eq!(slots.allocate_up_to(7), None);
}

#[test]
fn every_slot_can_be_allocated_in_order() {
    for count in [1, 3, 64, 100] {
        let total = 3 * 4096 + 100;
        let mut slots = Slots::new(total);
        for n in 0..total / count {
            let run = SlotRun { start: n * count, count };
            assert_eq!(slots.allocate(count, 1), Some(run));
        }
        assert_eq!(slots.allocate(count, 1), None);
    }
}
