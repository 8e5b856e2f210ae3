//! Writes the memory of the guest that is being received. All channels of a migration share it.
//!
//! A frame is marked as written before its first byte is written (I8). If a write fails half-way, a
//! later ZERO of that frame must not assume that the frame is zero.

use driftline_dirty_tracker::{FrameRun, NoMemory, Tree};
use driftline_guest::{GuestContents, GuestIdentity, GuestRam, PAGE_BYTES, Populate};
use parking_lot::{Mutex, MutexGuard};
use vm_memory::{Bytes, GuestAddress};

use super::prealloc::Prealloc;
use crate::error::Cause;
use crate::protocol::codec::Codec;
use crate::protocol::digest;
use crate::protocol::message::RunTable;
use crate::transport::compression::Unpacker;
use crate::transport::link::Link;
use crate::transport::wire::Wire;

const ZEROS: [u8; PAGE_BYTES] = [0; PAGE_BYTES];

/// Least frames of a run that is prefaulted before it is written.
const PREFAULT_FROM: u64 = 4;

/// The memory of a guest that is being received.
pub(super) struct MemoryWriter<'g, G: GuestIdentity + GuestContents + Populate + ?Sized> {
    guest: &'g G,
    ram: &'g GuestRam,
    /// Frames to which content was, or may have been, written. All others are zero.
    written: Tree,
    /// Locked briefly by each message.
    prealloc: Mutex<Prealloc>,
}

impl<'g, G: GuestIdentity + GuestContents + Populate + ?Sized> MemoryWriter<'g, G> {
    pub(super) fn new(guest: &'g G, prealloc: Prealloc) -> Result<Self, NoMemory> {
        let written = Tree::new(guest.layout().clone())?;
        Ok(Self { guest, ram: guest.ram(), written, prealloc: Mutex::new(prealloc) })
    }

    fn prealloc(&self) -> MutexGuard<'_, Prealloc> {
        self.prealloc.lock()
    }

    /// Preallocates frames that EXPECT has announced.
    pub(super) fn expect(&self, runs: RunTable<'_>) {
        self.prealloc().expect(runs.iter());
    }

    /// Returns the marks of written frames.
    pub(super) fn into_written(self) -> Tree {
        self.written
    }

    /// Ends the preallocation.
    pub(super) fn end_prealloc(&self) {
        self.prealloc().end();
    }

    /// Writes `contents` to the frames of `runs`, in order. The caller has compared their lengths.
    pub(super) fn place(&self, runs: RunTable<'_>, mut contents: &[u8]) -> Result<(), Cause> {
        self.arrived(runs.iter());
        for run in runs.iter() {
            let Some((bytes, rest)) = contents.split_at_checked(run.bytes() as usize) else {
                break;
            };
            self.make_room(run);
            self.mark(run)?;
            self.write(run.start.gpa(), bytes)?;
            contents = rest;
        }
        Ok(())
    }

    /// Decompresses the contents of `runs` and writes them.
    pub(super) fn unpack(
        &self,
        unpacker: &mut Unpacker,
        codec: Codec,
        runs: RunTable<'_>,
        packed: &[u8],
    ) -> Result<(), Cause> {
        let contents = unpacker.unpack(codec, packed, runs.frames().unwrap_or(0))?;
        self.place(runs, contents)
    }

    /// Returns the digest of all resident memory, whether it was received or not.
    pub(super) fn digest(&self) -> Result<u128, Cause> {
        digest::of(self.ram, &self.guest.resident()?)
            .map_err(|cause| Cause::System { what: "reading guest memory", cause })
    }

    /// Reads the content of `run`, which is next on `wire`, straight into its frames.
    pub(super) fn fetch(&self, wire: &mut Wire<Link>, run: FrameRun) -> Result<(), Cause> {
        self.arrived([run].into_iter());
        self.make_room(run);
        self.mark(run)?;
        Ok(wire.recv_frames(self.ram, run)?)
    }

    /// Makes frames zero.
    pub(super) fn zero(&self, runs: RunTable<'_>) -> Result<(), Cause> {
        let mut prealloc = self.prealloc();
        runs.iter().for_each(|run| prealloc.arrived(run, false));
        drop(prealloc);
        let mut written = self.written.cursor();
        for gfn in runs.iter().flat_map(|run| run.frames()) {
            if written.contains(gfn) {
                self.write(gfn.gpa(), &ZEROS)?;
            }
        }
        Ok(())
    }

    fn arrived(&self, runs: impl Iterator<Item = FrameRun>) {
        let mut prealloc = self.prealloc();
        runs.for_each(|run| prealloc.arrived(run, true));
        prealloc.feed();
    }

    /// Prefaults a run unless its first frame was written. Must precede [`mark`](Self::mark),
    /// after which frames count as written.
    fn make_room(&self, run: FrameRun) {
        if run.count >= PREFAULT_FROM && !self.written.contains(run.start) {
            self.guest.prefault(run);
        }
    }

    fn write(&self, gpa: u64, bytes: &[u8]) -> Result<(), Cause> {
        let written = self.ram.write_slice(bytes, GuestAddress(gpa));
        written.map_err(|cause| Cause::Memory { what: WRITING, cause })
    }

    fn mark(&self, run: FrameRun) -> Result<(), Cause> {
        self.written.mark(run).map_err(|cause| Cause::OutOfSlot { what: WRITING, cause })
    }
}

/// The operation of this module, for its errors.
const WRITING: &str = "writing guest memory";

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::sync::Arc;
    use std::time::Duration;

    use driftline_dirty_tracker::{Gfn, Slot, SlotId};
    use driftline_format::RecordHead;
    use driftline_guest::VmId;
    use driftline_guest::testing::{MemoryConfig, MemoryGuest};
    use zerocopy::IntoBytes;

    use super::super::prealloc;
    use super::*;
    use crate::protocol::message::{RawRun, WireMessage, runs_head};
    use crate::protocol::tag::Tag;
    use crate::transport::socket::Socket;

    fn guest(frames: u64) -> Arc<MemoryGuest> {
        let slots = vec![Slot { id: SlotId(0), base: Gfn(0), frames }];
        MemoryGuest::new(VmId::random(), MemoryConfig { slots, ..MemoryConfig::still() }).unwrap()
    }

    /// Returns a wire with FRAMES of `run`, whose content ends after half a page.
    fn half_a_page(run: FrameRun) -> Wire<Link> {
        let (mut source, socket) = Socket::pair().unwrap();
        let raw = RawRun::from(run);
        let head = RecordHead {
            tag: Tag::Frames as u16,
            must_understand: true,
            instance: 0,
            length: (raw.as_bytes().len() as u64 + run.bytes()) as u32,
            payload_crc: crc32c::crc32c(raw.as_bytes()),
            sequence: 0,
        };
        source.write_all(&head.to_bytes()).unwrap();
        source.write_all(raw.as_bytes()).unwrap();
        source.write_all(&[0x5a; PAGE_BYTES / 2]).unwrap();
        Wire::new(Link::new(socket, Duration::from_secs(60), Arc::default()))
    }

    fn zero_of(run: FrameRun) -> Vec<u8> {
        [runs_head(1).as_bytes(), RawRun::from(run).as_bytes()].concat()
    }

    #[test]
    fn page_is_marked_before_it_is_written() {
        let guest = self::guest(64);
        let (prealloc, _preallocator) = prealloc::pair();
        let memory = MemoryWriter::new(&*guest, prealloc).unwrap();
        let run = FrameRun { start: Gfn(7), count: 1 };
        let mut wire = half_a_page(run);
        assert!(matches!(wire.recv().unwrap(), WireMessage::Frames { run: found } if found == run));
        memory.fetch(&mut wire, run).unwrap_err();
        let mut page = [0; PAGE_BYTES];
        guest.ram().read_slice(&mut page, GuestAddress(run.start.gpa())).unwrap();
        assert_eq!(page[0], 0x5a, "half of the page is written");
        assert!(memory.written.contains(run.start), "FRAMES");
        let zero = zero_of(run);
        let WireMessage::Zero { runs } = WireMessage::parse(Tag::Zero, &zero).unwrap() else {
            panic!()
        };
        memory.zero(runs).unwrap();
        guest.ram().read_slice(&mut page, GuestAddress(run.start.gpa())).unwrap();
        assert_eq!(page, ZEROS);

        // A page whose write fails, because this memory is shorter than the layout.
        let short = self::guest(8);
        let memory = MemoryWriter { ram: short.ram(), ..memory };
        let run = FrameRun { start: Gfn(20), count: 1 };
        let mut pages = zero_of(run);
        pages.extend(ZEROS);
        let pages = WireMessage::parse(Tag::Pages, &pages).unwrap();
        let WireMessage::Pages { runs, contents } = pages else { panic!() };
        memory.place(runs, contents).unwrap_err();
        assert!(memory.written.contains(run.start), "PAGES");
    }
}
