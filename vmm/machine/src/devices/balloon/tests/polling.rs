//! Tests of the statistics: their buffer, their timer, and their moves.

use super::*;

const STATISTICS_QUEUE: usize = 2;
/// An interval that no test reaches.
const LONG_S: u16 = 3600;

fn with_interval(statistics_interval_s: u16) -> BalloonConfig {
    BalloonConfig { statistics_interval_s, ..BalloonConfig::default() }
}

fn polled(interval_s: u16) -> (Driver, BalloonControl) {
    let (balloon, control) = make_with(&with_interval(interval_s));
    (Driver::started(balloon), control)
}

fn entries(of: &[(u16, u64)]) -> Vec<u8> {
    of.iter().flat_map(|(tag, value)| MemoryStatistics::entry(*tag, *value)).collect()
}

/// Gives the device a buffer. Returns the head of its chain.
fn give(driver: &mut Driver, bytes: &[u8]) -> u16 {
    let buffer = driver.readable(bytes);
    let head = driver.post(STATISTICS_QUEUE, &[buffer]);
    driver.kick(STATISTICS_QUEUE);
    head
}

#[track_caller]
fn await_values(control: &BalloonControl, expected: &[(&str, u64)]) {
    let end = Instant::now() + TIMEOUT;
    while control.statistics().values().collect::<Vec<_>>() != expected {
        assert!(Instant::now() < end, "{:?}", control.statistics());
        thread::sleep(Duration::from_micros(200));
    }
}

#[test]
fn buffer_is_held_until_statistics_are_due() {
    let (mut driver, control) = polled(LONG_S);
    let first = give(&mut driver, &entries(&[(4, 10), (5, 20)]));
    await_values(&control, &[("free_memory", 10), ("total_memory", 20)]);
    driver.quiesce();
    assert!(!driver.has_used(STATISTICS_QUEUE));
    driver.transport.resume();
    assert_eq!(control.set_statistics_interval_s(LONG_S), Ok(()), "nothing changes");
    driver.quiesce();
    assert!(!driver.has_used(STATISTICS_QUEUE));
    driver.transport.resume();
    // A new interval makes them due, and then its end does.
    assert_eq!(control.set_statistics_interval_s(1), Ok(()));
    driver.wait_used(STATISTICS_QUEUE, first);
    for round in 0..2 {
        let next = give(&mut driver, &entries(&[(4, round)]));
        driver.wait_used(STATISTICS_QUEUE, next);
        await_values(&control, &[("free_memory", round), ("total_memory", 20)]);
    }
    assert_eq!(control.set_statistics_interval_s(0), Err(StatisticsError));
    assert_eq!(control.statistics_interval_s(), 1);
    driver.start(!0);
    await_values(&control, &[]);
}

#[test]
fn hostile_statistics_are_bounded() {
    let (mut driver, control) = polled(LONG_S);
    let most = statistics::MAX_BYTES as usize;
    let mut long = entries(&[(4, 1)]).repeat(most / 10);
    let whole = long.clone();
    long.push(0);
    let unknown = entries(&[(16, 2), (0xffff, 3), (5, 4)]);
    let part = unknown[..25].to_vec();
    let mut last = give(&mut driver, &long);
    for (bytes, failures) in [(unknown, 3), (part, 6), (whole, 6)] {
        let head = give(&mut driver, &bytes);
        // The driver gets all but its last buffer back.
        driver.wait_used(STATISTICS_QUEUE, last);
        last = head;
        driver.quiesce();
        driver.transport.resume();
        driver.quiesce();
        assert_eq!(control.stats().counts.statistics_failures, failures, "each is read once");
        driver.transport.resume();
    }
    assert_eq!(control.stats().counts.statistics, 4);
    await_values(&control, &[("free_memory", 1), ("total_memory", 4)]);
    // A buffer that is not one to read.
    let writable = driver.writable(64);
    driver.post(STATISTICS_QUEUE, &[writable]);
    driver.kick(STATISTICS_QUEUE);
    driver.wait_used(STATISTICS_QUEUE, last);
    assert!(!driver.is_stopped());
}

#[test]
fn statistics_move_with_their_buffer() {
    let (mut driver, control) = polled(LONG_S);
    let head = give(&mut driver, &entries(&[(0, 7)]));
    await_values(&control, &[("swap_in", 7)]);
    driver.quiesce();
    control.set_statistics_interval_s(LONG_S - 1).unwrap();
    let state = driver.transport.save().unwrap();
    let (balloon, elsewhere) = make_with(&with_interval(LONG_S));
    let moved = Transport::spawn("moved", balloon, driver.memory.ram().clone()).unwrap();
    moved.restore(state.clone()).unwrap();
    assert_eq!(moved.save().unwrap(), state);
    assert_eq!(elsewhere.statistics_interval_s(), LONG_S - 1);
    await_values(&elsewhere, &[("swap_in", 7)]);
    let mut driver = driver.moved_to(moved);
    driver.transport.resume();
    elsewhere.set_statistics_interval_s(LONG_S).unwrap();
    driver.wait_used(STATISTICS_QUEUE, head);
}

#[test]
fn state_has_statistics_if_configured() {
    let (with, _) = make_with(&with_interval(LONG_S));
    let (mut without, control) = make();
    let message = without.restore(&with.save().unwrap()).unwrap_err().to_string();
    assert!(message.contains("an interval of 3600 s, and 0 s in the configuration"), "{message}");
    assert_eq!(control.statistics_interval_s(), 0);
    assert_eq!(control.set_statistics_interval_s(1), Err(StatisticsError));
    let (mut with, _) = make_with(&with_interval(1));
    with.restore(&without.save().unwrap()).unwrap_err();
}

#[test]
fn state_has_its_bytes() {
    let (balloon, control) = make_with(&with_interval(300));
    control.set_target(2 * PAGE_SIZE);
    control.shared.restore_commands(5, STOP, Some(6));
    let tag_1 = MemoryStatistics::entry(1, 7);
    control.shared.add_statistics(&tag_1);
    let head = [2, 0, 0, 0, 0, 5, 1, 6, 0xac, 2];
    assert_eq!(balloon.save().unwrap(), [&head[..], &[0, 1, 7], &[0; 14]].concat());
}

/// The other queues have other numbers, also for a driver without statistics.
#[test]
fn statistics_shift_the_other_queues() {
    let config = with_interval(LONG_S);
    let wanted = |driver: &mut Driver, _| vec![filled(driver, 1)];
    for queue in [HINT + 1, REPORT + 1] {
        let make = || make_with(&config).0;
        conformance::check(&TestedDevice { make: &make, queue, request: &wanted });
    }
    for (features, report) in [(!0, REPORT + 1), (!STATISTICS, REPORT)] {
        let (balloon, control) = make_with(&config);
        let mut driver = Driver::new(balloon);
        driver.start(features);
        let piece = filled(&mut driver, 2);
        driver.request(report, &[piece]);
        assert!(is(&driver, piece, 0));
        assert_eq!(control.stats().counts.reports.bytes, 2 * PAGE_SIZE);
    }
}
