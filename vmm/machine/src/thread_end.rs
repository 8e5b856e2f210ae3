//! Joins threads that storage or a defect may block for ever.

use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

/// Interval between two checks whether a thread has ended.
const END_CHECK_INTERVAL: Duration = Duration::from_micros(100);

/// Joins a thread that was told to end, and returns its result. Returns `None` if it has not ended
/// at `deadline`; the thread is then abandoned.
pub(crate) fn join_until(thread: JoinHandle<()>, deadline: Instant) -> Option<thread::Result<()>> {
    while !thread.is_finished() && Instant::now() < deadline {
        thread::sleep(END_CHECK_INTERVAL);
    }
    thread.is_finished().then(|| thread.join())
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;
    use crate::testing::soon;

    #[test]
    fn thread_that_hangs_is_left_behind() {
        let (release, gate) = mpsc::channel::<()>();
        let hanging = thread::spawn(move || {
            let _ = gate.recv();
        });
        assert!(join_until(hanging, Instant::now() + Duration::from_millis(1)).is_none());
        drop(release);
        assert!(matches!(join_until(thread::spawn(|| {}), soon()), Some(Ok(()))));
        assert!(matches!(join_until(thread::spawn(|| panic!("as planned")), soon()), Some(Err(_))));
    }
}
