//! Encodes messages.

use driftline_dirty_tracker::Layout;
use zerocopy::IntoBytes;

use super::counts::Counts;
use super::kinds::WireMessage;
use super::raw::*;
use crate::protocol::ids::{Secret, Token};
use crate::protocol::limits::MAX_TEXT;

impl WireMessage<'_> {
    /// Encodes the payload. The source sends PAGES, ZERO and FRAMES in parts ([`runs_head`]); they
    /// are encoded here for tests.
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
            Self::Ready { site, secret } => id_and_secret(*site.as_bytes(), secret),
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
            Self::StateHeads(heads) => heads.to_bytes(),
            Self::State(section) => [&section_head(section)[..], &section.bytes].concat(),
            Self::StateWhole { sections, frames } => {
                RawPass::new(*sections, *frames).as_bytes().to_vec()
            }
            Self::StateEnd { sections, was_running, counts } => {
                counted(*sections, *was_running, counts)
            }
            Self::Prepared(payload) => RawPrepared {
                token: *payload.token.0.as_bytes(),
                site: *payload.site.as_bytes(),
                digest: payload.digest.into(),
                zero: 0.into(),
                normal: payload.counts.normal.into(),
                zeros: payload.counts.zero.into(),
            }
            .as_bytes()
            .to_vec(),
            Self::Late(bytes) => bytes.to_vec(),
            Self::Drive(message) => message.to_bytes(),
            Self::Memory(places) => places.to_bytes(),
            Self::Files(names) => names.to_bytes(),
            Self::Packed { codec, runs, packed } => {
                [packed_head(runs.0.len(), *codec).as_bytes(), runs.0.as_bytes(), packed].concat()
            }
            Self::Verify => Vec::new(),
            Self::Digest(digest) => digest.to_le_bytes().to_vec(),
            Self::Connections { joined } => runs_head(*joined as usize).as_bytes().to_vec(),
            Self::Commit { token } | Self::Ended { token } => token.0.as_bytes().to_vec(),
            Self::Join { token, secret } => id_and_secret(*token.0.as_bytes(), secret),
            Self::Running { token, took_us } => token_and(token, *took_us),
            Self::Query { token, site, secret } => {
                let (token, site) = (*token.0.as_bytes(), *site.as_bytes());
                RawQuery { token, site, secret: *secret.as_bytes() }.as_bytes().to_vec()
            }
            Self::Answer { token, verdict } => token_and(token, *verdict as u64),
        }
    }
}

fn id_and_secret(id: [u8; 16], secret: &Secret) -> Vec<u8> {
    RawIdAndSecret { id, secret: *secret.as_bytes() }.as_bytes().to_vec()
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

/// Cuts a text to at most [`MAX_TEXT`] bytes, at a character boundary.
pub(crate) fn clip(text: &str) -> &str {
    &text[..text.floor_char_boundary(MAX_TEXT)]
}
