//! The interface between a virtio device and its thread.

use std::fmt;
use std::io;
use std::os::fd::OwnedFd;
use std::time::Instant;

use driftline_guest::{GuestRam, NextHost};
use virtio_bindings::virtio_ids::{
    VIRTIO_ID_BALLOON, VIRTIO_ID_BLOCK, VIRTIO_ID_NET, VIRTIO_ID_RNG, VIRTIO_ID_VSOCK,
};
use vmm_sys_util::epoll::EventSet;

use super::{DeviceRing, Limiters, SharedDeviceState, Violation, Watcher};
use crate::config::RateLimits;
use crate::devices::error::DeviceError;
use crate::sandbox::Class;

/// The kind of a virtio device.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum DeviceKind {
    Net,
    Block,
    Rng,
    Balloon,
    Vsock,
}

impl DeviceKind {
    /// Returns the virtio device ID.
    pub(crate) fn id(self) -> u32 {
        match self {
            Self::Net => VIRTIO_ID_NET,
            Self::Block => VIRTIO_ID_BLOCK,
            Self::Rng => VIRTIO_ID_RNG,
            Self::Balloon => VIRTIO_ID_BALLOON,
            Self::Vsock => VIRTIO_ID_VSOCK,
        }
    }

    /// Returns the sandbox class, which limits what the device's thread may do.
    pub(super) fn class(self) -> Class {
        match self {
            Self::Net => Class::Net,
            Self::Block => Class::Block,
            Self::Rng => Class::Rng,
            Self::Balloon => Class::Balloon,
            Self::Vsock => Class::Vsock,
        }
    }
}

impl fmt::Display for DeviceKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Net => "virtio-net",
            Self::Block => "virtio-blk",
            Self::Rng => "virtio-rng",
            Self::Balloon => "virtio-balloon",
            Self::Vsock => "virtio-vsock",
        })
    }
}

/// Resources that a device uses while it works.
pub(crate) struct DeviceIo<'w> {
    /// Guest memory. Writes through it mark the dirty trees.
    pub(crate) ram: &'w GuestRam,
    /// The device's queues, in the order of [`Device::queue_sizes`]. A queue that the driver has
    /// not set up has no chains.
    pub(crate) rings: &'w mut [DeviceRing],
    /// The interrupt and the configuration space, which the device may change.
    pub(crate) shared: &'w SharedDeviceState,
    /// Starts and stops watching files.
    pub(crate) watcher: &'w Watcher,
    /// The device's rate limiters, in the order of [`Device::limits`].
    pub(crate) limiters: &'w mut Limiters,
}

/// A virtio device without its transport. The device lives on a thread of its own. Before that
/// thread exists, the thread that builds the machine asks for the device's properties and calls
/// `start` and, if the guest starts here, the first `acquire`. The device's thread makes all other
/// calls. Its [class](DeviceKind::class) limits what it may ask of the kernel: files and sockets
/// are opened before it starts, or by the `opener`.
///
/// The driver is hostile. Breaking the rules of virtio is a [`Violation`], which stops the device
/// until the driver resets it. A request that can be refused in its own terms (a status byte) is
/// refused that way. The caller raises the interrupts: it announces chains that were pushed during
/// a call after the call.
pub(crate) trait Device: Send {
    fn kind(&self) -> DeviceKind;

    /// Returns the features that the device offers, besides those that all devices here have
    /// (`VERSION_1`, `INDIRECT_DESC`, `EVENT_IDX`, `RING_RESET`).
    fn features(&self) -> u64;

    /// Returns the maximum number of entries of each queue, powers of two.
    fn queue_sizes(&self) -> Vec<u16>;

    /// Returns the limits of the configuration, one item for each limiter that the device asks. A
    /// device without limiters returns none.
    fn limits(&self) -> Vec<RateLimits> {
        Vec::new()
    }

    /// Returns the current configuration space.
    fn config_space(&self) -> Vec<u8>;

    /// Called after the driver has written to the configuration space.
    fn write_config(&mut self, offset: usize, data: &[u8], io: &mut DeviceIo<'_>);

    /// Watches the device's files. Called first and once, before the thread exists. The device
    /// chooses the tokens of its files.
    fn start(&mut self, watcher: &Watcher) -> io::Result<()>;

    /// Called when the driver is ready; `features` are the offered features that it accepted.
    fn activate(&mut self, features: u64);

    /// Called when the driver has reset the device. The device finishes the requests in flight,
    /// forgets the chains, and returns to its initial state.
    fn reset(&mut self, io: &mut DeviceIo<'_>);

    /// Called when there may be chains in queue `queue`. The device may leave chains in the queue
    /// if it knows by itself when to look again.
    fn process(&mut self, queue: usize, io: &mut DeviceIo<'_>) -> Result<(), Violation>;

    /// Called when a watched file is ready. Also called while no driver is active, so that a file
    /// can be read that would otherwise stay ready.
    fn backend_ready(
        &mut self,
        token: u32,
        events: EventSet,
        io: &mut DeviceIo<'_>,
    ) -> Result<(), Violation>;

    /// Pauses the device by `deadline`. Each request in flight is finished and its chain is pushed,
    /// or it becomes part of the state that [`save`](Self::save) returns. The device does not write
    /// to guest memory after this.
    ///
    /// # Errors
    ///
    /// The reason why the device cannot pause. It then continues to work.
    fn quiesce(&mut self, deadline: Instant, io: &mut DeviceIo<'_>) -> Result<(), QuiesceError>;

    /// Called when the device and the machine resume after a pause. `moved` is `true` the first
    /// time after a [`restore`](Self::restore). The caller processes all queues afterwards. A
    /// device that watches files for edges must look at them here: edges just before the pause may
    /// have been missed.
    fn resume(&mut self, moved: bool, io: &mut DeviceIo<'_>) -> Result<(), Violation>;

    /// Returns the encoded state of a paused device. The caller saves the rings and what the driver
    /// negotiated.
    fn save(&self) -> Result<Vec<u8>, DeviceError>;

    /// Restores a state from `save`, after [`activate`](Self::activate) if a driver was active. The
    /// bytes are hostile.
    fn restore(&mut self, state: &[u8]) -> Result<(), DeviceError>;

    /// Returns duplicates of the files through which the guest is connected to this host, for
    /// another process of this host that continues with them. The device may be running.
    fn share(&mut self) -> io::Result<Vec<OwnedFd>> {
        Ok(Vec::new())
    }

    /// Acquires what only one host may have. From [`NextHost::This`] the device has open files
    /// whose locks are those of the process that may still run the guest: it leaves them as they
    /// are.
    fn acquire(&mut self, _from: NextHost) -> Result<(), DeviceError> {
        Ok(())
    }

    /// Makes the guest's writes durable, then releases what only one host may have. The device is
    /// paused. A tap is not released: frames that arrive can wait in it. For [`NextHost::This`]
    /// nothing has to be durable, and locks stay, because the next process has the same files.
    ///
    /// # Errors
    ///
    /// Data could not be made durable by `deadline`. The file with that data is not released.
    fn release(&mut self, _deadline: Instant, _next: NextHost) -> Result<(), DeviceError> {
        Ok(())
    }

    /// Releases what [`acquire`](Self::acquire) took, for a guest that resumes on another host. If
    /// the guest has not run since it came to this host, nothing has to be made durable.
    fn undo_acquire(&mut self, deadline: Instant, next: NextHost) -> Result<(), DeviceError> {
        self.release(deadline, next)
    }

    /// Returns which of the requests of a hand-over do anything.
    fn hand_over(&self) -> HandOverNeeds;

    /// Releases the rest, such as a tap, after [`release`](Self::release). Returns what arrived
    /// since the device was saved, encoded in at most `room` bytes, for [`attach`](Self::attach) at
    /// the next host; empty if nothing arrived. The device keeps a copy: it may be acquired again.
    /// For [`NextHost::This`] what arrives waits in the files that the next process has, too.
    fn detach(&mut self, _room: usize, _next: NextHost) -> Vec<u8> {
        Vec::new()
    }

    /// Connects the guest's peers to this host, and takes the bytes of `detach`. Called at the next
    /// host, after [`restore`](Self::restore) and before `acquire`. The bytes are hostile.
    fn attach(&mut self, _queued_packets: &[u8]) -> Result<(), DeviceError> {
        Ok(())
    }
}

/// The requests of a hand-over that a device needs. It is asked for no others, because each request
/// to a thread prolongs the downtime.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct HandOverNeeds {
    /// [`Device::acquire`] and [`Device::undo_acquire`].
    pub(crate) acquire: bool,
    /// Whether [`Device::acquire`] may fail from [`NextHost::This`]. If it may not, the caller does
    /// not wait for it.
    pub(crate) may_refuse_here: bool,
    /// [`Device::release`].
    pub(crate) release: bool,
    /// [`Device::detach`] and [`Device::attach`]. Needs `acquire`, too: what is attached is undone
    /// with what is acquired.
    pub(crate) detach: bool,
}

/// Reason why a device did not pause.
#[derive(Debug)]
pub(crate) enum QuiesceError {
    /// The driver broke the rules.
    Violation(Violation),
    /// This number of requests was still in flight at the deadline.
    InFlight(usize),
}

impl From<Violation> for QuiesceError {
    fn from(v: Violation) -> Self {
        Self::Violation(v)
    }
}
