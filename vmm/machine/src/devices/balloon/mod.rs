//! virtio-balloon: memory that the guest gives back, permanently, temporarily or as a hint.
//!
//! - Inflating: the guest gives up the frames that it puts into the balloon, whose size the
//!   operator sets. The device discards them.
//! - Reporting: the guest reports frames that it does not use at the moment. The device discards
//!   them too.
//! - Hinting: the device asks the guest which frames are free. A copy of all memory skips them. In
//!   a run for the operator the device discards them ([`hints`]).
//! - Statistics: the guest says how it uses its memory ([`statistics`]).
//!
//! If the guest expects freed frames to hold a value other than zero (page poisoning), the frames
//! that it reports and hints are left alone.

mod config_space;
mod control;
mod frames;
mod hints;
mod poller;
mod shared;
mod statistics;
#[cfg(test)]
mod tests;

use std::io;
use std::sync::Arc;
use std::sync::mpsc::Sender;
use std::time::Instant;

use driftline_dirty_tracker::FrameSet;
use driftline_guest::GuestRam;
use serde::{Deserialize, Serialize};
use vmm_sys_util::epoll::EventSet;

use super::error::{DeviceError, StateError};
use super::latched_event::LatchedEvent;
use super::misfit::DeviceMisfit;
use super::virtio::{
    Chain, Device, DeviceIo, DeviceKind, HandOverNeeds, QuiesceError, RequestDefect,
    SharedDeviceState, Violation, Watcher, decode_state, encode_state,
};
use crate::actor::{Inbox, Next};
use crate::config::BalloonConfig;
use crate::memory::ProtectedFrames;
use config_space::BalloonConfigSpace;
pub(super) use control::open;
pub use control::{
    BalloonControl, BalloonCounts, BalloonStats, DiscardCounts, HintingError, HintingStatus,
    StatisticsError,
};
use frames::{FrameDiscarder, whole_frames};
use hints::{CopyHints, DONE, HintUse, Hints, STOP};
use poller::StatisticsPoller;
use shared::SharedBalloonState;
pub use statistics::MemoryStatistics;

const QUEUE_SIZE: u16 = 128;
/// Token of the event that signals requests to the device's thread.
const JOBS: u32 = 0;
/// Token of the timer of the statistics.
const STATISTICS_DUE: u32 = 1;

/// Feature bits.
const STATISTICS: u64 = 1 << 1;
const FREE_PAGE_HINT: u64 = 1 << 3;
const DEFLATE_ON_OOM: u64 = 1 << 2;
const PAGE_POISON: u64 = 1 << 4;
const REPORTING: u64 = 1 << 5;

/// Purpose of a balloon's queue.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum BalloonQueue {
    Inflate,
    Deflate,
    Statistics,
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
    frames: FrameDiscarder,
    shared: Arc<SharedBalloonState>,
    inbox: Inbox<Self>,
    wake: Arc<LatchedEvent>,
    poller: StatisticsPoller,
    /// Whether a job has changed the interval of the statistics: new ones are due immediately.
    interval_changed: bool,
    /// Whether a job has changed the configuration space, which the driver has not been told.
    config_changed: bool,
    /// Hints of a run that has ended. They are sent once the driver has been told.
    finished_hints: Option<CopyHints>,
}

/// State of the device that moves with the guest.
#[derive(Serialize, Deserialize)]
struct BalloonState {
    /// Size that the operator wants; the driver may not have been told.
    target_frames: u32,
    space: BalloonConfigSpace,
    /// Number of the last run of hints.
    last_command: u32,
    /// The driver's last hinting command.
    guest_command: Option<u32>,
    /// Interval of the statistics in seconds.
    statistics_interval_s: u16,
    statistics: MemoryStatistics,
}

impl Balloon {
    /// Returns the device. `wake` signals that there are jobs in `inbox`.
    fn new(
        config: &BalloonConfig,
        protected: Arc<ProtectedFrames>,
        shared: Arc<SharedBalloonState>,
        inbox: Inbox<Self>,
        wake: Arc<LatchedEvent>,
    ) -> io::Result<Self> {
        Ok(Self {
            config: config.clone(),
            space: BalloonConfigSpace::new(shared.target()),
            features: 0,
            roles: Vec::new(),
            hints: Hints::default(),
            frames: FrameDiscarder::open(protected, shared.clone())?,
            poller: StatisticsPoller::new(shared.clone())?,
            shared,
            inbox,
            wake,
            interval_changed: false,
            config_changed: false,
            finished_hints: None,
        })
    }

    /// Publishes the current configuration space to the driver.
    fn publish(&mut self, registers: &SharedDeviceState) {
        self.config_changed = false;
        self.space.target = self.shared.target();
        registers.change_config(self.config_space());
    }

    fn publish_changes(&mut self, registers: &SharedDeviceState) {
        if self.config_changed {
            self.publish(registers);
        }
        self.finished_hints.take().into_iter().for_each(CopyHints::answer);
    }

    /// Shows the driver the target, which has changed.
    fn show_target(&mut self) {
        self.config_changed = true;
    }

    /// Returns whether freed frames may become zero.
    fn may_become_zero(&self) -> bool {
        self.features & PAGE_POISON == 0 || self.space.poison == 0
    }

    /// Handles a command number, or free frames, from the hinting queue.
    fn hint(
        &mut self,
        queue: usize,
        chain: &Chain,
        ram: &GuestRam,
        registers: &SharedDeviceState,
    ) -> Result<(), Violation> {
        let mut id = [0; 4];
        match chain.readable.read(ram, 0, &mut id)? {
            0 => {}
            4 => self.take_hint_command(u32::from_le_bytes(id), registers),
            bytes => {
                let cause = RequestDefect::HintingCommand { bytes };
                return Err(Violation::Malformed { queue: queue as u16, cause });
            }
        }
        if self.may_become_zero() {
            match self.hints.current() {
                Some(HintUse::Copy(copy)) => {
                    let free = chain.writable.pieces().iter().filter_map(whole_frames);
                    free.for_each(|run| copy.add(run));
                }
                Some(HintUse::Discard { .. }) => {
                    self.frames.discard_pieces(chain, ram, |counters| &counters.hints);
                }
                None => {}
            }
        }
        Ok(())
    }

    /// Handles the driver's command: hints of this number follow, or none.
    fn take_hint_command(&mut self, command: u32, registers: &SharedDeviceState) {
        self.shared.set_guest_command(Some(command));
        match command {
            STOP | DONE => {
                let done = self.hints.driver_ends();
                self.finish_hints(done);
                self.publish_changes(registers);
            }
            id => self.hints.driver_begins(id),
        }
    }

    /// Begins a run of hints for a copy, which are sent to `reply`. If no driver supports hints, or
    /// they are discarded at the moment, drops it.
    fn begin_copy_hints(&mut self, reply: Sender<FrameSet>) {
        if self.may_hint() && !self.hints.is_discarding() {
            let command = self.shared.next_command();
            self.begin_hints(command, HintUse::Copy(CopyHints::new(reply)));
        }
    }

    /// Begins the operator's run of hints, and ends the one before.
    fn begin_discarding_hints(&mut self, command: u32, acknowledge: bool) {
        let ended = self.hints.end();
        self.finish_hints(ended);
        match self.may_hint() {
            true => self.begin_hints(command, HintUse::Discard { acknowledge }),
            // The guest poisons its memory, or its driver has no hints.
            false => self.shared.set_host_command(self.space.command),
        }
    }

    fn begin_hints(&mut self, command: u32, hint_use: HintUse) {
        self.hints.begin(command, hint_use);
        self.set_command(command);
    }

    /// Returns whether the driver can be asked for hints.
    fn may_hint(&self) -> bool {
        self.features & FREE_PAGE_HINT != 0 && self.may_become_zero()
    }

    /// Ends the run of hints for a copy, if there is one.
    fn end_copy_hints(&mut self) {
        if !self.hints.is_discarding() {
            let ended = self.hints.end();
            self.finish_hints(ended);
        }
    }

    /// Ends any run of hints. The driver may then take its frames back.
    fn end_hints(&mut self) {
        let ended = self.hints.end();
        self.finish_hints(ended);
        self.set_command(DONE);
    }

    /// Handles the end of a run.
    fn finish_hints(&mut self, ended: Option<HintUse>) {
        if ended.is_some() {
            self.set_command(DONE);
        }
        if let Some(HintUse::Copy(hints)) = ended {
            self.finished_hints = Some(hints);
        }
    }

    fn set_command(&mut self, command: u32) {
        self.space.command = command;
        self.shared.set_host_command(command);
        self.config_changed = true;
    }

    /// Asks the driver for new statistics now, and again after the interval.
    fn ask_for_statistics(&mut self, io: &mut DeviceIo<'_>) -> Result<(), Violation> {
        let queue = self.roles.iter().position(|role| *role == BalloonQueue::Statistics);
        let Some(ring) = queue.and_then(|queue| io.rings.get_mut(queue)) else { return Ok(()) };
        self.poller.take(ring, io.ram, true)?;
        self.poller.arm();
        Ok(())
    }

    /// Notes that the interval of the statistics has changed.
    fn show_interval(&mut self) {
        self.interval_changed = true;
    }
}

impl Device for Balloon {
    fn kind(&self) -> DeviceKind {
        DeviceKind::Balloon
    }

    fn features(&self) -> u64 {
        let optional = [
            (self.config.statistics_interval_s > 0, STATISTICS),
            (self.config.deflate_on_oom, DEFLATE_ON_OOM),
            (self.config.hinting, FREE_PAGE_HINT),
            (self.config.reporting, REPORTING),
        ];
        let chosen = optional.iter().filter(|(wanted, _)| *wanted).map(|(_, bit)| bit);
        chosen.fold(PAGE_POISON, |all, bit| all | bit)
    }

    fn queue_sizes(&self) -> Vec<u16> {
        let BalloonConfig { hinting, reporting, statistics_interval_s, .. } = self.config;
        let optional = [statistics_interval_s > 0, hinting, reporting];
        vec![QUEUE_SIZE; 2 + optional.into_iter().filter(|wanted| *wanted).count()]
    }

    fn config_space(&self) -> Vec<u8> {
        self.space.bytes()
    }

    fn write_config(&mut self, offset: usize, data: &[u8], io: &mut DeviceIo<'_>) {
        self.space.write(offset, data);
        self.shared.set_actual(self.space.actual);
        io.shared.put_config(self.config_space());
    }

    fn start(&mut self, watcher: &Watcher) -> io::Result<()> {
        watcher.watch(&*self.wake, EventSet::IN, JOBS)?;
        watcher.watch(self.poller.timer(), EventSet::IN, STATISTICS_DUE)
    }

    fn activate(&mut self, features: u64) {
        self.features = features;
        self.roles = vec![BalloonQueue::Inflate, BalloonQueue::Deflate];
        // Drivers number only the queues of the features that they negotiated, without gaps.
        for (feature, role) in [
            (STATISTICS, BalloonQueue::Statistics),
            (FREE_PAGE_HINT, BalloonQueue::Hint),
            (REPORTING, BalloonQueue::Report),
        ] {
            if features & feature != 0 {
                self.roles.push(role);
            }
        }
        self.shared.set_active(true, features & FREE_PAGE_HINT != 0);
        self.poller.begin(features & STATISTICS != 0);
    }

    fn reset(&mut self, _: &mut DeviceIo<'_>) {
        if let Some(HintUse::Copy(hints)) = self.hints.end() {
            hints.answer();
        }
        (self.space, self.features) = (BalloonConfigSpace::new(self.shared.target()), 0);
        self.roles.clear();
        self.shared.set_actual(0);
        self.shared.set_active(false, false);
        self.shared.set_statistics(MemoryStatistics::default());
        self.shared.set_host_command(self.space.command);
        self.shared.set_guest_command(None);
        self.poller.begin(false);
    }

    fn process(&mut self, queue: usize, io: &mut DeviceIo<'_>) -> Result<(), Violation> {
        let (ram, registers) = (io.ram, io.shared);
        let Some(role) = self.roles.get(queue).copied() else { return Ok(()) };
        let Some(ring) = io.rings.get_mut(queue) else { return Ok(()) };
        if role == BalloonQueue::Statistics {
            return self.poller.take(ring, ram, false);
        }
        while let Some(chain) = ring.pop(ram)? {
            match role {
                BalloonQueue::Inflate => {
                    self.shared.counters.inflations.add(1);
                    self.frames.discard_numbered(queue, &chain, ram)?;
                }
                // A frame gets memory again when the guest writes to it.
                BalloonQueue::Deflate => self.shared.counters.deflations.add(1),
                BalloonQueue::Hint => self.hint(queue, &chain, ram, registers)?,
                BalloonQueue::Report if self.may_become_zero() => {
                    self.frames.discard_pieces(&chain, ram, |counters| &counters.reports);
                }
                BalloonQueue::Report | BalloonQueue::Statistics => {}
            }
            ring.push(ram, chain.head, 0)?;
        }
        Ok(())
    }

    fn backend_ready(
        &mut self,
        token: u32,
        _: EventSet,
        io: &mut DeviceIo<'_>,
    ) -> Result<(), Violation> {
        if token == STATISTICS_DUE {
            return match self.poller.is_due() {
                true => self.ask_for_statistics(io),
                false => Ok(()),
            };
        }
        // Reset the event before reading the inbox. A job is sent before its event is written, so
        // none is missed.
        self.wake.clear();
        while let Next::Job(job) = self.inbox.try_recv() {
            job(self);
            self.publish_changes(io.shared);
        }
        if std::mem::take(&mut self.interval_changed) {
            self.ask_for_statistics(io)?;
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
            if self.features & FREE_PAGE_HINT != 0 {
                self.set_command(DONE);
            }
            self.publish(io.shared);
        }
        Ok(())
    }

    fn save(&self) -> Result<Vec<u8>, DeviceError> {
        let commands = self.shared.commands();
        let state = BalloonState {
            target_frames: self.shared.target(),
            space: self.space,
            last_command: commands.last,
            guest_command: commands.guest,
            statistics_interval_s: self.shared.statistics_interval_s(),
            statistics: self.shared.statistics(),
        };
        Ok(encode_state(&state)?)
    }

    fn restore(&mut self, state: &[u8]) -> Result<(), DeviceError> {
        let state: BalloonState = decode_state(state)?;
        let BalloonState { statistics_interval_s: interval_s, last_command, .. } = state;
        if (interval_s > 0) != (self.config.statistics_interval_s > 0) {
            let here_s = self.config.statistics_interval_s;
            let misfit = DeviceMisfit::StatisticsInterval { found_s: interval_s, here_s };
            return Err(StateError::from(misfit).into());
        }
        self.shared.set_target(state.target_frames);
        self.shared.set_actual(state.space.actual);
        self.shared.restore_commands(last_command, state.space.command, state.guest_command);
        self.shared.set_statistics_interval_s(interval_s);
        self.shared.set_statistics(state.statistics);
        self.hints.end();
        self.space = state.space;
        self.poller.arm();
        Ok(())
    }

    fn hand_over(&self) -> HandOverNeeds {
        HandOverNeeds::default()
    }
}
