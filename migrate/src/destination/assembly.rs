//! Memory as it arrives: messages into frames of the guest that is being built.
//!
//! A message is received whole into the wire's buffer, its checksum is compared, and only then are
//! its frames written: what stands in guest memory has been checked.

use std::sync::Arc;

use checkpoint::{Guest, GuestRam};
use dirty_tracker::{PAGE_SIZE, Subscription, Tracker};
use vm_memory::{Bytes, GuestAddress};

use super::Whole;
use super::inbound::{Inbound, Step};
use crate::control::ReceiveControl;
use crate::error::Cause;
use crate::link::Link;
use crate::message::{Message, Runs};
use crate::wire::Wire;

const ZEROS: [u8; PAGE_SIZE as usize] = [0; PAGE_SIZE as usize];

/// A guest whose memory is arriving.
pub(super) struct Assembly<'g> {
    ram: &'g GuestRam,
    inbound: Inbound,
    /// Frames that content was written to: all others are zero already and stay unpopulated.
    written: Subscription,
    marks: Arc<Tracker>,
}

impl<'g> Assembly<'g> {
    pub(super) fn new<G: Guest + ?Sized>(guest: &'g G) -> Self {
        let layout = guest.layout().clone();
        let marks = Arc::new(Tracker::new(layout.clone()));
        let written = marks.subscribe("received");
        Self { ram: guest.ram(), inbound: Inbound::new(layout), written, marks }
    }

    /// Receives until the state is complete; acknowledges each pass.
    pub(super) fn run(
        mut self,
        wire: &mut Wire<Link>,
        control: &ReceiveControl,
    ) -> Result<Whole, Cause> {
        loop {
            let step = self.inbound.on(wire.recv()?)?;
            match step {
                Step::Noted => {}
                Step::Place { runs, contents } => self.place(runs, contents)?,
                Step::Zero { runs } => self.zero(runs)?,
                Step::Ack { pass, counts } => {
                    wire.send(&Message::PassAck { pass, counts })?;
                    let bytes = wire.received_bytes();
                    control.update(|p| (p.pass, p.sent_bytes) = (pass, bytes));
                }
                Step::Complete { sections, was_running } => {
                    let (totals, passes) = (self.inbound.totals(), self.inbound.passes());
                    return Ok(Whole { sections, was_running, totals, passes });
                }
            }
        }
    }

    fn place(&mut self, runs: Runs<'_>, mut contents: &[u8]) -> Result<(), Cause> {
        for run in runs.iter() {
            // Message::parse compared the runs with the length.
            let (bytes, rest) = contents.split_at(run.bytes() as usize);
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

fn memory(cause: std::io::Error) -> Cause {
    Cause::System { what: "writing guest memory", cause }
}
