//! The record with which the state of a snapshot begins. `FORMAT.md` specifies the bytes.

use zerocopy::little_endian::{U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// The beginning of a snapshot's state.
pub(crate) const TAG_SNAPSHOT: u16 = 0x8050;
/// Length of that record, in bytes.
pub(crate) const SNAPSHOT_LEN: usize = size_of::<RawSnapshot>();

#[derive(FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub(crate) struct RawSnapshot {
    pub(crate) created_unix_ms: U64,
    pub(crate) memory_bytes: U64,
    pub(crate) layout: U32,
    pub(crate) flags: U32,
}
