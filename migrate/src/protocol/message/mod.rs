//! The messages of the protocol, and their bytes in both directions.
//!
//! A message is the payload of one record (`driftline_format`). PROTOCOL.md specifies each of them.
//! Decoding borrows from the receive buffer. The only allocations whose size the peer decides are
//! the slots of one CONFIG or MEMORY (at most [`MAX_SLOTS`](super::limits::MAX_SLOTS)), the disks
//! of one DRIVES, the names of one FILES, the heads of one STATE_HEADS, and the bytes of one STATE.
//! The bound of the tag limits each of them.

mod counts;
mod decode;
mod device_files;
mod drives;
mod encode;
mod kinds;
mod memory;
mod raw;
mod runs;
mod state;
mod state_heads;

pub(crate) use counts::Counts;
pub(crate) use device_files::DeviceFileNames;
pub(crate) use drives::{DriveMessage, blocks_head};
pub(crate) use encode::clip;
pub(crate) use kinds::{PreparedPayload, Purpose, WireMessage};
pub(crate) use memory::{MemoryPlace, MemoryPlaces};
pub(crate) use raw::{RawRun, packed_head, runs_head, section_head};
pub(crate) use runs::{RunTable, printable};
pub(crate) use state::StateDigest;
pub(crate) use state_heads::StateHeads;
