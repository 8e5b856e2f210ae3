//! What a balloon's thread shares with others: sizes, statistics, hinting commands, and counts.

use std::sync::atomic::{AtomicBool, AtomicU16, AtomicU32, AtomicU64, Ordering::Relaxed};

use parking_lot::Mutex;

use super::hints::{DONE, STOP};
use super::statistics::MemoryStatistics;
use crate::devices::stats::Counter;

/// Values that are shared without jobs. Each is independent of the others.
#[derive(Debug, Default)]
pub(super) struct SharedBalloonState {
    target: AtomicU32,
    actual: AtomicU32,
    active: AtomicBool,
    hinting: AtomicBool,
    discarded: AtomicU64,
    statistics_interval_s: AtomicU16,
    statistics: Mutex<MemoryStatistics>,
    commands: Mutex<HintCommands>,
    pub(super) counters: BalloonCounters,
}

/// The hinting commands of both sides.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct HintCommands {
    /// Number of the last run.
    pub(super) last: u32,
    /// The device's command: a run, [`DONE`], or [`STOP`] before the first run.
    pub(super) host: u32,
    /// The driver's last command, if there was one.
    pub(super) guest: Option<u32>,
}

impl Default for HintCommands {
    fn default() -> Self {
        Self { last: 0, host: STOP, guest: None }
    }
}

/// Counters of what the driver has asked of a balloon.
#[derive(Debug, Default)]
pub(super) struct BalloonCounters {
    pub(super) inflations: Counter,
    pub(super) deflations: Counter,
    pub(super) statistics: Counter,
    pub(super) statistics_failures: Counter,
    pub(super) reports: DiscardCounters,
    pub(super) hints: DiscardCounters,
}

/// Counters of pieces of memory that the driver offers.
#[derive(Debug, Default)]
pub(super) struct DiscardCounters {
    pub(super) pieces: Counter,
    pub(super) bytes: Counter,
    pub(super) failures: Counter,
}

impl SharedBalloonState {
    pub(super) fn target(&self) -> u32 {
        self.target.load(Relaxed)
    }

    pub(super) fn set_target(&self, frames: u32) {
        self.target.store(frames, Relaxed);
    }

    pub(super) fn actual(&self) -> u32 {
        self.actual.load(Relaxed)
    }

    pub(super) fn set_actual(&self, frames: u32) {
        self.actual.store(frames, Relaxed);
    }

    /// Returns whether a driver is ready.
    pub(super) fn active(&self) -> bool {
        self.active.load(Relaxed)
    }

    /// Sets whether a driver is ready, and whether it supports hints.
    pub(super) fn set_active(&self, active: bool, hinting: bool) {
        self.active.store(active, Relaxed);
        self.hinting.store(hinting, Relaxed);
    }

    /// Returns whether the driver supports hints.
    pub(super) fn hinting(&self) -> bool {
        self.hinting.load(Relaxed)
    }

    pub(super) fn discarded(&self) -> u64 {
        self.discarded.load(Relaxed)
    }

    pub(super) fn count_discarded(&self, frames: u64) {
        self.discarded.fetch_add(frames, Relaxed);
    }

    /// Returns the interval of the statistics in seconds; 0 if there are none.
    pub(super) fn statistics_interval_s(&self) -> u16 {
        self.statistics_interval_s.load(Relaxed)
    }

    pub(super) fn set_statistics_interval_s(&self, interval_s: u16) {
        self.statistics_interval_s.store(interval_s, Relaxed);
    }

    pub(super) fn statistics(&self) -> MemoryStatistics {
        *self.statistics.lock()
    }

    pub(super) fn set_statistics(&self, statistics: MemoryStatistics) {
        *self.statistics.lock() = statistics;
    }

    /// Adds what a buffer of the driver says to the statistics. Returns the number of entries that
    /// say nothing.
    pub(super) fn add_statistics(&self, bytes: &[u8]) -> u64 {
        self.statistics.lock().update(bytes)
    }

    pub(super) fn commands(&self) -> HintCommands {
        *self.commands.lock()
    }

    /// Returns the command of a new run, which becomes the device's command.
    pub(super) fn next_command(&self) -> u32 {
        let mut commands = self.commands.lock();
        // Skip the numbers of STOP and DONE.
        commands.last = commands.last.wrapping_add(1).max(DONE + 1);
        commands.host = commands.last;
        commands.last
    }

    pub(super) fn set_host_command(&self, command: u32) {
        self.commands.lock().host = command;
    }

    pub(super) fn set_guest_command(&self, command: Option<u32>) {
        self.commands.lock().guest = command;
    }

    /// Sets all commands: later runs have numbers after `last`.
    pub(super) fn restore_commands(&self, last: u32, host: u32, guest: Option<u32>) {
        *self.commands.lock() = HintCommands { last, host, guest };
    }
}
