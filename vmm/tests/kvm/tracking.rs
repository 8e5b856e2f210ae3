//! Which frames changed: both modes agree (I5), overrun rings lose nothing (I6), and nobody pays
//! before somebody asks.

use std::sync::Arc;
use std::time::{Duration, Instant};

use checkpoint::{Guest, GuestError, Paused};
use dirty_tracker::{Gfn, PAGE_SIZE, SlotId, Subscription, TrackingMode};
use vm_memory::{Bytes, GuestAddress};
use vmm::config::MachineConfig;
use vmm::machine::Machine;
use vmm::testing::kvm_or_skip;
use vmm::vm::Vm;

use crate::elf::Elf;
use crate::harness::*;

fn memory(machine: &Machine) -> Vec<u8> {
    let mut all = vec![0; machine.machine_config().mem_bytes as usize];
    machine.ram().read_slice(&mut all, GuestAddress(0)).unwrap();
    all
}

/// Frames that differ between two copies of memory.
fn changed<'a>(before: &'a [u8], after: &'a [u8]) -> impl Iterator<Item = Gfn> + 'a {
    let frames = before.chunks(PAGE_SIZE as usize).zip(after.chunks(PAGE_SIZE as usize));
    frames.zip(0u64..).filter(|((a, b), _)| a != b).map(|(_, gfn)| Gfn(gfn))
}

#[test]
fn both_modes_leave_the_same_leaves() {
    if !kvm_or_skip("both_modes_leave_the_same_leaves") {
        return;
    }
    let leaves = |tracking| {
        let console = Console::new();
        let spec = "payload,ws=24M,rate=max,pattern=random,seed=5,passes=4";
        let machine = launch(MachineConfig { tracking, ..payload(spec) }, &console);
        let subscription = machine.subscribe("test").unwrap();
        machine.resume().unwrap();
        // Its end is the one point at which both have executed the same instructions.
        assert_powers_off(&machine, &console);
        console.wait_for("done", |text| text.contains("done"));
        machine.collect().unwrap();
        let leaves = subscription.bitmap(SlotId(0)).unwrap();
        assert_eq!(machine.info().ring_overruns, 0);
        console.assert_no_errors();
        leaves
    };
    let (ring, bitmap) = (leaves(TrackingMode::DirtyRing), leaves(TrackingMode::DirtyBitmap));
    let frames: u32 = ring.iter().map(|w| w.count_ones()).sum();
    assert!(frames > 20 * 256, "the working set is among {frames} frames");
    let apart: Vec<_> = (0..).zip(ring.iter().zip(&bitmap)).filter(|(_, (a, b))| a != b).collect();
    assert!(apart.is_empty(), "words, ring and bitmap: {apart:x?}");
}

/// Runs `machine` for `rounds` epochs of `length`; after each one, every frame that changed must be
/// in the epoch. Gives the number of frames that changed.
fn check_epochs(
    machine: &Arc<Machine>,
    mut subscription: Subscription,
    rounds: usize,
    length: Duration,
) -> usize {
    let mut before = memory(machine);
    let mut total = 0;
    for round in 0..rounds {
        machine.resume().unwrap();
        std::thread::sleep(length);
        let paused = Paused::new(&**machine).unwrap();
        let epoch = paused.drain(&mut subscription).unwrap();
        let after = memory(machine);
        let runs: Vec<_> = epoch.runs().collect();
        let has = |gfn: Gfn| {
            let at = runs.partition_point(|r| r.end() <= gfn);
            runs.get(at).is_some_and(|r| r.start <= gfn)
        };
        let lost: Vec<_> = changed(&before, &after).filter(|g| !has(*g)).collect();
        assert!(lost.is_empty(), "round {round} lost {} frames: {lost:?}", lost.len());
        total += changed(&before, &after).count();
        epoch.commit();
        before = after;
        paused.keep_paused();
    }
    total
}

#[test]
fn the_smallest_ring_loses_nothing() {
    if !kvm_or_skip("the_smallest_ring_loses_nothing") {
        return;
    }
    let config = MachineConfig { vcpus: 2, ..payload("payload,ws=32M,rate=max,pattern=random") };
    let ring_entries = smallest_ring(&config);
    let console = Console::new();
    let machine = launch(MachineConfig { ring_entries, ..config }, &console);
    let subscription = machine.subscribe("test").unwrap();
    machine.resume().unwrap();
    console.wait_for("start", |text| text.contains("payload ready"));
    machine.pause().unwrap();
    let mut subscription = subscription;
    machine.collect().unwrap();
    subscription.drain().commit();
    let changed = check_epochs(&machine, subscription, 20, Duration::from_millis(30));
    assert!(changed > 5_000, "only {changed} frames changed");
    assert!(machine.info().vcpu.iter().any(|v| v.ring_full_exits > 0));
    machine.resume().unwrap();
    console.wait_for_reports(2, 1);
    console.assert_no_errors();
}

/// Writes a counter to each frame from 16 to 48 MiB, over and over, in ring 0 and without paging.
fn ring_0_writer() -> Vec<u8> {
    let mut code = vec![0x31, 0xc0]; // xor eax, eax
    code.extend([0x40]); // again: inc eax
    code.extend([0xbf, 0x00, 0x00, 0x00, 0x01]); // mov edi, 16 MiB
    code.extend([0x89, 0x07]); // next: mov [edi], eax
    code.extend([0x81, 0xc7, 0x00, 0x10, 0x00, 0x00]); // add edi, 4096
    code.extend([0x81, 0xff, 0x00, 0x00, 0x00, 0x03]); // cmp edi, 48 MiB
    code.extend([0x72, 0xf0]); // jb next
    code.extend([0xeb, 0xe8]); // jmp again
    code
}

#[test]
fn code_in_ring_0_that_overruns_its_ring_loses_nothing() {
    if !kvm_or_skip("code_in_ring_0_that_overruns_its_ring_loses_nothing") {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let config = kernel(&Elf::new(&ring_0_writer()).bytes(), &dir);
    let smallest = smallest_ring(&config);
    let mut all_full = 0;
    for ring_entries in [smallest, 4 * smallest] {
        let machine = launch(MachineConfig { ring_entries, ..config.clone() }, &Console::new());
        let subscription = machine.subscribe("test").unwrap();
        let changed = check_epochs(&machine, subscription, 15, Duration::from_millis(10));
        assert!(changed > 3_000, "only {changed} frames changed in rings of {ring_entries}");
        let info = machine.info();
        let (full, lost) = (info.vcpu[0].ring_full_exits, info.ring_overruns);
        println!("rings of {ring_entries}: {full} ring-full exits, {lost} overruns");
        all_full += full;
        // Nobody subscribes any more; a ring that is still full must not hold the guest up.
        machine.resume().unwrap();
        let counter = || machine.ram().read_obj::<u32>(GuestAddress(16 * MIB)).unwrap();
        let (start, end) = (counter(), Instant::now() + LONG);
        while counter() < start + 3 {
            assert!(Instant::now() < end, "the guest stands still at {start}");
            std::thread::sleep(Duration::from_millis(5));
        }
    }
    assert!(all_full > 0, "no ring was ever full, so this has shown nothing");
}

#[test]
fn a_guest_that_waits_for_room_in_its_ring_can_be_paused() {
    if !kvm_or_skip("a_guest_that_waits_for_room_in_its_ring_can_be_paused") {
        return;
    }
    let config = MachineConfig { vcpus: 2, ..payload("payload,ws=32M,rate=max,seconds=4") };
    let ring_entries = smallest_ring(&config);
    let console = Console::new();
    let machine = launch(MachineConfig { ring_entries, ..config }, &console);
    let _subscription = machine.subscribe("test").unwrap();
    machine.resume().unwrap();
    for _ in 0..300 {
        machine.pause().unwrap();
        machine.resume().unwrap();
    }
    assert_powers_off(&machine, &console);
    console.assert_no_errors();
}

#[test]
fn nothing_is_tracked_before_someone_subscribes_or_after_all_have_gone() {
    if !kvm_or_skip("nothing_is_tracked_before_someone_subscribes_or_after_all_have_gone") {
        return;
    }
    for tracking in [TrackingMode::DirtyRing, TrackingMode::DirtyBitmap] {
        let console = Console::new();
        let config = MachineConfig { tracking, ..payload("payload,ws=16M,rate=max") };
        let machine = launch(config, &console);
        machine.resume().unwrap();
        console.wait_for_reports(1, 1);
        assert_eq!(machine.info().dirty.marked_frames, 0);
        assert_eq!(machine.collect().unwrap().frames, 0);
        for _ in 0..3 {
            let subscription = machine.subscribe("test").unwrap();
            let end = Instant::now() + LONG;
            let mut frames = 0;
            while frames < 1000 {
                frames += machine.collect().unwrap().frames;
                assert!(Instant::now() < end, "subscribed, and nothing is dirty");
            }
            drop(subscription);
            std::thread::sleep(Duration::from_millis(100));
            let marked = machine.info().dirty.marked_frames;
            std::thread::sleep(Duration::from_millis(50));
            assert_eq!(machine.info().dirty.marked_frames, marked, "{tracking}");
        }
        let already = console.reports().len();
        console.wait_for_reports(1, already + 1);
        console.assert_no_errors();
    }
    let none = MachineConfig { tracking: TrackingMode::None, ..payload("payload") };
    let machine = launch(none, &Console::new());
    assert!(matches!(machine.subscribe("test"), Err(GuestError::NotTracked)));
    assert!(matches!(machine.collect(), Err(GuestError::NotTracked)));
}

#[test]
fn a_ring_that_the_kernel_does_not_take_is_the_hosts_lack() {
    if !kvm_or_skip("a_ring_that_the_kernel_does_not_take_is_the_hosts_lack") {
        return;
    }
    let error = refused(MachineConfig { ring_entries: 1 << 30, ..payload("payload") });
    assert!(error.host_lacks(), "{error}");
    assert!(error.to_string().starts_with("this host lacks dirty rings of 1073741824 entries"));
    let error = refused(MachineConfig { ring_entries: 1000, ..payload("payload") });
    assert!(!error.host_lacks() && error.to_string().contains("1000"), "{error}");
}
