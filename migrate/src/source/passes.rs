//! Passes over memory: runs of frames into PAGES and ZERO messages, and their acknowledgement.
//!
//! Content is copied into one reused buffer first: the guest may write a frame while it is being
//! sent, and the checksum, which goes ahead of the bytes, must be of the bytes that go.

use std::time::{Duration, Instant};

use checkpoint::{GuestRam, is_zero};
use dirty_tracker::{FrameRun, Gfn, PAGE_SIZE};
use vm_memory::{Bytes, GuestAddress};
use zerocopy::IntoBytes;

use crate::control::SendControl;
use crate::error::{Cause, WireError};
use crate::link::Link;
use crate::message::{Counts, MAX_ZERO_RUNS, Message, RawRun, Tag, runs_head};
use crate::wire::{Wire, unexpected};

use super::pacer::Pacer;

/// Frames in one PAGES: 512 KiB of content, which stays in a core's cache from copy to send.
const FRAMES_PER_MESSAGE: u64 = 128;
const PAGE: usize = PAGE_SIZE as usize;

/// Sends passes of one guest's memory over one connection.
pub(super) struct PassSender<'a> {
    ram: &'a GuestRam,
    control: &'a SendControl,
    pacer: Pacer,
    pages: Vec<u8>,
    runs: Vec<RawRun>,
    last: Option<FrameRun>,
    frames: u64,
    zeros: ZeroRuns,
    /// Of all passes.
    pub(super) totals: Counts,
}

/// Zero frames collected for one ZERO message.
#[derive(Default)]
struct ZeroRuns {
    runs: Vec<RawRun>,
    last: Option<FrameRun>,
}

/// A moment, and what it means to have reached it.
pub(super) type Limit<'d> = Option<(Instant, &'d dyn Fn() -> Cause)>;

/// Does `work` under a limit that no peer can stretch, neither by silence nor by trickling.
pub(super) fn on_time<T>(
    wire: &mut Wire<Link>,
    limit: Limit<'_>,
    work: impl FnOnce(&mut Wire<Link>) -> Result<T, Cause>,
) -> Result<T, Cause> {
    wire.stream_mut().set_deadline(limit.map(|(at, _)| at));
    let result = work(wire);
    wire.stream_mut().set_deadline(None);
    match (result, limit) {
        (Err(Cause::Wire(e)), Some((at, late))) if e.is_silence() && Instant::now() >= at => {
            Err(late())
        }
        (result, _) => result,
    }
}

/// A pass whose end the destination has not yet acknowledged.
#[must_use = "the destination's word is not yet heard"]
#[derive(Debug)]
pub(super) struct PassSent {
    pass: u32,
    counts: Counts,
    bytes: u64,
    begun: Instant,
}

impl PassSent {
    /// Waits until the destination has all of it.
    pub(super) fn await_end(self, wire: &mut Wire<Link>) -> Result<PassDone, Cause> {
        let Self { pass, counts, bytes, begun } = self;
        acknowledged(wire, pass, counts)?;
        Ok(PassDone { counts, bytes, time: begun.elapsed() })
    }
}

/// What a pass did.
#[derive(Clone, Copy, Debug)]
pub(super) struct PassDone {
    pub(super) counts: Counts,
    pub(super) bytes: u64,
    pub(super) time: Duration,
}

/// Extends the last run of a table by a frame, or begins a new one. `last` is forgotten where a
/// source run ends, so that no run of the table reaches over the end of a slot.
fn extend(runs: &mut Vec<RawRun>, last: &mut Option<FrameRun>, gfn: Gfn) {
    match last {
        Some(run) if run.end() == gfn => {
            run.count += 1;
            runs.pop();
        }
        _ => *last = Some(FrameRun { start: gfn, count: 1 }),
    }
    runs.extend(last.map(RawRun::from));
}

impl<'a> PassSender<'a> {
    /// `rate`: bytes/s at most, until [`hurry`](Self::hurry).
    pub(super) fn new(ram: &'a GuestRam, control: &'a SendControl, rate: Option<u64>) -> Self {
        Self {
            ram,
            control,
            pacer: Pacer::new(rate),
            pages: vec![0; FRAMES_PER_MESSAGE as usize * PAGE],
            runs: Vec::with_capacity(FRAMES_PER_MESSAGE as usize),
            last: None,
            frames: 0,
            zeros: ZeroRuns::default(),
            totals: Counts::default(),
        }
    }

    /// From now on as fast as the link goes.
    pub(super) fn hurry(&mut self) {
        self.pacer.end();
    }

    /// Sends `runs`, of `frames` frames in all, as pass number `pass`; the destination's word that it has all of it is left to
    /// be waited for. Fails with `late` if `deadline` passes first. On an error the destination may have any part of it.
    pub(super) fn begin(
        &mut self,
        wire: &mut Wire<Link>,
        pass: u32,
        runs: impl Iterator<Item = FrameRun>,
        frames: u64,
        deadline: Limit<'_>,
    ) -> Result<PassSent, Cause> {
        let (begun, before) = (Instant::now(), wire.sent_bytes());
        self.pacer.begin();
        self.control.update(|p| (p.pass, p.remaining_frames) = (pass, frames));
        wire.send(&Message::PassBegin { pass, frames })?;
        let mut counts = Counts::default();
        for run in runs {
            self.last = None;
            self.zeros.last = None;
            for chunk in run.chunks(FRAMES_PER_MESSAGE) {
                if let Some((_, late)) = deadline.filter(|(at, _)| Instant::now() >= *at) {
                    return Err(late());
                }
                self.chunk(wire, chunk, &mut counts)?;
            }
        }
        self.flush_pages(wire)?;
        self.flush_zeros(wire)?;
        wire.send(&Message::PassEnd { pass, counts })?;
        self.totals += counts;
        Ok(PassSent { pass, counts, bytes: wire.sent_bytes() - before, begun })
    }

    /// Copies a chunk of at most one message's frames and sends what has become full.
    fn chunk(
        &mut self,
        wire: &mut Wire<Link>,
        chunk: FrameRun,
        counts: &mut Counts,
    ) -> Result<(), Cause> {
        if self.frames + chunk.count > FRAMES_PER_MESSAGE {
            self.flush_pages(wire)?;
        }
        let at = self.frames as usize * PAGE;
        let room = &mut self.pages[at..at + chunk.count as usize * PAGE];
        self.ram.read_slice(room, GuestAddress(chunk.start.gpa())).map_err(|e| Cause::System {
            what: "reading guest memory",
            cause: std::io::Error::other(e),
        })?;
        for (i, gfn) in chunk.frames().enumerate() {
            let from = at + i * PAGE;
            if is_zero(&self.pages[from..from + PAGE]) {
                counts.zero += 1;
                extend(&mut self.zeros.runs, &mut self.zeros.last, gfn);
            } else {
                counts.normal += 1;
                let to = self.frames as usize * PAGE;
                if to != from {
                    self.pages.copy_within(from..from + PAGE, to);
                }
                extend(&mut self.runs, &mut self.last, gfn);
                self.frames += 1;
            }
        }
        self.control.update(|p| {
            p.remaining_frames = p.remaining_frames.saturating_sub(chunk.count);
        });
        // A chunk adds at most one run a frame.
        if self.zeros.runs.len() as u64 + FRAMES_PER_MESSAGE > u64::from(MAX_ZERO_RUNS) {
            self.flush_zeros(wire)?;
        }
        Ok(())
    }

    fn flush_pages(&mut self, wire: &mut Wire<Link>) -> Result<(), Cause> {
        if self.frames == 0 {
            return Ok(());
        }
        let contents = &self.pages[..self.frames as usize * PAGE];
        let head = runs_head(self.runs.len());
        let before = wire.sent_bytes();
        wire.send_parts(Tag::Pages, &[head.as_bytes(), self.runs.as_bytes(), contents])?;
        self.runs.clear();
        (self.last, self.frames) = (None, 0);
        self.after_message(wire, before)
    }

    fn flush_zeros(&mut self, wire: &mut Wire<Link>) -> Result<(), Cause> {
        if self.zeros.runs.is_empty() {
            return Ok(());
        }
        let head = runs_head(self.zeros.runs.len());
        let before = wire.sent_bytes();
        wire.send_parts(Tag::Zero, &[head.as_bytes(), self.zeros.runs.as_bytes()])?;
        self.zeros.runs.clear();
        self.zeros.last = None;
        self.after_message(wire, before)
    }

    /// Counts, keeps the rate, and hears a destination that gives up in the middle of a pass.
    fn after_message(&mut self, wire: &mut Wire<Link>, before: u64) -> Result<(), Cause> {
        self.control.update(|p| p.sent_bytes = wire.sent_bytes());
        self.pacer.pace(wire.sent_bytes() - before, &self.control.stop);
        if wire.stream().has_incoming() {
            let message = wire.recv()?;
            return Err(unexpected(&message, "nothing before PASS_END").into());
        }
        Ok(())
    }
}

fn acknowledged(wire: &mut Wire<Link>, pass: u32, counts: Counts) -> Result<(), WireError> {
    let (theirs, received) = match wire.recv()? {
        Message::PassAck { pass, counts } => (pass, counts),
        other => return Err(unexpected(&other, "PASS_ACK")),
    };
    let same = |what, found, expected| match found == expected {
        true => Ok(()),
        false => Err(WireError::Count { what, found, expected }),
    };
    same("the number of the pass", theirs.into(), pass.into())?;
    same("the pass's frames with content", received.normal, counts.normal)?;
    same("the pass's zero frames", received.zero, counts.zero)
}
