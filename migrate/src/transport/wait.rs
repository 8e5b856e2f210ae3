//! Waits of one thread for another, which may never answer.

use std::io;
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::time::{Duration, Instant};

/// Longest delay until a wait notices a stop request.
pub(crate) const SLICE: Duration = Duration::from_millis(50);

/// Waits for an answer of another thread. Calls `check` after each [`SLICE`] without one, and gives
/// up when it fails. Fails with `ended` if the thread has ended without an answer.
pub(crate) fn answer<T, E>(
    from: &Receiver<T>,
    ended: impl FnOnce() -> E,
    mut check: impl FnMut() -> Result<(), E>,
) -> Result<T, E> {
    loop {
        match from.recv_timeout(SLICE) {
            Ok(answer) => return Ok(answer),
            Err(RecvTimeoutError::Disconnected) => return Err(ended()),
            Err(RecvTimeoutError::Timeout) => check()?,
        }
    }
}

/// Sleeps until `until`, or until `over` returns a value, which it returns. Calls `over` first, and
/// then every [`SLICE`].
pub(crate) fn sleep_until<T>(until: Instant, mut over: impl FnMut() -> Option<T>) -> Option<T> {
    loop {
        if let Some(value) = over() {
            return Some(value);
        }
        let left = until.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return None;
        }
        std::thread::sleep(left.min(SLICE));
    }
}

/// Returns the error of a peer that has made no progress for `time`.
pub(super) fn timed_out(verb: &str, time: Duration) -> io::Error {
    silent(&format!("{verb} nothing"), time)
}

/// Returns the error of a peer that has not answered a connection for `time`.
pub(super) fn unanswered(time: Duration) -> io::Error {
    silent("did not answer", time)
}

fn silent(what: &str, time: Duration) -> io::Error {
    let text = format!("the peer {what} for {:.1} s", time.as_secs_f64());
    io::Error::new(io::ErrorKind::TimedOut, text)
}

/// Returns the error of a wait that a stop request has ended.
pub(super) fn cancelled() -> io::Error {
    io::Error::other("cancelled")
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;

    #[test]
    fn answer_is_returned_unless_its_thread_ended() {
        let (sender, answers) = mpsc::channel();
        sender.send(7).unwrap();
        assert_eq!(answer(&answers, || "ended", || Err("given up")), Ok(7));
        assert_eq!(answer(&answers, || "ended", || Err("given up")), Err("given up"));
        drop(sender);
        assert_eq!(answer(&answers, || "ended", || Ok(())), Err("ended"));
    }

    #[test]
    fn sleep_ends_early_for_a_value() {
        let far = Instant::now() + Duration::from_secs(3600);
        let mut left = 3;
        let value = sleep_until(far, || {
            left -= 1;
            (left == 0).then_some("over")
        });
        assert_eq!(value, Some("over"));
        assert_eq!(sleep_until(Instant::now(), || None::<()>), None);
    }
}
