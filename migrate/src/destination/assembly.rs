//! Memory as it arrives: messages into frames of the guest that is being built.
//!
//! A message is received whole into the wire's buffer, its checksum is compared, and only then are
//! its frames written: what stands in guest memory has been checked. Meanwhile a second thread has the
//! host give memory to the frames that are still to come.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use checkpoint::{Guest, GuestRam};
use dirty_tracker::{PAGE_SIZE, Subscription, Tracker};
use vm_memory::{Bytes, GuestAddress};

use super::Whole;
use super::ahead::{self, Ahead};
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
    /// Frames that content was written to: all others are zero already, and need not be written.
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
        let (ahead, preparer) = ahead::pair();
        let over = AtomicBool::new(false);
        let (guest, over) = (self.guest, &over);
        std::thread::scope(|scope| {
            let thread = std::thread::Builder::new().name("migrate-prepare".into());
            // Without it each frame gets its memory when it comes.
            if let Err(e) = thread.spawn_scoped(scope, move || preparer.run(guest, over)) {
                tracing::debug!("memory is not prepared beforehand: {e}");
            }
            self.receive(wire, pace, control, ahead, over)
        })
    }

    fn receive(
        mut self,
        wire: &mut Wire<Link>,
        mut pace: Pace,
        control: &ReceiveControl,
        mut ahead: Ahead,
        over: &AtomicBool,
    ) -> Result<Whole, Cause> {
        let _over = SetAtEnd(over);
        loop {
            wire.stream_mut().set_deadline(Some(pace.until));
            let message = wire.recv().map_err(|e| pace.judge(e, self.inbound.moved_bytes()))?;
            let step = self.inbound.on(message)?;
            match step {
                Step::Noted => {}
                Step::Place { runs, contents } => {
                    runs.iter().for_each(|run| ahead.arrived(run, true));
                    ahead.go_on();
                    self.place(runs, contents)?;
                }
                Step::Zero { runs } => {
                    runs.iter().for_each(|run| ahead.arrived(run, false));
                    self.zero(runs)?;
                }
                Step::Prepare { runs } => ahead.expect(runs.iter()),
                Step::Ack { pass, counts } => {
                    over.store(true, Ordering::Relaxed);
                    ahead.end();
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

/// Stores true when it goes, whatever it goes for.
struct SetAtEnd<'f>(&'f AtomicBool);

impl Drop for SetAtEnd<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

fn memory(cause: std::io::Error) -> Cause {
    Cause::System { what: "writing guest memory", cause }
}
