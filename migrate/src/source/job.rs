//! State that all phases of a migration share at its source, and the error of a phase.

use std::time::Instant;

use super::channels::Channels;
use super::guest::Migratable;
use super::options::SendOptions;
use crate::control::{Phase, SendControl};
use crate::error::{Cause, GuestPlace};
use crate::protocol::error::WireError;
use crate::protocol::ids::Token;
use crate::protocol::tag::Tag;
use crate::report::ms;
use crate::transport::link::Link;
use crate::transport::wire::Wire;

/// The failure of a phase, and where the guest is after it.
#[derive(Debug)]
pub(super) struct SendFailed {
    pub(super) cause: Cause,
    pub(super) place: GuestPlace,
}

impl<E: Into<Cause>> From<E> for SendFailed {
    /// Converts a failure while the guest runs, after which nothing has to be undone.
    fn from(e: E) -> Self {
        Self { cause: e.into(), place: GuestPlace::Here }
    }
}

/// State that all phases share.
pub(super) struct SendJob<'a, G: Migratable + ?Sized> {
    pub(super) guest: &'a G,
    /// The destination, as the operator gave it.
    pub(super) to: &'a str,
    pub(super) options: &'a SendOptions,
    pub(super) control: &'a SendControl,
    pub(super) token: Token,
    pub(super) begun: Instant,
}

impl<G: Migratable + ?Sized> SendJob<'_, G> {
    /// Runs a phase, and shows it in the log and in the progress.
    pub(super) fn phase<T>(
        &self,
        phase: Phase,
        work: impl FnOnce() -> Result<T, SendFailed>,
    ) -> Result<T, SendFailed> {
        let begun = Instant::now();
        let (vm, token) = (self.guest.vm_id(), self.token);
        tracing::info!(%vm, %token, ?phase, "begin");
        self.control.update(|p| p.phase = phase);
        let result = work();
        let (ms, ok) = (ms(begun.elapsed()), result.is_ok());
        tracing::info!(%vm, %token, ?phase, ms, ok, "end");
        result
    }

    /// Runs a phase, and exchanges reasons with the peer if it fails. By then the guest runs again.
    pub(super) fn peer_phase<T>(
        &self,
        phase: Phase,
        channels: &mut Channels,
        work: impl FnOnce(&mut Channels) -> Result<T, SendFailed>,
    ) -> Result<T, SendFailed> {
        self.phase(phase, || work(channels)).map_err(|failed| {
            let cause = self.exchange_reasons(&mut channels.first, failed.cause);
            SendFailed { cause, place: failed.place }
        })
    }

    /// Reads the peer's reason, or sends this side's. Returns the cause, which is the peer's reason
    /// if there is one.
    fn exchange_reasons(&self, wire: &mut Wire<Link>, cause: Cause) -> Cause {
        let cancelled = self.control.stop.is_cancelled();
        match cause {
            Cause::Wire(WireError::Refused { .. } | WireError::Aborted { .. }) => cause,
            Cause::Connection { .. } if !cancelled => match wire.pending_abort() {
                Some(e) => Cause::Wire(e),
                None => {
                    wire.abort(Tag::Abort, &cause.to_string());
                    cause
                }
            },
            Cause::Wire(WireError::Format(_)) if !cancelled => {
                wire.closing_abort().map_or(cause, Cause::Wire)
            }
            cause => {
                let cause = if cancelled { Cause::Cancelled } else { cause };
                wire.abort(Tag::Abort, &cause.to_string());
                cause
            }
        }
    }

    /// Checks that a message of the hand-over names this migration.
    pub(super) fn check_token(&self, message: Tag, found: Token) -> Result<(), WireError> {
        let expected = self.token;
        match found == expected {
            true => Ok(()),
            false => Err(WireError::Token { message, found, expected }),
        }
    }
}
