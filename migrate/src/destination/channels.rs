//! The joined channels of a migration: a thread for each channel receives its share of every pass.
//!
//! A pass begins on all channels after the previous one was acknowledged, so that the newest
//! content of a frame that arrives twice stays. The first channel ends the pass after all others
//! have ended their shares.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread::Scope;
use std::time::{Duration, Instant};

use driftline_dirty_tracker::Layout;
use driftline_guest::Guest;
use parking_lot::Mutex;

use super::memory_writer::MemoryWriter;
use crate::error::Cause;
use crate::protocol::error::WireError;
use crate::protocol::limits::MAX_CONNECTIONS;
use crate::protocol::message::Counts;
use crate::protocol::stream_state::{StreamState, StreamStep};
use crate::protocol::tag::Tag;
use crate::transport::channels::ChannelGroup;
use crate::transport::compression::Unpacker;
use crate::transport::link::{Closer, Link, halted};
use crate::transport::wait;
use crate::transport::wire::Wire;

/// Progress timeout between two passes, during which the first channel's limits apply.
const UNLIMITED: Duration = Duration::from_secs(365 * 24 * 3600);

/// State that all channels of one migration share.
#[derive(Debug)]
pub(super) struct JoinedChannelState {
    group: Arc<ChannelGroup>,
    /// Number of passes acknowledged.
    acknowledged: AtomicU32,
    /// Bytes of memory received over joined channels, including zero frames.
    moved: AtomicU64,
    /// Bytes received over joined channels, including headers.
    received: AtomicU64,
    /// Cause of the first failure.
    fault: Mutex<Option<Cause>>,
}

/// A share of a pass that is in place.
#[derive(Debug)]
struct ShareDone {
    pass: u32,
    counts: Counts,
}

/// The joined channels, for the thread that reads the first one.
#[derive(Debug)]
pub(super) struct ReceiveChannels {
    count: usize,
    /// Close the connections.
    closers: Vec<Closer>,
    from: Receiver<ShareDone>,
    to: SyncSender<ShareDone>,
    shared: Arc<JoinedChannelState>,
}

impl ReceiveChannels {
    /// Returns an empty set.
    pub(super) fn new() -> Self {
        let (to, from) = sync_channel(MAX_CONNECTIONS as usize);
        let shared = Arc::new(JoinedChannelState {
            group: Arc::default(),
            acknowledged: AtomicU32::new(0),
            moved: AtomicU64::new(0),
            received: AtomicU64::new(0),
            fault: Mutex::new(None),
        });
        Self { count: 0, closers: Vec::new(), from, to, shared }
    }

    /// Returns the group of these channels, which the first channel joins.
    pub(super) fn group(&self) -> Arc<ChannelGroup> {
        self.shared.group.clone()
    }

    /// Returns the number of joined channels.
    pub(super) fn count(&self) -> usize {
        self.count
    }

    /// Starts a thread of `scope` that reads a channel.
    pub(super) fn add<'scope, G: Guest + ?Sized>(
        &mut self,
        scope: &'scope Scope<'scope, '_>,
        wire: Wire<Link>,
        layout: Layout,
        memory: &'scope MemoryWriter<'scope, G>,
        progress_timeout: Duration,
    ) -> Result<(), Cause> {
        let (to, shared) = (self.to.clone(), self.shared.clone());
        let closer = wire.stream().closer();
        self.closers.push(closer.map_err(|cause| Cause::System { what: "joining", cause })?);
        let (stream, unpacker) = (StreamState::joined(layout), Unpacker::new());
        let channel = Channel { wire, stream, memory, unpacker, progress_timeout, shared, to };
        std::thread::Builder::new()
            .name("migrate-channel".into())
            .spawn_scoped(scope, move || channel.run())
            .map_err(|cause| Cause::System { what: "starting a thread", cause })?;
        self.count += 1;
        Ok(())
    }

    /// Waits until all shares of `pass` are in place. Returns their counts. Fails with a timeout at
    /// `until`.
    pub(super) fn await_end(&self, pass: u32, until: Instant) -> Result<Counts, Cause> {
        let mut counts = Counts::default();
        for _ in 0..self.count {
            let failed = |why: io::Error| Cause::from(WireError::from(why));
            let late = || failed(io::ErrorKind::TimedOut.into());
            let done = wait::answer(&self.from, late, || {
                if Instant::now() >= until {
                    return Err(late());
                }
                match self.shared.group.is_halted() {
                    true => Err(failed(halted())),
                    false => Ok(()),
                }
            })?;
            if done.pass != pass {
                let why = "it ends another pass than the first connection does";
                return Err(WireError::Malformed { message: Tag::PassEnd, why }.into());
            }
            counts += done.counts;
        }
        Ok(counts)
    }

    /// Allows the next pass, because this one is about to be acknowledged.
    pub(super) fn acknowledge(&self) {
        self.shared.acknowledged.fetch_add(1, Ordering::Release);
    }

    /// Returns the bytes of memory received over joined channels.
    pub(super) fn moved_bytes(&self) -> u64 {
        self.shared.moved.load(Ordering::Relaxed)
    }

    /// Returns the bytes received over joined channels, including headers.
    pub(super) fn received_bytes(&self) -> u64 {
        self.shared.received.load(Ordering::Relaxed)
    }

    /// Returns why receiving failed, if the first channel failed with `cause`. A reason of the
    /// source takes precedence, then the failure of another channel.
    pub(super) fn failure_reason(&self, wire: &mut Wire<Link>, cause: Cause) -> Cause {
        let fault = self.shared.fault.lock().take();
        match (cause, fault) {
            (cause @ Cause::Wire(WireError::Aborted { .. }), _) | (cause, None) => cause,
            (_, Some(Cause::Wire(e))) if e.is_loss() => match wire.pending_abort() {
                Some(reason) => reason.into(),
                None => Cause::Joined { cause: Box::new(e) },
            },
            (_, Some(fault)) => fault,
        }
    }
}

impl Drop for ReceiveChannels {
    /// Ends the threads immediately, because the guest at the source may be paused.
    fn drop(&mut self) {
        self.shared.group.halt();
        self.closers.iter().for_each(Closer::close);
    }
}

/// One joined channel.
struct Channel<'g, G: Guest + ?Sized> {
    wire: Wire<Link>,
    stream: StreamState,
    memory: &'g MemoryWriter<'g, G>,
    unpacker: Unpacker,
    progress_timeout: Duration,
    shared: Arc<JoinedChannelState>,
    to: SyncSender<ShareDone>,
}

impl<G: Guest + ?Sized> Channel<'_, G> {
    fn run(mut self) {
        let Err(cause) = self.read() else { return };
        // After a halt the failure is a consequence, not the cause.
        if !self.shared.group.is_halted() {
            let mut fault = self.shared.fault.lock();
            fault.get_or_insert(cause);
            drop(fault);
            self.shared.group.halt();
        }
    }

    fn read(&mut self) -> Result<(), Cause> {
        self.wire.stream_mut().set_group(Some(self.shared.group.clone()));
        loop {
            let in_pass = self.stream.is_in_pass();
            let progress_timeout = if in_pass { self.progress_timeout } else { UNLIMITED };
            self.wire.stream_mut().set_progress_timeout(progress_timeout);
            let (moved, received) = (self.stream.moved_bytes(), self.wire.received_bytes());
            let message = self.wire.recv()?;
            let tag = message.tag();
            match self.stream.on(message)? {
                StreamStep::Noted => {
                    let begun = self.stream.passes();
                    if begun > self.shared.acknowledged.load(Ordering::Acquire) {
                        let why = "the pass before it was not acknowledged";
                        return Err(WireError::Malformed { message: Tag::PassBegin, why }.into());
                    }
                }
                StreamStep::Place { runs, contents } => self.memory.place(runs, contents)?,
                StreamStep::Unpack { codec, runs, packed } => {
                    self.memory.unpack(&mut self.unpacker, codec, runs, packed)?;
                }
                StreamStep::Fetch { run } => self.memory.fetch(&mut self.wire, run)?,
                StreamStep::Zero { runs } => self.memory.zero(runs)?,
                StreamStep::Ack { pass, counts } => {
                    // The receiver outlives this thread, so this does not fail.
                    let _ = self.to.send(ShareDone { pass, counts });
                }
                // `StreamState` never returns these for a joined channel.
                StreamStep::Prefault { .. }
                | StreamStep::Join { .. }
                | StreamStep::CheckState { .. }
                | StreamStep::Drive(_)
                | StreamStep::Digest
                | StreamStep::Restore { .. }
                | StreamStep::Complete { .. } => {
                    return Err(WireError::unexpected(tag, "a share of a pass").into());
                }
            }
            let (moved, received) =
                (self.stream.moved_bytes() - moved, self.wire.received_bytes() - received);
            self.shared.moved.fetch_add(moved, Ordering::Relaxed);
            self.shared.received.fetch_add(received, Ordering::Relaxed);
        }
    }
}
