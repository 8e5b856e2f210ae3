//! Messages about copied disks: their list and their blocks. PROTOCOL.md specifies them.

use driftline_dirty_tracker::PAGE_SIZE;
use driftline_guest::DriveHead;
use zerocopy::little_endian::{U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use super::counts::Counts;
use super::raw::{RawCounts, RawRuns, runs_head};
use super::runs::{RunTable, exactly, fixed, malformed};
use crate::protocol::error::WireError;
use crate::protocol::limits::{MAX_DRIVE_ID, MAX_DRIVES, MAX_PAGES};
use crate::protocol::tag::Tag;

/// Bit 0 of a disk's flags: the guest cannot write to it.
const READONLY: u32 = 1;

#[derive(FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
struct RawDrive {
    bytes: U64,
    flags: U32,
    id_bytes: U32,
    id: [u8; MAX_DRIVE_ID],
}

// The limit of DRIVES depends on this size.
const _: () = assert!(size_of::<RawDrive>() == 16 + MAX_DRIVE_ID);

/// A message about copied disks. `drive` is an index into the list of DRIVES; the caller checks
/// that the disk exists and has these blocks.
#[derive(Debug)]
pub(crate) enum DriveMessage<'a> {
    /// The disks that are copied.
    Drives(Vec<DriveHead>),
    /// Blocks with content.
    Blocks { drive: u32, runs: RunTable<'a>, contents: &'a [u8] },
    /// Blocks of zeros.
    BlockZeros { drive: u32, runs: RunTable<'a> },
    /// End of the disks' part of this pass.
    BlocksEnd { pass: u32, counts: Counts },
}

impl<'a> DriveMessage<'a> {
    /// Decodes as [`WireMessage::parse`](super::WireMessage::parse), for these tags.
    pub(super) fn parse(tag: Tag, bytes: &'a [u8]) -> Result<Self, WireError> {
        Ok(match tag {
            Tag::Drives => Self::Drives(heads(bytes)?),
            Tag::Blocks => {
                let drive = fixed::<RawRuns>(tag, bytes)?.0.of.get();
                let (runs, contents) = RunTable::parse(tag, bytes)?;
                let blocks = runs.frames().filter(|n| *n <= MAX_PAGES);
                if blocks.is_none_or(|n| n * PAGE_SIZE != contents.len() as u64) {
                    return Err(malformed(tag, "its content is not as long as its runs require"));
                }
                Self::Blocks { drive, runs, contents }
            }
            Tag::BlockZeros => {
                let drive = fixed::<RawRuns>(tag, bytes)?.0.of.get();
                let (runs, rest) = RunTable::parse(tag, bytes)?;
                if !rest.is_empty() {
                    return Err(malformed(tag, "bytes follow its table of runs"));
                }
                Self::BlockZeros { drive, runs }
            }
            Tag::BlocksEnd => {
                let raw = exactly::<RawCounts>(tag, bytes)?;
                Self::BlocksEnd { pass: raw.number.get(), counts: raw.counts() }
            }
            _ => return Err(malformed(tag, "it is not a message about drives")),
        })
    }

    pub(crate) fn tag(&self) -> Tag {
        match self {
            Self::Drives(_) => Tag::Drives,
            Self::Blocks { .. } => Tag::Blocks,
            Self::BlockZeros { .. } => Tag::BlockZeros,
            Self::BlocksEnd { .. } => Tag::BlocksEnd,
        }
    }

    pub(super) fn to_bytes(&self) -> Vec<u8> {
        match self {
            Self::Drives(drives) => {
                let mut bytes = runs_head(drives.len()).as_bytes().to_vec();
                drives.iter().for_each(|drive| bytes.extend_from_slice(raw(drive).as_bytes()));
                bytes
            }
            Self::Blocks { drive, runs, contents } => {
                let head = blocks_head(*drive, runs.len());
                [head.as_bytes(), runs.0.as_bytes(), contents].concat()
            }
            Self::BlockZeros { drive, runs } => {
                [blocks_head(*drive, runs.len()).as_bytes(), runs.0.as_bytes()].concat()
            }
            Self::BlocksEnd { pass, counts } => {
                RawCounts::new(*pass, false, counts).as_bytes().to_vec()
            }
        }
    }
}

/// Returns the head of a table of `runs` runs of blocks of a disk.
pub(crate) fn blocks_head(drive: u32, runs: usize) -> RawRuns {
    RawRuns { of: drive.into(), ..runs_head(runs) }
}

/// Encodes a disk. A name that is too long is cut, and then matches no disk.
fn raw(drive: &DriveHead) -> RawDrive {
    let name = &drive.id.as_bytes()[..drive.id.len().min(MAX_DRIVE_ID)];
    let mut id = [0; MAX_DRIVE_ID];
    id[..name.len()].copy_from_slice(name);
    let flags = if drive.readonly { READONLY } else { 0 };
    let (bytes, id_bytes) = (drive.bytes.into(), (name.len() as u32).into());
    RawDrive { bytes, flags: flags.into(), id_bytes, id }
}

fn heads(bytes: &[u8]) -> Result<Vec<DriveHead>, WireError> {
    let (head, rest) = fixed::<RawRuns>(Tag::Drives, bytes)?;
    let count = head.runs.get();
    if !(1..=MAX_DRIVES).contains(&count) {
        return Err(malformed(Tag::Drives, "it has no drives, or too many"));
    }
    let (drives, rest) = <[RawDrive]>::ref_from_prefix_with_elems(rest, count as usize)
        .map_err(|_| malformed(Tag::Drives, "its table of drives is longer than the message"))?;
    if !rest.is_empty() {
        return Err(malformed(Tag::Drives, "bytes follow its table of drives"));
    }
    drives.iter().map(head_of).collect()
}

fn head_of(raw: &RawDrive) -> Result<DriveHead, WireError> {
    let name = raw.id.get(..raw.id_bytes.get() as usize).filter(|name| !name.is_empty());
    let name = name.and_then(|name| std::str::from_utf8(name).ok());
    // Error messages show the name on a terminal.
    let name = name.filter(|name| name.chars().all(|c| c.is_ascii_graphic()));
    let id = name.ok_or(malformed(Tag::Drives, "it has an invalid drive name"))?;
    let (bytes, readonly) = (raw.bytes.get(), raw.flags.get() & READONLY != 0);
    if bytes == 0 {
        return Err(malformed(Tag::Drives, "it has a drive of 0 bytes"));
    }
    Ok(DriveHead { id: id.to_owned(), bytes, readonly })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn head(id: &str, bytes: u64) -> DriveHead {
        DriveHead { id: id.to_owned(), bytes, readonly: bytes.is_multiple_of(2) }
    }

    #[test]
    fn drive_list_survives_encoding() {
        let long = "x".repeat(MAX_DRIVE_ID);
        let list = [head("disk0", 1), head(&long, u64::MAX), head("b", 4096)];
        let bytes = DriveMessage::Drives(list.to_vec()).to_bytes();
        assert_eq!(bytes.len(), 8 + 3 * 80);
        let DriveMessage::Drives(read) = DriveMessage::parse(Tag::Drives, &bytes).unwrap() else {
            panic!("another message");
        };
        assert_eq!(read, list);
    }

    #[test]
    fn invalid_drive_list_is_refused() {
        let bytes = DriveMessage::Drives(vec![head("disk0", 512)]).to_bytes();
        let error = |bytes: &[u8]| DriveMessage::parse(Tag::Drives, bytes).unwrap_err().to_string();
        let with = |at: usize, byte: u8| {
            let mut bytes = bytes.clone();
            bytes[at] = byte;
            error(&bytes)
        };
        for (at, byte, why) in [
            (0, 0, "it has no drives"),
            (0, MAX_DRIVES as u8 + 1, "or too many"),
            (0, 2, "longer than the message"),
            (8 + 12, 0, "an invalid drive name"),
            (8 + 12, MAX_DRIVE_ID as u8 + 1, "an invalid drive name"),
            (8 + 16, b'\n', "an invalid drive name"),
            (8 + 16, 0xff, "an invalid drive name"),
            (8 + 1, 0, "a drive of 0 bytes"),
        ] {
            let error = with(at, byte);
            assert!(error.contains(why), "byte {at}: {error}");
        }
        assert!(error(&[&bytes[..], &[0]].concat()).contains("bytes follow"));
        assert!(error(&bytes[..7]).contains("too short"));
    }
}
