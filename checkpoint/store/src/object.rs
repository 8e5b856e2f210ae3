//! The objects of an epoch: guest memory and its drives, whose blocks are frames as well.

use std::collections::HashSet;

use driftline_dirty_tracker::{FrameRun, Gfn, Layout};
use driftline_guest::{DriveHead, block_layout};
use zerocopy::little_endian::U64;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use crate::address::of_object;
use crate::damage::{Damage, DriveDefect, in_range};

/// Maximum number of drives of an epoch.
pub(crate) const MAX_DRIVES: usize = 256;
/// Maximum length of a drive's name, in bytes.
const MAX_ID: usize = 64;

/// The objects of an epoch, which determine the frames that it can have.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Objects<'o> {
    pub(crate) layout: &'o Layout,
    pub(crate) drives: &'o [DriveHead],
}

impl Objects<'_> {
    /// Returns the number of objects.
    pub(crate) fn count(self) -> usize {
        1 + self.drives.len()
    }

    /// Returns `count` frames of `object` from `start` on, if the object has them.
    pub(crate) fn run(self, object: u16, start: u64, count: u64) -> Result<FrameRun, Damage> {
        let run = FrameRun { start: Gfn(start), count };
        let inside = match object {
            0 => self.layout.contains(run),
            n => {
                let blocks = self.drives.get(usize::from(n) - 1).map_or(0, DriveHead::blocks);
                count > 0 && start.checked_add(count).is_some_and(|end| end <= blocks)
            }
        };
        match inside {
            true => Ok(of_object(object, run)),
            // The error names a frame outside as it is numbered in its object.
            false => Err(Damage::Outside { object, run }),
        }
    }
}

#[derive(FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
struct RawLogDrive {
    bytes: U64,
    id: [u8; MAX_ID],
}

/// Length of the longest list of drives, in bytes.
pub(crate) const MAX_DRIVES_LEN: usize = MAX_DRIVES * size_of::<RawLogDrive>();

/// Returns the payload of a record of drives; `None` if no epoch can have these drives.
pub(crate) fn encode_drives(drives: &[DriveHead]) -> Option<Vec<u8>> {
    let mut payload = Vec::with_capacity(size_of_val(drives));
    for DriveHead { id, bytes, .. } in drives {
        let mut raw = RawLogDrive { bytes: (*bytes).into(), id: [0; MAX_ID] };
        raw.id.get_mut(..id.len())?.copy_from_slice(id.as_bytes());
        payload.extend_from_slice(raw.as_bytes());
    }
    decode_drives(&payload).is_ok_and(|read| read == drives).then_some(payload)
}

/// Returns the drives of an epoch that has drives.
pub(crate) fn decode_drives(payload: &[u8]) -> Result<Vec<DriveHead>, Damage> {
    let raw = <[RawLogDrive]>::ref_from_bytes(payload).map_err(|_| {
        let (what, found) = ("the length of the list of drives", payload.len() as u64);
        let expected = found - found % size_of::<RawLogDrive>() as u64;
        Damage::Mismatch { what, found, expected }
    })?;
    in_range("the number of drives", raw.len() as u64, 1, MAX_DRIVES as u64)?;
    let (mut names, mut drives) = (HashSet::new(), Vec::new());
    for (raw, number) in raw.iter().zip(1..) {
        let wrong = |cause| Damage::Drive { number, cause };
        let end = raw.id.iter().rposition(|byte| *byte != 0).map_or(0, |last| last + 1);
        let id = std::str::from_utf8(&raw.id[..end]);
        let id = id.map_err(|e| wrong(DriveDefect::Encoding(e)))?;
        if id.is_empty() || id.contains(char::is_control) {
            return Err(wrong(DriveDefect::Name));
        }
        if !names.insert(id) {
            return Err(wrong(DriveDefect::Twice));
        }
        let bytes = raw.bytes.get();
        block_layout(bytes).map_err(|e| wrong(DriveDefect::Size(e.into())))?;
        drives.push(DriveHead { id: id.to_owned(), bytes, readonly: false });
    }
    Ok(drives)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::address::{END, name_run, place};
    use driftline_dirty_tracker::{Slot, SlotId};

    fn head(id: &str, bytes: u64) -> DriveHead {
        DriveHead { id: id.to_owned(), bytes, readonly: false }
    }

    #[test]
    fn drive_list_round_trips_or_is_refused() {
        let long = "n".repeat(MAX_ID);
        let drives = [head("disk0", 4096 * 5 + 512), head(&long, 1 << 52)];
        let payload = encode_drives(&drives).unwrap();
        assert_eq!(decode_drives(&payload).unwrap(), drives);
        for none in [
            vec![],
            vec![head("", 512)],
            vec![head("a\0b", 512)],
            vec![head("a", 0)],
            vec![head("a", (1 << 52) + 1)],
            vec![head("a", 512), head("a", 512)],
            vec![head(&format!("{long}n"), 512)],
            vec![DriveHead { readonly: true, ..head("a", 512) }],
            (0..=MAX_DRIVES).map(|n| head(&n.to_string(), 512)).collect(),
        ] {
            assert_eq!(encode_drives(&none), None, "{none:?}");
        }
        let refusal = |payload: &[u8]| decode_drives(payload).unwrap_err().to_string();
        let short = refusal(&payload[1..]);
        assert_eq!(short, "the length of the list of drives is 143 and should be 72");
        assert_eq!(refusal(&[]), "the number of drives is 0 and should be between 1 and 256");
        let mut other = payload;
        other[8] = 0xff;
        assert!(decode_drives(&other).is_err());
    }

    #[test]
    fn block_lies_in_its_drive() {
        let layout = Layout::new([Slot { id: SlotId(0), base: Gfn(0), frames: 10 }]).unwrap();
        let drives = [head("a", 4096 * 5 + 512), head("b", 4096)];
        let objects = Objects { layout: &layout, drives: &drives };
        let run = objects.run(1, 4, 2).unwrap();
        assert_eq!((place(run.start), run.count), ((1, Gfn(4)), 2));
        assert_eq!(name_run(run), "blocks 0x4..0x6 of drive 1");
        let run = objects.run(0, 4, 2).unwrap();
        assert_eq!((run.start, name_run(run)), (Gfn(4), "pages 0x4..0x6".to_owned()));
        for (object, start, count) in
            [(0, 9, 2), (1, 5, 2), (2, 1, 1), (3, 0, 1), (1, 0, 0), (1, END, 1), (1, u64::MAX, 2)]
        {
            assert!(objects.run(object, start, count).is_err(), "{object} {start} {count}");
        }
    }
}
