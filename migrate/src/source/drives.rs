//! Copying disks: their selection, the blocks of each that are still to be sent, and their part of
//! a pass.
//!
//! A pass drains the dirty blocks before it reads them, so that no write is missed (see
//! [`GuestDrive`]). It reads through an open file of its own, without the device, on the
//! [storage thread](super::storage_thread). Blocks are copied into one reused buffer first, because
//! the checksum precedes the bytes and the guest may write meanwhile.

use std::fs::File;
use std::iter::Peekable;
use std::str::FromStr;
use std::sync::Arc;
use std::time::Duration;

use driftline_dirty_tracker::{DirtySet, FrameRun, Gfn, PAGE_SIZE, Subscription};
use driftline_format::is_zero;
use driftline_guest::{
    DriveHead, GuestContents, GuestDrive, GuestError, PAGE_BYTES, block_layout, data_within,
    read_blocks,
};
use serde::{Deserialize, Serialize};
use zerocopy::IntoBytes;

use super::limit::Limit;
use super::run_table::{FRAMES_PER_MESSAGE, RunTableBuilder};
use super::storage_thread::{DriveCall, StorageThread};
use crate::control::SendControl;
use crate::error::{Cause, DriveFailure, fits};
use crate::protocol::limits::{MAX_DRIVES, MAX_ZERO_RUNS};
use crate::protocol::message::{Counts, DriveMessage, WireMessage, blocks_head};
use crate::protocol::tag::Tag;
use crate::transport::link::Link;
use crate::transport::stop::StopFlag;
use crate::transport::wire::Wire;

/// Zero blocks at which BLOCK_ZEROS is sent, 16 MiB. Reading more takes a disk some time, and the
/// destination has to see progress.
const ZEROS_PER_MESSAGE: u64 = 4096;

/// Which of a guest's disks are copied. The destination has access to the others.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum CopyDrives {
    /// None, because both hosts can access all disks.
    #[default]
    None,
    /// All disks.
    All,
    /// The disks with these names.
    Named(Vec<String>),
}

/// A text that is not a list of disk names.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("\"{0}\" is not a list of disk names: write NAME,NAME")]
pub struct InvalidDriveNames(String);

/// The reason why no disk, or not the one that was named, can be copied.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
enum DriveLack {
    #[error("the guest has none")]
    None,
    #[error("the guest has no disk of this name")]
    Named,
}

impl FromStr for CopyDrives {
    type Err = InvalidDriveNames;

    /// Parses names separated by commas; the empty text means all disks.
    fn from_str(s: &str) -> Result<Self, InvalidDriveNames> {
        match s.split(',').map(str::to_owned).collect::<Vec<_>>() {
            names if names == [""] => Ok(Self::All),
            names if names.iter().any(String::is_empty) => Err(InvalidDriveNames(s.to_owned())),
            names => Ok(Self::Named(names)),
        }
    }
}

/// Returns the disks of `guest` that `which` selects, in the guest's order.
pub(super) fn chosen<G: GuestContents + ?Sized>(
    guest: &G,
    which: &CopyDrives,
) -> Result<Vec<Box<dyn GuestDrive>>, Cause> {
    let mut drives = match which {
        CopyDrives::None => return Ok(Vec::new()),
        CopyDrives::All | CopyDrives::Named(_) => guest.drives(),
    };
    if drives.is_empty() {
        return Err(GuestError::unsupported("copying disks", DriveLack::None).into());
    }
    if let CopyDrives::Named(names) = which {
        let is_missing = |name: &&String| !drives.iter().any(|drive| drive.head().id == **name);
        if let Some(name) = names.iter().find(is_missing) {
            let what = format!("copying disk \"{name}\"");
            return Err(GuestError::unsupported(what, DriveLack::Named).into());
        }
        drives.retain(|drive| names.contains(&drive.head().id));
    }
    fits("the list of copied disks", drives.len() as u64, MAX_DRIVES.into(), "disks")?;
    Ok(drives)
}

/// Sends DRIVES if disks are copied.
pub(super) fn announce(wire: &mut Wire<Link>, drives: &[Box<dyn GuestDrive>]) -> Result<(), Cause> {
    if drives.is_empty() {
        return Ok(());
    }
    let heads = drives.iter().map(|drive| drive.head()).collect();
    Ok(wire.send(&WireMessage::Drive(DriveMessage::Drives(heads)))?)
}

/// The disks that are copied; empty for most migrations.
pub(super) struct Drives {
    drives: Vec<CopiedDrive>,
    /// `None` if no disk is copied.
    storage: Option<StorageThread>,
    batch: BlockBatch,
    /// Blocks of the last pass.
    pub(super) passed: Counts,
    /// Blocks of all passes.
    pub(super) totals: Counts,
}

struct CopiedDrive {
    head: DriveHead,
    file: Arc<File>,
    /// Blocks that the guest writes; `None` if it cannot write to the disk.
    writes: Option<Subscription>,
    next: NextBlocks,
}

/// What the next pass sends of a disk.
enum NextBlocks {
    Nothing,
    /// All data that was on the disk at the start.
    First(Vec<FrameRun>),
    /// Blocks written since the last drain. Dropping the set gives it back (I4).
    Epoch(DirtySet),
}

impl NextBlocks {
    fn blocks(&self) -> u64 {
        match self {
            Self::Nothing => 0,
            Self::First(runs) => runs.iter().map(|run| run.count).sum(),
            Self::Epoch(epoch) => epoch.frames(),
        }
    }

    fn runs(&self) -> Box<dyn Iterator<Item = FrameRun> + '_> {
        match self {
            Self::Nothing => Box::new(std::iter::empty()),
            Self::First(runs) => Box::new(runs.iter().copied()),
            Self::Epoch(epoch) => Box::new(epoch.runs()),
        }
    }
}

impl CopiedDrive {
    fn follow(
        drive: Box<dyn GuestDrive>,
        storage: &mut StorageThread,
        limit: Limit,
    ) -> Result<Self, Cause> {
        let head = drive.head();
        let (id, bytes) = (&*head.id, head.bytes);
        let following = DriveCall { id, what: "following it" };
        block_layout(bytes).map_err(|e| following.failed(DriveFailure::Size(e.into())))?;
        // Subscribe before looking for data: a write in between is in the first drained set.
        let writes = drive.subscribe("migrate").map_err(|e| following.failed(e))?;
        let opening = DriveCall { id, what: "opening it" };
        let file = Arc::new(storage.call(opening, limit, move || drive.open())?);
        let (all, of) = (FrameRun { start: Gfn(0), count: head.blocks() }, file.clone());
        let looking = DriveCall { id, what: "looking for its data" };
        let runs = storage.call(looking, limit, move || data_within(&of, all, bytes))?;
        Ok(Self { file, writes, next: NextBlocks::First(runs), head })
    }
}

impl Drives {
    /// Subscribes to writes of these disks. The first pass sends all their data, without holes.
    /// Costs 512 KiB, a thread, and one tree for each disk. Fails at `limit`; one call that reads a
    /// disk may take `call_limit`.
    pub(super) fn follow(
        drives: Vec<Box<dyn GuestDrive>>,
        call_limit: Duration,
        stop: &Arc<StopFlag>,
        limit: Limit,
    ) -> Result<Self, Cause> {
        let storage = match drives.is_empty() {
            true => None,
            false => Some(StorageThread::start(call_limit, stop.clone())?),
        };
        let (batch, passed, totals) = Default::default();
        let mut followed = Self { drives: Vec::new(), storage, batch, passed, totals };
        if let Some(storage) = &mut followed.storage {
            for drive in drives {
                followed.drives.push(CopiedDrive::follow(drive, storage, limit)?);
            }
        }
        Ok(followed)
    }

    /// Number of blocks in the next pass.
    pub(super) fn pending(&self) -> u64 {
        self.drives.iter().map(|drive| drive.next.blocks()).sum()
    }

    /// Drains the blocks written or given back since the last drain, for the next pass.
    pub(super) fn drain(&mut self) {
        self.give_back();
        for drive in &mut self.drives {
            drive.next =
                drive.writes.as_mut().map_or(NextBlocks::Nothing, |w| NextBlocks::Epoch(w.drain()));
        }
    }

    /// Gives back blocks that were drained and not sent (I4).
    pub(super) fn give_back(&mut self) {
        self.drives.iter_mut().for_each(|drive| drive.next = NextBlocks::Nothing);
    }

    /// Commits the drained blocks, because the destination has them durably (I4).
    pub(super) fn commit(&mut self) {
        for drive in &mut self.drives {
            if let NextBlocks::Epoch(epoch) =
                std::mem::replace(&mut drive.next, NextBlocks::Nothing)
            {
                epoch.commit();
            }
        }
    }

    /// Sends the drained blocks as the disks' part of pass number `pass`. Calls `sent` after each
    /// message with the number of bytes sent before it. Fails at `limit`.
    pub(super) fn send(
        &mut self,
        wire: &mut Wire<Link>,
        pass: u32,
        control: &SendControl,
        limit: Limit,
        mut sent: impl FnMut(&mut Wire<Link>, u64) -> Result<(), Cause>,
    ) -> Result<(), Cause> {
        let left = self.pending() * PAGE_SIZE;
        let Self { drives, storage: Some(storage), batch, passed, totals } = self else {
            return Ok(());
        };
        control.update(|p| p.remaining_disk_bytes = left);
        *passed = Counts::default();
        for (drive, number) in drives.iter().zip(0..) {
            let chunks = drive.next.runs().flat_map(|run| run.chunks(FRAMES_PER_MESSAGE));
            let mut chunks = chunks.peekable();
            while chunks.peek().is_some() {
                limit.check()?;
                let blocks = batch.gather(&mut chunks);
                if batch.is_full(blocks) {
                    batch.send(wire, number, &mut sent)?;
                }
                batch.take(drive, storage, limit, passed)?;
                let bytes = blocks * PAGE_SIZE;
                control.update(|p| {
                    p.remaining_disk_bytes = p.remaining_disk_bytes.saturating_sub(bytes);
                });
            }
            batch.send(wire, number, &mut sent)?;
        }
        *totals += *passed;
        wire.send(&WireMessage::Drive(DriveMessage::BlocksEnd { pass, counts: *passed }))?;
        Ok(())
    }
}

impl Drop for Drives {
    fn drop(&mut self) {
        if let Some(storage) = &self.storage {
            storage.close(self.drives.drain(..).map(|drive| drive.file).collect());
        }
    }
}

/// Blocks of one disk that are gathered for one message of each kind.
#[derive(Default)]
struct BlockBatch {
    /// Chunks to be read with one call: a call for each chunk of a scattered set would cost two
    /// changes of threads for every 4 KiB.
    chunks: Vec<FrameRun>,
    contents: Vec<u8>,
    filled: usize,
    runs: RunTableBuilder,
    zeros: RunTableBuilder,
    /// Number of blocks in `zeros`.
    zeroed: u64,
}

// Each block is at most one run.
const _: () = assert!(ZEROS_PER_MESSAGE <= MAX_ZERO_RUNS as u64);

impl BlockBatch {
    /// Whether this number of additional blocks may exceed a message of either kind.
    fn is_full(&self, blocks: u64) -> bool {
        self.filled as u64 + blocks > FRAMES_PER_MESSAGE || self.zeroed + blocks > ZEROS_PER_MESSAGE
    }

    /// Moves the next chunks, of at most one message's blocks in total, to [`Self::chunks`].
    /// Returns their number of blocks.
    fn gather(&mut self, next: &mut Peekable<impl Iterator<Item = FrameRun>>) -> u64 {
        self.chunks.clear();
        let mut blocks = 0;
        while let Some(chunk) = next.next_if(|next| blocks + next.count <= FRAMES_PER_MESSAGE) {
            blocks += chunk.count;
            self.chunks.push(chunk);
        }
        blocks
    }

    /// Reads the gathered chunks.
    fn take(
        &mut self,
        drive: &CopiedDrive,
        storage: &mut StorageThread,
        limit: Limit,
        counts: &mut Counts,
    ) -> Result<(), Cause> {
        self.read(drive, storage, limit)?;
        let mut from = self.filled * PAGE_BYTES;
        for block in self.chunks.iter().flat_map(|chunk| chunk.frames()) {
            if is_zero(&self.contents[from..from + PAGE_BYTES]) {
                counts.zero += 1;
                self.zeroed += 1;
                self.zeros.add(block);
            } else {
                counts.normal += 1;
                let to = self.filled * PAGE_BYTES;
                if to != from {
                    self.contents.copy_within(from..from + PAGE_BYTES, to);
                }
                self.runs.add(block);
                self.filled += 1;
            }
            from += PAGE_BYTES;
        }
        Ok(())
    }

    /// Reads the gathered chunks to the end of the filled part of the buffer.
    fn read(
        &mut self,
        drive: &CopiedDrive,
        storage: &mut StorageThread,
        limit: Limit,
    ) -> Result<(), Cause> {
        let (file, bytes) = (drive.file.clone(), drive.head.bytes);
        let mut from = self.filled * PAGE_BYTES;
        let chunks = std::mem::take(&mut self.chunks);
        let mut contents = std::mem::take(&mut self.contents);
        let read = move || {
            contents.resize(FRAMES_PER_MESSAGE as usize * PAGE_BYTES, 0);
            for chunk in &chunks {
                let to = from + chunk.bytes() as usize;
                read_blocks(&file, bytes, chunk.start, &mut contents[from..to])?;
                from = to;
            }
            Ok((chunks, contents))
        };
        let call = DriveCall { id: &drive.head.id, what: "reading it" };
        (self.chunks, self.contents) = storage.call(call, limit, read)?;
        Ok(())
    }

    /// Sends the batch as blocks of disk `number`.
    fn send(
        &mut self,
        wire: &mut Wire<Link>,
        number: u32,
        sent: &mut impl FnMut(&mut Wire<Link>, u64) -> Result<(), Cause>,
    ) -> Result<(), Cause> {
        let contents = &self.contents[..self.filled * PAGE_BYTES];
        for (tag, runs, contents) in
            [(Tag::Blocks, &self.runs, contents), (Tag::BlockZeros, &self.zeros, &[])]
        {
            if !runs.is_empty() {
                let (head, before) = (blocks_head(number, runs.len()), wire.sent_bytes());
                wire.send_parts(tag, &[head.as_bytes(), runs.as_bytes(), contents])?;
                sent(wire, before)?;
            }
        }
        self.runs.clear();
        self.zeros.clear();
        (self.filled, self.zeroed) = (0, 0);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use super::*;

    #[test]
    fn zeros_are_sent_before_the_batch_is_full() {
        let file = tempfile::tempfile().unwrap();
        file.set_len(1 << 30).unwrap();
        let head = DriveHead { id: "d".into(), bytes: 1 << 30, readonly: true };
        let file = Arc::new(file);
        let drive = CopiedDrive { head, file, writes: None, next: NextBlocks::Nothing };
        let (mut batch, mut counts) = (BlockBatch::default(), Counts::default());
        let run = FrameRun { start: Gfn(0), count: 1 << 18 };
        let mut chunks = run.chunks(FRAMES_PER_MESSAGE).peekable();
        let long = Duration::from_secs(600);
        let mut storage = StorageThread::start(long, Arc::default()).unwrap();
        let limit = Limit::of_pause(Instant::now(), long);
        loop {
            let blocks = batch.gather(&mut chunks);
            if batch.is_full(blocks) {
                break;
            }
            batch.take(&drive, &mut storage, limit, &mut counts).unwrap();
        }
        assert_eq!((batch.zeros.len(), batch.filled), (1, 0));
        assert_eq!((batch.zeroed, counts.zero), (ZEROS_PER_MESSAGE, ZEROS_PER_MESSAGE));
    }

    #[test]
    fn drive_names_and_all_are_parsed() {
        assert_eq!("".parse(), Ok(CopyDrives::All));
        assert_eq!("a,b".parse(), Ok(CopyDrives::Named(vec!["a".into(), "b".into()])));
        assert!("a,".parse::<CopyDrives>().is_err());
    }
}
