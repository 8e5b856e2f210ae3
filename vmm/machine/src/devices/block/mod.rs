//! virtio-blk: a disk backed by a raw file or a block device.
//!
//! ```text
//! chain -> request (parsed, bounded) -> copy-before-write: old blocks that a checkpoint needs
//!                                         |
//!                                       engine: io_uring, or plain reads and writes
//!                                         |
//!   used ring <- status byte <- completion +--> the drive's tree: blocks of 4 KiB written
//! ```
//!
//! Errors of the file are reported to the guest as `VIRTIO_BLK_S_IOERR`. The first error is logged;
//! all errors are counted.

mod device;
mod drive_source;
mod engine;
mod error;
mod exchange;
mod file;
mod file_identity;
mod file_offer;
mod flusher;
mod identity;
mod incoming;
mod lock;
mod operation;
mod request;
mod restore;
#[cfg(test)]
mod tests;

use std::collections::HashMap;
use std::io;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Instant;

use driftline_dirty_tracker::{FrameRun, Gfn, PAGE_SHIFT, Tracker};
use driftline_guest::{CopyBeforeWrite, DriveHead, VmId, block_layout};
use serde::{Deserialize, Serialize};
use virtio_bindings::virtio_blk::*;

use self::engine::Engine;
use self::operation::{DiskOperation, DiskWork};
use self::request::DiskRequest;
use super::stats::DiskCounters;
use super::virtio::{Buffers, DeviceIo, QuiesceError, Violation};
use crate::config::{DiskCache, DiskConfig, DiskEngine, DiskIdentity, OpenedDisk};
use crate::pool;

pub(crate) use self::drive_source::DriveSource;
pub use self::error::{CopyRefusal, DiskError};
pub(super) use self::exchange::ExchangeParts;
pub use self::exchange::{DiskFileControl, ExchangeError};
use self::file::DiskFile;
pub use self::file::{file_serial, probe, probe_opened};
pub(super) use self::file_identity::FileIdentity;
use self::file_offer::FileOffer;
use self::flusher::DurabilityPromise;
#[cfg(test)]
use self::flusher::Flusher;
pub(super) use self::flusher::{CurrentFlusher, flush_all};
pub(crate) use self::incoming::make_copies;
pub(crate) use self::restore::{ParentGuest, open_drives};

const QUEUE_SIZE: u16 = 256;
/// Upper bound on the number of queues. A guest has no use for more queues than it has vCPUs.
const MAX_QUEUES: u8 = 4;
/// Buffers in one request: the queue size without the header and the status.
const SEG_MAX: u32 = QUEUE_SIZE as u32 - 2;
/// Bytes in flight at which the device stops starting requests. A pause therefore takes about as
/// long as the disk takes for twice this amount.
const MAX_BYTES_IN_FLIGHT: u64 = 32 << 20;

/// A virtio block device.
pub(super) struct BlockDevice {
    disk: DiskConfig,
    queues: u16,
    file: Arc<DiskFile>,
    /// The file's flusher, for other threads.
    current_flusher: CurrentFlusher,
    engine: Engine,
    /// Tracks the blocks that the guest has written; `None` for a read-only drive.
    tracker: Option<Arc<Tracker>>,
    /// Copy-before-write: saves blocks that an epoch has not copied yet before the guest overwrites
    /// them.
    copy_before_write: Arc<CopyBeforeWrite>,
    /// Requests that the engine has, by token.
    in_flight: HashMap<u64, RequestInFlight>,
    /// Bytes that the requests in `in_flight` move.
    bytes_in_flight: u64,
    /// Queues whose chains stay in the ring because too many bytes are in flight, one bit per
    /// queue.
    stalled_queues: u32,
    /// Whether the host makes the file durable when the driver asks for it.
    cache: DiskCache,
    /// Whether the driver did not negotiate `VIRTIO_BLK_F_FLUSH`, which was offered. It then
    /// assumes that there is no volatile cache: a write must be durable when the driver is told
    /// that it has completed.
    writes_through: bool,
    /// Whether the file is locked for this guest.
    locked: bool,
    /// Whether the file was created on this host, or comes with the guest from another process of
    /// this host: no other host has written to it since.
    is_of_this_host: bool,
    /// Whether the guest has run on this host with this file. For a guest that arrives from another
    /// host it has not: that host may have written to the file since it was opened here.
    has_run: bool,
    next_token: u64,
    /// Where another file is offered.
    offer: Arc<FileOffer>,
    /// Whether the disk's file or size was exchanged since the guest's start.
    is_exchanged: Arc<AtomicBool>,
    counters: Arc<DiskCounters>,
    state: BlockState,
}

/// The part of the device's state that moves with the guest.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub(super) struct BlockState {
    /// Number of requests that failed because of the file.
    errors: u64,
    /// Whether data is lost and the guest has not been told. Its next flush then fails.
    lost: bool,
}

/// A request that the engine has.
struct RequestInFlight {
    queue: usize,
    head: u16,
    /// The status byte.
    status: Buffers,
    /// Bytes of data that the driver gets if the request succeeds.
    data_len: u32,
    /// Parts of the disk that the request changes: offset and length of each, in bytes.
    writes: Vec<(u64, u64)>,
    /// Bytes that the request moves.
    bytes: u64,
    /// What the request's success promises about durability.
    promise: DurabilityPromise,
}

impl BlockDevice {
    /// Opens the file of `disk` for the guest `holder`, unless it is open already. The file is not
    /// locked yet.
    pub(super) fn open(
        disk: &DiskConfig,
        vcpus: u8,
        holder: VmId,
        opened: Option<&OpenedDisk>,
    ) -> Result<Self, DiskError> {
        let file = match opened {
            None => DiskFile::open(disk, holder)?,
            Some(opened) => DiskFile::of_opened(disk, holder, &opened.file)?,
        };
        let file = Arc::new(file);
        let queues = vcpus.clamp(1, MAX_QUEUES).into();
        let most = usize::from(queues) * usize::from(QUEUE_SIZE);
        let kind = opened.map_or(DiskEngine::Automatic, |opened| opened.engine);
        let engine = Engine::new(kind, file.clone(), most, &disk.id)?;
        let cache = opened.map_or(DiskCache::Writeback, |opened| opened.cache);
        let is_of_this_host = opened.is_some_and(|opened| opened.is_handed_over);
        Ok(Self { cache, is_of_this_host, ..Self::new(disk, queues, file, engine)? })
    }

    /// Like [`open`](Self::open), without io_uring.
    #[cfg(any(test, fuzzing))]
    pub(super) fn open_without_uring(
        disk: &DiskConfig,
        queues: u16,
        holder: VmId,
    ) -> Result<Self, DiskError> {
        let file = Arc::new(DiskFile::open(disk, holder)?);
        Self::new(disk, queues, file.clone(), Engine::Sync(file))
    }

    fn new(
        disk: &DiskConfig,
        queues: u16,
        file: Arc<DiskFile>,
        engine: Engine,
    ) -> Result<Self, DiskError> {
        if !disk.readonly && disk.bytes >= pool::SHARED_FROM {
            let failed = |cause| DiskError::Thread { id: disk.id.clone(), cause };
            pool::start().map_err(failed)?;
        }
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
            current_flusher: CurrentFlusher::new(file.flusher().clone()),
            file,
            engine,
            tracker,
            copy_before_write: Arc::default(),
            in_flight: HashMap::new(),
            bytes_in_flight: 0,
            stalled_queues: 0,
            cache: DiskCache::Writeback,
            writes_through: false,
            locked: false,
            is_of_this_host: false,
            // Set correctly by `start`.
            has_run: true,
            next_token: 0,
            offer: Arc::default(),
            is_exchanged: Arc::default(),
            counters: Arc::default(),
            state: BlockState::default(),
        })
    }

    /// Returns the tracker of the guest's writes.
    #[cfg(any(test, fuzzing))]
    pub(super) fn tracker(&self) -> Option<&Arc<Tracker>> {
        self.tracker.as_ref()
    }

    /// Returns the view of the disk that a copier uses.
    pub(super) fn source(&self) -> DriveSource {
        let DiskConfig { id, bytes, readonly, .. } = &self.disk;
        let head = DriveHead { id: id.clone(), bytes: *bytes, readonly: *readonly };
        let (tracker, copy_before_write) = (self.tracker.clone(), self.copy_before_write.clone());
        let (flusher, is_exchanged) = (self.current_flusher.clone(), self.is_exchanged.clone());
        DriveSource { head, tracker, copy_before_write, flusher, is_exchanged }
    }

    /// Records that the file was created on this host: no other host has ever written to it.
    pub(super) fn note_created_here(&mut self) {
        self.is_of_this_host = true;
    }

    /// Returns the device's counters.
    pub(super) fn counters(&self) -> &Arc<DiskCounters> {
        &self.counters
    }

    /// Returns the flusher, which makes the disk durable while the guest runs.
    pub(super) fn flusher(&self) -> &CurrentFlusher {
        &self.current_flusher
    }

    /// Returns the disk's identity, which is the same on every host.
    pub(super) fn disk_identity(&self) -> Option<DiskIdentity> {
        self.file.disk_identity()
    }

    /// Returns the identity of the backing file.
    pub(super) fn file_identity(&self) -> io::Result<FileIdentity> {
        self.file.identity()
    }

    /// Starts a request, or completes it immediately.
    fn start_request(
        &mut self,
        queue: usize,
        head: u16,
        request: DiskRequest,
        io: &mut DeviceIo<'_>,
    ) -> Result<(), Violation> {
        let DiskRequest { work, status, data_len } = request;
        let work = match work {
            Ok(work) => work,
            Err(code) => return finish(io, queue, head, &status, 0, code).map(drop),
        };
        self.count(&work);
        let (writes, bytes) = (work.writes(), work.bytes());
        let promise = match &work {
            DiskWork::Flush => DurabilityPromise::Everything,
            _ if self.writes_through && !writes.is_empty() => DurabilityPromise::Itself,
            _ => DurabilityPromise::Nothing,
        };
        let in_flight = RequestInFlight { queue, head, status, data_len, writes, bytes, promise };
        if let DiskWork::Identify(to) = &work {
            let mut id = [0; VIRTIO_BLK_ID_BYTES as usize];
            let serial = self.disk.serial.as_bytes();
            let len = serial.len().min(id.len());
            id[..len].copy_from_slice(&serial[..len]);
            to.write(io.ram, 0, &id)?;
            return self.complete(in_flight, Ok(()), io);
        }
        // This is the only call before a write. It is enough: the device is paused when an epoch
        // begins to copy, so no request is in flight then.
        for (from, bytes) in &in_flight.writes {
            self.copy_before_write.before_write(*from, *bytes);
        }
        let token = self.next_token;
        self.next_token += 1;
        let durable = self.writes_through;
        match self.engine.submit(DiskOperation { token, work, durable }, io.ram) {
            Some(result) => self.complete(in_flight, result, io),
            None => {
                self.bytes_in_flight += in_flight.bytes;
                self.in_flight.insert(token, in_flight);
                Ok(())
            }
        }
    }

    fn count(&self, work: &DiskWork) {
        match work {
            DiskWork::Read { to, .. } => {
                self.counters.reads.add(1);
                self.counters.read_bytes.add(to.len().into());
            }
            DiskWork::Write { from, .. } => {
                self.counters.writes.add(1);
                self.counters.written_bytes.add(from.len().into());
            }
            DiskWork::Flush => self.counters.flushes.add(1),
            DiskWork::Discard(_) | DiskWork::WriteZeroes(_) | DiskWork::Identify(_) => {}
        }
    }

    /// Tells the driver how a request ended.
    fn complete(
        &mut self,
        request: RequestInFlight,
        result: io::Result<()>,
        io: &mut DeviceIo<'_>,
    ) -> Result<(), Violation> {
        for (from, bytes) in request.writes {
            // The mark comes after the write is done and before the driver is told. A copier drains
            // the tree and then reads the file. A write that was done before the drain is in that
            // epoch. A later write is marked after the drain, so the next epoch has it, whatever
            // this epoch's read has returned of it. A paused device has nothing in flight, so
            // everything is marked. A failed write is marked too: part of it may be in the file.
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
        let delivered = finish(io, request.queue, request.head, &request.status, len, code);
        self.file.flusher().note_delivery(&answer, matches!(delivered, Ok(true)));
        delivered.map(drop)
    }

    /// Completes every request that the engine has finished, even if the driver broke a rule
    /// meanwhile: memory and disk have changed in any case.
    fn take_completions(&mut self, io: &mut DeviceIo<'_>) -> Result<(), Violation> {
        let mut all = Ok(());
        for (token, result) in self.engine.completions(io.ram) {
            if let Some(request) = self.in_flight.remove(&token) {
                self.bytes_in_flight -= request.bytes;
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
            // Not reached: requests are bounded by the drive's size.
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
                "disk \"{id}\": a request of the guest fails on {path}: {e}; later failures are \
                 only counted"
            ),
            n => tracing::debug!("disk \"{id}\": failure {n} on {path}: {e}"),
        }
    }

    /// Waits until no request is in flight, or until `deadline`.
    fn drain(
        &mut self,
        deadline: Option<Instant>,
        io: &mut DeviceIo<'_>,
    ) -> Result<(), QuiesceError> {
        let mut all = Ok(());
        while !self.in_flight.is_empty() {
            let in_time = self.engine.wait(deadline);
            all = all.and(self.take_completions(io));
            if !in_time && !self.in_flight.is_empty() {
                return Err(QuiesceError::InFlight(self.in_flight.len()));
            }
        }
        // No completion will bring the device back to these queues.
        for queue in self.take_stalled_queues() {
            if let Some(ring) = io.rings.get_mut(queue) {
                ring.yield_round();
            }
        }
        Ok(all?)
    }

    /// Takes the numbers of the queues whose chains wait until fewer bytes are in flight.
    fn take_stalled_queues(&mut self) -> impl Iterator<Item = usize> + use<> {
        let stalled_queues = std::mem::take(&mut self.stalled_queues);
        (0..MAX_QUEUES.into()).filter(move |queue| stalled_queues & 1 << queue != 0)
    }
}

/// Writes the status byte, then the used ring. Returns whether the driver has a queue in which to
/// see the answer.
fn finish(
    io: &mut DeviceIo<'_>,
    queue: usize,
    head: u16,
    status: &Buffers,
    data_len: u32,
    code: u32,
) -> Result<bool, Violation> {
    status.write(io.ram, 0, &[code as u8])?;
    let Some(ring) = io.rings.get_mut(queue) else { return Ok(false) };
    let delivered = ring.is_set_up();
    ring.push(io.ram, head, data_len + 1).map(|()| delivered)
}
