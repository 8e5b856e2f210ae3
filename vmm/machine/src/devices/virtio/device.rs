//! What a virtio device is to its thread.

use std::fmt;
use std::io;
use std::time::Instant;

use driftline_guest::GuestRam;
use virtio_bindings::virtio_ids::{
    VIRTIO_ID_BALLOON, VIRTIO_ID_BLOCK, VIRTIO_ID_NET, VIRTIO_ID_RNG, VIRTIO_ID_VSOCK,
};
use vmm_sys_util::epoll::EventSet;

use super::{Ring, Shared, Violation, Watcher};
use crate::sandbox::Class;

/// What kind of device it is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[allow(dead_code, reason = "the virtio devices of a microVM, all of them")]
pub(crate) enum Kind {
    Net,
    Block,
    Rng,
    Balloon,
    Vsock,
}

impl Kind {
    /// The virtio device ID.
    pub(crate) fn id(self) -> u32 {
        match self {
            Self::Net => VIRTIO_ID_NET,
            Self::Block => VIRTIO_ID_BLOCK,
            Self::Rng => VIRTIO_ID_RNG,
            Self::Balloon => VIRTIO_ID_BALLOON,
            Self::Vsock => VIRTIO_ID_VSOCK,
        }
    }

    /// What its thread may do.
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

impl fmt::Display for Kind {
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

/// What a device has at hand while it works.
pub(crate) struct Io<'w> {
    /// Guest memory. Writes through it mark the trees.
    pub(crate) ram: &'w GuestRam,
    /// The device's queues, in the order of [`Device::queue_sizes`]. One that the driver has not
    /// set up has no chains.
    pub(crate) rings: &'w mut [Ring],
    /// For changes of the configuration space.
    pub(crate) shared: &'w Shared,
    /// For files that come and go.
    pub(crate) watcher: &'w Watcher,
}

/// A virtio device without its transport. It lives on a thread of its own, which calls all of this
/// but the first `acquire` and `start`. What that thread may ask of the kernel is settled by its
/// [class](Kind::class): files and sockets are made before, or by the `opener`.
///
/// The driver is hostile. Whatever breaks the rules of virtio is a [`Violation`], which stops the
/// device until the driver resets it; a request that can be refused in its own terms (a status
/// byte) is refused so. Interrupts are the caller's business: chains pushed during a call are
/// announced after it.
pub(crate) trait Device: Send {
    fn kind(&self) -> Kind;

    /// What the device offers, besides the bits that all devices here have (`VERSION_1`,
    /// `INDIRECT_DESC`, `EVENT_IDX`, `RING_RESET`).
    fn features(&self) -> u64;

    /// The most entries of each queue, powers of two.
    fn queue_sizes(&self) -> Vec<u16>;

    /// The configuration space as it is now.
    fn config_space(&self) -> Vec<u8>;

    /// The driver has written to the configuration space.
    fn write_config(&mut self, offset: usize, data: &[u8], io: &mut Io<'_>);

    /// First call, once, before the thread exists: watches the device's files. Their tokens are its
    /// own.
    fn start(&mut self, watcher: &Watcher) -> io::Result<()>;

    /// The driver is ready, with these of the offered features.
    fn activate(&mut self, features: u64);

    /// The driver has reset the device: what is under way is finished, its chains forgotten, and
    /// the device is as new.
    fn reset(&mut self, io: &mut Io<'_>);

    /// There may be chains in queue `queue`. Leaving the call with chains not taken is fine if the
    /// device knows by itself when to look again.
    fn process(&mut self, queue: usize, io: &mut Io<'_>) -> Result<(), Violation>;

    /// A watched file is ready. Called also while no driver is active, for what must be read lest
    /// it stays ready.
    fn backend_ready(
        &mut self,
        token: u32,
        events: EventSet,
        io: &mut Io<'_>,
    ) -> Result<(), Violation>;

    /// Brings the device to a stand, until `deadline`: what is under way is finished and its chains
    /// pushed, or is part of [`save`](Self::save). Guest memory is not written after this. An error
    /// says what stands against it; the device then works on.
    fn quiesce(&mut self, deadline: Instant, io: &mut Io<'_>) -> Result<(), Stall>;

    /// The device goes on after a stand, and the machine with it; `moved` the first time after a
    /// [`restore`](Self::restore). All queues are looked at after this. Whoever watches files for
    /// edges looks at them here: those that came just before the stand may have gone unseen.
    fn resume(&mut self, moved: bool, io: &mut Io<'_>) -> Result<(), Violation>;

    /// The state of a device that stands, encoded; its rings and what the driver negotiated are
    /// saved by the caller.
    fn save(&self) -> Result<Vec<u8>, String>;

    /// Takes a state that `save` gave, after [`activate`](Self::activate) if a driver was active.
    /// The bytes are hostile.
    fn restore(&mut self, state: &[u8]) -> Result<(), String>;

    /// Takes what only one host may hold. The error is a sentence.
    fn acquire(&mut self) -> Result<(), String>;

    /// Makes durable what the guest wrote, and lets go of what only one host may hold, of a device
    /// that stands; not of a tap, where what comes can wait. What cannot be made durable until
    /// `deadline` is an error, and stays held. The error is a sentence.
    fn release(&mut self, deadline: Instant) -> Result<(), String>;

    /// Lets go of what [`acquire`](Self::acquire) took, for a guest that goes on elsewhere. Where
    /// the guest has not run since it came to this host, nothing has to be made durable.
    fn undo_acquire(&mut self, deadline: Instant) -> Result<(), String> {
        self.release(deadline)
    }

    /// Lets go of that, too, of a device that was released. What came for it since it was saved,
    /// encoded in at most `room` bytes, for [`attach`](Self::attach) at the next host; empty if
    /// nothing did. The device keeps it as well: it may be acquired again.
    fn detach(&mut self, _room: usize) -> Vec<u8> {
        Vec::new()
    }

    /// At the next host, after [`restore`](Self::restore) and before `acquire`: has peers reach the
    /// guest here, and takes what `detach` gave. The bytes are hostile; the error is a sentence.
    fn attach(&mut self, _late: &[u8]) -> Result<(), String> {
        Ok(())
    }
}

/// Why a device did not come to a stand.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) enum Stall {
    /// The driver broke the rules.
    Violation(Violation),
    /// Requests were still under way at the deadline.
    UnderWay(usize),
}

impl From<Violation> for Stall {
    fn from(v: Violation) -> Self {
        Self::Violation(v)
    }
}
