//! Receives memory into the guest that is being built.
//!
//! Scattered frames (PAGES) are received into the wire's buffer, and written after their checksum
//! was compared. The content of long runs (FRAMES) goes from the socket straight to guest memory. A
//! second thread preallocates memory for frames that have not arrived yet.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{Scope, ScopedJoinHandle};
use std::time::{Duration, Instant};

use driftline_dirty_tracker::{PAGE_SIZE, Tree};
use driftline_guest::{Clock, DriveHead, Guest, GuestError, Section};

use super::channels::ReceiveChannels;
use super::copies::Copies;
use super::memory_writer::MemoryWriter;
use super::pace::PaceLimit;
use super::prealloc;
use crate::control::ReceiveControl;
use crate::error::Cause;
use crate::heap;
use crate::protocol::digest::allowance;
use crate::protocol::error::WireError;
use crate::protocol::message::{Counts, WireMessage};
use crate::protocol::stream_state::{StreamState, StreamStep};
use crate::protocol::tag::Tag;
use crate::report::per_second;
use crate::transport::compression::Unpacker;
use crate::transport::link::Link;
use crate::transport::wire::Wire;

/// Least frames of a last pass during which another thread restores the state. Receiving fewer
/// takes less time than starting a thread.
const MIN_PARALLEL_RESTORE: u64 = 512;
/// Time for which [`stay_awake`](driftline_guest::HandOver::stay_awake) certainly keeps processors
/// awake.
const AWAKE: Duration = Duration::from_millis(10);

/// A guest whose memory is in place and whose state has arrived.
pub(super) struct CompleteGuest {
    pub(super) sections: Arc<[Section]>,
    /// Whether the state preceded the last pass and has been restored.
    pub(super) is_restored: bool,
    pub(super) was_running: bool,
    pub(super) figures: ReceiveFigures,
    /// Frames to which content was written.
    pub(super) written: Tree,
}

/// Figures of a received stream.
#[derive(Clone, Copy)]
pub(super) struct ReceiveFigures {
    pub(super) totals: Counts,
    /// Blocks of copied disks.
    pub(super) drive_totals: Counts,
    pub(super) passes: u32,
    /// Bytes received over joined channels.
    pub(super) joined_bytes: u64,
}

/// The contents of a stream besides memory.
struct CompleteStream {
    sections: Arc<[Section]>,
    is_restored: bool,
    was_running: bool,
    figures: ReceiveFigures,
}

/// A guest whose memory is arriving.
pub(super) struct GuestReceiver<'g, G: Guest + ?Sized> {
    guest: &'g G,
    stream: StreamState,
    channels: ReceiveChannels,
    copies: &'g mut Copies,
}

/// Inputs of the first channel's thread besides the connection.
pub(super) struct ReceiveContext<'r> {
    pub(super) control: &'r ReceiveControl,
    pub(super) pace: PaceLimit,
    /// Longest time without progress within a pass.
    pub(super) progress_timeout: Duration,
    /// Collects this number of joined channels.
    pub(super) joined: &'r dyn Fn(u32) -> Result<Vec<Wire<Link>>, Cause>,
}

/// State of the first channel's thread, besides that of the stream.
struct Reading<'r, 'scope> {
    context: ReceiveContext<'r>,
    /// Bytes received, and the time, at the end of the last pass.
    pass_end: (u64, Instant),
    /// Bytes of memory over joined channels, at the end of the last pass.
    moved_elsewhere: u64,
    restore: StateRestore<'scope>,
    /// Time of the last `stay_awake`.
    awake: Option<Instant>,
}

/// Progress of restoring a state that precedes the last pass.
enum StateRestore<'scope> {
    NotBegun,
    /// Another thread restores it while the pass arrives.
    Running(ScopedJoinHandle<'scope, Result<(), GuestError>>),
    Done,
}

impl<'r> Reading<'r, '_> {
    fn begin(context: ReceiveContext<'r>, received: u64) -> Self {
        let pass_end = (received, Instant::now());
        let restore = StateRestore::NotBegun;
        Self { context, pass_end, moved_elsewhere: 0, restore, awake: None }
    }

    fn pace(&self) -> &PaceLimit {
        &self.context.pace
    }

    /// Records the end of a pass, at which `received` bytes have arrived in total, and
    /// `moved_elsewhere` bytes of memory over joined channels. Returns the rate of the pass in
    /// bytes/s.
    fn end_pass(&mut self, received: u64, moved_elsewhere: u64) -> u64 {
        let (received_before, begun) = self.pass_end;
        self.pass_end = (received, Instant::now());
        self.moved_elsewhere = moved_elsewhere;
        per_second(received - received_before, begun.elapsed())
    }
}

impl StateRestore<'_> {
    /// Waits until the state is restored. Returns false if restoring it has not begun.
    fn finish(self) -> Result<bool, GuestError> {
        match self {
            Self::NotBegun => Ok(false),
            Self::Running(thread) => {
                thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))?;
                Ok(true)
            }
            Self::Done => Ok(true),
        }
    }
}

impl<'g, G: Guest + ?Sized> GuestReceiver<'g, G> {
    /// Prepares to receive memory into `guest`, and `drives` into `copies`.
    pub(super) fn new(guest: &'g G, drives: &'g [DriveHead], copies: &'g mut Copies) -> Self {
        let stream = StreamState::new(guest.layout().clone(), drives.to_vec());
        let channels = ReceiveChannels::new();
        Self { guest, stream, channels, copies }
    }

    /// Expects no memory: the guest is built on that of its source.
    pub(super) fn with_shared_memory(self) -> Self {
        Self { stream: self.stream.with_shared_memory(), ..self }
    }

    /// Receives until the state is complete; acknowledges each pass.
    pub(super) fn run(
        self,
        wire: &mut Wire<Link>,
        context: ReceiveContext<'_>,
    ) -> Result<CompleteGuest, Cause> {
        let (prealloc, preallocator) = prealloc::pair();
        let over = AtomicBool::new(false);
        let (guest, over) = (self.guest, &over);
        let memory = MemoryWriter::new(guest, prealloc)
            .map_err(|cause| Cause::NoMemory { what: "recording received frames", cause })?;
        let complete = std::thread::scope(|scope| {
            let thread = std::thread::Builder::new().name("prefault".into());
            // Without the thread each frame is allocated when it arrives.
            if let Err(e) = thread.spawn_scoped(scope, move || preallocator.run(guest, over)) {
                tracing::debug!("memory is not preallocated: {e}");
            }
            self.receive(scope, wire, context, &memory, over)
        })?;
        let CompleteStream { sections, is_restored, was_running, figures } = complete;
        let written = memory.into_written();
        Ok(CompleteGuest { sections, is_restored, was_running, figures, written })
    }

    fn receive<'scope>(
        mut self,
        scope: &'scope Scope<'scope, '_>,
        wire: &mut Wire<Link>,
        context: ReceiveContext<'_>,
        memory: &'scope MemoryWriter<'scope, G>,
        over: &AtomicBool,
    ) -> Result<CompleteStream, Cause>
    where
        'g: 'scope,
    {
        let _over = SetAtEnd(over);
        // Ends the preallocating thread, which would wait for more frames.
        let _end = EndPrealloc(memory);
        wire.stream_mut().set_group(Some(self.channels.group()));
        let result = self.read(scope, wire, context, memory, over);
        wire.stream_mut().set_group(None);
        result.map_err(|cause| self.channels.failure_reason(wire, cause))
    }

    fn read<'scope>(
        &mut self,
        scope: &'scope Scope<'scope, '_>,
        wire: &mut Wire<Link>,
        context: ReceiveContext<'_>,
        memory: &'scope MemoryWriter<'scope, G>,
        over: &AtomicBool,
    ) -> Result<CompleteStream, Cause>
    where
        'g: 'scope,
    {
        let mut unpacker = Unpacker::new();
        let mut reading = Reading::begin(context, wire.received_bytes());
        loop {
            let message = self.next_message(wire, reading.pace())?;
            match self.stream.on(message)? {
                StreamStep::Noted => {}
                StreamStep::Place { runs, contents } => memory.place(runs, contents)?,
                StreamStep::Unpack { codec, runs, packed } => {
                    memory.unpack(&mut unpacker, codec, runs, packed)?;
                }
                StreamStep::Digest => self.answer_verify(wire, &mut reading, memory)?,
                StreamStep::Fetch { run } => {
                    memory.fetch(wire, run).map_err(|cause| self.slow(reading.pace(), cause))?;
                }
                StreamStep::Zero { runs } => memory.zero(runs)?,
                StreamStep::CheckState { heads } => self.guest.check_state_heads(&heads.0)?,
                StreamStep::Prefault { runs } => memory.expect(runs),
                StreamStep::Join { joined } => self.join(scope, &reading, memory, joined)?,
                // The time of this host's disks does not count against the source.
                StreamStep::Drive(step) => reading.context.pace.allow(self.copies.take(step)?),
                StreamStep::Ack { pass, counts } => {
                    over.store(true, Ordering::Relaxed);
                    memory.end_prealloc();
                    self.acknowledge(wire, &mut reading, pass, counts)?;
                }
                StreamStep::Restore { sections, frames } => {
                    reading.restore = self.restore(scope, reading.awake, sections, frames)?;
                }
                StreamStep::Complete { sections, was_running } => {
                    wire.stream_mut().set_deadline(None);
                    let (is_restored, figures) = (reading.restore.finish()?, self.figures());
                    return Ok(CompleteStream { sections, is_restored, was_running, figures });
                }
            }
            reading.context.pace.note(self.moved_bytes());
            self.show_progress(wire, &reading);
        }
    }

    /// Receives the next message. Before PASS_END it collects the counts of all other channels.
    fn next_message<'w>(
        &mut self,
        wire: &'w mut Wire<Link>,
        pace: &PaceLimit,
    ) -> Result<WireMessage<'w>, Cause> {
        wire.stream_mut().set_deadline(Some(pace.until()));
        let message = wire.recv().map_err(|e| pace.judge(e, self.moved_bytes()))?;
        if let WireMessage::PassEnd { pass, .. } = &message
            && self.channels.count() > 0
        {
            let others = self.channels.await_end(*pass, pace.until());
            self.stream.count_others(others.map_err(|cause| self.slow(pace, cause))?);
        }
        Ok(message)
    }

    /// Sends the digest of memory. The time of digests does not count against the source, whose
    /// digest may take longer than this one.
    fn answer_verify(
        &self,
        wire: &mut Wire<Link>,
        reading: &mut Reading<'_, '_>,
        memory: &MemoryWriter<'_, G>,
    ) -> Result<(), Cause> {
        wire.send(&WireMessage::Digest(memory.digest()?))?;
        let allowance = allowance(self.guest.layout().frames());
        let timeout = reading.context.progress_timeout.saturating_add(allowance);
        wire.stream_mut().set_progress_timeout(timeout);
        reading.context.pace.lengthen(allowance, self.moved_bytes());
        Ok(())
    }

    /// Starts the threads of `count` joined channels.
    fn join<'scope>(
        &mut self,
        scope: &'scope Scope<'scope, '_>,
        reading: &Reading<'_, 'scope>,
        memory: &'scope MemoryWriter<'scope, G>,
        count: u32,
    ) -> Result<(), Cause> {
        if self.channels.count() > 0 {
            let why = "it was sent before";
            return Err(WireError::Malformed { message: Tag::Connections, why }.into());
        }
        let ReceiveContext { joined, progress_timeout, .. } = reading.context;
        for wire in joined(count)? {
            let layout = self.guest.layout().clone();
            self.channels.add(scope, wire, layout, memory, progress_timeout)?;
        }
        Ok(())
    }

    /// Makes the blocks of a pass durable, acknowledges the pass, and prepares for the pause.
    fn acknowledge(
        &mut self,
        wire: &mut Wire<Link>,
        reading: &mut Reading<'_, '_>,
        pass: u32,
        counts: Counts,
    ) -> Result<(), Cause> {
        if self.copies.make_durable()? {
            reading.context.pace.renew(self.moved_bytes());
        }
        self.channels.acknowledge();
        if matches!(reading.restore, StateRestore::NotBegun) {
            // The source may pause its guest after the acknowledgement.
            self.guest.stay_awake();
            reading.awake = Some(Instant::now());
            heap::grow();
        }
        wire.send(&WireMessage::PassAck { pass, counts })?;
        let rate = reading.end_pass(self.received_bytes(wire), self.channels.moved_bytes());
        reading.context.control.update(|p| p.link_rate_bytes_per_s = rate);
        Ok(())
    }

    /// Shows the progress.
    fn show_progress(&self, wire: &Wire<Link>, reading: &Reading<'_, '_>) {
        let (pass, left) = self.stream.progress();
        let elsewhere = (self.channels.moved_bytes() - reading.moved_elsewhere) / PAGE_SIZE;
        reading.context.control.update(|p| {
            p.sent_bytes = self.received_bytes(wire);
            (p.pass, p.remaining_frames) = (pass, left.saturating_sub(elsewhere));
        });
    }

    /// Returns the bytes received over all channels, including headers.
    fn received_bytes(&self, wire: &Wire<Link>) -> u64 {
        wire.received_bytes() + self.channels.received_bytes()
    }

    fn figures(&self) -> ReceiveFigures {
        ReceiveFigures {
            totals: self.stream.totals(),
            drive_totals: self.stream.drive_totals(),
            passes: self.stream.passes(),
            joined_bytes: self.channels.received_bytes(),
        }
    }

    /// Keeps processors awake while the guest is paused. Skipped if `last` is less than [`AWAKE`]
    /// ago, because the call takes time.
    fn keep_awake(&self, last: Option<Instant>) {
        if last.is_none_or(|at| at.elapsed() > AWAKE) {
            self.guest.stay_awake();
        }
    }

    /// Restores a state that precedes the last pass: on another thread, unless that pass is small.
    /// `frames` is about its number of frames; `awake` is the time of the last `stay_awake`.
    fn restore<'scope>(
        &self,
        scope: &'scope Scope<'scope, '_>,
        awake: Option<Instant>,
        sections: Arc<[Section]>,
        frames: u64,
    ) -> Result<StateRestore<'scope>, Cause>
    where
        'g: 'scope,
    {
        let guest = self.guest;
        if frames < MIN_PARALLEL_RESTORE {
            self.keep_awake(awake);
            guest.restore_state(&sections, Clock::Advance)?;
            return Ok(StateRestore::Done);
        }
        let thread = std::thread::Builder::new().name("migrate-restore".into());
        let restore = move || guest.restore_state(&sections, Clock::Advance);
        let spawned = thread.spawn_scoped(scope, restore);
        let thread = spawned.map_err(|cause| Cause::System { what: "starting a thread", cause })?;
        self.keep_awake(awake);
        Ok(StateRestore::Running(thread))
    }

    /// Returns the bytes moved over all channels. Shares of joined channels count twice once their
    /// pass is complete, so the source may seem faster than it is, never slower.
    fn moved_bytes(&self) -> u64 {
        self.stream.moved_bytes().saturating_add(self.channels.moved_bytes())
    }

    fn slow(&self, pace: &PaceLimit, cause: Cause) -> Cause {
        match cause {
            Cause::Wire(e) => pace.judge(e, self.moved_bytes()).into(),
            cause => cause,
        }
    }
}

/// Stores true on drop, on any path.
struct SetAtEnd<'f>(&'f AtomicBool);

impl Drop for SetAtEnd<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// Ends the preallocation on drop.
struct EndPrealloc<'p, 'g, G: Guest + ?Sized>(&'p MemoryWriter<'g, G>);

impl<G: Guest + ?Sized> Drop for EndPrealloc<'_, '_, G> {
    fn drop(&mut self) {
        self.0.end_prealloc();
    }
}
