//! The bytes of each message: the fixed parts as PROTOCOL.md draws them, and how messages become
//! bytes.

use driftline_checkpoint::Section;
use driftline_dirty_tracker::{FrameRun, Gfn, Layout};
use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use super::{Counts, Message, Token, clip};
use crate::transport::compression::Codec;

/// A run of frames as it lies in PAGES and ZERO.
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
    /// In STATE_END 1 if the guest ran; else 0.
    pub(super) flag: U32,
    pub(super) normal: U64,
    pub(super) zero: U64,
}

#[derive(FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub(crate) struct RawRuns {
    pub(super) runs: U32,
    /// 0, but of PACKED the codec, and of blocks their drive.
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
}

#[derive(FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub(super) struct RawTokenAnd {
    pub(super) token: [u8; 16],
    pub(super) value: U64,
}

impl RawPass {
    fn new(number: u32, frames: u64) -> Self {
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

impl Message<'_> {
    /// The payload's bytes. PAGES, ZERO and FRAMES are sent from their own places ([`runs_head`]), so
    /// here they only serve tests and tools.
    pub(crate) fn to_bytes(&self) -> Vec<u8> {
        let counted = |number: u32, flag: bool, c: &Counts| {
            RawCounts::new(number, flag, c).as_bytes().to_vec()
        };
        match self {
            Self::Hello { purpose, features, version } => {
                let raw = RawHello {
                    purpose: *purpose as u8,
                    zero: [0; 7],
                    features: (*features).into(),
                };
                [raw.as_bytes(), clip(version).as_bytes()].concat()
            }
            Self::Refused { reason } | Self::Abort { reason } => clip(reason).as_bytes().to_vec(),
            Self::Config { token, layout, config } => config_bytes(*token, layout, config),
            Self::Ready { site } => site.as_bytes().to_vec(),
            Self::PassBegin { pass, frames } => RawPass::new(*pass, *frames).as_bytes().to_vec(),
            Self::Pages { runs, contents } => {
                [runs_head(runs.0.len()).as_bytes(), runs.0.as_bytes(), contents].concat()
            }
            Self::Zero { runs } | Self::Expect { runs } => {
                [runs_head(runs.0.len()).as_bytes(), runs.0.as_bytes()].concat()
            }
            Self::Frames { run } => RawRun::from(*run).as_bytes().to_vec(),
            Self::PassEnd { pass, counts } | Self::PassAck { pass, counts } => {
                counted(*pass, false, counts)
            }
            Self::State(section) => [&section_head(section)[..], &section.bytes].concat(),
            Self::StateWhole { sections, frames } => {
                RawPass::new(*sections, *frames).as_bytes().to_vec()
            }
            Self::StateEnd { sections, was_running, counts } => {
                counted(*sections, *was_running, counts)
            }
            Self::Prepared(says) => RawPrepared {
                token: *says.token.0.as_bytes(),
                site: *says.site.as_bytes(),
                digest: says.digest.into(),
                zero: 0.into(),
                normal: says.counts.normal.into(),
                zeros: says.counts.zero.into(),
            }
            .as_bytes()
            .to_vec(),
            Self::Late(bytes) => bytes.to_vec(),
            Self::Drive(message) => message.to_bytes(),
            Self::Packed { codec, runs, packed } => {
                [packed_head(runs.0.len(), *codec).as_bytes(), runs.0.as_bytes(), packed].concat()
            }
            Self::Verify => Vec::new(),
            Self::Digest(digest) => digest.to_le_bytes().to_vec(),
            Self::Connections { joined } => runs_head(*joined as usize).as_bytes().to_vec(),
            Self::Commit { token } | Self::Ended { token } | Self::Join { token } => {
                token.0.as_bytes().to_vec()
            }
            Self::Running { token, took_us } => token_and(token, *took_us),
            Self::Query { token, site } => [&token.0.as_bytes()[..], &site.as_bytes()[..]].concat(),
            Self::Answer { token, verdict } => token_and(token, *verdict as u64),
        }
    }
}

fn token_and(token: &Token, value: u64) -> Vec<u8> {
    let raw = RawTokenAnd { token: *token.0.as_bytes(), value: value.into() };
    raw.as_bytes().to_vec()
}

fn config_bytes(token: Token, layout: &Layout, config: &[u8]) -> Vec<u8> {
    let raw = RawConfig {
        token: *token.0.as_bytes(),
        slots: (layout.slots().len() as u32).into(),
        config: (config.len() as u32).into(),
    };
    let mut bytes = raw.as_bytes().to_vec();
    for s in layout.slots() {
        let (id, zero) = (s.id.0.into(), 0.into());
        let raw = RawSlot { id, zero, base: s.base.0.into(), frames: s.frames.into() };
        bytes.extend_from_slice(raw.as_bytes());
    }
    bytes.extend_from_slice(config);
    bytes
}

/// What stands before a table of `runs` runs.
pub(crate) fn runs_head(runs: usize) -> RawRuns {
    RawRuns { runs: (runs as u32).into(), of: 0.into() }
}

/// What stands before the table of runs in PACKED.
pub(crate) fn packed_head(runs: usize, codec: Codec) -> RawRuns {
    RawRuns { of: u32::from(codec as u8).into(), ..runs_head(runs) }
}

/// What stands before a section's bytes in STATE.
pub(crate) fn section_head(s: &Section) -> [u8; 8] {
    let flags = u16::from(s.must_understand).into();
    let raw =
        RawSection { tag: s.tag.0.into(), instance: s.instance.into(), flags, zero: 0.into() };
    let mut bytes = [0; 8];
    bytes.copy_from_slice(raw.as_bytes());
    bytes
}
