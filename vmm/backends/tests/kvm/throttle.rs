//! vCPUs that write faster than they may: they are throttled, and no write is missed.

use std::time::{Duration, Instant};

use driftline_dirty_tracker::{FrameSet, Gfn, PAGE_SIZE, Subscription};
use driftline_guest::{DirtyLog, GuestContents, Lifecycle, Paused, VcpuWrites, WriteThrottle};
use driftline_machine::config::MachineConfig;
use driftline_machine::machine::KvmMachine;
use driftline_machine::vm::Vm;
use vm_memory::{Bytes, GuestAddress};

use crate::harness::*;

/// The first vCPU keeps writing. The second writes its pages once, and then only reads them.
const GUEST: &str = "payload,ws=32M,rate=max,writers=1";

/// Drains the subscriber now and then, so that pages become dirty again, until `done`.
#[track_caller]
fn drain_until(
    machine: &KvmMachine,
    subscription: &mut Subscription,
    what: &str,
    mut done: impl FnMut(&[VcpuWrites]) -> bool,
) {
    let end = Instant::now() + LONG;
    loop {
        std::thread::sleep(Duration::from_millis(20));
        machine.collect().unwrap();
        subscription.drain().commit();
        let now = machine.vcpu_writes();
        if done(&now) {
            return;
        }
        assert!(Instant::now() < end, "{what}: {now:?}");
    }
}

fn throttled_times(machine: &KvmMachine) -> Vec<Duration> {
    machine.vcpu_writes().iter().map(|v| v.throttled).collect()
}

/// Rate of a throttled vCPU, in frames per second. A vCPU that only reads stays below it: after
/// each drain, it dirties nothing but its stack.
const RATE: u64 = 500;
/// Throttled time that shows that the writer is throttled: ten of the longest stalls.
const SHOWN: Duration = Duration::from_millis(200);

fn check_throttle(config: MachineConfig) {
    let console = SerialLog::new();
    let machine = launch(config, &console);
    let mut subscription = machine.subscribe("test").unwrap();
    machine.resume().unwrap();
    // From now on the second vCPU only reads.
    console.wait_for("a round of the second vCPU", |_| {
        console.reports().iter().any(|r| r.vcpu == 1 && r.passes > 0)
    });
    let written = machine.vcpu_writes()[0].dirtied_frames;
    drain_until(&machine, &mut subscription, "the first vCPU writes too little", |now| {
        now[0].dirtied_frames > written + 8 * RATE
    });
    assert_eq!(throttled_times(&machine), [Duration::ZERO; 2]);

    only_the_writer_is_throttled(&machine, &mut subscription);
    every_change_is_dirty(&machine, &mut subscription);
    // Saving a state needs vCPUs that serve their commands.
    let paused = Paused::new(&*machine).unwrap();
    paused.save_state().unwrap();
    paused.resume().unwrap();

    machine.throttle(None);
    // A vCPU that reports has ended the stall that it was in.
    await_more_reports(&console);
    let times_at_end = throttled_times(&machine);
    await_more_reports(&console);
    assert_eq!(throttled_times(&machine), times_at_end, "no vCPU is throttled any more");

    throttle_ends_with_its_last_subscriber(&machine, subscription);
    machine.stop("it has shown enough");
    console.assert_no_errors();
}

/// Waits until each vCPU has reported five times more.
fn await_more_reports(console: &SerialLog) {
    let count = |vcpu| console.reports().iter().filter(|r| r.vcpu == vcpu).count();
    let before = [count(0), count(1)];
    console.wait_for("more reports", |_| {
        before.iter().zip(0..).all(|(before, vcpu)| count(vcpu) >= before + 5)
    });
}

/// Throttles the vCPUs. Their throttled times show which of them is throttled. The pacing's own
/// tests, on a simulated clock, show by how much.
fn only_the_writer_is_throttled(machine: &KvmMachine, subscription: &mut Subscription) {
    machine.throttle(Some(RATE));
    drain_until(machine, subscription, "the writer is not throttled", |now| {
        now[0].throttled >= SHOWN
    });
    // The second one is throttled only if this host was busy elsewhere between two checks.
    let times = throttled_times(machine);
    assert!(times[1] < times[0], "{times:?}");
    let info = machine.info().vcpu;
    assert!(u128::from(info[0].throttled_ms) >= SHOWN.as_millis(), "{info:?}");
    assert!(info[1].throttled_ms < info[0].throttled_ms, "{info:?}");
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
