//! The laws of all virtio devices. Each device's tests call this one test with the device and a
//! request that it answers:
//!
//! - save, restore, save gives the same bytes, even while requests wait in the device's queues, and
//!   the restored device answers them;
//! - every byte that the device writes to guest memory is in the dirty tree;
//! - a driver that breaks the rules stops the device. The device reports this, is saved and
//!   restored in that state, and works again only after a reset;
//! - rings that change while the device reads them do no further harm.

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicBool, Ordering};

use driftline_dirty_tracker::{Gfn, PAGE_SIZE};
use virtio_bindings::virtio_config::*;
use virtio_bindings::virtio_mmio::*;
use virtio_bindings::virtio_ring::*;
use vm_memory::{Bytes, GuestAddress};

use super::driver::{Driver, MEM_BYTES, RINGS, RINGS_STEP};
use super::{Device, DriverBuffer, Transport, VIRTIO_MMIO_QUEUE_RESET, VirtioState};

/// A device, and the means to give it work.
pub(crate) struct TestedDevice<'s> {
    /// Creates the device, each time over the same backend.
    pub(crate) make: &'s dyn Fn() -> Box<dyn Device>,
    /// A queue that the device answers by itself.
    pub(crate) queue: usize,
    /// Creates the `n`th request for that queue, which the device completes.
    pub(crate) request: &'s dyn Fn(&mut Driver, u64) -> Vec<DriverBuffer>,
}

/// Checks all laws.
pub(crate) fn check(tested: &TestedDevice<'_>) {
    for without in [0, 1 << VIRTIO_RING_F_EVENT_IDX] {
        restored_state_saves_the_same(tested, without);
        device_writes_are_marked(tested, without);
    }
    indirect_chains_are_served(tested);
    reset_forgets_the_driver(tested);
    queue_reset_forgets_the_queue(tested);
    pause_loses_no_notification(tested);
    broken_rules_stop_the_device(tested);
    stopped_device_is_not_started(tested);
    driver_with_unknown_features_is_moved(tested);
    changing_rings_do_no_harm(tested);
    misfit_states_are_refused(tested);
}

fn post(driver: &mut Driver, tested: &TestedDevice<'_>, n: u64) -> u16 {
    let pieces = (tested.request)(driver, n);
    driver.post(tested.queue, &pieces)
}

fn check_answer(driver: &mut Driver, tested: &TestedDevice<'_>, n: u64) {
    let head = post(driver, tested, n);
    driver.kick(tested.queue);
    driver.wait_used(tested.queue, head);
}

fn encoded(transport: &Transport) -> Vec<u8> {
    transport.save().unwrap().encode().unwrap()
}

fn restored_state_saves_the_same(tested: &TestedDevice<'_>, without: u64) {
    let fresh = Driver::new((tested.make)());
    fresh.quiesce();
    let never_used = encoded(&fresh.transport);
    drop(fresh);

    let mut driver = Driver::started_without((tested.make)(), without);
    (0..3).for_each(|n| check_answer(&mut driver, tested, n));
    driver.quiesce();
    // Requests that the device has not seen when it is saved.
    let waiting: Vec<u16> = (3..5).map(|n| post(&mut driver, tested, n)).collect();
    let used = encoded(&driver.transport);
    for bytes in [&never_used, &used] {
        let state = VirtioState::decode("the state", bytes).unwrap();
        let ram = driver.memory.ram().clone();
        let restored = Transport::spawn("restored", (tested.make)(), ram).unwrap();
        restored.restore(state).unwrap();
        assert_eq!(&encoded(&restored), bytes, "what is saved again is the same");
        if bytes != &used {
            continue;
        }
        assert!(restored.interrupt_pending(), "the interrupt is not acknowledged yet");
        driver = driver.moved_to(restored);
        driver.transport.resume();
        for head in &waiting {
            driver.wait_used(tested.queue, *head);
        }
        check_answer(&mut driver, tested, 5);
        return;
    }
}

fn contents(driver: &Driver) -> Vec<u8> {
    let mut bytes = vec![0; MEM_BYTES as usize];
    driver.memory.ram().read_slice(&mut bytes, GuestAddress(0)).unwrap();
    bytes
}

fn device_writes_are_marked(tested: &TestedDevice<'_>, without: u64) {
    let mut driver = Driver::started_without((tested.make)(), without);
    for round in 0..3 {
        writes_are_marked(&mut driver, |driver| {
            (0..3).map(|n| (tested.queue, post(driver, tested, 3 * round + n))).collect()
        });
    }
}

/// Has the device answer what `ask` makes available, by queue and head. Checks that every frame
/// that it writes to is in the tree, and returns those frames.
pub(crate) fn writes_are_marked(
    driver: &mut Driver,
    ask: impl FnOnce(&mut Driver) -> Vec<(usize, u16)>,
) -> Vec<u64> {
    let mut writes = driver.memory.tracker().subscribe("conformance").unwrap();
    // A paused device does not see the requests until the driver's own writes are drained from the
    // tree: they are not tested here.
    driver.quiesce();
    let heads = ask(driver);
    writes.drain().commit();
    let before = contents(driver);
    driver.transport.resume();
    for (queue, head) in heads {
        driver.kick(queue);
        driver.wait_used(queue, head);
    }
    driver.quiesce();
    let after = contents(driver);
    let epoch = writes.drain();
    let marked: BTreeSet<u64> = epoch.runs().flat_map(|r| r.start.0..r.end().0).collect();
    epoch.commit();
    let frame = PAGE_SIZE as usize;
    let frames = before.chunks(frame).zip(after.chunks(frame)).zip(0u64..);
    let changed: Vec<u64> = frames.filter(|((b, a), _)| b != a).map(|(_, i)| i).collect();
    assert!(!changed.is_empty(), "the device has written at least to the used ring");
    for gfn in &changed {
        assert!(marked.contains(gfn), "{} was written and not marked", Gfn(*gfn).0);
    }
    driver.transport.resume();
    changed
}

fn indirect_chains_are_served(tested: &TestedDevice<'_>) {
    let mut driver = Driver::started((tested.make)());
    let pieces = (tested.request)(&mut driver, 0);
    let head = driver.post_indirect(tested.queue, &pieces);
    driver.kick(tested.queue);
    driver.wait_used(tested.queue, head);
}

fn reset_forgets_the_driver(tested: &TestedDevice<'_>) {
    let mut driver = Driver::started((tested.make)());
    check_answer(&mut driver, tested, 0);
    driver.wait_interrupt();
    assert_ne!(driver.read(VIRTIO_MMIO_INTERRUPT_STATUS), 0);
    driver.write(VIRTIO_MMIO_STATUS, 0);
    assert_eq!(driver.read(VIRTIO_MMIO_STATUS), 0);
    assert_eq!(driver.read(VIRTIO_MMIO_INTERRUPT_STATUS), 0);
    driver.write(VIRTIO_MMIO_QUEUE_SEL, tested.queue as u32);
    assert_eq!(driver.read(VIRTIO_MMIO_QUEUE_READY), 0);
    driver.start(!0);
    check_answer(&mut driver, tested, 1);
}

fn queue_reset_forgets_the_queue(tested: &TestedDevice<'_>) {
    let mut driver = Driver::started((tested.make)());
    check_answer(&mut driver, tested, 0);
    for queue in 0..driver.queue_count() {
        driver.write(VIRTIO_MMIO_QUEUE_SEL, queue as u32);
        driver.write(VIRTIO_MMIO_QUEUE_RESET, 1);
        assert_eq!(driver.read(VIRTIO_MMIO_QUEUE_RESET), 0, "the reset is complete");
        assert_eq!(driver.read(VIRTIO_MMIO_QUEUE_READY), 0);
    }
    driver.set_up_queues();
    check_answer(&mut driver, tested, 1);
}

fn pause_loses_no_notification(tested: &TestedDevice<'_>) {
    let mut driver = Driver::started((tested.make)());
    for n in 0..20 {
        let head = post(&mut driver, tested, n);
        driver.kick(tested.queue);
        driver.quiesce();
        driver.transport.resume();
        driver.wait_used(tested.queue, head);
    }
}

/// A way to break the rules: what it is called, and what the driver does.
type RuleBreak = (&'static str, Box<dyn Fn(&mut Driver)>);
/// A descriptor: its buffer, its flags besides the buffer's, and the next one.
type TestDescriptor = (DriverBuffer, u16, u16);

/// Returns malformed chains of queue `q`, which has `size` entries. Each begins at descriptor 0.
fn malformed_chains(q: usize, size: u16) -> Vec<RuleBreak> {
    const NEXT: u16 = VRING_DESC_F_NEXT as u16;
    const INDIRECT: u16 = VRING_DESC_F_INDIRECT as u16;
    let buffer = |addr, len| DriverBuffer { addr, len, writable: true };
    let good = buffer(0x20_0000, 64);
    let good_to_read = DriverBuffer { writable: false, ..good };
    let table = |addr, len| DriverBuffer { addr, len, writable: false };
    // In a queue with too few entries for 4 GiB, the last buffer is too long.
    let large = |index| (buffer(0, MEM_BYTES as u32), NEXT, index + 1);
    let large = (0..size - 2).map(large).chain([(buffer(0, u32::MAX), 0, 0)]);
    let chains = vec![
        ("a loop", vec![(good, NEXT, 1), (good, NEXT, 0)]),
        ("a next descriptor that does not exist", vec![(good, NEXT, size)]),
        ("a length past memory", vec![(buffer(MEM_BYTES - 4096, 8192), 0, 0)]),
        ("an address past memory", vec![(buffer(u64::MAX - 16, 4096), 0, 0)]),
        ("registers as a buffer", vec![(buffer(0xd000_0000, 16), 0, 0)]),
        ("buffers to write before buffers to read", vec![(good, NEXT, 1), (good_to_read, 0, 0)]),
        ("4 GiB and more", large.collect()),
        ("an indirect table that is no table", vec![(table(0x20_0000, 17), INDIRECT, 0)]),
        ("an indirect table in no memory", vec![(table(MEM_BYTES, 32), INDIRECT, 0)]),
        ("an indirect table in an indirect table", vec![(table(0x20_0000, 16), INDIRECT, 0)]),
    ];
    let offer = move |driver: &mut Driver, chain: &[TestDescriptor]| {
        // The content of the indirect table that lies in memory: a descriptor of a table.
        let inner = table(0x20_0000, 16).descriptor(INDIRECT, 0);
        driver.memory.ram().write_slice(&inner, GuestAddress(0x20_0000)).unwrap();
        for ((buffer, flags, next), index) in chain.iter().zip(0..) {
            driver.write_descriptor(q, index, *buffer, *flags, *next);
        }
        driver.make_available(q, 0);
        driver.kick(q);
    };
    let rule_break = |(what, chain): (&'static str, Vec<TestDescriptor>)| -> RuleBreak {
        (what, Box::new(move |driver: &mut Driver| offer(driver, &chain)))
    };
    chains.into_iter().map(rule_break).collect()
}

/// Returns misuses of queue `q`, which has `size` entries, and of registers.
fn misused_queues_and_registers(q: usize, size: u16) -> Vec<RuleBreak> {
    vec![
        (
            "a head that does not exist",
            Box::new(move |d| {
                d.make_available(q, size);
                d.kick(q);
            }),
        ),
        (
            "an available index that runs away",
            Box::new(move |d| {
                d.set_available(q, d.available(q).wrapping_add(size + 1));
                d.kick(q);
            }),
        ),
        (
            "a queue that is moved while in use",
            Box::new(move |d| d.set_queue_address(q as u32, 0x30_0000)),
        ),
        (
            "a queue that does not exist, set up",
            Box::new(|d| {
                d.write(VIRTIO_MMIO_QUEUE_SEL, 1000);
                d.write(VIRTIO_MMIO_QUEUE_READY, 1);
            }),
        ),
        ("a queue that does not exist, notified", Box::new(|d| d.kick(1000))),
        (
            "rings in no memory",
            Box::new(move |d| {
                d.negotiate(!0);
                d.set_queue_address(q as u32, MEM_BYTES - 0x8000 - 64);
                d.write(VIRTIO_MMIO_QUEUE_READY, 1);
                d.write(VIRTIO_MMIO_STATUS, 15);
            }),
        ),
        (
            "a start without features",
            Box::new(|d| {
                d.write(VIRTIO_MMIO_STATUS, 0);
                d.write(VIRTIO_MMIO_STATUS, 3);
                d.write(VIRTIO_MMIO_STATUS, 3 | VIRTIO_CONFIG_S_DRIVER_OK);
            }),
        ),
    ]
}

fn broken_rules_stop_the_device(tested: &TestedDevice<'_>) {
    let mut driver = Driver::started((tested.make)());
    let q = tested.queue;
    let size = driver.queue_size(q);
    let rule_breaks =
        malformed_chains(q, size).into_iter().chain(misused_queues_and_registers(q, size));
    for ((what, break_rule), i) in rule_breaks.zip(0..) {
        // Gives the device a reason to take buffers from a queue to which it writes.
        (tested.request)(&mut driver, 50 + i);
        break_rule(&mut driver);
        driver.wait_stopped(what);
        // A stopped device does nothing. It can be paused and saved.
        driver.kick(q);
        check_move(&driver, tested, what);
        driver.transport.resume();
        driver.start(!0);
        check_answer(&mut driver, tested, 100 + i);
        assert!(!driver.is_stopped(), "{what}: it works again after a reset");
    }
}

/// Sets its flag on drop.
struct SetOnDrop<'e>(&'e AtomicBool);

impl Drop for SetOnDrop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

fn stopped_device_is_not_started(tested: &TestedDevice<'_>) {
    let mut driver = Driver::new((tested.make)());
    driver.negotiate(!0);
    driver.kick(1000);
    driver.wait_stopped("a queue that does not exist");
    driver.set_up_queues();
    driver.write(VIRTIO_MMIO_STATUS, 15);
    post(&mut driver, tested, 0);
    driver.kick(tested.queue);
    check_move(&driver, tested, "started without a reset");
    driver.transport.resume();
    driver.quiesce();
    assert!(!driver.has_used(tested.queue), "it works for a driver that it has asked for a reset");
    driver.transport.resume();
    driver.start(!0);
    check_answer(&mut driver, tested, 1);
}

fn driver_with_unknown_features_is_moved(tested: &TestedDevice<'_>) {
    let driver = Driver::new((tested.make)());
    driver.write(VIRTIO_MMIO_STATUS, 3);
    for select in [0, 1] {
        driver.write(VIRTIO_MMIO_DRIVER_FEATURES_SEL, select);
        driver.write(VIRTIO_MMIO_DRIVER_FEATURES, !0);
    }
    check_move(&driver, tested, "asked for too much");
    driver.transport.resume();
    driver.write(VIRTIO_MMIO_STATUS, 11);
    assert_eq!(driver.read(VIRTIO_MMIO_STATUS), 3, "which it does not get");
    check_move(&driver, tested, "refused what it asked for");
}

/// Checks that the device can be saved in whatever state its driver left it, restored, and saved
/// again with the same state.
fn check_move(driver: &Driver, tested: &TestedDevice<'_>, what: &str) {
    driver.quiesce();
    let state = driver.transport.save().unwrap();
    let other = Transport::spawn("o", (tested.make)(), driver.memory.ram().clone()).unwrap();
    other.restore(state.clone()).unwrap_or_else(|e| panic!("{what}: {e}"));
    assert_eq!(other.save().unwrap(), state, "{what}");
}

fn changing_rings_do_no_harm(tested: &TestedDevice<'_>) {
    let mut driver = Driver::started((tested.make)());
    let ram = driver.memory.ram().clone();
    // The same request again and again: any outcome is allowed.
    let pieces = (tested.request)(&mut driver, 0);
    let end = AtomicBool::new(false);
    let bytes = RINGS_STEP * driver.queue_count() as u64;
    std::thread::scope(|scope| {
        scope.spawn(|| {
            // Any sequence with a long period.
            let mut n = 1u64;
            while !end.load(Ordering::Relaxed) {
                n = n.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                let at = RINGS + (n >> 33) % (bytes - 2);
                ram.write_obj((n >> 20) as u16 & 0x1f, GuestAddress(at)).unwrap();
            }
        });
        // Ends the other thread even if something below fails. Otherwise it would run for ever.
        let _ending = SetOnDrop(&end);
        for _ in 0..200 {
            driver.post(tested.queue, &pieces);
            driver.kick(tested.queue);
            if driver.is_stopped() {
                driver.start(!0);
            }
        }
    });
    driver.start(!0);
    check_answer(&mut driver, tested, 1000);
}

fn misfit_states_are_refused(tested: &TestedDevice<'_>) {
    let mut driver = Driver::started((tested.make)());
    check_answer(&mut driver, tested, 0);
    driver.quiesce();
    let state = driver.transport.save().unwrap();
    let refused = |change: &dyn Fn(&mut VirtioState)| {
        let mut state = state.clone();
        change(&mut state);
        let other = Transport::spawn("o", (tested.make)(), driver.memory.ram().clone()).unwrap();
        other.restore(state).unwrap_err().to_string()
    };
    let alien = refused(&|s| s.device_id = 63);
    assert!(alien.contains("virtio device 63"), "{alien}");
    let features = refused(&|s| s.registers.driver_features |= 1 << 63);
    assert!(features.contains("0x8"), "{features}");
    refused(&|s| s.positions.truncate(driver.queue_count() - 1));
    refused(&|s| s.registers.queues.truncate(driver.queue_count() - 1));
    for queue in 0..driver.queue_count() {
        let outside =
            refused(&|s| s.registers.queues[queue].setup = super::ring::RingSetup::default());
        assert!(outside.contains(&format!("queue {queue}")), "{outside}");
    }
    refused(&|s| s.device.push(0xff));
    refused(&|s| s.device = vec![0xff; 3]);
}
