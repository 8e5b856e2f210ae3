//! The metadata service that a guest reaches through an interface (Firecracker's MMDS): no frame
//! for it reaches the tap.
//!
//! ```text
//! frame of the guest -> frames: for the service? -> stack: TCP -> http -> MetadataStore
//! receive queue <- waiting frames <------------------+
//! ```
//!
//! The guest is hostile. What it can make the service keep is bounded: connections, the bytes of
//! each, and frames. A frame costs the work of one TCP segment, of the requests that fit into the
//! buffers of its connection, and a look at every other connection: bytes are read again only if
//! more have come. Connections do not move with the guest, which begins new ones.

mod connection;
mod frames;
mod http;
mod port;
mod stack;
#[cfg(test)]
mod tests;

pub(super) use port::MmdsPort;
#[cfg(any(test, fuzzing))]
pub(in crate::devices) use stack::{MAX_CONNECTIONS, MAX_WAITING, MmdsStack};
