//! The destination from READY to PREPARED: receives memory pass by pass, and restores the state.

use std::sync::Arc;
use std::sync::mpsc::RecvTimeoutError;
use std::time::Instant;

use driftline_dirty_tracker::Tree;
use driftline_guest::{Clock, GuestFactory, Section, Stateful};

use super::host::{ReceiveFailed, ReceiveHost};
use super::listener::Incoming;
use super::pace::PaceLimit;
use super::receive::{CompleteGuest, GuestReceiver, ReceiveContext, ReceiveFigures};
use super::setup::{Arrival, discard_guest, reason_for_source};
use crate::error::Cause;
use crate::protocol::error::WireError;
use crate::protocol::ids::Token;
use crate::protocol::tag::Tag;
use crate::protocol::two_phase::DestinationEvent;
use crate::transport::link::Link;
use crate::transport::wait::SLICE;
use crate::transport::wire::Wire;

/// A paused guest whose memory and state are in place.
pub(super) struct RestoredGuest {
    pub(super) sections: Arc<[Section]>,
    pub(super) was_running: bool,
    pub(super) figures: ReceiveFigures,
    /// Dropped once the guest runs, because freeing it takes time.
    pub(super) written: Tree,
}

impl<F: GuestFactory + ?Sized + 'static> ReceiveHost<'_, F> {
    /// Receives memory pass by pass, and the state.
    pub(super) fn assemble(
        &self,
        arrival: &mut Arrival<F::Guest>,
    ) -> Result<CompleteGuest, ReceiveFailed> {
        let Arrival { wire, guest, drives, copies, shares_memory, token, .. } = arrival;
        let context = ReceiveContext {
            control: self.control,
            pace: PaceLimit::begin(self.options.pace_window),
            progress_timeout: self.options.progress_timeout,
            joined: &|count| self.collect_joined(*token, count),
        };
        let receiver = GuestReceiver::new(&**guest, drives, copies);
        let receiver = match *shares_memory {
            true => receiver.with_shared_memory(),
            false => receiver,
        };
        let received = receiver.run(wire, context);
        received.map_err(|cause| self.give_up(arrival, cause))
    }

    /// Collects the joined channels. Each was acknowledged before the source sent their number.
    fn collect_joined(&self, token: Token, count: u32) -> Result<Vec<Wire<Link>>, Cause> {
        let mut joined = Vec::with_capacity(count as usize);
        let until = Instant::now() + self.options.handshake_timeout;
        while (joined.len() as u32) < count {
            match self.incoming.recv_timeout(SLICE) {
                Ok(Incoming::Joined(of, mut wire)) if of == token => {
                    wire.stream_mut().set_stop(self.control.stop.clone());
                    joined.push(*wire);
                }
                // No other source gets the session now, and other channels belong to an earlier
                // migration.
                Ok(_) => {}
                Err(_) if self.control.stop.is_cancelled() => return Err(Cause::Cancelled),
                Err(RecvTimeoutError::Timeout) if Instant::now() < until => {}
                Err(_) => {
                    let what = "the number of connections";
                    let (found, expected) = (count.into(), joined.len() as u64);
                    return Err(WireError::Count { what, found, expected }.into());
                }
            }
        }
        Ok(joined)
    }

    /// Restores the state, unless it was restored during the last pass.
    pub(super) fn restore(
        &self,
        arrival: &mut Arrival<F::Guest>,
        complete: CompleteGuest,
    ) -> Result<RestoredGuest, ReceiveFailed> {
        let CompleteGuest { sections, is_restored, was_running, figures, written } = complete;
        if !is_restored && let Err(e) = arrival.guest.restore_state(&sections, Clock::Advance) {
            return Err(self.give_up(arrival, e.into()));
        }
        Ok(RestoredGuest { sections, was_running, figures, written })
    }

    /// Discards the guest before PREPARED, and sends the source the reason. The source cannot have
    /// sent COMMIT, so it will never ask.
    fn give_up(&self, arrival: &mut Arrival<F::Guest>, cause: Cause) -> ReceiveFailed {
        let cause = if self.control.stop.is_cancelled() { Cause::Cancelled } else { cause };
        discard_guest(&*arrival.guest, &format!("it was not received: {cause}"));
        let (_drop, _) = self.session.post(DestinationEvent::Failed);
        if !matches!(cause, Cause::Wire(WireError::Aborted { .. })) {
            arrival.wire.abort(Tag::Abort, &reason_for_source(&cause));
        }
        arrival.copies.remove();
        cause.into()
    }
}
