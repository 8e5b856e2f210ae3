//! Builds a guest from a stored epoch. Every byte is checked before the guest runs or, in a lazy
//! restore, before the guest sees it.

mod drives;
mod error;

use std::sync::Arc;
use std::thread;
use std::time::Instant;

use driftline_dirty_tracker::{FrameRun, Gfn, PAGE_SIZE};
use driftline_format::layout_hash;
use driftline_guest::{
    Clock, GuestContents, GuestError, GuestFactory, GuestIdentity, GuestRam, GuestWithCopies,
    Lifecycle, MemoryLoader, Origin, PageSource, PageSourceError, Populate, Stateful, VmId,
};
use driftline_store::{
    Archive, EpochInfo, FrameLocation, LazyFrames, Machine, MachineState, Pinned, Sink, Store,
    StoreError, place,
};
use parking_lot::Mutex;
use serde::Serialize;
use vm_memory::{Bytes, GuestAddress};

use self::drives::{EpochBlocks, RestoredDrives};
pub use self::error::{DriveRestoreError, RestoreError};

/// Frames read at a time if the guest cannot be restored lazily: 1 MiB.
const READ_FRAMES: u64 = 256;

/// Result of a restore.
#[derive(Clone, Copy, PartialEq, Debug, Serialize)]
pub struct RestoreReport {
    /// The epoch restored.
    #[serde(rename = "checkpoint")]
    pub epoch: u64,
    /// The guest that the checkpoint is of.
    pub vm_id: VmId,
    /// Time at which it was taken: milliseconds since 1970, by that host's clock.
    pub created_unix_ms: u64,
    /// Epochs whose records say where its frames are: itself and those that it builds on.
    #[serde(rename = "read_checkpoints")]
    pub epochs: u64,
    /// Frames that are not zeros, read or still to be fetched.
    pub frames: u64,
    /// How many of these are still to be fetched.
    pub unfetched_frames: u64,
    /// Drives that were overwritten: all that the guest can write to, or none if the epoch has
    /// none.
    pub drives: u32,
    /// Blocks of those drives that are not zeros.
    pub disk_blocks: u64,
    /// Bytes read.
    pub read_bytes: u64,
    /// Duration in milliseconds.
    pub time_ms: f64,
}

impl RestoreReport {
    /// Returns a report of an epoch of which nothing is read yet.
    fn new(info: &EpochInfo) -> Self {
        Self {
            epoch: info.epoch,
            vm_id: info.vm_id,
            created_unix_ms: info.created_unix_ms,
            epochs: 0,
            frames: 0,
            unfetched_frames: 0,
            drives: 0,
            disk_blocks: 0,
            read_bytes: 0,
            time_ms: 0.0,
        }
    }
}

/// Builds the guest of `epoch`, or of the latest one in the store, with `factory`, and restores its
/// memory and state. The guest is paused and has acquired nothing: call `acquire`, then `resume`.
/// If the epoch has drives, the guest's drives here are overwritten last. On return they durably
/// have their content of that epoch. No drive is written before everything stored of the guest has
/// been read and found sound; blocks of drives are read twice for that.
///
/// Reads each frame that is not zeros once, whichever epoch it comes from, on up to four threads.
/// Compares all checksums on the way; at the first mismatch the guest is stopped and discarded. The
/// epoch is pinned in the store while it is read, even if another process writes there. The latest
/// epoch is the one with the highest number. If it is damaged, it is refused, not skipped; ask for
/// another by number.
///
/// Contents go through buffers of 1 MiB that stay in the cache: their checksums require reading
/// them once anyway.
///
/// # Errors
///
/// No guest runs. Only [`RestoreError::Drives`] leaves drives partly overwritten.
pub fn restore<F: GuestFactory>(
    store: &Store,
    epoch: Option<u64>,
    factory: &F,
    clock: Clock,
) -> Result<(Arc<F::Guest>, RestoreReport), RestoreError> {
    restore_as(store, epoch, factory, clock, WholeRestore::new, WholeRestore::fill)
}

/// Like [`restore`], but the guest may run before its memory has arrived, if it and its host
/// support that ([`Populate::fetch_lazily`]). A fault fetches its frame; the others are fetched in
/// the background. Frames are checked when they arrive; a damaged frame ends the guest. The epoch
/// is pinned in the store until all frames have arrived. This function reads where frames are, 16
/// bytes of memory for each, and no frame itself.
///
/// # Errors
///
/// As [`restore`].
pub fn restore_lazily<F: GuestFactory>(
    store: &Store,
    epoch: Option<u64>,
    factory: &F,
    clock: Clock,
) -> Result<(Arc<F::Guest>, RestoreReport), RestoreError> {
    let prepare = |pinned| LazyFrames::new(pinned, store);
    restore_as(store, epoch, factory, clock, prepare, lazily)
}

/// Runs `prepare`, which finds out where frames are and what else is in the epoch, while the
/// machine is built. `fill` then puts the frames into the machine, or arranges for them to be
/// fetched.
fn restore_as<F: GuestFactory, P: Send>(
    store: &Store,
    epoch: Option<u64>,
    factory: &F,
    clock: Clock,
    prepare: impl FnOnce(Pinned) -> Result<(P, MachineState), StoreError> + Send,
    fill: impl FnOnce(P, &F::Guest, &mut RestoreReport) -> Result<(), RestoreError>,
) -> Result<(Arc<F::Guest>, RestoreReport), RestoreError> {
    let since = Instant::now();
    let mut pinned = store.pin(epoch)?;
    let info = *pinned.info();
    let epoch = info.epoch;
    let span = tracing::info_span!("restore", epoch);
    let _entered = span.enter();
    tracing::debug!("begin");
    let machine = pinned.read_machine()?;
    let blocks = match machine.drives.is_empty() {
        true => None,
        false => Some(EpochBlocks::new(store.pin(Some(epoch))?)?),
    };
    let (prepared, guest) = thread::scope(|scope| {
        let beside = thread::Builder::new().name("restore-map".into());
        let beside = beside.spawn_scoped(scope, || prepare(pinned)).map_err(|cause| {
            let (what, path) = ("starting a thread that reads", store.location().to_owned());
            StoreError::Io { what, path, cause }
        })?;
        let guest = build(factory, &info.origin(), &machine);
        let prepared = beside.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
        Ok::<_, StoreError>((prepared, guest))
    })?;
    let (guest, drives) = guest?;
    let drives = RestoredDrives { epoch, heads: &machine.drives, drives };
    let mut report =
        RestoreReport { drives: drives.heads.len() as u32, ..RestoreReport::new(&info) };
    let filled = prepared.map_err(RestoreError::from).and_then(|(prepared, mapped)| {
        report.epochs = mapped.epochs;
        fill(prepared, &guest, &mut report)?;
        let restored = guest.restore_state(&mapped.sections, clock);
        restored.map_err(|cause| lost(&*guest, epoch, cause))?;
        // The drives' old content is lost from here on, so this comes as late as possible.
        let Some(blocks) = blocks else { return Ok(()) };
        report.disk_blocks = blocks.count();
        report.read_bytes += report.disk_blocks * PAGE_SIZE;
        drives.fill(blocks)
    });
    finish(filled, guest, report, since)
}

/// Like [`restore`], from an archive: the guest has all of its memory on return. Unpacks on up to
/// eight threads, each with 5 MiB. Apart from that, only the archive's state and the list of its
/// drives' blocks are in memory. Compares all checksums on the way, including those of the frames.
/// The drives are written as in [`restore`], after the whole archive has been found sound: their
/// blocks are unpacked twice.
///
/// # Errors
///
/// As [`restore`].
pub fn restore_archive<F: GuestFactory>(
    archive: &Archive,
    factory: &F,
    clock: Clock,
) -> Result<(Arc<F::Guest>, RestoreReport), RestoreError> {
    let since = Instant::now();
    let (info, machine) = (archive.info(), archive.machine());
    let epoch = info.epoch;
    let span = tracing::info_span!("restore", epoch);
    let _entered = span.enter();
    tracing::debug!("begin");
    let (guest, drives) = build(factory, &info.origin(), machine)?;
    let drives = RestoredDrives { epoch, heads: &machine.drives, drives };
    let mut report = RestoreReport {
        epochs: 1,
        drives: info.drives,
        read_bytes: info.bytes,
        ..RestoreReport::new(info)
    };
    let blocks = Mutex::default();
    let first = ArchiveSink { memory: MemorySink::of(&*guest, epoch), blocks: &blocks };
    let read = archive.read(&first, 0);
    // From here on the guest's memory may be accessed.
    drop(first);
    let filled = read.and_then(|()| {
        let restored = guest.restore_state(archive.sections(), clock);
        restored.map_err(|cause| RestoreError::Guest { epoch, cause })?;
        let runs: Vec<FrameRun> = std::mem::take(&mut blocks.lock());
        let blocks = EpochBlocks::Archived(archive, runs.into_iter().collect());
        (report.disk_blocks, report.frames) = (blocks.count(), info.frames - blocks.count());
        if info.drives == 0 { Ok(()) } else { drives.fill(blocks) }
    });
    finish(filled, guest, report, since)
}

/// Returns the guest if it was `filled`; otherwise stops it and returns the error.
fn finish<G: Lifecycle + ?Sized>(
    filled: Result<(), RestoreError>,
    guest: Arc<G>,
    mut report: RestoreReport,
    since: Instant,
) -> Result<(Arc<G>, RestoreReport), RestoreError> {
    if let Err(e) = filled {
        guest.stop("it could not be restored");
        tracing::debug!("end: {e}");
        return Err(e);
    }
    report.time_ms = since.elapsed().as_micros() as f64 / 1000.0;
    tracing::info!(checkpoints = report.epochs, frames = report.frames, ms = report.time_ms, "end");
    Ok((guest, report))
}

/// Returns why a guest that is being restored refuses a request: a frame that cannot be read, if
/// there is one, or else `cause`.
fn lost<G: Populate + ?Sized>(guest: &G, epoch: u64, cause: GuestError) -> RestoreError {
    match guest.fetching().and_then(|fetching| fetching.lost) {
        Some(why) => RestoreError::Lost { epoch, cause: PageSourceError::new(why) },
        None => RestoreError::Guest { epoch, cause },
    }
}

/// All frames of an epoch, to be put into place.
struct WholeRestore {
    pinned: Pinned,
    frames: Vec<(Gfn, FrameLocation)>,
}

impl WholeRestore {
    fn new(mut pinned: Pinned) -> Result<(Self, MachineState), StoreError> {
        let (frames, mapped) = pinned.read_locations()?;
        Ok((Self { pinned, frames }, mapped))
    }

    fn fill<G: GuestContents + Populate + ?Sized>(
        mut self,
        guest: &G,
        report: &mut RestoreReport,
    ) -> Result<(), RestoreError> {
        let memory = MemorySink::of(guest, report.epoch);
        self.pinned.fetch(&mut self.frames, &memory).map_err(|e: RestoreError| match e {
            RestoreError::Store(e) => self.pinned.name_origin(e).into(),
            other => other,
        })?;
        report.frames = self.frames.len() as u64;
        report.read_bytes = report.frames * PAGE_SIZE + self.pinned.log_bytes();
        Ok(())
    }
}

/// Starts a lazy restore, or reads all frames now if the guest does not support that.
fn lazily<G: GuestContents + Populate + ?Sized>(
    frames: LazyFrames,
    guest: &G,
    report: &mut RestoreReport,
) -> Result<(), RestoreError> {
    let epoch = report.epoch;
    report.frames = frames.frames().frames();
    report.read_bytes = frames.log_bytes();
    let begun = guest.fetch_lazily(Box::new(frames));
    let Some(mut source) = begun.map_err(|cause| RestoreError::Guest { epoch, cause })? else {
        report.unfetched_frames = report.frames;
        return Ok(());
    };
    let mut buffer = vec![0; (READ_FRAMES * PAGE_SIZE) as usize];
    let memory = MemorySink::of(guest, epoch);
    let frames = source.frames().clone();
    for run in frames.iter().flat_map(|run| run.chunks(READ_FRAMES)) {
        let contents = &mut buffer[..run.bytes() as usize];
        source.read(run, contents).map_err(|e| unread(epoch, e))?;
        memory.frames(run, contents)?;
    }
    report.read_bytes += report.frames * PAGE_SIZE;
    Ok(())
}

/// Returns why a frame cannot be read: the store's error, if the store is the source.
fn unread(epoch: u64, e: PageSourceError) -> RestoreError {
    match e.downcast::<StoreError>() {
        Ok(e) => e.into(),
        Err(cause) => RestoreError::Lost { epoch, cause },
    }
}

/// Builds a guest with zeroed memory by the epoch's configuration, with its drives as they are, if
/// the epoch has any.
fn build<F: GuestFactory>(
    factory: &F,
    from: &Origin,
    machine: &Machine,
) -> Result<GuestWithCopies<F::Guest>, RestoreError> {
    let epoch = from.epoch;
    let built = factory.create_with_drives(from, &machine.config, &machine.drives);
    let (guest, drives) = built.map_err(|cause| RestoreError::Guest { epoch, cause })?;
    if *guest.layout() != machine.layout {
        let (built, stored) = (layout_hash(guest.layout()), layout_hash(&machine.layout));
        guest.stop("its memory is not the stored one");
        return Err(RestoreError::Layout { epoch, built, stored });
    }
    Ok((guest, drives))
}

/// Puts an archive's frames into a guest's memory, and records which blocks of drives the archive
/// has.
struct ArchiveSink<'g> {
    memory: MemorySink<'g>,
    blocks: &'g Mutex<Vec<FrameRun>>,
}

impl Sink for ArchiveSink<'_> {
    type Error = RestoreError;

    fn frames(&self, run: FrameRun, contents: &[u8]) -> Result<(), RestoreError> {
        if place(run.start).0 == 0 {
            return self.memory.frames(run, contents);
        }
        let mut blocks = self.blocks.lock();
        match blocks.last_mut().filter(|last| last.end() == run.start) {
            Some(last) => last.count += run.count,
            None => blocks.push(run),
        }
        Ok(())
    }
}

/// Puts frames into a guest's memory, which is zeros otherwise.
struct MemorySink<'g> {
    ram: &'g GuestRam,
    fill: Option<Box<dyn MemoryLoader>>,
    epoch: u64,
}

impl<'g> MemorySink<'g> {
    /// Returns a sink for a guest whose memory nothing accesses until the sink is dropped.
    fn of<G: GuestContents + Populate + ?Sized>(guest: &'g G, epoch: u64) -> Self {
        Self { ram: guest.ram(), fill: guest.memory_loader(), epoch }
    }
}

impl Sink for MemorySink<'_> {
    type Error = RestoreError;

    /// Returns true if this host has room for the frames twice, in memory and in its page cache:
    /// frames that are read ahead must still be cached when their turn comes.
    fn in_order(&self, frames: u64) -> bool {
        let needed = frames.saturating_mul(2 * PAGE_SIZE);
        self.fill.as_ref().is_some_and(|fill| needed <= fill.available())
    }

    fn frames(&self, run: FrameRun, contents: &[u8]) -> Result<(), RestoreError> {
        let epoch = self.epoch;
        if let Some(fill) = &self.fill {
            let filled = fill.fill(run, contents);
            return filled.map_err(|cause| RestoreError::Guest { epoch, cause });
        }
        let written = self.ram.write_slice(contents, GuestAddress(run.start.gpa()));
        written.map_err(|cause| RestoreError::Memory { epoch, cause })
    }
}
