//! The messages of the protocol, and their bytes in both directions.
//!
//! A message is the payload of one record (`driftline_format`). PROTOCOL.md draws each
//! of them; the structs here are those drawings. Decoding borrows from the receive buffer and
//! allocates nothing that a length from the peer decides, except the slots of one CONFIG (at most
//! [`MAX_SLOTS`](super::limits::MAX_SLOTS)).

mod counts;
mod decode;
mod drives;
mod encode;
mod kinds;
mod raw;
mod runs;
mod state;

pub(crate) use counts::Counts;
pub(crate) use drives::{DriveMessage, blocks_head};
pub(crate) use encode::clip;
pub(crate) use kinds::{PreparedPayload, Purpose, WireMessage};
pub(crate) use raw::{RawRun, packed_head, runs_head, section_head};
pub(crate) use runs::RunTable;
pub(crate) use state::StateDigest;
