//! Frames into the memory of the guest that is being built; shared by all connections of a migration.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use checkpoint::{Guest, GuestRam};
use dirty_tracker::{FrameRun, NoMemory, PAGE_SIZE, Subscription, Tracker};
use vm_memory::{Bytes, GuestAddress};

use super::ahead::Ahead;
use crate::compression::{Codec, Unpacker};
use crate::digest;
use crate::error::Cause;
use crate::link::Link;
use crate::message::Runs;
use crate::wire::Wire;

const ZEROS: [u8; PAGE_SIZE as usize] = [0; PAGE_SIZE as usize];

/// Frames from which on it is worth a call to have the host give them memory all at once.
const PREPARE_FROM: u64 = 4;

/// The memory of a guest that is arriving.
pub(super) struct Placing<'g, G: Guest + ?Sized> {
    guest: &'g G,
    ram: &'g GuestRam,
    /// Frames that content was written to: all others are zero already, and need not be written.
    written: Subscription,
    marks: Arc<Tracker>,
    /// Taken for a moment by each message.
    ahead: Mutex<Ahead>,
}

impl<'g, G: Guest + ?Sized> Placing<'g, G> {
    pub(super) fn new(guest: &'g G, ahead: Ahead) -> Result<Self, NoMemory> {
        let marks = Arc::new(Tracker::new(guest.layout().clone()));
        let written = marks.subscribe("received")?;
        Ok(Self { guest, ram: guest.ram(), written, marks, ahead: Mutex::new(ahead) })
    }

    fn ahead(&self) -> MutexGuard<'_, Ahead> {
        self.ahead.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// These frames will come.
    pub(super) fn expect(&self, runs: Runs<'_>) {
        self.ahead().expect(runs.iter());
    }

    /// What it knew of which frames were written to, when all have come.
    pub(super) fn into_written(self) -> Subscription {
        self.written
    }

    /// Nothing more is prepared beforehand.
    pub(super) fn end_expecting(&self) {
        self.ahead().end();
    }

    /// Writes `contents`, in this order, to the frames of `runs`; they are as long as the runs say.
    pub(super) fn place(&self, runs: Runs<'_>, mut contents: &[u8]) -> Result<(), Cause> {
        self.arrived(runs.iter());
        for run in runs.iter() {
            let Some((bytes, rest)) = contents.split_at_checked(run.bytes() as usize) else {
                break;
            };
            self.make_room(run);
            self.write(run.start.gpa(), bytes)?;
            self.mark(run)?;
            contents = rest;
        }
        Ok(())
    }

    /// Unpacks contents of `runs` and writes them.
    pub(super) fn unpack(
        &self,
        unpacker: &mut Unpacker,
        codec: Codec,
        runs: Runs<'_>,
        packed: &[u8],
    ) -> Result<(), Cause> {
        let contents = unpacker.unpack(codec, packed, runs.frames().unwrap_or(0))?;
        self.place(runs, contents)
    }

    /// The digest of all that is not zero, whether it has come or not.
    pub(super) fn digest(&self) -> Result<u128, Cause> {
        digest::of(self.ram, &self.guest.resident()?)
    }

    /// Has the content of `run`, which is next on `wire`, go to its frames.
    pub(super) fn fetch(&self, wire: &mut Wire<Link>, run: FrameRun) -> Result<(), Cause> {
        self.arrived([run].into_iter());
        self.make_room(run);
        wire.recv_frames(self.ram, run)?;
        self.mark(run)
    }

    /// Makes frames zero.
    pub(super) fn zero(&self, runs: Runs<'_>) -> Result<(), Cause> {
        let mut ahead = self.ahead();
        runs.iter().for_each(|run| ahead.arrived(run, false));
        drop(ahead);
        for gfn in runs.iter().flat_map(|run| run.frames()) {
            if self.written.is_marked(gfn) {
                self.write(gfn.gpa(), &ZEROS)?;
            }
        }
        Ok(())
    }

    fn arrived(&self, runs: impl Iterator<Item = FrameRun>) {
        let mut ahead = self.ahead();
        runs.for_each(|run| ahead.arrived(run, true));
        ahead.go_on();
    }

    /// Has the host give memory to frames that have none yet.
    fn make_room(&self, run: FrameRun) {
        if run.count >= PREPARE_FROM && !self.written.is_marked(run.start) {
            self.guest.prepare(run);
        }
    }

    fn write(&self, gpa: u64, bytes: &[u8]) -> Result<(), Cause> {
        let written = self.ram.write_slice(bytes, GuestAddress(gpa));
        written.map_err(|e| memory(std::io::Error::other(e)))
    }

    fn mark(&self, run: FrameRun) -> Result<(), Cause> {
        self.marks.mark(run).map_err(|e| memory(std::io::Error::other(e)))
    }
}

fn memory(cause: std::io::Error) -> Cause {
    Cause::System { what: "writing guest memory", cause }
}
