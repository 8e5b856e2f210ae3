//! Dirty tracking: all modes agree (I5), overrun rings lose nothing (I6), and tracking costs
//! nothing before there is a subscriber.

use std::sync::Arc;
use std::time::{Duration, Instant};

use driftline_dirty_tracker::{Gfn, SlotId, Subscription};
use driftline_guest::{DirtyLog, GuestContents, GuestError, Lifecycle, Paused};
use driftline_machine::config::MachineConfig;
use driftline_machine::machine::{BuildOptions, KvmMachine};
use driftline_machine::testing::{Elf, full};
use driftline_machine::tracking::TrackingMode;
use driftline_machine::vm::Vm;
use vm_memory::{Bytes, GuestAddress};

use crate::harness::*;

/// Returns the modes that this host supports. It refuses all others as features that it lacks.
pub fn modes() -> Vec<TrackingMode> {
    let all = TrackingMode::ALL.iter().copied().filter(|mode| *mode != TrackingMode::None);
    all.filter(|tracking| {
        let config = MachineConfig { tracking: *tracking, ..payload("payload,ws=16M") };
        let why = boot(config, &silent()).err();
        assert!(why.iter().all(|e| e.host_lacks()), "{tracking}: {why:?}");
        if let Some(e) = &why {
            driftline_machine::testing::skip("modes", &format!("{tracking}: {e}"));
        }
        why.is_none()
    })
    .collect()
}

/// Runs `config` to the guest's own end. Returns the leaves of slot 0 and the frames whose content
/// differs from the start.
fn whole_run(config: MachineConfig) -> (Vec<u64>, Vec<u64>) {
    whole_run_as(config, BuildOptions::default())
}

fn whole_run_as(config: MachineConfig, options: BuildOptions) -> (Vec<u64>, Vec<u64>) {
    let console = SerialLog::new();
    let machine = boot_as(config, &console.host(), options).unwrap();
    // Memory is read first: userfaultfd counts the first read of a frame as a touch.
    let mut copy = RamCopy::of(&machine);
    let subscription = machine.subscribe("test").unwrap();
    machine.resume().unwrap();
    assert_powers_off(&machine, &console);
    console.wait_for("done", |text| text.contains("done"));
    machine.collect().unwrap();
    let leaves = subscription.bitmap(SlotId(0)).unwrap();
    let mut content = vec![0; leaves.len()];
    for gfn in copy.update(&machine) {
        content[gfn.0 as usize / 64] |= 1 << (gfn.0 % 64);
    }
    assert_eq!(machine.info().ring_overruns, 0);
    console.assert_no_errors();
    (leaves, content)
}

/// I5, exactly: several runs of the same guest last until the guest ends itself, so all of them
/// have executed the same instructions. Their leaves are equal, bit for bit. Nothing is masked out:
/// each run writes the pages whose content depends on time, and the stacks that a vCPU may or may
/// not need.
///
/// The working sets are sparse or written once, so that no later write hides a lost frame. Rings
/// have their default size: an overrun ring marks all memory (I6), and equality would prove
/// nothing. Equality would also not reveal a frame that all modes lose, so each frame whose content
/// has changed must be in all.
///
/// KVM's modes also report frames that the guest only read, such as code: where the host's page is
/// writable, KVM maps it writable and counts it. `userfault-wp` is more precise, and may differ in
/// frames whose content is the same.
#[test]
fn all_modes_report_the_same_frames() {
    if !kvm_or_skip("all_modes_report_the_same_frames") {
        return;
    }
    let workloads = [
        (1, "ws=12M,pattern=once,passes=1", 3072),
        (1, "ws=24M,pattern=stride:7,passes=3", 877),
        (2, "ws=12M,pattern=random,seed=9,passes=1", 1000),
        (1, "ws=12M,pattern=random,seed=5,passes=1", 1000),
        (2, "ws=8M,pattern=once,passes=2", 2048),
    ];
    let (modes, tried) = (&modes(), if full() { 5 } else { 3 });
    std::thread::scope(|threads| {
        for (vcpus, workload, least) in workloads.into_iter().take(tried) {
            threads.spawn(move || agree(modes, vcpus, workload, least));
        }
    });
}

/// Runs `workload` in each mode. More than `least` frames must be dirty, the same in each.
fn agree(modes: &[TrackingMode], vcpus: u8, workload: &str, least: u32) {
    let mut first: Option<(TrackingMode, Vec<u64>)> = None;
    for &tracking in modes {
        let spec = format!("payload,rate=max,{workload}");
        let (leaves, content) = whole_run(MachineConfig { tracking, vcpus, ..payload(&spec) });
        let frames: u32 = leaves.iter().map(|w| w.count_ones()).sum();
        assert!(frames > least, "{workload}, {tracking}: only {frames} frames are dirty");
        let lost: u32 = leaves.iter().zip(&content).map(|(l, c)| (c & !l).count_ones()).sum();
        assert_eq!(lost, 0, "{workload}: frames that changed and that {tracking} lost");
        let Some((other, others)) = &first else {
            first = Some((tracking, leaves));
            continue;
        };
        let words = leaves.iter().zip(others).enumerate();
        let apart: Vec<_> = words.filter(|(_, (a, b))| a != b).collect();
        if tracking == TrackingMode::UserfaultWp {
            // Only in frames with the same content before and after, and only in few of them.
            let same_content = |at: usize, a: u64, b: u64| (a ^ b) & content[at] == 0;
            assert!(apart.iter().all(|(at, (a, b))| same_content(*at, **a, **b)), "{apart:x?}");
            let frames: u32 = apart.iter().map(|(_, (a, b))| (**a ^ **b).count_ones()).sum();
            assert!(frames < 100, "{workload}: {frames} frames apart from {other}: {apart:x?}");
            continue;
        }
        assert!(apart.is_empty(), "{workload}: words, {tracking} and {other}: {apart:x?}");
    }
}

/// A guest whose logging is on from the start reports the frames that it reports otherwise. It is
/// logged, too, for a subscription after the first.
#[test]
fn logging_from_the_start_misses_nothing() {
    if !kvm_or_skip("logging_from_the_start_misses_nothing") {
        return;
    }
    for tracking in modes().into_iter().filter(|mode| *mode != TrackingMode::UserfaultWp) {
        let config = || MachineConfig {
            tracking,
            ..payload("payload,rate=max,ws=8M,pattern=once,passes=1")
        };
        let tracked = || BuildOptions { tracked: true, ..BuildOptions::default() };
        let (leaves, content) = whole_run_as(config(), tracked());
        let lost: u32 = leaves.iter().zip(&content).map(|(l, c)| (c & !l).count_ones()).sum();
        assert_eq!(lost, 0, "{tracking}: frames that changed and were lost");
        assert!(leaves == whole_run(config()).0, "{tracking}: other frames than without it");

        let config = MachineConfig { tracking, ..payload("payload,rate=max,ws=8M") };
        let machine = boot_as(config, &silent(), tracked()).unwrap();
        drop(machine.subscribe("first").unwrap());
        let mut second = machine.subscribe("second").unwrap();
        assert!(
            check_epochs(&machine, &mut second, 2, Duration::from_millis(50)) > 0,
            "{tracking}"
        );
    }
}

/// Runs `machine` for `rounds` epochs of `length`. After each one, every changed frame must be in
/// the epoch. Returns the number of changed frames.
fn check_epochs(
    machine: &Arc<KvmMachine>,
    subscription: &mut Subscription,
    rounds: usize,
    length: Duration,
) -> usize {
    let mut copy = RamCopy::of(machine);
    let mut total = 0;
    for round in 0..rounds {
        machine.resume().unwrap();
        std::thread::sleep(length);
        let paused = Paused::new(&**machine).unwrap();
        let epoch = paused.drain(subscription).unwrap();
        let changed = copy.update(machine);
        let runs: Vec<_> = epoch.runs().collect();
        let has = |gfn: Gfn| {
            let at = runs.partition_point(|r| r.end() <= gfn);
            runs.get(at).is_some_and(|r| r.start <= gfn)
        };
        let lost: Vec<_> = changed.iter().filter(|g| !has(**g)).collect();
        assert!(lost.is_empty(), "round {round} lost {} frames: {lost:?}", lost.len());
        total += changed.len();
        epoch.commit();
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
    let console = SerialLog::new();
    let machine = launch(MachineConfig { ring_entries, ..config }, &console);
    let mut subscription = machine.subscribe("test").unwrap();
    machine.resume().unwrap();
    console.wait_for("start", |text| text.contains("payload ready"));
    machine.pause().unwrap();
    machine.collect().unwrap();
    subscription.drain().commit();
    // On a busy host the guest does little in an epoch, and its rings are never full in it.
    let (mut changed, end) = (0, Instant::now() + LONG);
    let mut length = Duration::from_millis(30);
    let no_ring_was_full = || machine.info().vcpu.iter().all(|v| v.ring_full_exits == 0);
    while changed < 5_000 || no_ring_was_full() {
        assert!(Instant::now() < end, "only {changed} frames changed");
        changed += check_epochs(&machine, &mut subscription, 20, length);
        length += length;
    }
    machine.resume().unwrap();
    console.wait_for_reports(2, 1);
    console.assert_no_errors();
}

/// Writes a counter to each frame from 16 to 48 MiB, again and again, in ring 0 without paging.
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
fn overrun_in_ring_0_loses_nothing() {
    if !kvm_or_skip("overrun_in_ring_0_loses_nothing") {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let config = kernel(&Elf::new(&ring_0_writer()).bytes(), &dir);
    let smallest = smallest_ring(&config);
    for ring_entries in [smallest, 4 * smallest] {
        let machine = launch(MachineConfig { ring_entries, ..config.clone() }, &SerialLog::new());
        let mut subscription = machine.subscribe("test").unwrap();
        // On a busy host the guest does little in an epoch, and its ring is never full in it.
        let (mut changed, end) = (0, Instant::now() + LONG);
        let mut length = Duration::from_millis(10);
        let full = || machine.info().vcpu[0].ring_full_exits;
        while changed <= 8 * ring_entries as usize || full() == 0 {
            assert!(Instant::now() < end, "{changed} frames changed in rings of {ring_entries}");
            changed += check_epochs(&machine, &mut subscription, 15, length);
            length += length;
        }
        drop(subscription);
        let overruns = machine.info().ring_overruns;
        println!("rings of {ring_entries}: {} ring-full exits, {overruns} overruns", full());
        // There is no subscriber any more; a ring that is still full must not block the guest.
        machine.resume().unwrap();
        let counter = || machine.ram().read_obj::<u32>(GuestAddress(16 * MIB)).unwrap();
        let (start, end) = (counter(), Instant::now() + LONG);
        while counter() < start + 3 {
            assert!(Instant::now() < end, "the guest makes no progress after {start}");
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}

#[test]
fn guest_with_full_ring_can_be_paused() {
    if !kvm_or_skip("guest_with_full_ring_can_be_paused") {
        return;
    }
    let config = MachineConfig { vcpus: 2, ..payload("payload,ws=32M,rate=max") };
    let ring_entries = smallest_ring(&config);
    let console = SerialLog::new();
    let machine = launch(MachineConfig { ring_entries, ..config }, &console);
    let _subscription = machine.subscribe("test").unwrap();
    machine.resume().unwrap();
    for _ in 0..300 {
        machine.pause().unwrap();
        machine.resume().unwrap();
    }
    // The guest never ends by itself: even on a slow host, all pauses interrupt its work.
    let already = console.reports().len();
    console.wait_for("report after the pauses", |_| console.reports().len() > already + 2);
    assert!(machine.info().vcpu.iter().any(|v| v.ring_full_exits > 0), "no ring was ever full");
    machine.stop("it has shown enough");
    console.assert_no_errors();
}

#[test]
fn nothing_is_tracked_without_subscribers() {
    if !kvm_or_skip("nothing_is_tracked_without_subscribers") {
        return;
    }
    for tracking in modes() {
        let console = SerialLog::new();
        let config = MachineConfig { tracking, ..payload("payload,ws=16M,rate=64M") };
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
            // The collector notices in its own time. Until then the frames of a guest that writes
            // at this rate are marked many times a second; afterwards never.
            let end = Instant::now() + LONG;
            let marked = || machine.info().dirty.marked_frames;
            let mut before = marked();
            let mut quiet = 0;
            while quiet < 5 {
                assert!(Instant::now() < end, "without a subscriber, {tracking} continues");
                std::thread::sleep(Duration::from_millis(50));
                let now = marked();
                quiet = if now == before { quiet + 1 } else { 0 };
                before = now;
            }
        }
        let already = console.reports().len();
        console.wait_for_reports(1, already + 1);
        console.assert_no_errors();
    }
    let none = MachineConfig { tracking: TrackingMode::None, ..payload("payload,ws=16M") };
    let machine = launch(none, &SerialLog::new());
    assert!(matches!(machine.subscribe("test"), Err(GuestError::NotTracked)));
    assert!(matches!(machine.collect(), Err(GuestError::NotTracked)));
}

#[test]
fn unsupported_ring_size_is_refused() {
    if !kvm_or_skip("unsupported_ring_size_is_refused") {
        return;
    }
    let error = refused(MachineConfig { ring_entries: 1 << 30, ..payload("payload,ws=16M") });
    assert!(error.host_lacks(), "{error}");
    assert!(error.to_string().starts_with("this host lacks dirty rings of 1073741824 entries"));
    let error = refused(MachineConfig { ring_entries: 1000, ..payload("payload,ws=16M") });
    assert!(!error.host_lacks() && error.to_string().contains("1000"), "{error}");
}
