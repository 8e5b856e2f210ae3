//! The collector: the one thread that owns a machine's dirty source.
//!
//! It starts the source for the first subscriber and stops it when the last one has gone. In
//! between it collects when asked, when a vCPU finds its ring full, and now and then by itself, so
//! that rings seldom get that far.
//!
//! It waits for no other thread: a vCPU that waits for it can be paused all the same.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::thread::JoinHandle;
use std::time::Duration;

use checkpoint::GuestError;
use dirty_tracker::{Collected, DirtySource, SourceError, Subscription, Tracker};

use crate::vcpu::Command;

/// Between two collections of its own: at least, and at most.
const PERIOD_LEAST: Duration = Duration::from_millis(1);
const PERIOD_MOST: Duration = Duration::from_millis(32);

/// What the collector is told.
pub(crate) enum Message {
    /// One more subscriber.
    Subscribe { name: String, reply: Sender<Result<Subscription, GuestError>> },
    /// Bring all trees up to date.
    Collect { reply: Sender<Result<Collected, GuestError>> },
    /// A vCPU waits for room in its ring.
    RingFull { vcpu: u8, reply: Sender<Command> },
    /// No more collections.
    Quit,
}

/// The way to a collector. Dropping it ends the thread.
#[derive(Debug)]
pub(crate) struct Collector {
    inbox: Sender<Message>,
    overruns: Arc<AtomicU64>,
    thread: Option<JoinHandle<()>>,
}

impl Collector {
    /// Starts a collector over `source`. A collection of `many` frames or more is worth hurrying
    /// for: the next one comes sooner.
    pub(crate) fn spawn(
        source: Box<dyn DirtySource>,
        tracker: Arc<Tracker>,
        many: u64,
        (inbox, messages): (Sender<Message>, Receiver<Message>),
    ) -> std::io::Result<Self> {
        let overruns = Arc::new(AtomicU64::new(0));
        let work = Work {
            source,
            tracker,
            messages,
            many,
            active: false,
            unreported: Collected::default(),
            period: PERIOD_MOST,
            overruns: overruns.clone(),
        };
        let thread = std::thread::Builder::new().name("collector".to_owned());
        let thread = Some(thread.spawn(move || work.run())?);
        Ok(Self { inbox, overruns, thread })
    }

    pub(crate) fn subscribe(&self, name: &str) -> Result<Subscription, GuestError> {
        let name = name.to_owned();
        self.ask(|reply| Message::Subscribe { name, reply })
    }

    pub(crate) fn collect(&self) -> Result<Collected, GuestError> {
        self.ask(|reply| Message::Collect { reply })
    }

    /// Ring overruns so far (I6).
    pub(crate) fn overruns(&self) -> u64 {
        self.overruns.load(Ordering::Relaxed)
    }

    fn ask<T>(
        &self,
        message: impl FnOnce(Sender<Result<T, GuestError>>) -> Message,
    ) -> Result<T, GuestError> {
        let (reply, answer) = mpsc::channel();
        let gone = |_| system("asking the collector", "its thread has ended");
        self.inbox.send(message(reply)).map_err(|e| gone(e.to_string()))?;
        answer.recv().map_err(|e| gone(e.to_string()))?
    }
}

impl Drop for Collector {
    fn drop(&mut self) {
        // A thread that has ended already needs no telling.
        let _ = self.inbox.send(Message::Quit);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// What the thread owns.
struct Work {
    source: Box<dyn DirtySource>,
    tracker: Arc<Tracker>,
    messages: Receiver<Message>,
    many: u64,
    /// The source catches writes.
    active: bool,
    /// Collections that nobody asked for, to be part of the next answer.
    unreported: Collected,
    period: Duration,
    overruns: Arc<AtomicU64>,
}

impl Work {
    fn run(mut self) {
        crate::kvm::block_signals();
        loop {
            let message = if self.active {
                self.messages.recv_timeout(self.period)
            } else {
                self.messages.recv().map_err(RecvTimeoutError::from)
            };
            match message {
                Ok(Message::Subscribe { name, reply }) => {
                    let _ = reply.send(self.subscribe(name));
                }
                Ok(Message::Collect { reply }) => {
                    let _ = reply.send(self.report());
                }
                Ok(Message::RingFull { vcpu, reply }) => {
                    self.relieve(vcpu);
                    let _ = reply.send(Command::RingsDrained);
                }
                Err(RecvTimeoutError::Timeout) => self.tick(),
                Ok(Message::Quit) | Err(RecvTimeoutError::Disconnected) => return,
            }
        }
    }

    fn subscribe(&mut self, name: String) -> Result<Subscription, GuestError> {
        if !self.active {
            self.source.start().map_err(failed)?;
            self.active = true;
            self.unreported = Collected::default();
            self.period = PERIOD_LEAST;
        }
        // Writes are caught already: nothing falls between the two.
        Ok(self.tracker.subscribe(name))
    }

    /// One collection, added to what is unreported.
    fn collect(&mut self) -> Result<u64, SourceError> {
        let now = self.source.collect(&self.tracker)?;
        self.overruns.fetch_add(now.overruns, Ordering::Relaxed);
        let sum = &mut self.unreported;
        sum.frames += now.frames;
        sum.overruns += now.overruns;
        sum.marked_all |= now.marked_all;
        sum.harvest_ns += now.harvest_ns;
        sum.reprotect_ns += now.reprotect_ns;
        sum.insert_ns += now.insert_ns;
        Ok(now.frames)
    }

    fn report(&mut self) -> Result<Collected, GuestError> {
        if self.active {
            self.collect().map_err(failed)?;
        }
        Ok(std::mem::take(&mut self.unreported))
    }

    /// A vCPU waits: collect, so that it can go on.
    fn relieve(&mut self, vcpu: u8) {
        self.period = PERIOD_LEAST;
        // Also when nobody subscribes any more: a ring that was overrun stays full after the source
        // was stopped, until it has been harvested often enough.
        if let Err(e) = self.collect() {
            tracing::warn!("vCPU {vcpu} waits for room in its dirty ring, but {e}");
            // It will find the ring full again at once; do not spin meanwhile.
            std::thread::sleep(PERIOD_LEAST);
        }
    }

    /// Time has passed: look whether anyone is still interested, and keep the rings from filling.
    fn tick(&mut self) {
        if self.tracker.subscribers() == 0 {
            match self.source.stop() {
                Ok(()) => self.active = false,
                Err(e) => tracing::warn!("dirty tracking cannot be stopped yet: {e}"),
            }
            return;
        }
        match self.collect() {
            Ok(frames) if frames >= self.many => self.period = (self.period / 2).max(PERIOD_LEAST),
            Ok(_) => self.period = (self.period * 2).min(PERIOD_MOST),
            Err(e) => tracing::warn!("dirty frames stay where they are for now: {e}"),
        }
    }
}

fn failed(e: SourceError) -> GuestError {
    GuestError::System { what: "following the guest's writes", cause: Box::new(e) }
}

fn system(what: &'static str, cause: &str) -> GuestError {
    GuestError::System { what, cause: cause.into() }
}
