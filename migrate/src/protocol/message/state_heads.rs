//! STATE_HEADS: the sections that the guest's state will have, without their content.

use driftline_guest::{MAX_SECTION_NAME, SectionHead, SectionTag};
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
    /// Followed by zeros.
    name: [u8; MAX_SECTION_NAME],
}

// The limit of STATE_HEADS depends on this size.
const _: () = assert!(size_of::<RawSectionHead>() == 8 + MAX_SECTION_NAME);

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
        heads.iter().map(decoded).collect::<Result<_, _>>().map(Self)
    }

    /// Encodes the same. A name that is too long is cut.
    pub(super) fn to_bytes(&self) -> Vec<u8> {
        let mut bytes = runs_head(self.0.len()).as_bytes().to_vec();
        for head in &self.0 {
            let flags = if head.must_understand { MUST_UNDERSTAND } else { 0 };
            let (tag, instance) = (head.tag.0.into(), head.instance.into());
            let (flags, version) = (flags.into(), head.version.into());
            let mut name = [0; MAX_SECTION_NAME];
            name.iter_mut().zip(head.name.bytes()).for_each(|(to, from)| *to = from);
            let raw = RawSectionHead { tag, instance, flags, version, name };
            bytes.extend_from_slice(raw.as_bytes());
        }
        bytes
    }
}

fn decoded(raw: &RawSectionHead) -> Result<SectionHead, WireError> {
    let length = raw.name.iter().position(|byte| *byte == 0).unwrap_or(MAX_SECTION_NAME);
    let (name, rest) = raw.name.split_at(length);
    let is_printable = |byte: &u8| byte.is_ascii_graphic() || *byte == b' ';
    if name.is_empty() || !name.iter().all(is_printable) || rest.iter().any(|byte| *byte != 0) {
        return Err(malformed(Tag::StateHeads, "a section's name is empty or not printable"));
    }
    Ok(SectionHead {
        tag: SectionTag(raw.tag.get()),
        name: String::from_utf8_lossy(name).into_owned(),
        instance: raw.instance.get(),
        must_understand: raw.flags.get() & MUST_UNDERSTAND != 0,
        version: raw.version.get(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn heads_survive_encoding() {
        let head = |n: u16| SectionHead {
            tag: SectionTag(n),
            name: "n".repeat(usize::from(n - 5) * 8),
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

    #[test]
    fn invalid_section_names_are_refused() {
        let name = "later state".to_owned();
        let head = SectionHead {
            tag: SectionTag(6),
            name,
            instance: 0,
            must_understand: true,
            version: 1,
        };
        let bytes = StateHeads(vec![head]).to_bytes();
        let at = bytes.len() - MAX_SECTION_NAME;
        for (offset, byte) in [(0, 0), (0, b'\n'), (0, 0xff), (MAX_SECTION_NAME - 1, b'x')] {
            let mut bytes = bytes.clone();
            bytes[at + offset] = byte;
            let error = StateHeads::parse(&bytes).unwrap_err().to_string();
            assert!(error.contains("name is empty or not printable"), "{offset}: {error}");
        }
    }
}
