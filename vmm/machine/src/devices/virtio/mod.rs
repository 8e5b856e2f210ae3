//! Virtio 1.x devices over MMIO (register layout 2): the parts that all devices share.
//!
//! ```text
//!            vCPU threads                          the device's thread, `virtio-<id>`
//!  registers ----------> Transport ----Job----> Worker -----> Device, its Rings
//!                            |     <--Done----     |  ^            |
//!                            +------ Shared -------+  |            v
//!  QueueNotify ~~ ioeventfd ~~~~~~~~~~~~~~~~~~~~~~~~~~+       guest memory
//!  interrupt   <~ irqfd ~~~~~~~~~ Shared
//! ```
//!
//! A [`Device`] defines what happens to the chains of its [`Ring`]s. Everything else is here:
//! feature negotiation, queue set-up and reset, the thread, interrupts, quiescing, saving and
//! restoring. The driver is hostile. A [`Violation`] stops its device until the driver resets it,
//! and has no other effect.
//!
//! The transport's registers, `Front`, do not depend on threads: fuzzing uses them and the worker
//! without a thread.

mod chain;
mod completion;
#[cfg(test)]
pub(crate) mod conformance;
mod device;
#[cfg(test)]
pub(crate) mod driver;
#[cfg(test)]
pub(crate) mod fake;
mod messages;
mod mmio;
mod registers;
mod request;
mod ring;
mod shared_state;
mod state;
#[cfg(any(test, fuzzing))]
pub(crate) mod threadless;
mod transport;
mod violation;
mod watcher;
mod worker;

pub(crate) use chain::{Buffer, Buffers, Chain};
pub(crate) use completion::Done;
pub(crate) use device::{Device, Io, Kind, Stall};
pub(crate) use request::RequestError;
pub(crate) use ring::Ring;
pub(crate) use shared_state::Shared;
pub(crate) use state::{VirtioState, decode_state, encode_state};
pub(crate) use transport::{Asked, GRACE, Transport};
pub(crate) use violation::Violation;
pub(crate) use watcher::Watcher;

/// Bytes of address space that a device's registers occupy.
pub(crate) const REGISTERS_LEN: u64 = 0x1000;
