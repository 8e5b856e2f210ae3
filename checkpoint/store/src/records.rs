//! The payloads of the store's own records, and the limits of all records. `FORMAT.md` specifies
//! the bytes.

use driftline_dirty_tracker::{FrameRun, Gfn, Layout, Slot, SlotId};
use driftline_format::{
    MAX_CONFIG, MAX_SECTION, MAX_SECTIONS, MAX_SLOTS, MAX_STATE, MUST_UNDERSTAND, RECORD_HEAD_LEN,
    RecordHead, layout_hash,
};
use driftline_guest::{LineId, SectionTag};
use uuid::Uuid;
use zerocopy::little_endian::{U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use crate::address::place;
use crate::alloc::SlotRun;
use crate::damage::{Damage, in_range};
use crate::limits::{MAX_EPOCH, MAX_GENERATION, NO_SLOT};
use crate::object::{MAX_DRIVES_LEN, Objects};

/// First tag of the store's own records; tags below are state sections.
pub(crate) const TAG_STORE: u16 = 0x8000;
/// The log and page file of the store.
pub(crate) const TAG_FILES: u16 = 0x8010;
/// The beginning of an epoch.
pub(crate) const TAG_EPOCH: u16 = 0x8011;
/// The memory slots.
pub(crate) const TAG_LAYOUT: u16 = 0x8012;
/// The places of frames.
pub(crate) const TAG_FRAMES: u16 = 0x8013;
/// Frames of zeros.
pub(crate) const TAG_ZEROS: u16 = 0x8014;
/// The drives.
pub(crate) const TAG_DRIVES: u16 = 0x8015;
/// The end of an epoch.
pub(crate) const TAG_COMMIT: u16 = 0x80ff;

/// Maximum number of frames in a record of frames.
pub(crate) const MAX_RECORD_FRAMES: usize = 1 << 16;
/// Maximum number of runs in a record.
pub(crate) const MAX_RUNS: usize = 4096;

const RUNS_HEAD: usize = 8;
pub(crate) const FILES_LEN: usize = size_of::<RawFiles>();
pub(crate) const COMMIT_LEN: usize = size_of::<RawCommit>();

/// Returns the maximum length of a record of `tag`, in bytes.
pub(crate) fn limit(tag: u16) -> u32 {
    let bytes = match tag {
        TAG_FILES => FILES_LEN,
        TAG_EPOCH => size_of::<RawFront>(),
        TAG_LAYOUT => MAX_SLOTS as usize * size_of::<RawLogSlot>(),
        TAG_FRAMES => RUNS_HEAD + MAX_RUNS * size_of::<RawPlaced>() + MAX_RECORD_FRAMES * 4,
        TAG_ZEROS => RUNS_HEAD + MAX_RUNS * size_of::<RawLogRun>(),
        TAG_DRIVES => MAX_DRIVES_LEN,
        TAG_COMMIT => COMMIT_LEN,
        tag if tag == SectionTag::CONFIG.0 => MAX_CONFIG as usize,
        _ => MAX_SECTION as usize,
    };
    bytes as u32
}

/// Returns whether `tag` is one of the store's own that this program knows.
pub(crate) fn is_known(tag: u16) -> bool {
    (TAG_FILES..=TAG_DRIVES).contains(&tag) || tag == TAG_COMMIT
}

/// Reads a record's head. The checks are stricter than on the wire, since a file has no newer
/// writer to allow for.
pub(crate) fn decode_head(bytes: &[u8], sequence: u32) -> Result<RecordHead, Damage> {
    let head = RecordHead::read_from(bytes, sequence)?;
    let word = |at: usize| u64::from(u16::from_le_bytes([bytes[at], bytes[at + 1]]));
    all_zero([
        ("the undefined part of a record's flags", word(2) & !u64::from(MUST_UNDERSTAND)),
        ("the unused field of a record's head", word(6)),
    ])?;
    if is_known(head.tag) || head.tag == SectionTag::CONFIG.0 {
        // The instance of a record of frames is the object, and is checked against the epoch's
        // objects.
        if !matches!(head.tag, TAG_FRAMES | TAG_ZEROS) {
            all_zero([("the instance of a record that has none", head.instance.into())])?;
        }
        if !head.must_understand {
            let what = "the flag that a record must be understood";
            return Err(Damage::Mismatch { what, found: 0, expected: 1 });
        }
    }
    Ok(head)
}

/// Fails if an undefined field is not 0.
pub(crate) fn all_zero<const N: usize>(fields: [(&'static str, u64); N]) -> Result<(), Damage> {
    match fields.into_iter().find(|(_, found)| *found != 0) {
        Some((what, found)) => Err(Damage::Mismatch { what, found, expected: 0 }),
        None => Ok(()),
    }
}

/// Fails if a state has too many sections, or too many bytes, with those of the configuration.
pub(crate) fn check_sections(sections: u32, bytes: u64) -> Result<(), Damage> {
    in_range("the number of state sections", sections.into(), 1, MAX_SECTIONS.into())?;
    in_range("the size of all state sections", bytes, 0, MAX_STATE)
}

/// The log and page file that a manifest names.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Files {
    /// Generation of the log.
    pub(crate) log: u64,
    /// Generation of the page file.
    pub(crate) pages: u64,
}

#[derive(FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
struct RawFiles {
    log: U64,
    pages: U64,
}

#[derive(FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
struct RawFront {
    epoch: U64,
    parent: U64,
    created_unix_ms: U64,
    layout: U32,
    flags: U32,
    line: [u8; 16],
}

#[derive(FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
struct RawLogSlot {
    id: U32,
    zero: U32,
    base: U64,
    frames: U64,
}

#[derive(FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
struct RawPlaced {
    start: U64,
    count: U32,
    slot: U32,
}

#[derive(FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
struct RawLogRun {
    start: U64,
    count: U64,
}

#[derive(FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
struct RawCommit {
    epoch: U64,
    oldest: U64,
    frames: U64,
    zero_frames: U64,
    bytes: U64,
    records: U32,
    digest: U32,
}

/// The beginning of an epoch.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Front {
    pub(crate) epoch: u64,
    pub(crate) parent: Option<u64>,
    pub(crate) created_unix_ms: u64,
    /// Line of the guest that took the epoch.
    pub(crate) line: LineId,
    /// [`layout_hash`] of the guest's memory.
    pub(crate) layout: u32,
    /// Whether the epoch has all of memory, even if it built on another one when it was taken.
    pub(crate) rebased: bool,
    /// Whether the epoch has drives, and a list of them.
    pub(crate) drives: bool,
}

/// Flags of [`Front::rebased`] and [`Front::drives`].
const REBASED: u32 = 1;
const DRIVES: u32 = 2;

impl Front {
    /// Returns whether the epoch needs no other epoch of its log.
    pub(crate) fn is_whole(&self) -> bool {
        self.rebased || self.parent.is_none()
    }

    pub(crate) fn encode(&self) -> Vec<u8> {
        let raw = RawFront {
            epoch: self.epoch.into(),
            parent: self.parent.unwrap_or(0).into(),
            created_unix_ms: self.created_unix_ms.into(),
            layout: self.layout.into(),
            flags: (if self.rebased { REBASED } else { 0 } | if self.drives { DRIVES } else { 0 })
                .into(),
            line: self.line.0.into_bytes(),
        };
        raw.as_bytes().to_vec()
    }

    pub(crate) fn decode(payload: &[u8]) -> Result<Self, Damage> {
        let raw = RawFront::read_from_bytes(payload).map_err(|_| {
            let what = "the length of a checkpoint's first record";
            wrong_size(what, payload.len(), size_of::<RawFront>())
        })?;
        let (epoch, parent) = (raw.epoch.get(), raw.parent.get());
        in_range("a checkpoint's number", epoch, 1, MAX_EPOCH)?;
        in_range("the parent's number", parent, 0, epoch - 1)?;
        all_zero([(
            "the undefined part of a checkpoint's flags",
            (raw.flags.get() & !(REBASED | DRIVES)).into(),
        )])?;
        Ok(Self {
            epoch,
            parent: (parent > 0).then_some(parent),
            created_unix_ms: raw.created_unix_ms.get(),
            line: LineId(Uuid::from_bytes(raw.line)),
            layout: raw.layout.get(),
            rebased: raw.flags.get() & REBASED != 0,
            drives: raw.flags.get() & DRIVES != 0,
        })
    }
}

/// The end of an epoch: totals that the epoch must match.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Commit {
    pub(crate) epoch: u64,
    /// Oldest epoch that is retained once this one is there.
    pub(crate) oldest: u64,
    /// Number of frames with contents that the epoch brought.
    pub(crate) frames: u64,
    /// Number of frames of zeros that the epoch brought.
    pub(crate) zero_frames: u64,
    /// Number of bytes that the epoch took: its own slots, and its records in the log as first
    /// written.
    pub(crate) bytes: u64,
    /// Number of its records, including this one.
    pub(crate) records: u32,
    /// Digest of the log up to here, see [`Digest`].
    pub(crate) digest: u32,
}

impl Commit {
    pub(crate) fn encode(&self) -> Vec<u8> {
        let raw = RawCommit {
            epoch: self.epoch.into(),
            oldest: self.oldest.into(),
            frames: self.frames.into(),
            zero_frames: self.zero_frames.into(),
            bytes: self.bytes.into(),
            records: self.records.into(),
            digest: self.digest.into(),
        };
        raw.as_bytes().to_vec()
    }

    pub(crate) fn decode(payload: &[u8]) -> Result<Self, Damage> {
        let what = "the length of a checkpoint's end";
        let raw = RawCommit::read_from_bytes(payload)
            .map_err(|_| wrong_size(what, payload.len(), COMMIT_LEN))?;
        Ok(Self {
            epoch: raw.epoch.get(),
            oldest: raw.oldest.get(),
            frames: raw.frames.get(),
            zero_frames: raw.zero_frames.get(),
            bytes: raw.bytes.get(),
            records: raw.records.get(),
            digest: raw.digest.get(),
        })
    }
}

/// The digest of a log: CRC32C over its header and the heads of all records, each without its own
/// CRC. A CRC directly after the bytes that it covers would cancel them: later values would not
/// depend on them any more.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Digest(pub(crate) u32);

impl Digest {
    pub(crate) fn add(&mut self, head: &[u8; RECORD_HEAD_LEN]) {
        self.0 = crc32c::crc32c_append(self.0, &head[..RECORD_HEAD_LEN - 4]);
    }
}

pub(crate) fn wrong_size(what: &'static str, found: usize, expected: usize) -> Damage {
    Damage::Mismatch { what, found: found as u64, expected: expected as u64 }
}

pub(crate) fn encode_files(files: Files) -> Vec<u8> {
    RawFiles { log: files.log.into(), pages: files.pages.into() }.as_bytes().to_vec()
}

pub(crate) fn decode_files(payload: &[u8]) -> Result<Files, Damage> {
    let raw = RawFiles::read_from_bytes(payload)
        .map_err(|_| wrong_size("the length of the files' names", payload.len(), FILES_LEN))?;
    for found in [raw.log.get(), raw.pages.get()] {
        in_range("a file's generation", found, 1, MAX_GENERATION)?;
    }
    Ok(Files { log: raw.log.get(), pages: raw.pages.get() })
}

pub(crate) fn encode_layout(layout: &Layout) -> Vec<u8> {
    let raw = |s: &Slot| RawLogSlot {
        id: s.id.0.into(),
        zero: 0.into(),
        base: s.base.0.into(),
        frames: s.frames.into(),
    };
    layout.slots().flat_map(|s| raw(s).as_bytes().to_vec()).collect()
}

/// Decodes a memory layout; `hash` is the one in the epoch's front.
pub(crate) fn decode_layout(payload: &[u8], hash: u32) -> Result<Layout, Damage> {
    let raw = <[RawLogSlot]>::ref_from_bytes(payload).map_err(|_| {
        let whole = payload.len() / size_of::<RawLogSlot>() * size_of::<RawLogSlot>();
        wrong_size("the length of the memory layout", payload.len(), whole)
    })?;
    for s in raw {
        all_zero([("the unused field of a memory slot", s.zero.get().into())])?;
    }
    let out_of_order = |pair: &&[RawLogSlot]| pair[0].base.get() > pair[1].base.get();
    if let Some(pair) = raw.windows(2).find(out_of_order) {
        let (found, before) = (pair[1].base.get(), pair[0].base.get());
        return Err(Damage::SlotOrder { found, before });
    }
    let slot = |s: &RawLogSlot| Slot {
        id: SlotId(s.id.get()),
        base: Gfn(s.base.get()),
        frames: s.frames.get(),
    };
    let layout = Layout::new(raw.iter().map(slot))?;
    let has = layout_hash(&layout);
    if has != hash {
        let (found, expected) = (u64::from(has), u64::from(hash));
        return Err(Damage::Mismatch { what: "the hash of the memory layout", found, expected });
    }
    Ok(layout)
}

/// Frames that are adjacent in memory and in the page file.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct StoredRun {
    pub(crate) frames: FrameRun,
    /// Slot of the first frame.
    pub(crate) slot: u32,
}

impl StoredRun {
    pub(crate) fn slots(&self) -> SlotRun {
        // Both come from a field of 32 bits.
        SlotRun { start: self.slot, count: self.frames.count as u32 }
    }
}

/// Replaces `table` with the payload of a record of frames of one object; `crcs` are the checksums
/// of their contents.
pub(crate) fn encode_frames(runs: &[StoredRun], crcs: &[u32], table: &mut Vec<u8>) {
    table.clear();
    table.extend_from_slice(&(runs.len() as u64).to_le_bytes());
    for StoredRun { frames, slot } in runs {
        let (start, count) = (place(frames.start).1, frames.count as u32);
        let raw = RawPlaced { start: start.0.into(), count: count.into(), slot: (*slot).into() };
        table.extend_from_slice(raw.as_bytes());
    }
    crcs.iter().for_each(|crc| table.extend_from_slice(&crc.to_le_bytes()));
}

/// Replaces `table` with the payload of a record of frames of zeros.
pub(crate) fn encode_zeros(runs: &[FrameRun], table: &mut Vec<u8>) {
    table.clear();
    table.extend_from_slice(&(runs.len() as u64).to_le_bytes());
    for run in runs {
        let start = place(run.start).1;
        let raw = RawLogRun { start: start.0.into(), count: run.count.into() };
        table.extend_from_slice(raw.as_bytes());
    }
}

/// Returns the table at the front of `payload`, and the bytes after it.
pub(super) fn table<T: FromBytes + KnownLayout + Immutable + Unaligned>(
    payload: &[u8],
) -> Result<(&[T], &[u8]), Damage> {
    let short = |need: u64| Damage::Mismatch {
        what: "the length of a run table",
        found: payload.len() as u64,
        expected: need,
    };
    let (count, rest) = U64::read_from_prefix(payload).map_err(|_| short(RUNS_HEAD as u64))?;
    if count.get() == 0 {
        return Err(Damage::NoRuns);
    }
    let bytes = count.get().saturating_mul(size_of::<T>() as u64);
    if bytes > rest.len() as u64 {
        return Err(short(bytes.saturating_add(RUNS_HEAD as u64)));
    }
    let (table, rest) = rest.split_at(bytes as usize);
    Ok((<[T]>::ref_from_bytes(table).map_err(|_| short(bytes))?, rest))
}

/// Fails if a run does not follow all runs before it.
fn check_order(run: FrameRun, before: &mut Option<FrameRun>) -> Result<(), Damage> {
    // This ensures that an epoch names a frame once, and cannot cost more than the memory's size.
    if let Some(before) = before.filter(|before| before.end() > run.start) {
        return Err(Damage::Order { run, before });
    }
    *before = Some(run);
    Ok(())
}

/// Replaces `runs` and `crcs` with the payload of a record of frames of `object`. `before` is the
/// preceding run of the epoch. Returns the number of frames.
pub(crate) fn decode_frames(
    payload: &[u8],
    object: u16,
    objects: Objects<'_>,
    before: &mut Option<FrameRun>,
    runs: &mut Vec<StoredRun>,
    crcs: &mut Vec<u32>,
) -> Result<u64, Damage> {
    runs.clear();
    crcs.clear();
    let (table, rest) = table::<RawPlaced>(payload)?;
    in_range("the number of runs in a record", table.len() as u64, 1, MAX_RUNS as u64)?;
    let mut frames = 0;
    for raw in table {
        let count = u64::from(raw.count.get());
        let run = objects.run(object, raw.start.get(), count)?;
        check_order(run, before)?;
        let slots = SlotRun { start: raw.slot.get(), count: raw.count.get() };
        if slots.start == NO_SLOT || slots.end() > u64::from(u32::MAX) {
            return Err(Damage::Slots { slots });
        }
        // No overflow: there are at most 2^12 runs of at most 2^32 frames.
        frames += count;
        runs.push(StoredRun { frames: run, slot: slots.start });
    }
    in_range("the number of pages in a record", frames, 1, MAX_RECORD_FRAMES as u64)?;
    if rest.len() as u64 != frames * 4 {
        let (found, expected) = (rest.len() as u64, frames * 4);
        return Err(Damage::Mismatch { what: "the length of pages' checksums", found, expected });
    }
    crcs.extend(rest.chunks_exact(4).map(|c| u32::from_le_bytes([c[0], c[1], c[2], c[3]])));
    Ok(frames)
}

/// Decodes a record of frames of zeros, like [`decode_frames`].
pub(crate) fn decode_zeros(
    payload: &[u8],
    object: u16,
    objects: Objects<'_>,
    before: &mut Option<FrameRun>,
    runs: &mut Vec<FrameRun>,
) -> Result<u64, Damage> {
    runs.clear();
    let (table, rest) = table::<RawLogRun>(payload)?;
    let mut frames = 0;
    for raw in table {
        let run = objects.run(object, raw.start.get(), raw.count.get())?;
        check_order(run, before)?;
        frames += run.count;
        runs.push(run);
    }
    if !rest.is_empty() {
        let (what, found) = ("the bytes after a table of zero pages", rest.len() as u64);
        return Err(Damage::Mismatch { what, found, expected: 0 });
    }
    Ok(frames)
}
