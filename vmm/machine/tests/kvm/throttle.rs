//! vCPUs that write faster than they may: they are throttled, and no write is missed.

use std::time::{Duration, Instant};

use driftline_dirty_tracker::{FrameSet, Gfn, PAGE_SIZE, Subscription};
use driftline_guest::{DirtyLog, GuestContents, Lifecycle, Paused, WriteThrottle};
use driftline_machine::config::MachineConfig;
use driftline_machine::machine::KvmMachine;
use driftline_machine::testing::kvm_or_skip;
use driftline_machine::vm::Vm;
use vm_memory::{Bytes, GuestAddress};

use crate::harness::*;

/// The first vCPU keeps writing. The second writes its pages once, and then only reads them.
const GUEST: &str = "payload,ws=32M,rate=max,writers=1";

/// Returns the frames that each vCPU dirties per second, measured for `time` with a subscriber that
/// drains now and then.
fn rates(machine: &KvmMachine, subscription: &mut Subscription, time: Duration) -> Vec<f64> {
    let (before, begun) = (machine.vcpu_writes(), Instant::now());
    while begun.elapsed() < time {
        std::thread::sleep(Duration::from_millis(20));
        machine.collect().unwrap();
        subscription.drain().commit();
    }
    let seconds = begun.elapsed().as_secs_f64();
    let now = machine.vcpu_writes();
    let both = now.iter().zip(&before);
    both.map(|(n, b)| (n.dirtied_frames - b.dirtied_frames) as f64 / seconds).collect()
}

/// Measures rates until they are as `expected`. On a busy host a vCPU may get no processor for the
/// whole of a measurement.
#[track_caller]
fn wait_for_rates(
    machine: &KvmMachine,
    subscription: &mut Subscription,
    what: &str,
    expected: impl Fn(&[f64]) -> bool,
) -> Vec<f64> {
    let end = Instant::now() + LONG;
    loop {
        let found = rates(machine, subscription, MEASURED);
        if expected(&found) {
            return found;
        }
        assert!(Instant::now() < end, "{what}: {found:?} frames a second");
    }
}

fn throttled_times(machine: &KvmMachine) -> Vec<Duration> {
    machine.vcpu_writes().iter().map(|v| v.throttled).collect()
}

/// More than a read-only vCPU dirties again after each drain: its stack.
const RATE: u64 = 500;
/// Duration of a measurement of rates.
const MEASURED: Duration = Duration::from_millis(500);

fn check_throttle(config: MachineConfig) {
    let console = SerialLog::new();
    let machine = launch(config, &console);
    let mut subscription = machine.subscribe("test").unwrap();
    machine.resume().unwrap();
    // From now on the second vCPU only reads.
    console.wait_for("a round of the second vCPU", |_| {
        console.reports().iter().any(|r| r.vcpu == 1 && r.passes > 0)
    });
    let free = wait_for_rates(&machine, &mut subscription, "too slow to show anything", |free| {
        free[0] > 8.0 * RATE as f64
    });
    assert_eq!(throttled_times(&machine), [Duration::ZERO; 2]);

    let slow = only_the_writer_is_throttled(&machine, &mut subscription, &free);
    every_change_is_dirty(&machine, &mut subscription);
    // Saving a state needs vCPUs that serve their commands.
    let paused = Paused::new(&*machine).unwrap();
    paused.save_state().unwrap();
    paused.resume().unwrap();

    machine.throttle(None);
    let what = format!("still slow after {slow:?}");
    wait_for_rates(&machine, &mut subscription, &what, |again| again[0] > 2.0 * slow[0]);
    let times_at_end = throttled_times(&machine);
    console.wait_for_reports(2, console.reports().len() / 2 + 5);
    assert_eq!(throttled_times(&machine), times_at_end, "no vCPU is throttled any more");

    throttle_ends_with_its_last_subscriber(&machine, subscription);
    machine.stop("it has shown enough");
    console.assert_no_errors();
}

/// Throttles the vCPUs. Returns their rates then; they were `free` before.
fn only_the_writer_is_throttled(
    machine: &KvmMachine,
    subscription: &mut Subscription,
    free: &[f64],
) -> Vec<f64> {
    machine.throttle(Some(RATE));
    // Time for the vCPUs to pay for the frames that they dirtied before the throttle.
    std::thread::sleep(Duration::from_millis(300));
    let what = format!("not slower than {free:?}");
    let slow = wait_for_rates(machine, subscription, &what, |slow| slow[0] < free[0] / 3.0);
    let times = throttled_times(machine);
    // The second one is throttled only if this host was busy elsewhere between two checks.
    assert!(times[1] * 5 < times[0], "{times:?}");
    let info = machine.info().vcpu;
    assert!(
        info[0].throttled_ms > 0 && info[1].throttled_ms * 5 < info[0].throttled_ms,
        "{info:?}"
    );
    slow
}

/// Pauses throttled vCPUs at any moment: every changed frame is dirty.
fn every_change_is_dirty(machine: &KvmMachine, subscription: &mut Subscription) {
    let mut before = vec![0; machine.machine_config().mem_bytes as usize];
    let mut after = before.clone();
    for round in 0..50 {
        let paused = Paused::new(machine).unwrap();
        let epoch = paused.drain(subscription).unwrap();
        if round % 10 == 1 {
            machine.ram().read_slice(&mut after, GuestAddress(0)).unwrap();
            let dirty: FrameSet = epoch.runs().collect();
            let frames = before.chunks(PAGE_SIZE as usize).zip(after.chunks(PAGE_SIZE as usize));
            for (gfn, _) in (0..).zip(frames).filter(|(_, (before, after))| before != after) {
                assert!(dirty.contains(Gfn(gfn)), "frame {gfn} was missed");
            }
            std::mem::swap(&mut before, &mut after);
        } else if round % 10 == 0 {
            machine.ram().read_slice(&mut before, GuestAddress(0)).unwrap();
        }
        epoch.commit();
        paused.resume().unwrap();
        std::thread::sleep(Duration::from_millis(round % 7));
    }
}

fn throttle_ends_with_its_last_subscriber(machine: &KvmMachine, subscriber: Subscription) {
    machine.throttle(Some(RATE));
    drop(subscriber);
    let end = Instant::now() + LONG;
    let (mut last, mut quiet) = (throttled_times(machine), 0);
    while quiet < 5 {
        assert!(Instant::now() < end, "without a subscriber, vCPUs are still throttled");
        std::thread::sleep(Duration::from_millis(50));
        let now = throttled_times(machine);
        quiet = if now == last { quiet + 1 } else { 0 };
        last = now;
    }
}

#[test]
fn throttled_vcpu_loses_no_write() {
    if kvm_or_skip("throttled_vcpu_loses_no_write") {
        check_throttle(MachineConfig { vcpus: 2, ..payload(GUEST) });
    }
}

#[test]
fn vcpu_with_full_ring_is_throttled() {
    if kvm_or_skip("vcpu_with_full_ring_is_throttled") {
        let config = MachineConfig { vcpus: 2, ..payload(GUEST) };
        let ring_entries = smallest_ring(&config);
        check_throttle(MachineConfig { ring_entries, ..config });
    }
}
