//! When an interface says where it is: several times after it has moved, because a switch may not
//! yet forward what comes from a port that was only now connected.

use std::io;
use std::time::Duration;

use vmm_sys_util::timerfd::TimerFd;

/// Waits between the announcements; the first one is made at once.
const WAITS: [Duration; 5] = [
    Duration::from_millis(10),
    Duration::from_millis(40),
    Duration::from_millis(100),
    Duration::from_millis(250),
    Duration::from_millis(600),
];

/// A series of announcements.
#[derive(Debug)]
pub(super) struct Announcements {
    timer: TimerFd,
    /// The waits that are behind; `None` if nothing is to be announced.
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
        self.timer.reset(WAITS[0], None)?;
        Ok(())
    }

    pub(super) fn end(&mut self) {
        self.step = None;
        // A timer that cannot be stopped finds nothing to announce.
        let _ = self.timer.clear();
    }

    /// The timer is ready: whether an announcement is due, and is the last one.
    pub(super) fn tick(&mut self) -> io::Result<Option<bool>> {
        self.timer.wait()?;
        let Some(step) = self.step else { return Ok(None) };
        let next = WAITS.get(step + 1);
        match next {
            Some(wait) => {
                self.step = Some(step + 1);
                self.timer.reset(*wait, None)?;
            }
            None => self.end(),
        }
        Ok(Some(next.is_none()))
    }
}
