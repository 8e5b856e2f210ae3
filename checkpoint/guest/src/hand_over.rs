//! Resources of a guest that only one host may hold: drives, ports, the right to run.

use std::time::Duration;

use crate::delegate::Delegate;
use crate::error::GuestError;
use crate::shared_guest::SharedGuest;

/// Maximum number of bytes that [`HandOver::detach`] returns. They are sent during the downtime,
/// and the guest's peers decide how many arrive.
pub const MAX_QUEUED_PACKET_BYTES: usize = 256 << 10;

/// Where a released guest continues.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum NextHost {
    /// On another host, or in a process of this host that has none of its open files.
    Another,
    /// In a process of this host that has its open files ([`HandOver::share`]). Both processes see
    /// the same cached content of its disks, have the same locks, and read from the same taps.
    This,
}

/// Gives the resources that only one host may hold to another host, and takes them.
pub trait HandOver: Send + Sync {
    /// Announces a hand-over: for some milliseconds this host's processors should not enter sleep
    /// states, because threads wait for each other during the downtime. A hint.
    fn stay_awake(&self);

    /// Returns the files that hold the guest's memory, and the open files of its devices. Another
    /// process of this host continues the guest on them
    /// ([`GuestFactory::create_on`](crate::GuestFactory::create_on)). Also offers the guest to that
    /// process ([`MemoryRight::offer`](crate::MemoryRight::offer)). The guest may run.
    ///
    /// # Errors
    ///
    /// The memory is not in files, or not all of it yet; an earlier offer was taken; or a device
    /// does not answer.
    fn share(&self) -> Result<SharedGuest, GuestError>;

    /// Makes disks' written data durable without stopping the guest, so that a later release has
    /// less left to do. Returns whether that was done within `limit`; the rest continues in the
    /// background.
    ///
    /// # Errors
    ///
    /// A write could not be made durable. The guest also sees that, as the result of its own next
    /// flush; until then [`release`](Self::release) fails.
    fn flush(&self, limit: Duration) -> Result<bool, GuestError>;

    /// Makes the guest's writes durable and releases what only one host may hold (drives' locks,
    /// listening sockets). The guest must be paused. Its taps are not released: packets that arrive
    /// on them wait. For [`NextHost::This`] nothing has to be durable, and locks are left to the
    /// next process, which has them already.
    ///
    /// # Errors
    ///
    /// The guest is not paused, or a write could not be made durable.
    fn release(&self, next: NextHost) -> Result<(), GuestError>;

    /// Releases a released guest's taps, too. Returns what has arrived for the guest since its
    /// state was saved: opaque, at most [`MAX_QUEUED_PACKET_BYTES`] bytes, for
    /// [`attach`](Self::attach) on the next host. If the guest stays here after all, it still
    /// receives that. For [`NextHost::This`] packets wait in the taps, which the next process has
    /// already.
    ///
    /// A guest that was built on files of another process
    /// ([`GuestFactory::create_on`](crate::GuestFactory::create_on)), and whose take-over is not
    /// complete ([`MemoryRight::is_borrowed`](crate::MemoryRight::is_borrowed)), takes nothing from
    /// that process, whatever `next` is: neither locks nor packets.
    ///
    /// # Errors
    ///
    /// The guest is not paused, or a device does not answer.
    fn detach(&self, next: NextHost) -> Result<Vec<u8>, GuestError>;

    /// Calls [`release`](Self::release), then [`detach`](Self::detach). A guest that does both on
    /// another thread does them there by one request, because each request prolongs the downtime.
    ///
    /// # Errors
    ///
    /// As those return. The guest may be released in part.
    fn release_and_detach(&self, next: NextHost) -> Result<Vec<u8>, GuestError> {
        self.release(next)?;
        self.detach(next)
    }

    /// Makes peers reach the guest on this host, and takes what [`detach`](Self::detach) returned
    /// on the last one, which is hostile input. Call it when the guest has its state and peers no
    /// longer reach it on another host. Peers that could not be notified are notified when the
    /// guest resumes.
    ///
    /// Returns before the devices have done so, because waiting would prolong the downtime.
    /// [`acquire`](Self::acquire) and all later requests are carried out after it. Packets that are
    /// malformed, or that a device refuses, are lost. That is logged and fails nothing: the guest's
    /// peers send them again.
    fn attach(&self, packets: &[u8]);

    /// Takes back what [`release`](Self::release) and [`detach`](Self::detach) released, or takes
    /// it for the first time on a new host. Before that, withdraws an offer of memory
    /// ([`MemoryRight::keep`](crate::MemoryRight::keep)).
    ///
    /// # Errors
    ///
    /// Another process or host has it. Then the guest holds nothing, and no peer reaches it here;
    /// but a guest that has run here still holds the drives on which its writes could not be made
    /// durable.
    fn acquire(&self) -> Result<(), GuestError>;
}

impl<T: Delegate<dyn HandOver>> HandOver for T {
    fn stay_awake(&self) {
        self.delegate().stay_awake();
    }

    fn share(&self) -> Result<SharedGuest, GuestError> {
        self.delegate().share()
    }

    fn flush(&self, limit: Duration) -> Result<bool, GuestError> {
        self.delegate().flush(limit)
    }

    fn release(&self, next: NextHost) -> Result<(), GuestError> {
        self.delegate().release(next)
    }

    fn detach(&self, next: NextHost) -> Result<Vec<u8>, GuestError> {
        self.delegate().detach(next)
    }

    fn release_and_detach(&self, next: NextHost) -> Result<Vec<u8>, GuestError> {
        self.delegate().release_and_detach(next)
    }

    fn attach(&self, packets: &[u8]) {
        self.delegate().attach(packets);
    }

    fn acquire(&self) -> Result<(), GuestError> {
        self.delegate().acquire()
    }
}
