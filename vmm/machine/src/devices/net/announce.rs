//! When an interface says where it is: several times after it has moved, because a switch may not
//! yet forward what comes from a port that was only now connected.

use std::io;
use std::time::Duration;

use crate::devices::timer::Timer;

/// Waits before the announcements that follow the first one, which is made at once, and whether the
/// driver is asked to announce itself, too. Not at first: it has packets to answer that waited for
/// the move, and its address, which is what switches need, is in ours. Nor twice: a guest whose
/// kernel is slow is silent for as long as that takes it.
const STEPS: [(Duration, bool); 5] = [
    (Duration::from_millis(10), false),
    (Duration::from_millis(40), false),
    (Duration::from_millis(100), false),
    (Duration::from_millis(250), true),
    (Duration::from_millis(600), false),
];

/// A series of announcements.
#[derive(Debug)]
pub(super) struct Announcements {
    /// A read of it never waits: what said that it is ready may be older than its last setting.
    timer: Timer,
    /// The step that is waited for; `None` if nothing is to be announced.
    step: Option<usize>,
}

impl Announcements {
    pub(super) fn new() -> io::Result<Self> {
        Ok(Self { timer: Timer::new()?, step: None })
    }

    /// What is ready when another one is due.
    pub(super) fn timer(&self) -> &Timer {
        &self.timer
    }

    /// Begins a series: the first announcement is due now.
    pub(super) fn begin(&mut self) -> io::Result<()> {
        self.step = Some(0);
        self.timer.set(STEPS[0].0)?;
        Ok(())
    }

    pub(super) fn end(&mut self) {
        self.step = None;
        // A timer that cannot be stopped finds nothing to announce.
        let _ = self.timer.clear();
    }

    /// The timer was ready: if an announcement is due, whether the driver is asked for one, too.
    pub(super) fn tick(&mut self) -> io::Result<Option<bool>> {
        if !self.timer.take()? {
            // The series has ended, or begun again, since.
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
    use super::*;

    fn pass(more: Duration) {
        std::thread::sleep(more + Duration::from_millis(5));
    }

    #[test]
    fn a_series_that_has_ended_is_not_waited_for() {
        let mut announcements = Announcements::new().unwrap();
        announcements.begin().unwrap();
        pass(STEPS[0].0);
        // It is ready, which is heard of only after a reset of the device, or after another move.
        announcements.end();
        assert_eq!(announcements.tick().unwrap(), None);
        announcements.begin().unwrap();
        assert_eq!(announcements.tick().unwrap(), None);
        pass(STEPS[0].0);
        assert_eq!(announcements.tick().unwrap(), Some(STEPS[0].1));
        assert_eq!(announcements.tick().unwrap(), None);
        pass(STEPS[1].0);
        assert_eq!(announcements.tick().unwrap(), Some(STEPS[1].1));
    }
}
