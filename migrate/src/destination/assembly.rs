//! Memory as it arrives: messages into frames of the guest that is being built.
//!
//! A message is received whole into the wire's buffer, its checksum is compared, and only then are
//! its frames written: what stands in guest memory has been checked. Meanwhile a second thread has the
//! host give memory to the frames that are still to come.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, Receiver, SyncSender};
use std::time::{Duration, Instant};

use checkpoint::{Guest, GuestRam};
use dirty_tracker::{FrameRun, Gfn, PAGE_SIZE, Subscription, Tracker};
use vm_memory::{Bytes, GuestAddress};

use super::Whole;
use super::inbound::{Inbound, Step};
use crate::control::ReceiveControl;
use crate::error::{Cause, WireError};
use crate::link::Link;
use crate::message::{Message, Runs};
use crate::wire::Wire;

const ZEROS: [u8; PAGE_SIZE as usize] = [0; PAGE_SIZE as usize];

/// Frames from which on it is worth a call to have the host give them memory all at once.
const PREPARE_FROM: u64 = 4;

/// Bytes of memory and state that a source has to move in each window of its [`Pace`].
const MIN_PROGRESS: u64 = 256 << 10;

/// Holds a source to a least pace: whenever it has moved enough, a new window begins.
pub(super) struct Pace {
    window: Duration,
    until: Instant,
    /// What had come when the window began.
    before: u64,
}

impl Pace {
    pub(super) fn begin(window: Duration) -> Self {
        Self { window, until: Instant::now() + window, before: 0 }
    }

    /// `moved` bytes have come in all.
    fn note(&mut self, moved: u64) {
        if moved - self.before >= MIN_PROGRESS {
            (self.until, self.before) = (Instant::now() + self.window, moved);
        }
    }

    /// What silence until now means: at the window's end, that the source was too slow.
    fn judge(&self, e: WireError, moved: u64) -> WireError {
        if e.is_silence() && Instant::now() >= self.until {
            let (found, least) = (moved - self.before, MIN_PROGRESS);
            return WireError::TooSlow { found, window: self.window, least };
        }
        e
    }
}

/// A guest whose memory is arriving.
pub(super) struct Assembly<'g, G: Guest + ?Sized> {
    guest: &'g G,
    ram: &'g GuestRam,
    inbound: Inbound,
    /// Frames that content was written to: all others are zero already and stay unpopulated.
    written: Subscription,
    marks: Arc<Tracker>,
}

impl<'g, G: Guest + ?Sized> Assembly<'g, G> {
    pub(super) fn new(guest: &'g G) -> Self {
        let layout = guest.layout().clone();
        let marks = Arc::new(Tracker::new(layout.clone()));
        let written = marks.subscribe("received");
        Self { guest, ram: guest.ram(), inbound: Inbound::new(layout), written, marks }
    }

    /// Receives until the state is complete; acknowledges each pass.
    pub(super) fn run(
        self,
        wire: &mut Wire<Link>,
        pace: Pace,
        control: &ReceiveControl,
    ) -> Result<Whole, Cause> {
        let (expect, expected) = mpsc::sync_channel(MOST_EXPECTED);
        let over = AtomicBool::new(false);
        let (guest, over) = (self.guest, &over);
        std::thread::scope(|scope| {
            let preparer = std::thread::Builder::new().name("migrate-prepare".into());
            // Without it each frame gets its memory when it comes.
            if let Err(e) = preparer.spawn_scoped(scope, move || prepare(guest, &expected, over)) {
                tracing::debug!("memory is not prepared beforehand: {e}");
            }
            let received = self.receive(wire, pace, control, &expect);
            over.store(true, Ordering::Relaxed);
            drop(expect);
            received
        })
    }

    fn receive(
        mut self,
        wire: &mut Wire<Link>,
        mut pace: Pace,
        control: &ReceiveControl,
        expect: &SyncSender<FrameRun>,
    ) -> Result<Whole, Cause> {
        loop {
            wire.stream_mut().set_deadline(Some(pace.until));
            let message = wire.recv().map_err(|e| pace.judge(e, self.inbound.moved_bytes()))?;
            let step = self.inbound.on(message)?;
            match step {
                Step::Noted => {}
                Step::Place { runs, contents } => self.place(runs, contents)?,
                Step::Zero { runs } => self.zero(runs)?,
                // What finds no room, or nobody there, is not prepared.
                Step::Prepare { runs } => {
                    runs.iter().try_for_each(|run| expect.try_send(run)).unwrap_or(())
                }
                Step::Ack { pass, counts } => {
                    wire.send(&Message::PassAck { pass, counts })?;
                    let bytes = wire.received_bytes();
                    control.update(|p| (p.pass, p.sent_bytes) = (pass, bytes));
                }
                Step::Complete { sections, was_running } => {
                    wire.stream_mut().set_deadline(None);
                    let (totals, passes) = (self.inbound.totals(), self.inbound.passes());
                    return Ok(Whole { sections, was_running, totals, passes });
                }
            }
            pace.note(self.inbound.moved_bytes());
        }
    }

    fn place(&mut self, runs: Runs<'_>, mut contents: &[u8]) -> Result<(), Cause> {
        for run in runs.iter() {
            // Message::parse compared the runs with the length.
            let (bytes, rest) = contents.split_at(run.bytes() as usize);
            if run.count >= PREPARE_FROM && !self.written.is_marked(run.start) {
                self.guest.prepare(run);
            }
            self.write(run.start.gpa(), bytes)?;
            self.marks.mark(run).map_err(|e| memory(std::io::Error::other(e)))?;
            contents = rest;
        }
        Ok(())
    }

    fn zero(&mut self, runs: Runs<'_>) -> Result<(), Cause> {
        for gfn in runs.iter().flat_map(|run| run.frames()) {
            if self.written.is_marked(gfn) {
                self.write(gfn.gpa(), &ZEROS)?;
            }
        }
        Ok(())
    }

    fn write(&self, gpa: u64, bytes: &[u8]) -> Result<(), Cause> {
        let written = self.ram.write_slice(bytes, GuestAddress(gpa));
        written.map_err(|e| memory(std::io::Error::other(e)))
    }
}

/// Runs that wait to be prepared; of a guest whose memory has more there is little to gain.
const MOST_EXPECTED: usize = 64 << 10;

/// Frames that are prepared by one call: 8 MiB, after which a migration that is over is noticed. Cut at its
/// multiples, where huge pages begin.
const PREPARED_AT_ONCE: u64 = 2048;

/// Has the host give memory to what is expected, until all of it has come.
fn prepare<G: Guest + ?Sized>(guest: &G, expected: &Receiver<FrameRun>, over: &AtomicBool) {
    for mut run in expected.iter() {
        while run.count > 0 {
            if over.load(Ordering::Relaxed) {
                return;
            }
            let count = run.count.min(PREPARED_AT_ONCE - run.start.0 % PREPARED_AT_ONCE);
            guest.prepare(FrameRun { count, ..run });
            run = FrameRun { start: Gfn(run.start.0 + count), count: run.count - count };
        }
    }
}

fn memory(cause: std::io::Error) -> Cause {
    Cause::System { what: "writing guest memory", cause }
}
