//! A migration's connections: the first, which everything else goes over, and those that only share in its passes.
//!
//! A pass's chunks go to whichever connection is ready for one. All have ended their shares before the first one ends
//! the pass, and no pass begins before the one before it is acknowledged: a frame that goes twice ends as its newest.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use checkpoint::GuestRam;
use dirty_tracker::FrameRun;

use super::pacer::Pacer;
use super::passes::{Limit, PassSender};
use crate::compression::{Compression, Packer};
use crate::control::SendControl;
use crate::error::{Cause, WireError};
use crate::link::Link;
use crate::message::{Counts, MAX_PAGES, Message};
use crate::wire::{Wire, unexpected};

/// Sends passes of one guest's memory over all connections of its migration.
pub(super) struct Passes<'a> {
    control: &'a SendControl,
    pacer: Arc<Pacer>,
    first: PassSender<'a>,
    shares: Vec<Share<'a>>,
    /// Frames of all passes.
    pub(super) totals: Counts,
}

/// A connection that has joined.
struct Share<'a> {
    wire: Wire<Link>,
    sender: PassSender<'a>,
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

/// What a pass did.
#[derive(Clone, Copy, Debug)]
pub(super) struct PassDone {
    pub(super) counts: Counts,
    pub(super) bytes: u64,
    pub(super) time: Duration,
}

impl PassSent {
    /// Waits until the destination has all of it.
    pub(super) fn await_end(self, wire: &mut Wire<Link>) -> Result<PassDone, Cause> {
        let Self { pass, counts, bytes, begun } = self;
        acknowledged(wire, pass, counts)?;
        Ok(PassDone { counts, bytes, time: begun.elapsed() })
    }
}

impl<'a> Passes<'a> {
    /// `rate`: bytes/s at most, until [`hurry`](Self::hurry).
    pub(super) fn new(
        ram: &'a GuestRam,
        control: &'a SendControl,
        (rate, compression): (Option<u64>, Compression),
        joined: Vec<Wire<Link>>,
    ) -> Result<Self, Cause> {
        let pacer = Arc::new(Pacer::new(rate));
        let sender = || -> Result<_, Cause> {
            let packer = Packer::new(compression)?;
            Ok(PassSender::new(ram, control, pacer.clone(), packer))
        };
        let share = |wire| Ok(Share { wire, sender: sender()? });
        let shares = joined.into_iter().map(share).collect::<Result<_, Cause>>()?;
        let first = sender()?;
        Ok(Self { control, first, shares, pacer, totals: Counts::default() })
    }

    /// From now on as fast as the link goes.
    pub(super) fn hurry(&mut self) {
        self.pacer.end();
    }

    /// Bytes sent over the connections that have joined.
    pub(super) fn shared_bytes(&self) -> u64 {
        self.shares.iter().map(|share| share.wire.sent_bytes()).sum()
    }

    /// Sends `runs`, of `frames` frames in all, as pass number `pass`; the destination's word that it has all of it is left to
    /// be waited for. Fails with `late` if `deadline` passes first. On an error the destination may have any part of it.
    pub(super) fn begin(
        &mut self,
        wire: &mut Wire<Link>,
        pass: u32,
        runs: impl Iterator<Item = FrameRun> + Send,
        frames: u64,
        deadline: Limit<'_>,
    ) -> Result<PassSent, Cause> {
        let begun = Instant::now();
        let before = wire.sent_bytes() + self.shared_bytes();
        self.pacer.begin();
        self.control.update(|p| (p.pass, p.remaining_frames) = (pass, frames));
        wire.send(&Message::PassBegin { pass, frames })?;
        let mut chunks = runs.flat_map(|run| run.chunks(MAX_PAGES));
        let counts = match self.shares.is_empty() {
            true => self.first.share(wire, || chunks.next(), deadline)?,
            false => self.all(wire, (pass, frames), chunks, deadline)?,
        };
        wire.send(&Message::PassEnd { pass, counts })?;
        self.totals += counts;
        let bytes = wire.sent_bytes() + self.shared_bytes() - before;
        Ok(PassSent { pass, counts, bytes, begun })
    }

    /// Sends a pass's chunks over all connections; the first one's end is left to be told.
    fn all(
        &mut self,
        wire: &mut Wire<Link>,
        pass: (u32, u64),
        chunks: impl Iterator<Item = FrameRun> + Send,
        deadline: Limit<'_>,
    ) -> Result<Counts, Cause> {
        let halt = Arc::new(AtomicBool::new(false));
        let chunks = Mutex::new(chunks);
        let next = || chunks.lock().unwrap_or_else(PoisonError::into_inner).next();
        // The first to fail says why, and ends the waits of the others.
        let fault = Mutex::new(None);
        let heard = |result: Result<Counts, Cause>| match result {
            Ok(counts) => counts,
            Err(cause) => {
                let mut fault = fault.lock().unwrap_or_else(PoisonError::into_inner);
                fault.get_or_insert(cause);
                halt.store(true, Ordering::Relaxed);
                Counts::default()
            }
        };
        let mut counts = Counts::default();
        wire.stream_mut().set_halt(Some(halt.clone()));
        std::thread::scope(|scope| {
            let mut threads = Vec::with_capacity(self.shares.len());
            for share in &mut self.shares {
                share.wire.stream_mut().set_halt(Some(halt.clone()));
                let thread = std::thread::Builder::new().name("migrate-share".into());
                let run = || heard(share.send(pass, next, deadline));
                match thread.spawn_scoped(scope, run) {
                    Ok(thread) => threads.push(thread),
                    Err(cause) => {
                        heard(Err(Cause::System { what: "starting a thread", cause }));
                    }
                }
            }
            counts += heard(self.first.share(wire, next, deadline));
            for thread in threads {
                match thread.join() {
                    Ok(share) => counts += share,
                    Err(panic) => std::panic::resume_unwind(panic),
                }
            }
        });
        wire.stream_mut().set_halt(None);
        match fault.into_inner().unwrap_or_else(PoisonError::into_inner) {
            Some(cause) => Err(cause),
            None => Ok(counts),
        }
    }
}

impl Share<'_> {
    /// Sends this connection's share of a pass.
    fn send(
        &mut self,
        (pass, frames): (u32, u64),
        next: impl FnMut() -> Option<FrameRun>,
        deadline: Limit<'_>,
    ) -> Result<Counts, Cause> {
        self.wire.stream_mut().set_deadline(deadline.map(|(at, _)| at));
        self.wire.send(&Message::PassBegin { pass, frames })?;
        let counts = self.sender.share(&mut self.wire, next, deadline)?;
        self.wire.send(&Message::PassEnd { pass, counts })?;
        Ok(counts)
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
