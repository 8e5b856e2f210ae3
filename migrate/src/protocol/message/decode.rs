//! Decodes payloads.

use driftline_dirty_tracker::{FrameRun, Gfn, Layout, PAGE_SIZE, Slot, SlotId};
use driftline_guest::{Section, SectionTag};
use uuid::Uuid;
use zerocopy::FromBytes;

use super::counts::Counts;
use super::device_files::DeviceFileNames;
use super::drives::DriveMessage;
use super::kinds::{PreparedPayload, Purpose, WireMessage};
use super::memory::MemoryPlaces;
use super::raw::*;
use super::runs::{RunTable, exactly, fixed, malformed, text};
use super::state_heads::StateHeads;
use crate::protocol::codec::Codec;
use crate::protocol::decision::Verdict;
use crate::protocol::error::WireError;
use crate::protocol::ids::{Secret, Token};
use crate::protocol::limits::{MAX_PAGES, MAX_SLOTS};
use crate::protocol::tag::Tag;

impl<'a> WireMessage<'a> {
    /// Decodes a payload. The caller has checked its length and its checksum.
    pub(crate) fn parse(tag: Tag, bytes: &'a [u8]) -> Result<Self, WireError> {
        Ok(match tag {
            Tag::Hello => {
                let (raw, rest) = fixed::<RawHello>(tag, bytes)?;
                let purpose = match raw.purpose {
                    0 => Purpose::Serve,
                    1 => Purpose::Move,
                    2 => Purpose::Query,
                    3 => Purpose::Join,
                    _ => return Err(malformed(tag, "its purpose is unknown")),
                };
                Self::Hello { purpose, features: raw.features.get(), version: text(tag, rest)? }
            }
            Tag::Refused => Self::Refused { reason: text(tag, bytes)? },
            Tag::Abort => Self::Abort { reason: text(tag, bytes)? },
            Tag::Config => Self::parse_config(bytes)?,
            Tag::Ready => {
                let raw = exactly::<RawIdAndSecret>(tag, bytes)?;
                let secret = Secret::from_bytes(raw.secret);
                Self::Ready { site: Uuid::from_bytes(raw.id), secret }
            }
            Tag::Verify => {
                exactly::<[u8; 0]>(tag, bytes)?;
                Self::Verify
            }
            Tag::Digest => Self::Digest(u128::from_le_bytes(*exactly::<[u8; 16]>(tag, bytes)?)),
            Tag::Late => Self::Late(bytes),
            Tag::Drives | Tag::Blocks | Tag::BlockZeros | Tag::BlocksEnd => {
                Self::Drive(DriveMessage::parse(tag, bytes)?)
            }
            Tag::Memory => Self::Memory(MemoryPlaces::parse(bytes)?),
            Tag::StateHeads => Self::StateHeads(StateHeads::parse(bytes)?),
            Tag::Files => Self::Files(DeviceFileNames::parse(bytes)?),
            Tag::Join => {
                let raw = exactly::<RawIdAndSecret>(tag, bytes)?;
                Self::Join { token: token(raw.id), secret: Secret::from_bytes(raw.secret) }
            }
            Tag::Connections => {
                let raw = exactly::<RawRuns>(tag, bytes)?;
                Self::Connections { joined: raw.runs.get() }
            }
            Tag::PassBegin
            | Tag::Pages
            | Tag::Packed
            | Tag::Frames
            | Tag::Zero
            | Tag::Expect
            | Tag::PassEnd
            | Tag::PassAck => Self::parse_pass(tag, bytes)?,
            Tag::State | Tag::StateWhole | Tag::StateEnd => Self::parse_state(tag, bytes)?,
            Tag::Prepared | Tag::Commit | Tag::Running | Tag::Query | Tag::Answer | Tag::Ended => {
                Self::parse_hand_over(tag, bytes)?
            }
        })
    }

    /// Decodes a message of a pass.
    fn parse_pass(tag: Tag, bytes: &'a [u8]) -> Result<Self, WireError> {
        Ok(match tag {
            Tag::PassBegin => {
                let raw = exactly::<RawPass>(tag, bytes)?;
                Self::PassBegin { pass: raw.number.get(), frames: raw.frames.get() }
            }
            Tag::Pages => {
                let (runs, contents) = RunTable::parse(tag, bytes)?;
                let frames = runs.frames().filter(|n| *n <= MAX_PAGES);
                if frames.is_none_or(|n| n * PAGE_SIZE != contents.len() as u64) {
                    return Err(malformed(tag, "its content is not as long as its runs require"));
                }
                Self::Pages { runs, contents }
            }
            Tag::Packed => {
                let codec = Codec::from_number(fixed::<RawRuns>(tag, bytes)?.0.of.get());
                let codec = codec.ok_or(malformed(tag, "its codec is unknown"))?;
                let (runs, packed) = RunTable::parse(tag, bytes)?;
                if runs.frames().is_none_or(|n| n > MAX_PAGES) {
                    return Err(malformed(tag, "its runs have too many frames"));
                }
                Self::Packed { codec, runs, packed }
            }
            Tag::Frames => {
                let run = FrameRun::from(exactly::<RawRun>(tag, bytes)?);
                if run.count == 0 || run.count > MAX_PAGES {
                    return Err(malformed(tag, "its run is empty or too long"));
                }
                Self::Frames { run }
            }
            Tag::Zero | Tag::Expect => {
                let (runs, rest) = RunTable::parse(tag, bytes)?;
                if !rest.is_empty() {
                    return Err(malformed(tag, "bytes follow its table of runs"));
                }
                match tag {
                    Tag::Zero => Self::Zero { runs },
                    _ => Self::Expect { runs },
                }
            }
            Tag::PassEnd | Tag::PassAck => {
                let raw = exactly::<RawCounts>(tag, bytes)?;
                let (pass, counts) = (raw.number.get(), raw.counts());
                match tag {
                    Tag::PassEnd => Self::PassEnd { pass, counts },
                    _ => Self::PassAck { pass, counts },
                }
            }
            _ => return Err(malformed(tag, "its tag belongs to another group")),
        })
    }

    /// Decodes a message of the guest's state.
    fn parse_state(tag: Tag, bytes: &'a [u8]) -> Result<Self, WireError> {
        Ok(match tag {
            Tag::State => {
                let (raw, rest) = fixed::<RawSection>(tag, bytes)?;
                Self::State(Section {
                    tag: SectionTag(raw.tag.get()),
                    instance: raw.instance.get(),
                    must_understand: raw.flags.get() & 1 != 0,
                    bytes: rest.to_vec(),
                })
            }
            Tag::StateWhole => {
                let raw = exactly::<RawPass>(tag, bytes)?;
                Self::StateWhole { sections: raw.number.get(), frames: raw.frames.get() }
            }
            Tag::StateEnd => {
                let raw = exactly::<RawCounts>(tag, bytes)?;
                Self::StateEnd {
                    sections: raw.number.get(),
                    was_running: raw.flag.get() != 0,
                    counts: raw.counts(),
                }
            }
            _ => return Err(malformed(tag, "its tag belongs to another group")),
        })
    }

    /// Decodes a message of the hand-over.
    fn parse_hand_over(tag: Tag, bytes: &'a [u8]) -> Result<Self, WireError> {
        Ok(match tag {
            Tag::Prepared => {
                let raw = exactly::<RawPrepared>(tag, bytes)?;
                Self::Prepared(PreparedPayload {
                    token: token(raw.token),
                    site: Uuid::from_bytes(raw.site),
                    digest: raw.digest.get(),
                    counts: Counts { normal: raw.normal.get(), zero: raw.zeros.get() },
                })
            }
            Tag::Commit => Self::Commit { token: token(*exactly::<[u8; 16]>(tag, bytes)?) },
            Tag::Ended => Self::Ended { token: token(*exactly::<[u8; 16]>(tag, bytes)?) },
            Tag::Running => {
                let raw = exactly::<RawTokenAnd>(tag, bytes)?;
                Self::Running { token: token(raw.token), took_us: raw.value.get() }
            }
            Tag::Query => {
                let raw = exactly::<RawQuery>(tag, bytes)?;
                let secret = Secret::from_bytes(raw.secret);
                Self::Query { token: token(raw.token), site: Uuid::from_bytes(raw.site), secret }
            }
            Tag::Answer => {
                let raw = exactly::<RawTokenAnd>(tag, bytes)?;
                let verdict = Verdict::ALL.into_iter().find(|v| *v as u64 == raw.value.get());
                let verdict = verdict.ok_or(malformed(tag, "its verdict is unknown"))?;
                Self::Answer { token: token(raw.token), verdict }
            }
            _ => return Err(malformed(tag, "its tag belongs to another group")),
        })
    }

    fn parse_config(bytes: &'a [u8]) -> Result<Self, WireError> {
        let tag = Tag::Config;
        let (raw, rest) = fixed::<RawConfig>(tag, bytes)?;
        if raw.slots.get() > MAX_SLOTS {
            return Err(malformed(tag, "it has more memory slots than a guest may have"));
        }
        let (slots, config) =
            <[RawSlot]>::ref_from_prefix_with_elems(rest, raw.slots.get() as usize)
                .map_err(|_| malformed(tag, "its table of slots is longer than the message"))?;
        if config.len() != raw.config.get() as usize {
            return Err(malformed(tag, "its configuration has another length than announced"));
        }
        let layout = Layout::new(slots.iter().map(|s| Slot {
            id: SlotId(s.id.get()),
            base: Gfn(s.base.get()),
            frames: s.frames.get(),
        }))?;
        Ok(Self::Config { token: token(raw.token), layout, config })
    }
}

fn token(bytes: [u8; 16]) -> Token {
    Token(Uuid::from_bytes(bytes))
}

#[cfg(test)]
mod tests {
    use zerocopy::IntoBytes;

    use super::*;

    #[test]
    fn all_bytes_of_the_codec_count() {
        let packed = |codec: u32| {
            let (head, run) =
                ([1, codec].map(u32::to_le_bytes), FrameRun { start: Gfn(0), count: 1 });
            [head.as_flattened(), RawRun::from(run).as_bytes()].concat()
        };
        let lz4 = packed(1);
        let message = WireMessage::parse(Tag::Packed, &lz4).unwrap();
        assert!(matches!(message, WireMessage::Packed { codec: Codec::Lz4, .. }), "{message:?}");
        for codec in [0, 3, 1 | 1 << 8] {
            let error = WireMessage::parse(Tag::Packed, &packed(codec)).unwrap_err().to_string();
            assert!(error.contains("its codec is unknown"), "{codec}: {error}");
        }
    }
}
