//! A device's view of a virtqueue: it takes chains, gives them back, and notifies the driver.
//!
//! The view wraps rust-vmm's `Queue` and adds what `Queue` leaves to its user: chains are checked
//! as a whole, and both a round (a driver could add chains for ever) and the number of chains in
//! flight are bounded.

use std::fmt;
use std::sync::atomic::{Ordering, fence};

use driftline_guest::GuestRam;
use serde::{Deserialize, Serialize};
use virtio_queue::{Queue, QueueOwnedT, QueueState, QueueT};
use vm_memory::{Bytes, GuestAddress, GuestMemoryBackend};

use super::chain::Chain;
use super::violation::Violation;

/// The place of a queue, as set by the driver.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub(crate) struct RingSetup {
    /// Number of entries.
    pub(super) size: u16,
    /// Guest address of the descriptor table.
    pub(super) descriptors: u64,
    /// Guest address of the available ring.
    pub(super) available: u64,
    /// Guest address of the used ring.
    pub(super) used: u64,
}

/// A device's position in a queue.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub(crate) struct RingPosition {
    next_available: u16,
    next_used: u16,
}

#[cfg(test)]
impl RingPosition {
    pub(super) fn example() -> Self {
        Self { next_available: 0x8001, next_used: 0x7ffe }
    }
}

/// One queue of a device.
pub(crate) struct DeviceRing {
    number: u16,
    queue: Queue,
    /// Chains that may still be taken in this round.
    budget: u16,
    /// Whether the queue needs another round.
    needs_round: bool,
    /// Whether chains were given back and the driver has not been told yet.
    unannounced: bool,
    /// Whether notifications are, or may be, switched off.
    notifications_off: bool,
    /// Chains taken and not given back.
    in_flight: u16,
    /// Whether chains were given back as a batch in this round.
    batched: bool,
    /// Position in the used ring at the start of the round.
    round_start: u16,
}

impl fmt::Debug for DeviceRing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "DeviceRing({}: {:?})", self.number, self.queue.state())
    }
}

impl DeviceRing {
    /// Creates a queue that is not set up.
    pub(super) fn idle(number: u16, max_size: u16) -> Result<Self, Violation> {
        let queue = Queue::new(max_size).map_err(|e| queue_error(number, e))?;
        let ring = Self {
            number,
            queue,
            budget: 0,
            needs_round: false,
            unannounced: false,
            notifications_off: false,
            in_flight: 0,
            batched: false,
            round_start: 0,
        };
        Ok(ring)
    }

    /// Sets the queue up where the driver put it, at `position`.
    pub(super) fn set_up(
        &mut self,
        setup: RingSetup,
        position: RingPosition,
        event_idx: bool,
        ram: &GuestRam,
    ) -> Result<(), Violation> {
        let RingSetup { size, descriptors, available, used } = setup;
        let areas = [
            ("descriptor table", descriptors, 16 * u64::from(size)),
            ("available ring", available, 6 + 2 * u64::from(size)),
            ("used ring", used, 6 + 8 * u64::from(size)),
        ];
        for (what, addr, len) in areas {
            // The area must lie in one memory slot: then no access to it can fail.
            if ram.get_slice(GuestAddress(addr), len as usize).is_err() {
                return Err(Violation::QueueOutside { queue: self.number, what, addr, len });
            }
        }
        let state = QueueState {
            max_size: self.queue.max_size(),
            next_avail: position.next_available,
            next_used: position.next_used,
            event_idx_enabled: event_idx,
            size,
            ready: true,
            desc_table: descriptors,
            avail_ring: available,
            used_ring: used,
        };
        self.queue = Queue::try_from(state).map_err(|e| queue_error(self.number, e))?;
        // The previous user of the queue may have left notifications off.
        (self.notifications_off, self.in_flight, self.unannounced) = (true, 0, false);
        Ok(())
    }

    /// Forgets the driver's queue.
    pub(super) fn tear_down(&mut self) {
        self.queue.reset();
        (self.notifications_off, self.in_flight, self.unannounced, self.needs_round) =
            (false, 0, false, false);
    }

    /// Returns whether the driver has set the queue up.
    pub(crate) fn is_set_up(&self) -> bool {
        self.queue.ready()
    }

    pub(super) fn position(&self) -> RingPosition {
        RingPosition { next_available: self.queue.next_avail(), next_used: self.queue.next_used() }
    }

    /// Begins a round of the device, in which it may take as many chains as the queue has entries.
    pub(super) fn begin_round(&mut self) {
        self.budget = self.queue.size();
        self.needs_round = false;
        self.batched = false;
        self.round_start = self.queue.next_used();
    }

    /// Ends a round. Returns whether the driver wants an interrupt for the chains that were pushed.
    pub(super) fn end_round(&mut self, ram: &GuestRam) -> Result<bool, Violation> {
        let unannounced = std::mem::take(&mut self.unannounced);
        if !unannounced || !self.is_set_up() {
            return Ok(false);
        }
        let wanted = self.queue.needs_notification(ram).map_err(|e| queue_error(self.number, e))?;
        Ok(wanted || self.batch_crossed_event(ram)?)
    }

    /// Returns whether a batch has passed the used index at which the driver wants an interrupt.
    /// The queue itself counts only the last chain of a batch.
    fn batch_crossed_event(&self, ram: &GuestRam) -> Result<bool, Violation> {
        if !self.batched || !self.queue.event_idx_enabled() {
            return Ok(false);
        }
        let at = self.queue.avail_ring() + 4 + 2 * u64::from(self.queue.size());
        let event = u16::from_le(ram.load(GuestAddress(at), Ordering::Acquire)?);
        let next = self.queue.next_used();
        let (since, all) =
            (next.wrapping_sub(event).wrapping_sub(1), next.wrapping_sub(self.round_start));
        Ok(since < all)
    }

    /// Returns whether the queue needs another round: the last one ended early.
    pub(super) fn needs_round(&self) -> bool {
        self.needs_round
    }

    /// Takes the next chain. After `None` the device is called again: when the driver notifies the
    /// queue, or, if the round has used up its budget, in another round.
    pub(crate) fn pop(&mut self, ram: &GuestRam) -> Result<Option<Chain>, Violation> {
        if !self.is_set_up() {
            return Ok(None);
        }
        let size = self.queue.size();
        loop {
            if self.budget == 0 {
                self.needs_round = true;
                return Ok(None);
            }
            // An attempt that finds no chain counts, too: a driver can change its index repeatedly.
            self.budget -= 1;
            let broken = |cause| Violation::Available { queue: self.number, size, cause };
            let available = self.queue.iter(ram).map_err(broken)?.next();
            if let Some(chain) = available {
                if self.in_flight >= size {
                    return Err(Violation::TooManyChains { queue: self.number, size });
                }
                if !self.notifications_off {
                    self.queue
                        .disable_notification(ram)
                        .map_err(|e| queue_error(self.number, e))?;
                    self.notifications_off = true;
                }
                let chain = Chain::read(chain, self.number, size)?;
                self.in_flight += 1;
                return Ok(Some(chain));
            }
            let again = self.queue.enable_notification(ram);
            self.notifications_off = false;
            if !again.map_err(|e| queue_error(self.number, e))? {
                return Ok(None);
            }
        }
    }

    /// Returns the driver's available index: the number of chains that it has ever made available,
    /// modulo 2^16.
    pub(crate) fn available(&self, ram: &GuestRam) -> Result<u16, Violation> {
        let index = self.queue.avail_idx(ram, Ordering::Acquire);
        Ok(index.map_err(|e| queue_error(self.number, e))?.0)
    }

    /// Asks the driver for a notification once its available index is `at`, although chains may be
    /// left. Returns whether the index is there already.
    pub(crate) fn notify_at(&mut self, ram: &GuestRam, at: u16) -> Result<bool, Violation> {
        if self.queue.event_idx_enabled() {
            let event = self.queue.used_ring() + 4 + 8 * u64::from(self.queue.size());
            let before = at.wrapping_sub(1);
            ram.store(before.to_le(), GuestAddress(event), Ordering::Relaxed)?;
            // Pairs with the driver's fence between writing its index and reading this one.
            fence(Ordering::SeqCst);
        } else {
            self.queue.enable_notification(ram).map_err(|e| queue_error(self.number, e))?;
        }
        self.notifications_off = false;
        Ok(is_at(self.available(ram)?, at))
    }

    /// Ends the round although there may be more chains. The device is called again for this queue,
    /// after others have had their round.
    pub(crate) fn yield_round(&mut self) {
        self.needs_round = true;
    }

    /// Undoes the last [`pop`](Self::pop).
    pub(crate) fn unpop(&mut self) {
        self.queue.go_to_previous_position();
        self.in_flight = self.in_flight.saturating_sub(1);
    }

    /// Returns the number of entries that the driver has set up.
    pub(crate) fn size(&self) -> u16 {
        self.queue.size()
    }

    /// Gives chains back as a batch, each with the number of bytes written to it: the driver sees
    /// either none of them or all.
    pub(crate) fn push_all(
        &mut self,
        ram: &GuestRam,
        chains: &[(u16, u32)],
    ) -> Result<(), Violation> {
        let Some(((last, written), others)) = chains.split_last() else { return Ok(()) };
        if !self.is_set_up() {
            return Ok(());
        }
        // The driver does not read entries past the used index. Giving the last chain back
        // publishes all.
        let (ring, size) = (self.queue.used_ring(), u64::from(self.queue.size()));
        let mut next = self.queue.next_used();
        for (head, written) in others {
            let entry = GuestAddress(ring + 4 + 8 * (u64::from(next) % size));
            ram.write_obj([u32::from(*head).to_le(), written.to_le()], entry)?;
            next = next.wrapping_add(1);
            self.in_flight = self.in_flight.saturating_sub(1);
            self.batched = true;
        }
        self.queue.set_next_used(next);
        self.push(ram, *last, *written)
    }

    /// Gives a chain back, with `written` bytes written to it. Does nothing if the driver has taken
    /// the queue back meanwhile or has broken the rules.
    pub(crate) fn push(
        &mut self,
        ram: &GuestRam,
        head: u16,
        written: u32,
    ) -> Result<(), Violation> {
        if !self.is_set_up() {
            return Ok(());
        }
        self.in_flight = self.in_flight.saturating_sub(1);
        self.unannounced = true;
        self.queue.add_used(ram, head, written).map_err(|e| queue_error(self.number, e))
    }
}

/// Returns whether an index that wraps around is `at`, or at most 2^15 after it.
pub(crate) fn is_at(index: u16, at: u16) -> bool {
    index.wrapping_sub(at) <= 1 << 15
}

fn queue_error(queue: u16, cause: virtio_queue::Error) -> Violation {
    Violation::Queue { queue, cause }
}
