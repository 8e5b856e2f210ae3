//! State that all phases of a migration share at its destination, and the error of a phase.

use std::sync::Arc;
use std::sync::mpsc::Receiver;
use std::time::Instant;

use driftline_guest::GuestFactory;

use super::building::GuestBuilder;
use super::listener::{self, Incoming, Responder};
use super::options::ReceiveOptions;
use super::session::Session;
use crate::control::{Phase, ReceiveControl};
use crate::error::Cause;
use crate::journal::Records;
use crate::report::ms;
use crate::transport::listener::Listener;

/// The failure of a phase, and whether PREPARED may have been sent.
#[derive(Debug)]
pub(super) struct ReceiveFailed {
    pub(super) cause: Cause,
    pub(super) was_prepared: bool,
}

impl<E: Into<Cause>> From<E> for ReceiveFailed {
    /// Converts a failure before PREPARED.
    fn from(e: E) -> Self {
        Self { cause: e.into(), was_prepared: false }
    }
}

/// State that all phases share.
pub(super) struct ReceiveHost<'a, F: GuestFactory + ?Sized> {
    pub(super) builder: GuestBuilder<F>,
    pub(super) options: &'a ReceiveOptions,
    /// Whether the receiver has one connection, and no other one can arrive.
    pub(super) is_single: bool,
    pub(super) control: &'a ReceiveControl,
    pub(super) session: Arc<Session>,
    pub(super) incoming: Receiver<Incoming>,
}

/// Opens the records and starts the listener.
pub(super) fn open<'a, F: GuestFactory + ?Sized + 'static>(
    listener: Listener,
    factory: Arc<F>,
    options: &'a ReceiveOptions,
    control: &'a Arc<ReceiveControl>,
) -> Result<(ReceiveHost<'a, F>, Responder), ReceiveFailed> {
    options.check_protection(&listener)?;
    if options.tls.is_none() && listener.check_stays_here().is_err() {
        tracing::warn!(
            "insecure: every host that reaches {listener} can send a guest, and every host on the \
             way can read and change one"
        );
    }
    let is_single = listener.is_single();
    let records = Records::open(&options.records)?;
    records.sweep();
    let session = Arc::new(Session::new(records));
    let (responder, incoming) = listener::open(listener, session.clone(), control.clone(), options)
        .map_err(|cause| Cause::System { what: "listening", cause })?;
    let builder = GuestBuilder::new(factory, options.build_limit, options.disk_limit);
    Ok((ReceiveHost { builder, options, is_single, control, session, incoming }, responder))
}

impl<F: GuestFactory + ?Sized + 'static> ReceiveHost<'_, F> {
    /// Whether only one source is accepted.
    pub(super) fn accepts_one(&self) -> bool {
        self.options.once || self.is_single
    }

    /// Runs a phase, and shows it in the log and in the progress.
    pub(super) fn phase<T>(
        &self,
        phase: Phase,
        work: impl FnOnce() -> Result<T, ReceiveFailed>,
    ) -> Result<T, ReceiveFailed> {
        let begun = Instant::now();
        tracing::info!(?phase, "begin");
        self.control.update(|p| p.phase = phase);
        let result = work();
        let (ms, ok) = (ms(begun.elapsed()), result.is_ok());
        tracing::info!(?phase, ms, ok, "end");
        result
    }
}
