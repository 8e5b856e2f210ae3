//! A checkpoint run on its way to the next process:
//!
//! ```text
//! u32 length, little-endian | JSON of RunPosition     before the guest moves
//! u32 length, little-endian | JSON of MovedRun        after that
//! ```

use std::io::{self, Read};
use std::net::Shutdown;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use serde::Serialize;
use serde::de::DeserializeOwned;

use super::offer::{OfferError, read, write};
use crate::jobs::{MovedRun, OfferedRun, RunPosition, SuspendedRun};

/// Upper bound on one write.
const WRITE_LIMIT: Duration = Duration::from_secs(3);
/// Upper bound on receiving a run, for which requests wait: its store has to be closed first.
const RECEIVE_LIMIT: Duration = Duration::from_secs(6);
/// Upper bound on one message, in bytes: each range of changed pages takes about 35.
const MAX_BYTES: u32 = 256 << 20;

/// Sends the position of `run` to the next process, in case this process ends before it sends more.
pub(super) fn send_position(to: &UnixStream, run: &SuspendedRun) {
    if let Err(e) = send_json(to, &run.position()) {
        tracing::debug!("the position of the checkpoint run was not sent: {e}");
    }
}

/// Sends `run` to the next process, which has the guest. If that fails, the run continues there
/// with a full checkpoint.
pub(super) fn send(to: &UnixStream, run: &SuspendedRun) {
    let sent = run.move_away().map_err(io::Error::other).and_then(|run| send_json(to, &run));
    if let Err(e) = sent {
        tracing::warn!("the checkpoint run continues with a full checkpoint: {e}");
        // The next process need not wait.
        let _ = to.shutdown(Shutdown::Both);
    }
}

fn send_json(to: &UnixStream, value: &impl Serialize) -> io::Result<()> {
    let json = serde_json::to_vec(value)?;
    if json.len() > MAX_BYTES as usize {
        let bytes = json.len();
        let why = format!("a message of {bytes} bytes exceeds the limit of {MAX_BYTES} bytes");
        return Err(io::Error::other(why));
    }
    to.set_write_timeout(Some(WRITE_LIMIT))?;
    write(to, &json)
}

/// Receives the `offered` run over `from`. If the previous process does not send all of the run,
/// the run continues without the rest.
pub fn receive_run(from: OwnedFd, offered: &OfferedRun) -> MovedRun {
    let mut from = TimedStream { stream: from.into(), end: Instant::now() + RECEIVE_LIMIT };
    let position = receive_json(&mut from).unwrap_or_else(|e| {
        tracing::warn!("nothing of the checkpoint run has arrived, and it begins anew: {e}");
        offered.begin()
    });
    receive_json(&mut from)
        .and_then(|run: MovedRun| match run.is_sound() {
            true => Ok(run),
            false => Err(io::Error::other("its reports are malformed").into()),
        })
        .unwrap_or_else(|e| {
            tracing::warn!("the checkpoint run continues with a full checkpoint: {e}");
            RunPosition::without_chain(position)
        })
}

fn receive_json<T: DeserializeOwned>(from: &mut TimedStream) -> Result<T, OfferError> {
    Ok(serde_json::from_slice(&read(from, MAX_BYTES)?)?)
}

/// A stream that is read until `end`.
struct TimedStream {
    stream: UnixStream,
    end: Instant,
}

impl Read for TimedStream {
    fn read(&mut self, to: &mut [u8]) -> io::Result<usize> {
        let left = self.end.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(io::ErrorKind::TimedOut.into());
        }
        self.stream.set_read_timeout(Some(left))?;
        self.stream.read(to)
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    #[test]
    fn nothing_is_read_after_the_end() {
        let (stream, mut peer) = UnixStream::pair().unwrap();
        peer.write_all(&[7]).unwrap();
        let mut from = TimedStream { stream, end: Instant::now() };
        assert_eq!(from.read(&mut [0]).unwrap_err().kind(), io::ErrorKind::TimedOut);
        from.end += RECEIVE_LIMIT;
        assert_eq!(from.read(&mut [0]).unwrap(), 1);
    }
}
