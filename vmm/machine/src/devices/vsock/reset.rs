//! The transport reset: how a guest learns that its connections are closed.
//!
//! ```text
//! device                                          driver
//! puts the event into a buffer -----------------> closes its connected sockets
//! packets for the guest wait
//! gives the guest its packets <------------------ makes the buffer available again
//! ```
//!
//! Handling the event closes every established connection, including one that the guest accepted
//! just before. So the device sends no packet until then. The buffer's return is read from the
//! event queue itself, because a driver may suppress its interrupts and need not notify a queue
//! that has buffers. A connection that waits for the guest does not time out meanwhile.
//!
//! Two kinds of drivers are not waited for without a limit: one without a buffer for the event,
//! which gets its packets immediately and the event later, and one that does not return the buffer
//! within [`RESET_TIMEOUT`], in which pauses do not count.

use std::time::Instant;

use super::bounds::RESET_TIMEOUT;
use super::{EVENT, TRANSPORT_RESET, Vsock};
use crate::devices::virtio::{DeviceIo, RequestDefect, Violation, is_at};

impl Vsock {
    /// Tells the guest that its connections are closed, if that is due and it has a buffer.
    pub(super) fn tell_reset(&mut self, io: &mut DeviceIo<'_>) -> Result<(), Violation> {
        let Some(ring) = io.rings.get_mut(EVENT).filter(|_| self.state.reset_due) else {
            return Ok(());
        };
        let Some(chain) = ring.pop(io.ram)? else { return Ok(()) };
        let event = TRANSPORT_RESET.to_le_bytes();
        let written = chain.writable.write(io.ram, 0, &event)?;
        if written < event.len() {
            let cause = RequestDefect::EventBuffer { head: chain.head, room: written as u32 };
            return Err(Violation::Malformed { queue: EVENT as u16, cause });
        }
        // Read before the driver sees the event: any later buffer may be this one.
        let available = ring.available(io.ram)?;
        ring.push(io.ram, chain.head, written as u32)?;
        // An earlier event's buffer returns before this one.
        let earlier = self.state.reset_unacknowledged.filter(|at| !is_at(available, *at));
        self.state.reset_unacknowledged = Some(earlier.unwrap_or(available).wrapping_add(1));
        self.state.reset_due = false;
        self.restart_reset_deadline();
        Ok(())
    }

    /// Continues to wait for an acknowledgement after a pause, which prolongs the wait by its own
    /// length. A guest that was restored (`moved`) gets the whole time.
    pub(super) fn resume_reset_deadline(&mut self, moved: bool) {
        match (self.reset_deadline, self.paused_at.take()) {
            (Some(deadline), Some(paused_at)) if !moved => {
                self.reset_deadline = Some(deadline + paused_at.elapsed());
            }
            _ => self.restart_reset_deadline(),
        }
    }

    /// Gives the driver the whole time for its acknowledgement, if one is missing.
    fn restart_reset_deadline(&mut self) {
        let is_missing = self.active && self.state.reset_unacknowledged.is_some();
        self.reset_deadline = is_missing.then(|| Instant::now() + RESET_TIMEOUT);
    }

    /// Gives the guest the waiting packets, unless it may not have handled a reset. A notification
    /// of the event queue, or the timer, then brings the device back.
    pub(super) fn give_packets(&mut self, io: &mut DeviceIo<'_>) -> Result<(), Violation> {
        if self.awaits_acknowledgement(io)? { Ok(()) } else { self.send_packets(io) }
    }

    /// Returns whether the guest may not have handled a reset.
    fn awaits_acknowledgement(&mut self, io: &mut DeviceIo<'_>) -> Result<bool, Violation> {
        let Some(at) = self.state.reset_unacknowledged else { return Ok(false) };
        let ring = io.rings.get_mut(EVENT).filter(|ring| ring.is_set_up());
        // A driver that has stopped the queue has dropped its buffers.
        let is_missing = match ring {
            Some(ring) => !ring.notify_at(io.ram, at)?,
            None => false,
        };
        if is_missing && self.reset_deadline.is_some_and(|deadline| Instant::now() < deadline) {
            return Ok(true);
        }
        if is_missing {
            tracing::debug!("vsock: the driver has not acknowledged the reset of its connections");
        }
        (self.state.reset_unacknowledged, self.reset_deadline) = (None, None);
        self.restart_answer_deadlines();
        Ok(false)
    }
}
