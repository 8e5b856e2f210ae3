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

/// Bytes of memory and state that a source must move in each window of its [`PaceLimit`].
const MIN_PROGRESS: u64 = 256 << 10;

/// Least frames of a last pass during which another thread restores the state. Receiving fewer
/// takes less time than starting a thread.
const MIN_PARALLEL_RESTORE: u64 = 512;
/// Time for which [`stay_awake`](driftline_guest::HandOver::stay_awake) certainly keeps processors
/// awake.
const AWAKE: Duration = Duration::from_millis(10);

/// The least pace of a source. A new window begins whenever the source has moved
/// [`MIN_PROGRESS`] bytes.
pub(super) struct PaceLimit {
    window: Duration,
    until: Instant,
    /// Bytes that had arrived when the window began.
    before: u64,
}

impl PaceLimit {
    pub(super) fn begin(window: Duration) -> Self {
        Self { window, until: Instant::now() + window, before: 0 }
    }

    /// Records that `moved` bytes have arrived in all.
    fn note(&mut self, moved: u64) {
        if moved - self.before >= MIN_PROGRESS {
            self.renew(moved);
        }
    }

    /// Begins a new window, after `moved` bytes in all.
    fn renew(&mut self, moved: u64) {
        (self.until, self.before) = (Instant::now() + self.window, moved);
    }

    /// Extends the window by a time in which this side did not read.
    fn allow(&mut self, waited: Duration) {
        self.until += waited;
    }

    /// Converts a timeout at the window's end into the error that the source was too slow.
    fn judge(&self, e: WireError, moved: u64) -> WireError {
        if e.is_silence() && Instant::now() >= self.until {
            let (found, least) = (moved - self.before, MIN_PROGRESS);
            return WireError::TooSlow { found, window: self.window, least };
        }
        e
    }
}

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

impl<'g, G: Guest + ?Sized> GuestReceiver<'g, G> {
    /// Prepares to receive memory into `guest`, and `drives` into `copies`.
    pub(super) fn new(guest: &'g G, drives: &'g [DriveHead], copies: &'g mut Copies) -> Self {
        let stream = StreamState::new(guest.layout().clone(), drives.to_vec());
        Self { guest, stream, channels: ReceiveChannels::new(), copies }
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
        let memory = MemoryWriter::new(guest, prealloc).map_err(|e| Cause::System {
            what: "recording received frames",
            cause: std::io::Error::other(e),
        })?;
        let complete = std::thread::scope(|scope| {
            let thread = std::thread::Builder::new().name("migrate-prepare".into());
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
        let ReceiveContext { control, mut pace, progress_timeout, joined } = context;
        let mut unpacker = Unpacker::new();
        // Bytes received, and the time, at the end of the last pass.
        let mut before = (wire.received_bytes(), Instant::now());
        // Bytes of memory over joined channels, at the end of the last pass.
        let mut moved_elsewhere = 0;
        let (mut restored, mut restoring, mut awake) = (false, None, None);
        loop {
            wire.stream_mut().set_deadline(Some(pace.until));
            let message = wire.recv().map_err(|e| pace.judge(e, self.moved_bytes()))?;
            if let WireMessage::PassEnd { pass, .. } = &message
                && self.channels.count() > 0
            {
                let others = self.channels.await_end(*pass, pace.until);
                let others = others.map_err(|cause| self.slow(&pace, cause))?;
                self.stream.count_others(others);
            }
            match self.stream.on(message)? {
                StreamStep::Noted => {}
                StreamStep::Place { runs, contents } => memory.place(runs, contents)?,
                StreamStep::Unpack { codec, runs, packed } => {
                    memory.unpack(&mut unpacker, codec, runs, packed)?;
                }
                StreamStep::Digest => {
                    wire.send(&WireMessage::Digest(memory.digest()?))?;
                    // The time of digests does not count against the source, whose digest may take
                    // longer than this one.
                    let allowance = allowance(self.guest.layout().frames());
                    let timeout = progress_timeout.saturating_add(allowance);
                    wire.stream_mut().set_progress_timeout(timeout);
                    pace = PaceLimit::begin(pace.window.saturating_add(allowance));
                }
                StreamStep::Fetch { run } => {
                    memory.fetch(wire, run).map_err(|cause| self.slow(&pace, cause))?;
                }
                StreamStep::Zero { runs } => memory.zero(runs)?,
                StreamStep::Prepare { runs } => memory.expect(runs),
                StreamStep::Join { joined: count } => {
                    if self.channels.count() > 0 {
                        let why = "it was sent before";
                        return Err(WireError::Malformed { message: Tag::Connections, why }.into());
                    }
                    for wire in joined(count)? {
                        let layout = self.guest.layout().clone();
                        self.channels.add(scope, wire, layout, memory, progress_timeout)?;
                    }
                }
                // The time of this host's disks does not count against the source.
                StreamStep::Drive(step) => pace.allow(self.copies.take(step)?),
                StreamStep::Ack { pass, counts } => {
                    over.store(true, Ordering::Relaxed);
                    memory.end_prealloc();
                    self.acknowledge(wire, &mut pace, pass, counts)?;
                    let received = self.received_bytes(wire);
                    let (bytes, time) = (received - before.0, before.1.elapsed());
                    before = (received, Instant::now());
                    if !restored && restoring.is_none() {
                        // The pause may be next.
                        self.guest.stay_awake();
                        awake = Some(Instant::now());
                        heap::grow();
                    }
                    moved_elsewhere = self.channels.moved_bytes();
                    let rate = per_second(bytes, time);
                    control.update(|p| p.link_rate_bytes_per_s = rate);
                }
                StreamStep::Restore { sections, frames } if frames < MIN_PARALLEL_RESTORE => {
                    self.keep_awake(awake);
                    self.guest.restore_state(&sections, Clock::Advance)?;
                    restored = true;
                }
                StreamStep::Restore { sections, .. } => {
                    restoring = Some(self.restore_in_parallel(scope, sections)?);
                    self.keep_awake(awake);
                }
                StreamStep::Complete { sections, was_running } => {
                    wire.stream_mut().set_deadline(None);
                    if let Some(thread) = restoring.take() {
                        thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))?;
                        restored = true;
                    }
                    let (is_restored, figures) = (restored, self.figures());
                    return Ok(CompleteStream { sections, is_restored, was_running, figures });
                }
            }
            pace.note(self.moved_bytes());
            self.show_progress(control, wire, moved_elsewhere);
        }
    }

    /// Makes the blocks of a pass durable, and acknowledges the pass.
    fn acknowledge(
        &mut self,
        wire: &mut Wire<Link>,
        pace: &mut PaceLimit,
        pass: u32,
        counts: Counts,
    ) -> Result<(), Cause> {
        if self.copies.make_durable()? {
            pace.renew(self.moved_bytes());
        }
        self.channels.acknowledge();
        Ok(wire.send(&WireMessage::PassAck { pass, counts })?)
    }

    /// Shows the progress. `moved_before` are the bytes of memory that joined channels had received
    /// before the current pass.
    fn show_progress(&self, control: &ReceiveControl, wire: &Wire<Link>, moved_before: u64) {
        let (pass, left) = self.stream.progress();
        let elsewhere = (self.channels.moved_bytes() - moved_before) / PAGE_SIZE;
        control.update(|p| {
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

    /// Restores the state on another thread while the last pass arrives.
    fn restore_in_parallel<'scope>(
        &self,
        scope: &'scope Scope<'scope, '_>,
        sections: Arc<[Section]>,
    ) -> Result<ScopedJoinHandle<'scope, Result<(), GuestError>>, Cause>
    where
        'g: 'scope,
    {
        let guest = self.guest;
        let thread = std::thread::Builder::new().name("migrate-restore".into());
        let restore = move || guest.restore_state(&sections, Clock::Advance);
        let spawned = thread.spawn_scoped(scope, restore);
        spawned.map_err(|cause| Cause::System { what: "starting a thread", cause })
    }

    /// Returns the bytes moved over all channels. Shares of complete passes count twice, which can
    /// only hide a pace that is slow after a fast one.
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

#[cfg(test)]
mod tests {
    use std::io::{Error, ErrorKind};

    use driftline_format::FormatError;

    use super::*;

    #[test]
    fn storage_waits_extend_the_pace_window() {
        let silence = || WireError::from(FormatError::Io(Error::from(ErrorKind::TimedOut)));
        let mut pace = PaceLimit::begin(Duration::ZERO);
        assert!(matches!(pace.judge(silence(), 0), WireError::TooSlow { .. }));
        pace.allow(Duration::from_secs(3600));
        assert!(pace.judge(silence(), 0).is_silence());
    }
}
