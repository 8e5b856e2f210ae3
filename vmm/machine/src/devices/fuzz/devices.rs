//! The devices, each with the backend behind it and a generator of requests that are valid, or
//! nearly.

use std::collections::BTreeSet;
use std::fs::File;
use std::io::{Read, Write};
use std::net::Shutdown;
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt;
use std::os::unix::net::{UnixDatagram, UnixListener, UnixStream};
use std::rc::Rc;
use std::sync::LazyLock;
use std::sync::mpsc::Receiver;
use std::thread;
use std::time::{Duration, Instant};

use driftline_dirty_tracker::{FrameSet, PAGE_SIZE, Subscription};
use driftline_guest::VmId;
use tempfile::{NamedTempFile, TempDir};

use super::input::FuzzInput;
use super::memory::FuzzMemory;
use crate::config::{BalloonConfig, DiskConfig, MacAddr, NetConfig, VsockConfig};
use crate::devices::balloon::{self, BalloonControl};
use crate::devices::block::{BlockDevice, DiskError};
use crate::devices::net::Net;
use crate::devices::opener::Opener;
use crate::devices::rng::Rng;
use crate::devices::virtio::{Device, DriverBuffer};
use crate::devices::vsock::Vsock;
use crate::memory::Memory;

/// Address of the buffers that the device reads.
const GIVEN: u64 = 0x1_0000;

/// A device under test. See the module documentation.
pub(super) trait FuzzedDevice {
    /// Returns a new device over the same backend as before.
    fn make(&mut self) -> Box<dyn Device>;

    /// Returns the queue under test.
    fn queue(&self) -> usize;

    /// Returns the buffers of a request for `queue`.
    fn request(
        &mut self,
        queue: usize,
        from: &mut FuzzInput<'_>,
        guest: &mut FuzzMemory,
    ) -> Vec<DriverBuffer>;

    /// Makes something happen in the backend.
    fn cause_backend_event(&mut self, _: &mut FuzzInput<'_>) {}

    /// Checks the rules that must hold whenever nothing is in flight.
    fn check(&mut self, _: &Memory) {}

    /// Returns whether the device also writes to guest memory between two calls.
    fn writes_asynchronously(&self) -> bool {
        false
    }
}

/// Puts bytes for the device to read into one or two buffers and returns these.
fn given(bytes: &[u8], from: &mut FuzzInput<'_>, guest: &mut FuzzMemory) -> Vec<DriverBuffer> {
    let addr = GIVEN + 64 * u64::from(from.u8());
    guest.write(addr, bytes);
    let len = bytes.len() as u32;
    let cut = u32::from(from.u8());
    let piece = |addr, len| DriverBuffer { addr, len, writable: false };
    match cut < len {
        true => vec![piece(addr, cut), piece(addr + u64::from(cut), len - cut)],
        false => vec![piece(addr, len)],
    }
}

pub(super) struct FuzzedRng;

impl FuzzedDevice for FuzzedRng {
    fn make(&mut self) -> Box<dyn Device> {
        Box::new(Rng)
    }

    fn queue(&self) -> usize {
        0
    }

    fn request(
        &mut self,
        _: usize,
        from: &mut FuzzInput<'_>,
        _: &mut FuzzMemory,
    ) -> Vec<DriverBuffer> {
        let writable = from.u8() < 240;
        from.pieces(writable)
    }
}

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
        };
        let (guest, now) = (VmId::random(), before.clone());
        Self { file, config, guest, uring, before, now, writes: Vec::new() }
    }
}

impl FuzzedDevice for FuzzedDisk {
    fn make(&mut self) -> Box<dyn Device> {
        let open = || match self.uring {
            true => BlockDevice::open(&self.config, 2, self.guest),
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

/// A network interface over sockets.
pub(super) struct FuzzedInterface {
    config: NetConfig,
    queue: usize,
    ours: Vec<UnixDatagram>,
    taps: Vec<File>,
    frame: Vec<u8>,
}

impl FuzzedInterface {
    pub(super) fn new(queue: usize, queues: u8) -> Self {
        let pair = |_| {
            let (ours, tap) = UnixDatagram::pair().unwrap();
            ours.set_nonblocking(true).unwrap();
            tap.set_nonblocking(true).unwrap();
            (ours, File::from(OwnedFd::from(tap)))
        };
        let (ours, taps) = (0..queues).map(pair).unzip();
        let mac = MacAddr([2, 0, 0, 0, 0, 1]);
        let config = NetConfig { id: "n".to_owned(), tap: "t".to_owned(), mac, queues };
        Self { config, queue, ours, taps, frame: vec![0x5a; 70_000] }
    }
}

impl FuzzedDevice for FuzzedInterface {
    fn make(&mut self) -> Box<dyn Device> {
        let taps = self.taps.iter().map(|tap| tap.try_clone().unwrap()).collect();
        Box::new(Net::over_sockets(&self.config, taps).unwrap())
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
        let control = 2 * self.ours.len();
        if queue == control || queue == 2 && from.flip() {
            let class = from.one_of(&[3, 4, 4, 4, 0]);
            let command = [class, from.u8() % 3, from.u8() % 10, from.u8() / 250];
            let mut pieces = given(&command, from, guest);
            pieces.push(DriverBuffer { addr: from.address(), len: 1, writable: from.u8() < 240 });
            return pieces;
        }
        if queue.is_multiple_of(2) {
            let mut pieces = from.pieces(true);
            if from.u8() < 200 {
                pieces.push(DriverBuffer { addr: from.address(), len: 1526, writable: true });
            }
            return pieces;
        }
        let len = from.u8();
        let frame = [&[0; 12][..], from.bytes(len.into())].concat();
        let mut pieces = given(&frame, from, guest);
        pieces.extend(from.pieces(false));
        pieces
    }

    fn cause_backend_event(&mut self, from: &mut FuzzInput<'_>) {
        let mut frame = [0; 2048];
        for socket in &self.ours {
            while socket.recv(&mut frame).is_ok() {}
        }
        for _ in 0..1 + from.u8() % 4 {
            let queue = usize::from(from.u8()) % self.ours.len();
            let len = match from.u8() % 4 {
                0..2 => 12 + usize::from(from.u8()),
                2 => 12 + usize::from(from.u16()) % 4096,
                _ => usize::from(from.u16()) + 4096,
            };
            // A frame that finds no room is lost, as on a network.
            let _ = self.ours[queue].send(&self.frame[..len.min(self.frame.len())]);
        }
    }
}

/// Directory of the unix sockets, with a program that listens for the guest.
struct SocketDir {
    dir: TempDir,
    listener: UnixListener,
}

thread_local! {
    static SOCKETS: Rc<SocketDir> = {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join(format!("v_{}", FuzzedVsock::LISTENS));
        let listener = UnixListener::bind(path).unwrap();
        listener.set_nonblocking(true).unwrap();
        Rc::new(SocketDir { dir, listener })
    };
}

/// The socket device, with programs on both sides.
pub(super) struct FuzzedVsock {
    queue: usize,
    config: VsockConfig,
    place: Rc<SocketDir>,
    programs: Vec<UnixStream>,
}

impl FuzzedVsock {
    const CID: u32 = 5;
    const LISTENS: u32 = 1;

    pub(super) fn new(queue: usize) -> Self {
        let place = SOCKETS.with(Rc::clone);
        // Connections of an earlier run.
        while place.listener.accept().is_ok() {}
        let config = VsockConfig { cid: Self::CID, uds: place.dir.path().join("v") };
        Self { queue, config, place, programs: Vec::new() }
    }

    fn program(&mut self, from: &mut FuzzInput<'_>) -> Option<&mut UnixStream> {
        let count = self.programs.len().max(1);
        self.programs.get_mut(usize::from(from.u8()) % count)
    }
}

impl FuzzedDevice for FuzzedVsock {
    fn make(&mut self) -> Box<dyn Device> {
        Box::new(Vsock::new(&self.config, opener()).unwrap())
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
        if queue != 1 {
            let mut pieces = from.pieces(true);
            if from.u8() < 200 {
                let len = 44 + u32::from(from.u16()) % 5000;
                pieces.push(DriverBuffer { addr: from.address(), len, writable: true });
            }
            return pieces;
        }
        let mut header = Vec::new();
        let cid = if from.u8() < 240 { Self::CID.into() } else { from.u64() };
        header.extend(cid.to_le_bytes());
        header.extend(if from.u8() < 240 { 2u64 } else { from.u64() }.to_le_bytes());
        // Ports of the guest and of the host: a listening one, a connecting one, or any.
        header.extend(u32::from(from.u8() % 4).to_le_bytes());
        let port = from.one_of(&[1, 1, 1 << 30, (1 << 30) + 1, 2]);
        header.extend(u32::to_le_bytes(port));
        let data = usize::from(from.u8());
        let len = if from.u8() < 230 { data as u32 } else { from.u32() };
        header.extend(len.to_le_bytes());
        header.extend(if from.u8() < 240 { 1u16 } else { from.u16() }.to_le_bytes());
        header.extend(u16::from(from.u8() % 9).to_le_bytes());
        header.extend(u32::from(from.u8() % 4).to_le_bytes());
        let room = if from.flip() { 256 << 10 } else { from.u32() };
        header.extend(u32::to_le_bytes(room));
        header.extend(u32::from(from.u8()).to_le_bytes());
        let mut pieces = given(&header, from, guest);
        if data > 0 {
            pieces.push(DriverBuffer { addr: from.address(), len: data as u32, writable: false });
        }
        pieces
    }

    fn cause_backend_event(&mut self, from: &mut FuzzInput<'_>) {
        match from.u8() % 6 {
            0 => {
                // If the listen queue is full, no program connects.
                let Ok(mut program) = UnixStream::connect(&self.config.uds) else { return };
                program.set_nonblocking(true).unwrap();
                let port = from.u8() % 4;
                let _ = match from.u8() {
                    0..200 => program.write_all(format!("CONNECT {port}\n").as_bytes()),
                    _ => program.write_all(from.bytes(40)),
                };
                self.programs.push(program);
            }
            1 => {
                if let Ok((program, _)) = self.place.listener.accept() {
                    program.set_nonblocking(true).unwrap();
                    self.programs.push(program);
                }
            }
            2 => {
                let data = vec![0x33; from.u16().into()];
                if let Some(program) = self.program(from) {
                    let _ = program.write(&data);
                }
            }
            3 => {
                if let Some(program) = self.program(from) {
                    let _ = program.read(&mut [0; 4096]);
                }
            }
            4 => {
                let how = from.one_of(&[Shutdown::Read, Shutdown::Write]);
                if let Some(program) = self.program(from) {
                    let _ = program.shutdown(how);
                }
            }
            _ => {
                if !self.programs.is_empty() {
                    let which = usize::from(from.u8()) % self.programs.len();
                    self.programs.swap_remove(which);
                }
            }
        }
    }
}

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

/// Returns the opener, shared by all inputs.
fn opener() -> &'static Opener {
    static OPENER: LazyLock<Opener> = LazyLock::new(|| Opener::start().unwrap());
    &OPENER
}
