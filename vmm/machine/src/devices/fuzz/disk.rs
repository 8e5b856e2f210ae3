//! A disk and its file.

use std::collections::BTreeSet;
use std::os::unix::fs::FileExt;
use std::rc::Rc;
use std::thread;
use std::time::{Duration, Instant};

use driftline_dirty_tracker::{PAGE_SIZE, Subscription};
use driftline_guest::VmId;
use tempfile::NamedTempFile;

use super::device::{FuzzedDevice, given};
use super::input::FuzzInput;
use super::memory::FuzzMemory;
use crate::config::{DiskConfig, RateLimits};
use crate::devices::block::{BlockDevice, DiskError};
use crate::devices::virtio::{Device, DriverBuffer};
use crate::memory::Memory;

thread_local! {
    /// Created once per thread, like memory. Any content that earlier runs left is acceptable.
    static FILE: Rc<NamedTempFile> = {
        let file = NamedTempFile::new().unwrap();
        file.as_file().set_len(FuzzedDisk::BYTES as u64).unwrap();
        Rc::new(file)
    };
}

/// A disk of 16 blocks whose writes are tracked.
pub(super) struct FuzzedDisk {
    file: Rc<NamedTempFile>,
    config: DiskConfig,
    guest: VmId,
    uring: bool,
    before: Vec<u8>,
    now: Vec<u8>,
    /// One subscription for each device that was made.
    writes: Vec<Subscription>,
}

impl FuzzedDisk {
    const BYTES: usize = 64 << 10;

    pub(super) fn new(from: &mut FuzzInput<'_>, uring: bool) -> Self {
        let file = FILE.with(Rc::clone);
        let mut before = vec![0; Self::BYTES];
        file.as_file().read_exact_at(&mut before, 0).unwrap();
        let config = DiskConfig {
            id: "d".to_owned(),
            path: file.path().to_owned(),
            readonly: from.u8() & 7 == 7,
            serial: "s".to_owned(),
            bytes: Self::BYTES as u64,
            block_bytes: 512,
            identity: None,
            limits: RateLimits::default(),
        };
        let (guest, now) = (VmId::random(), before.clone());
        Self { file, config, guest, uring, before, now, writes: Vec::new() }
    }
}

impl FuzzedDevice for FuzzedDisk {
    fn make(&mut self) -> Box<dyn Device> {
        let open = || match self.uring {
            true => BlockDevice::open(&self.config, 2, self.guest, None),
            false => BlockDevice::open_without_uring(&self.config, 2, self.guest),
        };
        // A process that another test starts inherits the file of an earlier run, with its lock,
        // until it executes its own program.
        let end = Instant::now() + Duration::from_secs(20);
        let block = loop {
            match open() {
                Err(DiskError::InUse(_)) if Instant::now() < end => thread::yield_now(),
                opened => break opened.unwrap(),
            }
        };
        self.writes.extend(block.tracker().map(|tracker| tracker.subscribe("fuzz").unwrap()));
        Box::new(block)
    }

    fn queue(&self) -> usize {
        0
    }

    fn request(
        &mut self,
        _: usize,
        from: &mut FuzzInput<'_>,
        guest: &mut FuzzMemory,
    ) -> Vec<DriverBuffer> {
        // The known request types: in, out, flush, identify, discard, write zeroes.
        let kind = match from.u8() {
            n @ 0..240 => [0, 1, 4, 8, 11, 13][usize::from(n) % 6],
            _ => from.u32(),
        };
        let sector = if from.u8() < 200 { u64::from(from.u8()) } else { from.u64() };
        let header = [&kind.to_le_bytes()[..], &[0; 4], &sector.to_le_bytes()].concat();
        let mut pieces = given(&header, from, guest);
        if matches!(kind, 11 | 13) {
            let range = |from: &mut FuzzInput<'_>| {
                let sector = u64::from(from.u8());
                [sector.to_le_bytes(), u64::from(from.u16()).to_le_bytes()].concat()
            };
            let ranges: Vec<u8> = (0..1 + from.u8() % 3).flat_map(|_| range(from)).collect();
            pieces.extend(given(&ranges, from, guest));
        }
        let data = |from: &mut FuzzInput<'_>, writable| -> Vec<DriverBuffer> {
            let sectors = |from: &mut FuzzInput<'_>| DriverBuffer {
                len: 512 * u32::from(1 + from.u8() % 16),
                ..from.piece(writable)
            };
            (0..from.u8() % 4).map(|_| sectors(from)).collect()
        };
        pieces.extend(data(from, kind == 0 || kind == 8));
        pieces.push(DriverBuffer { addr: from.address(), len: 1, writable: from.u8() < 240 });
        pieces
    }

    fn check(&mut self, _: &Memory) {
        let mut marked = BTreeSet::new();
        for writes in &mut self.writes {
            let epoch = writes.drain();
            marked.extend(epoch.runs().flat_map(|run| run.start.0..run.end().0));
            epoch.commit();
        }
        let file = self.file.as_file();
        assert_eq!(file.metadata().unwrap().len(), Self::BYTES as u64, "a disk does not grow");
        file.read_exact_at(&mut self.now, 0).unwrap();
        if self.now == self.before {
            return;
        }
        let block = PAGE_SIZE as usize;
        for (i, (before, now)) in (0..).zip(self.before.chunks(block).zip(self.now.chunks(block))) {
            assert!(before == now || marked.contains(&i), "block {i} changed unmarked");
            assert!(before == now || !self.config.readonly, "a read-only disk changed");
        }
        std::mem::swap(&mut self.before, &mut self.now);
    }

    fn writes_asynchronously(&self) -> bool {
        self.uring
    }
}
