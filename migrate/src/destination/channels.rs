//! The connections that have joined a migration: a thread reads each, and brings its share of every
//! pass.
//!
//! A pass begins on all connections once the one before it was acknowledged, so a frame that comes
//! twice ends as its newest wherever it came. The first connection ends the pass: when it has heard
//! from every share.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::sync::{Mutex, PoisonError};
use std::thread::Scope;
use std::time::{Duration, Instant};

use driftline_dirty_tracker::Layout;
use driftline_guest::Guest;

use super::memory_writer::MemoryWriter;
use crate::error::Cause;
use crate::protocol::error::WireError;
use crate::protocol::limits::MAX_CONNECTIONS;
use crate::protocol::message::Counts;
use crate::protocol::stream_state::{Step, StreamState};
use crate::protocol::tag::Tag;
use crate::transport::channels::ChannelGroup;
use crate::transport::compression::Unpacker;
use crate::transport::link::{Closer, Link, SLICE};
use crate::transport::wire::Wire;

/// Between two passes a share waits for as long as its migration takes: the first connection has
/// the limits.
const UNLIMITED: Duration = Duration::from_secs(365 * 24 * 3600);

/// What all connections of one migration know.
#[derive(Debug)]
pub(super) struct Common {
    group: Arc<ChannelGroup>,
    /// Passes acknowledged.
    acknowledged: AtomicU32,
    /// Bytes of memory, zero frames included, that have come over shares.
    moved: AtomicU64,
    /// Bytes that have come over shares, heads included.
    received: AtomicU64,
    /// Why the first share failed.
    fault: Mutex<Option<Cause>>,
}

/// A share of a pass is in place.
#[derive(Debug)]
struct Done {
    pass: u32,
    counts: Counts,
}

/// The shares, for the thread that reads the first connection.
#[derive(Debug)]
pub(super) struct Channels {
    count: usize,
    /// Their connections, to be closed.
    closers: Vec<Closer>,
    from: Receiver<Done>,
    to: SyncSender<Done>,
    shared: Arc<Common>,
}

impl Channels {
    /// None yet.
    pub(super) fn new() -> Self {
        let (to, from) = sync_channel(MAX_CONNECTIONS as usize);
        let shared = Arc::new(Common {
            group: Arc::default(),
            acknowledged: AtomicU32::new(0),
            moved: AtomicU64::new(0),
            received: AtomicU64::new(0),
            fault: Mutex::new(None),
        });
        Self { count: 0, closers: Vec::new(), from, to, shared }
    }

    /// What makes the first connection one of them.
    pub(super) fn group(&self) -> Arc<ChannelGroup> {
        self.shared.group.clone()
    }

    /// How many have joined.
    pub(super) fn count(&self) -> usize {
        self.count
    }

    /// Has a thread of `scope` read a connection that has joined.
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
        let (stream, unpacker) = (StreamState::shares(layout), Unpacker::new());
        let channel = Channel { wire, stream, memory, unpacker, progress_timeout, shared, to };
        std::thread::Builder::new()
            .name("migrate-channel".into())
            .spawn_scoped(scope, move || channel.run())
            .map_err(|cause| Cause::System { what: "starting a thread", cause })?;
        self.count += 1;
        Ok(())
    }

    /// Waits until all shares of `pass` are in place; what they brought. Fails at `until`, as
    /// silence does.
    pub(super) fn await_end(&self, pass: u32, until: Instant) -> Result<Counts, Cause> {
        let mut counts = Counts::default();
        for _ in 0..self.count {
            let done = loop {
                match self.from.recv_timeout(SLICE) {
                    Ok(done) => break done,
                    Err(RecvTimeoutError::Timeout) if Instant::now() < until => {}
                    Err(_) => {
                        return Err(WireError::from(std::io::Error::from(
                            std::io::ErrorKind::TimedOut,
                        ))
                        .into());
                    }
                }
                if self.shared.group.is_halted() {
                    let why =
                        std::io::Error::other("another connection of this migration has ended");
                    return Err(WireError::from(why).into());
                }
            };
            if done.pass != pass {
                let why = "it ends another pass than the first connection does";
                return Err(WireError::Malformed { message: Tag::PassEnd, why }.into());
            }
            counts += done.counts;
        }
        Ok(counts)
    }

    /// The pass is about to be acknowledged: the next one may come.
    pub(super) fn acknowledge(&self) {
        self.shared.acknowledged.fetch_add(1, Ordering::Release);
    }

    /// Bytes of memory that have come over shares.
    pub(super) fn moved_bytes(&self) -> u64 {
        self.shared.moved.load(Ordering::Relaxed)
    }

    /// Bytes that have come over shares, heads included.
    pub(super) fn received_bytes(&self) -> u64 {
        self.shared.received.load(Ordering::Relaxed)
    }

    /// Why receiving failed, where the first connection's end was `cause`. What the source says
    /// goes before all; what ended a share says more than that it has ended.
    pub(super) fn say_why(&self, wire: &mut Wire<Link>, cause: Cause) -> Cause {
        let fault = self.shared.fault.lock().unwrap_or_else(PoisonError::into_inner).take();
        match (cause, fault) {
            (cause @ Cause::Wire(WireError::Aborted { .. }), _) | (cause, None) => cause,
            (_, Some(Cause::Wire(e))) if e.is_loss() => match wire.pending_abort() {
                Some(said) => said.into(),
                None => Cause::Joined { cause: Box::new(e) },
            },
            (_, Some(fault)) => fault,
        }
    }
}

impl Drop for Channels {
    /// Ends the threads at once: the guest may stand meanwhile.
    fn drop(&mut self) {
        self.shared.group.halt();
        self.closers.iter().for_each(Closer::close);
    }
}

/// One joined connection.
struct Channel<'g, G: Guest + ?Sized> {
    wire: Wire<Link>,
    stream: StreamState,
    memory: &'g MemoryWriter<'g, G>,
    unpacker: Unpacker,
    progress_timeout: Duration,
    shared: Arc<Common>,
    to: SyncSender<Done>,
}

impl<G: Guest + ?Sized> Channel<'_, G> {
    fn run(mut self) {
        let Err(cause) = self.read() else { return };
        // After a halt it is that, and not a cause.
        if !self.shared.group.is_halted() {
            let mut fault = self.shared.fault.lock().unwrap_or_else(PoisonError::into_inner);
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
            match self.stream.on(message)? {
                Step::Noted => {
                    let begun = self.stream.passes();
                    if begun > self.shared.acknowledged.load(Ordering::Acquire) {
                        let why = "the pass before it was not acknowledged";
                        return Err(WireError::Malformed { message: Tag::PassBegin, why }.into());
                    }
                }
                Step::Place { runs, contents } => self.memory.place(runs, contents)?,
                Step::Unpack { codec, runs, packed } => {
                    self.memory.unpack(&mut self.unpacker, codec, runs, packed)?;
                }
                Step::Fetch { run } => self.memory.fetch(&mut self.wire, run)?,
                Step::Zero { runs } => self.memory.zero(runs)?,
                Step::Ack { pass, counts } => {
                    // The other end lives as long as this thread.
                    let _ = self.to.send(Done { pass, counts });
                }
                // `StreamState` lets none of them through here.
                Step::Prepare { .. }
                | Step::Join { .. }
                | Step::Drive(_)
                | Step::Digest
                | Step::Restore { .. }
                | Step::Complete { .. } => {
                    return Ok(());
                }
            }
            let (moved, received) =
                (self.stream.moved_bytes() - moved, self.wire.received_bytes() - received);
            self.shared.moved.fetch_add(moved, Ordering::Relaxed);
            self.shared.received.fetch_add(received, Ordering::Relaxed);
        }
    }
}
