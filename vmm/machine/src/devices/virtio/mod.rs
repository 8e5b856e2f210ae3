//! Virtio 1.x devices over MMIO (register layout 2): the parts that all devices share.
//!
//! ```text
//!            vCPU threads                          the device's thread, `virtio-<id>`
//!  registers ----------> Transport ------ job -----> DeviceWorker -----> Device, DeviceRings
//!                            |     <-- Completion ---    |  ^               |
//!                            +---- SharedDeviceState ----+  |               v
//!  QueueNotify ~~ ioeventfd ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~+          guest memory
//!  interrupt   <~ irqfd ~~~~~~~ SharedDeviceState
//! ```
//!
//! A [`Device`] defines what happens to the chains of its [`DeviceRing`]s. Everything else is here:
//! feature negotiation, queue set-up and reset, the thread, interrupts, quiescing, saving and
//! restoring. The driver is hostile. A [`Violation`] stops its device until the driver resets it,
//! and has no other effect.
//!
//! The transport's registers, `MmioInterface`, do not depend on threads: fuzzing uses them and the
//! worker without a thread.

mod backend_caller;
mod chain;
mod completion;
#[cfg(test)]
pub(crate) mod conformance;
mod device;
#[cfg(test)]
pub(crate) mod driver;
#[cfg(any(test, fuzzing))]
mod driver_buffer;
#[cfg(test)]
pub(crate) mod fake;
mod limiters;
mod messages;
mod mmio;
mod rate_limit_control;
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

pub(crate) use backend_caller::BackendCaller;
pub(crate) use chain::{Buffer, Buffers, Chain};
pub(crate) use completion::Completion;
pub(crate) use device::{Device, DeviceIo, DeviceKind, HandOverNeeds, QuiesceError};
#[cfg(any(test, fuzzing))]
pub(crate) use driver_buffer::DriverBuffer;
pub(crate) use limiters::Limiters;
pub use rate_limit_control::{RateLimitControl, RateLimitError};
#[cfg(any(test, fuzzing))]
pub(crate) use registers::VIRTIO_MMIO_QUEUE_RESET;
pub(crate) use request::{QueuedPacketsError, RequestError};
pub(crate) use ring::{DeviceRing, is_at};
pub(crate) use shared_state::SharedDeviceState;
pub(crate) use state::{VirtioState, decode_state, encode_state};
pub(crate) use transport::{PendingRequest, PendingRestore, REPLY_GRACE, Transport};
pub(crate) use violation::{RequestDefect, Violation};
pub(crate) use watcher::Watcher;

/// Bytes of address space that a device's registers occupy.
pub(crate) const REGISTERS_LEN: u64 = 0x1000;
