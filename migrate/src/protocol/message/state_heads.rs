//! STATE_HEADS: the sections that the guest's state will have, without their content.

use driftline_guest::{SectionHead, SectionTag};
use zerocopy::little_endian::U16;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use super::raw::{RawRuns, runs_head};
use super::runs::{fixed, malformed};
use crate::protocol::error::WireError;
use crate::protocol::limits::MAX_SECTIONS;
use crate::protocol::tag::Tag;

/// Bit 0 of the flags: a reader that does not know the tag must refuse the state.
const MUST_UNDERSTAND: u16 = 1;

#[derive(FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
struct RawSectionHead {
    tag: U16,
    instance: U16,
    flags: U16,
    version: U16,
}

// The limit of STATE_HEADS depends on this size.
const _: () = assert!(size_of::<RawSectionHead>() == 8);

/// The heads of sections.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct StateHeads(pub(crate) Vec<SectionHead>);

impl StateHeads {
    pub(super) fn parse(bytes: &[u8]) -> Result<Self, WireError> {
        let tag = Tag::StateHeads;
        let (head, rest) = fixed::<RawRuns>(tag, bytes)?;
        let count = head.runs.get();
        if count > MAX_SECTIONS {
            return Err(malformed(tag, "it has more sections than a state may have"));
        }
        let heads = <[RawSectionHead]>::ref_from_bytes_with_elems(rest, count as usize)
            .map_err(|_| malformed(tag, "its table of sections is not as long as the message"))?;
        let heads = heads.iter().map(|raw| SectionHead {
            tag: SectionTag(raw.tag.get()),
            instance: raw.instance.get(),
            must_understand: raw.flags.get() & MUST_UNDERSTAND != 0,
            version: raw.version.get(),
        });
        Ok(Self(heads.collect()))
    }

    pub(super) fn to_bytes(&self) -> Vec<u8> {
        let mut bytes = runs_head(self.0.len()).as_bytes().to_vec();
        for head in &self.0 {
            let flags = if head.must_understand { MUST_UNDERSTAND } else { 0 };
            let (tag, instance) = (head.tag.0.into(), head.instance.into());
            let raw =
                RawSectionHead { tag, instance, flags: flags.into(), version: head.version.into() };
            bytes.extend_from_slice(raw.as_bytes());
        }
        bytes
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn heads_survive_encoding() {
        let head = |n: u16| SectionHead {
            tag: SectionTag(n),
            instance: n + 1,
            must_understand: n.is_multiple_of(2),
            version: n + 2,
        };
        let heads = StateHeads((6..9).map(head).collect());
        let bytes = heads.to_bytes();
        assert_eq!(StateHeads::parse(&bytes).unwrap(), heads);
        for (bytes, why) in [
            (&bytes[..bytes.len() - 1], "not as long as the message"),
            (&bytes[..7], "too short"),
            (&[0xff; 8][..], "more sections than a state may have"),
        ] {
            let error = StateHeads::parse(bytes).unwrap_err().to_string();
            assert!(error.contains(why), "{why}: {error}");
        }
    }
}
