//! The fixed parts of messages, as PROTOCOL.md specifies them.

use driftline_dirty_tracker::{FrameRun, Gfn};
use driftline_guest::Section;
use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use super::counts::Counts;
use crate::protocol::codec::Codec;
use crate::protocol::ids::SECRET_BYTES;

/// A run of frames or blocks.
#[derive(Clone, Copy, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub(crate) struct RawRun {
    pub(super) start: U64,
    pub(super) count: U64,
}

impl From<FrameRun> for RawRun {
    fn from(run: FrameRun) -> Self {
        Self { start: run.start.0.into(), count: run.count.into() }
    }
}

impl From<&RawRun> for FrameRun {
    fn from(raw: &RawRun) -> Self {
        Self { start: Gfn(raw.start.get()), count: raw.count.get() }
    }
}

#[derive(FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub(super) struct RawHello {
    pub(super) purpose: u8,
    pub(super) zero: [u8; 7],
    pub(super) features: U64,
}

#[derive(FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub(super) struct RawConfig {
    pub(super) token: [u8; 16],
    pub(super) slots: U32,
    pub(super) config: U32,
}

#[derive(FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub(super) struct RawSlot {
    pub(super) id: U32,
    pub(super) zero: U32,
    pub(super) base: U64,
    pub(super) frames: U64,
}

#[derive(FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub(super) struct RawPass {
    /// The pass, or in STATE_WHOLE the number of sections.
    pub(super) number: U32,
    pub(super) zero: U32,
    pub(super) frames: U64,
}

#[derive(FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub(super) struct RawCounts {
    /// The pass, or in STATE_END the number of sections.
    pub(super) number: U32,
    /// In STATE_END 1 if the guest ran; otherwise 0.
    pub(super) flag: U32,
    pub(super) normal: U64,
    pub(super) zero: U64,
}

#[derive(FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub(crate) struct RawRuns {
    pub(super) runs: U32,
    /// In PACKED the codec, in messages about blocks their disk, in MEMORY the number of
    /// descriptors; otherwise 0.
    pub(super) of: U32,
}

#[derive(FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub(super) struct RawSection {
    pub(super) tag: U16,
    pub(super) instance: U16,
    pub(super) flags: U16,
    pub(super) zero: U16,
}

#[derive(FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub(super) struct RawPrepared {
    pub(super) token: [u8; 16],
    pub(super) site: [u8; 16],
    pub(super) digest: U32,
    pub(super) zero: U32,
    pub(super) normal: U64,
    pub(super) zeros: U64,
}

#[derive(FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub(super) struct RawQuery {
    pub(super) token: [u8; 16],
    pub(super) site: [u8; 16],
    pub(super) secret: [u8; SECRET_BYTES],
}

/// JOIN with a token, READY with a site.
#[derive(FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub(super) struct RawIdAndSecret {
    pub(super) id: [u8; 16],
    pub(super) secret: [u8; SECRET_BYTES],
}

#[derive(FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub(super) struct RawTokenAnd {
    pub(super) token: [u8; 16],
    pub(super) value: U64,
}

impl RawPass {
    pub(super) fn new(number: u32, frames: u64) -> Self {
        Self { number: number.into(), zero: 0.into(), frames: frames.into() }
    }
}

impl RawCounts {
    pub(super) fn new(number: u32, flag: bool, c: &Counts) -> Self {
        let (normal, zero) = (c.normal.into(), c.zero.into());
        Self { number: number.into(), flag: u32::from(flag).into(), normal, zero }
    }

    pub(super) fn counts(&self) -> Counts {
        Counts { normal: self.normal.get(), zero: self.zero.get() }
    }
}

/// Returns the head of a table of `runs` runs.
pub(crate) fn runs_head(runs: usize) -> RawRuns {
    RawRuns { runs: (runs as u32).into(), of: 0.into() }
}

/// Returns the head of the table of runs in PACKED.
pub(crate) fn packed_head(runs: usize, codec: Codec) -> RawRuns {
    RawRuns { of: u32::from(codec as u8).into(), ..runs_head(runs) }
}

/// Returns the head of a section's bytes in STATE.
pub(crate) fn section_head(s: &Section) -> [u8; 8] {
    let flags = u16::from(s.must_understand).into();
    let raw =
        RawSection { tag: s.tag.0.into(), instance: s.instance.into(), flags, zero: 0.into() };
    let mut bytes = [0; 8];
    bytes.copy_from_slice(raw.as_bytes());
    bytes
}
