//! A balloon, its operator, and a thread that copies memory.

use std::sync::mpsc::{Receiver, TryRecvError};

use driftline_dirty_tracker::{FrameSet, PAGE_SIZE};

use super::device::{FuzzedDevice, given};
use super::input::FuzzInput;
use super::memory::FuzzMemory;
use crate::config::BalloonConfig;
use crate::devices::balloon::{self, BalloonControl};
use crate::devices::virtio::{Device, DriverBuffer};
use crate::memory::Memory;

/// Most runs of hints for copying that are checked at a time.
const MAX_COPY_RUNS: usize = 64;

/// A balloon, with an operator and a thread that copies memory.
pub(super) struct FuzzedBalloon {
    queue: usize,
    config: BalloonConfig,
    control: Option<BalloonControl>,
    hints: Vec<Receiver<FrameSet>>,
}

impl FuzzedBalloon {
    pub(super) const INFLATE: usize = 0;
    pub(super) const STATISTICS: usize = 2;
    pub(super) const HINT: usize = 3;
    pub(super) const REPORT: usize = 4;

    pub(super) fn new(queue: usize) -> Self {
        // Only a change of the interval makes statistics due within a run.
        let config = BalloonConfig { statistics_interval_s: u16::MAX, ..BalloonConfig::default() };
        Self { queue, config, control: None, hints: Vec::new() }
    }
}

impl FuzzedDevice for FuzzedBalloon {
    fn make(&mut self) -> Box<dyn Device> {
        let (balloon, control) = balloon::open(&self.config, Default::default()).unwrap();
        self.control = Some(control);
        Box::new(balloon)
    }

    fn queue(&self) -> usize {
        self.queue
    }

    fn request(
        &mut self,
        queue: usize,
        from: &mut FuzzInput<'_>,
        guest: &mut FuzzMemory,
    ) -> Vec<DriverBuffer> {
        if queue <= 1 {
            let number = |from: &mut FuzzInput<'_>| match from.u8() {
                0xff => from.u32(),
                n => u32::from(n & 0x3f),
            };
            let numbers: Vec<u8> =
                (0..from.u8() % 64).flat_map(|_| number(from).to_le_bytes()).collect();
            return given(&numbers, from, guest);
        }
        if queue == Self::STATISTICS {
            let entry = |from: &mut FuzzInput<'_>| {
                let tag = u16::from(from.u8() % 20).to_le_bytes();
                [&tag[..], &from.u64().to_le_bytes()].concat()
            };
            // Up to somewhat more than the device reads, and sometimes a part of an entry.
            let mut entries: Vec<u8> = (0..from.u8() % 17).flat_map(|_| entry(from)).collect();
            if from.u8() > 250 {
                entries.resize(2560 + usize::from(from.u8()), 0);
            }
            entries.truncate(entries.len() - entries.len().min(usize::from(from.u8() / 64)));
            return given(&entries, from, guest);
        }
        let mut pieces = Vec::new();
        if queue == Self::HINT && from.flip() {
            let id = u32::from(from.u8() % 6).to_le_bytes();
            pieces = given(&id, from, guest);
        }
        let frames = |from: &mut FuzzInput<'_>| DriverBuffer {
            addr: u64::from(from.u8() & 0x3f) * PAGE_SIZE,
            len: PAGE_SIZE as u32 * u32::from(1 + from.u8() % 4),
            writable: true,
        };
        pieces.extend((0..from.u8() % 4).map(|_| frames(from)));
        pieces
    }

    fn cause_backend_event(&mut self, from: &mut FuzzInput<'_>) {
        let Some(control) = &self.control else { return };
        match from.u8() % 5 {
            0 => control.set_target(u64::from(from.u8()) * PAGE_SIZE),
            1 => self.hints.push(control.begin_copy_hints()),
            2 => {
                let interval_s = u16::MAX - u16::from(from.u8());
                control.set_statistics_interval_s(interval_s).unwrap();
            }
            // Without a driver there are no hints.
            3 => drop(control.start_hinting(from.flip())),
            _ => drop(control.stop_hinting()),
        }
    }

    fn check(&mut self, memory: &Memory) {
        self.hints.retain(|hints| {
            let received = hints.try_recv();
            for run in received.iter().flat_map(FrameSet::iter) {
                // The two slots are not adjacent, so a run lies in one of them.
                assert!(memory.layout().contains(run), "{run:?} was hinted and is no memory");
            }
            // Each run has one answer.
            matches!(received, Err(TryRecvError::Empty))
        });
        let surplus = self.hints.len().saturating_sub(MAX_COPY_RUNS);
        self.hints.drain(..surplus);
    }
}
