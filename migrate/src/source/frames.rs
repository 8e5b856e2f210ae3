//! Sends frames over one connection as FRAMES, PAGES and ZERO.
//!
//! Long runs go from guest memory straight to the socket (FRAMES). If the guest writes them
//! meanwhile, they are dirty and are sent again. Scattered frames are gathered in one reused buffer
//! and have a checksum (PAGES).

use std::sync::Arc;

use driftline_dirty_tracker::{FrameRun, Gfn, PAGE_SIZE};
use driftline_format::is_zero;
use driftline_guest::{GuestRam, PAGE_BYTES};
use vm_memory::{Bytes, GuestAddress};
use zerocopy::IntoBytes;

use super::limit::Limit;
use super::rate_limiter::RateLimiter;
use super::run_table::{FRAMES_PER_MESSAGE, RunTableBuilder};
use crate::control::SendControl;
use crate::error::Cause;
use crate::protocol::features::DIRECT_FRAMES;
use crate::protocol::limits::{MAX_PAGES, MAX_ZERO_RUNS};
use crate::protocol::message::{Counts, RawRun, packed_head, runs_head};
use crate::protocol::tag::Tag;
use crate::transport::compression::Packer;
use crate::transport::link::Link;
use crate::transport::wire::Wire;

/// Least frames of a run that is sent as FRAMES. Its two additional system calls cost about as much
/// as copying this many frames.
const DIRECT: u64 = 8;
/// Number of runs at which a ZERO is sent. A chunk adds at most one run a frame, so a message never
/// exceeds [`MAX_ZERO_RUNS`].
const ZERO_RUNS: usize = 512;
const _: () = assert!(ZERO_RUNS as u64 + MAX_PAGES < MAX_ZERO_RUNS as u64);
/// Number of bytes that one step compares with zero.
const PIECE: usize = 512;
/// Bytes of a cache line.
const LINE: usize = 64;

/// Sends a guest's memory, or shares of it, over one channel.
pub(super) struct FrameSender<'a> {
    ram: &'a GuestRam,
    control: &'a SendControl,
    rate_limiter: Arc<RateLimiter>,
    packer: Option<Packer>,
    /// Whether long runs are sent as FRAMES.
    direct: bool,
    pages: Vec<u8>,
    runs: Vec<RawRun>,
    frames: u64,
    /// Zero frames for one ZERO.
    zeros: RunTableBuilder,
}

impl<'a> FrameSender<'a> {
    pub(super) fn new(
        ram: &'a GuestRam,
        control: &'a SendControl,
        rate_limiter: Arc<RateLimiter>,
        packer: Option<Packer>,
        features: u64,
    ) -> Self {
        let direct = packer.is_none() && features & DIRECT_FRAMES != 0;
        Self {
            ram,
            control,
            rate_limiter,
            packer,
            direct,
            pages: vec![0; FRAMES_PER_MESSAGE as usize * PAGE_BYTES],
            runs: Vec::with_capacity(FRAMES_PER_MESSAGE as usize),
            frames: 0,
            zeros: RunTableBuilder::default(),
        }
    }

    /// Sends the chunks that `next` returns until it returns none: all of a pass, or this channel's
    /// share of it. Fails at `limit`.
    pub(super) fn share(
        &mut self,
        wire: &mut Wire<Link>,
        mut next: impl FnMut() -> Option<FrameRun>,
        limit: Limit,
    ) -> Result<Counts, Cause> {
        let mut counts = Counts::default();
        while let Some(chunk) = next() {
            limit.check()?;
            self.chunk(wire, chunk, &mut counts)?;
        }
        self.flush_pages(wire)?;
        self.flush_zeros(wire)?;
        Ok(counts)
    }

    /// Sends a chunk of at most one message's frames. Zero frames and scattered frames are gathered
    /// until a message is worth sending.
    fn chunk(
        &mut self,
        wire: &mut Wire<Link>,
        chunk: FrameRun,
        counts: &mut Counts,
    ) -> Result<(), Cause> {
        let mut open: Option<FrameRun> = None;
        // No run crosses the end of a memory slot.
        self.zeros.end_run();
        for gfn in chunk.frames() {
            if self.reads_zero(gfn)? {
                counts.zero += 1;
                self.zeros.add(gfn);
                self.content(wire, open.take())?;
            } else {
                counts.normal += 1;
                let so_far = open.unwrap_or(FrameRun { start: gfn, count: 0 });
                open = Some(FrameRun { count: so_far.count + 1, ..so_far });
            }
        }
        self.content(wire, open)?;
        self.control.update(|p| {
            p.remaining_frames = p.remaining_frames.saturating_sub(chunk.count);
        });
        // Sent before the message is full, so that the destination sees progress.
        if self.zeros.len() >= ZERO_RUNS {
            self.flush_zeros(wire)?;
        }
        Ok(())
    }

    fn reads_zero(&self, gfn: Gfn) -> Result<bool, Cause> {
        let mut piece = [0; PIECE];
        // The first cache line decides for most frames with content, and no other line is fetched.
        let line = &mut piece[..LINE];
        self.ram.read_slice(line, GuestAddress(gfn.gpa())).map_err(unreadable)?;
        if line.iter().any(|byte| *byte != 0) {
            return Ok(false);
        }
        for at in (0..PAGE_SIZE).step_by(PIECE) {
            self.ram.read_slice(&mut piece, GuestAddress(gfn.gpa() + at)).map_err(unreadable)?;
            if !is_zero(&piece) {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Sends a run of frames with content, or gathers it for the next PAGES.
    fn content(&mut self, wire: &mut Wire<Link>, run: Option<FrameRun>) -> Result<(), Cause> {
        let Some(run) = run else { return Ok(()) };
        if run.count >= DIRECT && self.direct {
            let before = wire.sent_bytes();
            wire.send_frames(self.ram, run)?;
            return self.after_message(wire, before);
        }
        run.chunks(FRAMES_PER_MESSAGE).try_for_each(|run| self.gather(wire, run))
    }

    fn gather(&mut self, wire: &mut Wire<Link>, run: FrameRun) -> Result<(), Cause> {
        if self.frames + run.count > FRAMES_PER_MESSAGE {
            self.flush_pages(wire)?;
        }
        let at = self.frames as usize * PAGE_BYTES;
        let room = &mut self.pages[at..at + run.bytes() as usize];
        self.ram.read_slice(room, GuestAddress(run.start.gpa())).map_err(unreadable)?;
        self.runs.push(run.into());
        self.frames += run.count;
        Ok(())
    }

    fn flush_pages(&mut self, wire: &mut Wire<Link>) -> Result<(), Cause> {
        if self.frames == 0 {
            return Ok(());
        }
        let contents = &self.pages[..self.frames as usize * PAGE_BYTES];
        let before = wire.sent_bytes();
        let (runs, packer) = (self.runs.as_bytes(), self.packer.as_mut());
        let packed = packer.and_then(|p| Some((p.codec(), p.pack(contents)?)));
        match packed {
            Some((codec, packed)) => {
                let head = packed_head(self.runs.len(), codec);
                wire.send_parts(Tag::Packed, &[head.as_bytes(), runs, packed])?;
            }
            None => {
                let head = runs_head(self.runs.len());
                wire.send_parts(Tag::Pages, &[head.as_bytes(), runs, contents])?;
            }
        }
        self.runs.clear();
        self.frames = 0;
        self.after_message(wire, before)
    }

    fn flush_zeros(&mut self, wire: &mut Wire<Link>) -> Result<(), Cause> {
        if self.zeros.is_empty() {
            return Ok(());
        }
        let head = runs_head(self.zeros.len());
        let before = wire.sent_bytes();
        wire.send_parts(Tag::Zero, &[head.as_bytes(), self.zeros.as_bytes()])?;
        self.zeros.clear();
        self.after_message(wire, before)
    }

    /// Counts the bytes, limits the rate, and detects a destination that gives up within a pass.
    pub(super) fn after_message(
        &mut self,
        wire: &mut Wire<Link>,
        before: u64,
    ) -> Result<(), Cause> {
        self.control.update(|p| p.sent_bytes += wire.sent_bytes() - before);
        self.rate_limiter.pace(wire.sent_bytes() - before, || wire.stream().is_over());
        if wire.stream_mut().has_incoming() {
            let message = wire.recv()?;
            return Err(message.unexpected("no message before PASS_END").into());
        }
        Ok(())
    }
}

fn unreadable(cause: vm_memory::GuestMemoryError) -> Cause {
    Cause::Memory { what: "reading guest memory", cause }
}
