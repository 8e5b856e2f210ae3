//! The payloads of a store's own records, and the bounds of all of them. Bytes: FORMAT.md.

use dirty_tracker::{FrameRun, Gfn, Layout, PAGE_SIZE, Slot, SlotId};
use zerocopy::little_endian::{U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use super::error::Damage;
use crate::format::{
    Header, MAX_CONFIG, MAX_SECTION, MAX_SLOTS, MUST_UNDERSTAND, RECORD_HEAD_LEN, RecordHead,
};
use crate::section_tags;

/// First tag of the store's own records; tags below are state sections.
pub const TAG_STORE: u16 = 0x8000;
/// The epoch that this one builds on.
pub const TAG_PARENT: u16 = 0x8001;
/// The memory slots.
pub const TAG_LAYOUT: u16 = 0x8002;
/// Frames with their contents.
pub const TAG_FRAMES: u16 = 0x8003;
/// Frames of zeros.
pub const TAG_ZEROS: u16 = 0x8004;
/// The end of the file.
pub const TAG_TRAILER: u16 = 0x80ff;

/// Most frames in a record of contents: 1 MiB.
pub const MAX_RECORD_FRAMES: u64 = 256;
/// Most runs in a record of zeros.
pub const MAX_ZERO_RUNS: usize = 4096;
/// Most frames in all records of zeros of an epoch, in multiples of the guest's memory: what changes
/// while a full epoch copies may become zeros in each of its few passes.
pub const MAX_ZERO_PASSES: u64 = 8;

const RUN_LEN: usize = size_of::<RawRun>();
const RUNS_HEAD: usize = 8;
pub(crate) const PARENT_LEN: usize = size_of::<RawParent>();
pub(crate) const TRAILER_LEN: usize = size_of::<RawTrailer>();
/// Bytes from a file's end back to the head of its trailer.
pub(crate) const TAIL_LEN: u64 = (RECORD_HEAD_LEN + TRAILER_LEN) as u64;

/// The most bytes that a record of `tag` may have.
pub(crate) fn limit(tag: u16) -> u32 {
    let runs = |n: usize| RUNS_HEAD + n * RUN_LEN;
    let bytes = match tag {
        TAG_PARENT => PARENT_LEN,
        TAG_LAYOUT => MAX_SLOTS as usize * size_of::<RawSlot>(),
        TAG_FRAMES => runs(MAX_RECORD_FRAMES as usize) + (MAX_RECORD_FRAMES * PAGE_SIZE) as usize,
        TAG_ZEROS => runs(MAX_ZERO_RUNS),
        TAG_TRAILER => TRAILER_LEN,
        tag if tag == section_tags::CONFIG.0 => MAX_CONFIG as usize,
        _ => MAX_SECTION as usize,
    };
    bytes as u32
}

/// Whether a record is one of the store's own that this program knows.
pub(crate) fn is_known(tag: u16) -> bool {
    matches!(tag, TAG_PARENT | TAG_LAYOUT | TAG_FRAMES | TAG_ZEROS | TAG_TRAILER)
}

/// Reads a record's head more strictly than the wire does: a file has no newer writer to allow for.
pub(crate) fn decode_head(bytes: &[u8], sequence: u32) -> Result<RecordHead, Damage> {
    let head = RecordHead::read_from(bytes, sequence)?;
    let word = |at: usize| u64::from(u16::from_le_bytes([bytes[at], bytes[at + 1]]));
    all_zero([
        ("the undefined part of a record's flags", word(2) & !u64::from(MUST_UNDERSTAND)),
        ("the unused field of a record's head", word(6)),
    ])?;
    if is_known(head.tag) || head.tag == section_tags::CONFIG.0 {
        all_zero([("the instance of a record that has none", head.instance.into())])?;
        if !head.must_understand {
            let what = "the flag that a record must be understood";
            return Err(Damage::Mismatch { what, found: 0, expected: 1 });
        }
    }
    Ok(head)
}

/// Refuses anything else than 0 where nothing is defined.
fn all_zero<const N: usize>(fields: [(&'static str, u64); N]) -> Result<(), Damage> {
    match fields.into_iter().find(|(_, found)| *found != 0) {
        Some((what, found)) => Err(Damage::Mismatch { what, found, expected: 0 }),
        None => Ok(()),
    }
}

/// The epoch that another builds on. The digest covers all of it, so that no other epoch, from
/// whatever store, can stand in its place.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ParentLink {
    /// Its number.
    pub epoch: u64,
    /// The digest in its trailer.
    pub digest: u32,
}

#[derive(FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
struct RawParent {
    epoch: U64,
    digest: U32,
    zero: U32,
}

#[derive(FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
struct RawSlot {
    id: U32,
    zero: U32,
    base: U64,
    frames: U64,
}

#[derive(FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
struct RawRun {
    start: U64,
    count: U64,
}

#[derive(FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
struct RawTrailer {
    length: U64,
    frames: U64,
    zero_frames: U64,
    created_unix_ms: U64,
    records: U32,
    digest: U32,
}

/// The trailer: what the file must have been when it was finished.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Trailer {
    /// Bytes of the file, trailer included.
    pub(crate) length: u64,
    /// Frames with contents, in all records.
    pub(crate) frames: u64,
    /// Frames of zeros, in all records.
    pub(crate) zero_frames: u64,
    pub(crate) created_unix_ms: u64,
    /// Records, trailer included.
    pub(crate) records: u32,
    /// See [`FileDigest`].
    pub(crate) digest: u32,
}

/// The digest of an epoch file: CRC32C over the header and the heads of all records before the
/// trailer, each without its own CRC. A CRC right behind the bytes that it covers would cancel them:
/// what follows would not depend on them any more.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct FileDigest(u32);

impl FileDigest {
    pub(crate) fn of(header: &Header) -> Self {
        Self(header.checksum())
    }

    pub(crate) fn add(&mut self, head: &[u8; RECORD_HEAD_LEN]) {
        self.0 = crc32c::crc32c_append(self.0, &head[..RECORD_HEAD_LEN - 4]);
    }

    pub(crate) fn value(self) -> u32 {
        self.0
    }
}

fn wrong_size(what: &'static str, found: usize, expected: usize) -> Damage {
    Damage::Mismatch { what, found: found as u64, expected: expected as u64 }
}

pub(crate) fn encode_parent(parent: Option<ParentLink>) -> Vec<u8> {
    let (epoch, digest) = parent.map_or((0, 0), |p| (p.epoch, p.digest));
    RawParent { epoch: epoch.into(), digest: digest.into(), zero: 0.into() }.as_bytes().to_vec()
}

/// `child` is the epoch whose record it is: a parent is older.
pub(crate) fn decode_parent(payload: &[u8], child: u64) -> Result<Option<ParentLink>, Damage> {
    let raw = RawParent::read_from_bytes(payload)
        .map_err(|_| wrong_size("the length of the parent link", payload.len(), PARENT_LEN))?;
    all_zero([("the unused field of the parent link", raw.zero.get().into())])?;
    if raw.epoch.get() == 0 {
        all_zero([("the parent's digest in a full epoch", raw.digest.get().into())])?;
    }
    let link = ParentLink { epoch: raw.epoch.get(), digest: raw.digest.get() };
    if link.epoch >= child {
        let (found, expected) = (link.epoch, child.saturating_sub(1));
        return Err(Damage::Mismatch { what: "the parent's number", found, expected });
    }
    Ok((link.epoch > 0).then_some(link))
}

pub(crate) fn encode_layout(layout: &Layout) -> Vec<u8> {
    let raw = |s: &Slot| RawSlot {
        id: s.id.0.into(),
        zero: 0.into(),
        base: s.base.0.into(),
        frames: s.frames.into(),
    };
    layout.slots().flat_map(|s| raw(s).as_bytes().to_vec()).collect()
}

/// `hash` is the header's.
pub(crate) fn decode_layout(payload: &[u8], hash: u32) -> Result<Layout, Damage> {
    let raw = <[RawSlot]>::ref_from_bytes(payload).map_err(|_| {
        let whole = payload.len() / size_of::<RawSlot>() * size_of::<RawSlot>();
        wrong_size("the length of the memory layout", payload.len(), whole)
    })?;
    for s in raw {
        all_zero([("the unused field of a memory slot", s.zero.get().into())])?;
    }
    let out_of_order = |pair: &&[RawSlot]| pair[0].base.get() > pair[1].base.get();
    if let Some(pair) = raw.windows(2).find(out_of_order) {
        let (found, before) = (pair[1].base.get(), pair[0].base.get());
        return Err(Damage::SlotOrder { found, before });
    }
    let slot = |s: &RawSlot| Slot {
        id: SlotId(s.id.get()),
        base: Gfn(s.base.get()),
        frames: s.frames.get(),
    };
    let layout = Layout::new(raw.iter().map(slot))?;
    if layout.hash() != hash {
        let (found, expected) = (u64::from(layout.hash()), u64::from(hash));
        return Err(Damage::Mismatch { what: "the hash of the memory layout", found, expected });
    }
    Ok(layout)
}

/// Replaces `table` with the run table of a record of frames or zeros.
pub(crate) fn encode_runs(runs: &[FrameRun], table: &mut Vec<u8>) {
    table.clear();
    table.extend_from_slice(&(runs.len() as u64).to_le_bytes());
    for run in runs {
        let raw = RawRun { start: run.start.0.into(), count: run.count.into() };
        table.extend_from_slice(raw.as_bytes());
    }
}

/// Replaces `runs` with the table at the front of `payload`, every run checked against `layout`.
/// Returns the rest of the payload and the frames in all runs.
pub(crate) fn decode_runs<'p>(
    payload: &'p [u8],
    layout: &Layout,
    runs: &mut Vec<FrameRun>,
) -> Result<(&'p [u8], u64), Damage> {
    runs.clear();
    let short = |need: u64| Damage::Mismatch {
        what: "the length of a run table",
        found: payload.len() as u64,
        expected: need,
    };
    let (count, rest) = U64::read_from_prefix(payload).map_err(|_| short(RUNS_HEAD as u64))?;
    if count.get() == 0 {
        return Err(Damage::NoRuns);
    }
    let bytes = count.get().saturating_mul(RUN_LEN as u64);
    if bytes > rest.len() as u64 {
        return Err(short(bytes.saturating_add(RUNS_HEAD as u64)));
    }
    let (table, rest) = rest.split_at(bytes as usize);
    let raw = <[RawRun]>::ref_from_bytes(table).map_err(|_| short(bytes))?;
    let mut frames = 0u64;
    for r in raw {
        let run = FrameRun { start: Gfn(r.start.get()), count: r.count.get() };
        if !layout.contains(run) {
            return Err(Damage::Outside { run });
        }
        // So that a record names a frame once, and cannot cost more than memory is large.
        if let Some(before) = runs.last().copied().filter(|before| before.end() > run.start) {
            return Err(Damage::Order { run, before });
        }
        // No overflow: at most 2^16 runs of at most 2^40 frames.
        frames += run.count;
        runs.push(run);
    }
    Ok((rest, frames))
}

impl Trailer {
    pub(crate) fn to_bytes(self) -> Vec<u8> {
        let raw = RawTrailer {
            length: self.length.into(),
            frames: self.frames.into(),
            zero_frames: self.zero_frames.into(),
            created_unix_ms: self.created_unix_ms.into(),
            records: self.records.into(),
            digest: self.digest.into(),
        };
        raw.as_bytes().to_vec()
    }

    pub(crate) fn decode(payload: &[u8]) -> Result<Self, Damage> {
        let raw = RawTrailer::read_from_bytes(payload)
            .map_err(|_| wrong_size("the length of the trailer", payload.len(), TRAILER_LEN))?;
        Ok(Self {
            length: raw.length.get(),
            frames: raw.frames.get(),
            zero_frames: raw.zero_frames.get(),
            created_unix_ms: raw.created_unix_ms.get(),
            records: raw.records.get(),
            digest: raw.digest.get(),
        })
    }

    /// Compares with what was counted on the way to it, field by field.
    pub(crate) fn check(&self, counted: &Trailer) -> Result<(), Damage> {
        let fields = [
            ("the file's length", self.length, counted.length),
            ("the number of records", self.records.into(), counted.records.into()),
            ("the number of frames", self.frames, counted.frames),
            ("the number of zero frames", self.zero_frames, counted.zero_frames),
            ("the digest", self.digest.into(), counted.digest.into()),
        ];
        for (what, found, expected) in fields {
            if found != expected {
                return Err(Damage::Mismatch { what, found, expected });
            }
        }
        Ok(())
    }
}
