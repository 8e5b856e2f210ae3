//! The ring's consumer against a simulated kernel. Whatever is dropped, fails or is overrun, a copy
//! that is updated from dirty sets alone equals guest memory in the end, and tracking is exact
//! again.
//!
//! `cargo test -p driftline-dirty-tracker --test ring`
#![cfg(not(any(driftline_loom, driftline_shuttle)))]
#![allow(clippy::unwrap_used, reason = "tests")]

mod kernel;

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use driftline_dirty_tracker::ring::{
    ENTRY_DIRTY, Harvester, Inserted, RingEntry, RingFull, SlotParts,
};
use driftline_dirty_tracker::{DirtySet, Gfn, Layout, Slot, SlotId, Subscription, Tracker};
use kernel::{Kernel, KernelRing};
use proptest::prelude::*;

const FRAMES: u64 = 200;

/// A VMM that maintains a copy of guest memory from dirty sets alone.
struct CopyingVmm {
    kernel: Kernel,
    harvester: Harvester,
    full: Vec<RingFull>,
    tracker: Arc<Tracker>,
    subscription: Subscription,
    copy: Vec<u64>,
}

impl CopyingVmm {
    fn new(vcpus: usize, size: usize, reserve: usize) -> Self {
        let slot = Slot { id: SlotId(0), base: Gfn(0), frames: FRAMES };
        let tracker = Arc::new(Tracker::new(Layout::new([slot]).unwrap()));
        let harvester = Harvester::new(vcpus, size);
        Self {
            kernel: Kernel::new(vcpus, size, reserve, FRAMES as usize),
            full: (0..vcpus).map(|v| harvester.ring_full(v).unwrap()).collect(),
            harvester,
            subscription: tracker.subscribe("copy").unwrap(),
            tracker,
            copy: vec![0; FRAMES as usize],
        }
    }

    fn run(&mut self, vcpu: usize, frames: &[u64], emulated: bool) -> usize {
        self.kernel.run(vcpu, frames, emulated, &self.full[vcpu])
    }

    /// Runs until all frames are written. Collects whenever the ring is full.
    fn run_all(&mut self, vcpu: usize, mut frames: &[u64]) {
        let mut exits = 0;
        while !frames.is_empty() {
            let done = self.run(vcpu, frames, false);
            frames = &frames[done..];
            if done == 0 {
                exits += 1;
                assert!(exits < 200, "the vCPU never runs again");
                self.collect(u32::MAX, false);
            }
        }
    }

    /// Collects. The reset stops after `limit` entries; with `dropped` the result is discarded
    /// after it.
    fn collect(&mut self, limit: u32, dropped: bool) -> Option<Inserted> {
        let rings = self.kernel.rings.iter().map(|r| r.entries.as_slice());
        let harvest = self.harvester.harvest(rings);
        // After the last entry the count does not show a signal, see `Harvest::reprotected`.
        let limit = if limit < harvest.entries() { limit } else { u32::MAX };
        let count = self.kernel.reset_dirty_rings(limit);
        if dropped {
            return None;
        }
        let mut readable = harvest.reprotected(count);
        if !readable.is_trusted() {
            self.kernel.protect_all();
            readable = readable.all_reprotected();
        }
        Some(readable.insert_into(&self.tracker))
    }

    fn drain(&mut self) -> DirtySet {
        let marked = self.subscription.bitmap(SlotId(0)).unwrap();
        let dirty = self.subscription.drain();
        let ones = marked.iter().map(|bits| u64::from(bits.count_ones())).sum::<u64>();
        assert_eq!(dirty.frames(), ones, "I1");
        dirty
    }

    fn copy(&mut self, dirty: DirtySet) -> BTreeSet<u64> {
        let memory = self.kernel.memory.borrow();
        let frames: BTreeSet<u64> =
            dirty.runs().flat_map(|r| r.frames().collect::<Vec<_>>()).map(|g| g.0).collect();
        for &f in &frames {
            self.copy[f as usize] = memory[f as usize];
        }
        dirty.commit();
        frames
    }
}

#[derive(Debug, Clone)]
enum RingOp {
    Run {
        vcpu: usize,
        frames: Vec<u64>,
        emulated: bool,
    },
    Report {
        vcpu: usize,
    },
    Collect,
    /// The harvest is dropped before any reset.
    HarvestOnly,
    /// The reset succeeds, and the VMM fails between it and the insert.
    DropReadable,
    /// A signal stops the reset early.
    Signal {
        after: u32,
    },
    Drain {
        commit: bool,
    },
}

fn op(vcpus: usize, size: usize) -> impl Strategy<Value = RingOp> {
    let frames = |n| prop::collection::vec(0..FRAMES, 1..n);
    let vcpu = 0..vcpus;
    prop_oneof![
        4 => (vcpu.clone(), frames(size))
            .prop_map(|(vcpu, frames)| RingOp::Run { vcpu, frames, emulated: false }),
        1 => (vcpu.clone(), frames(8 * size))
            .prop_map(|(vcpu, frames)| RingOp::Run { vcpu, frames, emulated: true }),
        2 => vcpu.prop_map(|vcpu| RingOp::Report { vcpu }),
        4 => Just(RingOp::Collect),
        1 => Just(RingOp::HarvestOnly),
        1 => Just(RingOp::DropReadable),
        1 => (0..size as u32).prop_map(|after| RingOp::Signal { after }),
        2 => any::<bool>().prop_map(|commit| RingOp::Drain { commit }),
    ]
}

/// Sizes and reserves as in the kernel, scaled down, without and with PML.
fn rings() -> impl Strategy<Value = (usize, usize, usize)> {
    (1..4usize, prop_oneof![Just((16, 4)), Just((16, 9)), Just((8, 3)), Just((32, 8))])
        .prop_map(|(vcpus, (size, reserve))| (vcpus, size, reserve))
}

/// Maximal number of steps of a script; miri is slow.
const MOST: usize = if cfg!(miri) { 12 } else { 60 };

fn script() -> impl Strategy<Value = ((usize, usize, usize), Vec<RingOp>)> {
    rings()
        .prop_flat_map(|shape| (Just(shape), prop::collection::vec(op(shape.0, shape.1), 1..MOST)))
}

proptest! {
    #![proptest_config(ProptestConfig {
        failure_persistence: None,
        ..ProptestConfig::with_cases(if cfg!(miri) { 4 } else { 2000 })
    })]

    #[test]
    fn copy_equals_memory_and_tracking_is_exact_again((shape, ops) in script()) {
        let (vcpus, size, reserve) = shape;
        let mut vmm = CopyingVmm::new(vcpus, size, reserve);
        for op in ops {
            match op {
                RingOp::Run { vcpu, frames, emulated } => {
                    vmm.run(vcpu, &frames, emulated);
                }
                RingOp::Report { vcpu } => vmm.kernel.report(vcpu, &vmm.full[vcpu]),
                RingOp::Collect => {
                    vmm.collect(u32::MAX, false);
                }
                RingOp::HarvestOnly => {
                    let rings = vmm.kernel.rings.iter().map(|r| r.entries.as_slice());
                    drop(vmm.harvester.harvest(rings));
                }
                RingOp::DropReadable => {
                    vmm.collect(u32::MAX, true);
                }
                RingOp::Signal { after } => {
                    vmm.collect(after, false);
                }
                RingOp::Drain { commit: true } => {
                    let dirty = vmm.drain();
                    vmm.copy(dirty);
                }
                RingOp::Drain { commit: false } => drop(vmm.drain()),
            }
        }
        // The vCPUs are paused: after one collection and one drain the copy equals memory.
        vmm.collect(u32::MAX, false);
        let dirty = vmm.drain();
        vmm.copy(dirty);
        prop_assert_eq!(&vmm.copy, &*vmm.kernel.memory.borrow());

        // Every vCPU makes progress, however far its ring was overrun.
        for vcpu in 0..vcpus {
            vmm.run_all(vcpu, &(0..FRAMES).rev().collect::<Vec<_>>());
        }
        let trusted = (0..10).any(|_| !vmm.collect(u32::MAX, false).unwrap().marked_all);
        prop_assert!(trusted, "never trusted again");
        let dirty = vmm.drain();
        vmm.copy(dirty);
        prop_assert_eq!(&vmm.copy, &*vmm.kernel.memory.borrow());

        // From here on exactly the written frames are dirty.
        for round in 0..4 * size as u64 {
            let frame = |vcpu| (round * 7 + vcpu * 31) % FRAMES;
            let written: BTreeSet<u64> = (0..vcpus as u64).map(frame).collect();
            for (vcpu, &frame) in written.iter().enumerate() {
                prop_assert_eq!(vmm.run(vcpu, &[frame], false), 1);
            }
            prop_assert!(!vmm.collect(u32::MAX, false).unwrap().marked_all);
            let dirty = vmm.drain();
            prop_assert_eq!(vmm.copy(dirty), written);
        }
    }

    /// The same with free-running indices that are about to pass 2^32.
    #[test]
    fn indices_wrap_past_32_bits(
        pushes in prop::collection::vec(1..12u64, 1..40), behind in 0..100u32,
    ) {
        let start = 0u32.wrapping_sub(behind).wrapping_mul(16);
        let ring = KernelRing::new(16, 4, start);
        let mut harvester = Harvester::new(1, 16);
        let mut next = 0;
        for n in pushes {
            for _ in 0..n {
                ring.push(0, next);
                next += 1;
            }
            let harvest = harvester.harvest([&ring.entries[..]]);
            prop_assert_eq!((harvest.entries(), harvest.overruns()), (n as u32, 0));
            let readable = harvest.reprotected(ring.reset(u32::MAX, &mut |_, _| ()));
            prop_assert!(readable.is_trusted());
            prop_assert_eq!(readable.for_each(|_, _| true).frames, n);
        }
    }
}

#[test]
fn overrun_by_laps_recovers_despite_stale_reports() {
    let (laps, step, again) = if cfg!(miri) { (3, 7, 3) } else { (6, 1, 20) };
    for laps in 0..laps {
        for extra in (0..16).step_by(step) {
            let mut vmm = CopyingVmm::new(1, 16, 4);
            let frames: Vec<u64> = (0..16 * (laps + 1) + extra).collect();
            vmm.run(0, &frames, true);
            assert!(vmm.collect(u32::MAX, false).unwrap().marked_all);
            // The fence is seen one collection later.
            vmm.collect(u32::MAX, false);
            vmm.drain().commit();
            vmm.run_all(0, &[3, 4, 5]);
            vmm.collect(u32::MAX, false);
            let drained = vmm.drain();
            assert_eq!(vmm.copy(drained), BTreeSet::from([3, 4, 5]), "{laps} laps and {extra}");
            // Exits that are reported only after the ring is empty again.
            for _ in 0..again {
                vmm.run(0, &(0..12).collect::<Vec<_>>(), false);
                vmm.run(0, &[1], false);
                vmm.collect(u32::MAX, false);
                vmm.kernel.report(0, &vmm.full[0]);
                assert_eq!(vmm.collect(u32::MAX, false).unwrap(), Inserted::default());
            }
            assert_eq!(vmm.kernel.rings[0].used(), 0);
        }
    }
}

#[test]
fn dropped_overrun_counts_until_all_is_reprotected() {
    let mut vmm = CopyingVmm::new(1, 16, 4);
    vmm.run(0, &(0..40).collect::<Vec<_>>(), true);
    assert_eq!(vmm.collect(u32::MAX, true), None);
    let rings = || vmm.kernel.rings.iter().map(|r| r.entries.as_slice());
    for _ in 0..3 {
        let harvest = vmm.harvester.harvest(rings());
        let readable = harvest.reprotected(vmm.kernel.reset_dirty_rings(u32::MAX));
        assert!(!readable.is_trusted());
        assert!(readable.insert_into(&vmm.tracker).marked_all, "all_reprotected was not called");
    }
    assert!(vmm.collect(u32::MAX, false).unwrap().marked_all);
    assert!(!vmm.collect(u32::MAX, false).unwrap().marked_all);
}

#[test]
fn invalid_rings_are_not_trusted() {
    let ring = KernelRing::new(16, 4, 0);
    ring.entries[0].flags.store(ENTRY_DIRTY, Ordering::Release);
    for len in [0, 1, 3, 12] {
        let mut harvester = Harvester::new(1, 16);
        let harvest = harvester.harvest([&ring.entries[..len]]);
        assert_eq!((harvest.entries(), harvest.overruns()), (0, 1));
    }
    let mut harvester = Harvester::new(2, 16);
    let harvest = harvester.harvest([ring.entries.as_slice()]);
    let count = harvest.entries();
    assert!(!harvest.reprotected(count).is_trusted(), "the second vCPU's ring was not given");
}

#[test]
fn entries_of_parts_reach_their_slots() {
    let slot = |id, base, frames| Slot { id: SlotId(id), base: Gfn(base), frames };
    let slots = [slot(0, 0, 200), slot(1, 1000, 130)];
    let layout = Layout::new(slots).unwrap();
    let parts = SlotParts::new(&layout, 64);
    let tracker = Arc::new(Tracker::new(layout));
    let subscription = tracker.subscribe("parts").unwrap();
    // The first and the last frame of each part, by KVM's number.
    let kvm_slots: Vec<Slot> = slots.iter().flat_map(|slot| parts.of(slot)).collect();
    let ends = kvm_slots.iter().flat_map(|part| [(part.id.0, 0), (part.id.0, part.frames - 1)]);
    let ring: Vec<RingEntry> = (0..16).map(|_| RingEntry::default()).collect();
    for (entry, (slot, offset)) in ring.iter().zip(ends) {
        entry.slot.store(slot, Ordering::Relaxed);
        entry.offset.store(offset, Ordering::Relaxed);
        entry.flags.store(ENTRY_DIRTY, Ordering::Release);
    }
    let expected: BTreeSet<u64> =
        kvm_slots.iter().flat_map(|part| [part.base.0, part.run().end().0 - 1]).collect();
    let mut harvester = Harvester::new(1, 16).with_parts(parts);
    let harvest = harvester.harvest([&ring[..]]);
    let count = harvest.entries();
    let inserted = harvest.reprotected(count).insert_into(&tracker);
    assert_eq!((inserted.frames, inserted.foreign), (2 * kvm_slots.len() as u64, 0));
    let marked = slots.iter().flat_map(|slot| slot.run().frames());
    let marked = marked.filter(|frame| subscription.contains(*frame)).map(|frame| frame.0);
    assert_eq!(marked.collect::<BTreeSet<_>>(), expected);
}
