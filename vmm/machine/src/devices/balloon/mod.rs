//! virtio-balloon: memory that the guest gives back, permanently, temporarily or as a hint.
//!
//! - Inflating: the guest gives up the frames that it puts into the balloon, whose size the
//!   operator sets. The device discards them.
//! - Reporting: the guest reports frames that it does not use at the moment. The device discards
//!   them too.
//! - Hinting: before a copy of all memory begins, the device asks the guest which frames are free.
//!   These frames keep their content, and the copy skips them ([`hints`]).
//!
//! If the guest expects freed frames to hold a value other than zero (page poisoning), the frames
//! that it reports and hints are left alone.

mod config_space;
mod control;
mod hints;
mod sizes;
#[cfg(test)]
mod tests;

use std::io;
use std::sync::Arc;
use std::sync::mpsc::Sender;
use std::time::Instant;

use driftline_dirty_tracker::{FrameRun, FrameSet, Gfn, PAGE_SIZE};
use driftline_guest::GuestRam;
use serde::{Deserialize, Serialize};
use vm_memory::{GuestAddress, GuestMemoryBackend};
use vmm_sys_util::epoll::EventSet;

use super::error::DeviceError;
use super::latched_event::LatchedEvent;
use super::virtio::{
    Buffer, Chain, Device, DeviceIo, DeviceKind, QuiesceError, SharedDeviceState, Violation,
    Watcher, decode_state, encode_state,
};
use crate::actor::{Inbox, Next};
use crate::config::BalloonConfig;
use crate::memory::{Discarder, ProtectedFrames};
use config_space::BalloonConfigSpace;
pub(super) use control::open;
pub use control::{BalloonControl, BalloonStats};
use hints::{HintRun, Hints, STOP};
use sizes::BalloonSizes;

const QUEUE_SIZE: u16 = 128;
/// Most frame numbers in one chain; Linux sends 256. More would let a driver delay a pause.
const MAX_FRAME_NUMBERS: u32 = 4096;
/// Token of the event that signals requests to the device's thread.
const JOBS: u32 = 0;

/// Feature bits.
const FREE_PAGE_HINT: u64 = 1 << 3;
const DEFLATE_ON_OOM: u64 = 1 << 2;
const PAGE_POISON: u64 = 1 << 4;
const REPORTING: u64 = 1 << 5;

/// Purpose of a balloon's queue.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum BalloonQueue {
    Inflate,
    Deflate,
    Hint,
    Report,
}

/// The device.
pub(super) struct Balloon {
    config: BalloonConfig,
    space: BalloonConfigSpace,
    /// Features that the driver negotiated.
    features: u64,
    /// Roles of the queues, in their order. Queues of features that were not negotiated are not
    /// counted.
    roles: Vec<BalloonQueue>,
    hints: Hints,
    discarder: Discarder,
    runs: Vec<FrameRun>,
    sizes: Arc<BalloonSizes>,
    inbox: Inbox<Self>,
    wake: Arc<LatchedEvent>,
    failures: u64,
    /// Whether a job has changed the configuration space, which the driver has not been told.
    config_changed: bool,
    /// A run of hints that has ended. It is answered once the driver has been told.
    finished_run: Option<HintRun>,
}

/// State of the device that moves with the guest.
#[derive(Serialize, Deserialize)]
struct BalloonState {
    /// Size that the operator wants; the driver may not have been told.
    target_frames: u32,
    space: BalloonConfigSpace,
    last_command: u32,
}

impl Balloon {
    /// Returns the device. `wake` signals that there are jobs in `inbox`.
    fn new(
        config: &BalloonConfig,
        protected: Arc<ProtectedFrames>,
        sizes: Arc<BalloonSizes>,
        inbox: Inbox<Self>,
        wake: Arc<LatchedEvent>,
    ) -> io::Result<Self> {
        Ok(Self {
            config: config.clone(),
            space: BalloonConfigSpace::new(sizes.target()),
            features: 0,
            roles: Vec::new(),
            hints: Hints::default(),
            discarder: Discarder::open(protected)?,
            runs: Vec::new(),
            sizes,
            inbox,
            wake,
            failures: 0,
            config_changed: false,
            finished_run: None,
        })
    }

    /// Publishes the current configuration space to the driver.
    fn publish(&mut self, shared: &SharedDeviceState) {
        self.config_changed = false;
        self.space.target = self.sizes.target();
        shared.change_config(self.config_space());
    }

    fn publish_changes(&mut self, shared: &SharedDeviceState) {
        if self.config_changed {
            self.publish(shared);
        }
        self.finished_run.take().into_iter().for_each(HintRun::answer);
    }

    /// Shows the driver the target, which has changed.
    fn show_target(&mut self) {
        self.config_changed = true;
    }

    /// Returns whether freed frames may become zero.
    fn may_become_zero(&self) -> bool {
        self.features & PAGE_POISON == 0 || self.space.poison == 0
    }

    /// Discards the frames whose numbers are in the chain.
    fn inflate(&mut self, queue: usize, chain: &Chain, ram: &GuestRam) -> Result<(), Violation> {
        let wrong = |why| Violation::Request { queue: queue as u16, why };
        let len = chain.readable.len();
        if !len.is_multiple_of(4) || len > 4 * MAX_FRAME_NUMBERS {
            return Err(wrong(format!(
                "{len} bytes are not up to {MAX_FRAME_NUMBERS} frame numbers of 4 bytes"
            )));
        }
        let mut bytes = vec![0; len as usize];
        chain.readable.read(ram, 0, &mut bytes)?;
        let mut numbers: Vec<u32> = Vec::with_capacity(bytes.len() / 4);
        for number in bytes.chunks_exact(4) {
            let number = u32::from_le_bytes([number[0], number[1], number[2], number[3]]);
            let addr = GuestAddress(Gfn(number.into()).gpa());
            if ram.get_slice(addr, PAGE_SIZE as usize).is_err() {
                return Err(wrong(format!("frame {number:#x} is not guest memory")));
            }
            numbers.push(number);
        }
        numbers.sort_unstable();
        numbers.dedup();
        self.runs.clear();
        for gfn in numbers.into_iter().map(|number| Gfn(number.into())) {
            match self.runs.last_mut() {
                Some(run) if run.end() == gfn => run.count += 1,
                _ => self.runs.push(FrameRun { start: gfn, count: 1 }),
            }
        }
        self.discard(ram);
        Ok(())
    }

    /// Discards the frames that the chain's buffers contain.
    fn report(&mut self, chain: &Chain, ram: &GuestRam) {
        if self.may_become_zero() {
            self.runs.clear();
            self.runs.extend(chain.writable.pieces().iter().filter_map(whole_frames));
            self.discard(ram);
        }
    }

    /// Discards `runs`. Each run must lie in one memory slot.
    fn discard(&mut self, ram: &GuestRam) {
        for run in &self.runs {
            match self.discarder.discard(ram, *run) {
                Ok(frames) => self.sizes.count_discarded(frames),
                Err(e) => {
                    self.failures += 1;
                    match self.failures {
                        // The guest does not notice: it has no use for the content.
                        1 => tracing::warn!("memory that the guest gave up cannot be freed: {e}"),
                        n => tracing::debug!("freeing memory failed, for the {n}th time: {e}"),
                    }
                }
            }
        }
    }

    /// Handles a command number, or free frames, from the hinting queue.
    fn hint(
        &mut self,
        queue: usize,
        chain: &Chain,
        ram: &GuestRam,
        shared: &SharedDeviceState,
    ) -> Result<(), Violation> {
        let mut id = [0; 4];
        match chain.readable.read(ram, 0, &mut id)? {
            0 => {}
            4 => match u32::from_le_bytes(id) {
                STOP => {
                    self.end_hints(true);
                    self.publish_changes(shared);
                }
                id => self.hints.driver_begins(id),
            },
            bytes => {
                let why = format!("{bytes} bytes are no number of a hinting command");
                return Err(Violation::Request { queue: queue as u16, why });
            }
        }
        if self.may_become_zero() {
            let free = chain.writable.pieces().iter().filter_map(whole_frames);
            free.for_each(|run| self.hints.add(run));
        }
        Ok(())
    }

    /// Ends the current run of hints. The driver may then take its frames back.
    fn end_hints(&mut self, by_driver: bool) {
        if let Some(run) = self.hints.end(by_driver) {
            self.space.command = hints::DONE;
            self.config_changed = true;
            self.finished_run = Some(run);
        }
    }

    /// Begins a run of hints, which are sent to `reply`. If no driver supports hints, drops it.
    fn begin_hints(&mut self, reply: Sender<FrameSet>) {
        if self.features & FREE_PAGE_HINT != 0 && self.may_become_zero() {
            self.space.command = self.hints.begin(reply);
            self.config_changed = true;
        }
    }
}

/// Returns the frames that lie entirely in a buffer.
fn whole_frames(buffer: &Buffer) -> Option<FrameRun> {
    let start = buffer.addr.0.div_ceil(PAGE_SIZE);
    let end = (buffer.addr.0 + u64::from(buffer.len)) / PAGE_SIZE;
    (end > start).then(|| FrameRun { start: Gfn(start), count: end - start })
}

impl Device for Balloon {
    fn kind(&self) -> DeviceKind {
        DeviceKind::Balloon
    }

    fn features(&self) -> u64 {
        let optional = [
            (self.config.deflate_on_oom, DEFLATE_ON_OOM),
            (self.config.hinting, FREE_PAGE_HINT),
            (self.config.reporting, REPORTING),
        ];
        let chosen = optional.iter().filter(|(wanted, _)| *wanted).map(|(_, bit)| bit);
        chosen.fold(PAGE_POISON, |all, bit| all | bit)
    }

    fn queue_sizes(&self) -> Vec<u16> {
        let optional = usize::from(self.config.hinting) + usize::from(self.config.reporting);
        vec![QUEUE_SIZE; 2 + optional]
    }

    fn config_space(&self) -> Vec<u8> {
        self.space.bytes()
    }

    fn write_config(&mut self, offset: usize, data: &[u8], io: &mut DeviceIo<'_>) {
        self.space.write(offset, data);
        self.sizes.set_actual(self.space.actual);
        io.shared.put_config(self.config_space());
    }

    fn start(&mut self, watcher: &Watcher) -> io::Result<()> {
        watcher.watch(&*self.wake, EventSet::IN, JOBS)
    }

    fn activate(&mut self, features: u64) {
        self.features = features;
        self.roles = vec![BalloonQueue::Inflate, BalloonQueue::Deflate];
        // Drivers number only the queues of the features that they negotiated, without gaps.
        for (feature, role) in
            [(FREE_PAGE_HINT, BalloonQueue::Hint), (REPORTING, BalloonQueue::Report)]
        {
            if features & feature != 0 {
                self.roles.push(role);
            }
        }
        self.sizes.set_hinting(features & FREE_PAGE_HINT != 0);
    }

    fn reset(&mut self, _: &mut DeviceIo<'_>) {
        if let Some(run) = self.hints.end(false) {
            run.answer();
        }
        (self.space, self.features) = (BalloonConfigSpace::new(self.sizes.target()), 0);
        self.roles.clear();
        self.sizes.set_actual(0);
        self.sizes.set_hinting(false);
    }

    fn process(&mut self, queue: usize, io: &mut DeviceIo<'_>) -> Result<(), Violation> {
        let (ram, shared) = (io.ram, io.shared);
        let Some(role) = self.roles.get(queue).copied() else { return Ok(()) };
        let Some(ring) = io.rings.get_mut(queue) else { return Ok(()) };
        while let Some(chain) = ring.pop(ram)? {
            match role {
                BalloonQueue::Inflate => self.inflate(queue, &chain, ram)?,
                // A frame gets memory again when the guest writes to it.
                BalloonQueue::Deflate => {}
                BalloonQueue::Hint => self.hint(queue, &chain, ram, shared)?,
                BalloonQueue::Report => self.report(&chain, ram),
            }
            ring.push(ram, chain.head, 0)?;
        }
        Ok(())
    }

    fn backend_ready(
        &mut self,
        _: u32,
        _: EventSet,
        io: &mut DeviceIo<'_>,
    ) -> Result<(), Violation> {
        // Reset the event before reading the inbox. A job is sent before its event is written, so
        // none is missed.
        self.wake.clear();
        while let Next::Job(job) = self.inbox.try_recv() {
            job(self);
            self.publish_changes(io.shared);
        }
        Ok(())
    }

    fn quiesce(&mut self, _: Instant, _: &mut DeviceIo<'_>) -> Result<(), QuiesceError> {
        Ok(())
    }

    fn resume(&mut self, moved: bool, io: &mut DeviceIo<'_>) -> Result<(), Violation> {
        if moved {
            // The requester of hints is on the host that the guest came from. The driver may not
            // have been told there which size the operator wants.
            self.space.command = hints::DONE;
            self.publish(io.shared);
        }
        Ok(())
    }

    fn save(&self) -> Result<Vec<u8>, DeviceError> {
        let state = BalloonState {
            target_frames: self.sizes.target(),
            space: self.space,
            last_command: self.hints.last_command(),
        };
        Ok(encode_state(&state)?)
    }

    fn restore(&mut self, state: &[u8]) -> Result<(), DeviceError> {
        let state: BalloonState = decode_state(state)?;
        self.sizes.set_target(state.target_frames);
        self.sizes.set_actual(state.space.actual);
        self.hints.restore(state.last_command);
        self.space = state.space;
        Ok(())
    }

    fn acquire(&mut self) -> Result<(), DeviceError> {
        Ok(())
    }

    fn release(&mut self, _: Instant) -> Result<(), DeviceError> {
        Ok(())
    }
}
