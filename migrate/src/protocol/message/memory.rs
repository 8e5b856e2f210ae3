//! MEMORY: where the descriptors that come with it hold the guest's memory slots.

use zerocopy::little_endian::{U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use super::raw::RawRuns;
use super::runs::{fixed, malformed};
use crate::protocol::error::WireError;
use crate::protocol::limits::{MAX_DESCRIPTORS, MAX_SLOTS};
use crate::protocol::tag::Tag;

/// The claim has two descriptors, and memory at least one.
const MIN_DESCRIPTORS: u32 = 3;

#[derive(FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
struct RawPlace {
    offset: U64,
    descriptor: U32,
    zero: U32,
}

// The limit of MEMORY depends on this size.
const _: () = assert!(size_of::<RawPlace>() == 16);

/// The place of one memory slot.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct MemoryPlace {
    /// Index of the descriptor.
    pub(crate) descriptor: usize,
    /// First byte of the slot in that file.
    pub(crate) offset: u64,
}

/// The place of each memory slot, in the order of CONFIG. Every descriptor that a place names is
/// one of those announced, other than the last two. The offsets are not checked.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct MemoryPlaces {
    /// Number of descriptors that come with the message. The last two are those of the claim.
    pub(crate) descriptors: usize,
    pub(crate) slots: Vec<MemoryPlace>,
}

impl MemoryPlaces {
    /// Decodes all of the message except for the byte that carries the descriptors.
    pub(super) fn parse(bytes: &[u8]) -> Result<Self, WireError> {
        let tag = Tag::Memory;
        let (head, rest) = fixed::<RawRuns>(tag, bytes)?;
        let (slots, descriptors) = (head.runs.get(), head.of.get());
        if !(1..=MAX_SLOTS).contains(&slots) {
            return Err(malformed(tag, "it has no memory slots, or too many"));
        }
        if !(MIN_DESCRIPTORS..=MAX_DESCRIPTORS).contains(&descriptors) {
            return Err(malformed(tag, "it has fewer than three descriptors, or too many"));
        }
        let (places, rest) = <[RawPlace]>::ref_from_prefix_with_elems(rest, slots as usize)
            .map_err(|_| malformed(tag, "its table of slots is longer than the message"))?;
        if !rest.is_empty() {
            return Err(malformed(tag, "bytes follow its table of slots"));
        }
        if places.iter().any(|place| place.descriptor.get() > descriptors - MIN_DESCRIPTORS) {
            return Err(malformed(tag, "it names a descriptor that is not of memory"));
        }
        let place = |raw: &RawPlace| MemoryPlace {
            descriptor: raw.descriptor.get() as usize,
            offset: raw.offset.get(),
        };
        let slots = places.iter().map(place).collect();
        Ok(Self { descriptors: descriptors as usize, slots })
    }

    pub(super) fn to_bytes(&self) -> Vec<u8> {
        let (runs, of) = ((self.slots.len() as u32).into(), (self.descriptors as u32).into());
        let mut bytes = RawRuns { runs, of }.as_bytes().to_vec();
        for place in &self.slots {
            let (offset, descriptor) = (place.offset.into(), (place.descriptor as u32).into());
            bytes.extend_from_slice(RawPlace { offset, descriptor, zero: 0.into() }.as_bytes());
        }
        bytes
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn places() -> MemoryPlaces {
        let place = |descriptor, offset| MemoryPlace { descriptor, offset };
        MemoryPlaces { descriptors: 4, slots: vec![place(1, 0), place(0, 1 << 40), place(1, 4096)] }
    }

    #[test]
    fn places_survive_encoding() {
        let bytes = places().to_bytes();
        assert_eq!(bytes.len(), 8 + 3 * 16);
        assert_eq!(MemoryPlaces::parse(&bytes).unwrap(), places());
    }

    #[test]
    fn invalid_places_are_refused() {
        let bytes = places().to_bytes();
        let error = |bytes: &[u8]| MemoryPlaces::parse(bytes).unwrap_err().to_string();
        let with = |at: usize, byte: u8| {
            let mut bytes = bytes.clone();
            bytes[at] = byte;
            error(&bytes)
        };
        for (at, byte, why) in [
            (0, 0, "no memory slots, or too many"),
            (1, 5, "no memory slots, or too many"),
            (0, 4, "longer than the message"),
            (0, 2, "bytes follow"),
            (4, 2, "fewer than three descriptors, or too many"),
            (4, MAX_DESCRIPTORS as u8 + 1, "fewer than three descriptors, or too many"),
            (4, 3, "names a descriptor that is not of memory"),
            (16, 2, "names a descriptor that is not of memory"),
        ] {
            let error = with(at, byte);
            assert!(error.contains(why), "byte {at}: {error}");
        }
        assert!(error(&bytes[..7]).contains("too short"));
    }
}
