//! A balloon, its operator, and a thread that copies memory.

use std::sync::mpsc::Receiver;

use driftline_dirty_tracker::{FrameSet, PAGE_SIZE};

use super::device::{FuzzedDevice, given};
use super::input::FuzzInput;
use super::memory::FuzzMemory;
use crate::config::BalloonConfig;
use crate::devices::balloon::{self, BalloonControl};
use crate::devices::virtio::{Device, DriverBuffer};
use crate::memory::Memory;

/// A balloon, with an operator and a thread that copies memory.
pub(super) struct FuzzedBalloon {
    queue: usize,
    config: BalloonConfig,
    control: Option<BalloonControl>,
    hints: Vec<Receiver<FrameSet>>,
}

impl FuzzedBalloon {
    pub(super) const INFLATE: usize = 0;
    pub(super) const HINT: usize = 2;
    pub(super) const REPORT: usize = 3;

    pub(super) fn new(queue: usize) -> Self {
        Self { queue, config: BalloonConfig::default(), control: None, hints: Vec::new() }
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
        match from.flip() {
            true => control.set_target(u64::from(from.u8()) * PAGE_SIZE),
            false => self.hints.push(control.begin_hints()),
        }
    }

    fn check(&mut self, memory: &Memory) {
        for free in self.hints.iter().filter_map(|hints| hints.try_recv().ok()) {
            for run in free.iter() {
                // The two slots are not adjacent, so a run lies in one of them.
                assert!(memory.layout().contains(run), "{run:?} was hinted and is no memory");
            }
        }
        self.hints.truncate(64);
    }
}
