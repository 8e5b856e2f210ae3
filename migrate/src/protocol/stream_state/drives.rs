//! Copied disks in the stream: which messages may arrive, and when.
//!
//! A pass is acknowledged once its blocks are durable here. So a destination that has sent PREPARED
//! has all writes that the guest had made durable at its source.

use driftline_dirty_tracker::PAGE_SIZE;
use driftline_guest::DriveHead;

use crate::protocol::error::{WireError, at_most, same};
use crate::protocol::message::{Counts, DriveMessage, RunTable};
use crate::protocol::tag::Tag;

/// The state of copied disks in the stream, beside `StreamState` for memory.
#[derive(Debug)]
pub(crate) struct DriveStreamState {
    heads: Vec<DriveHead>,
    /// Blocks of the pass in progress.
    counts: Counts,
    /// Whether the disks' part of the pass has ended.
    ended: bool,
    totals: Counts,
}

/// The action for a message about disks.
#[derive(Debug)]
pub(crate) enum DriveStep<'a> {
    /// None; the message has changed the state.
    Noted,
    /// Write the contents to these blocks of this disk, in order.
    Place { drive: usize, runs: RunTable<'a>, contents: &'a [u8] },
    /// Make these blocks of this disk zero.
    Zero { drive: usize, runs: RunTable<'a> },
}

impl DriveStreamState {
    pub(crate) fn new(heads: Vec<DriveHead>) -> Self {
        let (counts, totals) = Default::default();
        Self { heads, counts, ended: false, totals }
    }

    /// Whether no disk is copied.
    pub(crate) fn are_none(&self) -> bool {
        self.heads.is_empty()
    }

    /// Returns the blocks of all complete passes.
    pub(crate) fn totals(&self) -> Counts {
        self.totals
    }

    /// Returns the bytes of blocks received so far, including zeros.
    pub(crate) fn moved_bytes(&self) -> u64 {
        let blocks =
            [self.totals, self.counts].into_iter().map(|c| c.normal.saturating_add(c.zero));
        blocks.fold(0, u64::saturating_add).saturating_mul(PAGE_SIZE)
    }

    /// Processes a message of pass number `pass`.
    pub(crate) fn on<'a>(
        &mut self,
        pass: u32,
        message: DriveMessage<'a>,
    ) -> Result<DriveStep<'a>, WireError> {
        let tag = message.tag();
        if self.ended {
            return Err(WireError::unexpected(tag, "PASS_END"));
        }
        match message {
            DriveMessage::Blocks { drive, runs, contents } => {
                let (drive, blocks) = self.checked(tag, drive, runs)?;
                self.counts.normal += blocks;
                Ok(DriveStep::Place { drive, runs, contents })
            }
            DriveMessage::BlockZeros { drive, runs } => {
                let (drive, blocks) = self.checked(tag, drive, runs)?;
                self.counts.zero += blocks;
                Ok(DriveStep::Zero { drive, runs })
            }
            DriveMessage::BlocksEnd { pass: theirs, counts } if !self.are_none() => {
                same("the number of the pass", theirs.into(), pass.into())?;
                same("the pass's blocks with content", counts.normal, self.counts.normal)?;
                same("the pass's blocks of zeros", counts.zero, self.counts.zero)?;
                self.ended = true;
                Ok(DriveStep::Noted)
            }
            DriveMessage::BlocksEnd { .. } | DriveMessage::Drives(_) => {
                Err(WireError::unexpected(tag, "PAGES, ZERO or PASS_END"))
            }
        }
    }

    /// Ends the pass. Returns its number of blocks.
    pub(crate) fn end_pass(&mut self) -> Result<u64, WireError> {
        if !self.ended && !self.are_none() {
            return Err(WireError::unexpected(Tag::PassEnd, "BLOCKS, BLOCK_ZEROS or BLOCKS_END"));
        }
        self.ended = false;
        let counts = std::mem::take(&mut self.counts);
        self.totals.normal = self.totals.normal.saturating_add(counts.normal);
        self.totals.zero = self.totals.zero.saturating_add(counts.zero);
        Ok(counts.normal + counts.zero)
    }

    /// Checks that all `runs` are inside the disk, and that the pass has no more blocks than all
    /// disks. Returns the disk's index and the number of blocks.
    fn checked(
        &self,
        message: Tag,
        drive: u32,
        runs: RunTable<'_>,
    ) -> Result<(usize, u64), WireError> {
        let none = || WireError::NoDrive { message, drive, drives: self.heads.len() };
        let head = self.heads.get(drive as usize).ok_or_else(none)?;
        if let Some(run) = runs.iter().find(|run| run.end().0 > head.blocks()) {
            let (id, blocks) = (head.id.clone(), head.blocks());
            return Err(WireError::OutsideDrive { message, run, id, blocks });
        }
        // Each run is inside the disk, but a hostile table may repeat blocks.
        let found = runs.iter().fold(0u64, |n, run| n.saturating_add(run.count));
        let all = self.heads.iter().fold(0u64, |n, head| n.saturating_add(head.blocks()));
        let left = all - (self.counts.normal + self.counts.zero);
        at_most("blocks in the rest of the pass", found, left)?;
        Ok((drive as usize, found))
    }
}

#[cfg(test)]
mod tests {
    use driftline_dirty_tracker::{FrameRun, Gfn};
    use zerocopy::IntoBytes;

    use super::*;
    use crate::protocol::message::{RawRun, WireMessage, blocks_head};

    fn stream() -> DriveStreamState {
        let head = |id: &str, bytes| DriveHead { id: id.into(), bytes, readonly: false };
        DriveStreamState::new(vec![head("a", 4 * PAGE_SIZE), head("b", 512)])
    }

    fn zeros(
        stream: &mut DriveStreamState,
        drive: u32,
        start: u64,
        count: u64,
    ) -> Result<(), WireError> {
        let run = RawRun::from(FrameRun { start: Gfn(start), count });
        let bytes = [blocks_head(drive, 1).as_bytes(), run.as_bytes()].concat();
        let WireMessage::Drive(message) = WireMessage::parse(Tag::BlockZeros, &bytes)? else {
            panic!("another message");
        };
        stream.on(7, message).map(drop)
    }

    fn end(stream: &mut DriveStreamState, pass: u32, zero: u64) -> Result<(), WireError> {
        let counts = Counts { normal: 0, zero };
        stream.on(7, DriveMessage::BlocksEnd { pass, counts }).map(drop)
    }

    #[test]
    fn blocks_outside_copied_drives_are_refused() {
        let mut stream = stream();
        zeros(&mut stream, 0, 0, 4).unwrap();
        zeros(&mut stream, 1, 0, 1).unwrap();
        for (drive, start, count, why) in [
            (2, 0, 1, "names drive 2, and 2 are copied"),
            (u32::MAX, 0, 1, "names drive 4294967295, and 2 are copied"),
            (0, 4, 1, "names blocks 4..5 of disk \"a\", which has 4"),
            (0, 3, 2, "names blocks 3..5"),
            (1, 0, 2, "of disk \"b\", which has 1"),
            (0, u64::MAX, u64::MAX, "of disk \"a\", which has 4"),
        ] {
            let error = zeros(&mut self::stream(), drive, start, count).unwrap_err().to_string();
            assert!(error.contains(why), "{error}");
        }
    }

    #[test]
    fn blocks_of_a_pass_are_counted_and_bounded() {
        let mut stream = stream();
        zeros(&mut stream, 0, 0, 4).unwrap();
        zeros(&mut stream, 0, 0, 1).unwrap();
        let error = zeros(&mut stream, 0, 0, 1).unwrap_err().to_string();
        assert_eq!(error, "1 blocks in the rest of the pass, more than the 0 allowed");
        assert!(stream.end_pass().is_err(), "BLOCKS_END has not arrived");
        assert!(end(&mut stream, 6, 5).unwrap_err().to_string().contains("number of the pass"));
        assert!(end(&mut stream, 7, 4).unwrap_err().to_string().contains("blocks of zeros"));
        end(&mut stream, 7, 5).unwrap();
        assert!(zeros(&mut stream, 0, 0, 1).unwrap_err().to_string().contains("PASS_END was"));
        assert_eq!(stream.end_pass().unwrap(), 5);
        assert_eq!((stream.totals().zero, stream.moved_bytes()), (5, 5 * PAGE_SIZE));
        zeros(&mut stream, 0, 0, 4).unwrap();
    }

    #[test]
    fn without_a_drive_list_blocks_are_refused() {
        let mut none = DriveStreamState::new(Vec::new());
        assert!(zeros(&mut none, 0, 0, 1).unwrap_err().to_string().contains("and 0 are copied"));
        assert!(end(&mut none, 7, 0).unwrap_err().to_string().starts_with("BLOCKS_END came"));
        assert_eq!(none.end_pass().unwrap(), 0);
    }
}
