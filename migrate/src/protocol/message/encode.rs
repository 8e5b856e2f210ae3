//! Encodes messages.

use driftline_dirty_tracker::Layout;
use uuid::Uuid;
use zerocopy::IntoBytes;

use super::counts::Counts;
use super::kinds::{PreparedPayload, WireMessage};
use super::raw::*;
use super::runs::RunTable;
use crate::protocol::ids::{Secret, Token};
use crate::protocol::limits::MAX_TEXT;

impl WireMessage<'_> {
    /// Encodes the payload. The source sends PAGES, ZERO and FRAMES in parts ([`runs_head`]); they
    /// are encoded here for tests.
    pub(crate) fn to_bytes(&self) -> Vec<u8> {
        match self {
            Self::Hello { purpose, features, version } => {
                hello_bytes(*purpose as u8, *features, version)
            }
            Self::Refused { reason } | Self::Abort { reason } => clip(reason).as_bytes().to_vec(),
            Self::Config { token, layout, config } => config_bytes(*token, layout, config),
            Self::Ready { site, secret } => id_and_secret(*site.as_bytes(), secret),
            Self::PassBegin { pass, frames } => RawPass::new(*pass, *frames).as_bytes().to_vec(),
            Self::Pages { runs, contents } => runs_and(runs_head(runs.0.len()), runs, contents),
            Self::Zero { runs } | Self::Expect { runs } => {
                runs_and(runs_head(runs.0.len()), runs, &[])
            }
            Self::Frames { run } => RawRun::from(*run).as_bytes().to_vec(),
            Self::PassEnd { pass, counts } | Self::PassAck { pass, counts } => {
                counts_bytes(*pass, false, counts)
            }
            Self::StateHeads(heads) => heads.to_bytes(),
            Self::State(section) => [&section_head(section)[..], &section.bytes].concat(),
            Self::StateWhole { sections, frames } => {
                RawPass::new(*sections, *frames).as_bytes().to_vec()
            }
            Self::StateEnd { sections, was_running, counts } => {
                counts_bytes(*sections, *was_running, counts)
            }
            Self::Prepared(payload) => prepared_bytes(payload),
            Self::Late(bytes) => bytes.to_vec(),
            Self::Drive(message) => message.to_bytes(),
            Self::Memory(places) => places.to_bytes(),
            Self::Files(names) => names.to_bytes(),
            Self::Packed { codec, runs, packed } => {
                runs_and(packed_head(runs.0.len(), *codec), runs, packed)
            }
            Self::Verify => Vec::new(),
            Self::Digest(digest) => digest.to_le_bytes().to_vec(),
            Self::Connections { joined } => runs_head(*joined as usize).as_bytes().to_vec(),
            Self::Commit { token } | Self::Ended { token } => token.0.as_bytes().to_vec(),
            Self::Join { token, secret } => id_and_secret(*token.0.as_bytes(), secret),
            Self::Running { token, took_us } => token_and(token, *took_us),
            Self::Query { token, site, secret } => query_bytes(token, site, secret),
            Self::Answer { token, verdict } => token_and(token, *verdict as u64),
        }
    }
}

fn hello_bytes(purpose: u8, features: u64, version: &str) -> Vec<u8> {
    let raw = RawHello { purpose, zero: [0; 7], features: features.into() };
    [raw.as_bytes(), clip(version).as_bytes()].concat()
}

fn counts_bytes(number: u32, flag: bool, counts: &Counts) -> Vec<u8> {
    RawCounts::new(number, flag, counts).as_bytes().to_vec()
}

fn prepared_bytes(payload: &PreparedPayload) -> Vec<u8> {
    let raw = RawPrepared {
        token: *payload.token.0.as_bytes(),
        site: *payload.site.as_bytes(),
        digest: payload.digest.into(),
        zero: 0.into(),
        normal: payload.counts.normal.into(),
        zeros: payload.counts.zero.into(),
    };
    raw.as_bytes().to_vec()
}

fn query_bytes(token: &Token, site: &Uuid, secret: &Secret) -> Vec<u8> {
    let (token, site) = (*token.0.as_bytes(), *site.as_bytes());
    RawQuery { token, site, secret: *secret.as_bytes() }.as_bytes().to_vec()
}

/// Encodes `head`, the runs that it counts, and their content.
fn runs_and(head: RawRuns, runs: &RunTable<'_>, content: &[u8]) -> Vec<u8> {
    [head.as_bytes(), runs.0.as_bytes(), content].concat()
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
