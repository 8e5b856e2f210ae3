//! Schedule of an interface's announcements: it repeats them several times after a move, because a
//! switch may not yet forward frames from a port that was connected just now.

use std::io;
use std::time::Duration;

use crate::devices::timer::Timer;

/// For each announcement after the first one, which is sent immediately: the wait before it, and
/// whether the driver is asked to announce itself too.
///
/// The driver is not asked at first. It has packets to answer that waited for the move, and the
/// device's own announcement contains the MAC address, which is what switches need. It is not asked
/// twice either: announcing keeps a guest with a slow kernel silent for some time.
const STEPS: [(Duration, bool); 5] = [
    (Duration::from_millis(10), false),
    (Duration::from_millis(40), false),
    (Duration::from_millis(100), false),
    (Duration::from_millis(250), true),
    (Duration::from_millis(600), false),
];

/// Series of announcements.
#[derive(Debug)]
pub(super) struct Announcements {
    /// Timer of the next step. Its read never blocks, because a readiness event may be older than
    /// its last setting.
    timer: Timer,
    /// Step that the timer is set for, or `None` if nothing is to be announced.
    step: Option<usize>,
}

impl Announcements {
    pub(super) fn new() -> io::Result<Self> {
        Ok(Self { timer: Timer::new()?, step: None })
    }

    /// Returns the timer, which is readable when an announcement is due.
    pub(super) fn timer(&self) -> &Timer {
        &self.timer
    }

    /// Starts a series. The caller sends the first announcement itself.
    pub(super) fn begin(&mut self) -> io::Result<()> {
        self.step = Some(0);
        self.timer.set(STEPS[0].0)?;
        Ok(())
    }

    pub(super) fn end(&mut self) {
        self.step = None;
        // If the timer cannot be cleared, its expiry finds nothing to announce.
        let _ = self.timer.clear();
    }

    /// Handles a readiness event of the timer. If an announcement is due, returns whether the
    /// driver is asked to announce itself too.
    pub(super) fn tick(&mut self) -> io::Result<Option<bool>> {
        if !self.timer.take()? {
            // The series has ended, or started again, since the event.
            return Ok(None);
        }
        let Some(now) = self.step else { return Ok(None) };
        match STEPS.get(now + 1) {
            Some((wait, _)) => {
                self.step = Some(now + 1);
                self.timer.set(*wait)?;
            }
            None => self.end(),
        }
        Ok(STEPS.get(now).map(|(_, ask_driver)| *ask_driver))
    }
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use super::*;

    /// Waits for the next announcement. Returns whether the driver is asked to announce itself too,
    /// and a moment before the timer was set again.
    fn next(announcements: &mut Announcements) -> (bool, Instant) {
        let end = Instant::now() + Duration::from_secs(20);
        loop {
            let before = Instant::now();
            if let Some(ask_driver) = announcements.tick().unwrap() {
                return (ask_driver, before);
            }
            assert!(before < end, "it announces nothing");
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// Checks that nothing is due. Returns `None` if `wait` has passed since `began`: the host was
    /// too slow to tell.
    fn nothing_is_due(
        announcements: &mut Announcements,
        began: Instant,
        wait: Duration,
    ) -> Option<()> {
        let due = announcements.tick().unwrap();
        let in_time = began.elapsed() < wait;
        assert!(due.is_none() || !in_time, "it announces too early");
        in_time.then_some(())
    }

    fn check_series() -> Option<()> {
        let mut announcements = Announcements::new().unwrap();
        announcements.begin().unwrap();
        std::thread::sleep(STEPS[0].0 + Duration::from_millis(5));
        // The timer has expired, but the event is read only after a reset of the device or after
        // another move.
        announcements.end();
        assert_eq!(announcements.tick().unwrap(), None);
        let began = Instant::now();
        announcements.begin().unwrap();
        nothing_is_due(&mut announcements, began, STEPS[0].0)?;
        let (ask_driver, began) = next(&mut announcements);
        assert_eq!(ask_driver, STEPS[0].1);
        nothing_is_due(&mut announcements, began, STEPS[1].0)?;
        assert_eq!(next(&mut announcements).0, STEPS[1].1);
        Some(())
    }

    #[test]
    fn ended_series_announces_nothing() {
        assert!((0..100).any(|_| check_series().is_some()), "the host is too slow for this test");
    }
}
