//! The transport reset: how a guest learns that its connections are closed.
//!
//! ```text
//! device                                          driver
//! puts the event into a buffer -----------------> closes its connected sockets
//! packets for the guest wait
//! gives the guest its packets <------------------ makes the buffer available again
//! ```
//!
//! A connection that the guest accepted before it handles the event would be closed by that. So no
//! packet reaches the guest in between. The buffer's return is read from the event queue itself,
//! because a driver may suppress its interrupts and need not notify a queue that has buffers.
//!
//! Two kinds of drivers are not waited for without a limit: one without a buffer for the event,
//! which gets its packets immediately and the event later, and one that does not return the buffer
//! within [`RESET_TIMEOUT`].

use std::time::Instant;

use super::bounds::RESET_TIMEOUT;
use super::{EVENT, TRANSPORT_RESET, Vsock};
use crate::devices::virtio::{DeviceIo, Violation, is_at};

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
            let why = format!("the buffer from {} has room for {written} bytes", chain.head);
            return Err(Violation::Request { queue: EVENT as u16, why });
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

    /// Gives the driver the whole time for its acknowledgement, if one is missing.
    pub(super) fn restart_reset_deadline(&mut self) {
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
        Ok(false)
    }
}
