//! The destination until pre-copy: waits for a source, and builds its guest.

use std::sync::Arc;
use std::sync::mpsc::RecvTimeoutError;
use std::time::Instant;

use driftline_dirty_tracker::Layout;
use driftline_format::{Header, layout_hash};
use driftline_guest::{
    DriveHead, Guest, GuestFactory, GuestIdentity, HandOver, Lifecycle, LogLimit, NextHost,
    SharedGuest,
};

use super::admission::Stage;
use super::copies::Copies;
use super::host::{ReceiveFailed, ReceiveHost};
use super::listener::{self, AcceptedSource, Incoming};
use super::session::DecidedBy;
use crate::control::{Phase, Progress};
use crate::error::Cause;
use crate::protocol::ids::{Secret, Token};
use crate::protocol::layout::LayoutDifference;
use crate::protocol::message::WireMessage;
use crate::protocol::tag::Tag;
use crate::protocol::two_phase::DestinationEvent;
use crate::transport::link::Link;
use crate::transport::wait::SLICE;
use crate::transport::wire::Wire;

/// A source whose guest is built, paused and zeroed.
pub(super) struct Arrival<G: Guest + ?Sized> {
    pub(super) wire: Wire<Link>,
    pub(super) guest: Arc<G>,
    /// Disks that are copied.
    pub(super) drives: Vec<DriveHead>,
    /// Copies of these disks, removed on drop unless they are kept.
    pub(super) copies: Copies,
    /// Whether the guest is built on the source's memory.
    pub(super) shares_memory: bool,
    pub(super) token: Token,
    /// Time at which the connection was accepted.
    pub(super) since: Instant,
}

/// What a guest is built from.
struct SourceMachine<'s> {
    layout: &'s Layout,
    config: &'s [u8],
    /// Disks that are copied.
    drives: &'s [DriveHead],
    /// The source's memory, if it is handed over by descriptors.
    memory: Option<SharedGuest>,
}

/// A source that does not get READY.
struct RefusedSource {
    cause: Cause,
    /// Copies of its disks, which have to be removed.
    copies: Option<Box<Copies>>,
}

impl From<Cause> for RefusedSource {
    fn from(cause: Cause) -> Self {
        Self { cause, copies: None }
    }
}

impl<F: GuestFactory + ?Sized + 'static> ReceiveHost<'_, F> {
    /// Waits for a source whose guest can be built here.
    pub(super) fn welcome(&self) -> Result<Arrival<F::Guest>, ReceiveFailed> {
        loop {
            match self.incoming.recv_timeout(SLICE) {
                Ok(Incoming::Source(caller)) => {
                    self.control.update(|p| p.phase = Phase::Setup);
                    if let Some(arrival) = self.admit(*caller)? {
                        return Ok(arrival);
                    }
                    self.control.update(|p| p.phase = Phase::Waiting);
                }
                // The channel belongs to an earlier migration.
                Ok(Incoming::Joined(..)) => {}
                // Queued while the session was free. A source that has it now is not affected.
                Ok(Incoming::Left { peer, cause })
                    if !self.accepts_one() || self.session.vacant().is_err() =>
                {
                    listener::log_early_leave(self.control, &peer, &cause);
                }
                Ok(Incoming::Left { peer, cause }) => {
                    let (before, cause) = ("it sent its configuration", Box::new(cause));
                    return Err(Cause::SourceLeft { peer, before, cause }.into());
                }
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => {
                    return Err(self.no_more_connections().into());
                }
            }
            if self.control.stop.is_cancelled() {
                return Err(Cause::Cancelled.into());
            }
        }
    }

    /// Returns why no connection can arrive any more.
    fn no_more_connections(&self) -> Cause {
        match self.is_single {
            true => {
                let refusal = self.control.progress().last_refusal;
                let reason = refusal.unwrap_or_else(|| "it was closed".to_owned());
                Cause::ConnectionRefused { reason }
            }
            false => Cause::ThreadEnded { what: "listening" },
        }
    }

    /// Builds a source's guest, or refuses the source and frees the session. Fails if the source
    /// has left and no other one is accepted.
    fn admit(&self, caller: AcceptedSource) -> Result<Option<Arrival<F::Guest>>, ReceiveFailed> {
        let AcceptedSource { mut wire, header, token, drives, memory, layout, config, since } =
            caller;
        wire.stream_mut().set_stop(self.control.stop.clone());
        let shares_memory = memory.is_some();
        let machine = SourceMachine { layout: &layout, config: &config, drives: &drives, memory };
        let built = self.build(&mut wire, &header, token, machine);
        let (cause, copies) = match built {
            Ok((guest, copies)) => {
                let arrival = Arrival { wire, guest, drives, copies, shares_memory, token, since };
                return Ok(Some(arrival));
            }
            Err(RefusedSource { cause, copies }) => (cause, copies),
        };
        let peer = wire.stream().peer();
        match cause {
            Cause::Wire(cause) if cause.is_loss() && self.accepts_one() => {
                self.session.vacate();
                let (before, cause) = ("its guest was built here", Box::new(cause));
                Err(Cause::SourceLeft { peer, before, cause }.into())
            }
            cause => {
                let reason = reason_for_source(&cause);
                listener::log_refusal(self.control, Stage::Source, &peer, &reason);
                wire.abort(Tag::Refused, &reason);
                // Removed before the session is free, because the next source would have to wait
                // for READY meanwhile.
                drop(copies);
                self.session.vacate();
                Ok(None)
            }
        }
    }

    fn build(
        &self,
        wire: &mut Wire<Link>,
        header: &Header,
        token: Token,
        machine: SourceMachine<'_>,
    ) -> Result<(Arc<F::Guest>, Copies), RefusedSource> {
        let SourceMachine { layout, config, drives, memory } = machine;
        let by = if memory.is_some() { DecidedBy::Claim } else { DecidedBy::Records };
        let vm_id = header.vm_id();
        let (theirs, ours) = (header.layout_hash().into(), layout_hash(layout).into());
        if theirs != ours {
            return Err(Cause::Differs { what: "the layout's hash", ours, theirs }.into());
        }
        let (guest, copies) =
            self.builder.build(vm_id, config, drives, memory, &self.control.stop)?;
        let differs = LayoutDifference::between(guest.layout(), layout);
        let ready = differs.map_or(Ok(()), |d| Err(Cause::LayoutDiffers(d))).and_then(|()| {
            let secret = Secret::random()
                .map_err(|e| Cause::System { what: "making a secret", cause: e.into() })?;
            self.session.begin(token, vm_id, secret, by)?;
            Ok(wire.send(&WireMessage::Ready { site: self.session.site(), secret })?)
        });
        match ready {
            Ok(()) => Ok((guest, copies)),
            Err(cause) => {
                guest.stop(&format!("it was not received: {cause}"));
                let (_drop, _) = self.session.post(DestinationEvent::Failed);
                Err(RefusedSource { cause, copies: Some(Box::new(copies)) })
            }
        }
    }

    /// Prepares to wait for another source after a failure before PREPARED, unless one source only
    /// is accepted. The failed source has its guest, and may send it again.
    pub(super) fn wait_on(
        &self,
        arrival: Arrival<F::Guest>,
        failed: ReceiveFailed,
    ) -> Result<(), ReceiveFailed> {
        if self.accepts_one() || self.control.stop.is_cancelled() {
            return Err(failed);
        }
        let (peer, phase) = (arrival.wire.stream().peer(), self.control.progress().phase);
        // Free its memory, files and devices before another guest arrives.
        drop(arrival);
        self.session.vacate();
        let reason = format!("no guest was received ({phase}): {}", failed.cause);
        static LIMIT: LogLimit = LogLimit::new();
        if let Some(unshown) = LIMIT.admit() {
            tracing::warn!(peer, unshown, "{reason}; waiting for another source");
        }
        listener::note_refusal(self.control, &peer, &reason);
        self.control.update(Progress::forget_stream);
        Ok(())
    }
}

/// Returns the reason that is sent to a source. "cancelled" would read as a cancellation by the
/// source.
pub(super) fn reason_for_source(cause: &Cause) -> String {
    match cause {
        Cause::Cancelled => "the receiver was stopped".to_owned(),
        cause => cause.to_string(),
    }
}

/// Ends a guest that never ran here. Detaches it from its networks first, because its source may
/// resume it.
pub(super) fn discard_guest<G: GuestIdentity + Lifecycle + HandOver + ?Sized>(
    guest: &G,
    why: &str,
) {
    detach(guest);
    guest.stop(why);
}

/// Detaches from its networks a guest that does not run here.
pub(super) fn detach<G: GuestIdentity + HandOver + ?Sized>(guest: &G) {
    if let Err(e) = guest.detach(NextHost::Another) {
        tracing::warn!(vm = %guest.vm_id(), "detaching the guest from its networks failed: {e}");
    }
}

#[cfg(test)]
mod tests;
