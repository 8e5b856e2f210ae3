//! The destination of a migration: `receive` and its phases.
//!
//! The caller's thread owns the connection and the guest that is being built. The guest runs only
//! with a permit of the state machine (`protocol::two_phase`), which needs a recorded decision.

mod admission;
mod building;
mod channels;
mod copies;
mod hand_over;
mod host;
mod inspect;
mod listener;
mod local;
mod memory_writer;
mod options;
mod pace;
mod prealloc;
mod precopy;
mod receive;
mod security;
mod session;
mod setup;

use std::sync::Arc;

use driftline_guest::GuestFactory;

use crate::control::{Phase, ReceiveControl};
use crate::error::{Cause, ReceiveError};
use crate::report::ReceiveReport;
use crate::transport::listener::Listener;
use host::{ReceiveFailed, ReceiveHost};
pub use inspect::{StreamSummary, inspect};
pub use listener::Responder;
pub use options::{ReceiveOptions, YIELD_LIMIT};

/// A guest that has arrived.
#[derive(Debug)]
pub struct Received<G: ?Sized> {
    /// The guest, which runs if it ran at its source.
    pub guest: Arc<G>,
    /// Report of the migration.
    pub report: ReceiveReport,
    /// Answers the source's questions. Keep it as long as the guest: without it, a source that did
    /// not receive RUNNING stays in doubt, unless both have the same memory.
    pub responder: Responder,
}

/// Waits on `listener` for one source and receives its guest, which `factory` builds.
///
/// Callers that are not a source, or whose guest cannot be built here, are refused, and `receive`
/// continues to wait; `control.progress()` counts them. A migration that fails before PREPARED
/// leaves nothing here: its source keeps the guest and receives the reason, and `receive` continues
/// to wait unless [`ReceiveOptions::once`] is set. A failure after PREPARED ends `receive`: the
/// decision that the guest never runs here is made durable, and the source is informed within
/// [`ReceiveOptions::answer_timeout`].
///
/// Costs one thread for the listener, and a bounded number of threads for connections.
///
/// # Errors
///
/// [`ReceiveError`] has the phase that failed, the cause, and whether PREPARED may have been sent.
pub fn receive<F: GuestFactory + ?Sized + 'static>(
    listener: Listener,
    factory: Arc<F>,
    options: &ReceiveOptions,
    control: &Arc<ReceiveControl>,
) -> Result<Received<F::Guest>, ReceiveError> {
    let result = host::open(listener, factory, options, control).and_then(|(host, responder)| {
        let (guest, report) = migrate(&host)?;
        Ok(Received { guest, report, responder })
    });
    let result = result.map_err(|failed| {
        let cause = match control.stop.is_cancelled() {
            true => Cause::Cancelled,
            false => failed.cause,
        };
        let phase = control.progress().phase;
        ReceiveError { phase, cause, was_prepared: failed.was_prepared }
    });
    control.update(|p| p.phase = Phase::Finished);
    match &result {
        Ok(r) => tracing::info!(vm = %r.report.vm_id, running = r.report.running, "received"),
        // The caller reports it.
        Err(e) => tracing::info!("{e}"),
    }
    result
}

/// Runs the migration, one phase a line.
fn migrate<F: GuestFactory + ?Sized + 'static>(
    host: &ReceiveHost<'_, F>,
) -> Result<(Arc<F::Guest>, ReceiveReport), ReceiveFailed> {
    let (arrival, prepared) = loop {
        let mut arrival = host.phase(Phase::Waiting, || host.welcome())?;
        let complete = host.phase(Phase::Precopy, || host.assemble(&mut arrival));
        let restored = complete.and_then(|complete| {
            host.phase(Phase::SwitchOver, || host.restore(&mut arrival, complete))
        });
        match restored {
            Ok(prepared) => break (arrival, prepared),
            Err(failed) => host.wait_on(arrival, failed)?,
        }
    };
    host.phase(Phase::HandOver, || host.hand_over(arrival, prepared))
}
