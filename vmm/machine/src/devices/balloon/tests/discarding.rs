//! Tests of the operator's runs of hints, whose frames are discarded.

use super::*;

fn status(control: &BalloonControl) -> (u32, Option<u32>) {
    let status = control.hinting_status().unwrap();
    (status.host_command, status.guest_command)
}

#[test]
fn hints_of_the_operators_run_are_discarded() {
    let (mut driver, control) = started();
    assert_eq!(status(&control), (STOP, None));
    let free = [filled(&mut driver, 3), filled(&mut driver, 2), filled(&mut driver, 1)];
    control.start_hinting(true).unwrap();
    let command = wait_command(&driver, STOP);
    assert_eq!(status(&control), (command, None));
    // Hints of another run.
    hint(&mut driver, command + 1, &free[2..], false);
    hint(&mut driver, command, &free[..2], true);
    assert_eq!(driver.read(COMMAND), DONE, "the driver may have its frames back");
    assert_eq!(status(&control), (DONE, Some(STOP)));
    assert!(is(&driver, free[0], 0) && is(&driver, free[1], 0) && is(&driver, free[2], 0xa5));
    let stats = control.stats();
    let hints = DiscardCounts { pieces: 2, bytes: 5 * PAGE_SIZE, failures: 0 };
    assert_eq!((stats.counts.hints, stats.discarded_bytes), (hints, 5 * PAGE_SIZE));
    // After the run nothing is discarded.
    hint(&mut driver, command, &free[2..], false);
    assert!(is(&driver, free[2], 0xa5));
}

#[test]
fn unacknowledged_run_ends_when_stopped() {
    let (mut driver, control) = started();
    let free = [filled(&mut driver, 1), filled(&mut driver, 1)];
    control.start_hinting(false).unwrap();
    let command = wait_command(&driver, STOP);
    hint(&mut driver, command, &free[..1], true);
    assert_eq!((driver.read(COMMAND), status(&control)), (command, (command, Some(STOP))));
    driver.request(HINT, &free[1..]);
    assert!(is(&driver, free[0], 0) && is(&driver, free[1], 0xa5));
    control.stop_hinting().unwrap();
    assert_eq!(wait_command(&driver, command), DONE);
    assert_eq!(status(&control), (DONE, Some(STOP)));
    control.start_hinting(true).unwrap();
    assert!(wait_command(&driver, DONE) > command, "a number of its own");
}

#[test]
fn operators_run_goes_before_copies() {
    let (mut driver, control) = started();
    let free = filled(&mut driver, 4);
    let copier = thread::spawn({
        let control = control.clone();
        move || control.free_frames(TIMEOUT)
    });
    let for_copy = wait_command(&driver, STOP);
    hint(&mut driver, for_copy, &[free], false);
    control.start_hinting(false).unwrap();
    let hinted: Vec<FrameRun> = copier.join().unwrap().iter().collect();
    assert_eq!(hinted, frames_of(&[free]), "the copy gets what was hinted until then");
    let command = wait_command(&driver, for_copy);
    assert!(control.free_frames(TIMEOUT).is_empty());
    assert_eq!(driver.read(COMMAND), command, "the run continues");
    hint(&mut driver, command, &[free], false);
    assert!(is(&driver, free, 0));
}

#[test]
fn move_ends_the_operators_run() {
    let (mut driver, control) = started();
    let free = filled(&mut driver, 1);
    control.start_hinting(false).unwrap();
    let command = wait_command(&driver, STOP);
    hint(&mut driver, command, &[], false);
    driver.quiesce();
    let state = driver.transport.save().unwrap();
    let (balloon, elsewhere) = make();
    let moved = Transport::spawn("moved", balloon, driver.memory.ram().clone()).unwrap();
    moved.restore(state).unwrap();
    let mut driver = driver.moved_to(moved);
    driver.transport.resume();
    assert_eq!(wait_command(&driver, command), DONE);
    assert_eq!(status(&elsewhere), (DONE, Some(command)));
    hint(&mut driver, command, &[free], false);
    assert!(is(&driver, free, 0xa5));
    elsewhere.start_hinting(true).unwrap();
    assert!(wait_command(&driver, DONE) > command, "a number of its own");
}

#[test]
fn hinting_needs_a_configuration_and_a_driver() {
    let (balloon, control) = make_with(&BalloonConfig { hinting: false, ..Default::default() });
    let _driver = Driver::started(balloon);
    for refused in
        [control.start_hinting(true), control.stop_hinting(), control.hinting_status().map(|_| ())]
    {
        assert_eq!(refused, Err(HintingError::Off));
    }
    let (balloon, control) = make();
    let mut driver = Driver::new(balloon);
    assert_eq!(control.start_hinting(true), Err(HintingError::NotActive));
    assert_eq!(control.stop_hinting(), Err(HintingError::NotActive));
    assert_eq!(status(&control), (STOP, None));
    // A driver without hinting, and one that poisons its memory.
    for (features, poison) in [(!FREE_PAGE_HINT, 0), (!0, 0xaaaa_aaaa)] {
        driver.start(features);
        driver.write(POISON, poison);
        control.start_hinting(true).unwrap();
        let end = Instant::now() + TIMEOUT;
        while status(&control).0 != STOP {
            assert!(Instant::now() < end, "a run that no driver serves");
            thread::sleep(Duration::from_micros(200));
        }
    }
    driver.write(VIRTIO_MMIO_STATUS, 0);
    assert_eq!(status(&control), (STOP, None));
    assert_eq!(control.stop_hinting(), Err(HintingError::NotActive));
}
