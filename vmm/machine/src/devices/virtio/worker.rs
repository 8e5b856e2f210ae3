//! A device's thread: it owns the device and its queues, and runs jobs on them.
//!
//! ```text
//!          resume
//! paused ---------> running       a new thread is paused
//!        <---------
//!          quiesce
//! ```
//!
//! A paused thread waits for jobs only. Notifications that arrive meanwhile are not lost: when the
//! thread resumes, it processes all queues.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use driftline_guest::{GuestRam, NextHost};
use virtio_bindings::virtio_ring::VIRTIO_RING_F_EVENT_IDX;

use super::device::QuiesceError;
use super::messages::{DriverCommand, ReadyRing, RestoredWorkerState, SavedWorkerState};
use super::mmio::MmioInterface;
use super::request::RequestError;
use super::ring::RingPosition;
use super::watcher::Event;
use super::{Device, DeviceIo, DeviceRing, Limiters, SharedDeviceState, Violation, Watcher};
use crate::actor::{Inbox, Next};
use crate::config::{LimitsChange, RateLimits};
use crate::devices::latched_event::LatchedEvent;
use crate::devices::stats::Counter;

/// Everything that the thread owns.
pub(super) struct DeviceWorker {
    /// Kind and name, for messages.
    label: String,
    device: Box<dyn Device>,
    ram: GuestRam,
    rings: Vec<DeviceRing>,
    /// The queues' notifications.
    kicks: Vec<Arc<LatchedEvent>>,
    shared: Arc<SharedDeviceState>,
    watcher: Watcher,
    limiters: Limiters,
    inbox: Inbox<Self>,
    /// Signals that there are jobs.
    wake: Arc<LatchedEvent>,
    /// Whether a driver is ready and has not broken the rules.
    active: bool,
    paused: bool,
    /// Whether a state was restored and the device has not worked since.
    moved: bool,
    /// The features that the driver accepted.
    features: u64,
    /// Number of times that the device was stopped.
    stop_count: u64,
}

impl DeviceWorker {
    /// Creates the worker behind `mmio`. It is paused.
    pub(super) fn new(
        mmio: &MmioInterface,
        mut device: Box<dyn Device>,
        ram: GuestRam,
        inbox: Inbox<Self>,
        wake: Arc<LatchedEvent>,
    ) -> io::Result<Self> {
        let sizes = device.queue_sizes();
        let rings = sizes.iter().zip(0..).map(|(size, i)| DeviceRing::idle(i, *size));
        let rings = rings.collect::<Result<_, _>>().map_err(io::Error::other)?;
        let watcher = Watcher::new()?;
        watcher.watch_jobs(&*wake)?;
        for (queue, kick) in mmio.kicks.iter().enumerate() {
            watcher.watch_queue(&**kick, queue)?;
        }
        let limiters = Limiters::new(&device.limits())?;
        limiters.timer().map_or(Ok(()), |timer| watcher.watch_turns(timer))?;
        device.start(&watcher)?;
        Ok(Self {
            label: mmio.label().to_owned(),
            device,
            ram,
            rings,
            kicks: mmio.kicks.clone(),
            shared: mmio.shared.clone(),
            watcher,
            limiters,
            inbox,
            wake,
            active: false,
            paused: true,
            moved: false,
            features: 0,
            stop_count: 0,
        })
    }

    /// Runs the thread until it is told to end.
    pub(super) fn run(mut self) {
        loop {
            let continues = match self.paused {
                true => match self.inbox.recv() {
                    Next::Job(job) => {
                        job(&mut self);
                        true
                    }
                    Next::Nothing | Next::End => false,
                },
                false => self.work(),
            };
            if !continues {
                return;
            }
        }
    }

    /// Waits for events and handles them. Returns whether the thread continues.
    fn work(&mut self) -> bool {
        match self.watcher.wait() {
            Ok(events) => self.handle_events(events),
            Err(e) => {
                tracing::error!("{} ends: waiting for events failed: {e}", self.label);
                false
            }
        }
    }

    /// Handles events. Returns whether the thread continues.
    fn handle_events(&mut self, events: Vec<Event>) -> bool {
        for event in events {
            match event {
                Event::Job => {
                    // Cleared before the inbox is read, so that no job is missed.
                    self.wake.clear();
                    if !self.run_jobs() {
                        return false;
                    }
                    if self.paused {
                        // The other events will be reported again.
                        return true;
                    }
                }
                Event::Queue(queue) => {
                    if let Some(kick) = self.kicks.get(queue) {
                        // The notification is empty if a job overtook the event.
                        kick.clear();
                    }
                    self.call_active_device(|device, io| device.process(queue, io));
                }
                Event::Turn => {
                    self.limiters.take_expiry();
                    self.give_turns();
                }
                Event::Backend(token, ready) => {
                    self.call_device(|device, io| device.backend_ready(token, ready, io));
                }
            }
        }
        true
    }

    /// Processes the queues that have waited for a rate limit, each at most once.
    fn give_turns(&mut self) {
        for limiter in self.limiters.turns() {
            if let Some(queue) = self.limiters.begin_turn(limiter) {
                self.call_active_device(|device, io| device.process(queue, io));
                self.limiters.end_turn(limiter, queue);
            }
        }
        self.limiters.await_turns();
    }

    /// Handles pending events without waiting. Returns whether there were any.
    #[cfg(any(test, fuzzing))]
    pub(super) fn poll(&mut self) -> bool {
        let events = self.watcher.poll().unwrap_or_default();
        let any = !events.is_empty() && !self.paused;
        if any {
            self.handle_events(events);
        }
        any
    }

    /// Returns the counters of how many times each rate limit has made a queue wait.
    pub(super) fn throttles(&self) -> Arc<[Counter]> {
        self.limiters.throttles().clone()
    }

    /// Returns the rate limits in effect.
    pub(super) fn rate_limits(&self) -> Vec<RateLimits> {
        self.limiters.limits()
    }

    /// Changes the limits of the first limiters, and gives a turn to each queue that waits.
    pub(super) fn change_limits(&mut self, changes: &[LimitsChange]) {
        self.limiters.change(changes);
        if !self.paused {
            self.give_turns();
        }
    }

    #[cfg(test)]
    pub(super) fn use_limiter_clock(&mut self, ns: Arc<std::sync::atomic::AtomicU64>) {
        self.limiters.use_clock(ns);
    }

    /// Returns whether a driver is ready and has not broken the rules.
    #[cfg(any(test, fuzzing))]
    pub(super) fn is_active(&self) -> bool {
        self.active
    }

    /// Runs the jobs in the inbox until the device is paused. Returns whether the thread continues.
    fn run_jobs(&mut self) -> bool {
        while !self.paused {
            match self.inbox.try_recv() {
                Next::Job(job) => job(self),
                Next::Nothing => return true,
                Next::End => return false,
            }
        }
        true
    }

    /// Carries out what the driver wrote to registers.
    pub(super) fn carry_out(&mut self, command: DriverCommand) {
        match command {
            // Ignored until a reset: otherwise a stopped device would run, and its saved state
            // would say that it does not.
            DriverCommand::Activate(..) | DriverCommand::StartQueue(_)
                if self.shared.needs_reset() => {}
            DriverCommand::Activate(features, rings) => self.activate(features, &rings),
            DriverCommand::StartQueue(ring) => self.start_queue(ring),
            DriverCommand::StopQueue(queue) => self.stop_queue(queue),
            DriverCommand::Reset => self.reset(),
            DriverCommand::Stop(violation) => self.stop(&violation),
            DriverCommand::Config(offset, data) => self.call_device(|device, io| {
                device.write_config(offset, &data, io);
                Ok(())
            }),
        }
    }

    /// Calls the device if a driver is active.
    fn call_active_device(
        &mut self,
        f: impl FnOnce(&mut dyn Device, &mut DeviceIo<'_>) -> Result<(), Violation>,
    ) {
        if self.active {
            self.call_device(f);
        }
    }

    /// Calls the device, then tells the driver what the device has done.
    pub(super) fn call_device(
        &mut self,
        f: impl FnOnce(&mut dyn Device, &mut DeviceIo<'_>) -> Result<(), Violation>,
    ) {
        self.rings.iter_mut().for_each(DeviceRing::begin_round);
        let mut io = DeviceIo {
            ram: &self.ram,
            rings: &mut self.rings,
            shared: &self.shared,
            watcher: &self.watcher,
            limiters: &mut self.limiters,
        };
        let mut done = f(&mut *self.device, &mut io);
        let mut interrupt = false;
        for (ring, kick) in self.rings.iter_mut().zip(&self.kicks) {
            match ring.end_round(&self.ram) {
                Ok(wanted) => interrupt |= wanted,
                Err(e) => done = done.and(Err(e)),
            }
            if ring.needs_round() {
                // Brings the thread back after other queues have had their round.
                kick.signal();
            }
        }
        if interrupt {
            self.shared.interrupt_used();
        }
        if let Err(violation) = done {
            self.stop(&violation);
        }
    }

    fn event_idx(&self) -> bool {
        self.features & 1 << VIRTIO_RING_F_EVENT_IDX != 0
    }

    fn activate(&mut self, features: u64, rings: &[ReadyRing]) {
        if let Err(violation) = self.try_activate(features, rings, &[]) {
            self.stop(&violation);
        } else if !self.paused {
            self.process_all_queues();
        }
    }

    fn try_activate(
        &mut self,
        features: u64,
        rings: &[ReadyRing],
        positions: &[RingPosition],
    ) -> Result<(), Violation> {
        self.features = features;
        let event_idx = self.event_idx();
        for &(queue, setup) in rings {
            let position = positions.get(queue).copied().unwrap_or_default();
            if let Some(ring) = self.rings.get_mut(queue) {
                ring.set_up(setup, position, event_idx, &self.ram)?;
            }
        }
        self.device.activate(features);
        self.active = true;
        tracing::debug!("{} is active, features {features:#x}", self.label);
        Ok(())
    }

    fn start_queue(&mut self, (queue, setup): ReadyRing) {
        let event_idx = self.event_idx();
        let Some(ring) = self.rings.get_mut(queue).filter(|_| self.active) else { return };
        match ring.set_up(setup, RingPosition::default(), event_idx, &self.ram) {
            Ok(()) if !self.paused => {
                self.call_active_device(|device, io| device.process(queue, io))
            }
            Ok(()) => {}
            Err(violation) => self.stop(&violation),
        }
    }

    /// Stops a queue after finishing the requests in flight: its chains belong to the driver again.
    fn stop_queue(&mut self, queue: usize) {
        // Without a deadline of its own: the driver waits until the queue is stopped.
        self.finish_requests(None);
        if let Some(ring) = self.rings.get_mut(queue) {
            ring.tear_down();
        }
    }

    fn reset(&mut self) {
        self.active = false;
        self.rings.iter_mut().for_each(DeviceRing::tear_down);
        self.limiters.forget_waiting();
        self.call_device(|device, io| {
            device.reset(io);
            Ok(())
        });
        self.features = 0;
        self.shared.put_config(self.device.config_space());
        self.shared.end_reset();
    }

    /// Stops the device because the driver broke the rules. The device does no more work until the
    /// driver resets it.
    fn stop(&mut self, violation: &Violation) {
        self.active = false;
        self.rings.iter_mut().for_each(DeviceRing::tear_down);
        self.limiters.forget_waiting();
        self.stop_count += 1;
        let label = &self.label;
        match self.stop_count {
            1 => tracing::error!("{label} is stopped until its driver resets it: {violation}"),
            n => tracing::debug!("{label} is stopped, for the {n}th time: {violation}"),
        }
        self.shared.request_reset();
    }

    /// Pauses the device by `deadline`.
    pub(super) fn quiesce(&mut self, deadline: Instant) -> Result<(), RequestError> {
        if self.paused {
            return Ok(());
        }
        match self.finish_requests(Some(deadline)) {
            0 => {
                self.paused = true;
                self.limiters.pause();
                Ok(())
            }
            count => Err(RequestError::InFlight { device: self.label.clone(), count }),
        }
    }

    /// Lets the device finish the requests in flight. Returns how many requests are left at the
    /// deadline.
    fn finish_requests(&mut self, deadline: Option<Instant>) -> usize {
        let mut in_flight = 0;
        let left = || deadline.unwrap_or_else(far_deadline);
        self.call_device(|device, io| match device.quiesce(left(), io) {
            Ok(()) => Ok(()),
            Err(QuiesceError::Violation(violation)) => Err(violation),
            Err(QuiesceError::InFlight(count)) => {
                in_flight = count;
                Ok(())
            }
        });
        in_flight
    }

    pub(super) fn resume(&mut self) {
        if !std::mem::take(&mut self.paused) {
            return;
        }
        self.limiters.resume();
        // The inbox may have more jobs, whose signal was read together with that of the quiesce.
        self.wake.signal();
        let moved = std::mem::take(&mut self.moved);
        self.call_device(|device, io| device.resume(moved, io));
        self.process_all_queues();
        // A queue may wait whose limit was changed in the pause.
        self.give_turns();
    }

    /// Processes all queues: a paused device may have missed notifications.
    fn process_all_queues(&mut self) {
        for queue in 0..self.rings.len() {
            self.call_active_device(|device, io| device.process(queue, io));
        }
    }

    pub(super) fn save(&self) -> Result<SavedWorkerState, RequestError> {
        if !self.paused {
            return Err(RequestError::NotPaused { device: self.label.clone() });
        }
        Ok(SavedWorkerState {
            positions: self.rings.iter().map(DeviceRing::position).collect(),
            device: self.device.save().map_err(RequestError::Device)?,
            limiters: self.limiters.save(),
        })
    }

    pub(super) fn restore(&mut self, state: RestoredWorkerState) -> Result<(), RequestError> {
        if let Some((features, rings)) = &state.active {
            self.try_activate(*features, rings, &state.positions)?;
        }
        self.device.restore(&state.device).map_err(RequestError::Device)?;
        let restored = self.limiters.restore(&state.limiters, &self.label);
        restored.map_err(|e| RequestError::Device(e.into()))?;
        self.shared.put_config(self.device.config_space());
        self.moved = true;
        Ok(())
    }

    pub(super) fn acquire(&mut self, from: NextHost) -> Result<(), RequestError> {
        self.device.acquire(from).map_err(RequestError::Device)
    }

    pub(super) fn share(&mut self) -> Result<Vec<OwnedFd>, RequestError> {
        let device = self.label.clone();
        self.device.share().map_err(|cause| RequestError::Share { device, cause })
    }

    pub(super) fn release(
        &mut self,
        deadline: Instant,
        next: NextHost,
    ) -> Result<(), RequestError> {
        self.device.release(deadline, next).map_err(RequestError::Device)
    }

    /// Releases files and peers. Data must be durable within `limit`.
    pub(super) fn undo_acquire(
        &mut self,
        limit: Duration,
        next: NextHost,
    ) -> Result<(), RequestError> {
        let released = self.device.undo_acquire(Instant::now() + limit, next);
        // The guest does not run here, so packets that are queued for it are of no use.
        self.detach(0, next);
        released.map_err(RequestError::Device)
    }

    pub(super) fn detach(&mut self, room: usize, next: NextHost) -> Vec<u8> {
        self.device.detach(room, next)
    }

    pub(super) fn attach(&mut self, queued_packets: &[u8]) -> Result<(), RequestError> {
        self.device.attach(queued_packets).map_err(RequestError::Device)
    }
}

/// The deadline of waits that have none of their own: one hour from now.
fn far_deadline() -> Instant {
    Instant::now() + Duration::from_secs(3600)
}
