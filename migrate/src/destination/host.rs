//! What all phases of a migration share at its destination, and how a phase fails.

use std::net::TcpListener;
use std::sync::Arc;
use std::sync::mpsc::Receiver;
use std::time::Instant;

use driftline_guest::GuestFactory;

use super::building::Builder;
use super::listener::{self, Incoming, Responder};
use super::options::ReceiveOptions;
use super::session::Session;
use crate::control::{Phase, ReceiveControl};
use crate::error::Cause;
use crate::journal::Records;
use crate::report::ms;

#[derive(Debug)]
pub(super) struct Failed {
    pub(super) cause: Cause,
    pub(super) was_prepared: bool,
}

impl<E: Into<Cause>> From<E> for Failed {
    /// For failures before PREPARED.
    fn from(e: E) -> Self {
        Self { cause: e.into(), was_prepared: false }
    }
}

/// What all phases share.
pub(super) struct Host<'a, F: GuestFactory + ?Sized> {
    pub(super) builder: Builder<F>,
    pub(super) options: &'a ReceiveOptions,
    pub(super) control: &'a ReceiveControl,
    pub(super) session: Arc<Session>,
    pub(super) callers: Receiver<Incoming>,
}

pub(super) fn open<'a, F: GuestFactory + ?Sized + 'static>(
    listener: TcpListener,
    factory: Arc<F>,
    options: &'a ReceiveOptions,
    control: &'a Arc<ReceiveControl>,
) -> Result<(Host<'a, F>, Responder), Failed> {
    let records = Records::open(&options.records)?;
    records.sweep_settled();
    let session = Arc::new(Session::new(records));
    let (progress_timeout, handshake) = (options.progress_timeout, options.handshake_timeout);
    let (responder, callers) =
        listener::open(listener, session.clone(), control.clone(), progress_timeout, handshake)
            .map_err(|cause| Cause::System { what: "listening", cause })?;
    let builder = Builder::new(factory, options.build_limit, options.disk_limit);
    Ok((Host { builder, options, control, session, callers }, responder))
}

impl<F: GuestFactory + ?Sized + 'static> Host<'_, F> {
    pub(super) fn phase<T>(
        &self,
        phase: Phase,
        work: impl FnOnce() -> Result<T, Failed>,
    ) -> Result<T, Failed> {
        let begun = Instant::now();
        tracing::info!(?phase, "begin");
        self.control.update(|p| p.phase = phase);
        let result = work();
        let (ms, ok) = (ms(begun.elapsed()), result.is_ok());
        tracing::info!(?phase, ms, ok, "end");
        result
    }
}
