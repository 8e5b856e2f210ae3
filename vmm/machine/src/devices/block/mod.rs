//! virtio-blk: a disk backed by a raw file or a block device.
//!
//! ```text
//! chain -> request (parsed, bounded) -> engine: io_uring, or plain reads and writes
//!            the drive's keeper: blocks that an epoch still has to copy
//!                                          |
//!   used ring <- status byte <- completion +--> the drive's tree: blocks of 4 KiB written
//! ```
//!
//! Errors of the file go to the guest as `VIRTIO_BLK_S_IOERR`; the first one is said, all are
//! counted.

mod engine;
mod error;
mod file;
mod flusher;
#[cfg(test)]
mod held;
mod identity;
mod lock;
mod made;
mod operation;
mod plain;
mod request;
mod restored;
mod source;
#[cfg(test)]
mod storage;
#[cfg(test)]
mod tests;
#[cfg(test)]
mod under_way;
mod uring;

use std::collections::HashMap;
use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

use driftline_dirty_tracker::{FrameRun, Gfn, PAGE_SHIFT, Tracker};
use driftline_guest::{DriveHead, Keeper, VmId, block_layout};
use serde::{Deserialize, Serialize};
use virtio_bindings::virtio_blk::*;
use vmm_sys_util::epoll::EventSet;

use self::engine::Engine;
use self::operation::{Operation, Work};
use self::request::Request;
use super::figures::DiskCounters;
use super::virtio::{
    Buffers, Chain, Device, Io, Kind, Ring, Stall, Violation, Watcher, decode_state, encode_state,
};
use crate::config::{DiskConfig, DiskIdentity};

pub use self::error::DiskError;
use self::file::DiskFile;
pub(super) use self::file::FileIdentity;
pub use self::file::probe;
use self::flusher::Promise;
pub(super) use self::flusher::{Flusher, flush_all};
pub(crate) use self::made::make_copies;
pub(crate) use self::restored::{Parent, open_drives};
pub(crate) use self::source::DriveSource;

const QUEUE_SIZE: u16 = 256;
/// Queues at most; a guest has no use for more than it has vCPUs.
const MAX_QUEUES: u8 = 4;
/// Buffers of one request: what the queue has room for beside header and status.
const SEG_MAX: u32 = QUEUE_SIZE as u32 - 2;
/// A device that has this many bytes under way begins no more requests: it comes to a stand in
/// about the time that the disk takes for twice as many.
const MOST_UNDER_WAY: u64 = 32 << 20;
/// How long the device works on a queue before it listens to others.
const TURN: Duration = Duration::from_millis(10);
/// Where the engine's completions are announced.
const COMPLETIONS: u32 = 0;

/// The device.
pub(super) struct Block {
    disk: DiskConfig,
    queues: u16,
    file: Arc<DiskFile>,
    engine: Engine,
    /// What the guest has written; `None` for a drive that it cannot write to.
    tracker: Option<Arc<Tracker>>,
    /// What of the disk has to stay as it is until an epoch has it.
    keeper: Arc<Keeper>,
    /// Requests that the engine has, by their tokens.
    under_way: HashMap<u64, UnderWay>,
    /// Their bytes.
    bytes_under_way: u64,
    /// Queues whose chains were left there for want of room for more bytes: bit by number.
    waiting: u32,
    /// The driver knows of no volatile cache: what it has written is durable when it is told so.
    writes_through: bool,
    /// The file is locked for this guest.
    held: bool,
    /// The file was made here, for a guest that comes.
    made_here: bool,
    /// The guest has run here with the file. One that comes from another host has not, which may
    /// have written to the file since it was opened here.
    has_run: bool,
    next_token: u64,
    counters: Arc<DiskCounters>,
    state: BlockState,
}

/// The part of the device that moves with the guest.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub(super) struct BlockState {
    /// Requests that failed for the file's sake.
    errors: u64,
    /// Data is lost, and the guest does not know it: its next flush fails.
    lost: bool,
}

/// A request that the engine has.
struct UnderWay {
    queue: usize,
    head: u16,
    /// One byte.
    status: Buffers,
    /// Bytes of data that the driver gets, if all goes well.
    data_len: u32,
    /// What it changes of the disk: from, and bytes, of each part.
    writes: Vec<(u64, u64)>,
    /// Bytes that it moves.
    bytes: u64,
    /// What its success says of data.
    promise: Promise,
}

impl Block {
    /// The drive of `disk` of the guest `holder`, whose file is opened, and not yet held.
    pub(super) fn open(disk: &DiskConfig, vcpus: u8, holder: VmId) -> Result<Self, DiskError> {
        let file = Arc::new(DiskFile::open(disk, holder)?);
        let queues = vcpus.clamp(1, MAX_QUEUES).into();
        let most = usize::from(queues) * usize::from(QUEUE_SIZE);
        let engine = Engine::new(file.clone(), most, &disk.id);
        Self::new(disk, queues, file, engine)
    }

    /// As [`open`](Self::open), without io_uring.
    #[cfg(any(test, fuzzing))]
    pub(super) fn open_plain(
        disk: &DiskConfig,
        queues: u16,
        holder: VmId,
    ) -> Result<Self, DiskError> {
        let file = Arc::new(DiskFile::open(disk, holder)?);
        Self::new(disk, queues, file.clone(), Engine::Plain(file))
    }

    fn new(
        disk: &DiskConfig,
        queues: u16,
        file: Arc<DiskFile>,
        engine: Engine,
    ) -> Result<Self, DiskError> {
        let tracker = match disk.readonly {
            true => None,
            false => Some(Arc::new(Tracker::new(
                block_layout(disk.bytes)
                    .map_err(|cause| DiskError::Untracked { id: disk.id.clone(), cause })?,
            ))),
        };
        Ok(Self {
            disk: disk.clone(),
            queues,
            file,
            engine,
            tracker,
            keeper: Arc::default(),
            under_way: HashMap::new(),
            bytes_under_way: 0,
            waiting: 0,
            writes_through: false,
            held: false,
            made_here: false,
            // `start` knows better.
            has_run: true,
            next_token: 0,
            counters: Arc::default(),
            state: BlockState::default(),
        })
    }

    /// What follows the guest's writes.
    pub(super) fn tracker(&self) -> Option<&Arc<Tracker>> {
        self.tracker.as_ref()
    }

    /// The disk as whoever copies it sees it.
    pub(super) fn source(&self) -> DriveSource {
        let DiskConfig { id, bytes, readonly, .. } = &self.disk;
        let head = DriveHead { id: id.clone(), bytes: *bytes, readonly: *readonly };
        let (tracker, keeper) = (self.tracker.clone(), self.keeper.clone());
        DriveSource { head, tracker, keeper, which: self.flusher().which() }
    }

    /// Its file was made on this host: no other one has ever written to it.
    pub(super) fn note_made_here(&mut self) {
        self.made_here = true;
    }

    /// What it has done.
    pub(super) fn counters(&self) -> &Arc<DiskCounters> {
        &self.counters
    }

    /// What makes it durable while the guest runs.
    pub(super) fn flusher(&self) -> &Arc<Flusher> {
        self.file.flusher()
    }

    /// Which disk it is, on whatever host.
    pub(super) fn disk_identity(&self) -> Option<DiskIdentity> {
        self.file.disk_identity()
    }

    /// Which file is behind it.
    pub(super) fn file_identity(&self) -> io::Result<FileIdentity> {
        self.file.identity()
    }

    /// Begins a request, or completes it at once.
    fn begin(&mut self, queue: usize, chain: &Chain, io: &mut Io<'_>) -> Result<(), Violation> {
        let Request { work, status, data_len } =
            Request::read(queue as u16, chain, &self.disk, io.ram)?;
        let work = match work {
            Ok(work) => work,
            Err(code) => return finish(io, queue, chain.head, &status, 0, code).map(drop),
        };
        self.count(&work);
        let (writes, bytes) = (work.writes(), work.bytes());
        let promise = match &work {
            Work::Flush => Promise::Everything,
            _ if self.writes_through && !writes.is_empty() => Promise::Itself,
            _ => Promise::Nothing,
        };
        let head = chain.head;
        let under_way = UnderWay { queue, head, status, data_len, writes, bytes, promise };
        if let Work::Identify(to) = &work {
            let mut id = [0; VIRTIO_BLK_ID_BYTES as usize];
            let serial = self.disk.serial.as_bytes();
            let len = serial.len().min(id.len());
            id[..len].copy_from_slice(&serial[..len]);
            to.write(io.ram, 0, &id)?;
            return self.complete(under_way, Ok(()), io);
        }
        // It is asked only here: what is under way when blocks are first kept, while the device
        // stands, is nothing.
        for (from, bytes) in &under_way.writes {
            self.keeper.before_write(*from, *bytes);
        }
        let token = self.next_token;
        self.next_token += 1;
        let durable = self.writes_through;
        match self.engine.submit(Operation { token, work, durable }, io.ram) {
            Some(result) => self.complete(under_way, result, io),
            None => {
                self.bytes_under_way += under_way.bytes;
                self.under_way.insert(token, under_way);
                Ok(())
            }
        }
    }

    fn count(&self, work: &Work) {
        match work {
            Work::Read { to, .. } => {
                self.counters.reads.add(1);
                self.counters.read_bytes.add(to.len().into());
            }
            Work::Write { from, .. } => {
                self.counters.writes.add(1);
                self.counters.written_bytes.add(from.len().into());
            }
            Work::Flush => self.counters.flushes.add(1),
            Work::Discard(_) | Work::WriteZeroes(_) | Work::Identify(_) => {}
        }
    }

    /// Tells the driver how a request ended.
    fn complete(
        &mut self,
        request: UnderWay,
        result: io::Result<()>,
        io: &mut Io<'_>,
    ) -> Result<(), Violation> {
        for (from, bytes) in request.writes {
            // After it was done, and before the driver hears of it: whoever drains the tree and
            // then reads the file has it, if it was done by then; if not, it is marked after the
            // drain, and in the next epoch, whatever of it was read. A device that stands has
            // nothing under way, so all of it is marked. Also if it failed: part of it may be
            // written.
            self.mark(from, bytes);
        }
        let answer = self.file.flusher().answer(request.promise, result);
        let (len, code) = match &answer.result {
            Ok(()) => (request.data_len, VIRTIO_BLK_S_OK),
            Err(e) => {
                self.note_error(e);
                (0, VIRTIO_BLK_S_IOERR)
            }
        };
        let heard = finish(io, request.queue, request.head, &request.status, len, code);
        self.file.flusher().told(&answer, matches!(heard, Ok(true)));
        heard.map(drop)
    }

    /// Takes what the engine has finished. All of it, whatever the driver did: memory and disk are
    /// what they are.
    fn take_completions(&mut self, io: &mut Io<'_>) -> Result<(), Violation> {
        let mut all = Ok(());
        for (token, result) in self.engine.completions(io.ram) {
            if let Some(request) = self.under_way.remove(&token) {
                self.bytes_under_way -= request.bytes;
                all = all.and(self.complete(request, result, io));
            }
        }
        all
    }

    fn mark(&self, from: u64, bytes: u64) {
        let Some(tracker) = self.tracker.as_ref().filter(|_| bytes > 0) else { return };
        let start = Gfn::containing(from);
        let count = ((from + bytes - 1) >> PAGE_SHIFT) - start.0 + 1;
        if let Err(e) = tracker.mark(FrameRun { start, count }) {
            // Requests were bounded by the drive's size.
            debug_assert!(false, "{e}");
            tracker.mark_all();
        }
    }

    fn note_error(&mut self, e: &io::Error) {
        self.state.errors += 1;
        self.counters.errors.add(1);
        let (id, path) = (&self.disk.id, self.disk.path.display());
        match self.state.errors {
            1 => tracing::error!(
                "disk \"{id}\": a request of the guest fails on {path}: {e}; later failures are only counted"
            ),
            n => tracing::debug!("disk \"{id}\": failure {n} on {path}: {e}"),
        }
    }

    /// Waits until nothing is under way, or `deadline`.
    fn drain(&mut self, deadline: Option<Instant>, io: &mut Io<'_>) -> Result<(), Stall> {
        let mut all = Ok(());
        while !self.under_way.is_empty() {
            let in_time = self.engine.wait(deadline);
            all = all.and(self.take_completions(io));
            if !in_time && !self.under_way.is_empty() {
                return Err(Stall::UnderWay(self.under_way.len()));
            }
        }
        // No completion will remind of these.
        for queue in self.take_waiting() {
            if let Some(ring) = io.rings.get_mut(queue) {
                ring.yield_turn();
            }
        }
        Ok(all?)
    }

    /// The queues whose chains wait for room.
    fn take_waiting(&mut self) -> impl Iterator<Item = usize> + use<> {
        let waiting = std::mem::take(&mut self.waiting);
        (0..MAX_QUEUES.into()).filter(move |queue| waiting & 1 << queue != 0)
    }
}

/// Status byte, then the used ring; whether the driver has a queue in which to see it.
fn finish(
    io: &mut Io<'_>,
    queue: usize,
    head: u16,
    status: &Buffers,
    data_len: u32,
    code: u32,
) -> Result<bool, Violation> {
    status.write(io.ram, 0, &[code as u8])?;
    let Some(ring) = io.rings.get_mut(queue) else { return Ok(false) };
    let heard = ring.is_set_up();
    ring.push(io.ram, head, data_len + 1).map(|()| heard)
}

impl Device for Block {
    fn kind(&self) -> Kind {
        Kind::Block
    }

    fn features(&self) -> u64 {
        let writable = [VIRTIO_BLK_F_DISCARD, VIRTIO_BLK_F_WRITE_ZEROES];
        let mode: &[u32] = if self.disk.readonly { &[VIRTIO_BLK_F_RO] } else { &writable };
        let always = [
            VIRTIO_BLK_F_FLUSH,
            VIRTIO_BLK_F_BLK_SIZE,
            VIRTIO_BLK_F_SIZE_MAX,
            VIRTIO_BLK_F_SEG_MAX,
            VIRTIO_BLK_F_MQ,
        ];
        mode.iter().chain(&always).fold(0, |bits, bit| bits | 1 << bit)
    }

    fn queue_sizes(&self) -> Vec<u16> {
        vec![QUEUE_SIZE; self.queues.into()]
    }

    fn config_space(&self) -> Vec<u8> {
        request::config_space(&self.disk, self.queues, SEG_MAX)
    }

    fn write_config(&mut self, _: usize, _: &[u8], _: &mut Io<'_>) {}

    fn start(&mut self, watcher: &Watcher) -> io::Result<()> {
        self.has_run = self.held;
        match self.engine.announcer() {
            Some(fd) => watcher.watch(fd, EventSet::IN, COMPLETIONS),
            None => Ok(()),
        }
    }

    fn activate(&mut self, features: u64) {
        // It could not ask for durability: there are no flushes for it.
        self.writes_through = features & 1 << VIRTIO_BLK_F_FLUSH == 0;
    }

    fn reset(&mut self, io: &mut Io<'_>) {
        // The rings are gone: nothing that ends now can break their rules.
        let _ = self.drain(None, io);
    }

    fn process(&mut self, queue: usize, io: &mut Io<'_>) -> Result<(), Violation> {
        let end = Instant::now() + TURN;
        while self.bytes_under_way < MOST_UNDER_WAY {
            let Some(ring) = io.rings.get_mut(queue) else { return Ok(()) };
            let Some(chain) = ring.pop(io.ram)? else { return Ok(()) };
            self.begin(queue, &chain, io)?;
            if Instant::now() >= end {
                io.rings.get_mut(queue).into_iter().for_each(Ring::yield_turn);
                return Ok(());
            }
        }
        self.waiting |= 1 << queue;
        Ok(())
    }

    fn backend_ready(&mut self, _: u32, _: EventSet, io: &mut Io<'_>) -> Result<(), Violation> {
        self.take_completions(io)?;
        self.take_waiting().try_for_each(|queue| self.process(queue, io))
    }

    fn quiesce(&mut self, deadline: Instant, io: &mut Io<'_>) -> Result<(), Stall> {
        self.drain(Some(deadline), io)
    }

    fn resume(&mut self, _: bool, _: &mut Io<'_>) -> Result<(), Violation> {
        // Should it let go of the file from now on, and take it again, its guest ran nowhere else
        // meanwhile. Not sooner: when another of the guest's devices cannot be had, the guest goes
        // on where it was, and writes.
        self.has_run |= self.held;
        Ok(())
    }

    fn save(&self) -> Result<Vec<u8>, String> {
        let lost = self.file.flusher().lost().is_some();
        encode_state(&BlockState { lost, ..self.state })
    }

    fn restore(&mut self, state: &[u8]) -> Result<(), String> {
        self.state = decode_state(state)?;
        if std::mem::take(&mut self.state.lost) {
            self.file.flusher().note_lost(&io::Error::from_raw_os_error(libc::EIO));
        }
        Ok(())
    }

    fn acquire(&mut self) -> Result<(), String> {
        self.file.lock()?;
        self.held = true;
        self.keeper.hold();
        // A disk that is only read is locked against writers all the time, here or there.
        if !self.has_run && !self.disk.readonly && !self.made_here {
            self.file.forget_cached();
        }
        Ok(())
    }

    fn release(&mut self, deadline: Instant) -> Result<(), String> {
        // Before another host can write to it: what an epoch has not read by now it cannot have.
        self.keeper.let_go();
        let released = self.file.flush_and_unlock(deadline);
        match &released {
            Ok(()) => self.held = false,
            Err(_) => self.keeper.hold(),
        }
        released
    }

    fn undo_acquire(&mut self, deadline: Instant) -> Result<(), String> {
        if self.has_run {
            return self.release(deadline);
        }
        self.keeper.let_go();
        self.held = false;
        self.file.unlock()
    }
}
