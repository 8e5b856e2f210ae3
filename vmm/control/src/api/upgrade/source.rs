//! The guest's process: offers the guest to the next process, and hands it over.

use std::io::{stderr, stdin, stdout};
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::Arc;

use driftline_migrate::SendReport;
use tokio::runtime::Handle;

use super::offer::{AcceptedOffer, GuestOffer, OfferError, Offered, OfferedFiles};
use super::run;
use crate::api::app::App;
use crate::api::process_line::ProcessLine;
use crate::api::relay::Relay;
use crate::jobs::{JobError, Jobs, OfferedRun};

/// Why the guest stays in its process.
#[derive(Debug, thiserror::Error)]
pub(crate) enum UpgradeError {
    /// This process cannot be replaced.
    #[error("this process cannot be replaced: {0}")]
    NotPossible(&'static str),
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
    let line = app.process_line().map_err(UpgradeError::NotPossible)?;
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
    let offer = UnixStream::connect(socket)?;
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
