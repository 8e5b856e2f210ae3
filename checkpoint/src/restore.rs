//! Building a guest from a stored epoch. Every byte it needs is checked before the guest may run.

use std::sync::Arc;
use std::time::Instant;

use dirty_tracker::{FrameRun, Gfn, PAGE_SIZE};
use serde::Serialize;
use vm_memory::{Bytes, GuestAddress, GuestMemoryError};

use crate::store::{Cell, FrameMap, Pinned, Record, Sink, Store, StoreError, fetch};
use crate::{Clock, Guest, GuestError, GuestFactory, GuestRam, Section, VmId};

/// A guest that could not be restored. Nothing runs.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RestoreError {
    /// The store is damaged or does not have the epoch.
    #[error("{0}")]
    Store(#[from] StoreError),
    /// The guest could not be built, or refused its state.
    #[error("epoch {epoch} cannot be restored: {cause}")]
    Guest {
        /// The epoch.
        epoch: u64,
        /// The guest's reason.
        cause: GuestError,
    },
    /// The configuration in the epoch makes another memory than the one that is stored.
    #[error(
        "epoch {epoch} cannot be restored: its configuration makes a guest with memory layout \
         {built:#010x}, its memory has layout {stored:#010x}"
    )]
    Layout {
        /// The epoch.
        epoch: u64,
        /// Hash of the layout that the factory built.
        built: u32,
        /// Hash of the stored layout.
        stored: u32,
    },
    /// The guest's memory could not be written.
    #[error("epoch {epoch} cannot be restored: writing the guest's memory failed: {cause}")]
    Memory {
        /// The epoch.
        epoch: u64,
        /// Memory's answer.
        cause: GuestMemoryError,
    },
}

/// What a restore did.
#[derive(Clone, Copy, PartialEq, Debug, Serialize)]
pub struct RestoreReport {
    /// The epoch restored.
    pub epoch: u64,
    /// Whose it is.
    pub vm_id: VmId,
    /// When it was taken: milliseconds since 1970, by that host's clock.
    pub created_unix_ms: u64,
    /// Epochs whose records say where its frames are: it and those that it was built on.
    pub epochs: u64,
    /// Frames read: those that are not zeros.
    pub frames: u64,
    /// Bytes read.
    pub read_bytes: u64,
    /// How long it took, in milliseconds.
    pub time_ms: f64,
}

/// Builds the guest of `epoch`, or of the latest in the store, with `factory`, and puts memory and
/// state into it. The guest is paused and has acquired nothing: `acquire`, then `resume`.
///
/// Reads each frame that is not zeros once, wherever its epoch came from, on up to four threads. All checksums are compared on
/// the way; at the first that is wrong the guest is thrown away. The epoch is kept in the store for as long as it is read,
/// whoever writes there meanwhile. The latest epoch is the one with the
/// highest number: if that is damaged it is refused, not passed over; ask for another by number.
///
/// Contents go through buffers of 1 MiB that stay in the cache: their checksums have to be computed
/// by reading them once anyway.
pub fn restore<F: GuestFactory>(
    store: &Store,
    epoch: Option<u64>,
    factory: &F,
    clock: Clock,
) -> Result<(Arc<F::Guest>, RestoreReport), RestoreError> {
    let since = Instant::now();
    let mut pinned = store.pin(epoch)?;
    let info = pinned.log.groups[pinned.index].info;
    let epoch = info.epoch;
    let span = tracing::info_span!("restore", epoch);
    let _entered = span.enter();
    tracing::debug!("begin");
    let (guest, sections) = build(&mut pinned, factory, info.vm_id)?;
    let mut report = RestoreReport {
        epoch,
        vm_id: info.vm_id,
        created_unix_ms: info.created_unix_ms,
        epochs: 0,
        frames: 0,
        read_bytes: 0,
        time_ms: 0.0,
    };
    let mut fill = || {
        let mut map = FrameMap::default();
        report.epochs = pinned.read_map(&mut map)?;
        let mut frames: Vec<(Gfn, Cell)> = map.iter().collect();
        drop(map);
        fetch(&pinned.pages, epoch, &mut frames, &Memory { ram: guest.ram(), epoch })?;
        report.frames = frames.len() as u64;
        report.read_bytes = report.frames * PAGE_SIZE + pinned.log.bytes();
        let restored = guest.restore_state(&sections, clock);
        restored.map_err(|cause| RestoreError::Guest { epoch, cause })
    };
    if let Err(e) = fill() {
        guest.stop("it could not be restored");
        tracing::debug!("end: {e}");
        return Err(e);
    }
    report.time_ms = since.elapsed().as_micros() as f64 / 1000.0;
    tracing::info!(epochs = report.epochs, frames = report.frames, ms = report.time_ms, "end");
    Ok((guest, report))
}

/// A guest with zeroed memory, as the epoch's configuration says, and the epoch's state.
fn build<F: GuestFactory>(
    pinned: &mut Pinned,
    factory: &F,
    vm_id: VmId,
) -> Result<(Arc<F::Guest>, Vec<Section>), RestoreError> {
    let mut group = pinned.log.group(pinned.index)?;
    let epoch = group.front.epoch;
    let mut sections = Vec::new();
    while let Some(record) = group.next().map_err(StoreError::from)? {
        if let Record::Section(section) = record {
            sections.push(section);
        }
    }
    let guest = factory
        .create(vm_id, &group.config)
        .map_err(|cause| RestoreError::Guest { epoch, cause })?;
    if *guest.layout() != group.layout {
        let (built, stored) = (guest.layout().hash(), group.layout.hash());
        guest.stop("its memory is not the stored one");
        return Err(RestoreError::Layout { epoch, built, stored });
    }
    Ok((guest, sections))
}

/// Puts frames into a guest's memory, which is zeros where none are.
struct Memory<'g> {
    ram: &'g GuestRam,
    epoch: u64,
}

impl Sink for Memory<'_> {
    type Error = RestoreError;

    fn frames(&self, run: FrameRun, contents: &[u8]) -> Result<(), RestoreError> {
        let epoch = self.epoch;
        let written = self.ram.write_slice(contents, GuestAddress(run.start.gpa()));
        written.map_err(|cause| RestoreError::Memory { epoch, cause })
    }
}
