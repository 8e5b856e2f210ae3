//! The transport reset: how a guest learns that its connections are closed.
//!
//! ```text
//! device                                          driver
//! puts the event into a buffer -----------------> closes its connected sockets
//! packets for the guest wait
//! gives the guest its packets <------------------ makes the buffer available again
//! ```
//!
//! A driver that handles the event closes every established connection, including one that the
//! guest accepted just before. So the device sends no packet until the driver acknowledges the
//! event, by making its buffer available again. The device knows the value that the event queue's
//! available index has then, and compares the two. It asks for a notification at that value,
//! because a driver need not notify a queue that still has buffers. No connection times out
//! meanwhile, because the guest cannot answer.
//!
//! The wait has limits:
//!
//! | case | effect |
//! | --- | --- |
//! | the driver has no buffer for the event | it gets packets immediately, and the event later |
//! | no acknowledgement within [`RESET_TIMEOUT`], not counting pauses | it gets packets then |

use std::time::Instant;

use super::bounds::RESET_TIMEOUT;
use super::{EVENT, TRANSPORT_RESET, Vsock};
use crate::devices::virtio::{DeviceIo, RequestDefect, Violation, is_at};

impl Vsock {
    /// Tells the guest that its connections are closed, if that is due and the driver has made a
    /// buffer available.
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
        // Read before the driver sees the event: it may make this buffer available again as soon as
        // it does.
        let available = ring.available(io.ram)?;
        ring.push(io.ram, chain.head, written as u32)?;
        // If an earlier event is not acknowledged, its buffer comes back first, and this one after
        // it.
        let earlier = self.state.reset_unacknowledged.filter(|at| !is_at(available, *at));
        self.state.reset_unacknowledged = Some(earlier.unwrap_or(available).wrapping_add(1));
        self.state.reset_due = false;
        self.restart_reset_deadline();
        Ok(())
    }

    /// Moves the deadline of the acknowledgement by the length of the pause that ends. A guest that
    /// has moved gets [`RESET_TIMEOUT`] from now on.
    pub(super) fn resume_reset_deadline(&mut self, moved: bool) {
        match (self.reset_deadline, self.paused_at.take()) {
            (Some(deadline), Some(paused_at)) if !moved => {
                self.reset_deadline = Some(deadline + paused_at.elapsed());
            }
            _ => self.restart_reset_deadline(),
        }
    }

    /// Gives the driver [`RESET_TIMEOUT`] from now on for its acknowledgement, if one is missing.
    fn restart_reset_deadline(&mut self) {
        let is_missing = self.active && self.state.reset_unacknowledged.is_some();
        self.reset_deadline = is_missing.then(|| Instant::now() + RESET_TIMEOUT);
    }

    /// Gives the guest the waiting packets, unless the device waits for the acknowledgement of a
    /// reset event. In that case a notification of the event queue, or the timer, leads to the next
    /// call.
    pub(super) fn give_packets(&mut self, io: &mut DeviceIo<'_>) -> Result<(), Violation> {
        if self.awaits_acknowledgement(io)? { Ok(()) } else { self.send_packets(io) }
    }

    /// Returns whether the device waits for the acknowledgement of a reset event. Ends the wait if
    /// the event is acknowledged or the deadline has passed.
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
