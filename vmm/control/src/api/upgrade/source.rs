//! The guest's process: offers the guest to the next process, and hands it over.

use std::io::{self, stderr, stdin, stdout};
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::Arc;

use driftline_migrate::SendReport;
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, socket_with};
use tokio::runtime::Handle;

use super::offer::{AcceptedOffer, GuestOffer, OfferError, Offered, OfferedFiles};
use super::run;
use crate::api::app::App;
use crate::api::process_line::{NoProcessLine, ProcessLine};
use crate::api::relay::Relay;
use crate::jobs::{JobError, Jobs, OfferedRun};

/// Why the guest stays in its process.
#[derive(Debug, thiserror::Error)]
pub(crate) enum UpgradeError {
    /// This process cannot be replaced.
    #[error("this process cannot be replaced: {0}")]
    NotPossible(#[from] NoProcessLine),
    /// The next process does not take the guest.
    #[error("offering the guest to the process at {socket} failed: {cause}")]
    GuestOffer {
        /// Path of its socket.
        socket: String,
        /// The reason.
        #[source]
        cause: OfferError,
    },
    /// The hand-over cannot begin.
    #[error(transparent)]
    Job(#[from] JobError),
    /// The hand-over failed. The text says why, and where the guest is.
    #[error("{0}")]
    HandOver(String),
}

/// Holds the API's requests until it is dropped, unless they have moved.
struct HeldRequests<'r>(&'r Relay);

impl<'r> HeldRequests<'r> {
    fn hold(relay: &'r Relay) -> Self {
        relay.hold();
        Self(relay)
    }
}

impl Drop for HeldRequests<'_> {
    fn drop(&mut self) {
        self.0.release();
    }
}

/// Hands the guest over to the process that listens at `socket`. Blocks until that is done or has
/// failed.
pub(super) fn upgrade(
    app: &App,
    jobs: &Arc<Jobs>,
    socket: &Path,
) -> Result<SendReport, UpgradeError> {
    let line = app.process_line()?;
    let upgrade = jobs.begin_upgrade()?;
    let run = upgrade.offered_run();
    let next = offer(app, jobs, line, run, socket).map_err(|cause| UpgradeError::GuestOffer {
        socket: socket.display().to_string(),
        cause,
    })?;
    let suspended = upgrade.suspend_run()?;
    let run = next.run.as_ref().zip(suspended.as_ref());
    if let Some((to, run)) = run {
        run::send_position(to, run);
    }
    let held = HeldRequests::hold(app.relay());
    let to = format!("unix:{}", socket.display());
    let moved = || {
        app.relay().move_to(next.connections);
        if let Some((to, run)) = run {
            run::send(to, run);
        }
        next.offer.await_serving();
    };
    let in_doubt = || app.relay().release();
    let handed_over =
        Handle::current().block_on(jobs.hand_over_here(&upgrade, &to, in_doubt, moved));
    drop(held);
    handed_over?.map_err(|failure| UpgradeError::HandOver(failure.message))
}

/// The connections to the next process.
struct NextProcess {
    /// This end of the channel over which the API's connections move.
    connections: UnixStream,
    /// The socket over which a checkpoint run moves.
    run: Option<UnixStream>,
    /// The next process waits for the end of this.
    offer: AcceptedOffer,
}

fn offer(
    app: &App,
    jobs: &Jobs,
    line: ProcessLine,
    run: Option<OfferedRun>,
    socket: &Path,
) -> Result<NextProcess, OfferError> {
    let offer = connect(socket)?;
    let (connections, to_connections) = UnixStream::pair()?;
    let (to_run, run_there) = run.as_ref().map(|_| UnixStream::pair()).transpose()?.unzip();
    let relay = app.relay();
    let (api, metrics) = (relay.socket(), relay.metrics());
    let listener = api.as_ref().map(|api| api.listener()).transpose()?;
    let api_file = api.as_ref().and_then(|api| api.file());
    // The last owner removes the file.
    drop(api);
    let (stdin, stdout, stderr) = (stdin(), stdout(), stderr());
    let files = OfferedFiles {
        standard: [stdin.as_fd(), stdout.as_fd(), stderr.as_fd()],
        api: listener.as_ref().map(AsFd::as_fd),
        metrics: metrics.as_ref().map(AsFd::as_fd),
        connections: to_connections.as_fd(),
        run: run_there.as_ref().map(AsFd::as_fd),
    };
    let offered = Offered { line, api_file, numbers: jobs.numbers(), run };
    let offer = GuestOffer::make(offer, offered, &files)?;
    Ok(NextProcess { connections, run: to_run, offer })
}

/// Connects to the process that listens at `socket`. Does not wait for room in its backlog.
fn connect(socket: &Path) -> Result<UnixStream, OfferError> {
    let address = SocketAddrUnix::new(socket).map_err(io::Error::from)?;
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let fd = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)
        .map_err(io::Error::from)?;
    match rustix::net::connect(&fd, &address) {
        Ok(()) => {}
        Err(Errno::AGAIN) => return Err(OfferError::BacklogFull),
        Err(e) => return Err(io::Error::from(e).into()),
    }
    let stream = UnixStream::from(fd);
    stream.set_nonblocking(false)?;
    Ok(stream)
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixListener;

    use rustix::fs::{OFlags, fcntl_getfl};

    use super::*;

    #[test]
    fn full_backlog_is_refused_without_a_wait() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("next");
        let listener = UnixListener::bind(&path).unwrap();
        rustix::net::listen(&listener, 1).unwrap();
        let waiting: Vec<UnixStream> = (0..8).map_while(|_| connect(&path).ok()).collect();
        assert!(!fcntl_getfl(&waiting[0]).unwrap().contains(OFlags::NONBLOCK));
        assert!(matches!(connect(&path), Err(OfferError::BacklogFull)));
        listener.accept().unwrap();
        connect(&path).unwrap();
    }
}
