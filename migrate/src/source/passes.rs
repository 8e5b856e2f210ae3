//! Passes: frames and blocks over all channels of a migration.
//!
//! Each channel takes the next chunk of the pass when it is ready. All joined channels end their
//! shares before the first channel ends the pass, and a pass begins after the previous one was
//! acknowledged. So the newest content of a frame that is sent twice stays.

use std::sync::Arc;
use std::time::{Duration, Instant};

use driftline_dirty_tracker::{FrameRun, PAGE_SIZE};
use driftline_guest::GuestRam;
use parking_lot::Mutex;

use super::channels::Channels;
use super::drives::Drives;
use super::frames::FrameSender;
use super::limit::Limit;
use super::rate_limiter::RateLimiter;
use crate::control::SendControl;
use crate::error::Cause;
use crate::policy::convergence::PassMeasurement;
use crate::protocol::error::{WireError, same};
use crate::protocol::limits::MAX_PAGES;
use crate::protocol::message::{Counts, WireMessage};
use crate::report::{PassReport, ms, per_second};
use crate::transport::channels::ChannelGroup;
use crate::transport::compression::{Compression, Packer};
use crate::transport::link::Link;
use crate::transport::wire::Wire;

/// Sends passes of one guest's memory over all channels of its migration.
pub(super) struct Passes<'a> {
    control: &'a SendControl,
    rate_limiter: Arc<RateLimiter>,
    first: FrameSender<'a>,
    /// Senders of the joined channels, in their order.
    joined: Vec<FrameSender<'a>>,
    is_paused: bool,
    /// Frames of all passes.
    pub(super) totals: Counts,
}

/// A pass that was sent and is not acknowledged yet.
#[must_use = "the destination has not acknowledged the pass yet"]
#[derive(Debug)]
pub(super) struct PassSent {
    pass: u32,
    counts: Counts,
    bytes: u64,
    begun: Instant,
    connections: u32,
}

/// An acknowledged pass.
#[derive(Clone, Copy, Debug)]
pub(super) struct PassDone {
    counts: Counts,
    bytes: u64,
    pub(super) time: Duration,
}

impl PassDone {
    /// Returns the measurement of the pass for the policies. `dirtied` frames and blocks were
    /// written during it, and it sent `blocks` of disks besides frames.
    ///
    /// With compression the uncompressed size counts, because the next pass will compress as well.
    /// Zero blocks of disks count as content, because reading them takes as long.
    pub(super) fn measured(&self, dirtied: u64, blocks: Counts) -> PassMeasurement {
        let contents = self.counts.normal + blocks.normal + blocks.zero;
        let frames = contents + self.counts.zero;
        let bytes = self.bytes.max(contents.saturating_mul(PAGE_SIZE));
        PassMeasurement { frames, bytes, time: self.time, dirtied }
    }

    /// Returns the report of the pass, which sent `blocks` of disks. In its `window` the guest
    /// wrote `dirtied` frames and blocks.
    pub(super) fn report(&self, blocks: Counts, dirtied: u64, window: Duration) -> PassReport {
        PassReport {
            frames: self.counts.normal + self.counts.zero,
            bytes: self.bytes,
            disk_bytes: (blocks.normal + blocks.zero).saturating_mul(PAGE_SIZE),
            time_ms: ms(self.time),
            dirty_rate_bytes_per_s: per_second(dirtied.saturating_mul(PAGE_SIZE), window),
        }
    }
}

impl PassSent {
    /// Waits until the destination acknowledges the pass.
    pub(super) fn await_end(self, wire: &mut Wire<Link>) -> Result<PassDone, Cause> {
        let Self { pass, counts, bytes, begun, connections } = self;
        // The buffers of all channels drain over one link before the acknowledgement can arrive.
        let progress_timeout = wire.stream().progress_timeout();
        wire.stream_mut().set_progress_timeout(progress_timeout.saturating_mul(connections));
        let acknowledged = acknowledged(wire, pass, counts);
        wire.stream_mut().set_progress_timeout(progress_timeout);
        acknowledged?;
        Ok(PassDone { counts, bytes, time: begun.elapsed() })
    }
}

impl<'a> Passes<'a> {
    /// Makes the senders of `ram` for `channels`, to a destination that offers `features`. `rate`
    /// is the limit in bytes/s until [`pause`](Self::pause).
    pub(super) fn new(
        ram: &'a GuestRam,
        control: &'a SendControl,
        channels: &Channels,
        features: u64,
        compression: Compression,
        rate: Option<u64>,
    ) -> Result<Self, Cause> {
        let rate_limiter = Arc::new(RateLimiter::new(rate));
        let sender = || -> Result<_, Cause> {
            let packer = Packer::new(compression)?;
            Ok(FrameSender::new(ram, control, rate_limiter.clone(), packer, features))
        };
        let first = sender()?;
        let joined = channels.joined.iter().map(|_| sender()).collect::<Result<_, Cause>>()?;
        Ok(Self {
            control,
            rate_limiter,
            first,
            joined,
            is_paused: false,
            totals: Counts::default(),
        })
    }

    /// Lifts the bandwidth limit, and keeps the keys of TLS, because the guest is paused.
    pub(super) fn pause(&mut self) {
        self.is_paused = true;
        self.rate_limiter.lift();
    }

    /// Sends `runs`, which have `frames` frames in total, and the drained blocks of `drives`, as
    /// pass number `pass`. Does not wait for the acknowledgement. Fails at `limit`. After an error
    /// the destination may have any part of the pass.
    pub(super) fn begin(
        &mut self,
        channels: &mut Channels,
        pass: u32,
        runs: impl Iterator<Item = FrameRun> + Send,
        frames: u64,
        drives: &mut Drives,
        limit: Limit,
    ) -> Result<PassSent, Cause> {
        let begun = Instant::now();
        let before = channels.sent_bytes();
        self.rate_limiter.begin();
        let disk_bytes = drives.pending().saturating_mul(PAGE_SIZE);
        self.control.update(|p| {
            (p.pass, p.remaining_frames, p.remaining_disk_bytes) = (pass, frames, disk_bytes);
        });
        channels.first.send(&WireMessage::PassBegin { pass, frames })?;
        let mut chunks = runs.flat_map(|run| run.chunks(MAX_PAGES));
        let counts = match self.joined.is_empty() {
            true => self.first.share(&mut channels.first, || chunks.next(), limit)?,
            false => self.share_out(channels, PassHead { pass, frames }, chunks, limit)?,
        };
        let wire = &mut channels.first;
        let (first, control) = (&mut self.first, self.control);
        drives
            .send(wire, pass, control, limit, |wire, before| first.after_message(wire, before))?;
        if !self.is_paused {
            // Before PASS_END, because the destination changes its own keys with its next message.
            // If that were not the acknowledgement, it would be one in the pause.
            channels.refresh_keys().map_err(WireError::from)?;
        }
        channels.first.send(&WireMessage::PassEnd { pass, counts })?;
        self.totals += counts;
        let bytes = channels.sent_bytes() - before;
        let connections = channels.count();
        Ok(PassSent { pass, counts, bytes, begun, connections })
    }

    /// Sends a pass's chunks over all channels, without the PASS_END of the first one.
    fn share_out(
        &mut self,
        channels: &mut Channels,
        head: PassHead,
        chunks: impl Iterator<Item = FrameRun> + Send,
        limit: Limit,
    ) -> Result<Counts, Cause> {
        let failure = &FirstFailure::new(channels.count());
        let Channels { first, joined } = channels;
        let chunks = Mutex::new(chunks);
        let next = || chunks.lock().next();
        let mut counts = Counts::default();
        first.stream_mut().set_group(Some(failure.group.clone()));
        std::thread::scope(|scope| {
            let mut threads = Vec::with_capacity(joined.len());
            for (which, (wire, sender)) in (1..).zip(joined.iter_mut().zip(&mut self.joined)) {
                wire.stream_mut().set_group(Some(failure.group.clone()));
                let span = tracing::Span::current();
                let run = move || {
                    let send = || send_share(wire, sender, head, next, limit);
                    failure.counts_or_halt(which, span.in_scope(send))
                };
                let thread = std::thread::Builder::new().name("migrate-channel".into());
                match thread.spawn_scoped(scope, run) {
                    Ok(thread) => threads.push(thread),
                    Err(cause) => {
                        let cause = Cause::System { what: "starting a thread", cause };
                        failure.counts_or_halt(which, Err(cause));
                    }
                }
            }
            counts += failure.counts_or_halt(0, self.first.share(first, next, limit));
            for thread in threads {
                match thread.join() {
                    Ok(share) => counts += share,
                    Err(panic) => std::panic::resume_unwind(panic),
                }
            }
        });
        first.stream_mut().set_group(None);
        match failure.cause.lock().take() {
            Some(cause) => Err(cause),
            None => Ok(counts),
        }
    }
}

/// The contents of PASS_BEGIN.
#[derive(Clone, Copy)]
struct PassHead {
    pass: u32,
    frames: u64,
}

/// The first failure of a pass over several channels. It is the cause, and stops the others.
struct FirstFailure {
    cause: Mutex<Option<Cause>>,
    group: Arc<ChannelGroup>,
    /// Number of channels.
    of: u32,
}

impl FirstFailure {
    fn new(of: u32) -> Self {
        Self { cause: Mutex::new(None), group: Arc::default(), of }
    }

    /// Returns the counts of channel number `which`, from 0. If it has failed, records the failure,
    /// stops the other channels, and returns no counts.
    fn counts_or_halt(&self, which: u32, result: Result<Counts, Cause>) -> Counts {
        result.unwrap_or_else(|cause| {
            self.cause.lock().get_or_insert_with(|| match which {
                0 => cause,
                _ => Cause::Connection { which: which + 1, of: self.of, cause: Box::new(cause) },
            });
            self.group.halt();
            Counts::default()
        })
    }
}

/// Sends a joined channel's share of a pass.
fn send_share(
    wire: &mut Wire<Link>,
    sender: &mut FrameSender<'_>,
    PassHead { pass, frames }: PassHead,
    next: impl FnMut() -> Option<FrameRun>,
    limit: Limit,
) -> Result<Counts, Cause> {
    wire.stream_mut().set_deadline(limit.at());
    wire.send(&WireMessage::PassBegin { pass, frames })?;
    let counts = sender.share(wire, next, limit)?;
    wire.send(&WireMessage::PassEnd { pass, counts })?;
    Ok(counts)
}

fn acknowledged(wire: &mut Wire<Link>, pass: u32, counts: Counts) -> Result<(), WireError> {
    let (theirs, received) = match wire.recv()? {
        WireMessage::PassAck { pass, counts } => (pass, counts),
        other => return Err(other.unexpected("PASS_ACK")),
    };
    same("the number of the pass", theirs.into(), pass.into())?;
    same("the pass's frames with content", received.normal, counts.normal)?;
    same("the pass's zero frames", received.zero, counts.zero)
}
