//! A checkpoint run on its way to the next process: JSON up to the end of the stream, `null` if the
//! run has ended meanwhile.

use std::io::{self, BufReader, BufWriter, Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::time::Duration;

use crate::jobs::{MovedRun, OfferedRun, RestingRun};

/// Upper bound on one read or write.
const IO_LIMIT: Duration = Duration::from_secs(5);
/// Upper bound on a run, in bytes: what has changed of a guest takes at most some 20 bytes for each
/// run of pages.
const MAX_BYTES: u64 = 1 << 30;

/// Sends `run` to the next process, which has the guest. If that fails, the run begins there with a
/// full checkpoint.
pub(super) fn send(to: UnixStream, run: &RestingRun) {
    let sent = run.move_away().map_err(io::Error::other).and_then(|moved| {
        to.set_write_timeout(Some(IO_LIMIT))?;
        let mut to = BufWriter::new(to);
        serde_json::to_writer(&mut to, &moved)?;
        to.flush()
    });
    if let Err(e) = sent {
        tracing::warn!("the checkpoint run begins anew in the next process: {e}");
    }
}

/// Receives the `offered` run over `from`; `None` if it has ended. If the previous process does not
/// send it, it begins anew.
pub fn receive_run(from: OwnedFd, offered: &OfferedRun) -> Option<MovedRun> {
    let from = UnixStream::from(from);
    let received = from.set_read_timeout(Some(IO_LIMIT)).and_then(|()| {
        let from = BufReader::new(from.take(MAX_BYTES));
        Ok(serde_json::from_reader(from)?)
    });
    received.unwrap_or_else(|e| {
        tracing::warn!("the checkpoint run begins anew, with a full checkpoint: {e}");
        Some(offered.anew())
    })
}
