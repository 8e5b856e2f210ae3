//! When an interface says where it is: several times after it has moved, because a switch may not
//! yet forward what comes from a port that was only now connected.

use std::io;
use std::time::Duration;

use vmm_sys_util::timerfd::TimerFd;

/// Waits before the announcements that follow the first one, which is made at once, and whether the
/// driver is asked to announce itself, too. Not at first: it has packets to answer that waited for
/// the move, and its address, which is what switches need, is in ours. At last again, should an answer
/// to the first time have been lost.
const STEPS: [(Duration, bool); 5] = [
    (Duration::from_millis(10), false),
    (Duration::from_millis(40), false),
    (Duration::from_millis(100), true),
    (Duration::from_millis(250), false),
    (Duration::from_millis(600), true),
];

/// A series of announcements.
#[derive(Debug)]
pub(super) struct Announcements {
    timer: TimerFd,
    /// The step that is waited for; `None` if nothing is to be announced.
    step: Option<usize>,
}

impl Announcements {
    pub(super) fn new() -> io::Result<Self> {
        Ok(Self { timer: TimerFd::new()?, step: None })
    }

    /// What is ready when another one is due.
    pub(super) fn timer(&self) -> &TimerFd {
        &self.timer
    }

    /// Begins a series: the first announcement is due now.
    pub(super) fn begin(&mut self) -> io::Result<()> {
        self.step = Some(0);
        self.timer.reset(STEPS[0].0, None)?;
        Ok(())
    }

    pub(super) fn end(&mut self) {
        self.step = None;
        // A timer that cannot be stopped finds nothing to announce.
        let _ = self.timer.clear();
    }

    /// The timer is ready: if an announcement is due, whether the driver is asked for one, too.
    pub(super) fn tick(&mut self) -> io::Result<Option<bool>> {
        self.timer.wait()?;
        let Some(now) = self.step else { return Ok(None) };
        match STEPS.get(now + 1) {
            Some((wait, _)) => {
                self.step = Some(now + 1);
                self.timer.reset(*wait, None)?;
            }
            None => self.end(),
        }
        Ok(STEPS.get(now).map(|(_, ask_driver)| *ask_driver))
    }
}
